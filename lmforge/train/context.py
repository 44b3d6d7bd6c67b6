"""What a run is given before its model is built: who runs it (RunContext), and on what (RunInputs)."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from lmforge.cluster.distributed import DistributedContext
from lmforge.config.batch_plan import BatchPlan
from lmforge.config.stage import StageConfig
from lmforge.data.dataset import PackedDataset
from lmforge.data.tokenizer import Tokenizer
from lmforge.evaluate.tasks import QuestionTask
from lmforge.model.config import ModelConfig
from lmforge.model.layers import LanguageModel
from lmforge.monitor.watchdog import Watchdog
from lmforge.runs import Run
from lmforge.train.metrics import ConsoleLogger


@dataclass(frozen=True)
class RunContext:
    """The recipe, the run directory, the ranks, and where progress is reported. Every rank has one, with its own log."""

    config: StageConfig
    run: Run
    dist_ctx: DistributedContext
    watch: Watchdog
    console: ConsoleLogger
    log_path: Path


@dataclass(frozen=True)
class RunInputs:
    """Everything a run is made from, opened and checked against each other. Nothing of the run has been written yet.

    validation_dataset    None where nothing is validated, or the stage validates in its own way
    data_source           where the data lies; goes into checkpoints and messages
    data_summary          what the data is, in words
    load_weights          fills a model with its first weights and returns the names it left out; None: random weights
    sequences_per_sample  sequences of a batch made from each sequence of `train_dataset`
    tasks                 tasks scored at each validation, each with its batch size
    """

    tokenizer: Tokenizer
    train_dataset: PackedDataset
    validation_dataset: PackedDataset | None
    model_config: ModelConfig
    batch_plan: BatchPlan
    data_source: str
    data_summary: str
    load_weights: Callable[[LanguageModel], frozenset[str]] | None
    sequences_per_sample: int = 1
    tasks: tuple[tuple[QuestionTask, int], ...] = ()
