"""The small modules that both families are made of, and what every model offers."""

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from lmforge.data.batch import Batch
from lmforge.model.attention import SequenceSharder
from lmforge.model.cache import KVCacheView
from lmforge.model.config import ModelConfig
from lmforge.model.dropout import TokenRng
from lmforge.model.incremental import IncrementalDecoder
from lmforge.model.neftune import neftune_noise_scale

if TYPE_CHECKING:
    from lmforge.model.lora import LoraConfig


def apply_linear(layer: nn.Module, x: torch.Tensor, token_rng: TokenRng | None) -> torch.Tensor:
    """`layer(x)`; one with adapters (lora.py) has a dropout of its own, and is given what to draw from."""
    return layer(x) if token_rng is None or not hasattr(layer, "lora_A") else layer(x, token_rng)


class RMSNorm(nn.Module):
    """x / sqrt(mean(x²) + eps) * weight (arXiv 1910.07467), over the last dimension.

    Computed in fp32 whatever the dtype of the input, returned in that dtype, as transformers does.
    """

    def __init__(self, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(hidden_size))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (self.weight * normed.to(x.dtype)).to(x.dtype)


class LMHead(nn.Module):
    """The output projection: weight [vocab, width], or [1, width] of a reward model."""

    def __init__(self, hidden_size: int, vocab_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, hidden_size))

    def forward(self, hidden: torch.Tensor, head_fn: Callable[[torch.Tensor, torch.Tensor], Any] | None = None) -> Any:
        """Logits [..., vocab] of hidden [..., width]; or score(hidden, weight), whatever that returns.

        The second is how an objective gets at the weight: called through the module, so that hooks which gather a
        sharded weight run, and free to go through it in chunks, so that the logits never exist whole.
        """
        return nn.functional.linear(hidden, self.weight) if head_fn is None else head_fn(hidden, self.weight)


class LanguageModel(nn.Module):
    """What every model offers to the rest of the house.

    `forward(tokens, positions, documents, cache, keys)` gives hidden states, `lm_head` scores them; `embeddings`,
    `blocks`, `final_norm` and `lm_head` are the units that sharding wraps. Forward is three parts, so that a pipeline's
    stage can run its own: `embed`, `run_blocks`, `final_norm`.
    """

    config: ModelConfig
    lm_head: LMHead
    # Where the tokens given are only a part of each row: how attention gets at the keys of the others.
    context_parallel: SequenceSharder | None = None
    # Share of the numbers that dropout zeroes where a batch brings keys: after the embedding, and of what attention and
    # feed-forward add to the hidden states. Attention's probabilities are never dropped.
    dropout: float = 0.0
    # How strong the noise is that NEFTune adds to embeddings (neftune.py), where a batch brings keys.
    neftune_noise_alpha: float = 0.0
    # Which low-rank adapters it has.
    lora_config: "LoraConfig | None" = None
    # Where hidden states are a part of the sequence of the tokens given (tensor parallel): which one, of how many.
    sequence_parallel_shard: tuple[int, int] = (0, 1)

    def forward(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        document_ids: torch.Tensor,
        cache: Any = None,
        rng_keys: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Hidden states after the final norm: [rows, length, hidden_size], ready for `lm_head`.

        Args:
            tokens, positions: int64 [rows, length]; positions restart at each document.
            documents: int32 [rows, length], equal within a document, -1 on padding.
            cache: keys and values of the tokens before these, where the new ones' are put too (cache.Reading); each row is
                one document then.
            keys: int64 [rows, length], what dropout and NEFTune draw from; None is neither.
        """
        noise = self.make_token_rng(rng_keys, document_ids)
        hidden = self.embed(tokens, positions, noise)
        return self.final_norm(self.run_blocks(hidden, positions, document_ids, cache, token_rng=noise))

    def make_token_rng(self, rng_keys: torch.Tensor | None, document_ids: torch.Tensor) -> TokenRng | None:
        """What dropout and NEFTune draw from on this rank, for tokens with these keys; None where there is neither."""
        drops = self.dropout or (self.lora_config is not None and self.lora_config.dropout)
        if rng_keys is None or not (drops or self.neftune_noise_alpha):
            return None
        part, parts = self.sequence_parallel_shard
        loud = (
            neftune_noise_scale(document_ids, self.config.hidden_size, self.neftune_noise_alpha)
            if self.neftune_noise_alpha
            else None
        )
        mine = None if loud is None else loud.chunk(parts, dim=1)[part]
        return TokenRng(self.dropout, rng_keys.chunk(parts, dim=1)[part], mine)

    def local_batch(self, batch: Batch) -> Batch:
        """What of a batch this rank computes: all of it, but for the ranks of a context."""
        return batch if self.context_parallel is None else self.context_parallel.shard_batch(batch)

    def embed(self, tokens: torch.Tensor, positions: torch.Tensor, token_rng: TokenRng | None = None) -> torch.Tensor:
        """What the first block is given: [rows, length, hidden_size]."""
        raise NotImplementedError

    def run_blocks(
        self,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        document_ids: torch.Tensor,
        cache: KVCacheView | None = None,
        layer_indices: Iterable[int] | None = None,
        token_rng: TokenRng | None = None,
    ) -> torch.Tensor:
        """`hidden` after the blocks of these `numbers`, all of them by default; the same shape and dtype."""
        raise NotImplementedError

    def incremental_decoder(self, batch_size: int, max_length: int, *, device: torch.device, dtype: torch.dtype) -> Any:
        """What reads at most `rows` growing texts of at most `max_length` tokens, with its cache in `dtype` (reading.py).

        Raises UserError when the model cannot read that many tokens.
        """
        return IncrementalDecoder(self, batch_size, max_length, device=device, dtype=dtype)

    def tie_weights(self) -> None:
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
