"""Variable-length flash attention: its inputs, when it is chosen, and that it computes the same as
the dense path.
"""

import random
from dataclasses import replace
from functools import partialmethod
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from lmforge.core.data.batch import Batch
from lmforge.core.distributed.distributed import DistributedContext
from lmforge.core.distributed.rank_info import RankInfo
from lmforge.core.losses.language import NextTokenObjective
from lmforge.core.model import attention
from lmforge.core.model.attention import (
    AttentionMask,
    attend,
    create_attention_mask,
    cumulative_lengths,
)
from lmforge.core.model.attention_backend import (
    DENSE,
    FLEX,
    VARLEN,
    AttentionBackend,
    choose_attention_backend,
    load_varlen_attn,
)
from lmforge.core.model.build import build_model
from lmforge.core.model.init_weights import init_weights
from lmforge.core.options.sections import ParallelOptions
from lmforge.core.parallel.parallelize import parallelize
from lmforge.lab.bench.parity import SMALL_MODEL
from tests.core.model import varlen_on_cpu

pytestmark = pytest.mark.skipif(
    load_varlen_attn() is None,
    reason="this torch has no varlen_attn with windows and grouped heads",
)


def drawn_batch(draw: random.Random, sequences: int, length: int, most_documents: int = 6) -> Batch:
    """Sequences of documents of random lengths, some with padding, some that are nothing else."""
    ids = torch.full((sequences, length), -1, dtype=torch.int32)
    for row in ids:
        end = draw.choice([length, length, draw.randrange(length + 1)])
        cuts = (
            sorted(draw.sample(range(1, end), min(draw.randrange(most_documents), end - 1)))
            if end > 1
            else []
        )
        for number, (first, stop) in enumerate(zip([0, *cuts], [*cuts, end], strict=True)):
            row[first:stop] = number
    slots = torch.arange(length).expand(sequences, -1)
    tokens = torch.randint(0, SMALL_MODEL.vocab_size, (sequences, length))
    return Batch(tokens, torch.where(ids < 0, -100, tokens.roll(-1, 1)), slots, ids)


def test_cumulative_lengths_are_where_documents_and_padding_begin(draw: random.Random) -> None:
    for _ in range(50):
        sequences, length = draw.randrange(1, 5), draw.randrange(1, 40)
        batch = drawn_batch(draw, sequences, length, most_documents=12).with_document_starts()
        assert batch.document_starts is not None
        result = cumulative_lengths(batch.document_starts, length)
        flat = [(row, int(id)) for row, ids in enumerate(batch.document_ids) for id in ids]
        expected = [
            0,
            *(slot for slot in range(1, len(flat)) if flat[slot] != flat[slot - 1]),
            len(flat),
        ]
        assert result.dtype == torch.int32
        assert sorted(set(result.tolist())) == expected
        assert result.tolist() == sorted(result.tolist())
        # The length depends on the shape alone, a power of two of each sequence.
        documents = batch.document_starts.shape[1]
        assert result.shape == (sequences * documents + 1,)
        assert documents >= 8
        assert documents & (documents - 1) == 0
        part = batch[1:]
        if sequences > 1:
            assert part.document_starts is not None
            assert set(cumulative_lengths(part.document_starts, length).tolist()) == {
                slot - length for slot in expected if slot >= length
            }


@pytest.mark.parametrize(
    ("device", "capability", "dtype", "head_dim", "context_parallel", "expected", "reason"),
    [
        ("cuda", (9, 0), torch.bfloat16, 128, False, VARLEN, ""),
        ("cuda", (8, 0), torch.float16, 64, False, VARLEN, ""),
        ("cuda", (9, 0), torch.bfloat16, 256, False, VARLEN, ""),
        ("cuda", (9, 0), torch.bfloat16, 128, True, FLEX, "context parallelism"),
        ("cuda", (9, 0), torch.float32, 128, False, FLEX, "float32"),
        ("cuda", (9, 0), torch.bfloat16, 257, False, FLEX, "head_dim 257"),
        ("cuda", (9, 0), torch.bfloat16, 264, False, FLEX, "head_dim 264"),
        ("cuda", (9, 0), torch.bfloat16, 20, False, FLEX, "head_dim 20"),
        ("cuda", (7, 5), torch.float16, 64, False, FLEX, "compute capability 7.5"),
        ("cuda", (9, 0), torch.bfloat16, 12, False, DENSE, "head_dim 12"),
        ("cuda", (9, 0), torch.bfloat16, 8, True, DENSE, "head_dim 8"),
        ("cpu", (0, 0), torch.bfloat16, 128, False, DENSE, "on cpu"),
    ],
)
def test_the_backend_follows_from_device_dtype_and_model(
    device: str,
    capability: tuple[int, int],
    dtype: torch.dtype,
    head_dim: int,
    context_parallel: bool,
    expected: str,
    reason: str,
) -> None:
    result = choose_attention_backend(
        device, capability, dtype, head_dim, context_parallel=context_parallel
    )
    assert result == AttentionBackend(expected, reason)


def test_a_torch_without_the_kernel_takes_flex_attention_and_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("lmforge.core.model.attention_backend.load_varlen_attn", lambda: None)
    result = choose_attention_backend("cuda", (9, 0), torch.bfloat16, 128, context_parallel=False)
    assert result.name == FLEX
    assert torch.__version__ in result.reason


@pytest.mark.parametrize("window", [None, 1, 5])
def test_outputs_and_gradients_are_those_of_the_dense_mask(
    window: int | None, draw: random.Random
) -> None:
    varlen_on_cpu.install()
    batch = drawn_batch(draw, 3, 30).with_document_starts()
    assert batch.document_starts is not None
    q, k, v = (torch.randn(3, heads, 30, 16, requires_grad=True) for heads in (4, 2, 2))
    mask = AttentionMask(cu_seqlens=cumulative_lengths(batch.document_starts, 30), window=window)
    result, expected = (
        attend(q, k, v, mask),
        attend(q, k, v, create_attention_mask(batch.document_ids, window)),
    )
    torch.testing.assert_close(result, expected, atol=1e-5, rtol=1e-5)
    upstream = torch.randn_like(expected)
    gradients = (torch.autograd.grad(each, (q, k, v), upstream) for each in (result, expected))
    for ours, dense in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, dense, atol=1e-5, rtol=1e-5)


def _trained_steps(
    batches: list[Batch], compile_model: bool, mode: str = "none"
) -> tuple[list[torch.Tensor], list[int]]:
    """Gradients of a small model, summed over the batches, and the number of compiled graphs after
    each of them.
    """
    model = parallelize(
        init_weights(build_model(SMALL_MODEL), 0),
        NextTokenObjective().loss,
        dist_ctx=DistributedContext(RankInfo(), torch.device("cpu"), None),
        dtype=torch.float32,
        options=ParallelOptions(engine="single", activation_checkpointing=mode),
        compile_model=compile_model,
    )
    graphs = []
    for batch in batches:
        model.forward_backward([batch], torch.tensor(9.0), lambda phase: None)
        graphs.append(counters["stats"]["unique_graphs"])
    return [
        parameter.grad for parameter in model.parameters() if parameter.grad is not None
    ], graphs


@pytest.fixture
def varlen_chosen(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The CPU takes variable-length attention; grows by one number with each call of a kernel."""
    calls: list[int] = []
    documents = varlen_on_cpu._documents

    def counted(*args: Any) -> Any:
        calls.append(1)
        return documents(*args)

    monkeypatch.setattr(varlen_on_cpu, "_documents", counted)
    monkeypatch.setattr(
        attention, "attention_backend", lambda *args, **kwargs: AttentionBackend(VARLEN)
    )
    varlen_on_cpu.install()
    return calls


@pytest.mark.slow
def test_a_model_trains_as_with_dense_masks_and_is_not_compiled_again_for_other_documents(
    varlen_chosen: list[int], draw: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches = [drawn_batch(draw, 2, 48, most_documents=most) for most in (1, 4, 30)]
    # Sixteen documents: in every case more starts than the first batch has.
    batches.append(
        replace(batches[0], document_ids=(torch.arange(48, dtype=torch.int32) // 3).repeat(2, 1))
    )
    with monkeypatch.context() as patched:
        patched.setattr(
            attention, "attention_backend", lambda *args, **kwargs: AttentionBackend(DENSE)
        )
        expected, _ = _trained_steps(batches, compile_model=False)
    assert not varlen_chosen
    # Traced, forward and backward, as for inductor, but no code is generated.
    monkeypatch.setattr(nn.Module, "compile", partialmethod(nn.Module.compile, backend="aot_eager"))
    torch._dynamo.reset()
    counters.clear()
    result, graphs = _trained_steps(
        [batch.with_document_starts() for batch in batches], compile_model=True
    )
    assert varlen_chosen
    assert graphs[0] > 0
    assert graphs == graphs[:1] * 4
    for ours, dense in zip(result, expected, strict=True):
        torch.testing.assert_close(ours, dense, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(("mode", "recomputed"), [("none", 0), ("selective-ops", 0), ("full", 1)])
def test_selective_activation_checkpointing_keeps_its_output(
    mode: str, recomputed: int, varlen_chosen: list[int], draw: random.Random
) -> None:
    _trained_steps(
        [drawn_batch(draw, 2, 24).with_document_starts()], compile_model=False, mode=mode
    )
    assert len(varlen_chosen) == (2 + recomputed) * SMALL_MODEL.num_hidden_layers
