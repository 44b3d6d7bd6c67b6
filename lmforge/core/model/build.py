"""A model of a config, with its weights allocated."""

import torch

from lmforge.core.distributed.memory import check_fits
from lmforge.core.model.config import ModelConfig
from lmforge.core.model.flops import parameter_count
from lmforge.core.model.layers import LanguageModel

FP32_BYTES = 4


def build_model(config: ModelConfig, device: str | torch.device = "cpu") -> LanguageModel:
    """A model of this config in fp32.

    Its weights are allocated, not filled: `init_weights` or `load_folder` does that.

    Raises UserError where the device has no memory for them.
    """
    device = torch.device(device)
    if device.type != "meta":
        total = parameter_count(config).total
        check_fits(
            total * FP32_BYTES, device, f"a model of {total:,} parameters in fp32", "use a smaller one, or a larger machine"
        )
    with torch.device("meta"):
        model: LanguageModel = config.new_module()
    model.to_empty(device=device)
    model.tie_weights()
    return model
