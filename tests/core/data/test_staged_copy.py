"""`data.stage_to`: folders are copied to a host's own disk once, completely, and are read there."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lmforge.core.data.shards import staged_copy
from lmforge.core.data.shards.staged_copy import MARKER, find_staged, stage_folder
from lmforge.core.errors import UserError
from tests.conftest import Command, Refusal, without_shape
from tests.core.files.test_own_folders import NOBODY, as_root
from tests.support.tools import need


def files_of(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.name != MARKER
    }


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder of files of some size, one of them in a folder in it, and one that is a link as in
    the hub's cache.
    """
    folder = tmp_path / "model"
    (folder / "part").mkdir(parents=True)
    for name in ("config.json", "part/b.safetensors", "c.safetensors"):
        (folder / name).write_bytes(os.urandom(100_000))
    (tmp_path / "blob").write_bytes(b"linked")
    (folder / "linked.json").symlink_to("../blob")
    return folder


def test_a_copy_is_complete_is_found_and_is_not_made_again(model: Path, tmp_path: Path) -> None:
    lines: list[str] = []
    copy = stage_folder(tmp_path / "disk", model, lines.append)
    assert files_of(copy) == files_of(model)
    assert not (copy / "linked.json").is_symlink()
    assert (copy / "config.json").stat().st_mtime_ns == (model / "config.json").stat().st_mtime_ns
    assert find_staged(tmp_path / "disk", model) == copy
    assert find_staged(None, model) == find_staged(tmp_path / "other", model) == model
    assert stage_folder(tmp_path / "disk", model, lines.append) == copy
    assert len(lines) == 1


def test_what_changed_since_is_another_copy_and_a_file_that_is_lost_is_copied_again(
    model: Path, tmp_path: Path
) -> None:
    copy = stage_folder(tmp_path / "disk", model)
    (copy / "config.json").write_bytes(b"")
    assert stage_folder(tmp_path / "disk", model) == copy
    assert files_of(copy) == files_of(model)
    (model / "config.json").write_bytes(b"{}")
    assert find_staged(tmp_path / "disk", model) == model
    assert stage_folder(tmp_path / "disk", model) != copy


def test_a_copy_that_was_cut_off_is_completed(model: Path, tmp_path: Path) -> None:
    (model / "large.safetensors").write_bytes(os.urandom(64 << 20))
    program = (
        "import sys; from pathlib import Path; from lmforge.core.data.shards import staged_copy;"
    )
    program += "staged_copy.BLOCK_BYTES = 4096; staged_copy.THREADS = 1;"
    program += "staged_copy.stage_folder(Path(sys.argv[1]), Path(sys.argv[2]))"
    disk = tmp_path / "disk"
    with subprocess.Popen(
        [sys.executable, "-c", program, disk, model], stdout=subprocess.DEVNULL
    ) as process:
        while not list(disk.glob("*/.large*.partial")):
            assert process.poll() is None
            time.sleep(0.002)
        process.send_signal(signal.SIGKILL)
    assert find_staged(disk, model) == model
    copied: list[str] = []
    copy = stage_folder(disk, model, copied.append)
    assert files_of(copy) == files_of(model)
    assert "64." in copied[0]
    assert not list(copy.glob(".*.partial"))


@pytest.mark.parametrize("prepared", ["a link", pytest.param("of another user", marks=as_root)])
def test_a_copy_that_somebody_else_has_prepared_is_neither_written_nor_read(
    prepared: str, model: Path, tmp_path: Path
) -> None:
    theirs, copy = tmp_path / "theirs", stage_folder(tmp_path / "disk", model)
    copy.rename(theirs)
    if prepared == "a link":
        copy.symlink_to(theirs)
    else:
        shutil.copytree(theirs, copy)
        os.chown(copy, NOBODY, NOBODY)
    (theirs / "c.safetensors").write_bytes(b"of the user")
    assert find_staged(tmp_path / "disk", model) == model
    with pytest.raises(
        UserError,
        match=r"^data\.stage_to: .*: a link, or of another user; name a folder of your own",
    ):
        stage_folder(tmp_path / "disk", model)
    assert (theirs / "c.safetensors").read_bytes() == b"of the user"


def test_processes_of_a_host_make_one_copy(model: Path, tmp_path: Path, program: Command) -> None:
    text = (
        "import sys; from pathlib import Path; from lmforge.core.data.shards.staged_copy import"
        " stage_folder\n"
    )
    text += "stage_folder(Path(sys.argv[1]), Path(sys.argv[2]))"
    done = program(text, tmp_path / "disk", model, ranks=3)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("are copied to") == 1
    (copy,) = (path for path in (tmp_path / "disk").iterdir() if path.is_dir())
    assert files_of(copy) == files_of(model)


def test_a_disk_without_room_is_refused_in_one_line_before_anything_is_copied(
    model: Path, tmp_path: Path
) -> None:
    need("the right to mount")
    disk = tmp_path / "disk"
    disk.mkdir()
    program = (
        "import sys; from lmforge.core.data.shards import staged_copy; from pathlib import Path\n"
    )
    program += "staged_copy.RESERVED_BYTES = 0\n"
    program += (
        "try: staged_copy.stage_folder(Path(sys.argv[1]), Path(sys.argv[2]))\nexcept Exception as"
        " problem: print(problem)"
    )
    command = 'mount -t tmpfs -o size=256k tmpfs "$1" && "$2" -c "$3" "$1" "$4"'
    line = ["unshare", "-rm", "sh", "-c", command, "-", disk, sys.executable, program, model]
    done = subprocess.run(line, capture_output=True, text=True, timeout=100)
    assert done.stdout.startswith(
        f"data.stage_to: {disk}: 0.3 MiB of {model} are to be copied and 0.2 MiB are free; "
    )
    assert done.stdout.count("\n") == 1


def test_what_the_disk_returns_otherwise_than_it_was_written_is_no_copy(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staged_copy, "_digest_on_disk", lambda file: 0)
    with pytest.raises(UserError, match="is not on the disk as it was written"):
        stage_folder(tmp_path / "disk", model)
    assert find_staged(tmp_path / "disk", model) == model


@pytest.mark.slow
def test_ranks_train_from_copies_and_to_the_same_loss(
    tiny_run: Path, tiny_options: list[str], lmforge: Command, tmp_path: Path
) -> None:
    tokens = Path(tiny_options[tiny_options.index("--data.folder") + 1])
    slow = shutil.copytree(tokens, tmp_path / "tokens")
    words = [str(slow) if word == str(tokens) else word for word in without_shape(tiny_options)]
    words += [
        "--model.source",
        str(tiny_run),
        "--train.steps",
        "2",
        "--run.folder",
        str(tmp_path / "runs"),
    ]
    losses = []
    for name, more in (("plain", []), ("staged", ["--stage_to", tmp_path / "disk"])):
        done = lmforge("pretrain", *words, "--run.name", name, *more, ranks=2)
        assert done.returncode == 0, done.stderr
        records = (tmp_path / "runs" / name / "metrics.jsonl").read_text().splitlines()
        losses.append([json.loads(line).get("loss") for line in records])
    assert losses[0] == losses[1]
    assert done.stderr.count("are copied to") == 2
    copies = {
        path.name.rpartition("-")[0] for path in (tmp_path / "disk").iterdir() if path.is_dir()
    }
    assert copies == {"tokens", "step-00000006"}
    # The tokens are read from the copy: those of the recipe may be damaged by now.
    for shard in slow.glob("*.tokens"):
        shard.write_bytes(bytes(shard.stat().st_size))
    done = lmforge("pretrain", *words, "--run.name", "again", "--stage_to", tmp_path / "disk")
    assert done.returncode == 0, done.stderr
    assert "are copied to" not in done.stderr


def test_a_folder_to_copy_to_that_cannot_be_made_is_refused(
    tiny_options: list[str], refused: Refusal, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    message = refused(
        "pretrain",
        *tiny_options,
        "--run.folder",
        tmp_path,
        "--data.stage_to",
        tmp_path / "file" / "disk",
    )
    assert message.startswith("data.stage_to: ")
    assert message.endswith("name another folder, or leave it out")
