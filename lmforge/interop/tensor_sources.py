"""Full tensors of PyTorch checkpoints, by name and one at a time: of a Distributed Checkpoint folder, or a torch.save file.

Used in a single process, to import other trainers' checkpoints. Both formats can hold objects beside the tensors; these are
skipped, and nothing that is stored is executed.
"""

import pickle
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from lmforge.errors import UserError
from lmforge.interop.dcp_reader import METADATA_FILE, SafeReader, load_tensors

# What torch and the standard library raise over a damaged file.
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
    """Tensors by name: on the meta device for their shapes and dtypes, and each one's value by `read`.

    `non_tensors` is what else a file holds: numbers, texts, and lists and tables of them.
    """

    tensors: dict[str, Tensor]
    non_tensors: dict[str, Any]

    def read(self, name: str) -> Tensor:
        """The full tensor, on the CPU, in its stored dtype."""


def open_tensor_source(path: Path) -> TensorSource:
    """Open a folder with a .metadata file, or a file of torch.save. Raises UserError where it is neither."""
    if (path / METADATA_FILE).is_file():
        return DCPFolder(path)
    if path.is_file():
        return _open_torch_save(path)
    what = "no such file or folder" if not path.exists() else "holds no .metadata, so it is not a Distributed Checkpoint"
    raise UserError(f"{path}: {what}; give a checkpoint's folder or file")


class DCPFolder:
    """A PyTorch Distributed Checkpoint (DCP), whatever number of ranks wrote it. Raises UserError for damaged metadata."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._reader = SafeReader(folder)
        self.tensors = {
            name: torch.empty(stored.size, dtype=stored.properties.dtype, device="meta")
            for name, stored in self._reader.metadata.state_dict_metadata.items()
            if isinstance(stored, TensorStorageMetadata)
        }
        self.non_tensors: dict[str, Any] = {}

    def read(self, name: str) -> Tensor:
        value = torch.empty_like(self.tensors[name], device="cpu")
        try:
            load_tensors({name: value}, self._reader)
        except (*_READ_ERRORS, CheckpointException) as problem:
            reason = str(problem).strip().splitlines()[-1] if str(problem).strip() else type(problem).__name__
            raise UserError(f"{self._folder}: {name} cannot be read ({reason}); copy the checkpoint again") from None
        return value


@dataclass
class _TorchSaveFile:
    """The tensors of a torch.save file, mapped into memory."""

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
    flat = flatten_names(content)
    values = {name: value for name, value in flat.items() if isinstance(value, Tensor)}
    return _TorchSaveFile(values, {name: value for name, value in flat.items() if name not in values})


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
