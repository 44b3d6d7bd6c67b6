"""The small modules that both families are made of, and what every model offers."""

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from lmforge.data.batch import Batch
from lmforge.model.attention import ContextShare
from lmforge.model.cache import Reading
from lmforge.model.dropout import Noise
from lmforge.model.neftune import loudness
from lmforge.model.reading import Reader
from lmforge.model.shapes import ModelConfig

if TYPE_CHECKING:
    from lmforge.model.lora import LoraConfig


def project(layer: nn.Module, x: torch.Tensor, noise: Noise | None) -> torch.Tensor:
    """`layer(x)`; one with adapters (lora.py) has a dropout of its own, and is given what to draw from."""
    return layer(x) if noise is None or not hasattr(layer, "lora_A") else layer(x, noise)


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
    """The output projection: weight [vocab, width], or [1, width] of a reward model."""

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

    `forward(tokens, positions, documents, cache, keys)` gives hidden states, `lm_head` scores them; `embeddings`,
    `blocks`, `final_norm` and `lm_head` are the units that sharding wraps. Forward is three parts, so that a pipeline's
    stage can run its own: `embed`, `run_blocks`, `final_norm`.
    """

    config: ModelConfig
    lm_head: Head
    # Where the tokens given are only a part of each row: how attention gets at the keys of the others.
    context: ContextShare | None = None
    # Share of the numbers that dropout zeroes where a batch brings keys: after the embedding, and of what attention and
    # feed-forward add to the hidden states. Attention's probabilities are never dropped.
    dropout: float = 0.0
    # How strong the noise is that NEFTune adds to embeddings (neftune.py), where a batch brings keys.
    neftune_alpha: float = 0.0
    # Which low-rank adapters it has.
    lora: "LoraConfig | None" = None
    # Where hidden states are a part of the sequence of the tokens given (tensor parallel): which one, of how many.
    sequence_part: tuple[int, int] = (0, 1)

    def forward(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        documents: torch.Tensor,
        cache: Any = None,
        keys: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Hidden states after the final norm: [rows, length, hidden_size], ready for `lm_head`.

        Args:
            tokens, positions: int64 [rows, length]; positions restart at each document.
            documents: int32 [rows, length], equal within a document, -1 on padding.
            cache: keys and values of the tokens before these, where the new ones' are put too (cache.Reading); each row is
                one document then.
            keys: int64 [rows, length], what dropout and NEFTune draw from; None is neither.
        """
        noise = self.noise(keys, documents)
        hidden = self.embed(tokens, positions, noise)
        return self.final_norm(self.run_blocks(hidden, positions, documents, cache, noise=noise))

    def noise(self, keys: torch.Tensor | None, documents: torch.Tensor) -> Noise | None:
        """What dropout and NEFTune draw from on this rank, for tokens with these keys; None where there is neither."""
        drops = self.dropout or (self.lora is not None and self.lora.dropout)
        if keys is None or not (drops or self.neftune_alpha):
            return None
        part, parts = self.sequence_part
        loud = loudness(documents, self.config.hidden_size, self.neftune_alpha) if self.neftune_alpha else None
        mine = None if loud is None else loud.chunk(parts, dim=1)[part]
        return Noise(self.dropout, keys.chunk(parts, dim=1)[part], mine)

    def share(self, batch: Batch) -> Batch:
        """What of a batch this rank computes: all of it, but for the ranks of a context."""
        return batch if self.context is None else self.context.share(batch)

    def embed(self, tokens: torch.Tensor, positions: torch.Tensor, noise: Noise | None = None) -> torch.Tensor:
        """What the first block is given: [rows, length, hidden_size]."""
        raise NotImplementedError

    def run_blocks(
        self,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        documents: torch.Tensor,
        cache: Reading | None = None,
        numbers: Iterable[int] | None = None,
        noise: Noise | None = None,
    ) -> torch.Tensor:
        """`hidden` after the blocks of these `numbers`, all of them by default; the same shape and dtype."""
        raise NotImplementedError

    def reader(self, rows: int, max_length: int, *, device: torch.device, dtype: torch.dtype) -> Any:
        """What reads at most `rows` growing texts of at most `max_length` tokens, with its cache in `dtype` (reading.py).

        Raises Mistake when the model cannot read that many tokens.
        """
        return Reader(self, rows, max_length, device=device, dtype=dtype)

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
