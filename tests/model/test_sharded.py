"""Weights of a sharded model, over ranks whose number divides nothing."""

import random
import subprocess
import sys
from pathlib import Path

from lmforge.model.export import export_folder
from tests.model.conftest import built, drawn_config


def test_a_sharded_model_is_initialised_and_loaded_as_a_whole_one(draw: random.Random, tmp_path: Path) -> None:
    folders = [tmp_path / "qwen3", tmp_path / "gpt2"]
    for folder in folders:
        config = drawn_config(folder.name, draw)
        export_folder(built(config), config, folder, shard_bytes=9000)
    ranks = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=3"]
    program = [str(Path(__file__).with_name("sharded_ranks.py")), *map(str, folders)]
    done = subprocess.run([sys.executable, *ranks, *program], capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
