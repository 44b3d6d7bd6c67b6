"""Run by test_initial_weights.py on each rank: first values are those of one process, and each rank
draws only what it holds.

With a number of ranks as its argument it is one of that many, but the others do not exist, since
nothing is communicated.
"""

import json
import sys
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from lmforge.core.distributed import distributed as cluster
from lmforge.core.distributed.distributed import DistributedContext
from lmforge.core.distributed.rank_info import RankInfo
from lmforge.core.losses.language import NextTokenObjective
from lmforge.core.model.build import build_model
from lmforge.core.model.config import ModelConfig
from lmforge.core.model.init_weights import init_weights
from lmforge.core.model.layers import LanguageModel
from lmforge.core.model.lora import LoraConfig, add_lora
from lmforge.core.model.rng import weight_rng
from lmforge.core.options.sections import ParallelOptions
from lmforge.core.parallel.parallel_model import ParallelModel, full_tensor, local_tensor
from lmforge.core.parallel.parallelize import parallelize

# 510 rows are not divisible by 4, and 102 neither.
CONFIG = ModelConfig(510, 64, 4, 4, intermediate_size=102, num_key_value_heads=2)
LARGE_CONFIG = ModelConfig(5110, 64, 1, 4, intermediate_size=1602, num_key_value_heads=2)
STRATEGIES = {
    "ddp": ParallelOptions(engine="ddp"),
    "fsdp1": ParallelOptions(engine="fsdp1"),
    "fsdp1, adapters": ParallelOptions(engine="fsdp1"),
    "fsdp2": ParallelOptions(engine="fsdp2"),
    "tensor parallel": ParallelOptions(engine="fsdp2", tensor_parallel_degree=2),
    "pipeline": ParallelOptions(engine="fsdp2", pipeline_parallel_degree=2),
}
SEED = 7
num_drawn = 0


def counting(key: int, starts: Tensor, length: int, drawn=weight_rng.random_int32) -> Tensor:  # type: ignore[no-untyped-def]
    global num_drawn
    num_drawn += len(starts) * length
    return drawn(key, starts, length)


def build(config: ModelConfig, device: str, adapters: bool) -> LanguageModel:
    model = build_model(config, device)
    if adapters:
        add_lora(model, LoraConfig(2, 4.0))
    return model


def assert_same(result: ParallelModel, expected: dict[str, Tensor]) -> None:
    with result.unsharded() if result.engine == "fsdp1" else nullcontext(result.model) as model:
        for name, parameter in model.named_parameters():
            assert torch.equal(full_tensor(parameter), expected[name]), name


if __name__ == "__main__":
    weight_rng.random_int32 = counting
    folder, absent = Path(sys.argv[1]), len(sys.argv) > 2
    if absent:
        world_size = int(sys.argv[2])
        rank_info = RankInfo(world_size // 2, world_size, 0, 8, launched=True)
        dist.init_process_group("fake", store=FakeStore(), rank=rank_info.rank, world_size=world_size)
        dist_ctx, config = DistributedContext(rank_info, torch.device("cpu"), None), LARGE_CONFIG
    else:
        dist_ctx, config = cluster.init_distributed("cpu", threads=1), CONFIG
    counts = {}
    for name, options in STRATEGIES.items():
        if absent and name in ("ddp", "pipeline"):  # DDP waits for what the others send, and there are not that many blocks
            continue
        adapters, num_drawn = "adapters" in name, 0
        result = parallelize(
            build(config, "meta", adapters),
            NextTokenObjective().loss,
            dist_ctx=dist_ctx,
            dtype=torch.float32,
            options=options,
            init_weights=lambda model: init_weights(model, SEED),
        )
        counts[name] = num_drawn, sum(local_tensor(each).numel() for each in result.model.parameters())
        if not absent:
            single = init_weights(build(config, "cpu", adapters), SEED)
            assert_same(result, {name: each.detach() for name, each in single.named_parameters()})
    (folder / f"{dist_ctx.rank_info.rank}.json").write_text(json.dumps(counts))
    cluster.destroy_distributed()
