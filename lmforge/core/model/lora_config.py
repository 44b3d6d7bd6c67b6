"""Which layers of a model get low-rank adapters, and what their tensors are called."""

import math
from dataclasses import dataclass

from torch import nn

from lmforge.core.model.init_weights import LORA_SUFFIXES
from lmforge.core.model.quantization.formats import Bits, BlockFormat

ALL_LINEAR = "all-linear"


@dataclass(frozen=True)
class LoraConfig:
    """Which layers of the blocks are adapted, and how. Its numbers are checked by `LoraOptions`.

    target_modules: each is the end of layer names (`q_proj`, `mlp.up_proj`), a regular expression
        that matches full names, or "all-linear".
    target_parameters: each is the end of the names of parameters of mixtures of experts
        (`experts.gate_up_proj`, `gate.weight`). These have no dropout, as in PEFT.
    dropout: of the input of A, in training; a function of rng keys as all dropout is.
    use_rslora: scale by alpha / sqrt(rank) (arXiv 2312.03732) instead of alpha / rank.
    base_dtype: "nf4" or "int8": all linear layers of the blocks are stored so, those without
        adapters too (QLoRA, arXiv 2305.14314), and with double_quant the scales of NF4 in 8 bits.
        None: as they are.
    """

    rank: int
    alpha: float
    target_modules: tuple[str, ...] = (ALL_LINEAR,)
    target_parameters: tuple[str, ...] = ()
    dropout: float = 0.0
    use_rslora: bool = False
    base_dtype: Bits | None = None
    double_quant: bool = False

    @property
    def stored(self) -> BlockFormat | None:
        """How the frozen matrices are stored; None: as they are."""
        return None if self.base_dtype is None else BlockFormat(self.base_dtype, self.double_quant)

    @property
    def scaling(self) -> float:
        return self.alpha / (math.sqrt(self.rank) if self.use_rslora else self.rank)


def adapted_name(adapter: str) -> str:
    """The name of the weight that an adapter of this name adds to."""
    return adapter.replace(".adapters.", ".") if ".adapters." in adapter else f"{adapter}.weight"


def adapter_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The tensors of a model's adapters, by name."""
    return {
        name: parameter
        for name, parameter in model.named_parameters()
        if name.endswith(LORA_SUFFIXES)
    }
