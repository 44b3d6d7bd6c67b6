"""Measurements of the model while it trains: validation, scores of tasks, and generated samples.

Scores are the same as from `lmforge evaluate --tasks` on the checkpoint of that step.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from lmforge.config.sections import COMFORTABLE_MICRO_BATCH_TOKENS, SampleOptions
from lmforge.config.stage import StageConfig
from lmforge.data.tokenizer import Tokenizer
from lmforge.errors import UserError
from lmforge.evaluate.tasks import QuestionTask, TaskSettings, check_task, load_task, run_task
from lmforge.generate.engine import generate
from lmforge.generate.model_loading import LoadedModel, prefix_and_stop_ids
from lmforge.generate.sampling import SamplingParams
from lmforge.model.config import ModelConfig
from lmforge.model.layers import LanguageModel
from lmforge.parallel.parallel_model import ParallelModel
from lmforge.parallel.precision import uncompiled_blocks
from lmforge.train.inputs import RunInputs
from lmforge.train.trainer import Trainer
from lmforge.untrusted import quoted

# Maximum sequences in a batch of a task. It does not depend on the number of ranks, or the last bits of scores would differ.
MAX_TASK_BATCH_SIZE = 16
# val/NAME/… are metrics of alignment, and of the sources of a mixture.
RESERVED_TASK_NAMES = {"rewards": "alignment", "logps": "alignment", "tokens": "alignment"}
RESERVED_TASK_NAMES |= {"loss": "each source", "bits_per_byte": "each source"}


def open_validation_tasks(config: StageConfig, inputs: RunInputs) -> tuple[tuple[QuestionTask, int], ...]:
    """The tasks of a recipe, each with its batch size.

    Raises UserError for files, few-shot examples and lengths that cannot be used; nothing of the run has been written.
    """
    options, opened = config.validation, dict[str, tuple[QuestionTask, int]]()
    prefix_ids, _ = prefix_and_stop_ids(inputs.tokenizer, config.of_stage)
    for path in options.tasks:
        task = load_task(path)
        if task.name in opened:
            other = opened[task.name][0].path
            raise UserError(f"validation.tasks: {other} and {path} would both be logged as val/{task.name}/…; rename one")
        if task.name in RESERVED_TASK_NAMES:
            owner = RESERVED_TASK_NAMES[task.name]
            raise UserError(f"validation.tasks: {path}: val/{task.name}/… are metrics of {owner}; give the file another name")
        settings = TaskSettings(num_fewshot=options.num_fewshot, limit=options.task_limit)
        longest = check_task(task, inputs.tokenizer, inputs.model_config, prefix_ids, settings)
        opened[task.name] = task, max(1, min(MAX_TASK_BATCH_SIZE, COMFORTABLE_MICRO_BATCH_TOKENS // longest))
    return tuple(opened.values())


@contextmanager
def unsharded_for_decoding(parallel_model: ParallelModel) -> Iterator[LanguageModel]:
    """The model with all its weights on this rank, in its compute dtype. All ranks enter and leave together.

    Its blocks are not compiled, since each sequence length would need another graph. Attention is compiled where required.
    """
    with parallel_model.unsharded() as model, parallel_model.autocast(), uncompiled_blocks(model):
        yield model


def validate(trainer: Trainer, step: int) -> dict[str, float]:
    """Metrics of validation and scores of tasks, by name. Every rank calls it."""
    ctx, inputs, options = trainer.ctx, trainer.inputs, trainer.ctx.config.validation
    scores = trainer.batch_source.validate(step)
    if not inputs.tasks:
        return scores
    with unsharded_for_decoding(trainer.parallel_model) as model:
        prefix_and_stop = prefix_and_stop_ids(inputs.tokenizer, ctx.config.of_stage)
        loaded = LoadedModel(model, inputs.model_config, inputs.tokenizer, ctx.run.path, None, *prefix_and_stop)
        for task, batch_size in inputs.tasks:
            settings = TaskSettings(
                num_fewshot=options.num_fewshot,
                limit=options.task_limit,
                batch_size=batch_size,
                # Each batch is progress.
                on_batch=partial(ctx.watch.set_phase, "evaluate", step),
            )
            result = run_task(task, loaded, ctx.dist_ctx, settings)["metrics"]
            ctx.console.info(f"  {task.name}: {', '.join(f'{name} {score:.4f}' for name, score in result.items())}")
            scores |= {f"val/{task.name}/{name}": score for name, score in result.items()}
    return scores


def check_samples(config: StageConfig, model_config: ModelConfig, tokenizer: Tokenizer) -> None:
    """Raise UserError for sample prompts that are longer than the training sequences or the model's context."""
    sample, length, longest = config.sample, config.data.sequence_length, 0
    if sample == SampleOptions():
        return
    # Encoding a text that cannot fit would take long. A tokenizer's normalizer may shorten a text, by less than this factor.
    most_bytes = 4 * length * int(tokenizer.token_byte_lengths().max())
    for prompt in sample.prompts:
        count = len(tokenizer.encode(prompt)) if len(prompt.encode()) <= most_bytes else length + 1
        longest = max(longest, count)
        if count > length:
            way = f"does not fit into data.sequence_length = {length} tokens; shorten it"
            raise UserError(f"sample.prompts: {quoted(prompt)} {way}")
    limit = max(length, model_config.max_position_embeddings)
    if sample.every_steps is not None and longest + sample.max_tokens > limit:
        total = longest + sample.max_tokens
        raise UserError(f"sample.max_tokens: prompt and sample take {total} tokens, this model has positions for {limit}")


def write_samples(trainer: Trainer, step: int) -> None:
    """Log what the model writes after the prompts of the recipe. Every rank calls it and generates the same text."""
    config = trainer.ctx.config
    with unsharded_for_decoding(trainer.parallel_model) as model:
        completions = generate(
            model,
            trainer.inputs.tokenizer,
            config.sample.prompts,
            max_tokens=config.sample.max_tokens,
            sampling=SamplingParams(config.sample.temperature),
            seed=config.train.seed + step,
        )
    for prompt, completion in zip(config.sample.prompts, completions, strict=True):
        trainer.ctx.events.add("sample", step, prompt=prompt, text=completion.text)
        trainer.ctx.console.log_sample(step, prompt + completion.text)
