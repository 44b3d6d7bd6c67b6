"""Low-rank adapters (LoRA; Hu et al., arXiv 2106.09685): a small number of trained weights besides
the frozen ones.

An adapted layer computes W x + scaling · B A x. W keeps its name, `….q_proj.weight`; A and B are
called `….q_proj.lora_A.weight` and `….q_proj.lora_B.weight`, as in PEFT. Their first values are in
init_weights.py, PEFT's folders and merging in hf/merge_adapters.py.

The matrices of a mixture of experts are parameters of modules of their own: that of
`….experts.gate_up_proj` is called `….experts.adapters.gate_up_proj.lora_A.weight`, [experts, rank,
inputs], and B is [experts, outputs, rank].
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from lmforge.core.errors import UserError
from lmforge.core.files.untrusted import compile_pattern
from lmforge.core.model.init_weights import LORA_SUFFIXES
from lmforge.core.model.layers import Conv1D, LanguageModel, local_weight, to_autocast_dtype
from lmforge.core.model.lora_config import ALL_LINEAR, LoraConfig
from lmforge.core.model.mixture.experts import Experts, Router
from lmforge.core.model.mixture.grouped_mm import grouped_linear
from lmforge.core.model.quantization.formats import BlockFormat
from lmforge.core.model.quantization.matrices import QuantizedMatrix, quantize_parameter
from lmforge.core.model.rng.token_rng import ADAPTER_SITE, TokenRng, dropout


class LoraLinear(nn.Module):
    """A linear layer with an adapter.

    It takes over the parameters of `layer`; a quantized weight is the bytes of it.
    """

    # What is cast to the compute dtype once a step.
    matrices = ("weight",)
    quantized: Mapping[str, QuantizedMatrix] = MappingProxyType({})

    def __init__(self, layer: nn.Linear | Conv1D, config: LoraConfig, site: int) -> None:
        """`site` distinguishes the layer from the others of its block, for dropout."""
        super().__init__()
        self.weight = layer.weight
        self.bias = layer.bias
        self.transposed = isinstance(layer, Conv1D)
        outputs, inputs = self._out_in_weight().shape
        like: Any = {"device": layer.weight.device, "dtype": layer.weight.dtype}
        self.lora_A = nn.Linear(inputs, config.rank, bias=False, **like)
        self.lora_B = nn.Linear(config.rank, outputs, bias=False, **like)
        self.scaling = config.scaling
        self.dropout_rate = config.dropout
        self.site = site
        self.enabled = True
        if config.stored is not None:
            quantize_parameter(self, "weight", config.stored, self.transposed)

    def _out_in_weight(self) -> Tensor:
        """The weight as [outputs, inputs]; GPT-2 stores it transposed."""
        return self.weight.t() if self.transposed else self.weight

    def forward(self, x: Tensor, token_rng: TokenRng | None = None) -> Tensor:
        """x [..., inputs] → [..., outputs]; `token_rng` is the block's."""
        if (matrix := self.quantized.get("weight")) is not None:
            out = matrix.multiply(to_autocast_dtype(x), self.weight, self.bias)
        else:
            out = nn.functional.linear(x, self._out_in_weight(), self.bias)
        if not self.enabled:
            return out
        dropped = (
            x if token_rng is None else dropout(x, self.dropout_rate, token_rng.rng_keys, self.site)
        )
        return out + self.scaling * self.lora_B(self.lora_A(dropped))


class QuantizedLinear(nn.Module):
    """A frozen linear layer whose weight is quantized; it takes over the bias of `layer`.

    `weight`: the bytes.
    """

    quantized: Mapping[str, QuantizedMatrix]

    def __init__(self, layer: nn.Linear | Conv1D, stored: BlockFormat) -> None:
        super().__init__()
        self.weight = layer.weight
        self.bias = layer.bias
        quantize_parameter(self, "weight", stored, transposed=isinstance(layer, Conv1D))

    def forward(self, x: Tensor) -> Tensor:
        return self.quantized["weight"].multiply(to_autocast_dtype(x), self.weight, self.bias)


class ParameterAdapter(nn.Module):
    """The adapter of a matrix, or of a stack of them, of a mixture of experts, which calls it."""

    def __init__(self, parameter: Tensor, config: LoraConfig) -> None:
        super().__init__()
        *experts, outputs, inputs = parameter.shape
        self.lora_A = nn.Module()
        self.lora_B = nn.Module()
        self.lora_A.weight = nn.Parameter(parameter.new_empty(*experts, config.rank, inputs))
        self.lora_B.weight = nn.Parameter(parameter.new_empty(*experts, outputs, config.rank))
        self.scaling = config.scaling
        self.enabled = True

    def forward(self, out: Tensor, rows: Tensor, ends: Tensor | None = None) -> Tensor:
        """out [rows, outputs] of the parameter for rows [rows, inputs]; `ends` of a stack is as in
        `multiply_groups`.
        """
        if not self.enabled:
            return out
        a, b = (local_weight(each.weight) for each in (self.lora_A, self.lora_B))  # type: ignore[arg-type]
        if ends is None:
            return out + self.scaling * nn.functional.linear(
                nn.functional.linear(rows, a.to(rows.dtype)), b.to(rows.dtype)
            )
        return out + self.scaling * grouped_linear(
            grouped_linear(rows, to_autocast_dtype(a), ends), to_autocast_dtype(b), ends
        )


def lora_delta(scaling: float, lora_a: Tensor, lora_b: Tensor, transposed: bool) -> Tensor:
    """What an adapter adds to a weight: scaling · B A of A [rank, inputs] and B [outputs, rank], or
    stacks of them, [outputs, inputs] or transposed; in fp32, or fp64 where the adapter is.
    """
    dtype = torch.promote_types(lora_a.dtype, torch.float32)
    product = scaling * (lora_b.to(dtype) @ lora_a.to(dtype))
    return product.t() if transposed else product


def add_lora(model: LanguageModel, config: LoraConfig) -> None:
    """Give layers of the blocks adapters, in place, and freeze everything else but the head of a
    reward model.

    With a `base_dtype` the linear layers of the blocks are quantized, those without adapters too.

    On any device, meta too, and before the model is checkpointed, compiled or sharded. The adapters
    are allocated, not filled (init_weights.init_adapters). Raises UserError where a target module
    matches no layer.
    """
    if model.lora_config is not None:
        raise ValueError("the model has adapters already")
    if config.dropout and not model.has_dropout:
        raise UserError(
            "lora.dropout: not with model.implementation = transformers, which has none here; leave"
            " it out"
        )
    layers = _linear_layers(model)
    chosen: set[str] = set()
    for target in config.target_modules:
        matches = [name for name in layers if _matches_target(target, name)]
        if not matches:
            known = (
                ", ".join(sorted({name.rpartition(".")[2] for name in layers}))
                or "none that it knows"
            )
            raise UserError(
                f"lora.target_modules: no linear layer of a block is called {target}; there are:"
                f" {known}"
            )
        chosen.update(matches)
    parameters = [
        name for target in config.target_parameters for name in _adaptable_parameters(model, target)
    ]
    if not chosen and not parameters:
        raise UserError(f'lora.target_modules: names no layer; leave it out for "{ALL_LINEAR}"')
    model.requires_grad_(False)
    # The head of a reward model is new, so it is trained without an adapter.
    model.lm_head.requires_grad_(model.config.reward)
    for name, (layer, site) in layers.items():
        if name in chosen:
            model.set_submodule(name, LoraLinear(layer, config, site))
        elif config.stored is not None:
            model.set_submodule(name, QuantizedLinear(layer, config.stored))
    for name in dict.fromkeys(parameters):
        owner, _, parameter = name.rpartition(".")
        model.get_submodule(f"{owner}.adapters").add_module(
            parameter, ParameterAdapter(model.get_parameter(name), config)
        )
    if config.stored is not None:
        for module in [each for each in model.modules() if isinstance(each, Experts)]:
            for name in module.matrices:
                quantize_parameter(module, name, config.stored)
        _check_stacks(model, config)
    model.lora_config = config


def _check_stacks(model: LanguageModel, config: LoraConfig) -> None:
    """Raise UserError where a stack of matrices is not quantized: most of a mixture's weights."""
    for name, each in model.blocks.named_parameters():
        # Kernels of convolutions have one row.
        if (
            each.ndim > 2
            and min(each.shape[-2:]) > 1
            and each.dtype != torch.uint8
            and not name.endswith(LORA_SUFFIXES)
        ):
            way = "use model.implementation = lmforge where it has the family, or leave it out"
            raise UserError(
                f"lora.base_dtype = {config.base_dtype}: {name} would stay in full precision; {way}"
            )


def _linear_layers(model: LanguageModel) -> dict[str, tuple[nn.Linear | Conv1D, int]]:
    """The linear layers of the blocks by name, each with a site for dropout that is unique in its
    block.
    """
    layers: dict[str, tuple[nn.Linear | Conv1D, int]] = {}
    for index, block in enumerate(model.blocks):
        prefix = f"{model.blocks_name}.{index}."
        linear = [
            (prefix + name, each)
            for name, each in block.named_modules()
            if isinstance(each, nn.Linear | Conv1D)
        ]
        layers |= {
            name: (each, ADAPTER_SITE * number)
            for number, (name, each) in enumerate(linear, start=1)
        }
    return layers


def _adaptable_parameters(model: LanguageModel, target: str) -> list[str]:
    """The parameters of mixtures whose names end with `target`, as PEFT matches them."""
    known = [
        f"{owner}.{name}"
        for owner, module in model.named_modules()
        if isinstance(module, Experts | Router)
        for name, _ in module.named_parameters(recurse=False)
        if not name.endswith("bias")
    ]
    if not (matches := [name for name in known if f".{name}".endswith(f".{target}")]):
        names = (
            ", ".join(sorted({".".join(name.split(".")[-2:]) for name in known}))
            or "none, since it has no experts"
        )
        raise UserError(
            f"lora.target_parameters: no parameter of a mixture of experts is called {target};"
            f" there are: {names}"
        )
    return matches


def _matches_target(target: str, name: str) -> bool:
    if target == ALL_LINEAR or name == target or name.endswith(f".{target}"):
        return True
    return compile_pattern(target, "lora.target_modules").fullmatch(name) is not None


@contextmanager
def disable_adapters(model: nn.Module) -> Iterator[None]:
    """A context in which `model` computes without its adapters, for forward passes without
    gradients: the reference of alignment.
    """
    layers = [
        module for module in model.modules() if isinstance(module, LoraLinear | ParameterAdapter)
    ]
    for layer in layers:
        layer.enabled = False
    try:
        yield
    finally:
        for layer in layers:
            layer.enabled = True
