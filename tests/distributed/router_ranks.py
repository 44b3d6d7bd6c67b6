"""Run in every rank: mixtures in bf16 under FSDP2, whose routers compute with their weights in
fp32.

router_ranks.py SEED     fails where a router's weight is not the master weight, experts are chosen
                         by another, or it is trained
                         otherwise than in fp32; and where that needs more than one gather and one
                         reduction a step
"""

import sys
from dataclasses import replace
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode

from lmforge.core.distributed import distributed as cluster
from lmforge.core.model.build import build_model
from lmforge.core.model.config import ModelConfig
from lmforge.core.model.init_weights import init_weights
from lmforge.core.model.layers import LanguageModel
from lmforge.core.model.mixture.experts import Router
from lmforge.core.options.sections import ParallelOptions
from lmforge.lab.bench.parity import ParityCase, ParityData, run_case

SHAPE = ModelConfig(
    131,
    32,
    3,
    4,
    24,
    model_type="qwen3_moe",
    num_experts=6,
    num_experts_per_tok=2,
    moe_intermediate_size=16,
)
# Options, and the number of micro-batches.
CASES: dict[str, tuple[dict[str, Any], int]] = {
    "gathered once": ({"sharding": "grad-shard", "reduce_every_micro_batch": False}, 2),
    "recomputed": ({"activation_checkpointing": "full"}, 2),
    "experts": ({"expert_parallel_degree": 2}, 1),
    "tensor": ({"tensor_parallel_degree": 2}, 1),
    "pipeline": ({"pipeline_parallel_degree": 2}, 2),
}
# Of what a router learns in three steps: bf16 differs from fp32 by 0.01 to 0.05. With an eighth of
# the tokens, a few in a near-tie of experts, which bf16 sends to the other one, would count for up
# to 0.3.
TOLERANCE = 0.15


def check_routers(model: LanguageModel, weights: list[torch.Tensor]) -> None:
    """Check each call of a router, and keep its weight."""

    def check(
        router: Router, inputs: tuple[torch.Tensor, ...], result: tuple[torch.Tensor, ...]
    ) -> None:
        weight = router.weight.to_local() if isinstance(router.weight, DTensor) else router.weight
        assert (weight.dtype, inputs[0].dtype) == (torch.float32, torch.bfloat16)
        chosen = (
            (inputs[0].float() @ weight.t()).softmax(-1).topk(SHAPE.num_experts_per_tok).indices
        )
        assert torch.equal(chosen, result[1])
        weights.append(weight.detach().clone())

    for module in model.modules():
        if isinstance(module, Router):
            module.register_forward_hook(check)  # type: ignore[arg-type]


if __name__ == "__main__":
    ranks = cluster.init_distributed("cpu", threads=1)
    data = ParityData(sequences=32, sequence_length=48, steps=3, seed=int(sys.argv[1]))
    initial = init_weights(build_model(SHAPE), data.seed).state_dict().items()
    masters = {name: weight.clone() for name, weight in initial if name.endswith("gate.weight")}
    plain = ParityCase("fp32", ParallelOptions(engine="fsdp2"), model_config=SHAPE)
    collectives = {dtype: CommDebugMode() for dtype in (torch.float32, torch.bfloat16)}
    wanted, _ = [
        run_case(replace(plain, dtype=dtype), data, ranks, counter)
        for dtype, counter in collectives.items()
    ]
    in_fp32, in_bf16 = (each.get_comm_counts() for each in collectives.values())
    more = {
        str(name): count - in_fp32[name]
        for name, count in in_bf16.items()
        if count != in_fp32[name]
    }
    assert len(more) == 2, more
    assert {*more.values()} == {1}, more
    for name, (options, accumulation) in CASES.items():
        weights: list[torch.Tensor] = []
        options = ParallelOptions(engine="fsdp2", **options)
        case = replace(
            plain, name=name, options=options, accumulation=accumulation, dtype=torch.bfloat16
        )
        result = run_case(
            replace(
                case, change_model=lambda model, weights=weights: check_routers(model, weights)
            ),
            data,
            ranks,
        )
        called = [each for of_rank in ranks.all_gather(weights[: len(masters)]) for each in of_rank]
        # Of the first step; a pipeline's ranks have some of them.
        for tensor, master in masters.items():
            assert any(torch.equal(master, each) for each in called), (name, tensor)
            if ranks.is_rank0:
                learned, differs = (
                    wanted.weights[tensor] - master,
                    result.weights[tensor] - wanted.weights[tensor],
                )
                assert differs.norm() < TOLERANCE * learned.norm(), (
                    name,
                    tensor,
                    differs.norm() / learned.norm(),
                )
    cluster.destroy_distributed()
