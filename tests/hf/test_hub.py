"""Models by name: what a download fetches and refuses, with a hub on this machine."""

import errno
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants, snapshot_download

from lmforge.cli import run
from lmforge.hf import hub as hub_module
from tests.conftest import Refusal
from tests.hf.hub_server import COMMIT, Hub, serving
from tests.seeds import fresh_random

FILES = (
    "config.json",
    "generation_config.json",
    "merges.txt",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
)
# download(*words): carries out `lmforge download` in this process and returns what it printed.
Download = Callable[..., str]


@pytest.fixture
def weights() -> bytes:
    return fresh_random().randbytes(3_500_000)


@pytest.fixture
def hub(weights: bytes) -> Iterator[Hub]:
    """A hub with one model: the files that are wanted, the same again in other formats, and what
    must not be downloaded.
    """
    needed = {name: f'{{"of": "{name}"}}'.encode() for name in FILES if name != "model.safetensors"}
    others = dict.fromkeys(
        ("pytorch_model.bin", "modeling_ours.py", "consolidated.safetensors", "onnx/config.json"),
        b"x" * 2000,
    )
    with serving(
        {"org/model": {**needed, "model.safetensors": weights, **others, "README.md": b"Read me"}}
    ) as hub:
        yield hub


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str], None]:
    """`use(address)`: from now on this process asks that hub, with a cache of its own."""

    def settle(address: str) -> None:
        monkeypatch.setattr(constants, "ENDPOINT", address)
        monkeypatch.setattr(
            constants,
            "HUGGINGFACE_CO_URL_TEMPLATE",
            address + "/{repo_id}/resolve/{revision}/{filename}",
        )
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "home" / "hub"))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)

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
    return {
        path.name: path.read_bytes() for path in folder.iterdir() if not path.name.startswith(".")
    }


def test_a_download_is_weights_configuration_and_tokenizer_and_a_second_one_fetches_nothing(
    hub: Hub, download: Download, tmp_path: Path
) -> None:
    printed = download("org/model", tmp_path / "model")
    assert contents(tmp_path / "model") == {name: hub.models["org/model"][name] for name in FILES}
    assert f"org/model at {COMMIT}; 6 files, " in printed
    hub.requests.clear()
    (tmp_path / "model" / "config.json").unlink()
    # A revision may be named in either way.
    download(f"org/model@{COMMIT}", tmp_path / "model")
    assert contents(tmp_path / "model") == {name: hub.models["org/model"][name] for name in FILES}
    assert hub.sent("config.json")
    assert hub.sent("model.safetensors") == []


def test_without_a_folder_it_comes_to_the_cache_where_the_hubs_own_library_finds_it(
    hub: Hub, download: Download, refused: Refusal, tmp_path: Path
) -> None:
    download("org/model")
    cache = tmp_path / "home" / "hub"
    result = Path(
        snapshot_download(
            "org/model", cache_dir=cache, local_files_only=True, allow_patterns=[*FILES]
        )
    )
    assert contents(result) == {name: hub.models["org/model"][name] for name in FILES}
    assert result.name == COMMIT
    assert hub_module.find_cached("org/model", "main") == result
    (result / "config.json").unlink()
    assert hub_module.find_cached("org/model", "main") is None
    hub.requests.clear()
    assert "6 files" in download("org/model")
    assert hub.sent("model.safetensors") == []
    hub.down = True
    assert "answered with 503" in refused("download", "org/model")


def test_a_model_in_several_files_is_fetched_by_its_index(
    use: Callable[[str], None], refused: Refusal, tmp_path: Path
) -> None:
    parts = {
        "model-00001-of-00002.safetensors": b"a" * 1500,
        "model-00002-of-00002.safetensors": b"b" * 10,
    }
    index = json.dumps({"weight_map": dict(zip("ab", parts, strict=True))}).encode()
    model = {
        "config.json": b"{}",
        "model.safetensors.index.json": index,
        **parts,
        "consolidated.safetensors": b"c" * 99,
    }
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
        hub.models["org/part"] = {**model}
        del hub.models["org/part"]["model-00002-of-00002.safetensors"]
        message = refused("download", "org/part", tmp_path / "other")
        assert (
            "its index names model-00002-of-00002.safetensors, which is not on the hub" in message
        )
        hub.models["org/damaged"] = {
            **model,
            "model.safetensors.index.json": b'{"weight_map": [1, 2]}',
        }
        message = refused("download", "org/damaged", tmp_path / "third")
        assert (
            message
            == f"{tmp_path / 'third' / 'model.safetensors.index.json'}: weight_map: expected an"
            " object, got [1, 2]; copy the file again"
        )


@pytest.mark.slow
def test_a_server_that_dies_in_a_file_is_said_in_one_line_and_a_second_download_fetches_the_rest(
    hub: Hub,
    use: Callable[[str], None],
    weights: bytes,
    capfd: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    use(hub.address)
    hub.cut, hub.cuts_left = {"model.safetensors": 1000}, 100
    assert run(["download", "org/model", str(tmp_path / "model")]) == 2
    [line] = [line for line in capfd.readouterr().err.splitlines() if line.startswith("lmforge: ")]
    assert f"{hub.address} cannot be reached" in line
    assert "run it again" in line
    assert not (tmp_path / "model" / "model.safetensors").exists()
    hub.cut = {}
    assert run(["download", "org/model", str(tmp_path / "model")]) == 0
    assert (tmp_path / "model" / "model.safetensors").read_bytes() == weights


def test_a_full_disk_is_said_in_one_line(
    hub: Hub,
    use: Callable[[str], None],
    refused: Refusal,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    use(hub.address)

    def full(*words: object, **options: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("huggingface_hub.file_download.http_get", full)
    message = refused("download", "org/model", tmp_path / "model")
    assert (
        message
        == f"{tmp_path / 'model'}: no space to download into it (No space left on device); run it"
        " again"
    )


def test_what_cannot_be_had_is_refused_in_one_line(
    hub: Hub,
    use: Callable[[str], None],
    refused: Refusal,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    hub.models["org/gated"] = hub.models["org/model"]
    hub.models["org/pickled"] = {"config.json": b"{}", "pytorch_model.bin": b"x"}
    hub.gated = {"org/gated"}
    use(hub.address)
    for words, message in (
        (["org/nothing"], f"org/nothing: neither a folder here nor a model on {hub.address}"),
        (["org/a--b"], "org/a--b: not a name that the hub accepts"),
        (["org/gated"], f"org/gated: gated: accept its terms at {hub.address}/org/gated"),
        (["org/model@v9"], "org/model: has no revision v9 on the hub"),
        (["org/pickled"], "org/pickled: has no safetensors weights on the hub; pickled ones"),
        (["nano"], "nano: not the name of a model on the hub"),
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
    for file in ("config.json", "model.safetensors"):
        (tmp_path / "mine" / file).write_text("years of work")
        message = refused("download", "org/model", tmp_path / "mine")
        assert message.endswith(f"mine/{file}: exists already; name another folder")
        assert (tmp_path / "mine" / file).read_text() == "years of work"
        (tmp_path / "mine" / file).unlink()


def test_a_recipe_says_what_is_downloaded(
    hub: Hub, download: Download, refused: Refusal, tmp_path: Path
) -> None:
    recipe = tmp_path / "sft.toml"
    recipe.write_text(
        '[run]\nstage = "sft"\n[model]\nsource = "org/model"\n[data]\nfiles = ["a.jsonl"]\n'
    )
    assert f"org/model at {COMMIT}; 6 files, " in download(recipe)
    recipe.write_text(
        '[model]\nsource = "org/model"\nload_weights = false\n[data]\nfolder ='
        ' "s3://bucket/tokens"\n'
    )
    printed = download(recipe)
    assert "s3://bucket/tokens: is read over the network while training" in printed
    assert f"org/model at {COMMIT}; 5 files, " in printed
    recipe.write_text("")
    nothing = (
        "nothing to download; all models and datasets that it names are local folders, or it names"
        " none"
    )
    assert download(recipe) == f"{recipe}: {nothing}\n"
    assert refused("download", recipe, "folder").startswith("--folder: not with a recipe")


def test_only_the_tokenizer_of_a_model_can_be_downloaded(hub: Hub, download: Download) -> None:
    assert f"org/model at {COMMIT}; 5 files, " in download("org/model", "--weights", "false")
    assert hub.sent("model.safetensors") == []
