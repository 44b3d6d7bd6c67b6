"""The small modules that both families are made of, and what every model offers."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from lmforge.model.cache import Cache
from lmforge.model.shapes import ModelConfig


class RMSNorm(nn.Module):
    """x / sqrt(mean(x²) + eps) * weight (arXiv 1910.07467), over the last dimension.

    Computed in fp32 whatever the dtype of the input, returned in that dtype, as transformers does.
    """

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (self.weight * normed.to(x.dtype)).to(x.dtype)


class Head(nn.Module):
    """The output projection: weight [vocab, width]."""

    def __init__(self, width: int, vocab: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab, width))

    def forward(self, hidden: torch.Tensor, score: Callable[[torch.Tensor, torch.Tensor], Any] | None = None) -> Any:
        """Logits [..., vocab] of hidden [..., width]; or score(hidden, weight), whatever that returns.

        The second is how an objective gets at the weight: called through the module, so that hooks which gather a
        sharded weight run, and free to go through it in chunks, so that the logits never exist whole.
        """
        return nn.functional.linear(hidden, self.weight) if score is None else score(hidden, self.weight)


class LanguageModel(nn.Module):
    """What every model offers to the rest of the house.

    `forward(tokens, positions, documents, cache=None)` gives hidden states, `lm_head` scores them; `embeddings`,
    `blocks`, `final_norm` and `lm_head` are the units that sharding wraps.
    """

    config: ModelConfig
    lm_head: Head

    def cache(self, rows: int, max_length: int, *, device: torch.device | str, dtype: torch.dtype) -> Any:
        """Room for what decoding keeps of `max_length` tokens in each of `rows`, to be handed to `forward`."""
        return Cache(self.config, rows, max_length, device=device, dtype=dtype)

    def tie(self) -> None:
        """Make the head's weight the embedding's, where the shape says so. Repeat after `to_empty`, which parts them."""
        raise NotImplementedError

    @property
    def embeddings(self) -> list[nn.Embedding]:
        raise NotImplementedError

    @property
    def blocks(self) -> nn.ModuleList:
        raise NotImplementedError

    @property
    def final_norm(self) -> nn.Module:
        raise NotImplementedError
