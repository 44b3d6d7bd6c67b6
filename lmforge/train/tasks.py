"""Questions asked of the model while it trains: what `lmforge evaluate --tasks` tells of a checkpoint, at each validation."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from lmforge.config import COMFORTABLE_MICRO_BATCH_TOKENS, StageConfig
from lmforge.data.tokenizer import Tokenizer
from lmforge.errors import Mistake
from lmforge.infer.opening import opening_and_ends
from lmforge.infer.tasks import Task, check_task, load_tasks, run_task
from lmforge.model.layers import LanguageModel
from lmforge.model.shapes import ModelConfig
from lmforge.parallel.engine import Spread
from lmforge.train.material import Material
from lmforge.train.metrics import Teller
from lmforge.train.watch import Watch

# Rows of a batch where they are short; the same on any number of ranks, or they would change the last bits.
MOST_ROWS = 16
# What val/NAME/… of alignment is called.
TAKEN = ("rewards", "logps", "tokens")


@dataclass(frozen=True)
class Asked:
    """The model that is being trained, as its checkpoint would be opened (infer.likelihood.Readable)."""

    model: LanguageModel
    config: ModelConfig
    tokenizer: Tokenizer
    opening: list[int]
    ends: frozenset[int]


def open_tasks(config: StageConfig, material: Material) -> tuple[tuple[Task, int], ...]:
    """The tasks of a recipe, and how many rows a batch of each has.

    Raises Mistake for files, examples and lengths that cannot be asked: nothing of a run is there yet.
    """
    chosen, opened = config.validation, dict[str, tuple[Task, int]]()
    opening, _ = opening_and_ends(material.tokenizer, config.of_stage)
    for path in chosen.tasks:
        task = load_tasks(path)
        if task.name in opened:
            other = opened[task.name][0].path
            raise Mistake(f"validation.tasks: {other} and {path} would both be told as val/{task.name}/…; rename one")
        if task.name in TAKEN:
            raise Mistake(f"validation.tasks: {path}: val/{task.name}/… is told of alignment; give the file another name")
        longest = check_task(
            task, material.tokenizer, material.shape, opening, few_shot=chosen.few_shot, limit=chosen.task_questions
        )
        opened[task.name] = task, max(1, min(MOST_ROWS, COMFORTABLE_MICRO_BATCH_TOKENS // longest))
    return tuple(opened.values())


def asker(
    config: StageConfig, material: Material, trained: Spread, watch: Watch, teller: Teller
) -> Callable[[int], dict[str, float]]:
    """`ask(step)`: the scores of all tasks as val/TASK/METRIC. Every rank calls it, and answers its share of the questions."""
    chosen = config.validation
    opening, ends = opening_and_ends(material.tokenizer, config.of_stage)

    def ask(step: int) -> dict[str, float]:
        if not material.tasks:
            return {}
        told: dict[str, float] = {}
        with trained.whole() as model, torch.compiler.set_stance("force_eager"), trained.autocast():
            asked = Asked(model, material.shape, material.tokenizer, opening, ends)
            for task, rows in material.tasks:
                scores = run_task(
                    task,
                    asked,
                    trained.ranks,
                    few_shot=chosen.few_shot,
                    limit=chosen.task_questions,
                    batch_rows=rows,
                    on_batch=partial(watch.mark, "evaluate", step),  # each is progress, however many there are
                )["metrics"]
                teller.say(f"  {task.name}: {', '.join(f'{name} {score:.4f}' for name, score in scores.items())}")
                told |= {f"val/{task.name}/{name}": score for name, score in scores.items()}
        return told

    return ask
