"""Low-rank adapters (LoRA; Hu et al., arXiv 2106.09685): few weights that are trained beside frozen ones.

An adapted layer computes W x + scale · B A x. W keeps its name, `….q_proj.weight`, and A and B are called
`….q_proj.lora_A.weight` and `….q_proj.lora_B.weight`, as PEFT calls them. First values are initial.py's, PEFT's folders
are peft_folder.py's; what can be spread over ranks in which way is parallel/'s.
"""

import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lmforge.errors import UserError
from lmforge.interop.transformers_model import TransformersModel
from lmforge.model.dropout import ADAPTER_SITE, TokenRng, dropout
from lmforge.model.gpt2 import Conv1D
from lmforge.model.init_weights import LORA_SUFFIXES, copy_full_tensor
from lmforge.model.layers import LanguageModel

ALL_LINEAR = "all-linear"


@dataclass(frozen=True)
class LoraConfig:
    """Which layers of the blocks are adapted, and how. Raises UserError for numbers that cannot be.

    targets: each the last part or parts of layers' names (`q_proj`, `mlp.up_proj`), a regular expression that fits whole
        names, or "all-linear".
    dropout: of what goes into A, in training; keyed as all dropout is.
    rslora: scale by alpha / sqrt(rank) (arXiv 2312.03732) instead of alpha / rank.
    """

    rank: int
    alpha: float
    target_modules: tuple[str, ...] = (ALL_LINEAR,)
    dropout: float = 0.0
    use_rslora: bool = False

    def __post_init__(self) -> None:
        if self.rank < 1 or self.alpha <= 0:
            raise UserError(f"lora: rank {self.rank}, alpha {self.alpha}: both must be above zero")
        if not 0 <= self.dropout < 1:
            raise UserError(f"lora.dropout: {self.dropout} is not a share below 1")

    @property
    def scaling(self) -> float:
        return self.alpha / (math.sqrt(self.rank) if self.use_rslora else self.rank)


class LoraLinear(nn.Module):
    """A linear layer with an adapter. It has taken over the parameters of `layer`, and gives them back with `plain`."""

    def __init__(self, layer: nn.Module, config: LoraConfig, site: int) -> None:
        """`site` tells the layer from the others of its block, for dropout."""
        super().__init__()
        self._base_layer = (layer,)  # in a tuple, or it would be a module of this one
        _move_parameters(layer, self)
        self.transposed = isinstance(layer, Conv1D)
        inputs, outputs = reversed(self._out_in_weight.shape)
        like = {"device": self._out_in_weight.device, "dtype": self._out_in_weight.dtype}
        self.lora_A = nn.Linear(inputs, config.rank, bias=False, **like)
        self.lora_B = nn.Linear(config.rank, outputs, bias=False, **like)
        self.scaling, self.dropout_rate, self.site = config.scaling, config.dropout, site
        self.enabled = True

    @property
    def _out_in_weight(self) -> Tensor:
        """The weight as [outputs, inputs]: GPT-2's lie on their side."""
        assert isinstance(self.weight, Tensor)
        return self.weight.t() if self.transposed else self.weight

    def forward(self, x: Tensor, token_rng: TokenRng | None = None) -> Tensor:
        """x [..., inputs] → [..., outputs]; `noise` is the block's."""
        assert self.bias is None or isinstance(self.bias, Tensor)
        out = nn.functional.linear(x, self._out_in_weight, self.bias)
        if not self.enabled:
            return out
        fed = x if token_rng is None else dropout(x, self.dropout_rate, token_rng.rng_keys, self.site)
        return out + self.scaling * self.lora_B(self.lora_A(fed))

    def merge(self) -> None:
        """Add the adapter to the weight, in place."""
        assert isinstance(self.weight, Tensor)
        self.weight += lora_delta(self.scaling, self.lora_A.weight, self.lora_B.weight, self.transposed)

    def plain(self) -> nn.Module:
        """The layer without the adapter, with the parameters that are here now."""
        (layer,) = self._base_layer
        _move_parameters(self, layer)
        return layer


def lora_delta(scaling: float, lora_a: Tensor, lora_b: Tensor, transposed: bool) -> Tensor:
    """What an adapter adds to a weight, scale · B A of `down` [rank, inputs] and `up` [outputs, rank], [outputs, inputs] or
    `transposed`; in fp32, or fp64 where the adapter is."""
    wide = torch.promote_types(lora_a.dtype, torch.float32)
    product = scaling * (lora_b.to(wide) @ lora_a.to(wide))
    return product.t() if transposed else product


def _move_parameters(source: nn.Module, destination: nn.Module) -> None:
    for name in ("weight", "bias"):
        destination.register_parameter(name, source.get_parameter(name) if getattr(source, name) is not None else None)
        source.register_parameter(name, None)  # or it would keep a weight alive that is sharded elsewhere


def add_lora(model: LanguageModel, config: LoraConfig) -> None:
    """Give layers of `model`'s blocks adapters, in place, and freeze everything else but the head of a reward model.

    On any device, meta too, and before the model is recomputed, compiled or sharded. On a real device the adapters are
    allocated, not filled (initial.initialise_adapters, or `fill`). Raises UserError where a target is no layer.
    """
    if model.lora_config is not None:
        raise ValueError("the model has adapters already")
    if config.dropout and isinstance(model, TransformersModel):
        raise UserError("lora.dropout: not with model.implementation = transformers, which has none here; leave it out")
    layers = _linear_layers(model)
    chosen: set[str] = set()
    for target in config.target_modules:
        found = [name for name in layers if _matches_target(target, name)]
        if not found:
            known = ", ".join(sorted({name.rpartition(".")[2] for name in layers})) or "none that it knows"
            raise UserError(f"lora.target_modules: no linear layer of a block is called {target}; there are: {known}")
        chosen.update(found)
    if not chosen:
        raise UserError(f'lora.target_modules: names no layer; leave it out for "{ALL_LINEAR}"')
    model.requires_grad_(False)
    # A head that gives rewards is new, and there is nothing to be adapted in it.
    model.lm_head.requires_grad_(model.config.reward)
    for name, site in layers.items():
        if name in chosen:
            parent, _, last = name.rpartition(".")
            setattr(model.get_submodule(parent), last, LoraLinear(model.get_submodule(name), config, site))
    model.lora_config = config


def _linear_layers(model: LanguageModel) -> dict[str, int]:
    """The linear layers of the blocks by name, each with a place for dropout that no other in its block has."""
    names = {module: name for name, module in model.named_modules()}
    found: dict[str, int] = {}
    for block in model.blocks:
        linear = [module for module in block.modules() if isinstance(module, nn.Linear | Conv1D)]
        found |= {names[module]: ADAPTER_SITE * number for number, module in enumerate(linear, start=1)}
    return found


def _matches_target(target: str, name: str) -> bool:
    if target == ALL_LINEAR or name == target or name.endswith(f".{target}"):
        return True
    try:
        return re.fullmatch(target, name) is not None
    except re.error as problem:
        raise UserError(f"lora.target_modules: {target} is neither a name nor a regular expression ({problem})") from None


def lora_layers(model: nn.Module) -> Iterator[tuple[str, LoraLinear]]:
    """The adapted layers of a model, by name."""
    for name, module in model.named_modules():
        if isinstance(module, LoraLinear):
            yield name, module


def adapter_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The tensors of a model's adapters, by name."""
    return {name: parameter for name, parameter in model.named_parameters() if name.endswith(LORA_SUFFIXES)}


@torch.no_grad()
def fill(model: LanguageModel, tensors: Mapping[str, Tensor], where: str) -> None:
    """Give the adapters of `model` these values, whole tensors by name; of sharded ones each rank keeps its part.

    Raises UserError, beginning with `where` they come from, unless there is one of the right shape for each.
    """
    here = adapter_parameters(model)
    for name in sorted(here.keys() | tensors.keys()):
        ours, theirs = ([*each[name].shape] if name in each else "missing" for each in (here, tensors))
        if ours != theirs:
            raise UserError(f"{where}: adapters for another model: {name} is {theirs} there and {ours} in the model")
    for name, parameter in here.items():
        copy_full_tensor(parameter, tensors[name].to(parameter.dtype))


@torch.no_grad()
def merge(model: LanguageModel) -> None:
    """Add the adapters of `model` to its weights, in place: its layers are plain ones again, and trainable.

    For whole weights, of a model that is neither compiled nor sharded.
    """
    if any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        raise ValueError("gather sharded weights before merging adapters into them")
    for name, layer in list(lora_layers(model)):
        layer.merge()
        parent, _, last = name.rpartition(".")
        setattr(model.get_submodule(parent), last, layer.plain())
    model.lora_config = None
    model.requires_grad_(True)


@contextmanager
def disable_adapters(model: nn.Module) -> Iterator[None]:
    """`model` as it was before it got adapters, for forward passes without gradients: what alignment refers to."""
    layers = [layer for _, layer in lora_layers(model)]
    for layer in layers:
        layer.enabled = False
    try:
        yield
    finally:
        for layer in layers:
            layer.enabled = True
