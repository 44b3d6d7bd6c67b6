"""Attention kernels that only a GPU has: variable-length flash attention, FlexAttention, and
decoding with grouped heads.
"""

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

from lmforge.core.data.batch import Batch
from lmforge.core.distributed.distributed import DistributedContext
from lmforge.core.distributed.rank_info import RankInfo
from lmforge.core.losses.language import NextTokenObjective
from lmforge.core.model.attention import AttentionMask, attend, create_attention_mask
from lmforge.core.model.build import build_model
from lmforge.core.model.init_weights import init_weights
from lmforge.core.options.sections import ParallelOptions
from lmforge.core.parallel.parallelize import parallelize
from lmforge.lab.bench.parity import SMALL_MODEL
from tests.conftest import Command

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_variable_length_flash_attention_is_flex_attention_and_dense_masks(window: int | None, head_dim: int) -> None:
    length, device = 700, torch.device("cuda", 0)
    ids = torch.full((3, length), -1, dtype=torch.int32)
    for row, ends in enumerate(([1, 300, 650], [length], [10, 11, 12, 400, length])):
        for number, (first, end) in enumerate(pairwise([0, *ends])):
            ids[row, first:end] = number
    batch = Batch(*(torch.zeros(3, length, dtype=torch.int64) for _ in range(3)), ids).to(device)
    kwargs: dict[str, Any] = {"dtype": torch.bfloat16, "head_dim": head_dim}
    varlen = create_attention_mask(batch.document_ids, window, document_starts=batch.document_starts, **kwargs)
    flex = create_attention_mask(batch.document_ids, window, **kwargs)
    assert varlen.cu_seqlens is not None
    assert flex.block_mask is not None
    inputs = [torch.randn(3, heads, length, head_dim, device=device) for heads in (8, 2, 2)]
    upstream = torch.randn(3, 8, length, head_dim, device=device)

    def attended(mask: AttentionMask, dtype: torch.dtype, where: torch.device) -> list[torch.Tensor]:
        leaves = [each.to(where, dtype).requires_grad_() for each in inputs]
        out = attend(*leaves, mask)
        return [each.float().cpu() for each in (out, *torch.autograd.grad(out, leaves, upstream.to(where, dtype)))]

    dense = attended(create_attention_mask(ids, window), torch.float32, torch.device("cpu"))
    for mask in (varlen, flex):
        for result, expected in zip(attended(mask, torch.bfloat16, device), dense, strict=True):
            # bf16 has 8 bits: a number is rounded to 1/256 of itself, and a gradient sums many of
            # them.
            assert (result - expected).norm() < 0.01 * expected.norm()


@pytest.mark.parametrize("mode", ["none", "full", "selective-ops"])
def test_batches_of_other_documents_are_not_compiled_for(mode: str) -> None:
    torch._dynamo.reset()
    counters.clear()
    model = parallelize(
        init_weights(build_model(SMALL_MODEL, torch.device("cuda", 0)), 0),
        NextTokenObjective().loss,
        dist_ctx=DistributedContext(RankInfo(), torch.device("cuda", 0), None),
        dtype=torch.bfloat16,
        options=ParallelOptions(activation_checkpointing=mode),
        compile_model=True,
    )
    graphs = []
    for most in (1, 5, 20):
        ids = torch.arange(256, dtype=torch.int32)[None] * most // 256
        tokens = torch.zeros(1, 256, dtype=torch.int64)
        batch = Batch(tokens, tokens, tokens, ids).to(torch.device("cuda", 0))
        model.forward_backward([batch], torch.tensor(255.0, device="cuda"), lambda phase: None)
        graphs.append(counters["stats"]["unique_graphs"])
    assert graphs[0] > 0
    assert graphs == graphs[:1] * 3
    assert all(parameter.grad is not None and parameter.grad.isfinite().all() for parameter in model.parameters())


def test_a_run_says_that_it_takes_variable_length_flash_attention(
    lmforge: Command, tiny_options: list[str], tmp_path: Path
) -> None:
    words = ["--train.device", "cuda", "--train.dtype", "bf16", "--model.head_dim", "16"]
    done = lmforge("pretrain", *tiny_options, *words, "--run.folder", str(tmp_path), "--run.name", "a")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "attention variable-length flash (FA" in done.stdout + done.stderr


def test_a_decoding_step_with_grouped_heads_keeps_no_copy_of_the_keys() -> None:
    q = torch.randn(8, 32, 1, 128, device="cuda", dtype=torch.bfloat16)
    k, v = torch.randn(2, 8, 4, 4096, 128, device="cuda", dtype=torch.bfloat16)
    mask = AttentionMask(torch.ones(8, 1, 1, 4096, device="cuda", dtype=torch.bool))
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = attend(q, k, v, mask)
    assert torch.cuda.max_memory_allocated() - before < k.nbytes
    expected = attend(q.cpu().float(), k.cpu().float(), v.cpu().float(), AttentionMask(torch.ones(8, 1, 1, 4096).bool()))
    torch.testing.assert_close(result.cpu().float(), expected, atol=2e-2, rtol=2e-2)  # bf16 has 8 bits
