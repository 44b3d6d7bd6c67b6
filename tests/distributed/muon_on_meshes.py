"""Run in every rank: Muon on matrices of odd sizes, sharded over meshes of all ranks, and alone.

muon_on_meshes.py SEED     fails where a mesh gives other weights than one process
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from lmforge.core.optim.muon import Muon

# Rows that do not divide, fewer rows than ranks, wide, tall, and a number of matrices that leaves
# ranks without one.
SHAPES = [(7, 5), (7, 5), (2, 9), (1, 3), (12, 4), (4, 12), (3, 3)]
# Stacks of experts: sharded by expert, and on a second dimension of the mesh by the rows of each.
STACKS = [(4, 12, 5), (4, 12, 7)]
STEPS = 6


def trained(seed: int, mesh: dist.DeviceMesh | None) -> list[torch.Tensor]:
    """The whole matrices after some steps with gradients drawn from `seed`, the same on every rank."""
    generator = torch.Generator().manual_seed(seed)
    replicated = [] if mesh is None else [Replicate()] * (mesh.ndim - 1)

    def place(tensor: torch.Tensor) -> torch.Tensor:
        if mesh is None:
            return tensor
        rows = [Shard(1)] if tensor.ndim == 3 and mesh.ndim == 2 else replicated
        return distribute_tensor(tensor, mesh, [*rows, Shard(0)])

    matrices = [nn.Parameter(place(torch.randn(shape, generator=generator))) for shape in SHAPES + STACKS]
    optimizer = Muon(
        [{"params": matrices, "orthogonal": True, "weight_decay": 0.1}], lr=0.05, momentum=0.95, betas=(0.9, 0.95), eps=1e-8
    )
    for _ in range(STEPS):
        for matrix in matrices:
            matrix.grad = place(torch.randn(matrix.shape, generator=generator))
        optimizer.step()
    assert all(optimizer.state[matrix]["momentum_buffer"].shape == matrix.shape for matrix in matrices)
    return [matrix.full_tensor() if isinstance(matrix, DTensor) else matrix.detach() for matrix in matrices]


if __name__ == "__main__":
    dist.init_process_group("gloo")
    ranks = dist.get_world_size()
    expected = trained(int(sys.argv[1]), None)
    for sizes in [(ranks,), *((count, ranks // count) for count in range(1, ranks + 1) if ranks % count == 0)]:
        found = trained(int(sys.argv[1]), init_device_mesh("cpu", sizes))
        for theirs, ours in zip(expected, found, strict=True):
            # Matrices of one shape are multiplied together, in stacks that differ by rank: sums may
            # be in another order.
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5, msg=lambda text, sizes=sizes: f"mesh {sizes}: {text}")
    dist.destroy_process_group()
