"""The options of low-rank adapters."""

from collections.abc import Iterator
from typing import Literal

from lmforge.core.options.options import Options, option
from lmforge.core.options.ranges import MODEL_RANGES, PROBABILITY, SCALE


class LoraOptions(Options):
    """LoRA: low-rank adapters (Hu et al., arXiv 2106.09685) are trained beside frozen weights.

    Names are PEFT's.
    """

    rank: int | None = option(None, "rank of the adapters (PEFT: r); none trains all weights", **MODEL_RANGES["hidden_size"])
    alpha: float = option(32.0, "the adapters' output is scaled by alpha / rank (PEFT: lora_alpha)", **SCALE)
    target_modules: tuple[str, ...] = option(("all-linear",), "layers with adapters: names such as q_proj, or all-linear")
    target_parameters: tuple[str, ...] = option(
        (), "parameters of mixtures of experts with adapters: experts.gate_up_proj, experts.down_proj, gate.weight"
    )
    dropout: float = option(0.0, "dropout probability of the adapters' inputs (PEFT: lora_dropout)", **PROBABILITY)
    use_rslora: bool = option(False, "scale by alpha / sqrt(rank) instead (arXiv 2312.03732)")
    base_dtype: Literal["nf4", "int8"] | None = option(
        None,
        "the frozen matrices of the blocks in 4 bits (nf4: QLoRA, arXiv 2305.14314) or 8, as bitsandbytes stores them; none:"
        " in train.master_dtype",
    )
    double_quant: bool = option(False, "lora.base_dtype = nf4: its scales in 8 bits too (bnb_4bit_use_double_quant)")

    def problems(self) -> Iterator[str]:
        if self.base_dtype and self.rank is None:
            yield f"lora.base_dtype = {self.base_dtype}: nothing would be trained with lora.rank = none; give lora.rank"
        if self.double_quant and self.base_dtype != "nf4":
            yield "lora.double_quant: only with lora.base_dtype = nf4; leave it out"
        if self.base_dtype and (kept := [each for each in self.target_parameters if each.endswith("gate.weight")]):
            yield (
                f"lora.base_dtype = {self.base_dtype}: {kept[0]}, of lora.target_parameters, is a router's and stays in full"
                " precision; leave one of the two out"
            )
        if self.dropout and self.target_parameters:
            yield "lora.dropout: not with lora.target_parameters, as in PEFT; leave one of the two out"
