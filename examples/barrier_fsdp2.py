"""Why asynchronous saving can hang FSDP2 training, whatever barrier comes before it, on two CPU
processes.

    torchrun --standalone --nproc-per-node 2 examples/barrier_fsdp2.py [own-group]

Saving exchanges its plan in a thread of its own. On the group that training uses, its collectives
and those of the next step pair in whatever order the threads happen to run. With "own-group" they
cannot meet. The story is in docs/barriers.md.
"""

import sys
import tempfile
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

OWN_GROUP = "own-group" in sys.argv


def main() -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=10))
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (2,))
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(8)))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    group = dist.new_group(backend="gloo") if OWN_GROUP else None
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder, src=0)
    saving = None
    for step in range(12):
        model(torch.randn(4, 64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        dist.barrier()  # this does not help: the problem comes after it
        if saving is not None:
            saving.result()
        saving = dcp.async_save(model.state_dict(), checkpoint_id=f"{folder[0]}/{step}", process_group=group)
        if dist.get_rank() == 0:
            print(f"step {step}: saving beside the next", flush=True)
    saving.result()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
