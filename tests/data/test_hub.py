"""Models by name: what a download fetches, goes on with, checks and refuses, against a hub that this machine serves."""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import snapshot_download
from lmforge.hub import BLOCK_BYTES

from tests.conftest import Command, only_line
from tests.data.hub_server import COMMIT, Hub, serving, variables
from tests.seeds import fresh_random

FILES = ("config.json", "generation_config.json", "merges.txt", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
# The hub's library keeps whole blocks of this size of a file that breaks off after 12,000,000 bytes.
KEPT = 12_000_000 // BLOCK_BYTES * BLOCK_BYTES


@pytest.fixture
def weights() -> bytes:
    return fresh_random().randbytes(15_000_000)


@pytest.fixture
def hub(weights: bytes) -> Iterator[Hub]:
    """A hub with one model, which has what is wanted, the same again in other forms, and what must not be fetched."""
    wanted = {name: f'{{"of": "{name}"}}'.encode() for name in FILES if name != "model.safetensors"}
    others = dict.fromkeys(
        ("pytorch_model.bin", "modeling_ours.py", "consolidated.safetensors", "onnx/config.json"), b"x" * 2000
    )
    with serving({"org/model": {**wanted, "model.safetensors": weights, **others, "README.md": b"Read me"}}) as hub:
        yield hub


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if not path.name.startswith(".")}


def test_a_download_is_weights_configuration_and_tokenizer_and_a_second_one_fetches_nothing(
    hub: Hub, lmforge: Command, tmp_path: Path
) -> None:
    env = variables(hub, tmp_path / "home")
    done = lmforge("download", "org/model", tmp_path / "model", **env)
    assert done.returncode == 0, done.stderr
    assert contents(tmp_path / "model") == {name: hub.models["org/model"][name] for name in FILES}
    assert f"org/model at {COMMIT}; fetched 6 files, " in done.stdout
    hub.requests.clear()
    again = lmforge("download", "org/model", tmp_path / "model", **env)
    assert again.returncode == 0
    assert "fetched 0 files, 0 bytes; 6 were there" in again.stdout
    assert [path for _, path, _ in hub.requests] == ["/api/models/org/model/revision/main"]
    # What changed on the hub since is fetched, and nothing else; a revision may be named in either way.
    hub.models["org/model"]["config.json"] = b'{"new": 1}'
    assert lmforge("download", f"org/model@{COMMIT}", tmp_path / "model", **env).returncode == 0
    assert contents(tmp_path / "model")["config.json"] == b'{"new": 1}'
    assert hub.sent("model.safetensors") == []


def test_without_a_folder_it_comes_to_the_cache_where_the_hubs_own_library_finds_it(
    hub: Hub, lmforge: Command, tmp_path: Path
) -> None:
    env = variables(hub, tmp_path / "home")
    assert lmforge("download", "org/model", **env).returncode == 0
    found = Path(snapshot_download("org/model", cache_dir=tmp_path / "home" / "hub", local_files_only=True))
    assert contents(found) == {name: hub.models["org/model"][name] for name in FILES}
    assert found.name == COMMIT
    again = lmforge("download", "org/model", **env)
    assert "fetched 0 files" in again.stdout
    hub.down = True
    assert "answered with 503" in only_line(lmforge("download", "org/model", **env).stderr)


def test_a_model_in_several_files_is_fetched_by_its_index(lmforge: Command, tmp_path: Path) -> None:
    parts = {"model-00001-of-00002.safetensors": b"a" * 1500, "model-00002-of-00002.safetensors": b"b" * 10}
    index = json.dumps({"weight_map": dict(zip("ab", parts, strict=True))}).encode()
    model = {"config.json": b"{}", "model.safetensors.index.json": index, **parts, "consolidated.safetensors": b"c" * 99}
    with serving({"org/model": model}) as hub:
        env = variables(hub, tmp_path / "home")
        assert lmforge("download", "org/model", tmp_path / "model", **env).returncode == 0
        del model["consolidated.safetensors"]
        assert contents(tmp_path / "model") == model
        del model["model-00002-of-00002.safetensors"]
        told = lmforge("download", "org/model", tmp_path / "other", **env)
        assert told.returncode == 2
        assert "its index names model-00002-of-00002.safetensors, which is not on the hub" in only_line(told.stderr)


def test_a_server_that_dies_in_a_file_is_asked_again_for_the_rest_of_it(
    hub: Hub, weights: bytes, lmforge: Command, tmp_path: Path
) -> None:
    hub.cut, hub.cuts_left = {"model.safetensors": 12_000_000}, 1
    done = lmforge("download", "org/model", tmp_path / "model", **variables(hub, tmp_path / "home"))
    assert done.returncode == 0, done.stderr
    assert hub.sent("model.safetensors") == [None, f"bytes={KEPT}-"]
    assert (tmp_path / "model" / "model.safetensors").read_bytes() == weights


@pytest.mark.parametrize("where", ["folder", "cache"])
def test_another_process_goes_on_where_one_was_cut_off(
    where: str, hub: Hub, weights: bytes, lmforge: Command, tmp_path: Path
) -> None:
    env = variables(hub, tmp_path / "home")
    words = ["download", "org/model", *([tmp_path / "model"] if where == "folder" else [])]
    hub.cut, hub.cuts_left = {"model.safetensors": 12_000_000}, 100
    # The first gives up on a server that dies at the same place each time.
    hub.requests.clear()
    died = lmforge(*words, **env)
    assert died.returncode == 2
    assert "run it again to resume" in died.stderr.splitlines()[-1]
    assert "Traceback" not in died.stderr
    hub.cut = {}
    hub.requests.clear()
    done = lmforge(*words, **env)
    assert done.returncode == 0, done.stderr
    assert hub.sent("model.safetensors") == [f"bytes={KEPT}-"]
    assert hub.sent("tokenizer.json") == []
    [found] = tmp_path.rglob("model.safetensors")
    assert found.read_bytes() == weights
    assert not list(tmp_path.rglob("*.partial"))


def test_what_arrives_spoilt_is_thrown_away_and_never_takes_its_name(
    hub: Hub, weights: bytes, lmforge: Command, tmp_path: Path
) -> None:
    env = variables(hub, tmp_path / "home")
    for name in ("model.safetensors", "config.json"):  # told by SHA-256, and by git's SHA-1
        hub.spoilt = {name}
        done = lmforge("download", "org/model", tmp_path / "model", **env)
        assert done.returncode == 2
        assert f"{name} did not arrive as the hub describes it" in only_line(done.stderr)
        assert not (tmp_path / "model" / name).exists()
        assert not list((tmp_path / "model").glob(".*.partial"))
        if name == "model.safetensors":
            (tmp_path / "model" / "config.json").unlink()
    hub.spoilt = set()
    assert lmforge("download", "org/model", tmp_path / "model", **env).returncode == 0
    # What was left of an earlier attempt may be spoilt too: then it is fetched from the start.
    (tmp_path / "model" / "model.safetensors").unlink()
    digest = hashlib.sha256(weights).hexdigest()
    (tmp_path / "model" / f".{digest}.partial").write_bytes(b"spoilt")
    hub.requests.clear()
    assert lmforge("download", "org/model", tmp_path / "model", **env).returncode == 0
    assert hub.sent("model.safetensors") == ["bytes=6-", None]
    assert (tmp_path / "model" / "model.safetensors").read_bytes() == weights


def test_what_cannot_be_had_is_refused_in_one_line(hub: Hub, lmforge: Command, tmp_path: Path) -> None:
    hub.models["org/gated"] = hub.models["org/model"]
    hub.models["org/pickled"] = {"config.json": b"{}", "pytorch_model.bin": b"x"}
    hub.gated = {"org/gated"}
    env = variables(hub, tmp_path / "home")
    for words, told in (
        (["org/nothing"], f"org/nothing: neither a folder here nor a model on {hub.address}"),
        (["org/gated"], f"org/gated: gated: accept its terms at {hub.address}/org/gated"),
        (["org/model", "--revision", "v9"], "org/model: has no revision v9 on the hub"),
        (["org/pickled"], "org/pickled: has no safetensors weights on the hub; pickled ones"),
        (["nano"], "nano: not the name of a model on the hub"),
        (["org/model@v1", "--revision", "v2"], "org/model@v1: names one revision and --revision v2 another"),
    ):
        done = lmforge("download", *words, **env)
        assert done.returncode == 2
        assert told in only_line(done.stderr)
    for change, told in (
        ({"HF_HUB_OFFLINE": "1"}, "HF_HUB_OFFLINE is set"),
        ({"HF_ENDPOINT": "http://127.0.0.1:9"}, "http://127.0.0.1:9 cannot be reached"),
    ):
        done = lmforge("show", "org/model", **{**env, **change})
        assert done.returncode == 2
        assert told in only_line(done.stderr)
        assert done.stderr.startswith("lmforge: org/model: no such folder")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "model.safetensors").write_bytes(b"years of work")
    done = lmforge("download", "org/model", tmp_path / "mine", **env)
    assert done.returncode == 2
    assert "holds a model that was not downloaded by lmforge" in only_line(done.stderr)
