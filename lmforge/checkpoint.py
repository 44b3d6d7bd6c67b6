"""A checkpoint exists or it does not: written beside, synced, sealed by a manifest, then renamed.

Tensors are PyTorch Distributed Checkpoint files under their Hugging Face names, so that any number of ranks, any
strategy, or a single process without ranks opens them. `manifest.json`, written last, carries all else that is needed:
model shape, recipe, step, position in the data, and the size and xxh3 of every file. Nothing here unpickles code.
"""

import base64
import errno
import io
import json
import os
import pickle
import re
import shutil
import warnings
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed.checkpoint as dcp
import xxhash
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, StorageMeta, TensorStorageMetadata

from lmforge.cluster.ranks import Ranks
from lmforge.data.tokenizer import Tokenizer
from lmforge.errors import Mistake, RunFailed
from lmforge.model.shapes import ModelConfig, from_hugging_face
from lmforge.runs import MANIFEST, Run, write_sealed

# A single process saves and loads without process groups on purpose; torch warns each time that it assumes so.
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")

FORMAT = 1
PARTIAL = ".partial"
State = dict[str, dict[str, Any]]


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint says of itself."""

    step: int
    samples: int
    plan_hash: str
    model: dict[str, Any]
    recipe: dict[str, Any]
    tokenizer_hash: str
    rng: str
    world: dict[str, Any]
    files: dict[str, dict[str, Any]]
    format: int = FORMAT

    @property
    def model_config(self) -> ModelConfig:
        implementation = self.recipe.get("model", {}).get("implementation", "lmforge")
        return from_hugging_face(self.model, "the checkpoint's manifest", implementation)


class Unsound(Exception):
    """Why a folder cannot be used as a checkpoint."""


def rng_state() -> str:
    """torch's CPU random state as text."""
    return base64.b64encode(torch.get_rng_state().numpy().tobytes()).decode()


def set_rng_state(state: str) -> None:
    torch.set_rng_state(torch.frombuffer(bytearray(base64.b64decode(state)), dtype=torch.uint8))


def save(
    run: Run,
    step: int,
    state: State,
    ranks: Ranks,
    *,
    about: dict[str, Any],
    tokenizer: Tokenizer,
    keep_last: int,
) -> Path:
    """Write the checkpoint of `step` and, once it is whole, drop all but the newest `keep_last`. Every rank calls it.

    `state` has tensors by name under "model", and under "optimizer" by name and kind; sharded ones as DTensors.

    `about` holds the manifest's fields other than step, files and format. Raises RunFailed on every rank where it cannot
    be written; the checkpoints before it are untouched.
    """
    final, partial = run.checkpoint(step), run.checkpoints / f"{run.checkpoint(step).name}{PARTIAL}"
    with ranks.agreeing():
        if ranks.first:
            with _telling_of_full_disk(partial):
                shutil.rmtree(partial, ignore_errors=True)
                partial.mkdir(parents=True)
                tokenizer.save(partial)
    try:
        dcp.save(
            state,
            storage_writer=dcp.FileSystemWriter(partial, single_file_per_rank=True, sync_files=True, overwrite=True),
            process_group=ranks.control,
            no_dist=ranks.control is None,
        )
    except (CheckpointException, OSError) as problem:
        _give_up(partial, problem, run, step, ranks)
    names = sorted(entry.name for entry in partial.iterdir())
    with ranks.agreeing():
        mine = {name: _describe(partial / name) for name in names[ranks.place.rank :: ranks.count]}
    files = {name: described for share in ranks.gather(mine) for name, described in share.items()}
    with ranks.agreeing():
        if ranks.first:
            with _telling_of_full_disk(partial):
                manifest = Manifest(step=step, files=files, **about)
                write_sealed(partial / MANIFEST, json.dumps(asdict(manifest), indent=1) + "\n")
                _sync(partial)
                if final.exists():  # this step was saved before and is saved again, after a resume from an older one
                    shutil.rmtree(final)
                os.rename(partial, final)
                _sync(run.checkpoints)
                # Those of later steps are damaged, or this run would have gone on from them: they do not count.
                for old in [there for there in run.steps() if there <= step][:-keep_last]:
                    shutil.rmtree(run.checkpoint(old))
    return final


class _telling_of_full_disk:
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __enter__(self) -> None: ...

    def __exit__(self, kind: Any, problem: Any, trace: Any) -> None:
        if isinstance(problem, OSError):
            shutil.rmtree(self.folder, ignore_errors=True)
            raise RunFailed(_cannot_write(self.folder, str(problem), problem.errno)) from problem


def _cannot_write(folder: Path, problem: str, number: int | None = None) -> str:
    full = number in (errno.ENOSPC, errno.EDQUOT) or "No space left" in problem or "ENOSPC" in problem
    what = "the disk is full" if full else problem.strip().splitlines()[-1]
    return f"{folder.parent}: the checkpoint {folder.name.removesuffix(PARTIAL)} could not be written: {what}"


def _give_up(partial: Path, problem: BaseException, run: Run, step: int, ranks: Ranks) -> None:
    problems = list(problem.failures.values()) if isinstance(problem, CheckpointException) else [problem]
    cause = problems[0][0] if isinstance(problems[0], tuple) else problems[0]
    ranks.gather(None)  # no rank is still writing into the folder that is about to go
    if ranks.first:
        shutil.rmtree(partial, ignore_errors=True)
    # torch reports a write that failed half-way as a position it did not expect; the disk knows the reason.
    free = shutil.disk_usage(run.checkpoints).free
    text = "No space left on device" if free < 1 << 20 else f"{type(cause).__name__}: {cause}"
    raise RunFailed(_cannot_write(partial, text, getattr(cause, "errno", None))) from problem


def _describe(path: Path) -> dict[str, Any]:
    with open(path, "rb") as file:
        digest = xxhash.xxh3_64()
        while block := file.read(1 << 24):
            digest.update(block)
        os.fsync(file.fileno())
    return {"bytes": path.stat().st_size, "xxh3": digest.hexdigest()}


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint folder. Raises Unsound where there is none that can be read."""
    try:
        table = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        if table.get("format") != FORMAT:
            raise Unsound(f"its format is {table.get('format')}, this version of lmforge reads {FORMAT}")
        return Manifest(**table)
    except FileNotFoundError:
        raise Unsound("it has no manifest, so it was never finished") from None
    except (json.JSONDecodeError, UnicodeDecodeError, TypeError, AttributeError):
        raise Unsound("its manifest cannot be read") from None


def verify(folder: Path) -> Manifest:
    """The manifest of a checkpoint whose every file is there and holds what was written. Raises Unsound otherwise."""
    manifest = read_manifest(folder)
    for name, written in manifest.files.items():
        path = folder / name
        if not path.exists():
            raise Unsound(f"{name} is missing")
        if path.stat().st_size != written["bytes"]:
            raise Unsound(f"{name} has {path.stat().st_size:,} bytes instead of {written['bytes']:,}")
        if _describe(path)["xxh3"] != written["xxh3"]:
            raise Unsound(f"{name} does not hold what was written (its checksum differs)")
    return manifest


def newest_sound(run: Run) -> tuple[Path | None, Manifest | None, list[str]]:
    """The newest checkpoint that is whole, its manifest, and a line for each newer one that is not."""
    passed_over = []
    for partial in sorted(run.checkpoints.glob(f"*{PARTIAL}")):
        if not run.steps() or partial.name.removesuffix(PARTIAL) > run.checkpoint(run.steps()[-1]).name:
            passed_over.append(f"{partial}: half-written, skipped")
    for step in reversed(run.steps()):
        folder = run.checkpoint(step)
        try:
            return folder, verify(folder), passed_over
        except Unsound as reason:
            passed_over.append(f"{folder}: {reason}; skipped")
    return None, None, passed_over


def find(path: Path) -> tuple[Path, Manifest, list[str]]:
    """The checkpoint that `path` names: itself, or the newest sound one of a run, with what was passed over.

    Raises Mistake where there is none.
    """
    if (path / MANIFEST).exists() or re.fullmatch(r"step-\d+", path.name):
        try:
            return path, verify(path), []
        except Unsound as reason:
            raise Mistake(f"{path}: {reason}") from None
    if not path.exists():
        raise Mistake(f"{path}: no such run, checkpoint or model folder")
    folder, manifest, passed_over = newest_sound(Run(path))
    if folder is None or manifest is None:
        why = f" ({passed_over[0]})" if passed_over else ""
        raise Mistake(f"{path}: no checkpoint here{why}")
    return folder, manifest, passed_over


def load(folder: Path, state: State, ranks: Ranks | None = None) -> None:
    """Fill the tensors of `state` (as in `save`; "optimizer" may be left out) in place, whatever ranks wrote them.

    Raises Mistake where a tensor is missing or has another shape.
    """
    control = ranks.control if ranks else None
    reader = _Reader(folder)
    stored = reader.read_metadata().state_dict_metadata
    # Ranks of a pipeline ask for different tensors.
    with ranks.agreeing() if ranks else nullcontext():
        _check_stored(folder, state, stored)
    with torch.no_grad():
        dcp.load(state, storage_reader=reader, process_group=control, no_dist=control is None)


def stored_tensors(folder: Path) -> dict[str, Tensor]:
    """The model's tensors in a checkpoint by name, on the meta device: their shapes and dtypes, and nothing read."""
    stored = _Reader(folder).read_metadata().state_dict_metadata
    of_model = {name.removeprefix("model."): found for name, found in stored.items() if name.startswith("model.")}
    return {
        name: torch.empty(found.size, dtype=found.properties.dtype, device="meta")
        for name, found in of_model.items()
        if isinstance(found, TensorStorageMetadata)
    }


def _check_stored(folder: Path, state: State, stored: Mapping[str, Any]) -> None:
    for name, tensor in _flat(state):
        if name not in stored:
            of_optimizer = name.startswith("optimizer.")
            reason = "it was saved with other optimizer options" if of_optimizer else "the model is of another shape"
            raise Mistake(f"{folder}: it has no tensor {name}; {reason}")
        described = stored[name]
        assert isinstance(described, TensorStorageMetadata)  # the reader refuses anything else
        size = described.size
        if tuple(size) != tuple(tensor.shape):
            raise Mistake(
                f"{folder}: {name} is {list(size)} there and {list(tensor.shape)} here; the model is of another shape"
            )


def _flat(state: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    for name, value in state.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


class _Reader(dcp.FileSystemReader):
    """PyTorch's reader, less its trust: DCP pickles its metadata, and a pickle can run anything."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        path = Path(str(self.path)) / ".metadata"
        try:
            metadata = _MetadataUnpickler(io.BytesIO(path.read_bytes())).load()
        except FileNotFoundError:
            raise Mistake(f"{path}: missing") from None
        except (pickle.UnpicklingError, EOFError, AttributeError, ImportError, IndexError) as problem:
            raise Mistake(f"{path}: cannot be read as checkpoint metadata: {problem}") from None
        if any(isinstance(stored, BytesStorageMetadata) for stored in metadata.state_dict_metadata.values()):
            raise Mistake(f"{path}: holds pickled objects; a checkpoint of lmforge has tensors only")
        if getattr(metadata, "storage_meta", None) is None:
            metadata.storage_meta = StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class _MetadataUnpickler(pickle.Unpickler):
    """Builds the dataclasses that describe stored tensors, and nothing else."""

    ALLOWED: ClassVar = {
        "torch.distributed.checkpoint.metadata": {
            "ChunkStorageMetadata",
            "Metadata",
            "MetadataIndex",
            "StorageMeta",
            "TensorProperties",
            "TensorStorageMetadata",
            "_MEM_FORMAT_ENCODING",
        },
        "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
        "torch": {"Size", "float32", "float64", "bfloat16", "float16", "int64", "int32", "uint8", "bool"},
        "torch.serialization": {"_get_layout"},
        "pathlib": {"Path", "PosixPath", "PurePosixPath"},
        "collections": {"OrderedDict"},
        "datetime": {"timedelta"},
    }

    def find_class(self, module: str, name: str) -> Any:
        if name not in self.ALLOWED.get(module, ()):
            raise pickle.UnpicklingError(f"it asks for {module}.{name}")
        return super().find_class(module, name)
