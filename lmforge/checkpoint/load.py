"""Loading a checkpoint into existing tensors, on any number of ranks and under any strategy.

Each rank reads only what it needs, and verifies it as it reads (storage.py). Metadata is unpickled safely
(interop/torch_checkpoints.py).
"""

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from lmforge.checkpoint.async_save import StateDict
from lmforge.checkpoint.manifest import read_manifest
from lmforge.checkpoint.storage import VerifyingFileSystem
from lmforge.errors import UserError
from lmforge.interop.torch_checkpoints import METADATA_FILE, SafeReader, flatten_names, load_tensors

# A single process saves and loads without process groups on purpose; torch warns each time that it assumes so.
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")


def load(folder: Path, state: StateDict) -> None:
    """Fill the tensors of `state` (as in `AsyncCheckpointer.save`; "optimizer" may be left out) in place.

    Any strategy may have written them. Nothing is sent between ranks: each reads its own parts. Raises CorruptCheckpoint where
    a file does not hold what was written, and UserError where a tensor is missing or has another shape; tensors may then be
    half-filled.
    """
    reader = open_checkpoint_reader(folder)
    _check_shapes(folder, state, reader.metadata.state_dict_metadata)
    load_tensors(state, reader)


def open_checkpoint_reader(folder: Path) -> SafeReader:
    """A reader that verifies the files of our checkpoint. Raises CorruptCheckpoint, or UserError for other objects in it."""
    reader = SafeReader(folder, VerifyingFileSystem(read_manifest(folder).files))
    if not all(isinstance(stored, TensorStorageMetadata) for stored in reader.metadata.state_dict_metadata.values()):
        raise UserError(f"{folder / METADATA_FILE}: holds pickled objects; a checkpoint of lmforge has tensors only")
    return reader


def _check_shapes(folder: Path, state: StateDict, stored: Mapping[str, Any]) -> None:
    for name, tensor in flatten_names(state).items():
        if name not in stored:
            of_optimizer = name.startswith("optimizer.")
            reason = "it was saved with other optimizer options" if of_optimizer else "the model is of another shape"
            raise UserError(f"{folder}: it has no tensor {name}; {reason}")
        size = stored[name].size
        if tuple(size) != tuple(tensor.shape):
            raise UserError(
                f"{folder}: {name} is {list(size)} there and {list(tensor.shape)} here; the model is of another shape"
            )
