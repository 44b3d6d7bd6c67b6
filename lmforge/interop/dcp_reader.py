"""PyTorch's Distributed Checkpoints (DCP), read without trust in what is stored.

DCP pickles its metadata, and a pickle can run anything: here it is unpickled by a reader that builds the dataclasses which
describe tensors, and nothing else. Checkpoints of ours (checkpoint/load.py) and of others (tensor_sources.py) are read so.
"""

import io
import pickle
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemBase
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

from lmforge.errors import UserError

METADATA_FILE = ".metadata"
MAX_METADATA_BYTES = 2**30


class SafeReader(dcp.FileSystemReader):
    """PyTorch's reader for the checkpoint in `folder`, with metadata that is read once and safely.

    file_system: opens its files; by default they are those of a local folder.
    """

    def __init__(self, folder: Path, file_system: FileSystemBase | None = None) -> None:
        super().__init__(folder.name)
        self.path = folder
        self.fs = file_system or self.fs  # type: ignore[assignment]

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self.metadata

    @cached_property
    def metadata(self) -> Metadata:
        """Where each tensor lies. Raises UserError where the metadata is damaged, or holds anything else."""
        path = self.path / METADATA_FILE  # type: ignore[operator]
        with self.fs.create_stream(path, "rb") as file:
            content = file.read(MAX_METADATA_BYTES + 1)
        if len(content) > MAX_METADATA_BYTES:
            raise UserError(f"{path}: larger than {MAX_METADATA_BYTES:,} bytes, which no checkpoint metadata is")
        return _parse_metadata(content, path)


def load_tensors(state: dict[str, Any], reader: SafeReader) -> None:
    """Fill the tensors of `state` in place, without communication. Raises the first error itself, not PyTorch's wrapper."""
    try:
        with torch.no_grad():
            dcp.load(state, storage_reader=reader, no_dist=True)
    except CheckpointException as failed:
        for failure in failed.failures.values():
            cause = failure[0] if isinstance(failure, tuple) else failure
            if isinstance(cause, Exception):
                raise cause from None
        raise


def _parse_metadata(content: bytes, path: Path) -> Metadata:
    try:
        metadata: Metadata = _MetadataUnpickler(io.BytesIO(content)).load()
        files = {str(info.relative_path) for info in metadata.storage_data.values()}
    except (pickle.UnpicklingError, EOFError, AttributeError, ImportError, IndexError, TypeError, ValueError) as problem:
        raise UserError(f"{path}: cannot be read as checkpoint metadata: {problem}") from None
    if outside := sorted(name for name in files if Path(name).name != name):
        raise UserError(f"{path}: says that tensors lie in {outside[0]}, outside of the checkpoint")
    if getattr(metadata, "storage_meta", None) is None:
        metadata.storage_meta = StorageMeta()
    return metadata


class _MetadataUnpickler(pickle.Unpickler):
    """Builds the dataclasses that describe stored tensors, and nothing else."""

    ALLOWED: ClassVar = {
        "torch.distributed.checkpoint.metadata": {
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "Metadata",
            "MetadataIndex",
            "StorageMeta",
            "TensorProperties",
            "TensorStorageMetadata",
            "_MEM_FORMAT_ENCODING",
        },
        "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
        "torch": {"Size", "float32", "float64", "bfloat16", "float16", "int64", "int32", "int16", "int8", "uint8", "bool"},
        "torch.serialization": {"_get_layout"},
        "pathlib": {"Path", "PosixPath", "PurePosixPath"},
        "collections": {"OrderedDict"},
        "datetime": {"timedelta"},
    }

    def find_class(self, module: str, name: str) -> Any:
        if name not in self.ALLOWED.get(module, ()):
            raise pickle.UnpicklingError(f"it asks for {module}.{name}")
        return super().find_class(module, name)
