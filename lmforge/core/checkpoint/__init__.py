"""Checkpoints of a run: saved in the background, verified as they are loaded, and deleted by a
retention policy.

Tensors are PyTorch Distributed Checkpoint (DCP) files under their Hugging Face names, so that any
number of ranks, any strategy, or a single process loads them. `manifest.json` has everything else:
model config, recipe, step, position in the data, and the size and checksums of every file. Nothing
here unpickles code.

What keeps a half-written checkpoint from being loaded:

1. A save writes to a folder with another name, `step-00000100.partial`. Every file is fsynced. The
   manifest is written last, and then the folder is renamed to `step-00000100`. A crash before the
   rename leaves only a `.partial` folder, which no run resumes from and which the next save
   deletes. (An object store cannot rename: there a folder without manifest is not a checkpoint.)
2. Before a checkpoint is opened, `verify` compares the existence and size of every file with the
   manifest, and the manifest with its own checksum. Where that fails, the next older checkpoint is
   used, and a line says so.
3. Every block of 4 MiB is verified against its checksum as it is read (storage.py), so a damaged
   tensor is never used.

Begin with manifest.py, then async_save.py (save) and load.py; hf/stored_model.py reads the weights
of a model. Which checkpoints a run makes, and when, is decided in core/steps/checkpoints.py. The
names below are for other packages.
"""

# ruff: noqa: F401 - nothing here is used in this file
from lmforge.core.checkpoint.async_save import AsyncCheckpointer, RetentionPolicy, StateDict
from lmforge.core.checkpoint.load import load
from lmforge.core.checkpoint.manifest import (
    candidates,
    get_rng_state,
    open_checkpoint,
    set_rng_state,
    verify,
)
from lmforge.core.checkpoint.storage import check_writable
from lmforge.core.records.manifests import CorruptCheckpoint, Manifest, read_manifest
