"""Several ranks begin from a model by its name: one downloads it, the others wait, and errors are
raised on every rank.
"""

import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from lmforge.core.data.tokenizer import Tokenizer
from lmforge.core.model.build import build_model
from lmforge.core.model.init_weights import init_weights
from lmforge.hf.export import export_folder
from lmforge.hf.resolve import resolve_model_config
from tests.conftest import Command, without_shape
from tests.hf.hub_server import Hub, serving, variables

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


@pytest.fixture
def hub(tiny_tokens: Path, tmp_path: Path) -> Iterator[Hub]:
    """A hub with org/model, whose tokenizer the tiny tokens were prepared with."""
    tokenizer = tiny_tokens / "tokenizer"
    config = resolve_model_config("nano", SIZES, Tokenizer.open(tokenizer).vocab_size)
    export_folder(
        init_weights(build_model(config), 0), config, tmp_path / "made", tokenizer_folder=tokenizer
    )
    with serving(
        {"org/model": {path.name: path.read_bytes() for path in (tmp_path / "made").iterdir()}}
    ) as hub:
        yield hub


@pytest.mark.slow
def test_a_run_of_two_ranks_begins_from_a_name_that_one_of_them_fetches(
    hub: Hub, tiny_options: list[str], lmforge: Command, tmp_path: Path
) -> None:
    env = variables(hub, tmp_path / "home")
    options = without_shape(tiny_options)
    run = ["--run.folder", tmp_path, "--run.name", "a"]
    hub.gated = {"org/model"}
    refused = lmforge("pretrain", *options, *run, "--model.source", "org/model", ranks=2, **env)
    assert refused.returncode == 2
    assert [
        line for line in refused.stderr.splitlines() if line.startswith("lmforge: ")
    ] == refused.stderr.splitlines()[-1:]
    assert "org/model: gated: accept its terms" in refused.stderr
    hub.gated = set()
    hub.requests.clear()
    done = lmforge(
        "pretrain",
        *options,
        *run,
        "--model.source",
        "org/model@main",
        "--train.steps",
        4,
        ranks=2,
        **env,
    )
    assert done.returncode == 0, done.stderr
    assert hub.sent("model.safetensors") == [None]
    assert "of org/model@main" in done.stdout
    assert (
        tomllib.loads((tmp_path / "a" / "recipe.toml").read_text())["model"]["source"]
        == "org/model@main"
    )
    # From now on nothing is asked of the hub: it may be gone.
    env |= {"HF_HUB_OFFLINE": "1"}
    for words in (
        [
            "pretrain",
            tmp_path / "a" / "recipe.toml",
            "--run.folder",
            tmp_path,
            "--run.name",
            "a",
            "--train.steps",
            6,
        ],
        ["generate", "org/model", "First", "--max_tokens", 3, "--temperature", 0],
        ["show", "org/model"],
    ):
        done = lmforge(*words, **env)
        assert done.returncode == 0, done.stderr
