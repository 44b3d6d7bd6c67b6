"""Scores of tasks, and generated samples, of the model while it trains.

Scores are the same as from `lmforge evaluate --tasks` on the checkpoint of that step.
"""

from functools import partial
from typing import Any

from lmforge.core.data.tokenizer import Tokenizer
from lmforge.core.errors import UserError
from lmforge.core.model.config import ModelConfig
from lmforge.core.options.sections import COMFORTABLE_MICRO_BATCH_TOKENS
from lmforge.core.options.stage import StageConfig
from lmforge.core.parallel.parallel_model import ParallelModel, unsharded_for_decoding
from lmforge.core.stages.context import RunContext
from lmforge.core.stages.inputs import RunInputs
from lmforge.core.stages.observer import ObservedRun, Observer
from lmforge.core.steps.callbacks import is_due
from lmforge.serve.decoding.engine import generate
from lmforge.serve.decoding.model_loading import LoadedModel, prefix_and_stop_ids
from lmforge.serve.decoding.sampling import SamplingParams
from lmforge.serve.evaluate.tasks import TaskSettings, check_task, run_task
from lmforge.text.questions import QuestionTask, load_task

# Maximum sequences in a batch of a task. It does not depend on the number of ranks, or the last
# bits of scores would differ.
MAX_TASK_BATCH_SIZE = 16
SAMPLE_TEMPERATURE = 0.8
# val/NAME/… are metrics of alignment, and of the sources of a mixture.
RESERVED_TASK_NAMES = {
    "rewards": "alignment",
    "logps": "alignment",
    "tokens": "alignment",
    "loss": "each source",
    "bits_per_byte": "each source",
}


def open_validation_tasks(
    config: StageConfig, tokenizer: Tokenizer, model_config: ModelConfig
) -> tuple[tuple[QuestionTask, int], ...]:
    """The tasks of a recipe, each with its batch size.

    Raises UserError for files, few-shot examples and lengths that cannot be used; nothing of the
    run has been written.
    """
    options = config.validation
    opened = dict[str, tuple[QuestionTask, int]]()
    prefix_ids, _ = prefix_and_stop_ids(tokenizer, config.of_stage)
    for path in options.tasks:
        task = load_task(path)
        if task.name in opened:
            other = opened[task.name][0].path
            raise UserError(
                f"validation.tasks: {other} and {path} would both be logged as val/{task.name}/…;"
                " rename one"
            )
        if task.name in RESERVED_TASK_NAMES:
            owner = RESERVED_TASK_NAMES[task.name]
            raise UserError(
                f"validation.tasks: {path}: val/{task.name}/… are metrics of {owner}; give the file"
                " another name"
            )
        settings = TaskSettings(num_fewshot=options.num_fewshot)
        longest = check_task(task, tokenizer, model_config, prefix_ids, settings)
        batch_size = min(MAX_TASK_BATCH_SIZE, COMFORTABLE_MICRO_BATCH_TOKENS // longest)
        opened[task.name] = (task, max(1, batch_size))
    return tuple(opened.values())


class TaskObserver(Observer):
    """Scores the tasks of validation.tasks at each validation."""

    @classmethod
    def open(
        cls, config: StageConfig, inputs: RunInputs, resumes: bool
    ) -> tuple[tuple[QuestionTask, int], ...]:
        return open_validation_tasks(config, inputs.tokenizer, inputs.model_config)

    def __init__(self, run: ObservedRun) -> None:
        super().__init__(run)
        self._run = run
        self._tasks: tuple[tuple[QuestionTask, int], ...] = run.inputs.opened["tasks"]

    def validate(self, step: int, required: bool) -> dict[str, float]:
        """The scores, by their names in metrics.jsonl. Every rank calls it."""
        ctx = self._run.ctx
        inputs = self._run.inputs
        scores: dict[str, float] = {}
        options = ctx.config.validation
        with unsharded_for_decoding(self._run.built.parallel_model) as model:
            prefix_and_stop = prefix_and_stop_ids(inputs.tokenizer, ctx.config.of_stage)
            loaded = LoadedModel(
                model, inputs.model_config, inputs.tokenizer, ctx.run.path, None, *prefix_and_stop
            )
            for task, batch_size in self._tasks:
                settings = TaskSettings(
                    num_fewshot=options.num_fewshot,
                    batch_size=batch_size,
                    # Each batch is progress.
                    on_batch=partial(ctx.watch.set_phase, "evaluate", step),
                )
                result = run_task(task, loaded, ctx.dist_ctx, settings)["metrics"]
                words = ", ".join(f"{name} {score:.4f}" for name, score in result.items())
                ctx.console.info(f"  {task.name}: {words}")
                scores |= {f"val/{task.name}/{name}": score for name, score in result.items()}
        return scores


class SampleObserver(Observer):
    """Writes samples of the model after the prompts of a recipe, every sample.every_steps."""

    def __init__(self, run: ObservedRun) -> None:
        super().__init__(run)
        self._run = run

    def on_step_end(self, step: int, record: dict[str, Any], is_stopping: bool) -> None:
        run = self._run
        if not is_stopping and is_due(run.ctx.config.sample.every_steps, step):
            run.ctx.watch.set_phase("sample", step)
            with run.throughput.excluded("sample"):
                write_samples(run.ctx, run.built.parallel_model, run.inputs.tokenizer, step)


def write_samples(
    ctx: RunContext, parallel_model: ParallelModel, tokenizer: Tokenizer, step: int
) -> None:
    """Log samples of the model after the prompts of the recipe.

    Every rank calls it and generates the same text.
    """
    config = ctx.config
    with unsharded_for_decoding(parallel_model) as model:
        completions = generate(
            model,
            tokenizer,
            config.sample.prompts,
            max_tokens=config.sample.max_tokens,
            sampling=SamplingParams(SAMPLE_TEMPERATURE),
            seed=config.train.seed + step,
        )
    for prompt, completion in zip(config.sample.prompts, completions, strict=True):
        ctx.events.add("sample", step, prompt=prompt, text=completion.text)
        ctx.console.log_sample(step, prompt + completion.text)
