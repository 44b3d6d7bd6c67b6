"""Weights of a sharded model, for numbers of ranks that do not divide its dimensions."""

import json
import math
import random
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from lmforge.core.model.build import build_model
from lmforge.core.model.config import ModelConfig
from lmforge.core.model.init_weights import init_weights
from lmforge.hf.export import export_folder
from lmforge.hf.resolve import resolve_model_config
from lmforge.hf.safetensors_file import BLOCK_BYTES, SafetensorsFile
from lmforge.hf.weights import load_folder
from tests.core.model.conftest import built, drawn_config
from tests.support.preloaded import on_ranks

SLOW = pytest.mark.slow


def test_a_sharded_model_is_initialised_and_loaded_like_an_unsharded_one(
    draw: random.Random, tmp_path: Path
) -> None:
    kinds = ("qwen3", "gpt2", "mixtral", "olmo_hybrid", "kimi_linear")
    folders = [tmp_path / kind for kind in kinds]
    for folder in folders:
        config = drawn_config(folder.name, draw)
        export_folder(built(config), config, folder, max_shard_bytes=9000)
    on_ranks(3, Path(__file__).with_name("sharded_ranks.py"), tmp_path, *folders)


@pytest.fixture(scope="module")
def large_folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """A model of 34 million parameters, in fp32 (137 MB) and, in several files, in bf16."""
    sizes = {
        "vocab_size": 8192,
        "hidden_size": 512,
        "intermediate_size": 1536,
        "num_hidden_layers": 8,
    }
    config = ModelConfig(**sizes, num_attention_heads=8, num_key_value_heads=4)
    model, folder = init_weights(build_model(config), 0), tmp_path_factory.mktemp("large")
    export_folder(model, config, folder / "fp32")
    export_folder(model, config, folder / "bf16", dtype=torch.bfloat16, max_shard_bytes=20_000_000)
    return [folder / "fp32", folder / "bf16"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "shards"),
    [
        pytest.param(2, 2, marks=SLOW, id="2"),
        pytest.param(3, 3, id="3"),
        pytest.param(4, 2, marks=SLOW, id="2 replicas of 2"),
    ],
)
def test_each_rank_reads_its_own_bytes_and_holds_no_more_than_its_part(
    ranks: int, shards: int, large_folders: list[Path], tmp_path: Path
) -> None:
    on_ranks(
        ranks,
        Path(__file__).with_name("reading_ranks.py"),
        tmp_path,
        shards,
        tmp_path,
        *large_folders,
    )
    for folder in large_folders:
        reports = [
            json.loads((tmp_path / f"{folder.name}-{rank}.json").read_text())
            for rank in range(ranks)
        ]
        stored = sum(path.stat().st_size for path in folder.iterdir())
        print(folder.name, stored, reports)
        # Every byte is read once by each replica; beyond that come headers, the index and
        # config.json, a few KB a rank.
        assert sum(rank["read"] for rank in reports) < ranks // shards * stored * 1.01
        for rank in reports:
            assert rank["read"] < stored / shards * 1.05
            assert rank["held"] < rank["own"] + 1.5 * BLOCK_BYTES


def test_a_rank_of_eight_reads_an_eighth_of_the_experts_and_at_most_all_else(
    draw: random.Random, tmp_path: Path
) -> None:
    """As few bytes with 16 experts that 8 ranks divide: what this process reads in the place of
    each, counted by the system.
    """
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = drawn_config(
        "olmoe", draw, num_experts=16, num_experts_per_tok=2, num_hidden_layers=2, **sizes
    )
    export_folder(built(config), config, tmp_path / "out")
    file = SafetensorsFile(tmp_path / "out" / "model.safetensors")
    sizes = {
        name: math.prod(each.shape) * each.dtype.itemsize for name, each in file.entries.items()
    }
    experts = sum(size for name, size in sizes.items() if ".experts." in name)
    others = sum(path.stat().st_size for path in (tmp_path / "out").iterdir()) - experts
    counted = []
    for rank in range(8):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=8)
        try:
            model = build_model(resolve_model_config(tmp_path / "out", {}), "meta")
            for block in model.blocks:
                fully_shard(block, mesh=init_device_mesh("cpu", (8,)))
            model.to_empty(device="cpu")
            before = bytes_read()
            load_folder(tmp_path / "out", model)
            counted.append(bytes_read() - before)
        finally:
            dist.destroy_process_group()
    # The config and the headers are read more than once.
    headers = 6 * (
        (tmp_path / "out" / "config.json").stat().st_size
        + min(each.offset for each in file.entries.values())
    )
    print(counted, experts, others, headers)
    for read in counted:
        assert experts / 8 < read <= experts / 8 + others + headers


def bytes_read() -> int:
    """By this process, from files or caches."""
    (line,) = [
        line for line in Path("/proc/self/io").read_text().splitlines() if line.startswith("rchar:")
    ]
    return int(line.split()[1])
