"""The model that fine-tuning or alignment begins from."""

from lmforge.core.data.tokenizer import Tokenizer
from lmforge.core.errors import UserError
from lmforge.core.model.config import ModelConfig
from lmforge.hf.pretrained import Pretrained, find_pretrained
from lmforge.post.options.align import AlignConfig
from lmforge.post.options.tuning import TunedConfig


def open_tuned_model(config: TunedConfig) -> tuple[Pretrained, Tokenizer, ModelConfig]:
    """The model that a recipe tunes, its tokenizer and its model config.

    Raises UserError where there are no weights.
    """
    pretrained = find_required_pretrained(config)
    pretrained.check_has_weights()
    pretrained.check_base(config.lora)
    if config.lora.base_dtype and pretrained.adapters and isinstance(config, AlignConfig) and config.reference is not None:
        way = "use a method without one (orpo, simpo), or merge them first (lmforge.save_model)"
        raise UserError(
            f"align.reference = {config.reference}: {pretrained.adapters} is adapters, which the reference would lack; {way}"
        )
    tokenizer = pretrained.tokenizer()
    return pretrained, tokenizer, pretrained.resolve_model_config(config.model, tokenizer.vocab_size)


def find_required_pretrained(config: TunedConfig) -> Pretrained:
    """The model that a recipe tunes. Raises UserError where it names none, or no data."""
    config.require_inputs()
    assert config.model.source is not None
    return find_pretrained(config.model.source, "weights").staged(config.data.stage_to)
