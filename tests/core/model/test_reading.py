"""Incremental decoding of texts that join, grow and leave gives the same as one forward pass over
each text alone.
"""

import random

import pytest
import torch
from torch import nn

from lmforge.core.errors import UserError
from lmforge.core.model.attention import KVCache
from lmforge.core.model.init_weights import init_adapters
from lmforge.core.model.layers import LanguageModel
from lmforge.core.model.lora import add_lora
from lmforge.core.model.lora_config import LoraConfig
from lmforge.core.parallel.activation_checkpointing import apply_activation_checkpointing
from lmforge.serve.decoding.incremental import (
    MAX_GROUP_TOKENS,
    MIN_LENGTH_RATIO,
    IncrementalDecoder,
    group_by_length,
    incremental_decoder,
)
from tests.core.model.conftest import MODEL_TYPES, built, drawn_config, logits, one_document, shaken


def reader(model: nn.Module, rows: int, length: int) -> IncrementalDecoder:
    assert isinstance(model, LanguageModel)
    results = incremental_decoder(
        model, rows, length, device=torch.device("cpu"), dtype=torch.float32
    )
    assert isinstance(results, IncrementalDecoder)
    return results


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_texts_that_come_and_go_are_read_as_if_alone(model_type: str, draw: random.Random) -> None:
    config = drawn_config(model_type, draw)
    model = built(config)
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
                new = [
                    [token() for _ in range(draw.randrange(1, 40))]
                    for _ in range(draw.randrange(1, 7 - len(texts)))
                ]
                results.append(reading.prefill(new))
                texts += new
            if not texts:
                continue
            expected = [_last_logits(model, text) for text in texts]
            # fp32, other sizes of product: the last bits differ.
            torch.testing.assert_close(
                model.lm_head(torch.cat(results)), torch.stack(expected), atol=1e-4, rtol=1e-4
            )
            if draw.random() < 0.3:
                rows = draw.sample(range(len(texts)), draw.randrange(len(texts) + 1))
                reading.select_sequences(rows)
                texts = [texts[row] for row in rows]


def _last_logits(model: nn.Module, text: list[int]) -> torch.Tensor:
    row = one_document(1, len(text), 2)
    row.tokens[0] = torch.tensor(text)
    return logits(model, row)[0, -1]


@pytest.mark.parametrize("model_type", ["qwen3", "gpt2"])
def test_a_checkpointed_model_with_adapters_reads_in_autocast_what_it_computes(
    model_type: str, draw: random.Random
) -> None:
    model = built(drawn_config(model_type, draw))
    assert isinstance(model, LanguageModel)
    add_lora(model, LoraConfig(2, 4.0))
    init_adapters(model, 0)
    apply_activation_checkpointing(model, "selective-ops")
    shaken(model)
    prompt = [draw.randrange(31) for _ in range(20)]
    before = {name: each.clone() for name, each in model.named_parameters()}
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        decoder = incremental_decoder(
            model, 1, 20, device=torch.device("cpu"), dtype=torch.bfloat16
        )
        hidden = [decoder.prefill([prompt[:12]])] + [
            decoder.decode_step(torch.tensor([token])) for token in prompt[12:]
        ]
        results = model.lm_head(torch.cat(hidden))
        expected = torch.stack([_last_logits(model, prompt[:end]) for end in range(12, 21)])
    # bf16 in another order of operations; a weight that is missing or stale makes a difference of
    # the size of the logits.
    assert (results.float() - expected.float()).abs().max() < 0.05 * expected.float().abs().max()
    assert {name: each.dtype for name, each in model.named_parameters()} == {
        name: each.dtype for name, each in before.items()
    }
    assert all(torch.equal(each, before[name]) for name, each in model.named_parameters())


def test_prompts_are_read_together_with_little_padding_and_in_bounded_pieces(
    draw: random.Random,
) -> None:
    for lengths in (
        [5],
        [*sorted(draw.randrange(1, 900) for _ in range(300))],
        [draw.randrange(1, 99) for _ in range(50)],
    ):
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
