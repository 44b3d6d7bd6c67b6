"""A recipe's model: whether it can be trained, the model with its first weights, distributed over ranks, and its optimizer."""

from collections.abc import Callable

import torch

from lmforge.checkpoint import CorruptCheckpoint
from lmforge.cluster.distributed import DistributedContext
from lmforge.config.align import AlignConfig
from lmforge.config.batch_plan import BatchPlan
from lmforge.config.sections import SampleOptions
from lmforge.config.stage import StageConfig
from lmforge.config.tuning import TunedConfig
from lmforge.data.tokenizer import Tokenizer
from lmforge.errors import UserError
from lmforge.model import build_model
from lmforge.model.config import ModelConfig
from lmforge.model.init_weights import init_adapters, init_weights
from lmforge.model.layers import LanguageModel
from lmforge.model.lora import add_lora
from lmforge.objectives.objective import Objective
from lmforge.parallel.parallel_model import ParallelModel
from lmforge.parallel.parallelize import parallelize
from lmforge.parallel.validate import check_parallel
from lmforge.plan.parameter_counts import build_meta_model, get_lora_config
from lmforge.train.optimizer import assign_groups, build_optimizer
from lmforge.untrusted import quoted

MASTER_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def check_model(config: StageConfig, model_config: ModelConfig, batch_plan: BatchPlan, tokenizer: Tokenizer) -> None:
    """Raise UserError where a model with this config cannot be trained as the recipe says."""
    if config.model.embedding_initializer_range is not None and model_config.tie_word_embeddings:
        raise UserError(
            "model.embedding_initializer_range: this head is tied to the embedding; untie it, or leave that option out"
        )
    if model_config.reward and not (isinstance(config, AlignConfig) and config.align.method == "reward"):
        raise UserError(
            f"{config.model.source}: a reward model, which writes nothing; only align.method = reward goes on from it"
        )
    limit, length = model_config.max_sequence_length, config.data.sequence_length
    if limit is not None and length > limit:
        raise UserError(f"data.sequence_length = {length}: this model has positions for {limit} tokens; use at most that")
    _check_samples(config, model_config, tokenizer)
    check_parallel(config.parallel, model_config, batch_plan)
    if config.optimizer.groups or get_lora_config(config) is not None:
        parameters = build_meta_model(config, model_config).named_parameters()
        assign_groups([name for name, each in parameters if each.requires_grad], config.optimizer.groups)


def _check_samples(config: StageConfig, model_config: ModelConfig, tokenizer: Tokenizer) -> None:
    """Raise UserError for prompts of samples that are longer than what the model is trained on, or reads."""
    sample, length, longest = config.sample, config.data.sequence_length, 0
    if sample == SampleOptions():
        return
    # Encoding a text that cannot fit would take long. A tokenizer may shorten it first, by less than this.
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


def build_model_and_optimizer(
    config: StageConfig,
    model_config: ModelConfig,
    objective: Objective,
    dist_ctx: DistributedContext,
    dtype: torch.dtype,
    compiled: bool,
    fill: Callable[[LanguageModel], None] | None,
) -> tuple[ParallelModel, torch.optim.Optimizer]:
    """The model of a recipe, distributed over the ranks, and its optimizer. `fill` gives it weights; None: left unset.

    Every rank calls it. Raises UserError, on every rank, where the recipe does not fit them.
    """
    model = build_model(model_config, "meta").to(MASTER_DTYPES[config.train.master_dtype])
    model.dropout = config.model.dropout
    if isinstance(config, TunedConfig):
        model.neftune_noise_alpha = config.model.neftune_noise_alpha
        if (adapters := get_lora_config(config)) is not None:
            add_lora(model, adapters)
    parallel_model = parallelize(
        model,
        objective.loss,
        dist_ctx=dist_ctx,
        dtype=dtype,
        compile_model=compiled,
        float8=config.train.float8,
        options=config.parallel,
        init_weights=fill or (lambda model: None),
    )
    return parallel_model, build_optimizer(parallel_model.model, config.optimizer, parallel_model.parameter_shapes)


def fill_weights(
    config: StageConfig,
    dist_ctx: DistributedContext,
    load_weights: Callable[[LanguageModel], frozenset[str]] | None,
    model: LanguageModel,
) -> None:
    """Give a model its first weights: those that `load_weights` reads, or random ones. Nothing is sent between ranks."""
    with dist_ctx.raise_on_all():
        try:
            if load_weights is None:
                init_weights(model, config.train.seed, config.model.embedding_initializer_range)
            else:
                init_adapters(model, config.train.seed, new_names=load_weights(model))
        except CorruptCheckpoint as reason:
            raise UserError(f"{config.model.source}: {reason}; name another checkpoint") from None
