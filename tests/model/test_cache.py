"""Reading a text piece by piece gives what reading it at once gives."""

import random

import pytest
import torch

from lmforge.errors import Mistake
from lmforge.model.cache import Cache
from tests.model.conftest import MODEL_TYPES, built, drawn_config, logits, one_document


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_cached_decoding_of_ragged_rows_equals_the_full_forward(model_type: str, draw: random.Random) -> None:
    config = drawn_config(model_type, draw)
    model = built(config)
    prompts = [draw.randrange(1, 30) for _ in range(3)]
    longest, new = max(prompts), 12
    rows = one_document(3, longest + new, config.vocab_size)
    # Row r is its own `prompts[r] + new` last tokens, padded at the left.
    padding = [longest - prompt for prompt in prompts]
    places = torch.arange(longest + new).expand(3, -1) - torch.tensor(padding)[:, None]
    documents = torch.where(places < 0, -1, 0).int()
    positions = places.clamp(min=0)

    cache = Cache(config, 3, longest + new)
    read = []
    with torch.no_grad():
        steps = [longest, 1, 1, 3, *[1] * (new - 5)]
        for start, end in zip(
            [sum(steps[:i]) for i in range(len(steps))], [sum(steps[: i + 1]) for i in range(len(steps))], strict=True
        ):
            hidden = model(rows.tokens[:, start:end], positions[:, start:end], documents[:, start:end], cache)
            read.append(model.lm_head(hidden))
    found = torch.cat(read, dim=1)
    assert found.isfinite().all()
    assert cache.length == longest + new

    for row, skipped in enumerate(padding):
        alone = one_document(1, longest + new - skipped, config.vocab_size)
        alone.tokens[:] = rows.tokens[row, skipped:]
        # fp32, other sizes of product: the last bits differ.
        torch.testing.assert_close(found[row, skipped:], logits(model, alone)[0], atol=1e-4, rtol=1e-4)


def test_a_cache_refuses_more_tokens_than_it_has_slots(draw: random.Random) -> None:
    config = drawn_config("llama", draw)
    rows = one_document(1, 9, config.vocab_size)
    with pytest.raises(ValueError, match="8 slots and 9 tokens"):
        built(config)(rows.tokens, rows.positions, rows.documents, Cache(config, 1, 8))


def test_learned_positions_bound_what_can_be_read(draw: random.Random) -> None:
    config = drawn_config("gpt2", draw, max_position_embeddings=20)
    with pytest.raises(Mistake, match="at most 20 tokens, not 21"):
        Cache(config, 1, 21)
    with pytest.raises(Mistake, match="at most 20 tokens in a row, not 21"):
        logits(built(config), one_document(1, 21, config.vocab_size))
