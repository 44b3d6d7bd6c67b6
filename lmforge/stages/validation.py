"""Questions asked of the model while it trains: what `lmforge evaluate --tasks` tells of a checkpoint, at each validation."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from lmforge.config.sections import COMFORTABLE_MICRO_BATCH_TOKENS
from lmforge.config.stage import StageConfig
from lmforge.data.tokenizer import Tokenizer
from lmforge.errors import UserError
from lmforge.evaluate.tasks import QuestionTask, TaskSettings, check_task, load_task, run_task
from lmforge.generate.model_loading import prefix_and_stop_ids
from lmforge.model.config import ModelConfig
from lmforge.model.layers import LanguageModel
from lmforge.monitor.watchdog import Watchdog
from lmforge.parallel.parallel_model import ParallelModel
from lmforge.stages.inputs import RunInputs
from lmforge.train.metrics import ConsoleLogger

# Rows of a batch where they are short; the same on any number of ranks, or they would change the last bits.
MAX_TASK_BATCH_SIZE = 16
# What val/NAME/… of alignment is called.
RESERVED_TASK_NAMES = ("rewards", "logps", "tokens")


@dataclass(frozen=True)
class TrainedModelView:
    """The model that is being trained, as its checkpoint would be opened (evaluate.likelihood.ModelWithTokenizer)."""

    model: LanguageModel
    config: ModelConfig
    tokenizer: Tokenizer
    prefix_ids: list[int]
    stop_token_ids: frozenset[int]


def open_validation_tasks(config: StageConfig, inputs: RunInputs) -> tuple[tuple[QuestionTask, int], ...]:
    """The tasks of a recipe, and how many rows a batch of each has.

    Raises UserError for files, examples and lengths that cannot be asked: nothing of a run is there yet.
    """
    chosen, opened = config.validation, dict[str, tuple[QuestionTask, int]]()
    opening, _ = prefix_and_stop_ids(inputs.tokenizer, config.of_stage)
    for path in chosen.tasks:
        task = load_task(path)
        if task.name in opened:
            other = opened[task.name][0].path
            raise UserError(f"validation.tasks: {other} and {path} would both be told as val/{task.name}/…; rename one")
        if task.name in RESERVED_TASK_NAMES:
            raise UserError(f"validation.tasks: {path}: val/{task.name}/… is told of alignment; give the file another name")
        settings = TaskSettings(num_fewshot=chosen.num_fewshot, limit=chosen.task_limit)
        longest = check_task(task, inputs.tokenizer, inputs.model_config, opening, settings)
        opened[task.name] = task, max(1, min(MAX_TASK_BATCH_SIZE, COMFORTABLE_MICRO_BATCH_TOKENS // longest))
    return tuple(opened.values())


def build_task_evaluator(
    config: StageConfig, inputs: RunInputs, parallel_model: ParallelModel, watch: Watchdog, console: ConsoleLogger
) -> Callable[[int], dict[str, float]]:
    """`ask(step)`: the scores of all tasks as val/TASK/METRIC. Every rank calls it, and answers its share of the questions."""
    chosen = config.validation
    opening, ends = prefix_and_stop_ids(inputs.tokenizer, config.of_stage)

    def ask(step: int) -> dict[str, float]:
        if not inputs.tasks:
            return {}
        told: dict[str, float] = {}
        with parallel_model.unsharded() as model, torch.compiler.set_stance("force_eager"), parallel_model.autocast():
            asked = TrainedModelView(model, inputs.model_config, inputs.tokenizer, opening, ends)
            for task, rows in inputs.tasks:
                settings = TaskSettings(
                    num_fewshot=chosen.num_fewshot,
                    limit=chosen.task_limit,
                    batch_size=rows,
                    on_batch=partial(watch.set_phase, "evaluate", step),  # each is progress, however many there are
                )
                scores = run_task(task, asked, parallel_model.dist_ctx, settings)["metrics"]
                console.info(f"  {task.name}: {', '.join(f'{name} {score:.4f}' for name, score in scores.items())}")
                told |= {f"val/{task.name}/{name}": score for name, score in scores.items()}
        return told

    return ask
