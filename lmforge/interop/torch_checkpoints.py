"""PyTorch's checkpoints, Distributed Checkpoint (DCP) folders and torch.save files, read without trusting their content. DCP
pickles its metadata, and a pickle can run any code. Here an unpickler builds only the dataclasses that describe tensors. Our
own checkpoints are read in the same way (checkpoint/load.py). `open_tensor_source` opens those of other trainers, in a single
process: their tensors by name and one at a time. Both formats can hold objects beside the tensors; these are skipped, and
nothing that is stored is executed.
"""

import io
import pickle
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum, EnumType
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO, ClassVar, cast

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemBase
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata

from lmforge.errors import UserError
from lmforge.untrusted import read_stream

METADATA_FILE = ".metadata"
MAX_METADATA_BYTES = 2**30
# The exceptions that torch and the standard library raise for a damaged file.
_READ_ERRORS = (
    OSError,
    RuntimeError,
    EOFError,
    ValueError,
    KeyError,
    AttributeError,
    pickle.UnpicklingError,
    zipfile.BadZipFile,
)


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
            content = read_stream(cast(BinaryIO, file), str(path), MAX_METADATA_BYTES)
        try:
            metadata: Metadata = _MetadataUnpickler(io.BytesIO(content)).load()
            files = {str(info.relative_path) for info in metadata.storage_data.values()}
        except (pickle.UnpicklingError, EOFError, AttributeError, ImportError, IndexError, TypeError, ValueError) as problem:
            raise UserError(f"{path}: cannot be read as checkpoint metadata: {problem}") from None
        if outside := sorted(name for name in files if Path(name).name != name):
            raise UserError(f"{path}: says that tensors are in {outside[0]}, outside of the checkpoint")
        if getattr(metadata, "storage_meta", None) is None:
            metadata.storage_meta = StorageMeta()
        return metadata

    def meta_tensors(self) -> dict[str, Tensor]:
        """The stored tensors by name, on the meta device; other objects are left out."""
        return {
            name: torch.empty(stored.size, dtype=stored.properties.dtype, device="meta")
            for name, stored in self.metadata.state_dict_metadata.items()
            if isinstance(stored, TensorStorageMetadata)
        }


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
        if (module, name) == ("builtins", "getattr"):  # how Python 3.11.0 to 3.11.3 pickles a member of an enum
            return _enum_member
        if name not in self.ALLOWED.get(module, ()):
            raise pickle.UnpicklingError(f"it asks for {module}.{name}")
        return super().find_class(module, name)


@dataclass(frozen=True)
class TensorSource:
    """Tensors by name: on the meta device for their shapes and dtypes, and each one's value by `read`.

    read: returns the full tensor of a name, on the CPU, in its stored dtype.
    non_tensors: what else a file holds: numbers, texts, and lists and tables of them.
    """

    tensors: dict[str, Tensor]
    read: Callable[[str], Tensor]
    non_tensors: dict[str, Any]


def open_tensor_source(path: Path) -> TensorSource:
    """Open a folder with a .metadata file, or a file of torch.save. Raises UserError where it is neither."""
    if (path / METADATA_FILE).is_file():
        return _open_dcp(path)
    if path.is_file():
        return _open_torch_save(path)
    what = "no such file or folder" if not path.exists() else "holds no .metadata, so it is not a Distributed Checkpoint"
    raise UserError(f"{path}: {what}; give a checkpoint's folder or file")


def _open_dcp(folder: Path) -> TensorSource:
    reader = SafeReader(folder)
    tensors = reader.meta_tensors()

    def read(name: str) -> Tensor:
        value = torch.empty_like(tensors[name], device="cpu")
        try:
            load_tensors({name: value}, reader)
        except (*_READ_ERRORS, CheckpointException) as problem:
            reason = str(problem).strip().splitlines()[-1] if str(problem).strip() else type(problem).__name__
            raise UserError(f"{folder}: {name} cannot be read ({reason}); copy the checkpoint again") from None
        return value

    return TensorSource(tensors, read, {})


def _open_torch_save(path: Path) -> TensorSource:
    try:
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except pickle.UnpicklingError as problem:
        raise UserError(f"{path}: {_explain_unpickling_error(str(problem))}") from None
    except _READ_ERRORS:
        raise UserError(f"{path}: damaged or not a file of torch.save; copy it again") from None
    if not isinstance(content, Mapping):
        raise UserError(f"{path}: holds a {type(content).__name__} instead of tensors by name")
    flat = flatten_names(content)
    values = {name: value for name, value in flat.items() if isinstance(value, Tensor)}
    tensors = {name: value.to("meta") for name, value in values.items()}
    return TensorSource(tensors, values.__getitem__, {name: value for name, value in flat.items() if name not in values})


def _explain_unpickling_error(problem: str) -> str:
    words = [word for word in problem.replace("`", " ").split() if "." in word and word[0].isalpha() and not word.endswith(".")]
    what = f" ({words[0]})" if "GLOBAL" in problem and words else ""
    return f"holds more than tensors and numbers{what}, which would have to be executed to be opened; save its state alone"


def flatten_names(content: Mapping[Any, Any], prefix: str = "") -> dict[str, Any]:
    """Nested tables as one, with names joined by dots."""
    flat: dict[str, Any] = {}
    for name, value in content.items():
        if isinstance(value, Mapping):
            flat |= flatten_names(value, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = value
    return flat


def _enum_member(enum: object, name: object) -> Enum:
    if not (isinstance(enum, EnumType) and isinstance(name, str) and name in enum.__members__):
        raise pickle.UnpicklingError(f"it asks for the attribute {name} of {enum}")
    member: Enum = enum.__members__[name]
    return member
