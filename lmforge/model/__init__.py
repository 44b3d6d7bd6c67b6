"""What computes: shapes and their presets, the two model families, any other through transformers, their attention and weights.

Importing this package, shapes.py or flops.py does not import torch.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from lmforge.model.layers import LanguageModel
    from lmforge.model.shapes import ModelConfig


def build(
    config: "ModelConfig",
    *,
    seed: int | None,
    device: "str | torch.device" = "cpu",
    embedding_deviation: float | None = None,
) -> "LanguageModel":
    """A model of this shape in fp32, initialised from `seed` (see initial.py, for `embedding_deviation` too).

    With seed None the weights are left as allocated, which is what loading, or device "meta", wants.
    """
    import torch

    from lmforge.model.decoder import Decoder
    from lmforge.model.foreign import ForeignModel
    from lmforge.model.foreign_config import ForeignConfig
    from lmforge.model.gpt2 import GPT2
    from lmforge.model.initial import initialise

    with torch.device("meta"):
        model: LanguageModel
        if isinstance(config, ForeignConfig):
            model = ForeignModel(config)
        else:
            model = Decoder(config) if config.family == "llama" else GPT2(config)
    model.to_empty(device=device)
    model.tie()
    if seed is not None:
        initialise(model, seed, embedding_deviation)
    return model
