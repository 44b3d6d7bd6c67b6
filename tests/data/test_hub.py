"""Models by name: what a download fetches, resumes, verifies and refuses, with a hub on this machine."""

import hashlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants, snapshot_download

from lmforge.cli import run
from lmforge.hf import hub as hub_module
from lmforge.hf.hub import BLOCK_BYTES
from tests.conftest import Command, Refusal
from tests.data.hub_server import COMMIT, Hub, serving, variables
from tests.seeds import fresh_random

FILES = ("config.json", "generation_config.json", "merges.txt", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
# Of a file that breaks off here, whole blocks are kept.
CUT = 2 * BLOCK_BYTES + 400_000
KEPT = 2 * BLOCK_BYTES

# download(*words): carries out `lmforge download` in this process and returns what it printed.
Download = Callable[..., str]


@pytest.fixture
def weights() -> bytes:
    return fresh_random().randbytes(3_500_000)


@pytest.fixture
def hub(weights: bytes) -> Iterator[Hub]:
    """A hub with one model: the files that are wanted, the same again in other formats, and what must not be downloaded."""
    needed = {name: f'{{"of": "{name}"}}'.encode() for name in FILES if name != "model.safetensors"}
    others = dict.fromkeys(
        ("pytorch_model.bin", "modeling_ours.py", "consolidated.safetensors", "onnx/config.json"), b"x" * 2000
    )
    with serving({"org/model": {**needed, "model.safetensors": weights, **others, "README.md": b"Read me"}}) as hub:
        yield hub


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str], None]:
    """`use(address)`: from now on this process asks that hub, with a cache of its own, and does not pause between attempts."""

    def settle(address: str) -> None:
        monkeypatch.setattr(constants, "ENDPOINT", address)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", address + "/{repo_id}/resolve/{revision}/{filename}")
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "home" / "hub"))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(hub_module, "RETRY_SECONDS", 0.0)

    return settle


@pytest.fixture
def download(hub: Hub, use: Callable[[str], None], capfd: pytest.CaptureFixture[str]) -> Download:
    use(hub.address)

    def carry_out(*words: object) -> str:
        capfd.readouterr()
        status = run(["download", *map(str, words)])
        printed = capfd.readouterr()
        assert status == 0, printed.err
        return printed.out

    return carry_out


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if not path.name.startswith(".")}


def test_a_download_is_weights_configuration_and_tokenizer_and_a_second_one_fetches_nothing(
    hub: Hub, download: Download, tmp_path: Path
) -> None:
    printed = download("org/model", tmp_path / "model")
    assert contents(tmp_path / "model") == {name: hub.models["org/model"][name] for name in FILES}
    assert f"org/model at {COMMIT}; fetched 6 files, " in printed
    hub.requests.clear()
    assert "fetched 0 files, 0 bytes; 6 were there" in download("org/model", tmp_path / "model")
    assert [path for _, path, _ in hub.requests] == ["/api/models/org/model/revision/main"]
    # What changed on the hub since is fetched, and nothing else; a revision may be named in either way.
    hub.models["org/model"]["config.json"] = b'{"new": 1}'
    download(f"org/model@{COMMIT}", tmp_path / "model")
    assert contents(tmp_path / "model")["config.json"] == b'{"new": 1}'
    assert hub.sent("model.safetensors") == []


def test_without_a_folder_it_comes_to_the_cache_where_the_hubs_own_library_finds_it(
    hub: Hub, download: Download, refused: Refusal, tmp_path: Path
) -> None:
    download("org/model")
    result = Path(snapshot_download("org/model", cache_dir=tmp_path / "home" / "hub", local_files_only=True))
    assert contents(result) == {name: hub.models["org/model"][name] for name in FILES}
    assert result.name == COMMIT
    assert hub_module.find_cached("org/model", "main") == result
    (result / "config.json").unlink()
    assert hub_module.find_cached("org/model", "main") is None
    assert "fetched 0 files" in download("org/model")
    hub.down = True
    assert "answered with 503" in refused("download", "org/model")


def test_a_model_in_several_files_is_fetched_by_its_index(use: Callable[[str], None], refused: Refusal, tmp_path: Path) -> None:
    parts = {"model-00001-of-00002.safetensors": b"a" * 1500, "model-00002-of-00002.safetensors": b"b" * 10}
    index = json.dumps({"weight_map": dict(zip("ab", parts, strict=True))}).encode()
    model = {"config.json": b"{}", "model.safetensors.index.json": index, **parts, "consolidated.safetensors": b"c" * 99}
    with serving({"org/model": model}) as hub:
        use(hub.address)
        assert run(["download", "org/model", str(tmp_path / "model")]) == 0
        del model["consolidated.safetensors"]
        assert contents(tmp_path / "model") == model
        assert run(["download", "org/model"]) == 0
        folder = hub_module.find_cached("org/model", "main")
        assert folder is not None
        (folder / "model-00002-of-00002.safetensors").unlink()
        assert hub_module.find_cached("org/model", "main") is None
        del model["model-00002-of-00002.safetensors"]
        message = refused("download", "org/model", tmp_path / "other")
        assert "its index names model-00002-of-00002.safetensors, which is not on the hub" in message
        model["model.safetensors.index.json"] = b'{"weight_map": [1, 2]}'
        message = refused("download", "org/model", tmp_path / "third")
        assert message == (
            f"{tmp_path / 'third' / 'model.safetensors.index.json'}: weight_map: expected an object, got [1, 2]; copy the file"
            " again"
        )


def test_a_server_that_dies_in_a_file_is_asked_again_for_the_rest_of_it(
    hub: Hub, weights: bytes, download: Download, tmp_path: Path
) -> None:
    hub.cut, hub.cuts_left = {"model.safetensors": CUT}, 1
    download("org/model", tmp_path / "model")
    assert hub.sent("model.safetensors") == [None, f"bytes={KEPT}-"]
    assert (tmp_path / "model" / "model.safetensors").read_bytes() == weights


@pytest.mark.parametrize("where", ["folder", "cache"])
def test_another_process_continues_where_one_was_cut_off(
    where: str, hub: Hub, weights: bytes, download: Download, refused: Refusal, lmforge: Command, tmp_path: Path
) -> None:
    words = ["download", "org/model", *([tmp_path / "model"] if where == "folder" else [])]
    hub.cut, hub.cuts_left = {"model.safetensors": CUT}, 100
    # The first gives up on a server that dies at the same place each time.
    assert "run it again to resume" in refused(*words)
    assert len(hub.sent("model.safetensors")) > hub_module.MAX_ATTEMPTS
    hub.cut = {}
    hub.requests.clear()
    done = lmforge(*words, **variables(hub, tmp_path / "home"))
    assert done.returncode == 0, done.stderr
    assert hub.sent("model.safetensors") == [f"bytes={KEPT}-"]
    assert hub.sent("tokenizer.json") == []
    [result] = tmp_path.rglob("model.safetensors")
    assert result.read_bytes() == weights
    assert not list(tmp_path.rglob("*.partial"))


def test_what_arrives_spoilt_is_thrown_away_and_never_takes_its_name(
    hub: Hub, weights: bytes, download: Download, refused: Refusal, tmp_path: Path
) -> None:
    for name in ("model.safetensors", "config.json"):  # one is verified by SHA-256, the other by git's SHA-1
        hub.spoilt = {name}
        assert f"{name} did not arrive as the hub describes it" in refused("download", "org/model", tmp_path / "model")
        assert not (tmp_path / "model" / name).exists()
        assert not list((tmp_path / "model").glob(".*.partial"))
        if name == "model.safetensors":
            (tmp_path / "model" / "config.json").unlink()
    hub.spoilt = set()
    download("org/model", tmp_path / "model")
    # What was left of an earlier attempt may be spoilt too: then it is fetched from the start.
    (tmp_path / "model" / "model.safetensors").unlink()
    digest = hashlib.sha256(weights).hexdigest()
    (tmp_path / "model" / f".{digest}.partial").write_bytes(b"spoilt")
    hub.requests.clear()
    download("org/model", tmp_path / "model")
    assert hub.sent("model.safetensors") == ["bytes=6-", None]
    assert (tmp_path / "model" / "model.safetensors").read_bytes() == weights


def test_what_cannot_be_had_is_refused_in_one_line(
    hub: Hub, use: Callable[[str], None], refused: Refusal, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    hub.models["org/gated"] = hub.models["org/model"]
    hub.models["org/pickled"] = {"config.json": b"{}", "pytorch_model.bin": b"x"}
    hub.gated = {"org/gated"}
    use(hub.address)
    for words, message in (
        (["org/nothing"], f"org/nothing: neither a folder here nor a model on {hub.address}"),
        (["org/a--b"], "org/a--b: not a name that the hub accepts"),
        (["org/gated"], f"org/gated: gated: accept its terms at {hub.address}/org/gated"),
        (["org/model", "--revision", "v9"], "org/model: has no revision v9 on the hub"),
        (["org/pickled"], "org/pickled: has no safetensors weights on the hub; pickled ones"),
        (["nano"], "nano: not the name of a model on the hub"),
        (["org/model@v1", "--revision", "v2"], "org/model@v1: names one revision and --revision v2 another"),
    ):
        assert message in refused("download", *words)
    use("http://127.0.0.1:9")
    assert refused("show", "org/model").startswith(
        "org/model: no such folder, not in the cache, and http://127.0.0.1:9 cannot be reached"
    )
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    message = refused("show", "org/model")
    assert message.startswith("org/model: no such folder")
    assert "HF_HUB_OFFLINE is set" in message
    assert "run `lmforge download org/model` where there is a network" in message
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    use(hub.address)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "model.safetensors").write_bytes(b"years of work")
    message = refused("download", "org/model", tmp_path / "mine")
    assert "holds a model that was not downloaded by lmforge" in message
    (tmp_path / "mine" / "model.safetensors").unlink()
    (tmp_path / "mine" / "config.json").write_text("years of work")
    assert refused("download", "org/model", tmp_path / "mine").endswith("mine/config.json: exists already; name another folder")
    assert (tmp_path / "mine" / "config.json").read_text() == "years of work"


ELSEWHERE = ["../../escaped.jsonl", "/escaped.jsonl", "a/../../escaped.jsonl", "./escaped.jsonl", ".lmforge-download.json"]


@pytest.mark.parametrize("where", ["folder", "cache"])
@pytest.mark.parametrize("kind", ["model", "dataset"])
@pytest.mark.parametrize("name", ELSEWHERE)
def test_a_hub_cannot_write_outside_the_folder_of_a_download(
    name: str, kind: str, where: str, hub: Hub, use: Callable[[str], None], refused: Refusal, tmp_path: Path
) -> None:
    content = b'{"text": "not wanted here"}'
    hub.datasets["org/data"] = {"first.jsonl": content, name: content}
    hub.models["org/model"][name] = content
    use(hub.address)
    words = ["org/data", "--dataset"] if kind == "dataset" else ["org/model"]
    message = refused("download", *words, *(["--folder", tmp_path / "a" / "b" / "into"] if where == "folder" else []))
    assert message == f"{words[0]}: the hub lists a file {json.dumps(name)}, which is not written; nothing is downloaded"
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


@pytest.mark.parametrize("commit", ["../../escaped", "/tmp", "", "main"])
def test_a_hub_cannot_name_the_folder_of_the_cache_by_a_commit_that_is_none(
    commit: str, hub: Hub, use: Callable[[str], None], refused: Refusal, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("tests.data.hub_server.COMMIT", commit)
    use(hub.address)
    message = refused("download", "org/model")
    assert message == f"org/model: the hub answered with the commit {json.dumps(commit)}, which is none; check HF_ENDPOINT"
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


@pytest.mark.parametrize("revision", ["../../../escaped", "v1/../../..", "a//b", "/escaped"])
def test_a_revision_cannot_name_a_file_outside_the_cache(
    revision: str, hub: Hub, use: Callable[[str], None], refused: Refusal, tmp_path: Path
) -> None:
    use(hub.address)
    assert "is not a revision of a model on the hub" in refused("download", "org/model", "--revision", revision)
    assert hub.requests == []
    assert list(tmp_path.iterdir()) == []


def test_a_recipe_says_what_is_downloaded(hub: Hub, download: Download, refused: Refusal, tmp_path: Path) -> None:
    recipe = tmp_path / "sft.toml"
    recipe.write_text('[run]\nstage = "sft"\n[model]\nsource = "org/model"\n[data]\nfiles = ["a.jsonl"]\n')
    assert f"org/model at {COMMIT}; fetched 6 files, " in download(recipe)
    recipe.write_text('[model]\nsource = "org/model"\nload_weights = false\n[data]\nfolder = "s3://bucket/tokens"\n')
    printed = download(recipe)
    assert "s3://bucket/tokens: is read over the network while training" in printed
    assert "fetched 0 files, 0 bytes; 5 were there" in printed
    recipe.write_text("")
    nothing = "nothing to download; all models and datasets that it names are local folders, or it names none"
    assert download(recipe) == f"{recipe}: {nothing}\n"
    assert refused("download", recipe, "folder").startswith("--folder: not with a recipe")


def test_only_the_tokenizer_of_a_model_can_be_downloaded(hub: Hub, download: Download) -> None:
    assert "fetched 5 files" in download("org/model", "--weights", "false")
    assert hub.sent("model.safetensors") == []
