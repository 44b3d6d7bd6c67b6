"""Whether a model can be trained as a recipe says, before it is built."""

from lmforge.config.align import AlignConfig
from lmforge.config.batch_plan import BatchPlan
from lmforge.config.stage import StageConfig
from lmforge.data.tokenizer import Tokenizer
from lmforge.errors import UserError
from lmforge.model.config import ModelConfig
from lmforge.parallel.validate import check_parallel
from lmforge.plan.parameter_counts import build_meta_model, get_lora_config
from lmforge.train.optimizers.optimizer import assign_groups
from lmforge.train.validation import check_samples


def check_model(config: StageConfig, model_config: ModelConfig, batch_plan: BatchPlan, tokenizer: Tokenizer) -> None:
    """Raise UserError where a model with this config cannot be trained as the recipe says."""
    if config.model.embedding_initializer_range is not None and model_config.tie_word_embeddings:
        raise UserError(
            "model.embedding_initializer_range: this head is tied to the embedding; untie it, or leave that option out"
        )
    if model_config.reward and not (isinstance(config, AlignConfig) and config.align.method == "reward"):
        raise UserError(
            f"{config.model.source}: a reward model, which generates no text; only align.method = reward can start from it"
        )
    limit, length = model_config.max_sequence_length, config.data.sequence_length
    if limit is not None and length > limit:
        raise UserError(f"data.sequence_length = {length}: this model has positions for {limit} tokens; use at most that")
    check_samples(config, model_config, tokenizer)
    check_parallel(config.parallel, model_config, batch_plan)
    if config.optimizer.groups or get_lora_config(config) is not None:
        parameters = build_meta_model(config, model_config).named_parameters()
        assign_groups([name for name, each in parameters if each.requires_grad], config.optimizer.groups)
