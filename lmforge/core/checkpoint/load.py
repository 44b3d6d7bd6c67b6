"""Loading a checkpoint into existing tensors, on any number of ranks and under any strategy.

Each rank reads only what it needs, and verifies it as it reads (storage.py). Metadata is unpickled
safely (safe_reader.py).
"""

import warnings
from pathlib import Path

from lmforge.core.checkpoint.async_save import StateDict
from lmforge.core.checkpoint.safe_reader import METADATA_FILE, SafeReader, flatten_names
from lmforge.core.checkpoint.storage import VerifyingFileSystem
from lmforge.core.errors import UserError
from lmforge.core.records.manifests import CorruptCheckpoint, read_manifest

# A single process saves and loads without process groups on purpose; torch warns about this each
# time.
warnings.filterwarnings(
    "ignore", message="torch.distributed is disabled, unavailable or uninitialized"
)


def load(folder: Path, state: StateDict) -> None:
    """Fill the tensors of `state` (as in `AsyncCheckpointer.save`; "optimizer" may be left out) in
    place.

    Any strategy may have written them. Ranks do not communicate: each reads its own parts. Raises
    CorruptCheckpoint where a file does not hold what was written, and UserError where a tensor is
    missing or has another shape; tensors may then be half-filled.
    """
    reader = open_reader(folder)
    stored = reader.tensors
    for name, tensor in flatten_names(state).items():
        if name not in stored:
            of_optimizer = name.startswith("optimizer.")
            reason = (
                "it was saved with other optimizer options"
                if of_optimizer
                else "the model is of another shape"
            )
            raise UserError(f"{folder}: it has no tensor {name}; {reason}")
        size = list(stored[name].shape)
        expected = list(tensor.shape)
        if size != expected:
            raise UserError(
                f"{folder}: {name} is {size} there and {expected} here; the model is of another"
                " shape"
            )
    reader.load(state)


def open_reader(folder: Path) -> SafeReader:
    """A reader that verifies the files of our checkpoint.

    Raises CorruptCheckpoint, or UserError for other objects in it.
    """
    reader = SafeReader(folder, VerifyingFileSystem(read_manifest(folder).files), CorruptCheckpoint)
    if len(reader.tensors) < len(reader.metadata.state_dict_metadata):
        raise UserError(
            f"{folder / METADATA_FILE}: holds pickled objects; a checkpoint of lmforge has tensors"
            " only"
        )
    return reader
