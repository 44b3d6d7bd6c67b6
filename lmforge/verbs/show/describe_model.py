"""What `lmforge show` says about a model config: its sizes, and what it costs to train."""

from lmforge.config.sections import OptimizerOptions
from lmforge.model.config import ModelConfig, get_preset
from lmforge.model.flops import FLOPS_CONVENTION, parameter_count
from lmforge.model.presets import PRESETS
from lmforge.verbs.dry_run import describe_cost

DEFAULT_SEQUENCE_LENGTH = 4096


def describe_model(model: ModelConfig, title: str, sequence_length: int | None = None) -> str:
    """A model config and what it costs at a sequence length (default: the model's, up to DEFAULT_SEQUENCE_LENGTH)."""
    heads = f"{model.num_attention_heads} heads of {model.head_dim}"
    if model.num_key_value_heads != model.num_attention_heads:
        heads += f" ({model.num_key_value_heads} for keys and values)"
    length = sequence_length or min(model.max_position_embeddings, DEFAULT_SEQUENCE_LENGTH)
    return (
        f"{title}\n"
        f"config     {model.model_type}: {model.num_hidden_layers} layers, width {model.hidden_size},"
        f" feed-forward {model.intermediate_size}, {heads}\n"
        f"vocabulary {model.vocab_size:,}, {'tied' if model.tie_word_embeddings else 'untied'};"
        f" positions {model.max_position_embeddings:,}\n"
        f"{describe_cost(model, length, OptimizerOptions(), 'fp32')}\n"
        f"{FLOPS_CONVENTION}"
    )


def list_presets() -> str:
    """A line for each preset."""
    rows = []
    for name in PRESETS:
        model = get_preset(name)
        rows.append(
            f"{name:<16} {parameter_count(model).total / 1e6:>10,.1f} M  {model.model_type:<8}"
            f" {model.num_hidden_layers:>3} layers, width {model.hidden_size:>6}, vocabulary {model.vocab_size:>7,}"
        )
    return "\n".join(rows)
