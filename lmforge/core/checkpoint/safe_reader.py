"""Reads PyTorch's Distributed Checkpoints (DCP) without trusting their content.

DCP pickles its metadata, and a pickle can run any code. Here an unpickler builds only the
dataclasses that describe tensors; other objects are skipped, and nothing that is stored is
executed.
"""

import io
import pickle
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
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

from lmforge.core.errors import UserError
from lmforge.core.files.untrusted import cut

METADATA_FILE = ".metadata"
MAX_REASON = 120  # characters of what torch says


@contextmanager
def opened_safely(what: str, error: Callable[[str], Exception] = UserError) -> Iterator[None]:
    """A block that reads what torch serialised; `what` names it.

    Whatever torch, pickle or a value in it raises is raised as `error`, with one line: a damaged
    archive or pickle can make them raise anything, and ask for any amount of memory.
    """
    try:
        yield
    except (Exception, CheckpointException) as problem:
        cause: Any = problem
        if isinstance(problem, CheckpointException):  # PyTorch's wrapper of whatever a rank has raised
            cause = next(iter(problem.failures.values()))
            cause = cause[0] if isinstance(cause, tuple) else cause
        if isinstance(cause, UserError) or not isinstance(cause, Exception):
            raise cause from None
        raise error(f"{what} cannot be read ({_reason(cause)}); copy it again") from None


def _reason(problem: BaseException) -> str:
    if isinstance(problem, MemoryError):
        return "it asks for more memory than there is"
    text = str(problem)
    if "GLOBAL" in text:  # PyTorch advises to execute it
        words = [word for word in text.replace("`", " ").split() if "." in word and word[0].isalpha() and word[-1] != "."]
        named = f", {words[0]}," if words else ""
        return f"it holds more than tensors and numbers{named} which would have to be executed; save its state alone"
    # Of the unpickler for weights the last line says what is wrong, and the others how to do
    # without it.
    lines = text.partition("WeightsUnpickler error: ")[2] or text
    return cut(next(iter(lines.strip().splitlines()), type(problem).__name__), MAX_REASON)


class SafeReader(dcp.FileSystemReader):
    """PyTorch's reader for the checkpoint in `folder`, with metadata that is read once and safely.

    file_system: opens its files; by default they are those of a local folder. error: raised with
    one line, without the folder, where something in it is damaged; by default a UserError that
    names the folder.
    """

    def __init__(
        self, folder: Path, file_system: FileSystemBase | None = None, error: Callable[[str], Exception] | None = None
    ) -> None:
        super().__init__(folder.name)
        self.path = folder
        self.fs = file_system or self.fs  # type: ignore[assignment]
        self._error = error or (lambda problem: UserError(f"{folder}: {problem}"))

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self.metadata

    @cached_property
    def metadata(self) -> Metadata:
        """Where each tensor lies.

        Raises `error` where the metadata is damaged, or holds anything else.
        """
        with (
            opened_safely(METADATA_FILE, self._error),
            self.fs.create_stream(self.path / METADATA_FILE, "rb") as file,  # type: ignore[operator]
        ):
            # Read to its end, where our own checkpoints verify it, before anything is made of it.
            content = io.BytesIO(cast(BinaryIO, file).read())
            metadata: Metadata = _MetadataUnpickler(content, self.path / METADATA_FILE).load()  # type: ignore[operator]
            if not isinstance(metadata, Metadata):
                raise ValueError(f"it holds a {type(metadata).__name__}")
            if getattr(metadata, "storage_meta", None) is None:
                metadata.storage_meta = StorageMeta()
        return metadata

    @cached_property
    def tensors(self) -> dict[str, Tensor]:
        """The stored tensors by name, on the meta device; other objects are left out.

        Raises as `metadata` does.
        """
        with opened_safely(METADATA_FILE, self._error):
            return {
                name: torch.empty(stored.size, dtype=stored.properties.dtype, device="meta")
                for name, stored in self.metadata.state_dict_metadata.items()
                if isinstance(stored, TensorStorageMetadata)
            }

    def load(self, state: dict[str, Any], what: str = "a tensor") -> None:
        """Fill the tensors of `state` in place, without communication.

        Raises `error` where they are damaged.
        """
        with opened_safely(what, self._error), torch.no_grad():
            dcp.load(state, storage_reader=self, no_dist=True)


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

    def __init__(self, content: BinaryIO, path: Path) -> None:
        super().__init__(content)
        self._path = path

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):  # how Python 3.11.0 to 3.11.3 pickles a member of an enum
            return self._enum_member
        if name not in self.ALLOWED.get(module, ()):
            raise self._refusal(f"{module}.{name}")
        return super().find_class(module, name)

    def _enum_member(self, enum: object, name: object) -> Enum:
        if not (isinstance(enum, EnumType) and isinstance(name, str) and name in enum.__members__):
            raise self._refusal(f"the attribute {cut(str(name))} of {cut(str(enum))}")
        member: Enum = enum.__members__[name]
        return member

    def _refusal(self, what: str) -> UserError:
        # Not damage: no older checkpoint is to be tried instead.
        return UserError(f"{self._path}: cannot be read as checkpoint metadata: it asks for {what}")


def flatten_names(content: Mapping[Any, Any], prefix: str = "") -> dict[str, Any]:
    """Nested tables as one, with names joined by dots."""
    flat: dict[str, Any] = {}
    for name, value in content.items():
        if isinstance(value, Mapping):
            flat |= flatten_names(value, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = value
    return flat
