"""Run by test_sharded.py on each of several ranks: a sharded model is initialised and loaded like
an unsharded one.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from lmforge.core.model.build import build_model
from lmforge.core.model.init_weights import init_weights
from lmforge.hf.resolve import resolve_model_config
from lmforge.hf.weights import load_folder


def assert_same(sharded: nn.Module, whole: nn.Module) -> None:
    for name, parameter in whole.named_parameters():
        assert torch.equal(sharded.get_parameter(name).full_tensor(), parameter), name


dist.init_process_group("gloo")
for folder in map(Path, sys.argv[1:]):
    config = resolve_model_config(folder, {})
    model = build_model(config, "meta")
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    model.to_empty(device="cpu")
    model.tie_weights()
    whole = init_weights(build_model(config), 5)

    init_weights(model, seed=5)
    assert_same(model, whole)
    load_folder(folder, model)
    load_folder(folder, whole)
    assert_same(model, whole)
dist.destroy_process_group()
