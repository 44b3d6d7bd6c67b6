"""Tensors in checkpoints of PyTorch, by name and one at a time: a Distributed Checkpoint folder, or a file of torch.save.

For whoever wants some of a checkpoint's tensors, whole, in a single process: exporting ours, importing others'. Both
formats can hold objects beside the tensors; these are passed over, and nothing that is stored is executed.
"""

import io
import pickle
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Protocol

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata

from lmforge.errors import UserError

# What torch and the standard library raise over a file that does not hold what it should.
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


class TensorSource(Protocol):
    """Tensors by name: their shapes and dtypes (on the meta device), and each of them when it is asked for.

    Of a file, `beside` is what it holds that is no tensor: numbers, texts, and lists and tables of them.
    """

    tensors: dict[str, Tensor]
    non_tensors: dict[str, Any]

    def read(self, name: str) -> Tensor:
        """The whole of a tensor, on the CPU, in the dtype in which it is stored."""


def open_tensor_source(path: Path) -> TensorSource:
    """Open a folder with a .metadata file, or a file of torch.save. Raises UserError where it is neither."""
    if (path / ".metadata").is_file():
        return DCPFolder(path)
    if path.is_file():
        return _open_torch_save(path)
    what = "no such file or folder" if not path.exists() else "holds no .metadata, so it is not a Distributed Checkpoint"
    raise UserError(f"{path}: {what}; give a checkpoint's folder or file")


class DCPFolder:
    """A PyTorch Distributed Checkpoint (DCP), whatever number of ranks wrote it. Its metadata is read once.

    Raises UserError where the metadata cannot be read, or asks for anything but descriptions of tensors.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._reader = _SafeDCPReader(folder)
        described = self._reader.metadata.state_dict_metadata
        self.tensors = {
            name: torch.empty(found.size, dtype=found.properties.dtype, device="meta")
            for name, found in described.items()
            if isinstance(found, TensorStorageMetadata)
        }
        self.non_tensors: dict[str, Any] = {}

    def read(self, name: str) -> Tensor:
        value = torch.empty_like(self.tensors[name], device="cpu")
        try:
            with torch.no_grad():
                dcp.load({name: value}, storage_reader=self._reader, no_dist=True)
        except (*_READ_ERRORS, CheckpointException) as problem:
            reason = str(problem).strip().splitlines()[-1] if str(problem).strip() else type(problem).__name__
            raise UserError(f"{self._folder}: {name} cannot be read ({reason}); copy the checkpoint again") from None
        return value


class _SafeDCPReader(dcp.FileSystemReader):
    """PyTorch's reader, less its trust: DCP pickles its metadata, and a pickle can run anything."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        path = folder / ".metadata"
        self.metadata = read_dcp_metadata(path.read_bytes(), path)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self.metadata


def read_dcp_metadata(content: bytes, path: Path) -> Metadata:
    """What a .metadata file, found at `path`, says. Raises UserError where it says anything but where which tensor lies."""
    try:
        metadata: Metadata = _MetadataUnpickler(io.BytesIO(content)).load()
        places = {str(info.relative_path) for info in metadata.storage_data.values()}
    except (pickle.UnpicklingError, EOFError, AttributeError, ImportError, IndexError, TypeError, ValueError) as problem:
        raise UserError(f"{path}: cannot be read as checkpoint metadata: {problem}") from None
    if away := sorted(place for place in places if Path(place).name != place):
        raise UserError(f"{path}: says that tensors lie in {away[0]}, outside of the checkpoint")
    if getattr(metadata, "storage_meta", None) is None:
        metadata.storage_meta = StorageMeta()
    return metadata


class _MetadataUnpickler(pickle.Unpickler):
    """Builds the dataclasses that describe what is stored, and nothing else."""

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


@dataclass
class _TorchSaveFile:
    """The tensors of a file of torch.save, mapped into memory rather than read."""

    mapped_tensors: dict[str, Tensor]
    non_tensors: dict[str, Any]
    tensors: dict[str, Tensor] = field(init=False)

    def __post_init__(self) -> None:
        self.tensors = {name: value.to("meta") for name, value in self.mapped_tensors.items()}

    def read(self, name: str) -> Tensor:
        return self.mapped_tensors[name]


def _open_torch_save(path: Path) -> _TorchSaveFile:
    try:
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except pickle.UnpicklingError as problem:
        raise UserError(f"{path}: {_explain_unpickling_error(str(problem))}") from None
    except _READ_ERRORS:
        raise UserError(f"{path}: damaged or not a file of torch.save; copy it again") from None
    if not isinstance(content, Mapping):
        raise UserError(f"{path}: holds a {type(content).__name__} instead of tensors by name")
    everything = flatten_names(content)
    values = {name: value for name, value in everything.items() if isinstance(value, Tensor)}
    return _TorchSaveFile(values, {name: value for name, value in everything.items() if name not in values})


def _explain_unpickling_error(problem: str) -> str:
    asked = [word for word in problem.replace("`", " ").split() if "." in word and word[0].isalpha() and not word.endswith(".")]
    what = f" ({asked[0]})" if "GLOBAL" in problem and asked else ""
    return f"holds more than tensors and numbers{what}, which would have to be executed to be opened; save its state alone"


def flatten_names(content: Mapping[Any, Any], prefix: str = "") -> dict[str, Any]:
    """Nested tables as one, under names joined by dots."""
    found: dict[str, Any] = {}
    for name, value in content.items():
        if isinstance(value, Mapping):
            found |= flatten_names(value, f"{prefix}{name}.")
        else:
            found[f"{prefix}{name}"] = value
    return found
