"""Where wings join the core: what each gives it, as protocols. A wing registers an implementation by name
(core/options/builtin_names.py), and the registry imports it when it is chosen.

Others are `Objective` (core/losses/objective.py), `StageSpec` (core/stages/specs.py), `BatchSource` and `LoopCallbacks`
(core/steps/callbacks.py).
"""

from collections.abc import Callable
from pathlib import Path
from typing import Literal, Protocol, Self

from lmforge.core.data.tokenizer import Tokenizer
from lmforge.core.model.config import ModelConfig
from lmforge.core.model.layers import LanguageModel
from lmforge.core.options.lora import LoraOptions
from lmforge.core.options.sections import ModelOptions
from lmforge.core.records.manifests import Manifest

WeightFile = Literal["weights", "config.json"]


class WeightSource(Protocol):
    """A model that a run begins from: its weights, its config, and perhaps a tokenizer."""

    @property
    def folder(self) -> Path:
        """Where its weights are."""

    @property
    def manifest(self) -> Manifest | None:
        """That of a checkpoint; None for any other folder."""

    @property
    def adapters(self) -> Path | None:
        """A folder of adapters for these weights."""

    @property
    def notes(self) -> list[str]:
        """What is done with the weights besides reading them, in words."""

    @property
    def tokenizer_folder(self) -> Path:
        """Where the tokenizer is, if there is one."""

    def tokenizer(self) -> Tokenizer:
        """Raises UserError where there is none."""

    def staged(self, stage_to: Path | None) -> Self:
        """The same model, read from the copy on this host's own disk where there is one under `stage_to`."""

    def check_has_weights(self) -> None:
        """Raise UserError where there are no weights to begin from."""

    def check_base(self, lora: LoraOptions | None) -> None:
        """Raise UserError where weights in 4 bits would be trained themselves."""

    def resolve_model_config(self, options: ModelOptions, vocab_size: int | None = None) -> ModelConfig:
        """The model config, changed by the options. Raises UserError where they cannot change it."""

    def load_weights(self, model: LanguageModel) -> frozenset[str]:
        """Load the weights into a model, sharded or not. Returns the names that were left unchanged. Raises UserError."""


class WeightSources(Protocol):
    """Finds the model that a recipe names."""

    find: Callable[[Path, WeightFile], WeightSource]
    cache_folder: Callable[[], Path]
