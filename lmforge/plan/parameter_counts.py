"""How many parameters a recipe trains, and the FLOPs per token, including adapters."""

from collections.abc import Iterable

from torch import nn

from lmforge.config.stage import StageConfig
from lmforge.config.tuning import TunedConfig
from lmforge.model import build_model
from lmforge.model.config import ModelConfig
from lmforge.model.flops import adapted_flops_per_token, flops_per_token
from lmforge.model.layers import LanguageModel
from lmforge.model.lora import LoraConfig, adapter_parameters, add_lora
from lmforge.plan.memory import ParameterCounts, count_all


def get_lora_config(config: StageConfig) -> LoraConfig | None:
    """The adapters of a recipe; None where all weights are trained."""
    if not isinstance(config, TunedConfig) or config.lora.rank is None:
        return None
    return LoraConfig(**config.lora.model_dump())


def build_meta_model(config: StageConfig, model_config: ModelConfig) -> LanguageModel:
    """The model of a recipe, with its adapters, on the meta device: shapes and names without memory."""
    model = build_model(model_config, "meta")
    if (lora := get_lora_config(config)) is not None:
        add_lora(model, lora)
    return model


def count_parameters(config: StageConfig, model_config: ModelConfig) -> ParameterCounts:
    """Numbers of parameters of a recipe's model, adapters included."""
    counts = count_all(model_config)
    if get_lora_config(config) is None:
        return counts

    def trained(parameters: Iterable[nn.Parameter]) -> int:
        return sum(parameter.numel() for parameter in parameters if parameter.requires_grad)

    # Frozen weights are counted as flops.py counts them, which knows wrapped models too.
    model = build_meta_model(config, model_config)
    adapters = sum(tensor.numel() for tensor in adapter_parameters(model).values())
    matrices = [parameter for parameter in model.blocks.parameters() if parameter.ndim == 2]
    return ParameterCounts(counts.total + adapters, trained(model.parameters()), trained(matrices))


def adapter_shapes(config: StageConfig, model_config: ModelConfig) -> tuple[tuple[int, int], ...]:
    """(rows, columns) of the adapters of the block that has most of them; empty where all weights are trained."""
    if get_lora_config(config) is None:
        return ()
    model = build_meta_model(config, model_config)
    blocks = [[(each.shape[0], each.shape[1]) for each in adapter_parameters(block).values()] for block in model.blocks]
    return tuple(max(blocks, key=lambda shapes: sum(rows * columns for rows, columns in shapes)))


def training_flops_per_token(config: StageConfig, model_config: ModelConfig, sequence_length: int) -> float:
    """FLOPs of training on one token: those of model/flops.py, less the gradients of frozen weights."""
    if get_lora_config(config) is None:
        return float(flops_per_token(model_config, sequence_length))
    counts = count_parameters(config, model_config)
    return float(adapted_flops_per_token(model_config, sequence_length, counts.total, counts.trained))
