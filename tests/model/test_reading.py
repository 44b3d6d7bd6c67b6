"""Incremental decoding of texts that join, grow and leave gives the same as one forward pass over each text alone."""

import random
from dataclasses import replace

import pytest
import torch
from torch import nn

from lmforge.errors import UserError
from lmforge.model.attention import KVCache
from lmforge.model.config import ModelConfig
from lmforge.model.incremental import MAX_GROUP_TOKENS, MIN_LENGTH_RATIO, IncrementalDecoder, can_fuse, group_by_length
from lmforge.model.layers import LanguageModel
from tests.model.conftest import MODEL_TYPES, built, drawn_config, logits, one_document


class Plain(nn.Linear):
    """What is a linear layer to all but those who ask whether it is no more than one."""


def reader(model: nn.Module, rows: int, length: int) -> IncrementalDecoder:
    assert isinstance(model, LanguageModel)
    results = model.incremental_decoder(rows, length, device=torch.device("cpu"), dtype=torch.float32)
    assert isinstance(results, IncrementalDecoder)
    return results


@pytest.mark.parametrize("model_type", MODEL_TYPES)
@pytest.mark.parametrize("fused", [True, False])
def test_texts_that_come_and_go_are_read_as_if_alone(model_type: str, fused: bool, draw: random.Random) -> None:
    config = drawn_config(model_type, draw)
    model = built(config)
    if not fused and model_type != "gpt2":
        model.blocks[0].self_attn.o_proj.__class__ = Plain
    assert can_fuse(model, torch.float32) == (fused and model_type != "gpt2")
    reading, texts, expected = reader(model, 6, 80), list[list[int]](), list[torch.Tensor]()

    def token() -> int:
        return draw.randrange(config.vocab_size)

    with torch.no_grad():
        for _ in range(25):
            results = []
            if texts:
                texts = [[*text, token()] for text in texts]
                results.append(reading.decode_step(torch.tensor([text[-1] for text in texts])))
            if draw.random() < 0.4 and len(texts) < 6:
                new = [[token() for _ in range(draw.randrange(1, 40))] for _ in range(draw.randrange(1, 7 - len(texts)))]
                results.append(reading.prefill(new))
                texts += new
            if not texts:
                continue
            expected = [_last_logits(model, text) for text in texts]
            # fp32, other sizes of product: the last bits differ.
            torch.testing.assert_close(model.lm_head(torch.cat(results)), torch.stack(expected), atol=1e-4, rtol=1e-4)
            if draw.random() < 0.3:
                rows = draw.sample(range(len(texts)), draw.randrange(len(texts) + 1))
                reading.select_sequences(rows)
                texts = [texts[row] for row in rows]


def _last_logits(model: nn.Module, text: list[int]) -> torch.Tensor:
    row = one_document(1, len(text), 2)
    row.tokens[0] = torch.tensor(text)
    return logits(model, row)[0, -1]


def test_a_large_model_and_one_that_is_not_plain_are_read_by_their_own_forward(draw: random.Random) -> None:
    config = drawn_config("llama", draw)
    assert can_fuse(built(config), torch.float32)
    assert not can_fuse(built(drawn_config("gpt2", draw)), torch.float32)
    with torch.device("meta"):
        large = ModelConfig(vocab_size=8, hidden_size=8192, num_attention_heads=8, intermediate_size=32768, num_hidden_layers=1)
        assert not can_fuse(_on_meta(large), torch.float32)
        assert can_fuse(_on_meta(replace(large, intermediate_size=64)), torch.bfloat16)


def _on_meta(config: ModelConfig) -> nn.Module:
    from lmforge.model.decoder import Decoder

    return Decoder(config)


def test_prompts_are_read_together_with_little_padding_and_in_bounded_pieces(draw: random.Random) -> None:
    for lengths in ([5], [*sorted(draw.randrange(1, 900) for _ in range(300))], [draw.randrange(1, 99) for _ in range(50)]):
        pieces = [lengths[start:stop] for start, stop in group_by_length(lengths)]
        assert [length for piece in pieces for length in piece] == lengths
        for piece in pieces:
            assert min(piece) >= MIN_LENGTH_RATIO * max(piece)
            assert len(piece) == 1 or len(piece) * max(piece) <= MAX_GROUP_TOKENS
    assert len(list(group_by_length([16] * 64))) == 1


def test_a_cache_refuses_more_tokens_than_it_has_slots(draw: random.Random) -> None:
    config = drawn_config("gpt2", draw)
    cache = KVCache(config, 1, 8)
    with pytest.raises(ValueError, match="8 slots and 9 tokens"):
        cache.view(0, torch.arange(9)[None], 9)


def test_learned_positions_bound_what_can_be_read(draw: random.Random) -> None:
    config = drawn_config("gpt2", draw, max_position_embeddings=20)
    with pytest.raises(UserError, match="at most 20 tokens, not 21"):
        KVCache(config, 1, 21)
    with pytest.raises(UserError, match="at most 20 tokens, not 21"):
        logits(built(config), one_document(1, 21, config.vocab_size))
