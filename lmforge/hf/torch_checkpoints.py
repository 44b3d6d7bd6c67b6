"""Checkpoints of other trainers: their tensors by name, read one at a time in a single process.

They are Distributed Checkpoint (DCP) folders and torch.save files. Both formats can hold objects
beside the tensors; these are skipped, and nothing that is stored is executed
(core/checkpoint/safe_reader.py).
"""

import warnings
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lmforge.core.checkpoint.safe_reader import (
    METADATA_FILE,
    SafeReader,
    flatten_names,
    opened_safely,
)
from lmforge.core.errors import UserError

# Of a pickle that is not one of torch.save: what is wrong with it is said in one line.
warnings.filterwarnings("ignore", message="Detected pickle protocol")


@dataclass(frozen=True)
class TensorSource:
    """Tensors by name.

    tensors: on the meta device, for their shapes and dtypes.
    read: returns the full tensor of a name, on the CPU, in its stored dtype.
    non_tensors: other content of a file: numbers, texts, and lists and tables of them.
    """

    tensors: dict[str, Tensor]
    read: Callable[[str], Tensor]
    non_tensors: dict[str, Any]


def open_tensor_source(path: Path) -> TensorSource:
    """Open a folder with a .metadata file, or a file of torch.save.

    Raises UserError where it is neither.
    """
    if (path / METADATA_FILE).is_file():
        reader = SafeReader(path)

        def read(name: str) -> Tensor:
            with opened_safely(f"{path}: {name}"):
                value = torch.empty_like(reader.tensors[name], device="cpu")
            reader.load({name: value}, name)
            return value

        return TensorSource(reader.tensors, read, {})
    if not path.is_file():
        what = "holds no .metadata, so it is not a Distributed Checkpoint"
        if not path.exists():
            what = "no such file or folder"
        raise UserError(f"{path}: {what}; give a checkpoint's folder or file")
    with opened_safely(f"{path}:"):
        content = torch.load(
            path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path)
        )
        if not isinstance(content, Mapping):
            raise UserError(f"{path}: holds a {type(content).__name__} instead of tensors by name")
        flat = flatten_names(content)
        values = {name: value for name, value in flat.items() if isinstance(value, Tensor)}
        tensors = {name: value.to("meta") for name, value in values.items()}
    others = {name: value for name, value in flat.items() if name not in values}
    return TensorSource(tensors, values.__getitem__, others)
