"""How many parameters a recipe trains, and the FLOPs per token, including adapters."""

from collections.abc import Iterable
from dataclasses import replace
from functools import cache

from torch import nn

from lmforge.core.model.build import build_model
from lmforge.core.model.config import ModelConfig
from lmforge.core.model.flops import adapted_flops_per_token, flops_per_token
from lmforge.core.model.layers import LanguageModel
from lmforge.core.model.lora import LoraConfig, LoraLinear, ParameterAdapter, adapted_name, adapter_parameters, add_lora
from lmforge.core.model.quantization.matrices import quantized_matrices
from lmforge.core.model.state_bytes import ParameterCounts, count_all
from lmforge.core.options.stage import StageConfig
from lmforge.core.parallel.validate import check_float8_layers


def get_lora_config(config: StageConfig) -> LoraConfig | None:
    """The adapters of a recipe; None where all weights are trained."""
    adapters = config.adapter_options
    if adapters is None or adapters.rank is None:
        return None
    return LoraConfig(**adapters.model_dump())


def build_meta_model(model_config: ModelConfig, lora: LoraConfig | None) -> LanguageModel:
    """The model, with its adapters, on the meta device: shapes and names without memory."""
    model = build_model(model_config, "meta")
    if lora is not None:
        add_lora(model, lora)
    return model


@cache
def count_parameters(model_config: ModelConfig, lora: LoraConfig | None) -> ParameterCounts:
    """Numbers of parameters of a model with its adapters."""
    counts = count_all(model_config)
    if lora is None:
        return counts

    def trained(parameters: Iterable[nn.Parameter]) -> int:
        return sum(parameter.numel() for parameter in parameters if parameter.requires_grad)

    # Frozen weights are counted as flops.py counts them, which knows wrapped models too.
    model = build_meta_model(model_config, lora)
    adapters = sum(tensor.numel() for tensor in adapter_parameters(model).values())
    matrices = [parameter for parameter in model.blocks.parameters() if parameter.ndim >= 2]
    quantized = quantized_matrices(model).values()
    return ParameterCounts(
        counts.total + adapters,
        trained(model.parameters()),
        trained(matrices),
        sum(each.shape.numel() for each in quantized),
        sum(each.stored_shape.numel() for each in quantized),
    )


@cache
def block_adapters(model_config: ModelConfig, lora: LoraConfig | None) -> LoraConfig | None:
    """The adapters of the block that has most of them, by the names of layers within it."""
    if lora is None:
        return None
    model = build_meta_model(model_config, lora)
    names = [
        [name for name, each in block.named_modules() if isinstance(each, LoraLinear | ParameterAdapter)]
        for block in model.blocks
    ]
    most = max(names, key=len)
    parameters = tuple(adapted_name(name) for name in most if ".adapters." in name)
    return replace(lora, target_modules=tuple(name for name in most if ".adapters." not in name), target_parameters=parameters)


def training_flops_per_token(config: StageConfig, model_config: ModelConfig, sequence_length: int) -> float:
    """FLOPs of training on one token: those of core/model/flops.py, less the gradients of frozen
    weights.
    """
    lora = get_lora_config(config)
    if lora is None:
        return float(flops_per_token(model_config, sequence_length))
    counts = count_parameters(model_config, lora)
    return float(adapted_flops_per_token(model_config, sequence_length, counts.total, counts.trained))


def check_float8(model: ModelConfig) -> None:
    """Raise UserError where the linear layers of blocks cannot be multiplied in float8."""
    block = build_meta_model(replace(model, num_hidden_layers=1, layer_types=None), None).blocks[0]
    layers = {name: each for name, each in block.named_modules() if isinstance(each, nn.Linear)}
    sizes = {name.rpartition(".")[2]: (each.in_features, each.out_features) for name, each in layers.items()}
    check_float8_layers(model, sizes)
