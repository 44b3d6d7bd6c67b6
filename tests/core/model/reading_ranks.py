"""Run by test_sharded.py on each of several ranks: how much loading a folder into a sharded model
reads and allocates.

Arguments: the ranks of a shard group, a folder in which each rank leaves its figures as JSON, and
what to load.
"""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from lmforge.cli import exit_process
from lmforge.core.model.build import build_model
from lmforge.hf.resolve import resolve_model_config
from lmforge.hf.weights import load_folder


def figure(file: str, name: str) -> int:
    """A number of this process out of /proc."""
    [line] = [
        line
        for line in Path(f"/proc/self/{file}").read_text().splitlines()
        if line.startswith(f"{name}:")
    ]
    return int(line.split()[1])


dist.init_process_group("gloo")
shards, out = int(sys.argv[1]), Path(sys.argv[2])
mesh = init_device_mesh(
    "cpu", (dist.get_world_size() // shards, shards), mesh_dim_names=("replicate", "shard")
)
for folder in map(Path, sys.argv[3:]):
    model = build_model(resolve_model_config(folder, {}), "meta")
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.to_empty(device="cpu")
    model.tie_weights()
    dist.barrier()

    Path("/proc/self/clear_refs").write_text("5")  # the peak starts from here
    read, held = figure("io", "rchar"), figure("status", "VmRSS")
    load_folder(folder, model)
    read, held = figure("io", "rchar") - read, figure("status", "VmHWM") - held
    own = sum(parameter.to_local().nbytes for parameter in model.parameters())

    whole = build_model(resolve_model_config(folder, {}))
    load_folder(folder, whole)
    for name, parameter in whole.named_parameters():
        assert torch.equal(model.get_parameter(name).full_tensor(), parameter), name
    (out / f"{folder.name}-{dist.get_rank()}.json").write_text(
        json.dumps({"read": read, "held": held * 1024, "own": own})
    )
dist.destroy_process_group()
exit_process(0)
