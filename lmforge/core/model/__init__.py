"""Our architectures: their families, configs and presets, attention, caches, adapters and FLOPs.

interop/ reads config.json and folders of weights, and wraps models of transformers as a `LanguageModel`. parallel/ distributes
a model.

Begin with decoder.py, the blocks of most families, then layers.py (`LanguageModel`: what every model offers), attention.py and
family.py (what a family is). Other packages use `build_model`, `ModelConfig` (config.py), `LanguageModel`, `init_weights`,
`add_lora` (lora.py) and flops.py. Importing this package, config.py or flops.py does not import torch.
"""

from typing import TYPE_CHECKING

FP32_BYTES = 4

if TYPE_CHECKING:
    import torch

    from lmforge.core.model.config import ModelConfig
    from lmforge.core.model.layers import LanguageModel


def build_model(config: "ModelConfig", device: "str | torch.device" = "cpu") -> "LanguageModel":
    """A model of this config in fp32. Its weights are allocated, not filled: `init_weights` or `load_folder` does that.

    Raises UserError where the device has no memory for them.
    """
    import torch

    from lmforge.core.distributed.memory import check_fits
    from lmforge.core.model.flops import parameter_count

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
