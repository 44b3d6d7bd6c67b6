"""The part that engines share: the norm of the gradient, on the device of the loss."""

import math
import resource
from dataclasses import replace

import pytest
import torch

from lmforge.core.data.batch import Metrics
from lmforge.core.distributed import distributed as cluster
from lmforge.core.distributed.distributed import DistributedContext
from lmforge.core.distributed.rank_info import RankInfo
from lmforge.core.errors import UserError
from lmforge.core.losses.language import NextTokenObjective
from lmforge.core.model.build import build_model
from lmforge.core.options.sections import ParallelOptions
from lmforge.core.parallel.parallel_model import _norm_by_rows
from lmforge.core.parallel.parallelize import parallelize
from lmforge.core.steps.bad_steps import BadStepDetector
from lmforge.lab.bench.parity import SMALL_MODEL

META = torch.device("meta")


def test_the_norm_of_gradients_on_the_cpu_is_on_the_device_of_the_loss_and_clips_where_the_gradients_are() -> (
    None
):
    """The devices of a GPU rank with cpu_offload, with meta in the place of the GPU."""
    dist_ctx = DistributedContext(RankInfo(), META, None)
    model = parallelize(
        build_model(SMALL_MODEL),
        NextTokenObjective().loss,
        dist_ctx=dist_ctx,
        dtype=torch.float32,
        options=ParallelOptions(engine="single"),
    )
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    count = sum(parameter.numel() for parameter in model.parameters())
    norm = model.clip_grad_norm(0.5)
    assert norm.device == META
    clipped = torch.cat(
        [parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None]
    )
    torch.testing.assert_close(
        clipped, torch.full((count,), 0.5 / math.sqrt(count)), rtol=1e-4, atol=0
    )

    detector = BadStepDetector(dist_ctx, spike_sigmas=6.0, window_steps=8)
    metrics: Metrics = {"loss": (torch.ones((), device=META), torch.ones((), device=META))}
    assert detector.check(1, [metrics], norm).device == META


def test_a_model_that_does_not_fit_unsharded_is_refused_before_it_is_gathered_for_decoding() -> (
    None
):
    dist_ctx = DistributedContext(RankInfo(), torch.device("cpu"), None)
    model = parallelize(
        build_model(replace(SMALL_MODEL, vocab_size=2**20)),  # embedding and head: 256 MiB in bf16
        NextTokenObjective().loss,
        dist_ctx=dist_ctx,
        dtype=torch.bfloat16,
        options=ParallelOptions(engine="fsdp2"),
    )
    limits = resource.getrlimit(resource.RLIMIT_DATA)
    try:
        with open("/proc/self/status") as status:
            used = next(
                int(line.split()[1]) * 2**10 for line in status if line.startswith("VmData")
            )
        resource.setrlimit(resource.RLIMIT_DATA, (used + 2**26, limits[1]))
        with (
            pytest.raises(
                UserError, match="whole model on each rank, to generate with it: needs 256 MiB"
            ),
            model.unsharded(),
        ):
            pass
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, limits)
        cluster.destroy_distributed()


@pytest.mark.parametrize("size", [1, 1023, 1024, 131_072, 300_001])
def test_the_norm_of_a_gradient_on_a_cpu_is_exact_whatever_its_size(size: int) -> None:
    numbers = torch.randn(size, generator=torch.Generator().manual_seed(size)) * 1e-3
    numbers[::7] *= 30
    exact = float(torch.linalg.vector_norm(numbers, dtype=torch.float64))
    assert float(_norm_by_rows(numbers)) == pytest.approx(exact, rel=3e-7)
    assert float(_norm_by_rows(numbers[:, None].expand(-1, 2).contiguous())) == pytest.approx(
        exact * 2**0.5, rel=3e-7
    )
