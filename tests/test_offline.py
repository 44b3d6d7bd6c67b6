"""Nodes without any network: what was downloaded is prepared and trained on, and what is missing is
named at once.

The processes have a network namespace of their own in which not even the loopback is up, as on no
compute node: nothing can be asked of anybody, whether by a name or by an address.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from lmforge.core.data.tokenizer import Tokenizer
from lmforge.core.model.build import build_model
from lmforge.core.model.init_weights import init_weights
from lmforge.hf.export import export_folder
from lmforge.hf.resolve import resolve_model_config
from tests.conftest import Command, without_shape
from tests.distributed.test_hub import SIZES
from tests.hf.hub_server import serving, variables
from tests.support.text import write_documents

WITHOUT_NETWORK = ["unshare", "--map-root-user", "--net"]


@pytest.mark.slow
@pytest.mark.needs("namespaces without a network")
def test_what_was_downloaded_trains_without_any_network_and_what_is_missing_is_named(
    tiny_tokens: Path, tiny_options: list[str], lmforge: Command, tmp_path: Path
) -> None:
    tokenizer = tiny_tokens / "tokenizer"
    config = resolve_model_config("nano", SIZES, Tokenizer.open(tokenizer).vocab_size)
    export_folder(
        init_weights(build_model(config), 0), config, tmp_path / "made", tokenizer_folder=tokenizer
    )
    write_documents(tmp_path / "text")
    texts = [path.read_text() for path in sorted((tmp_path / "text").rglob("*.*"))]
    recipe = tmp_path / "recipe.toml"
    recipe.write_text('[model]\nsource = "org/model"\n')
    with serving(
        {"org/model": {path.name: path.read_bytes() for path in (tmp_path / "made").iterdir()}}
    ) as hub:
        lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
        hub.datasets["org/pages"] = {
            "README.md": b"# Pages\n",
            "data/train-00000.jsonl": lines.encode(),
        }
        environment = variables(hub, tmp_path / "home")
        for words in ([recipe], ["org/pages", "--dataset"]):
            done = lmforge("download", *words, **environment)
            assert done.returncode == 0, done.stderr

    def without_network(*words: object, **more: str) -> subprocess.CompletedProcess[str]:
        line = [*WITHOUT_NETWORK, sys.executable, "-m", "lmforge", *map(str, words)]
        env = {**os.environ, **environment, **more}
        return subprocess.run(
            line, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=250
        )

    done = without_network(
        "prepare", "org/pages", "tokens", "--tokenizer", "org/model", "--validation_ratio", "0.1"
    )
    assert done.returncode == 0, done.stderr
    options = without_shape(tiny_options)
    options[options.index("--data.folder") + 1] = "tokens"
    train = ["pretrain", recipe, *options, "--train.steps", "3"]
    done = without_network(*train)
    assert done.returncode == 0, done.stderr
    assert "of org/model" in done.stdout
    assert (tmp_path / "runs" / "recipe" / "checkpoints" / "step-00000003").is_dir()
    [weights] = (tmp_path / "home" / "hub").glob("models--org--model/snapshots/*/model.safetensors")
    weights.unlink()
    for more, reason in (
        ({}, "cannot be reached"),
        ({"HF_HUB_OFFLINE": "1"}, "HF_HUB_OFFLINE is set"),
    ):
        refused = without_network(*train, "--run.name", "missing", **more)
        assert refused.returncode == 2, refused.stdout + refused.stderr
        assert refused.stderr.startswith("lmforge: org/model: no such folder, "), refused.stderr
        assert reason in refused.stderr
        assert "`lmforge download org/model` where there is" in refused.stderr
        assert refused.stderr.count("\n") == 1
        assert not (tmp_path / "runs" / "missing" / "recipe.toml").exists()
