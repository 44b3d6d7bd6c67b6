"""What is known before the model is built: the inputs (RunInputs), and the checkpoint to resume from (ResumePoint). stages/
opens them before anything of the run is written.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from lmforge.checkpoint import Manifest
from lmforge.config.batch_plan import BatchPlan
from lmforge.data.dataset import PackedDataset
from lmforge.data.mixture import TrainingDataset
from lmforge.data.tokenizer import Tokenizer
from lmforge.model.config import ModelConfig
from lmforge.model.layers import LanguageModel


@dataclass(frozen=True)
class RunInputs:
    """All inputs of a run, opened and checked against each other. Nothing of the run has been written yet.

    validation_dataset    None where nothing is validated, or the stage validates in its own way
    data_source           where the data lies; goes into checkpoints and messages
    data_summary          what the data is, in words
    source_folders        the folder of each source of a mixture, by its name
    load_weights          fills a model with its first weights and returns the names it left out; None: random weights
    sequences_per_sample  sequences of a batch made from each sequence of `train_dataset`
    """

    tokenizer: Tokenizer
    train_dataset: TrainingDataset
    validation_dataset: PackedDataset | None
    model_config: ModelConfig
    batch_plan: BatchPlan
    data_source: str
    data_summary: str
    load_weights: Callable[[LanguageModel], frozenset[str]] | None
    source_folders: Mapping[str, str] = field(default_factory=dict)
    sequences_per_sample: int = 1

    @property
    def packed_dataset(self) -> PackedDataset:
        """`train_dataset` of a stage that has no mixtures."""
        assert isinstance(self.train_dataset, PackedDataset)
        return self.train_dataset


@dataclass(frozen=True)
class ResumePoint:
    """The checkpoint that a run resumes from, None for a new run, and the lines to log about it."""

    checkpoint_folder: Path | None = None
    manifest: Manifest | None = None
    messages: tuple[str, ...] = ()

    @property
    def step(self) -> int:
        """Steps done at this point."""
        return self.manifest.step if self.manifest else 0
