"""What computes: shapes and their presets, the two model families, any other through transformers, their attention and weights.

Importing this package, shapes.py or flops.py does not import torch.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from lmforge.model.config import ModelConfig
    from lmforge.model.layers import LanguageModel


def build_model(
    config: "ModelConfig",
    *,
    seed: int | None,
    device: "str | torch.device" = "cpu",
    embedding_std: float | None = None,
) -> "LanguageModel":
    """A model of this shape in fp32, initialised from `seed` (see initial.py, for `embedding_deviation` too).

    With seed None the weights are left as allocated, which is what loading, or device "meta", wants.
    """
    import torch

    from lmforge.interop.transformers_config import TransformersConfig
    from lmforge.interop.transformers_model import TransformersModel
    from lmforge.model.gpt2 import GPT2
    from lmforge.model.init_weights import init_weights
    from lmforge.model.llama import Llama

    with torch.device("meta"):
        model: LanguageModel
        if isinstance(config, TransformersConfig):
            model = TransformersModel(config)
        else:
            model = Llama(config) if config.family == "llama" else GPT2(config)
    model.to_empty(device=device)
    model.tie_weights()
    if seed is not None:
        init_weights(model, seed, embedding_std)
    return model
