"""Every path that a command writes and a user names: what is there and is not its own stays, and is
named in one line.
"""

import json
import os
from pathlib import Path

import pytest

from lmforge.core.options.options import iter_options
from lmforge.core.options.verbs import VERBS
from tests.conftest import Refusal
from tests.core.model.test_layouts import TOLD, saved_by_torchtitan, torchtitan_state

# The words of each command that writes a file or a folder of a user's choice.
WRITTEN = {
    (
        "bench",
        "bench.trace",
    ): (
        "--model.preset nano --data.sequence_length 16 --train.global_batch_size 1"
        " --train.device cpu"
    ),
    ("bench", "bench.out"): "--bench.calibrate true --bench.calibrate_seconds 1 --train.device cpu",
    ("plan", "plan.write"): "--search --gpus 8 --configurations 3",
    ("report", "out"): "RUN",
    ("evaluate", "answers"): "RUN --device cpu --tasks questions.jsonl",
    ("export", "out"): "RUN OUT --overwrite",
    ("import", "out"): f"theirs OUT {' '.join(TOLD)} --overwrite",
    ("prepare", "out"): "text.txt OUT --vocab_size 301 --workers 1 --overwrite",
}
# Runs and caches, into which commands of many kinds write below names of their own, and downloads
# (tests/hf/test_hub.py).
KEPT = {
    "run.folder",
    "distill.logprobs",
    "rollout.weights_folder",
    "data.stage_to",
    "folder",
    "data.folder",
}
READ = {
    "data",
    "distill.teacher",
    "data.files",
    "data.sources.files",
    "data.sources.validation_files",
    "data.validation_files",
    "decontaminate",
}
READ |= {
    "fewshot_file",
    "file",
    "hosts",
    "launch.hosts",
    "lm_eval_include_path",
    "log.calibration",
    "model",
    "model.source",
}
READ |= {
    "ladder.mixtures",
    "ladder.runs",
    "log.prediction",
    "models",
    "of",
    "plan.calibration",
    "plan.hardware",
    "recipe",
    "run",
    "runs",
    "source",
    "tokenizer",
    "validation.tasks",
}


def test_every_option_that_names_a_path_is_known_to_be_read_or_written() -> None:
    """Of a new one that is written, add the command to WRITTEN; it asks `check_output` in
    atomic_files.py.
    """
    for verb, entry in VERBS.items():
        for path, field in iter_options(entry.options, in_tables=True):
            name = ".".join(path)
            if "Path" in str(field.annotation):
                assert name in READ | KEPT or (verb, name) in WRITTEN, f"lmforge {verb} --{name}"


@pytest.mark.parametrize(("verb", "option"), WRITTEN)
def test_what_is_not_a_commands_own_is_not_overwritten(
    verb: str,
    option: str,
    tiny_run: Path,
    tmp_path: Path,
    refused: Refusal,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("questions.jsonl").write_text(json.dumps({"prompt": "a", "answer": "b"}) + "\n")
    Path("text.txt").write_text("A line of text.\n" * 99)
    if verb == "import":
        saved_by_torchtitan(torchtitan_state(), tmp_path / "theirs")
    Path("folder").mkdir()
    Path("folder/notes.txt").write_text("years of work")
    Path("folder/.lock").write_text("theirs")
    Path("notes.html").write_text("years of work")
    Path("link.json").symlink_to("folder/notes.txt")
    Path("dangling.toml").symlink_to("nowhere")
    before = sorted(os.listdir(tmp_path))
    for out in ("notes.html", "folder", "link.json", "dangling.toml", "notes.html/below"):
        words = WRITTEN[verb, option].replace("RUN", str(tiny_run)).split()
        given = [out if word == "OUT" else word for word in words]
        message = refused(verb, *given, *(() if "OUT" in words else (f"--{option}", out)))
        assert out in message
        assert "another" in message or "expected a name that ends with" in message
        assert sorted(os.listdir(tmp_path)) == before
        assert {
            Path(name).read_text() for name in ("notes.html", "folder/notes.txt", "link.json")
        } == {"years of work"}
        assert Path("folder/.lock").read_text() == "theirs"
        assert os.readlink("dangling.toml") == "nowhere"
