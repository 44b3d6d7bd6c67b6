"""What `lmforge show` says of things, checked against what they are."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from lmforge.data.shards import TokenFolder
from lmforge.errors import Mistake
from lmforge.model.flops import parameters
from lmforge.model.presets import PRESETS
from lmforge.model.shapes import preset
from lmforge.runs import Run
from lmforge.show import show


def line(told: str, name: str) -> str:
    """The line of a description that begins with `name`."""
    return next(line for line in told.splitlines() if line.startswith(name))


def test_presets_are_listed_with_their_sizes() -> None:
    told = show("presets").splitlines()
    assert [row.split()[0] for row in told] == list(PRESETS)
    millions = {row.split()[0]: row.split()[1] for row in told}
    # As published: model cards of Llama 2 and 3.1, Mistral, GPT-2.
    assert millions["llama2-7b"] == "6,738.4"
    assert millions["llama3.1-405b"] == "405,853.4"
    assert millions["mistral-7b"] == "7,241.7"
    assert millions["gpt2-124m"] == "124.4"


def test_a_preset_is_told_with_shape_cost_and_memory() -> None:
    told = show("llama3-8b")
    assert "32 layers, width 4096, feed-forward 14336, 32 heads of 128 (8 for keys and values)" in told
    assert "vocabulary 128,256, untied; positions 8,192" in told
    assert "8,030,261,248 parameters" in told
    assert "at length 4,096" in told
    assert "29.9 GiB of fp32 weights; 89.7 GiB at rest in training" in told


def test_showing_a_shape_needs_no_torch() -> None:
    code = "import sys; from lmforge.show import show; show('llama3-8b'); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_a_recipe_is_told_resolved_with_its_arithmetic(tmp_path: Path, tiny_tokens: Path) -> None:
    recipe = tmp_path / "small.toml"
    recipe.write_text(f'[data]\nfolder = "{tiny_tokens}"\nlength = 50\n[train]\nsteps = 200\nglobal_batch_rows = 10\n')
    told = show(str(recipe))
    assert 'name = "small"' in told
    tokens = TokenFolder.open(tiny_tokens).split("train").tokens
    assert (
        line(told, "batch")
        == "batch      10 rows × 50 tokens = 500 tokens a step = 1 data-parallel rank × 1 micro-batches × 10 rows"
    )
    assert line(told, "run   ") == "run        200 steps = 100,000 tokens"
    assert line(told, "data   ") == f"data       {tiny_tokens}: {tokens:,} tokens, so {100_000 / tokens:.2f} epochs"


def test_a_recipe_whose_data_is_not_there_says_how_to_make_it(tmp_path: Path) -> None:
    recipe = tmp_path / "small.toml"
    recipe.write_text('[data]\nfolder = "nowhere"\n')
    assert line(show(str(recipe)), "data   ") == "data       nowhere: not there yet; `lmforge prepare SOURCE nowhere` makes it"


def test_token_shards_are_told_by_split_with_their_tokenizer(tiny_tokens: Path) -> None:
    told, folder = show(str(tiny_tokens)), TokenFolder.open(tiny_tokens)
    for name in ("train", "held_out"):
        split = folder.split(name)
        assert line(told, name).split(maxsplit=1)[1] == f"{split.tokens:,} tokens in {split.documents:,} documents"
    assert line(told, "tokenizer").startswith("tokenizer  512 tokens, '<|endoftext|>' (id 0) after each document; ")
    assert line(told, "stored as") == "stored as  uint16"


def test_a_run_and_its_checkpoints_are_told(tiny_run: Path) -> None:
    run = Run(tiny_run)
    told = show(str(tiny_run))
    assert told.startswith(f"run {tiny_run}: 6 of 6 steps\n")
    last = run.read_metrics()[-1]
    assert f"loss {last['loss']:,.4g}, val/loss {last['val/loss']:,.4g}" in line(told, "last")
    assert line(told, "saved") == "saved      step 2, step 4, step 6"
    assert show(str(run.checkpoint(6))) in told
    of_step = show(str(run.checkpoint(4)))
    assert line(of_step, "step") == "step       4: 16 rows, 768 tokens"
    assert line(of_step, "written by") == "written by 1 rank, engine alone, torch.float32"
    assert line(of_step, "model").endswith(" FLOPs a token at length 48")
    assert "2 layers, width 32, feed-forward 48, 4 heads of 8 (2 for keys and values)" in of_step
    bytes_there = sum(file.stat().st_size for file in run.checkpoint(4).iterdir() if file.name != "manifest.json")
    assert line(of_step, "on disk").startswith(f"on disk    {bytes_there / 2**20:,.1f} MiB")


def test_a_run_without_checkpoints_is_told_too(tiny_run: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny_run, tmp_path / "tiny")
    shutil.rmtree(tmp_path / "tiny" / "checkpoints")
    (tmp_path / "tiny" / "metrics.jsonl").unlink()
    told = show(str(tmp_path / "tiny"))
    assert told == f"run {tmp_path / 'tiny'}: 0 of 6 steps\nsaved      no checkpoint yet"


def test_a_hugging_face_folder_is_told_as_the_shape_it_holds(tmp_path: Path) -> None:
    config = preset("smollm-135m")
    (tmp_path / "config.json").write_text(json.dumps(config.to_hugging_face()))
    told = show(str(tmp_path))
    assert told.startswith(f"Hugging Face folder {tmp_path}\n")
    assert f"{parameters(config).total:,} parameters" in told


@pytest.mark.parametrize("content", ["", "{", "[1]", '"text"', "\x00"])
def test_a_manifest_that_cannot_be_read_is_a_mistake(tmp_path: Path, content: str) -> None:
    (tmp_path / "manifest.json").write_text(content)
    with pytest.raises(Mistake, match=r"manifest\.json: cannot be read"):
        show(str(tmp_path))


def test_what_is_none_of_these_is_a_mistake(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("hello")
    for thing in (tmp_path, tmp_path / "notes.txt"):
        with pytest.raises(Mistake, match=re.escape(f"{thing}: not a recipe, run, checkpoint, shard folder")):
            show(str(thing))
    with pytest.raises(Mistake, match="no such file, folder or preset"):
        show(str(tmp_path / "nothing"))
