"""Reading a checkpoint into tensors that are there, on whatever ranks and in whatever parts.

Each rank reads only what it needs, and checks it as it reads. PyTorch's metadata is unpickled by a reader that builds
its dataclasses and nothing else.
"""

import warnings
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, TensorStorageMetadata

from lmforge.checkpoint.async_save import StateDict
from lmforge.checkpoint.checksums import CorruptCheckpoint, VerifyingFileSystem
from lmforge.checkpoint.manifest import read_manifest
from lmforge.errors import UserError
from lmforge.interop.tensor_sources import flatten_names, read_dcp_metadata

# A single process saves and loads without process groups on purpose; torch warns each time that it assumes so.
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")


def load(folder: Path, state: StateDict) -> None:
    """Fill the tensors of `state` (as in `Saver.save`; "optimizer" may be left out) in place, whatever ranks wrote them.

    Nothing is sent between ranks: each reads its own parts. Raises CorruptCheckpoint where what is read is not what was written,
    and UserError where a tensor is missing or has another shape; tensors may then be half-filled.
    """
    reader = CheckpointReader(folder)
    _check_shapes(folder, state, reader.read_metadata().state_dict_metadata)
    read_tensors(state, reader)


def read_tensors(state: StateDict, reader: "CheckpointReader") -> None:
    """As `load`, of tensors that are known to be stored so."""
    try:
        with torch.no_grad():
            dcp.load(state, storage_reader=reader, no_dist=True)
    except CheckpointException as failed:
        for problem in failed.failures.values():
            cause = problem[0] if isinstance(problem, tuple) else problem
            if isinstance(cause, CorruptCheckpoint | UserError | OSError):
                raise cause from None
        raise


def _check_shapes(folder: Path, state: StateDict, stored: Mapping[str, Any]) -> None:
    for name, tensor in flatten_names(state).items():
        if name not in stored:
            of_optimizer = name.startswith("optimizer.")
            reason = "it was saved with other optimizer options" if of_optimizer else "the model is of another shape"
            raise UserError(f"{folder}: it has no tensor {name}; {reason}")
        described = stored[name]
        assert isinstance(described, TensorStorageMetadata)  # the reader refuses anything else
        size = described.size
        if tuple(size) != tuple(tensor.shape):
            raise UserError(
                f"{folder}: {name} is {list(size)} there and {list(tensor.shape)} here; the model is of another shape"
            )


class CheckpointReader(dcp.FileSystemReader):
    """PyTorch's reader, less its trust: it checks what it reads, and DCP pickles its metadata, which can run anything."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder.name)
        self.path = folder
        self.fs = VerifyingFileSystem(read_manifest(folder).files)  # type: ignore[assignment]

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._metadata

    @cached_property
    def _metadata(self) -> Metadata:
        path = self.path / ".metadata"  # type: ignore[operator]
        with self.fs.create_stream(path, "rb") as file:
            metadata = read_dcp_metadata(file.read(), path)
        if any(isinstance(stored, BytesStorageMetadata) for stored in metadata.state_dict_metadata.values()):
            raise UserError(f"{path}: holds pickled objects; a checkpoint of lmforge has tensors only")
        return metadata
