"""Errors of users and machines: a message of one line, the right exit status, and no data lost.

Through the command itself. Where a process of its own adds nothing to the claim, the command line
is carried out in this one, since every process that imports torch costs seconds.
"""

import errno
import json
import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import torch
import xxhash

from lmforge.cli import run
from lmforge.core import checkpoint
from lmforge.core.data.dataset import TokenDataset
from lmforge.core.data.shards.folder import TokenFolder
from lmforge.core.data.tokenizer import train_tokenizer
from lmforge.core.errors import EXIT_PEER_LOST
from lmforge.core.files.atomic_files import PARTIAL_SUFFIX
from lmforge.core.model.build import build_model
from lmforge.core.model.config_json import to_config_json
from lmforge.core.model.init_weights import init_weights
from lmforge.core.model.presets import get_preset
from lmforge.core.parallel import precision
from lmforge.core.records.manifests import BLOCK_BYTES, checkpoint_checksum
from lmforge.core.records.runs import MANIFEST, Run
from lmforge.hf.export import export_folder
from lmforge.hf.resolve import resolve_model_config
from lmforge.hf.safetensors_file import SafetensorsFile
from tests.conftest import Command, Refusal, only_line, without_shape
from tests.distributed.conftest import weights
from tests.support.fuzzing import DAMAGED_PICKLES, put_sealed
from tests.support.grids import parametrize
from tests.support.preloaded import preloaded
from tests.support.tools import need


def contents(folder: Path) -> dict[str, str]:
    """Every file below a folder and what it holds; the lock alone may come and change."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != ".lock")
    return {
        str(path.relative_to(folder)): xxhash.xxh3_64_hexdigest(path.read_bytes()) for path in files
    }


def flip_a_bit(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 4
    path.write_bytes(data)


@pytest.fixture
def tokens(tiny_tokens: Path, tmp_path: Path) -> Path:
    """A copy of the shards, to spoil."""
    return Path(shutil.copytree(tiny_tokens, tmp_path / "tokens"))


@pytest.fixture
def trained(tiny_run: Path, tmp_path: Path) -> Run:
    """A copy of the finished run, to go on from: checkpoints of steps 2, 4 and 6."""
    return Run(
        Path(
            shutil.copytree(
                tiny_run, tmp_path / "runs" / "tiny", ignore=shutil.ignore_patterns(".lock")
            )
        )
    )


@pytest.fixture
def onwards(trained: Run, tiny_options: list[str]) -> list[str]:
    """The command line that continues `trained`."""
    return [
        "pretrain",
        *tiny_options,
        "--run.folder",
        str(trained.path.parent),
        "--run.name",
        trained.path.name,
    ]


# --- corpus and shards ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, 'no such file or folder: give a path, or "stdlib"'),
        (b"", "empty: there is no text in it"),
        (
            "Gr\u00fc\u00dfe".encode("latin-1"),
            "not UTF-8 at byte 2; convert the file, or leave it out",
        ),
    ],
    ids=["missing", "empty", "not UTF-8"],
)
def test_a_corpus_that_cannot_be_read_is_named_and_nothing_looks_prepared(
    tmp_path: Path, refused: Refusal, content: bytes | None, message: str
) -> None:
    corpus, out = tmp_path / "corpus.txt", tmp_path / "out"
    if content is not None:
        corpus.write_bytes(content)
    assert (
        refused("prepare", corpus, out, "--workers", 1, "--vocab_size", 512)
        == f"{corpus}: {message}"
    )
    assert not (out / MANIFEST).exists()


def test_a_truncated_shard_is_named_before_a_run_begins(
    tmp_path: Path, tokens: Path, tiny_options: list[str], refused: Refusal
) -> None:
    shard = tokens / "train-00000.tokens"
    size = shard.stat().st_size
    os.truncate(shard, size - 100)
    message = refused(
        "pretrain", *tiny_options, "--data.folder", tokens, "--run.folder", tmp_path / "runs"
    )
    assert (
        message
        == f"{shard}: truncated: {size - 100} bytes of {size}: restore it, or prepare again with"
        " overwrite"
    )
    assert contents(tmp_path / "runs") == {}


@pytest.mark.slow
def test_a_block_that_goes_bad_under_training_ranks_is_reported_by_one_and_nobody_hangs(
    tmp_path: Path, tokens: Path, tiny_options: list[str], lmforge: Command
) -> None:
    """A rank meets it after two good steps of two sequences, while the other waits for its
    gradient.
    """
    shard = tokens / "train-00000.tokens"
    seed, block = 0, None
    while block is None:
        seed += 1
        rows = TokenDataset(TokenFolder.open(tokens), sequence_length=48, seed=seed).indices(0, 4)
        touched = {byte // BLOCK_BYTES for row in rows for byte in (row * 96, row * 96 + 97)}
        block = max(set(range(-(-shard.stat().st_size // BLOCK_BYTES))) - touched, default=None)
    flip_a_bit(shard, block * BLOCK_BYTES + 5)
    spoiled = Run(tmp_path / "spoiled")
    words = [
        "--data.folder",
        tokens,
        "--run.folder",
        tmp_path,
        "--run.name",
        "spoiled",
        "--train.seed",
        seed,
    ]
    words += [
        "--train.global_batch_size",
        2,
        "--train.steps",
        500,
        "--checkpoint.every_steps",
        1,
        "--launch.processes",
        2,
    ]
    done = lmforge("pretrain", *tiny_options, *words)
    assert done.returncode == 1, done.stderr
    assert (
        f"{shard}: the block at byte {block * BLOCK_BYTES} does not match its checksum"
        in only_line(done.stderr)
    )
    assert spoiled.checkpoint_steps()[-1] >= 2
    for step in spoiled.checkpoint_steps():
        checkpoint.verify(spoiled.checkpoint_path(step))


# --- tokenizers -----------------------------------------------------------------------------------


def test_a_tokenizer_that_did_not_make_the_shards_is_refused(
    tmp_path: Path, tokens: Path, tiny_options: list[str], refused: Refusal
) -> None:
    train_tokenizer([""], 512).save(tokens / "tokenizer")
    message = refused(
        "pretrain", *tiny_options, "--data.folder", tokens, "--run.folder", tmp_path / "runs"
    )
    assert message.startswith(f"{tokens}: its tokenizer is not the one that made its tokens")


def test_a_source_model_with_another_tokenizer_than_the_shards_is_refused(
    tmp_path: Path, tiny_options: list[str], tiny_tokens: Path, refused: Refusal
) -> None:
    source = tmp_path / "model"
    source.mkdir()
    train_tokenizer([""], 300).save(source)
    (source / "config.json").touch()
    message = refused(
        "pretrain", *tiny_options, "--model.source", source, "--run.folder", tmp_path / "runs"
    )
    assert (
        message
        == f"{tiny_tokens}: prepared with another tokenizer than {source} has; prepare it with"
        f" --tokenizer {source}"
    )


# --- checkpoints ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (["--model.hidden_size", "64"], "another model config (hidden_size 32 there, 64 here"),
        (["--train.global_batch_size", "8"], "its global batch has 4 sequences, this recipe's 8"),
        (["--train.seed", "9"], "trained with other data options (train.seed 0 → 9); "),
        (
            ["--data.sequence_length", "32"],
            "trained with other data options (data.sequence_length 48 → 32); ",
        ),
    ],
    ids=["shape", "batch", "seed", "length"],
)
def test_a_checkpoint_of_another_run_is_refused_and_untouched(
    trained: Run, onwards: list[str], refused: Refusal, change: list[str], expected: str
) -> None:
    before = contents(trained.path)
    message = refused(*onwards, *change)
    assert message.startswith(f"{trained.checkpoint_path(6)}: {expected}")
    assert "--run.overwrite" in message
    assert contents(trained.path) == before


def unfinish(newest: Path) -> None:
    newest.rename(newest.with_name(newest.name + PARTIAL_SUFFIX))


def change_a_number(manifest: Path) -> None:
    """As a flipped bit does: the text stays JSON, and tells of other samples."""
    text = manifest.read_text()
    changed = re.sub(
        r'"consumed_sequences": (\d)',
        lambda found: f'"consumed_sequences": {int(found[1]) ^ 1}',
        text,
    )
    assert changed != text
    manifest.write_text(changed)


def tensors(newest: Path) -> Path:
    return next(newest.glob("*.distcp"))


def put_a_folder(path: Path) -> None:
    """In the place of a file."""
    path.unlink()
    path.mkdir()


@parametrize(
    ("spoil", "reason"),
    [
        (unfinish, "half-written, skipped"),
        (
            lambda newest: (newest / MANIFEST).unlink(),
            "it has no manifest, so it was never finished; skipped",
        ),
        (
            lambda newest: (newest / MANIFEST).write_text("{"),
            "manifest.json: not valid JSON: EOF while parsing an object",
        ),
        (
            lambda newest: change_a_number(newest / MANIFEST),
            "manifest.json does not hold what was written",
        ),
        (lambda newest: os.truncate(tensors(newest), 5000), "has 5,000 bytes instead of"),
        (
            lambda newest: flip_a_bit(tensors(newest), 5000),
            "does not hold what was written (its checksum differs); skipped",
        ),
        (lambda newest: tensors(newest).unlink(), "is missing; skipped"),
        (lambda newest: put_a_folder(newest / MANIFEST), "manifest.json: Is a directory; skipped"),
        pytest.param(
            lambda newest: put_a_folder(tensors(newest)),
            "__0_0.distcp has ",
            marks=pytest.mark.slow,
        ),
    ],
    ids=[
        "partial",
        "no manifest",
        "broken manifest",
        "other manifest",
        "truncated",
        "flipped bit",
        "missing file",
        "folder as manifest",
        "folder as tensors",
    ],
    fast=(0, 1, 7),
)
def test_a_damaged_checkpoint_is_skipped_with_a_message_and_the_one_before_it_is_used(
    trained: Run,
    tiny_run: Path,
    onwards: list[str],
    capfd: pytest.CaptureFixture[str],
    spoil: Callable[[Path], object],
    reason: str,
) -> None:
    spoil(trained.checkpoint_path(6))
    assert run(onwards) == 0
    printed = capfd.readouterr()
    assert printed.err == ""
    assert (
        sum(
            str(trained.checkpoint_path(6)) in line and reason in line
            for line in printed.out.splitlines()
        )
        == 1
    )
    assert f"continuing {trained.path} from step 4\n" in printed.out
    for name, tensor in weights(Run(tiny_run)).items():
        assert torch.equal(weights(trained)[name], tensor), name
    assert not list(trained.checkpoints_folder.glob(f"*{PARTIAL_SUFFIX}"))


@pytest.mark.needs("a C++ compiler")
def test_why_blocks_are_not_compiled_is_what_decided_it_though_an_older_checkpoint_is_used_then(
    trained: Run,
    onwards: list[str],
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    flip_a_bit(tensors(trained.checkpoint_path(6)), 5000)
    monkeypatch.setattr(precision, "MIN_STEPS_TO_COMPILE", 4)
    assert run([*onwards, "--train.steps", "8", "--train.compile", "auto"]) == 0
    printed = capfd.readouterr().out
    assert f"continuing {trained.path} from step 4\n" in printed
    assert "compile off (fewer than 4 steps would not repay the compilation)" in printed


@pytest.mark.parametrize(
    ("where", "value", "reason"),
    [
        (("bad_step_detector",), {}, "bad_step_detector.skipped_steps: missing"),
        (
            ("bad_step_detector", "losses"),
            ["low"],
            "bad_step_detector.losses[0]: expected a number",
        ),
        (
            ("bad_step_detector", "rollbacks"),
            -1,
            "bad_step_detector.rollbacks: expected a number of at least 0, got -1",
        ),
        (("recipe", "lora"), {"rank": "two"}, "recipe.lora: rank: "),
        (
            ("recipe", "lora"),
            {"rank": 2, "alpha": 1, "depth": 1},
            "recipe.lora: depth: not a known field",
        ),
        (("written_by", "data"), 5, "written_by.data: expected text, got 5"),
        (("step",), 2**70, "step: expected a number of at most "),
    ],
)
def test_a_manifest_whose_fields_are_odd_is_not_used_though_its_checksum_is_right(
    trained: Run, refused: Refusal, where: tuple[str, ...], value: object, reason: str
) -> None:
    newest = trained.checkpoint_path(6)
    fields = json.loads((newest / MANIFEST).read_text())
    del fields["xxh3"]
    table = fields
    for name in where[:-1]:
        table = table[name]
    table[where[-1]] = value
    renamed = newest.with_name("a")  # no name of a step
    newest.rename(renamed)
    (renamed / MANIFEST).write_text(json.dumps({**fields, "xxh3": checkpoint_checksum(fields)}))
    assert reason in refused("generate", renamed, "To be")


def test_a_checkpoint_under_the_name_of_another_step_is_not_used(
    trained: Run, onwards: list[str], refused: Refusal, capfd: pytest.CaptureFixture[str]
) -> None:
    misnamed = trained.checkpoint_path(9)
    trained.checkpoint_path(6).rename(misnamed)
    reason = "its manifest is of step 6; rename the folder to step-00000006"
    assert refused("generate", misnamed, "To be") == f"{misnamed}: {reason}"
    assert refused("show", misnamed) == f"{misnamed}: {reason}"
    assert run(["show", str(trained.path)]) == 0
    assert (
        f"damaged    {misnamed}: {reason}\ncheckpoint {trained.checkpoint_path(4)}\n"
        in capfd.readouterr().out
    )
    assert run([*onwards, "--train.steps", "5"]) == 0
    printed = capfd.readouterr().out
    assert f"{misnamed}: {reason}; skipped\n" in printed
    assert f"continuing {trained.path} from step 4\n" in printed
    assert trained.checkpoint_steps() == [2, 4, 5, 9]


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (
            lambda newest: (newest / MANIFEST).write_bytes(bytes(range(256))),
            ": manifest.json: not valid JSON: ",
        ),
        (
            lambda newest: change_a_number(newest / MANIFEST),
            ": manifest.json does not hold what was written",
        ),
        (lambda newest: put_a_folder(newest / MANIFEST), ": manifest.json: Is a directory"),
        (
            lambda newest: (newest / MANIFEST).unlink(),
            ": it has no manifest, so it was never finished",
        ),
        (lambda newest: tensors(newest).unlink(), ": __0_0.distcp is missing"),
        (
            lambda newest: os.truncate(tensors(newest), 5000),
            ": __0_0.distcp has 5,000 bytes instead of ",
        ),
    ],
    ids=[
        "binary manifest",
        "other manifest",
        "folder as manifest",
        "no manifest",
        "missing file",
        "truncated",
    ],
)
def test_a_run_whose_newest_checkpoint_is_damaged_is_shown_with_its_newest_intact_one(
    trained: Run,
    refused: Refusal,
    capfd: pytest.CaptureFixture[str],
    spoil: Callable[[Path], object],
    reason: str,
) -> None:
    newest = trained.checkpoint_path(6)
    spoil(newest)
    assert run(["show", str(trained.path)]) == 0
    printed = capfd.readouterr()
    assert printed.err == ""
    assert (
        sum(line.startswith(f"damaged    {newest}{reason}") for line in printed.out.splitlines())
        == 1
    )
    assert f"\ncheckpoint {trained.checkpoint_path(4)}\nstep       4: " in printed.out
    if (newest / MANIFEST).exists():  # without one it is no checkpoint
        assert refused("show", newest).startswith(f"{newest}{reason}")


def test_a_run_with_no_intact_checkpoint_left_is_not_silently_restarted(
    trained: Run, onwards: list[str], refused: Refusal
) -> None:
    for step in trained.checkpoint_steps():
        flip_a_bit(tensors(trained.checkpoint_path(step)), 5000)
    before = contents(trained.checkpoints_folder)
    message = refused(*onwards, "--train.steps", "8")
    assert message.startswith(
        f"{trained.path}: none of its checkpoints can be used ({trained.checkpoint_path(2)}: "
    )
    assert contents(trained.checkpoints_folder) == before


@pytest.mark.parametrize(
    ("name", "content"),
    [*((".metadata", each) for each in DAMAGED_PICKLES), ("tensors", b"no archive")],
)
def test_what_torch_cannot_read_is_skipped_in_a_line_although_its_digest_is_right(
    trained: Run, onwards: list[str], capfd: pytest.CaptureFixture[str], name: str, content: bytes
) -> None:
    newest = trained.checkpoint_path(6)
    put_sealed(tensors(newest) if name == "tensors" else newest / name, content)
    words = ["--sequences", "2", "--sequence_length", "16", "--device", "cpu", "--output", "json"]
    assert run(["evaluate", str(trained.path), *words]) == 0
    printed = capfd.readouterr()
    assert json.loads(printed.out)["model"] == str(trained.checkpoint_path(4))
    [line] = [line for line in printed.err.splitlines() if line.startswith(str(newest))]
    assert re.search(r" cannot be read \(.{1,160}\); copy it again; skipped$", line)
    assert run(["evaluate", str(newest), *words]) == 2
    assert only_line(capfd.readouterr().err).startswith(f"{newest}: ")


class Malice:
    """Pickles as a command that leaves a mark."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, (f"touch {self.mark}",)


def test_a_checkpoint_that_carries_a_program_is_refused_and_does_not_run(
    trained: Run, onwards: list[str], tmp_path: Path, refused: Refusal
) -> None:
    """With a valid manifest, as an attacker would write it."""
    folder, mark = trained.checkpoint_path(6), tmp_path / "mark"
    program = pickle.dumps(Malice(mark))
    put_sealed(folder / ".metadata", program)
    for words in ([*onwards, "--train.steps", "8"], ["generate", folder, "To be"]):
        message = refused(*words)
        assert message.startswith(
            f"{folder / '.metadata'}: cannot be read as checkpoint metadata: it asks for "
        ), message
    assert not mark.exists()
    pickle.loads(program)
    assert mark.exists()  # it is a working one


RETRIES_SOON = """
from lmforge.cli import main
from lmforge.core.steps import checkpoints
checkpoints.FINAL_RETRY_SECONDS = 0.1
main()
"""
LIMITED = f"""
import resource
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
{RETRIES_SOON}
"""
# "$1" the run to copy, "$2" the bytes that are to be free beside it, "$3" where to copy the end of
# it; then the command.
IN_A_SMALL_DISK = """
set -e
mkdir -p disk
mount -t tmpfs -o size=64m tmpfs disk
cp -r "$1" disk/tiny
mount -o remount,size=$(($(df -B1 --output=used disk | tail -1) + $2)) disk
left=$3
shift 3
status=0
"$@" || status=$?
cp -r disk/tiny "$left"
exit $status
"""


def assert_failed_and_kept(
    done: subprocess.CompletedProcess[str], left: Run, before: dict[str, str]
) -> str:
    assert done.returncode == 1, done.stdout + done.stderr
    assert left.checkpoint_steps() == [2, 4, 6]
    for step in left.checkpoint_steps():
        checkpoint.verify(left.checkpoint_path(step))
    assert not list(left.path.rglob("*.partial"))
    after = contents(left.path)
    kept = [name for name in before if name.startswith("checkpoints/")]
    assert {name: after[name] for name in kept} == {name: before[name] for name in kept}
    # Where there is time for it, the watch over the disk warns too.
    *warnings, last = [
        line
        for line in done.stderr.splitlines(keepends=True)
        if "free, and the next checkpoint" not in line
    ]
    for number, warning in enumerate(warnings, start=1):
        assert warning.endswith(f"; saves failed in a row: {number}\n"), warning
    # Both count the same.
    assert re.findall(r"(\d+) saves in a row have failed: ", last) == (
        [str(len(warnings))] if warnings else []
    )
    return only_line(last)


@pytest.mark.parametrize(
    ("free", "expected"),
    [
        # Room for the tensors, and not for what goes around them.
        pytest.param(
            670_000,
            "step 8: 3 saves in a row have failed: disk/tiny/checkpoints: the checkpoint"
            " step-00000008 could not be",
            id="at a checkpoint",
            marks=pytest.mark.slow,
        ),
        (
            200_000,
            (
                "disk/tiny/checkpoints: no room for a checkpoint: it takes 0.6 MiB, and 0.2 MiB are"
                " free; "
            ),
        ),
        pytest.param(
            0,
            "disk/tiny: no room to write (No space left on device); ",
            id="before anything",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_full_disk_ends_the_run_in_one_line_and_costs_no_checkpoint(
    trained: Run, tiny_options: list[str], tmp_path: Path, free: int, expected: str
) -> None:
    words = [
        "pretrain",
        *tiny_options,
        "--run.folder",
        "disk",
        "--run.name",
        "tiny",
        "--train.steps",
        "8",
    ]
    shell = [
        "unshare",
        "-rm",
        "sh",
        "-c",
        IN_A_SMALL_DISK,
        "sh",
        str(trained.path),
        str(free),
        "left",
    ]
    need("the right to mount")
    command = [*shell, sys.executable, "-c", RETRIES_SOON, *words]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    message = assert_failed_and_kept(done, Run(tmp_path / "left"), contents(trained.path))
    assert message.startswith(expected)
    assert "; last checkpoint: disk/tiny/checkpoints/step-00000006" in message


def test_a_checkpoint_over_the_limit_of_a_file_ends_the_run_in_one_line(
    trained: Run, onwards: list[str], program: Command
) -> None:
    """What a quota or a file system without large files does, and what can be had without mounting
    one.

    The save of step 7 fails, and then all tries of the last step.
    """
    before = contents(trained.path)
    words = [*onwards, "--train.steps", "8", "--checkpoint.every_steps", "1"]
    done = program(LIMITED, *words)
    message = assert_failed_and_kept(done, trained, before)
    assert message.startswith(
        f"step 8: 4 saves in a row have failed: {trained.checkpoints_folder}: the checkpoint"
        " step-00000008 could not be written: the disk is full"
    )
    assert f"last checkpoint: {trained.checkpoint_path(6)}" in message


# --- the run directory ----------------------------------------------------------------------------


def test_a_run_that_is_there_is_not_begun_again_and_one_that_is_not_is_not_resumed(
    trained: Run, onwards: list[str], refused: Refusal
) -> None:
    before = contents(trained.path)
    assert refused(*onwards, "--resume", "never").startswith(f"{trained.path}: this run exists; ")
    absent = trained.path.with_name("absent")
    assert (
        refused(*onwards, "--run.name", "absent", "--resume")
        == f"{absent}: there is no such run to resume"
    )
    assert contents(trained.path) == before
    assert not absent.exists()


def test_a_folder_that_is_no_run_is_neither_trained_into_nor_overwritten(
    tmp_path: Path, tiny_options: list[str], refused: Refusal
) -> None:
    thesis = tmp_path / "work" / "thesis.txt"
    thesis.parent.mkdir()
    thesis.write_text("years of it")
    for more in ([], ["--run.overwrite", "true"]):
        message = refused(
            "pretrain", *tiny_options, "--run.folder", tmp_path, "--run.name", "work", *more
        )
        assert message.startswith(f"{thesis.parent}: not empty and not a run of lmforge")
    assert [path.name for path in thesis.parent.iterdir()] == ["thesis.txt"]
    assert thesis.read_text() == "years of it"


# Kills a start, or an overwriting, in the midst of writing the recipe.
KILLED_BEFORE_THE_RECIPE = """
import os, signal
os.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
from lmforge.cli import main
main()
"""
# Kills an overwriting when it has deleted the recipe, without which a directory is no run.
KILLED_WHILE_DELETING = """
import os, pathlib, signal
before = pathlib.Path.unlink
def and_end(path, *arguments, **more):
    before(path, *arguments, **more)
    if path.name == "recipe.toml":
        os.kill(os.getpid(), signal.SIGKILL)
pathlib.Path.unlink = and_end
from lmforge.cli import main
main()
"""


@pytest.mark.parametrize(
    "script",
    [
        pytest.param(KILLED_BEFORE_THE_RECIPE, id="writing", marks=pytest.mark.slow),
        pytest.param(KILLED_WHILE_DELETING, id="deleting"),
    ],
)
def test_a_run_killed_at_its_very_beginning_begins_by_the_same_command(
    tmp_path: Path, tiny_run: Path, tiny_options: list[str], program: Command, script: str
) -> None:
    words = [
        "pretrain",
        *tiny_options,
        "--run.folder",
        str(tmp_path),
        "--run.name",
        "a",
        "--train.steps",
        "1",
    ]
    words += ["--schedule.warmup_steps", "0"]
    if script == KILLED_WHILE_DELETING:
        shutil.copytree(tiny_run, tmp_path / "a")
        words += ["--run.overwrite", "true"]
    killed = program(script, *words)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert run(words) == 0
    assert Run(tmp_path / "a").checkpoint_steps() == [1]


def test_a_file_where_a_run_would_be_is_refused_and_kept(
    tmp_path: Path, tiny_options: list[str], refused: Refusal
) -> None:
    (tmp_path / "taken").write_text("kept")
    printed = refused("pretrain", *tiny_options, "--run.folder", tmp_path, "--run.name", "taken")
    assert (
        printed == f"{tmp_path}/taken: a file, where the run's directory would be; choose another"
        " --run.name"
    )
    assert (tmp_path / "taken").read_text() == "kept"


@pytest.mark.parametrize(
    ("name", "is_folder", "said"),
    [
        ("recipe.toml", True, "{path}: a folder, where the run keeps a file; move it away"),
        ("metrics.jsonl", True, "{path}: a folder, where the run keeps a file; move it away"),
        ("environment.json", True, "{path}: a folder, where the run keeps a file; move it away"),
        (".lock", True, "{path}: cannot be written (Is a directory); choose another --run.name"),
        ("logs", False, "{path}: a file, where the run keeps a folder; move it away"),
        ("health", False, "{path}: a file, where the run keeps a folder; move it away"),
        ("checkpoints", False, "{path}: a file, where the run keeps a folder; move it away"),
        ("bad", False, "{path}: a file, where the run keeps a folder; move it away"),
        (
            "checkpoints/step-00000008",
            False,
            "{path}: a file, where a checkpoint would be; move it away",
        ),
        (
            "checkpoints/step-00000008.partial",
            False,
            "{path}: a file, where a checkpoint would be; move it away",
        ),
    ],
)
def test_a_folder_in_the_place_of_a_file_of_a_run_or_the_other_way_round_is_refused_and_kept(
    trained: Run, onwards: list[str], refused: Refusal, name: str, is_folder: bool, said: str
) -> None:
    path = trained.path / name
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    if is_folder:
        path.mkdir()
        (path / "thesis.txt").write_text("years of it")
    else:
        path.write_text("years of it")
    before = contents(trained.path)
    assert refused(*onwards, "--train.steps", 8) == said.format(path=path)
    assert contents(trained.path) == before


@pytest.mark.parametrize(
    ("name", "target", "said"),
    [
        ("logs", "/dev/null", "a link, where the run keeps a folder; move it away"),
        ("logs", "nothing", "a link, where the run keeps a folder; move it away"),
        ("metrics.jsonl", "../../thesis.txt", "a link, where the run keeps a file; move it away"),
        (
            ".lock",
            "../../thesis.txt",
            "cannot be written (Too many levels of symbolic links); choose another --run.name",
        ),
    ],
)
def test_a_run_does_not_write_through_links(
    trained: Run,
    onwards: list[str],
    refused: Refusal,
    tmp_path: Path,
    name: str,
    target: str,
    said: str,
) -> None:
    (tmp_path / "thesis.txt").write_text("years of it")
    path = trained.path / name
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    path.symlink_to(target)
    assert refused(*onwards, "--train.steps", 8) == f"{path}: {said}"
    assert (tmp_path / "thesis.txt").read_text() == "years of it"


def test_a_file_that_cannot_be_read_is_named_by_every_verb(
    tmp_path: Path, refused: Refusal
) -> None:
    """As on a damaged disk: the error of a read does not name its file by itself."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").symlink_to("/proc/self/mem")
    for words in (
        ["show", model],
        ["generate", model, "Hi"],
        ["pretrain", "--model.source", model, "--dry-run"],
    ):
        assert f"{model / 'config.json'}: Input/output error" in refused(*words), words
    (model / "model.safetensors").symlink_to("/proc/self/mem")
    with pytest.raises(OSError, match=r"Input/output error: '.*/model\.safetensors'"):
        SafetensorsFile(model / "model.safetensors")


@pytest.mark.parametrize(
    "name", ["recipe.toml", "metrics.jsonl", "checkpoints/step-00000006/manifest.json"]
)
def test_a_pipe_in_the_place_of_a_file_is_not_waited_for(
    trained: Run, capfd: pytest.CaptureFixture[str], name: str
) -> None:
    (trained.path / name).unlink()
    os.mkfifo(trained.path / name)
    assert run(["show", str(trained.path)]) in (0, 2)  # with what is left, or not at all
    assert "unexpected" not in capfd.readouterr().err


@pytest.mark.parametrize("verb", ["plan", "pretrain", "bench"])
def test_an_empty_pipe_is_no_recipe(verb: str, tmp_path: Path, refused: Refusal) -> None:
    pipe = tmp_path / "pipe.toml"
    os.mkfifo(pipe)
    assert (
        refused(verb, pipe)
        == f"{pipe}: nothing came through this pipe; write to it before it is read, or name a file"
    )


def test_strange_names_among_the_checkpoints_and_logs_of_a_run_do_no_harm(
    trained: Run, onwards: list[str]
) -> None:
    for folder in (
        trained.checkpoints_folder / "step-\u00b2",
        trained.checkpoints_folder / "step-7",
    ):
        folder.mkdir()
    for name in ("attempt-", "attempt-x", "attempt-\u0663", f"attempt-{'9' * 200}"):
        (trained.logs_folder / name).mkdir()
    assert run([*onwards, "--train.steps", "7"]) == 0
    assert trained.checkpoint_steps() == [4, 6, 7]
    assert (trained.logs_folder / "attempt-2" / "rank-0.log").exists()


def damaged_metrics() -> bytes:
    """Lines of what may be in such a file after a crash of the machine, one good one, and one too
    long for a record.
    """
    strange = [
        {"step": -1},
        {"step": 7, "loss": "low"},
        {"step": 7, "loss": [1]},
        {"loss": 2.0},
        [7],
        {"step": 7, "loss": 1.5},
    ]
    lines = [
        *(json.dumps(each).encode() for each in strange),
        b'{"step": 8, "loss": 1e999}',
        b'{"step": 9, "loss": ' + b"9" * 400,
    ]
    return bytes(range(256)) * 20 + b"\n" + b"\n".join(lines) + b"\n" + b"\0" * 2**21


def test_damaged_metrics_are_skipped_by_all_who_read_them(
    trained: Run, onwards: list[str], refused: Refusal, capfd: pytest.CaptureFixture[str]
) -> None:
    trained.metrics_path.write_bytes(damaged_metrics())
    assert trained.read_metrics() == [{"step": 7, "loss": 1.5}]
    assert run(["show", str(trained.path)]) == 0
    assert "last       loss 1.5\n" in capfd.readouterr().out
    assert run([*onwards, "--train.steps", "8"]) == 0
    printed = capfd.readouterr()
    assert (printed.err, (trained.path / "report.html").is_file()) == ("", True)
    assert [record["step"] for record in trained.read_metrics()] == [7, 8]
    trained.metrics_path.unlink()
    trained.metrics_path.mkdir()
    assert (
        refused("show", trained.path)
        == f"{trained.metrics_path}: cannot be read (Is a directory); move it away"
    )


def test_a_tracker_that_is_not_installed_is_refused_before_the_run_begins(
    tmp_path: Path, tiny_options: list[str], refused: Refusal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lmforge.ops.trackers.tracker.find_spec", lambda name: None)
    words = ["--run.folder", tmp_path, "--run.name", "a", "--log.trackers", "wandb"]
    printed = refused("pretrain", *tiny_options, *words)
    assert (
        printed
        == "log.trackers: wandb is not installed; .venv/bin/pip install -e '.[wandb]', or leave"
        " it out"
    )
    assert not (tmp_path / "a" / "recipe.toml").exists()


def test_a_run_in_training_is_refused_to_a_second_process(
    tmp_path: Path, tiny_options: list[str], refused: Refusal
) -> None:
    words = [
        "pretrain",
        *tiny_options,
        "--run.folder",
        str(tmp_path),
        "--run.name",
        "taken",
        "--train.steps",
        "100000",
    ]
    taken = Run(tmp_path / "taken")
    holder = preloaded().start(words, tmp_path)
    try:
        while not taken.read_metrics():
            assert holder.poll() is None
            time.sleep(0.05)
        for more in ([], ["--run.overwrite", "true"]):
            message = refused(*words, *more)
            assert message.startswith(f"{taken.path}: being trained by process {holder.pid} on ")
        assert holder.poll() is None
    finally:
        holder.kill()


def test_a_run_whose_laying_out_met_a_full_disk_is_begun_by_the_same_command_later(
    tmp_path: Path, tiny_options: list[str], refused: Refusal, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [
        "pretrain",
        *tiny_options,
        "--run.folder",
        tmp_path,
        "--run.name",
        "a",
        "--resume",
        "never",
        "--train.steps",
        2,
    ]

    def full() -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as disk:
        disk.setattr("lmforge.core.records.runs.describe_environment", full)
        assert "no room to write" in refused(*words, status=1)
    assert run([str(word) for word in words if word not in ("--resume", "never")]) == 0
    assert Run(tmp_path / "a").checkpoint_steps()[-1] == 2
    # The recorded recipe resumes.
    assert 'resume = "auto"' in Run(tmp_path / "a").recipe_path.read_text()


def test_non_finite_weights_are_never_saved_and_the_run_ends_after_rollbacks_in_vain(
    tmp_path: Path, tiny_options: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    spoiled = Run(tmp_path / "nan")
    words = [
        "pretrain",
        *tiny_options,
        "--run.folder",
        str(tmp_path),
        "--run.name",
        "nan",
        "--validation.every_steps",
        "none",
    ]
    words += [
        "--optimizer.lr",
        "1e30",
        "--optimizer.max_grad_norm",
        "0",
        "--log.every_steps",
        "100",
        "--train.steps",
        "50",
    ]
    assert (
        run(
            [
                *words,
                "--checkpoint.every_steps",
                "1",
                "--faults.max_bad_steps",
                "3",
            ]
        )
        == 1
    )
    lines = capfd.readouterr().err.splitlines()
    assert re.search(
        r"step \d+: 3 bad steps in a row, after 3 rollbacks; a lower optimizer\.lr", lines[-1]
    )
    assert sum("3 bad steps in a row: rolled back to step " in line for line in lines) == 3
    assert spoiled.checkpoint_steps()
    for step in spoiled.checkpoint_steps():
        assert all(tensor.isfinite().all() for tensor in weights(spoiled, step).values()), step


def test_damaged_checkpoints_of_later_steps_do_not_delete_intact_ones(
    trained: Run, onwards: list[str]
) -> None:
    for step in (4, 6):
        with open(trained.checkpoint_path(step) / ".metadata", "ab") as file:
            file.write(b"x")
    assert (
        run(
            [
                *onwards,
                "--checkpoint.keep_last",
                "1",
                "--checkpoint.every_steps",
                "1",
                "--train.steps",
                "5",
            ]
        )
        == 0
    )
    checkpoint.verify(trained.checkpoint_path(5))
    assert trained.checkpoint_path(6).exists()


def test_pickled_weights_of_a_source_model_are_refused_rather_than_left_out(
    tmp_path: Path, tiny_options: list[str], refused: Refusal, tiny_tokens: Path
) -> None:
    source = tmp_path / "theirs"
    shape = resolve_model_config(
        "nano",
        {"hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2},
        TokenFolder.open(tiny_tokens).tokenizer.vocab_size,
    )
    export_folder(
        init_weights(build_model(shape), 0),
        shape,
        source,
        tokenizer_folder=tiny_tokens / "tokenizer",
    )
    (source / "model.safetensors").rename(source / "pytorch_model.bin")
    options = without_shape(tiny_options)
    printed = refused(
        "pretrain", *options, "--model.source", source, "--run.folder", tmp_path, "--run.name", "a"
    )
    assert (
        printed
        == f"{source}/pytorch_model.bin: pickled weights are not opened; convert the folder to"
        " safetensors first"
    )


def test_a_checkpoint_given_as_token_folder_is_refused_and_kept(
    trained: Run, tiny_options: list[str], tmp_path: Path, refused: Refusal
) -> None:
    folder = trained.checkpoint_path(6)
    before = contents(folder)
    options = [*tiny_options, "--data.folder", folder, "--run.folder", tmp_path, "--run.name", "a"]
    assert f"{folder}: a checkpoint, not a token folder" in refused("pretrain", *options)
    assert str(folder) in refused("prepare", corpus_file(tmp_path), folder, "--overwrite")
    assert contents(folder) == before


def corpus_file(folder: Path) -> Path:
    (folder / "corpus.txt").write_text("Some text.\n" * 20)
    return folder / "corpus.txt"


PROBLEM_ON_RANK_1 = """
import sys
from lmforge.cli import run
from lmforge.core.distributed.rank_info import read_rank_info
from lmforge.core.data.loader import BatchLoader
if read_rank_info().rank == 1:
    BatchLoader.batches = lambda self, step: 1 / 0
status = run(sys.argv[1:])
print(f"rank {read_rank_info().rank} ends with {status}", file=sys.__stdout__)  # sys.stdout of rank 1 is its log
sys.exit(status)
"""


def test_an_unforeseen_exception_on_any_rank_ends_in_one_line_that_names_the_file_of_its_traceback(
    tmp_path: Path, tiny_options: list[str], program: Command
) -> None:
    words = ["pretrain", *tiny_options, "--run.folder", tmp_path, "--run.name", "a"]
    done = program(PROBLEM_ON_RANK_1, *words, ranks=2)
    # Rank 1 has failed; rank 0, which waited for it in a collective, has lost a peer.
    ends = [line for line in done.stdout.splitlines() if " ends with " in line]
    assert ends == [f"rank 0 ends with {EXIT_PEER_LOST}", "rank 1 ends with 1"], done.stdout
    saved = tmp_path / "a" / "logs" / "attempt-1" / "rank-1.log"
    problem = "unexpected ZeroDivisionError: division by zero"
    [line] = [line for line in done.stderr.splitlines() if line.startswith("lmforge: ")]
    assert line == f"lmforge: {problem}; its traceback is in {saved} (--debug prints it here)"
    assert " Traceback (most recent call last):\n" in saved.read_text()
    assert "BatchLoader.batches = lambda self, step: 1 / 0" in saved.read_text()


# Python imports it as it starts, where its folder is on the path: from then on one module fails as
# it is imported.
BROKEN_MODULE = """
import importlib.abc, sys
class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "lmforge.ops.verbs.show.show":
            raise ZeroDivisionError("two\\nlines")
sys.meta_path.insert(0, Finder())
"""


@pytest.mark.parametrize("debug", [False, True])
def test_an_unforeseen_exception_outside_of_a_run_keeps_its_traceback_in_a_temporary_file(
    tmp_path: Path, debug: bool
) -> None:
    (tmp_path / "sitecustomize.py").write_text(BROKEN_MODULE)
    path = os.pathsep.join([str(tmp_path), os.environ["PYTHONPATH"]])
    variables = {**os.environ, "PYTHONPATH": path, "TMPDIR": str(tmp_path)}
    words = ["show", "nano", *(["--debug"] if debug else [])]
    done = subprocess.run(
        [sys.executable, "-m", "lmforge", *words],
        env=variables,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1
    saved = list(tmp_path.glob("lmforge-*.txt"))
    if debug:
        assert done.stderr.startswith("Traceback (most recent call last):")
        assert saved == []
    else:
        assert (
            only_line(done.stderr)
            == f"unexpected ZeroDivisionError: two lines; its traceback is in {saved[0]} (--debug"
            " prints it here)"
        )
        assert "ZeroDivisionError" in saved[0].read_text()


@pytest.mark.slow
def test_ranks_whose_launcher_was_killed_stop_and_let_the_run_be_continued(
    tmp_path: Path, tiny_options: list[str], lmforge: Command
) -> None:
    words = ["pretrain", *tiny_options, "--run.folder", str(tmp_path), "--run.name", "orphans"]
    launcher = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "lmforge",
            *words,
            "--launch.processes",
            "2",
            "--train.steps",
            "100000",
        ],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    run_here = Run(tmp_path / "orphans")
    try:
        while not run_here.read_metrics():
            assert launcher.poll() is None
            time.sleep(0.05)
        ranks = psutil.Process(launcher.pid).children(recursive=True)
        launcher.kill()
        launcher.wait()
        _, alive = psutil.wait_procs(ranks, timeout=60)
        assert not alive
    finally:
        launcher.kill()
    reached = run_here.checkpoint_steps()[-1]
    done = lmforge(*words, "--train.steps", reached + 1, "--schedule.name", "constant")
    assert done.returncode == 0, done.stderr
    assert f"from step {reached}" in done.stdout


# --- recipes and batches --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("recipe", "expected"),
    [
        ('[train]\nsteps = "many"\n', "{recipe}: train.steps: expected a whole number"),
        ("[train]\nstepz = 5\n", "did you mean train.steps?"),
        ("[train\n", "{recipe}: "),
    ],
    ids=["wrong type", "unknown key", "no TOML"],
)
def test_a_recipe_that_cannot_be_followed_is_refused_with_the_place(
    tmp_path: Path, refused: Refusal, recipe: str, expected: str
) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(recipe)
    message = refused("pretrain", path, "--run.folder", tmp_path / "runs")
    assert expected.format(recipe=path) in message
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (
            "--train.global_batch_size 2 --launch.processes 3",
            (
                "3 ranks for a global batch of 2 sequences: a rank would have none; use at most 2"
                " ranks"
            ),
        ),
        (
            "--train.micro_batch_size 3",
            (
                "a global batch of 4 sequences does not divide by micro-batches of 3; nearest"
                " global_batch_size: 3 or 6"
            ),
        ),
    ],
    ids=["more ranks than sequences", "micro-batches"],
)
def test_a_batch_that_does_not_divide_is_refused_with_the_nearest_that_do(
    tmp_path: Path, tiny_options: list[str], refused: Refusal, batch: str, message: str
) -> None:
    assert (
        refused("pretrain", *tiny_options, "--run.folder", tmp_path / "runs", *batch.split())
        == message
    )
    assert contents(tmp_path / "runs") == {}


@pytest.mark.slow
def test_what_all_ranks_find_wrong_is_reported_by_one_of_them(
    tmp_path: Path, tiny_options: list[str]
) -> None:
    """Under another's launcher, which adds its own report of how its processes ended."""
    launcher = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=3",
        "-m",
        "lmforge",
    ]
    words = [
        "pretrain",
        *tiny_options,
        "--run.folder",
        str(tmp_path / "runs"),
        "--train.global_batch_size",
        "2",
    ]
    done = subprocess.run([*launcher, *words], capture_output=True, text=True, timeout=300)
    assert done.returncode != 0
    assert [line for line in done.stderr.splitlines() if line.startswith("lmforge: ")] == [
        (
            "lmforge: 3 ranks for a global batch of 2 sequences: a rank would have none; use at most 2"
            " ranks"
        )
    ]
    assert "exitcode  : 2" in done.stderr
    assert contents(tmp_path / "runs") == {}


# --- strategies -----------------------------------------------------------------------------------

INTERLEAVED = (
    "--parallel.pipeline_parallel_degree 2 --launch.processes 2 --parallel.pipeline_schedule"
    " interleaved"
)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            "--parallel.tensor_parallel_degree 4 --launch.processes 3",
            "3 ranks do not fill that; start at least 4",
        ),
        (
            "--parallel.context_parallel_degree 2 --parallel.pipeline_parallel_degree 2",
            "1 rank does not fill that; start at least 4",
        ),
        (
            "--parallel.sharding hybrid-full-shard --parallel.shard_degree 3 --launch.processes 4",
            (
                "parallel.shard_degree = 3: 4 ranks do not divide into groups of it; use one of 1,"
                " 2, 4"
            ),
        ),
        (
            (
                "--parallel.sharding hybrid-full-shard --parallel.shard_degree 1"
                " --parallel.tensor_parallel_degree 2 --launch.processes 4"
            ),
            "groups of it that keep tensor and context groups together; use one of 2, 4",
        ),
        (
            "--parallel.sharding full-shard --parallel.shard_degree 2 --launch.processes 2",
            "use hybrid-full-shard or",
        ),
        (
            (
                "--parallel.sharding no-shard --parallel.context_parallel_degree 2"
                " --launch.processes 2"
            ),
            "use grad-shard or full-shard",
        ),
        (
            "--model.preset llama2-70b --parallel.tensor_parallel_degree 16 --launch.processes 16",
            "heads = 8 does not divide by it; use 8",
        ),
        (
            "--parallel.tensor_parallel_degree 2 --launch.processes 2 --data.sequence_length 63",
            "choose another data.sequence_length",
        ),
        (
            "--parallel.tensor_parallel_degree 2 --launch.processes 2 --model.preset gpt2-124m",
            "gpt2 keeps queries, keys and values in one",
        ),
        (
            "--parallel.context_parallel_degree 2 --launch.processes 2 --data.sequence_length 63",
            "4 equal pieces; nearest data.sequence_length: 60 or 64",
        ),
        (
            (
                "--parallel.pipeline_parallel_degree 2 --launch.processes 2"
                " --model.tie_word_embeddings true"
            ),
            "untie them, or only shard",
        ),
        (
            (
                "--parallel.pipeline_parallel_degree 2 --launch.processes 2"
                " --model.num_hidden_layers 1"
            ),
            "1 blocks do not make 2 stages",
        ),
        (
            INTERLEAVED + " --train.micro_batch_size 32",
            (
                "1 micro-batch per step, and its schedule needs a multiple of 2; use"
                " train.micro_batch_size = 16"
            ),
        ),
        (
            (
                "--parallel.pipeline_parallel_degree 4 --launch.processes 4"
                " --train.micro_batch_size 16"
            ),
            (
                "2 micro-batches per step, and its schedule needs at least 4; use"
                " train.micro_batch_size = 8"
            ),
        ),
        (
            (
                "--parallel.pipeline_parallel_degree 2 --launch.processes 2"
                " --train.global_batch_size 1"
            ),
            "a global batch of 2 or more sequences",
        ),
        (
            (
                "--parallel.pipeline_parallel_degree 2 --launch.processes 2"
                " --parallel.prefetch_blocks 2"
            ),
            "a pipeline's schedule sets the order",
        ),
        (
            "--parallel.engine ddp --parallel.tensor_parallel_degree 2 --launch.processes 2",
            "has none of these; use engine = fsdp2",
        ),
        (
            "--parallel.activation_offload --parallel.activation_checkpointing selective-ops",
            "selective-ops keeps what it saves on the device; use none or full",
        ),
        (
            "--parallel.engine ddp --parallel.cpu_offload --launch.processes 2",
            "ddp keeps everything on its device",
        ),
        (
            (
                "--model.preset nano-moe --parallel.engine ddp --parallel.expert_parallel_degree 2"
                " --launch.processes 2"
            ),
            "has none of these; use engine = fsdp2",
        ),
        (
            "--model.preset nano-moe --parallel.expert_parallel_degree 3 --launch.processes 3",
            (
                "parallel.expert_parallel_degree = 3: 8 experts do not divide by it; use one of 1,"
                " 2, 4, 8"
            ),
        ),
        (
            "--model.preset nano-moe --parallel.expert_parallel_degree 4 --launch.processes 6",
            (
                "expert_parallel_degree = 4: the 6 ranks of a copy of the model do not divide by"
                " it; use one of 1, 2, 3, 6"
            ),
        ),
        (
            (
                "--model.preset nano-moe --parallel.expert_parallel_degree 2 --parallel.sharding"
                " no-shard --launch.processes 2"
            ),
            "the one rank of a copy of the model does not divide by it; use one of 1",
        ),
        (
            "--model.preset nano-moe --parallel.expert_parallel_degree 2",
            (
                "expert_parallel_degree = 2: the one rank of a copy of the model does not divide by"
                " it; use one of 1"
            ),
        ),
        (
            "--parallel.expert_parallel_degree 2 --launch.processes 2",
            "not with a model without experts; leave it out",
        ),
        (
            "--parallel.tensor_parallel_degree 2 --launch.processes 2 --sample.every_steps 5",
            "generate from the checkpoints",
        ),
        (
            "--parallel.tensor_parallel_degree 2 --launch.processes 2 --optimizer.name muon",
            "which splits its matrices; use adamw",
        ),
    ],
)
def test_a_model_that_cannot_be_parallelized_so_is_refused_before_anything_starts(
    refused: Refusal, words: str, message: str
) -> None:
    assert message in refused(
        "pretrain", "--dry-run", "--model.preset", "llama2-7b", *words.split()
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            (
                "--parallel.tensor_parallel_degree 3 --launch.processes 3"
                " --model.num_attention_heads 4"
            ),
            "num_attention_heads = 4 does not divide by it; use 2",
        ),
        (
            "--parallel.engine ddp --parallel.cpu_offload --launch.processes 2",
            "ddp keeps everything on its device",
        ),
        (
            "--parallel.engine fsdp1 --parallel.context_parallel_degree 2 --launch.processes 2",
            "has none of these; use engine = fsdp2",
        ),
    ],
)
def test_ranks_that_cannot_be_parallelized_so_report_it_once_and_leave_together(
    tmp_path: Path, tiny_options: list[str], refused: Refusal, words: str, message: str
) -> None:
    more = ["--train.global_batch_size", "6", "--data.sequence_length", "60"]
    assert message in refused(
        "pretrain", *tiny_options, *more, "--run.folder", tmp_path / "runs", *words.split()
    )
    assert contents(tmp_path / "runs") == {}


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_model_folder_without_weights_is_refused_by_one_rank_for_all(
    tmp_path: Path, tiny_options: list[str], refused: Refusal, ranks: int
) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "config.json").write_text(
        json.dumps(to_config_json(get_preset("nano")) | {"vocab_size": 512})
    )
    options = [
        "--model.source",
        source,
        "--run.folder",
        tmp_path / "runs",
        "--launch.processes",
        ranks,
    ]
    message = refused("pretrain", *without_shape(tiny_options), *options)
    assert (
        message
        == f"{source}: no weights here; to begin with random ones use --model.load_weights false"
    )
    assert contents(tmp_path / "runs") == {}


@pytest.mark.slow
def test_a_folder_that_cannot_be_wrapped_is_refused_by_one_of_several_ranks(
    tmp_path: Path, tiny_options: list[str], lmforge: Command
) -> None:
    source = tmp_path / "theirs"
    source.mkdir()
    options = [
        *without_shape(tiny_options),
        "--model.source",
        source,
        "--model.implementation",
        "transformers",
    ]
    runs = ["--run.folder", tmp_path / "runs", "--run.name", "a", "--launch.processes", "2"]
    (source / "config.json").write_text(
        json.dumps({"model_type": "rwkv", "hidden_size": 32, "num_hidden_layers": 2})
    )
    done = lmforge("pretrain", *options, *runs)
    assert done.returncode == 2
    assert only_line(done.stderr).startswith(
        f"{source}/config.json: RwkvForCausalLM has layers without attention"
    )


def test_an_unknown_model_family_is_refused_with_the_way_out(
    tmp_path: Path, tiny_options: list[str], refused: Refusal
) -> None:
    options = [*without_shape(tiny_options), "--run.folder", tmp_path, "--run.name", "a"]
    wrap = ["--model.implementation", "transformers"]
    printed = refused("pretrain", *options, *wrap, "--model.source", tmp_path)
    assert printed.startswith(
        f"{tmp_path}: a folder of no known kind; give a run, a checkpoint, a Hugging Face folder"
    )
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt_neox"}))
    printed = refused("pretrain", *options, "--model.source", tmp_path)
    assert printed.endswith("; or let transformers compute it: --model.implementation transformers")
    for kind, reason in (
        ("nowhere", 'has no "nowhere" (it is unknown to it)'),
        ("t5", "of type t5"),
    ):
        (tmp_path / "other").mkdir(exist_ok=True)
        (tmp_path / "other" / "config.json").write_text(json.dumps({"model_type": kind}))
        printed = refused("pretrain", *options, "--model.source", tmp_path / "other")
        assert f'model_type: "{kind}" is not supported; lmforge reads ' in printed
        assert "; nor can transformers compute it here: " in printed
        assert reason in printed
    assert "name it with model.source" in refused("pretrain", *options, *wrap)
    assert refused("pretrain", *options, *wrap, "--model.source", "nano").startswith(
        "nano: no such file or folder; "
    )
    printed = refused(
        "pretrain", *options, *wrap, "--model.source", tmp_path, "--model.num_experts", 2
    )
    assert printed.startswith("model.num_experts: a gpt_neox model has no such field; ")


def test_dropout_is_below_1_and_not_for_a_wrapped_model(
    tmp_path: Path, tiny_options: list[str], refused: Refusal
) -> None:
    options = [*tiny_options, "--run.folder", tmp_path, "--run.name", "a"]
    assert (
        refused("pretrain", *options, "--model.dropout", "1")
        == "--model.dropout: expected a number below 1.0, got 1.0"
    )
    wrapped = [
        "--model.source",
        tmp_path,
        "--model.implementation",
        "transformers",
        "--model.dropout",
        "0.1",
    ]
    printed = refused("pretrain", *options, *wrapped)
    assert (
        printed
        == "model.dropout: not with model.implementation = transformers, which has none here; leave"
        " it out"
    )


def test_an_environment_without_determinism_is_refused_before_anything_is_touched(
    tmp_path: Path, tiny_options: list[str], refused: Refusal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "1")
    message = refused(
        "pretrain",
        *tiny_options,
        "--run.folder",
        tmp_path / "runs",
        "--run.name",
        "a",
        "--deterministic",
    )
    assert (
        message
        == "train.deterministic: NCCL_NVLS_ENABLE=1 is set, so results can differ from run to run;"
        " unset it or set it to 0"
    )
    assert contents(tmp_path) == {}
