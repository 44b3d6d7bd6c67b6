"""What a path or a name stands for, by the files of a folder, and the line for what it is not."""

from pathlib import Path

import pytest

from lmforge.core.errors import UserError
from lmforge.core.records.kinds import MODELS, Kind, kind_of, unexpected

# The files of a folder → what it is. The manifests of checkpoints and of token folders have one
# name.
FOLDERS = {
    "config.json={} manifest.json={}": Kind.HF_FOLDER,
    "adapter_config.json={}": Kind.ADAPTERS,
    "adapter_config.json={} config.json={}": Kind.HF_FOLDER,
    "recipe.toml= checkpoints/": Kind.RUN,
    "checkpoints/": Kind.RUN,
    'manifest.json={"step":3,"hf_config":{}} .metadata=': Kind.CHECKPOINT,
    'manifest.json={"format":2} tokenizer/': Kind.TOKENS,
    "manifest.json=damaged": Kind.TOKENS,
    "unfinished/": Kind.TOKENS,
    "examples.json={}": Kind.EXAMPLES,
    ".metadata= common.pt=": Kind.FOREIGN,
    "": Kind.FOLDER,
    "notes.txt=": Kind.FOLDER,
}


@pytest.mark.parametrize("entries", FOLDERS)
def test_a_folder_is_what_its_files_say(tmp_path: Path, entries: str) -> None:
    for entry in entries.split():
        name, _, content = entry.partition("=")
        if name.endswith("/"):
            (tmp_path / name).mkdir()
        else:
            (tmp_path / name).write_text(content)
    assert kind_of(tmp_path) == FOLDERS[entries]


def test_names_files_and_unfinished_checkpoints_are_told_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in ("step-00000010", "odd.toml", "here"):
        (tmp_path / folder).mkdir()
    for file in ("notes.txt", "weights.pth"):
        (tmp_path / file).touch()
    expected = {
        "step-00000010": Kind.CHECKPOINT,
        "odd.toml": Kind.FOLDER,
        "none.toml": Kind.RECIPE,
        "notes.txt": Kind.FILE,
        "weights.pth": Kind.FOREIGN,
        "org/model": Kind.HUB_NAME,
        "here/model": Kind.MISSING,
        "runs/model": Kind.MISSING,
        "nothing": Kind.MISSING,
    }
    assert {name: kind_of(name) for name in expected} == expected
    assert {name: kind_of(Path(name)) for name in expected} == expected


def test_the_line_says_what_a_name_is_and_what_to_give_instead(tmp_path: Path) -> None:
    (tmp_path / ".metadata").touch()
    ways = (
        "give a run, a checkpoint, a Hugging Face folder, a folder of adapters or a name on the hub"
    )
    said = unexpected(tmp_path, MODELS)
    assert isinstance(said, UserError)
    assert (
        str(said)
        == f"{tmp_path}: a checkpoint of another trainer; {ways}; `lmforge import` makes a Hugging"
        " Face folder of it"
    )
    assert (
        str(unexpected("x", (Kind.RUN,), "; or none"))
        == "x: no such file or folder; give a run; or none"
    )
