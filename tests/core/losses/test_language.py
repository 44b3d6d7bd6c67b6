"""Next-token prediction on real batches, and bits per byte against an oracle that goes token by
token.
"""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

from lmforge.core.data.batch import Batch
from lmforge.core.data.dataset import TokenDataset
from lmforge.core.data.labels import IGNORE_INDEX
from lmforge.core.data.shards.folder import TokenFolder
from lmforge.core.losses.language import NextTokenObjective
from lmforge.core.losses.logprobs import score_text
from lmforge.core.model.build import build_model
from lmforge.core.model.config import ModelConfig
from lmforge.core.model.init_weights import init_weights
from lmforge.core.model.layers import LanguageModel
from lmforge.serve.decoding.engine import Engine, GenerationRequest
from lmforge.serve.decoding.sampling import SamplingParams

SHAPE: dict[str, Any] = {
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


@pytest.fixture(scope="module")
def tokens(tiny_tokens: Path) -> TokenFolder:
    return TokenFolder.open(tiny_tokens)


@pytest.fixture(scope="module")
def model(tokens: TokenFolder) -> LanguageModel:
    return init_weights(
        build_model(
            ModelConfig(vocab_size=tokens.tokenizer.vocab_size, initializer_range=0.3, **SHAPE)
        ),
        1,
    ).double()


@pytest.fixture(scope="module")
def batch(tokens: TokenFolder) -> Batch:
    """Validation sequences with several documents in each, the last of them partly padding."""
    stream = TokenDataset(tokens, split="validation", sequence_length=200, shuffle=False)
    batch = Batch.from_sequences(
        stream.sequences(stream.sequences_per_epoch - 5, stream.sequences_per_epoch)
    )
    assert (batch.document_ids.amax(1) > 0).any()
    assert (batch.document_ids[-1] == -1).any()
    return batch


def whole_logits(model: LanguageModel, batch: Batch) -> torch.Tensor:
    return model.lm_head(model(batch.tokens, batch.positions, batch.document_ids))


def test_num_items_of_a_batch_is_its_number_of_labels(batch: Batch) -> None:
    num_items = NextTokenObjective().num_items(batch)
    assert num_items.item() == sum(
        target != IGNORE_INDEX for row in batch.labels.tolist() for target in row
    )
    assert num_items.dtype == torch.float32


def test_the_loss_is_the_sum_of_the_cross_entropies_of_the_labels(
    model: LanguageModel, batch: Batch
) -> None:
    total, metrics = NextTokenObjective().loss(model, batch)
    logits = whole_logits(model, batch).flatten(0, 1)
    reference = cross_entropy(
        logits, batch.labels.flatten(), ignore_index=IGNORE_INDEX, reduction="sum"
    )
    torch.testing.assert_close(total, reference, rtol=1e-12, atol=0)
    assert torch.equal(metrics["loss"][0], total.detach())
    assert torch.equal(metrics["loss"][1], NextTokenObjective().num_items(batch))
    assert not metrics["loss"][0].requires_grad


def test_gradients_of_every_parameter_are_those_of_plain_cross_entropy(
    model: LanguageModel, batch: Batch
) -> None:
    total, _ = NextTokenObjective().loss(model, batch)
    ours = torch.autograd.grad(total, list(model.parameters()))
    logits = whole_logits(model, batch).flatten(0, 1)
    reference = cross_entropy(
        logits, batch.labels.flatten(), ignore_index=IGNORE_INDEX, reduction="sum"
    )
    for mine, theirs in zip(
        ours, torch.autograd.grad(reference, list(model.parameters())), strict=True
    ):
        torch.testing.assert_close(
            mine, theirs, rtol=0, atol=1e-11 * max(1.0, float(theirs.abs().max()))
        )


def test_losses_of_parts_of_a_batch_add_up_to_the_loss_of_the_batch(
    model: LanguageModel, batch: Batch
) -> None:
    objective = NextTokenObjective()
    whole, _ = objective.loss(model, batch)
    parts = [
        objective.loss(model, batch[rows])[0] for rows in (slice(0, 1), slice(1, 3), slice(3, 5))
    ]
    torch.testing.assert_close(sum(parts), whole, rtol=1e-12, atol=0)
    assert objective.num_items(batch) == sum(
        objective.num_items(batch[rows]) for rows in (slice(0, 2), slice(2, 5))
    )


def test_a_batch_without_labels_has_zero_loss_and_zero_gradients(
    model: LanguageModel, batch: Batch
) -> None:
    nothing = Batch(
        batch.tokens,
        torch.full_like(batch.labels, IGNORE_INDEX),
        batch.positions,
        batch.document_ids,
    )
    total, metrics = NextTokenObjective().loss(model, nothing)
    assert total.item() == 0.0
    assert [part.item() for part in metrics["loss"]] == [0.0, 0.0]
    for gradient in torch.autograd.grad(total, list(model.parameters())):
        assert torch.equal(gradient, torch.zeros_like(gradient))


def test_the_z_loss_is_added_to_the_loss_and_is_a_separate_metric(
    model: LanguageModel, batch: Batch
) -> None:
    total, metrics = NextTokenObjective(z_loss=0.1).loss(model, batch)
    plain, alone = NextTokenObjective().loss(model, batch)
    squares = whole_logits(model, batch).logsumexp(-1).square()[batch.labels != IGNORE_INDEX]
    torch.testing.assert_close(
        metrics["z_loss"][0], 0.1 * squares.sum().detach(), rtol=1e-12, atol=0
    )
    torch.testing.assert_close(metrics["loss"][0], alone["loss"][0], rtol=1e-12, atol=0)
    torch.testing.assert_close(total, plain + 0.1 * squares.sum(), rtol=1e-12, atol=0)
    assert metrics["z_loss"][1] == metrics["loss"][1] == alone["loss"][1]
    assert "z_loss" not in alone


def test_capped_logits_are_capped_where_text_is_scored_and_where_it_is_sampled(
    tokens: TokenFolder, batch: Batch
) -> None:
    shape = ModelConfig(
        vocab_size=tokens.tokenizer.vocab_size,
        initializer_range=0.3,
        final_logit_softcapping=1.5,
        **SHAPE,
    )
    capped = init_weights(build_model(shape), 1)
    hidden = capped(batch.tokens, batch.positions, batch.document_ids)
    logits = 1.5 * torch.tanh(hidden @ capped.lm_head.weight.t() / 1.5)
    nats = cross_entropy(
        logits.flatten(0, 1), batch.labels.flatten(), ignore_index=IGNORE_INDEX, reduction="sum"
    )
    scored = score_text(capped, batch, torch.ones(shape.vocab_size, dtype=torch.int32)).sum(0)
    assert scored[0].item() == pytest.approx(nats.item(), rel=1e-5)
    prompt = batch.tokens[0, :9].tolist()
    engine = Engine(capped, vocab_size=shape.vocab_size, max_batch_size=1, max_length=10)
    engine.add_request(GenerationRequest(prompt, 1, SamplingParams(1.0), 0, frozenset()))
    (token,) = engine.step()
    assert token.logprob == pytest.approx(
        logits[0, 8].log_softmax(-1)[token.token_id].item(), abs=1e-5
    )


def test_text_is_scored_as_by_an_oracle_that_goes_token_by_token(
    model: LanguageModel, batch: Batch, tokens: TokenFolder
) -> None:
    tokenizer = tokens.tokenizer
    with torch.no_grad():
        log_probabilities = whole_logits(model, batch).log_softmax(-1)
    nats = labels = text_nats = text_bytes = 0.0
    for row in range(batch.batch_size):
        for place in range(batch.sequence_length):
            target = int(batch.labels[row, place])
            if target == IGNORE_INDEX:
                continue
            loss = -float(log_probabilities[row, place, target])
            nats, labels = nats + loss, labels + 1
            if target != tokenizer.eos_token_id:
                # A byte of a character that is split over tokens decodes to U+FFFD alone: count by
                # what it stands for.
                text_nats, text_bytes = (
                    text_nats + loss,
                    text_bytes + int(tokenizer.token_byte_lengths()[target]),
                )
    scored = score_text(model, batch, torch.from_numpy(tokenizer.token_byte_lengths())).sum(0)
    assert scored.dtype == torch.float64
    assert scored.tolist() == pytest.approx([nats, labels, text_nats, text_bytes], rel=1e-12)
    assert nats > text_nats > 0


def test_the_scored_bytes_are_those_of_the_text(model: LanguageModel, tokens: TokenFolder) -> None:
    """Every byte of the validation documents counts once, except each document's first token, which
    nothing predicts, and the separators, which are not text.
    """
    stream = TokenDataset(tokens, split="validation", sequence_length=64, shuffle=False)
    sizes = torch.from_numpy(tokens.tokenizer.token_byte_lengths())
    batch = Batch.from_sequences(stream.sequences(0, stream.sequences_per_epoch))
    *_, text_bytes = score_text(model, batch, sizes).sum(0).tolist()
    split = tokens.split("validation")
    ids = split.read(0, split.num_tokens).tolist()
    starts = [0, *split.document_starts(0, split.num_tokens).tolist()]
    whole_text = len(tokens.tokenizer.decode(ids).encode())
    assert whole_text == tokens.manifest.text_bytes["validation"]
    assert text_bytes == whole_text - sum(int(sizes[ids[start]]) for start in starts)


def test_a_uniform_model_over_256_single_byte_tokens_has_eight_bits_per_byte() -> None:
    """Uniform over V tokens of one byte each: log2(V) bits per byte, whatever the text."""
    config = ModelConfig(vocab_size=256, **SHAPE)
    uniform = init_weights(build_model(config), 0)
    torch.nn.init.zeros_(uniform.lm_head.weight)
    ids = torch.randint(0, 256, (2, 30))
    labels = ids.roll(-1, 1)
    labels[:, -1] = IGNORE_INDEX
    batch = Batch(
        ids, labels, torch.arange(30).expand(2, 30), torch.zeros(2, 30, dtype=torch.int32)
    )
    nats, _, text_nats, text_bytes = (
        score_text(uniform, batch, torch.ones(256, dtype=torch.int32)).sum(0).tolist()
    )
    assert text_bytes == 2 * 29
    assert text_nats / math.log(2) / text_bytes == pytest.approx(8.0, rel=1e-6)
    assert nats == text_nats
