"""Measuring a model on sequences of text: the result does not depend on how they are divided over
ranks.
"""

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from lmforge.core.data.batch import Batch
from lmforge.core.data.dataset import TokenDataset, join_datasets
from lmforge.core.data.shards.folder import TokenFolder
from lmforge.core.data.tokenizer import Tokenizer
from lmforge.core.distributed.distributed import DistributedContext
from lmforge.core.distributed.rank_info import RankInfo
from lmforge.core.losses.logprobs import score_text
from lmforge.core.model.layers import LanguageModel
from lmforge.core.steps.perplexity import evaluate_loss

CPU = torch.device("cpu")
ScoreFn = Callable[[Batch], torch.Tensor]
ALONE = DistributedContext(RankInfo(), CPU, None)


@pytest.fixture(scope="module")
def score(tiny_model_and_tokenizer: tuple[LanguageModel, Tokenizer]) -> ScoreFn:
    model, tokenizer = tiny_model_and_tokenizer
    token_bytes = torch.from_numpy(tokenizer.token_byte_lengths())
    return lambda batch: score_text(model, batch, token_bytes)


@pytest.fixture(scope="module")
def stream(tiny_tokens: Path) -> TokenDataset:
    return TokenDataset(
        TokenFolder.open(tiny_tokens), split="validation", sequence_length=250, shuffle=False
    )


def sums(
    tiny_model_and_tokenizer: tuple[LanguageModel, Tokenizer], stream: TokenDataset, rows: int
) -> tuple[float, float, float, float]:
    model, tokenizer = tiny_model_and_tokenizer
    whole = score_text(
        model,
        Batch.from_sequences(
            stream.read([number * stream.sequences_per_epoch // rows for number in range(rows)])
        ),
        torch.from_numpy(tokenizer.token_byte_lengths()),
    )
    nats, targets, text_nats, text_bytes = whole.sum(0).tolist()
    return nats, targets, text_nats, text_bytes


@pytest.mark.parametrize(
    ("rows", "batch_size"), [(None, 7), (None, 1), (5, 2), (5, 16), (1, 3), (10_000, 8)]
)
def test_sequences_are_scored_once_each_in_any_batch_size(
    score: ScoreFn,
    stream: TokenDataset,
    tiny_model_and_tokenizer: tuple[LanguageModel, Tokenizer],
    rows: int | None,
    batch_size: int,
) -> None:
    progress: list[tuple[int, int]] = []
    measured = evaluate_loss(
        score,
        stream,
        ALONE,
        num_sequences=rows,
        batch_size=batch_size,
        on_progress=lambda done, total: progress.append((done, total)),
    )
    total = min(rows or stream.sequences_per_epoch, stream.sequences_per_epoch)
    nats, targets, text_nats, text_bytes = sums(tiny_model_and_tokenizer, stream, total)
    assert measured["tokens"] == targets
    assert measured["bytes"] == text_bytes
    # fp32 products of other shapes round otherwise.
    assert measured["loss"] == pytest.approx(nats / targets, rel=1e-6)
    assert measured["perplexity"] == pytest.approx(math.exp(nats / targets), rel=1e-5)
    assert measured["bits_per_byte"] == pytest.approx(
        text_nats / math.log(2) / text_bytes, rel=1e-6
    )
    assert progress[-1] == (total, total)


@pytest.mark.parametrize("ranks", [2, 3])
def test_the_parts_of_all_ranks_add_up_in_equally_many_forward_passes(
    stream: TokenDataset, tiny_model_and_tokenizer: tuple[LanguageModel, Tokenizer], ranks: int
) -> None:
    model, tokenizer = tiny_model_and_tokenizer
    sizes = torch.from_numpy(tokenizer.token_byte_lengths())
    rows, passes, shares = 11, [], []
    for rank in range(ranks):
        scored: list[torch.Tensor] = []

        def score(batch: Batch, scored: list[torch.Tensor] = scored) -> torch.Tensor:
            scored.append(score_text(model, batch, sizes))
            return scored[-1]

        # Without process groups a rank keeps its own sums, which are added up here.
        evaluate_loss(
            score,
            stream,
            DistributedContext(RankInfo(rank, ranks, rank, ranks), CPU, None),
            num_sequences=rows,
            batch_size=2,
        )
        passes.append(len(scored))
        shares.append(torch.cat(scored).sum(0))
    assert len(set(passes)) == 1
    assert torch.stack(shares).sum(0).tolist() == pytest.approx(
        sums(tiny_model_and_tokenizer, stream, rows), rel=1e-6
    )


@pytest.mark.parametrize("num_sequences", [None, 9])
def test_each_source_has_the_loss_that_it_has_alone_and_one_collective_serves_all(
    score: ScoreFn, tiny_tokens: Path, monkeypatch: pytest.MonkeyPatch, num_sequences: int | None
) -> None:
    folder = TokenFolder.open(tiny_tokens)
    sources = {
        split: TokenDataset(folder, split=split, sequence_length=250, shuffle=False)
        for split in ("validation", "train")
    }
    reduced: list[torch.Size] = []
    all_reduce_sum = DistributedContext.all_reduce_sum

    def counted(dist_ctx: DistributedContext, tensor: torch.Tensor) -> torch.Tensor:
        reduced.append(tensor.shape)
        return all_reduce_sum(dist_ctx, tensor)

    monkeypatch.setattr(DistributedContext, "all_reduce_sum", counted)
    joined = join_datasets(sources)
    measured = evaluate_loss(score, joined, ALONE, num_sequences=num_sequences, batch_size=4)
    assert reduced == [(2, 4)]
    assert measured["tokens"] == measured["tokens/train"] + measured["tokens/validation"]
    nats = sum(measured[f"loss/{name}"] * measured[f"tokens/{name}"] for name in sources)
    assert measured["loss"] == pytest.approx(nats / measured["tokens"], rel=1e-12)
    if num_sequences is None:
        for name, dataset in sources.items():
            alone = evaluate_loss(score, dataset, ALONE, num_sequences=None, batch_size=4)
            # fp32 products of other batches round otherwise.
            assert {rate: measured[f"{rate}/{name}"] for rate in alone} == pytest.approx(
                alone, rel=1e-6
            )


def test_a_source_of_which_no_sequence_is_measured_has_no_loss(
    score: ScoreFn, tiny_tokens: Path
) -> None:
    folder = TokenFolder.open(tiny_tokens)
    sources = {
        split: TokenDataset(folder, split=split, sequence_length=250, shuffle=False)
        for split in ("train", "validation")
    }
    measured = evaluate_loss(score, join_datasets(sources), ALONE, num_sequences=1, batch_size=1)
    assert measured["loss/train"] == measured["loss"]
    assert "loss/validation" not in measured


def test_a_loss_without_labels_is_zero(stream: TokenDataset) -> None:
    measured = evaluate_loss(
        lambda batch: torch.zeros(2, 4, dtype=torch.float64),
        stream,
        ALONE,
        num_sequences=2,
        batch_size=2,
    )
    assert measured == {
        "loss": 0.0,
        "perplexity": 1.0,
        "bits_per_byte": 0.0,
        "tokens": 0.0,
        "bytes": 0.0,
    }
