"""Run in every rank: tokens sent to experts on other ranks and back, against all experts on one
rank.

dispatch_on_ranks.py SEED     fails where outputs or gradients differ
"""

import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from lmforge.core.model.config import ModelConfig
from lmforge.core.model.mixture.experts import Experts
from lmforge.core.parallel.expert_parallel import Dispatch

EXPERTS, WIDTH, TOKENS = 8, 6, 10
# Which experts tokens may choose: all; those of one rank, so that others get nothing; one; none of
# some ranks' tokens go away.
CHOICES = {"all": range(8), "one rank": range(2, 4), "one expert": range(5, 6), "two ranks": (0, 7)}


def run(
    experts: Experts, x: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor
) -> list[torch.Tensor]:
    """The output and its gradients: of x, of the weights of tokens, of the two stacks."""
    x, weights = x.clone().requires_grad_(), weights.clone().requires_grad_()
    out = experts(x, weights, chosen)
    inputs = (x, weights, experts.gate_up_proj, experts.down_proj)
    return [out.detach(), *torch.autograd.grad(out.square().sum(), inputs)]


if __name__ == "__main__":
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator().manual_seed(int(sys.argv[1]))
    config = ModelConfig(
        100,
        WIDTH,
        1,
        1,
        24,
        model_type="qwen3_moe",
        num_experts=EXPERTS,
        num_experts_per_tok=2,
        moe_intermediate_size=5,
    )
    mixture = config.blocks[0].mixture
    assert mixture is not None
    whole, split = (Experts(config, mixture) for _ in "12")
    with torch.no_grad():
        for stack in whole.parameters():
            # Small, for gradients are products of several of them, whose sums are added in another
            # order.
            stack.copy_(0.5 * torch.randn(stack.shape, generator=generator))
    mine = slice(rank * EXPERTS // ranks, (rank + 1) * EXPERTS // ranks)
    for name, stack in whole.named_parameters():
        split.register_parameter(name, torch.nn.Parameter(stack.detach()[mine].clone()))
    mesh = init_device_mesh("cpu", (ranks,))
    split.dispatch = Dispatch(mesh.get_group(), mesh)
    for what, choices in CHOICES.items():
        allowed = torch.tensor([*choices])
        chosen = allowed[torch.randint(len(allowed), (ranks, TOKENS, 2), generator=generator)]
        x, weights = (torch.randn(ranks, TOKENS, size, generator=generator) for size in (WIDTH, 2))
        found = run(split, x[rank], weights[rank], chosen[rank])
        wanted = run(whole, x.flatten(0, 1), weights.flatten(0, 1), chosen.flatten(0, 1))
        of_rank = [each.unflatten(0, (ranks, TOKENS))[rank] for each in wanted[:3]] + [
            each[mine] for each in wanted[3:]
        ]
        for ours, theirs in zip(found, of_rank, strict=True):
            torch.testing.assert_close(
                ours, theirs, rtol=1e-5, atol=1e-4, msg=lambda text, what=what: f"{what}: {text}"
            )
    dist.destroy_process_group()
