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

from lmforge.errors import Mistake
from lmforge.model.dropout import ADAPTER_SITE, Noise, dropout
from lmforge.model.foreign import ForeignModel
from lmforge.model.gpt2 import Conv1D
from lmforge.model.initial import ADAPTERS, place
from lmforge.model.layers import LanguageModel

ALL_LINEAR = "all-linear"


@dataclass(frozen=True)
class LoraConfig:
    """Which layers of the blocks are adapted, and how. Raises Mistake for numbers that cannot be.

    targets: each the last part or parts of layers' names (`q_proj`, `mlp.up_proj`), a regular expression that fits whole
        names, or "all-linear".
    dropout: of what goes into A, in training; keyed as all dropout is.
    rslora: scale by alpha / sqrt(rank) (arXiv 2312.03732) instead of alpha / rank.
    """

    rank: int
    alpha: float
    targets: tuple[str, ...] = (ALL_LINEAR,)
    dropout: float = 0.0
    rslora: bool = False

    def __post_init__(self) -> None:
        if self.rank < 1 or self.alpha <= 0:
            raise Mistake(f"lora: rank {self.rank}, alpha {self.alpha}: both must be above zero")
        if not 0 <= self.dropout < 1:
            raise Mistake(f"lora.dropout: {self.dropout} is not a share below 1")

    @property
    def scale(self) -> float:
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)


class Adapted(nn.Module):
    """A linear layer with an adapter. It has taken over the parameters of `layer`, and gives them back with `plain`."""

    def __init__(self, layer: nn.Module, config: LoraConfig, site: int) -> None:
        """`site` tells the layer from the others of its block, for dropout."""
        super().__init__()
        self._layer = (layer,)  # in a tuple, or it would be a module of this one
        _hand_over(layer, self)
        self.transposed = isinstance(layer, Conv1D)
        inputs, outputs = reversed(self._upright.shape)
        like = {"device": self._upright.device, "dtype": self._upright.dtype}
        self.lora_A = nn.Linear(inputs, config.rank, bias=False, **like)
        self.lora_B = nn.Linear(config.rank, outputs, bias=False, **like)
        self.scale, self.rate, self.site = config.scale, config.dropout, site
        self.on = True

    @property
    def _upright(self) -> Tensor:
        """The weight as [outputs, inputs]: GPT-2's lie on their side."""
        assert isinstance(self.weight, Tensor)
        return self.weight.t() if self.transposed else self.weight

    def forward(self, x: Tensor, noise: Noise | None = None) -> Tensor:
        """x [..., inputs] → [..., outputs]; `noise` is the block's."""
        assert self.bias is None or isinstance(self.bias, Tensor)
        out = nn.functional.linear(x, self._upright, self.bias)
        if not self.on:
            return out
        fed = x if noise is None else dropout(x, self.rate, noise.keys, self.site)
        return out + self.scale * self.lora_B(self.lora_A(fed))

    def merge(self) -> None:
        """Add the adapter to the weight, in place."""
        assert isinstance(self.weight, Tensor)
        self.weight += addition(self.scale, self.lora_A.weight, self.lora_B.weight, self.transposed)

    def plain(self) -> nn.Module:
        """The layer without the adapter, with the parameters that are here now."""
        (layer,) = self._layer
        _hand_over(self, layer)
        return layer


def addition(scale: float, down: Tensor, up: Tensor, transposed: bool) -> Tensor:
    """What an adapter adds to a weight, scale · B A of `down` [rank, inputs] and `up` [outputs, rank], [outputs, inputs] or
    `transposed`; in fp32, or fp64 where the adapter is."""
    wide = torch.promote_types(down.dtype, torch.float32)
    product = scale * (up.to(wide) @ down.to(wide))
    return product.t() if transposed else product


def _hand_over(giver: nn.Module, taker: nn.Module) -> None:
    for name in ("weight", "bias"):
        taker.register_parameter(name, giver.get_parameter(name) if getattr(giver, name) is not None else None)
        giver.register_parameter(name, None)  # or it would keep a weight alive that is sharded elsewhere


def add_lora(model: LanguageModel, config: LoraConfig) -> None:
    """Give layers of `model`'s blocks adapters, in place, and freeze everything else but the head of a reward model.

    On any device, meta too, and before the model is recomputed, compiled or sharded. On a real device the adapters are
    allocated, not filled (initial.initialise_adapters, or `fill`). Raises Mistake where a target is no layer.
    """
    if model.lora is not None:
        raise ValueError("the model has adapters already")
    if config.dropout and isinstance(model, ForeignModel):
        raise Mistake("lora.dropout: not with model.implementation = transformers, which has none here; leave it out")
    layers = _linear_layers(model)
    chosen: set[str] = set()
    for target in config.targets:
        found = [name for name in layers if _fits(target, name)]
        if not found:
            known = ", ".join(sorted({name.rpartition(".")[2] for name in layers})) or "none that it knows"
            raise Mistake(f"lora.targets: no linear layer of a block is called {target}; there are: {known}")
        chosen.update(found)
    if not chosen:
        raise Mistake(f'lora.targets: names no layer; leave it out for "{ALL_LINEAR}"')
    model.requires_grad_(False)
    # A head that gives rewards is new, and there is nothing to be adapted in it.
    model.lm_head.requires_grad_(model.config.reward)
    for name, site in layers.items():
        if name in chosen:
            parent, _, last = name.rpartition(".")
            setattr(model.get_submodule(parent), last, Adapted(model.get_submodule(name), config, site))
    model.lora = config


def _linear_layers(model: LanguageModel) -> dict[str, int]:
    """The linear layers of the blocks by name, each with a place for dropout that no other in its block has."""
    names = {module: name for name, module in model.named_modules()}
    found: dict[str, int] = {}
    for block in model.blocks:
        linear = [module for module in block.modules() if isinstance(module, nn.Linear | Conv1D)]
        found |= {names[module]: ADAPTER_SITE * number for number, module in enumerate(linear, start=1)}
    return found


def _fits(target: str, name: str) -> bool:
    if target == ALL_LINEAR or name == target or name.endswith(f".{target}"):
        return True
    try:
        return re.fullmatch(target, name) is not None
    except re.error as problem:
        raise Mistake(f"lora.targets: {target} is neither a name nor a regular expression ({problem})") from None


def adapted(model: nn.Module) -> Iterator[tuple[str, Adapted]]:
    """The adapted layers of a model, by name."""
    for name, module in model.named_modules():
        if isinstance(module, Adapted):
            yield name, module


def adapter_tensors(model: nn.Module) -> dict[str, nn.Parameter]:
    """The tensors of a model's adapters, by name."""
    return {name: parameter for name, parameter in model.named_parameters() if name.endswith(ADAPTERS)}


@torch.no_grad()
def fill(model: LanguageModel, tensors: Mapping[str, Tensor], where: str) -> None:
    """Give the adapters of `model` these values, whole tensors by name; of sharded ones each rank keeps its part.

    Raises Mistake, beginning with `where` they come from, unless there is one of the right shape for each.
    """
    here = adapter_tensors(model)
    for name in sorted(here.keys() | tensors.keys()):
        ours, theirs = ([*each[name].shape] if name in each else "missing" for each in (here, tensors))
        if ours != theirs:
            raise Mistake(f"{where}: adapters for another model: {name} is {theirs} there and {ours} in the model")
    for name, parameter in here.items():
        place(parameter, tensors[name].to(parameter.dtype))


@torch.no_grad()
def merge(model: LanguageModel) -> None:
    """Add the adapters of `model` to its weights, in place: its layers are plain ones again, and trainable.

    For whole weights, of a model that is neither compiled nor sharded.
    """
    if any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        raise ValueError("gather sharded weights before merging adapters into them")
    for name, layer in list(adapted(model)):
        layer.merge()
        parent, _, last = name.rpartition(".")
        setattr(model.get_submodule(parent), last, layer.plain())
    model.lora = None
    model.requires_grad_(True)


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """`model` as it was before it got adapters, for forward passes without gradients: what alignment refers to."""
    layers = [layer for _, layer in adapted(model)]
    for layer in layers:
        layer.on = False
    try:
        yield
    finally:
        for layer in layers:
            layer.on = True
