"""The memory of a simulated step compared with FSDPMemTracker's on a real one, for 8 to 1,024 ranks
of a fake group.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.testing._internal.distributed.fake_pg import FakeStore

from lmforge.core.data.batch import Batch
from lmforge.core.distributed.distributed import DistributedContext
from lmforge.core.distributed.rank_info import RankInfo
from lmforge.core.losses.language import NextTokenObjective
from lmforge.core.model.build import build_model
from lmforge.core.model.config import ModelConfig
from lmforge.core.model.layers import LanguageModel
from lmforge.core.options.activation_checkpointing import CHECKPOINTING_MODES
from lmforge.core.options.sections import ParallelOptions
from lmforge.core.parallel.parallelize import parallelize
from lmforge.lab.plan.prediction.simulator import simulate
from lmforge.lab.plan.prediction.step_config import StepConfig
from tests.lab.plan.step_program import step_program
from tests.support.grids import parametrize

MIB = 2**20
# Whose peak is in the loss, and whose is in the backward pass of a block. The loss has one chunk:
# what torch allocates within an operator, to add the bf16 gradient of a second chunk to the fp32
# sum, the tracker does not see.
WIDE_HEAD = {
    "vocab_size": 8000,
    "num_hidden_layers": 6,
    "num_key_value_heads": 2,
    "intermediate_size": 1408,
}
DEEP = {
    "vocab_size": 512,
    "num_hidden_layers": 8,
    "num_key_value_heads": 8,
    "intermediate_size": 2048,
}
# A dense block and five that are mixtures, whose experts are fewer than some of the ranks.
MIXTURE = {
    "model_type": "qwen3_moe",
    "vocab_size": 512,
    "num_hidden_layers": 6,
    "num_key_value_heads": 2,
    "intermediate_size": 1408,
    "mlp_only_layers": (1,),
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 704,
    "router_aux_loss_coef": 0.01,
    "output_router_logits": True,
}
CASES = [
    (WIDE_HEAD, 8, (1, 256), {}),
    (DEEP, 64, (2, 512), {"activation_checkpointing": "full"}),
    (DEEP, 1024, (1, 64), {}),
    (MIXTURE, 8, (2, 512), {}),
]
MORE_CASES = [
    (DEEP, 8, (2, 512), {}),
    (DEEP, 8, (1, 64), {"activation_checkpointing": "full"}),
    (DEEP, 64, (1, 64), {"sharding": "hybrid-full-shard"}),
    (WIDE_HEAD, 8, (1, 256), {"activation_checkpointing": "full"}),
    *(
        (DEEP, 64, (2, 512), {"activation_checkpointing": mode})
        for mode in CHECKPOINTING_MODES
        if mode not in ("none", "full")
    ),
    (DEEP, 1024, (2, 512), {"sharding": "grad-shard"}),
    (DEEP, 128, (2, 512), {"activation_checkpointing": "full", "sharding": "grad-shard"}),
    (DEEP, 256, (1, 64), {"wrap_embedding": False}),
    *(
        (MIXTURE, 8, (2, 512), {"activation_checkpointing": mode})
        for mode in CHECKPOINTING_MODES
        if mode != "none"
    ),
    (MIXTURE, 64, (1, 256), {}),
]


def config_of(sizes: dict[str, Any]) -> ModelConfig:
    return ModelConfig(hidden_size=512, num_attention_heads=8, **sizes)


@contextmanager
def fake_ranks(world_size: int) -> Iterator[DistributedContext]:
    dist.init_process_group("fake", rank=0, world_size=world_size, store=FakeStore())
    try:
        yield DistributedContext(RankInfo(0, world_size, 0, 8), torch.device("cpu"), None)
    finally:
        dist.destroy_process_group()


def tracked_peak(
    config: ModelConfig, world_size: int, shape: tuple[int, int], options: ParallelOptions
) -> float:
    """Bytes of live tensors at the peak of the second step on rank 0, which holds zeros: what it
    computes does not matter.
    """

    def zeros(model: LanguageModel) -> None:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.to_local().zero_()  # type: ignore[attr-defined]

    with fake_ranks(world_size) as dist_ctx:
        model = parallelize(
            build_model(config, "meta"),
            NextTokenObjective().loss,
            dist_ctx=dist_ctx,
            dtype=torch.bfloat16,
            options=options,
            init_weights=zeros,
        )
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        tokens = torch.zeros(shape, dtype=torch.int64)
        batch = Batch(tokens, tokens.clone(), tokens.clone(), tokens.int(), tokens.clone())
        model.model_with_loss(batch)[0].backward()
        optimizer.step()
        optimizer.zero_grad()
        root: Any = model.model_with_loss
        tracker = FSDPMemTracker(root, optimizer)
        tracker.track_external(root, optimizer)
        with tracker:
            root(batch)[0].backward()
            optimizer.step()
        peak = tracker.get_tracker_snapshot("peak")
        return float(peak[torch.device("cpu")]["Total"])


def compare(
    sizes: dict[str, Any], world_size: int, shape: tuple[int, int], changes: dict[str, Any]
) -> None:
    config = config_of(sizes)
    options = ParallelOptions(engine="fsdp2", **changes)
    tracked = tracked_peak(config, world_size, shape, options)
    step_config = StepConfig(
        config, options, world_size, 8, shape[0], 1, shape[1], compiled=False, on_gpu=False
    )
    program = step_program(step_config)
    simulated = simulate(program.build(1), program.held())
    live = sum(simulated.live_peak.values())
    ratio = live / tracked
    print(
        f"{world_size} {shape} {changes}: {live / MIB:.1f} of {tracked / MIB:.1f} MiB, {ratio:.3f},"
        f" {simulated.peak_at}"
    )
    assert live == pytest.approx(tracked, rel=0.05)


@parametrize(("sizes", "world_size", "shape", "changes"), CASES, fast=(0,))
def test_a_simulated_step_peaks_where_a_real_one_does(
    sizes: dict[str, Any], world_size: int, shape: tuple[int, int], changes: dict[str, Any]
) -> None:
    compare(sizes, world_size, shape, changes)


@pytest.mark.slow
@pytest.mark.parametrize(("sizes", "world_size", "shape", "changes"), MORE_CASES)
def test_a_simulated_step_peaks_where_a_real_one_does_in_more_cases(
    sizes: dict[str, Any], world_size: int, shape: tuple[int, int], changes: dict[str, Any]
) -> None:
    compare(sizes, world_size, shape, changes)
