"""The manifest of a checkpoint, the check of its files against the manifest, and the search for the newest intact
checkpoint."""

import base64
import json
import stat
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, TypeVar

import torch
from pydantic import AfterValidator, ConfigDict, Field, FiniteFloat
from typing_extensions import TypedDict

from lmforge.atomic_files import PARTIAL_SUFFIX
from lmforge.checkpoint.storage import CorruptCheckpoint, FileDigests, digest_file, unreadable
from lmforge.data.dataset import DataPlan
from lmforge.errors import UserError
from lmforge.interop.resolve import model_config_from_json
from lmforge.kinds import Kind, kind_of, unexpected
from lmforge.model.config import ModelConfig
from lmforge.runs import CHECKPOINT_FORMAT, MANIFEST, Run, checkpoint_checksum, read_checkpoint_manifest
from lmforge.untrusted import check_content

TENSOR_SUFFIX = ".distcp"
T = TypeVar("T")
Count = Annotated[int, Field(ge=0, le=2**62)]


class _RecipeSection(TypedDict, total=False):
    """The options that are read from a section of a manifest's recipe. Others are only compared with those of another
    recipe."""

    stage: str | None
    folder: str | None
    source: str | None
    implementation: str
    reward_functions: list[str]


def _check_section(section: dict[str, Any]) -> dict[str, Any]:
    check_content(section, _RecipeSection, "its options", ValueError)
    return section


class _WrittenBy(TypedDict, total=False):
    """`data` is what the model was trained on; `sources` has the folder of each source of a mixture by its name; `plugins` has
    the digest of each plugin file by its name, and the version of each installed one."""

    __pydantic_config__ = ConfigDict(extra="allow")  # type: ignore[misc]
    data: str | None
    sources: dict[str, str]
    plugins: dict[str, str]


class DetectorState(TypedDict):
    """The state of train/bad_steps.py in a checkpoint; losses are the newest last, None where there was none yet."""

    skipped_steps: Count
    consecutive_bad_steps: Count
    rollbacks: Count
    losses: list[FiniteFloat | None]


@dataclass(frozen=True)
class Manifest:
    """The manifest of a checkpoint.

    plan_hash           of what the sequences before that depend on (MixedDataset.plan_at)
    data_plan           what it is a hash of
    consumed_sequences  the number of the next sequence; more than step × global_batch_size after batches were skipped
    hf_config           the model config, as a config.json
    rng                 torch's CPU random state (`get_rng_state`)
    contents            "model", and "optimizer" unless the run ended with a checkpoint of the model only
    metrics             what was measured at this step
    kept                whether the checkpoint is never deleted for a newer one
    bad_step_detector   the state of what decides which steps are bad, such as recent losses
    """

    step: Count
    consumed_sequences: Count
    global_batch_size: Annotated[int, Field(ge=1)]
    plan_hash: str
    hf_config: dict[str, Any]
    recipe: dict[str, Annotated[dict[str, Any], AfterValidator(_check_section)]]
    tokenizer_hash: str
    rng: str
    written_by: _WrittenBy
    files: dict[str, FileDigests]
    data_plan: DataPlan = field(default_factory=lambda: DataPlan())
    contents: list[str] = field(default_factory=lambda: ["model", "optimizer"])
    metrics: dict[str, FiniteFloat | None] = field(default_factory=dict)
    kept: bool = False
    bad_step_detector: DetectorState = field(
        default_factory=lambda: DetectorState(skipped_steps=0, consecutive_bad_steps=0, rollbacks=0, losses=[])
    )
    format: int = CHECKPOINT_FORMAT

    @property
    def model_config(self) -> ModelConfig:
        implementation = self.recipe.get("model", {}).get("implementation", "lmforge")
        return model_config_from_json(self.hf_config, "the checkpoint's manifest", implementation)

    @property
    def json_text(self) -> str:
        """The JSON to write: the fields and their digest, so that a flipped bit in a number is detected."""
        table = asdict(self)
        return json.dumps({**table, "xxh3": checkpoint_checksum(table)}, indent=1) + "\n"

    @property
    def batch_offset(self) -> int:
        """Step k trains on batch k + batch_offset: 0, unless the run rolled back and continued with later batches."""
        return self.consumed_sequences // self.global_batch_size - self.step


def get_rng_state() -> str:
    """torch's CPU random state, in base64."""
    return base64.b64encode(torch.get_rng_state().numpy().tobytes()).decode()


def set_rng_state(state: str) -> None:
    """Raises CorruptCheckpoint where it is not such a state."""
    try:
        torch.set_rng_state(torch.frombuffer(bytearray(base64.b64decode(state)), dtype=torch.uint8))
    except (ValueError, TypeError, RuntimeError):
        raise CorruptCheckpoint(f"{MANIFEST}: its rng is not a state of torch's generator") from None


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint folder. Raises CorruptCheckpoint where there is none that can be read."""

    def corrupt(message: str) -> CorruptCheckpoint:
        return CorruptCheckpoint(message.removeprefix(f"{folder}/").removeprefix(f"{folder}: "))

    return read_checkpoint_manifest(folder, Manifest, corrupt)


def verify(folder: Path, *, with_tensors: bool = True) -> Manifest:
    """The manifest of a checkpoint whose files match it. Raises CorruptCheckpoint otherwise.

    Every file is read and verified; without `with_tensors`, of the files of tensors only the size is checked.
    """
    manifest = read_manifest(folder)
    for name, written in manifest.files.items():
        try:
            status = (folder / name).stat()
            if status.st_size != written["bytes"]:
                raise CorruptCheckpoint(f"{name} has {status.st_size:,} bytes instead of {written['bytes']:,}")
            if not stat.S_ISREG(status.st_mode):
                raise CorruptCheckpoint(f"{name} is not a file")
            is_read = with_tensors or not name.endswith(TENSOR_SUFFIX)
            if is_read and digest_file(folder / name) != written:
                raise CorruptCheckpoint(f"{name} does not hold what was written (its checksum differs)")
        except FileNotFoundError:
            raise CorruptCheckpoint(f"{name} is missing") from None
        except OSError as problem:
            raise unreadable(problem, folder / name) from None
    return manifest


def candidates(run: Run, skipped: list[str], before_step: int | None = None) -> Iterator[tuple[Path, Manifest]]:
    """The checkpoints of a run (before `before_step`, if given) whose files have the right sizes, newest first. A line for each
    other one is added to `skipped`.
    """
    steps = [step for step in run.checkpoint_steps() if before_step is None or step < before_step]
    for partial in sorted(run.checkpoints_folder.glob(f"*{PARTIAL_SUFFIX}")) if before_step is None else ():
        if not steps or partial.name.removesuffix(PARTIAL_SUFFIX) > run.checkpoint_path(steps[-1]).name:
            skipped.append(f"{partial}: half-written, skipped")
    for step in reversed(steps):
        folder = run.checkpoint_path(step)
        try:
            yield folder, verify(folder, with_tensors=False)
        except CorruptCheckpoint as reason:
            skipped.append(f"{folder}: {reason}; skipped")


def open_checkpoint(path: Path, open_with: Callable[[Path, Manifest], T]) -> tuple[T, list[str]]:
    """Open the checkpoint in the folder `path`, or the newest intact one of the run in `path`.

    Returns what `open_with` returns, and a line for each checkpoint that was skipped. Tensors are not read here: `open_with`
    raises CorruptCheckpoint for what it reads, and the next older checkpoint is tried. Raises UserError where there is none.
    """
    kind = kind_of(path)
    if kind == Kind.CHECKPOINT:
        try:
            return open_with(path, verify(path, with_tensors=False)), []
        except CorruptCheckpoint as reason:
            raise UserError(f"{path}: {reason}") from None
    if kind != Kind.RUN:
        raise unexpected(path, (Kind.RUN, Kind.CHECKPOINT))
    skipped: list[str] = []
    for folder, manifest in candidates(Run.open(path), skipped):
        try:
            return open_with(folder, manifest), skipped
        except CorruptCheckpoint as reason:
            skipped.append(f"{folder}: {reason}; skipped")
    why = f" ({skipped[0]})" if skipped else ""
    raise UserError(f"{path}: no checkpoint here{why}")
