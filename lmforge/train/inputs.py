"""What a run is made from: data, tokenizer and model config. stages/ opens it, before anything of the run is written."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from lmforge.config.batch_plan import BatchPlan
from lmforge.data.dataset import PackedDataset
from lmforge.data.mixture import TrainingDataset
from lmforge.data.tokenizer import Tokenizer
from lmforge.evaluate.tasks import QuestionTask
from lmforge.model.config import ModelConfig
from lmforge.model.layers import LanguageModel


@dataclass(frozen=True)
class RunInputs:
    """Everything a run is made from, opened and checked against each other. Nothing of the run has been written yet.

    validation_dataset    None where nothing is validated, or the stage validates in its own way
    data_source           where the data lies; goes into checkpoints and messages
    data_summary          what the data is, in words
    source_folders        the folder of each source of a mixture, by its name
    load_weights          fills a model with its first weights and returns the names it left out; None: random weights
    sequences_per_sample  sequences of a batch made from each sequence of `train_dataset`
    tasks                 tasks scored at each validation, each with its batch size
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
    tasks: tuple[tuple[QuestionTask, int], ...] = ()

    @property
    def packed_dataset(self) -> PackedDataset:
        """`train_dataset` of a stage that has no mixtures."""
        assert isinstance(self.train_dataset, PackedDataset)
        return self.train_dataset
