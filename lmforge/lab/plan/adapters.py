"""The adapters of a block, by which a step is predicted."""

from dataclasses import replace
from functools import cache

from lmforge.core.model.config import ModelConfig
from lmforge.core.model.lora import LoraLinear, ParameterAdapter
from lmforge.core.model.lora_config import LoraConfig, adapted_name
from lmforge.core.stages.parameter_counts import build_meta_model


@cache
def block_adapters(model_config: ModelConfig, lora: LoraConfig | None) -> LoraConfig | None:
    """The adapters of the block that has most of them, by the names of layers within it."""
    if lora is None:
        return None
    model = build_meta_model(model_config, lora)
    names = [
        [
            name
            for name, each in block.named_modules()
            if isinstance(each, LoraLinear | ParameterAdapter)
        ]
        for block in model.blocks
    ]
    most = max(names, key=len)
    parameters = tuple(adapted_name(name) for name in most if ".adapters." in name)
    return replace(
        lora,
        target_modules=tuple(name for name in most if ".adapters." not in name),
        target_parameters=parameters,
    )
