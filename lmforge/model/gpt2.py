"""The GPT-2 family by its Hugging Face tensor names: LayerNorm, learned positions, GELU.

Radford et al., "Language Models are Unsupervised Multitask Learners", 2019. Dropout, if any, is on the embeddings and on
what each half of a block adds, not on attention's probabilities. No loss here: the objective applies the head.
"""

from collections.abc import Iterable

import torch
from torch import nn
from torch.nn.functional import gelu

from lmforge.errors import Mistake
from lmforge.model.attention import Mask, attend, attention_mask
from lmforge.model.cache import LayerCache, Reading
from lmforge.model.dropout import Noise
from lmforge.model.layers import Head, LanguageModel, project
from lmforge.model.neftune import disturbed
from lmforge.model.shapes import ModelConfig


class Conv1D(nn.Module):
    """x @ weight + bias, with the weight [in, out]: GPT-2 stores its linear maps transposed."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(inputs, outputs))
        self.bias = nn.Parameter(torch.empty(outputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.weight.t(), self.bias)


class Attention(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.c_attn = Conv1D(config.hidden_size, 3 * config.hidden_size)
        self.c_proj = Conv1D(config.hidden_size, config.hidden_size)

    def forward(self, x: torch.Tensor, mask: Mask, cache: LayerCache | None, noise: Noise | None = None) -> torch.Tensor:
        heads = (*x.shape[:2], -1, self.head_dim)
        q, k, v = (part.view(heads).transpose(1, 2) for part in project(self.c_attn, x, noise).chunk(3, dim=-1))
        if cache is not None:
            k, v = cache.append(k, v)
        return project(self.c_proj, attend(q, k, v, mask).transpose(1, 2).flatten(2), noise)


class FeedForward(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.c_fc = Conv1D(config.hidden_size, config.intermediate_size)
        self.c_proj = Conv1D(config.intermediate_size, config.hidden_size)
        self.approximate = "none" if config.hidden_act == "gelu" else "tanh"

    def forward(self, x: torch.Tensor, noise: Noise | None = None) -> torch.Tensor:
        return project(self.c_proj, gelu(project(self.c_fc, x, noise), approximate=self.approximate), noise)


class Block(nn.Module):
    """One layer: hidden + attention(norm(hidden)), then the same with the feed-forward."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_epsilon)
        self.attn = Attention(config)
        self.ln_2 = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_epsilon)
        self.mlp = FeedForward(config)

    def forward(
        self, hidden: torch.Tensor, mask: Mask, cache: LayerCache | None = None, noise: Noise | None = None
    ) -> torch.Tensor:
        """hidden [rows, length, hidden_size] → the same shape and dtype."""
        attended = self.attn(self.ln_1(hidden), mask, cache, noise=noise)
        hidden = hidden + (attended if noise is None else noise.drop(attended, 0))
        fed = self.mlp(self.ln_2(hidden), noise=noise)
        return hidden + (fed if noise is None else noise.drop(fed, 1))


class Trunk(nn.Module):
    """Everything under the name `transformer.`."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.wte = nn.Embedding(config.vocab_size, config.hidden_size)
        self.wpe = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        self.h = nn.ModuleList(Block(config) for _ in range(config.num_hidden_layers))
        self.ln_f = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_epsilon)


class GPT2(LanguageModel):
    """A GPT-2 language model without its loss."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.transformer = Trunk(config)
        self.lm_head = Head(config.hidden_size, config.outputs)
        self.tie()

    def tie(self) -> None:
        """Make the head's weight the embedding's, where the shape says so. Repeat after `to_empty`, which parts them."""
        if self.config.tie_word_embeddings:
            self.lm_head.weight = self.transformer.wte.weight  # type: ignore[assignment]

    @property
    def embeddings(self) -> list[nn.Embedding]:
        return [self.transformer.wte, self.transformer.wpe]

    @property
    def blocks(self) -> nn.ModuleList:
        return self.transformer.h

    @property
    def final_norm(self) -> nn.Module:
        return self.transformer.ln_f

    def embed(self, tokens: torch.Tensor, positions: torch.Tensor, noise: Noise | None = None) -> torch.Tensor:
        """Raises Mistake for rows longer than the learned positions."""
        limit = self.config.max_position_embeddings
        if tokens.shape[1] > limit:
            raise Mistake(f"this model reads at most {limit} tokens in a row, not {tokens.shape[1]}: use shorter rows")
        return disturbed(self.transformer.wte(tokens) + self.transformer.wpe(positions), noise)

    def run_blocks(
        self,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        documents: torch.Tensor,
        cache: Reading | None = None,
        numbers: Iterable[int] | None = None,
        noise: Noise | None = None,
    ) -> torch.Tensor:
        mask = attention_mask(documents, None, self.context) if cache is None else cache.mask(None)
        for number in range(len(self.blocks)) if numbers is None else numbers:
            kept = None if cache is None else cache.layers[number]
            hidden = self.blocks[number](hidden, mask, kept, None if noise is None else noise.of_block(number))
        return hidden
