"""Where wings join the core: what each gives it, as protocols.

A wing registers an implementation by name (core/options/builtin_names.py), and the registry imports
it when it is chosen.

Others are `Objective` (core/losses/objective.py), `StageSpec` (core/stages/specs.py), `BatchSource`
and `LoopCallbacks` (core/steps/callbacks.py).
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol, Self

from lmforge.core.data.tokenizer import Tokenizer
from lmforge.core.model.config import ModelConfig
from lmforge.core.model.layers import LanguageModel
from lmforge.core.options.lora import LoraOptions
from lmforge.core.options.sections import ModelOptions
from lmforge.core.records.manifests import Manifest, MultimodalSource

WeightFile = Literal["weights", "config.json"]


class WeightSource(Protocol):
    """A model that a run begins from: its weights, its config, and perhaps a tokenizer."""

    @property
    def folder(self) -> Path:
        """Where its weights are."""

    @property
    def manifest(self) -> Manifest | None:
        """The manifest of a checkpoint; None for any other folder."""

    @property
    def adapters(self) -> Path | None:
        """A folder of adapters for these weights."""

    @property
    def notes(self) -> list[str]:
        """What is done with the weights besides reading them, in words."""

    @property
    def multimodal(self) -> MultimodalSource | None:
        """The folder of the full model, of which this is the language model; None: of none."""

    @property
    def tokenizer_folder(self) -> Path:
        """Where the tokenizer is, if there is one."""

    def tokenizer(self) -> Tokenizer:
        """Raises UserError where there is none."""

    def staged(self, stage_to: Path | None) -> Self:
        """The same model, read from the copy on this host's own disk where there is one under
        `stage_to`.
        """

    def check_has_weights(self) -> None:
        """Raise UserError where there are no weights to begin from."""

    def check_base(self, lora: LoraOptions | None) -> None:
        """Raise UserError where weights in 4 bits would be trained themselves."""

    def resolve_model_config(
        self, options: ModelOptions, vocab_size: int | None = None
    ) -> ModelConfig:
        """The model config, changed by the options.

        Raises UserError where they cannot change it.
        """

    def load_weights(self, model: LanguageModel) -> frozenset[str]:
        """Load the weights into a model, sharded or not.

        Returns the names that were left unchanged. Raises UserError.
        """


class WeightSources(Protocol):
    """Finds the model that a recipe names."""

    find: Callable[[Path, WeightFile], WeightSource]
    cache_folder: Callable[[], Path]


class Console(Protocol):
    """What a person sees of a run.

    Every rank has one; those other than rank 0 write to their logs alone.
    """

    def info(self, line: str) -> None:
        """Print a line."""

    def warn(self, line: str) -> None:
        """Print a warning."""

    def start_progress(self, step: int) -> None:
        """The first step of an attempt is about to begin."""

    def update_progress(self, step: int) -> None:
        """A step is done."""

    def log_metrics(self, record: dict[str, Any]) -> None:
        """Show a record of metrics.jsonl."""

    def log_sample(self, step: int, text: str) -> None:
        """Show a text that the model has generated."""

    def stop_progress(self) -> None:
        """The last step is done."""

    def close(self) -> None:
        """Nothing is printed after this."""


class Watch(Protocol):
    """Publishes what a rank does, and names one that makes no progress."""

    def set_phase(self, phase: str, step: int | None = None) -> None:
        """What this rank does from now on."""

    def follow_compilation(self) -> None:
        """From now on a step may compile, which takes long."""

    def watch_disk(self, folder: Path, next_checkpoint_bytes: Callable[[], int]) -> None:
        """Say where the disk of `folder` has too little space for what will be saved."""

    def describe_progress(self) -> str:
        """The step and phase of this rank, in words."""

    def check_step_times(self, step: int, step_seconds: float, pipeline_rank: int) -> list[str]:
        """Lines about ranks that are slow, and about a step time that rises.

        Every rank calls it.
        """

    def stop(self, final_phase: str) -> None:
        """The attempt ends in this phase: done, interrupted or failed."""


class AttemptLog(Protocol):
    """The log of a rank in one attempt, which takes all that is printed."""

    @property
    def path(self) -> Path:
        """The file that it is written to."""

    def write(self, line: str) -> None:
        """Add a line that is not printed."""

    def write_failure(self, problem: BaseException, progress: str) -> None:
        """Write how this rank failed."""

    def close(self) -> None:
        """Give the output back."""


class Monitors(NamedTuple):
    """What watches an attempt on this rank."""

    log: AttemptLog
    watch: Watch
    console: Console


class AttemptObserver(Protocol):
    """Follows the files of a run on rank 0, from the beginning of an attempt to its end."""

    def on_record(self) -> None:
        """A record was added to metrics.jsonl."""

    def close(self) -> None:
        """Nothing is written after this but what `end` writes.

        Called at the end of every attempt.
        """

    def end(self, state: str) -> None:
        """The attempt has ended: done, interrupted or failed.

        Called if the run is still this attempt's. It raises nothing.
        """


class RunCallbacks(Protocol):
    """User code that is called at named points of a run (core/stages/custom_code.py)."""

    def has(self, point: str) -> bool:
        """Whether something is called there."""

    def call(self, point: str, run: Any, step: int, value: Any) -> None:
        """Call it. Every rank does. Raises RunFailed on all ranks where one raises."""

    def run_failed(self, run: Any) -> None:
        """The run has failed. It raises nothing, and does not communicate."""


class _NoCallbacks:
    """Nothing is called."""

    def has(self, point: str) -> bool:
        return False

    def call(self, point: str, run: Any, step: int, value: Any) -> None:
        """Nothing."""

    def run_failed(self, run: Any) -> None:
        """Nothing."""


NO_CALLBACKS: RunCallbacks = _NoCallbacks()
