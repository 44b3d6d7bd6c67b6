"""Checkpoints in an object store: a real S3 server, started here."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import s3fs

from lmforge.core import checkpoint
from lmforge.core.records.runs import MANIFEST, Run, parse_location
from lmforge.lab.bench.bounds import FP32
from lmforge.lab.bench.parity import weights_difference
from tests.conftest import Command, Refusal
from tests.distributed.conftest import weights
from tests.support.object_store import object_store

BUCKET = "s3://models/runs"


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A server with an empty bucket, and this process's settings to reach it."""
    with object_store(tmp_path_factory.mktemp("s3")):
        parse_location("s3://models").mkdir()
        yield


@pytest.mark.slow
@pytest.mark.usefixtures("store")
def test_a_run_with_checkpoints_in_a_store_resumes_elsewhere_from_these_alone(
    tmp_path: Path, tiny_options: list[str], tiny_run: Path, lmforge: Command
) -> None:
    # AdamW with a small epsilon makes a step of what rounding leaves of a gradient that is zero.
    trained = [*tiny_options, "--schedule.name", "constant", "--optimizer.eps", "1e-3"]
    options = [*trained, "--checkpoint.folder", BUCKET, "--run.name", "a"]
    done = lmforge(
        "pretrain", *options, "--run.folder", tmp_path / "here", "--train.steps", 4, ranks=2
    )
    assert done.returncode == 0, done.stderr
    here = Run.open(tmp_path / "here" / "a")
    assert not (here.path / "checkpoints").exists()
    assert here.checkpoint_steps() == [2, 4]
    assert lmforge("evaluate", here.path, "--sequences", 2).returncode == 0
    shutil.rmtree(here.path)

    # The newest is spoiled in the store: an object of the same size with another byte in it.
    tensors = next(
        path for path in here.checkpoint_path(4).iterdir() if path.name.endswith(".distcp")
    )
    content = bytearray(tensors.read_bytes())
    content[len(content) // 2] ^= 1
    tensors.write_bytes(bytes(content))
    (here.checkpoint_path(3) / "left.distcp").write_bytes(b"by a save that was cut off")
    done = lmforge(
        "pretrain", *options, "--run.folder", tmp_path / "there", "--checkpoint.keep_last", 2
    )
    assert done.returncode == 0, done.stderr
    assert (
        f"{here.checkpoint_path(4)}: {tensors.name} does not hold what was written" in done.stdout
    )
    assert f"continuing {tmp_path}/there/a from step 2\n" in done.stdout
    there = Run.open(tmp_path / "there" / "a")
    assert [
        step
        for step in there.checkpoint_steps()
        if (there.checkpoint_path(step) / MANIFEST).exists()
    ] == [4, 6]
    assert checkpoint.verify(there.checkpoint_path(6)).step == 6

    done = lmforge("pretrain", *trained, "--run.folder", tmp_path, "--run.name", "whole")
    assert done.returncode == 0, done.stderr
    theirs = weights(Run(tmp_path / "whole"))
    for name, tensor in weights(there).items():  # begun on two ranks
        assert weights_difference(name, tensor, theirs[name]) <= FP32.weights, name
    assert "step 6" in lmforge("show", there.path).stdout


@pytest.mark.usefixtures("store")
@pytest.mark.parametrize(
    ("address", "said"),
    [
        (
            "s3://absent/runs",
            (
                "s3://absent/runs/a: checkpoints cannot be written (FileNotFoundError: The"
                " specified bucket does"
            ),
        ),
        (
            "http://127.0.0.1:9/runs",
            (
                "http://127.0.0.1:9/runs/a: checkpoints cannot be written (a store of this kind"
                " cannot be"
            ),
        ),
        ("nothing://absent/runs", "nothing://absent/runs: "),
    ],
)
def test_a_store_that_cannot_be_written_is_refused_before_the_run_begins(
    tmp_path: Path, tiny_options: list[str], refused: Refusal, address: str, said: str
) -> None:
    words = ["--run.folder", tmp_path, "--run.name", "a", "--checkpoint.folder", address]
    assert refused("pretrain", *tiny_options, *words).startswith(said)
    assert not (tmp_path / "a").exists()


@pytest.mark.usefixtures("store")
def test_a_store_without_credentials_is_refused_before_the_run_begins_and_in_looking_at_a_run(
    tmp_path: Path,
    tiny_options: list[str],
    tiny_run: Path,
    refused: Refusal,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    for name in ("AWS_SHARED_CREDENTIALS_FILE", "AWS_CONFIG_FILE"):
        monkeypatch.setenv(name, str(tmp_path / "nothing"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    s3fs.S3FileSystem.clear_instance_cache()
    words = ["--run.folder", tmp_path, "--run.name", "a", "--checkpoint.folder", BUCKET]
    reason = "(NoCredentialsError: Unable to locate credentials); check the folder or address"
    assert refused("pretrain", *tiny_options, *words).startswith(
        f"{BUCKET}/a: checkpoints cannot be written {reason}"
    )
    assert not (tmp_path / "a").exists()
    # A run whose recipe names the store.
    shutil.copytree(tiny_run, tmp_path / "tiny")
    recipe = tmp_path / "tiny" / "recipe.toml"
    recipe.write_text(
        recipe.read_text().replace("[checkpoint]\n", f'[checkpoint]\nfolder = "{BUCKET}"\n')
    )
    for words in (["show", recipe.parent], ["generate", recipe.parent, "To be"]):
        assert refused(*words).startswith(f"{BUCKET}/tiny: checkpoints cannot be listed {reason}")
    s3fs.S3FileSystem.clear_instance_cache()
