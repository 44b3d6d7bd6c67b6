"""When memory runs out a run says what would have fitted, and that then fits: real processes under a limit they cannot pass."""

import json
import os
import re
import resource
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lmforge.cli import load_config
from lmforge.config.run import Config
from lmforge.interop.resolve import model_config_from_options
from lmforge.parallel.dims import plan_batches
from lmforge.plan.out_of_memory import HOST_OVERHEAD_BYTES, MemoryEstimator, MemoryOptions, is_out_of_memory, suggest_what_fits
from tests.seeds import fresh_random

STEPS = 2
# Much memory for little work: narrow layers, and all rows in one micro-batch.
SIZES = {
    "data.sequence_length": 128,
    "model.hidden_size": 64,
    "model.intermediate_size": 256,
    "model.num_hidden_layers": 8,
    "model.num_attention_heads": 2,
    "model.num_key_value_heads": 2,
    "train.steps": STEPS,
    "train.global_batch_size": 256,
    "train.micro_batch_size": 128,
    "train.dtype": "fp32",
    "train.device": "cpu",
    "train.compile": "off",
    "train.threads": 1,
    "schedule.warmup_steps": 0,
    "validation.sequences": 2,
    "log.every_steps": 1,
}
# What a rank has mapped once it is about to build its model.
ASK = """
import sys
from lmforge.cli import load_config
from lmforge.stages import run as stages
def told(*arguments):
    print(open("/proc/self/status").read())
    sys.exit()
stages._train = told
stages.pretrain(load_config(sys.argv[1:]))
"""


def options(tokens: Path, folder: Path, name: str, *more: str) -> list[str]:
    words = [word for key, value in SIZES.items() for word in (f"--{key}", str(value))]
    return [*words, "--data.folder", str(tokens), "--run.folder", str(folder), "--run.name", name, *more]


def need_of(config: Config) -> MemoryEstimator:
    return MemoryEstimator(config, model_config_from_options(config.model, 512), plan_batches(config, 1), 4, False)


def under(limit: int, *words: str) -> subprocess.CompletedProcess[str]:
    """The command with so many bytes of address space for each of its processes."""
    return subprocess.run(
        [sys.executable, "-m", "lmforge", "pretrain", *words],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "2"},
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (limit, limit)),
    )


@pytest.fixture(scope="module")
def mapped(tiny_tokens: Path, tmp_path_factory: pytest.TempPathFactory) -> int:
    """Bytes of address space that a process takes before it builds anything."""
    words = options(tiny_tokens, tmp_path_factory.mktemp("mapped"), "a")
    done = subprocess.run([sys.executable, "-c", ASK, *words], capture_output=True, text=True, timeout=100)
    size = re.search(r"VmSize:\s+(\d+) kB", done.stdout)
    assert size, done.stderr
    return int(size[1]) * 2**10


def suggestions(said: str) -> list[list[str]]:
    """The command lines that a message proposes."""
    ways = said.partition("by estimate would fit: ")[2].partition(";")[0]
    ways = re.sub(r" \(it was \d+\)", "", ways)
    return [
        [word for key, value in re.findall(r"([\w.]+) = ([\w-]+)", way) for word in (f"--{key}", value)]
        for way in ways.split(", or ")
        if way
    ]


@pytest.mark.parametrize("ranks", [1, 2])
def test_what_is_said_to_fit_does_under_the_same_limit(tiny_tokens: Path, tmp_path: Path, mapped: int, ranks: int) -> None:
    launch = ["--launch.processes", str(ranks)]
    config = load_config(options(tiny_tokens, tmp_path, "a"))
    setting = MemoryOptions(128, "single", 1, False, "none", False)
    limit = mapped + HOST_OVERHEAD_BYTES + int(0.45 * need_of(config).required_bytes(setting))
    failed = under(limit, *options(tiny_tokens, tmp_path, "failed", *launch))
    assert failed.returncode == 1, failed.stdout + failed.stderr
    (said,) = failed.stderr.splitlines()
    print(said)
    assert re.match(r"lmforge: rank [01], step [01], (forward|backward): out of memory: \d+ MiB were asked for, with ", said)
    assert "GiB of address space (ulimit -v)" in said
    ways = suggestions(said)
    assert ["--train.micro_batch_size", "32"] in ways or ["--train.micro_batch_size", "64"] in ways
    for number, way in enumerate(ways if ranks == 1 else ways[-1:]):
        done = under(limit, *options(tiny_tokens, tmp_path, f"way-{number}", *launch, *way))
        assert done.returncode == 0, (way, done.stderr)
        assert f"step {STEPS}/{STEPS}" in done.stdout


def test_a_model_that_does_not_fit_says_what_it_needs_at_least(tiny_tokens: Path, tmp_path: Path, mapped: int) -> None:
    large = ["--model.hidden_size", "4096", "--model.intermediate_size", "8192", "--train.micro_batch_size", "1"]
    done = under(mapped + 2**29, *options(tiny_tokens, tmp_path, "large", *large))
    assert done.returncode == 1, done.stdout + done.stderr
    (said,) = done.stderr.splitlines()
    print(said)
    assert "rank 0, step 0, building: out of memory: " in said
    least = re.search(r"by estimate nothing fits: [^;]*? needs at least (\d+\.\d\d) GiB a rank", said)
    assert least
    assert float(least[1]) > 16 * 8 * (4 * 4096**2 + 3 * 4096 * 8192) / 2**30  # weights, gradients, moments
    assert "no checkpoint had been saved; log: " in said


def test_only_what_fits_by_the_estimate_is_proposed_and_nothing_that_fits_is_called_too_large() -> None:
    draw = fresh_random()
    proposed = refused = 0
    for _ in range(200):
        ranks = draw.choice([1, 2, 8])
        config = load_config(
            [
                *("--model.hidden_size", str(64 * draw.randint(1, 40)), "--model.num_attention_heads", "4"),
                *("--model.num_key_value_heads", "2"),
                *(
                    "--model.num_hidden_layers",
                    str(draw.randint(1, 40)),
                    "--data.sequence_length",
                    str(2 ** draw.randint(5, 13)),
                ),
                *(
                    "--train.global_batch_size",
                    str(ranks * 2 ** draw.randint(0, 9)),
                    "--model.dropout",
                    draw.choice("01") + "e-1",
                ),
            ]
        )
        on_gpu = draw.random() < 0.5
        need = MemoryEstimator(
            config, model_config_from_options(config.model, 5000), plan_batches(config, ranks), draw.choice([2, 4]), on_gpu
        )
        engine = "single" if ranks == 1 else draw.choice(["ddp", "fsdp2"])
        rows, shards = need.plan.micro_batch_size, ranks if engine == "fsdp2" else 1
        keeps, how = draw.random() < 0.3, draw.choice(["none", "selective-ops", "full"])
        now = MemoryOptions(rows, engine, shards, keeps, how, False)
        available = int(need.required_bytes(now) * draw.uniform(0.01, 1.05)) + need.overhead_bytes
        said = suggest_what_fits(need, now, ranks, available)
        for way in suggestions(said):
            proposed += 1
            chosen = dict(zip(way[::2], way[1::2], strict=True))
            wide = "--parallel.engine" in chosen or "--parallel.sharding" in chosen
            then = replace(
                now,
                rows=int(chosen.get("--train.micro_batch_size", rows)),
                engine=chosen.get("--parallel.engine", engine),
                shards=ranks if "--parallel.engine" in chosen else shards,
                keep_gathered=keeps and not wide,
                recompute=chosen.get("--parallel.activation_checkpointing", how),
                offload="--parallel.cpu_offload" in chosen,
            )
            assert need.required_bytes(then) <= available - need.overhead_bytes, said
        if "nothing fits" in said:
            refused += 1
            for least in (replace(now, rows=1), replace(now, rows=1, recompute="full")):
                assert need.required_bytes(least) > available - need.overhead_bytes, said
    assert proposed > 50
    assert refused > 10


def test_a_failure_counts_as_a_measurement() -> None:
    """Where the arithmetic finds room for what has just failed, it does not propose something next to as large."""
    config = load_config(["--train.global_batch_size", "64", "--train.micro_batch_size", "64"])
    need = MemoryEstimator(config, model_config_from_options(config.model, 512), plan_batches(config, 1), 4, True)
    now = MemoryOptions(64, "single", 1, False, "none", False)
    assert suggest_what_fits(need, now, 1, 10 * need.required_bytes(now)) == suggest_what_fits(
        need, now, 1, need.required_bytes(now)
    )


def test_refused_memory_is_told_from_other_errors() -> None:
    with pytest.raises(RuntimeError) as refused:
        torch.empty(2**52)
    assert is_out_of_memory(refused.value)
    assert is_out_of_memory(MemoryError())
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."))
    with pytest.raises(RuntimeError) as other:
        torch.ones(2) @ torch.ones(3)
    assert not is_out_of_memory(other.value)
    assert not is_out_of_memory(OSError("out of memory"))


def test_room_is_what_the_tightest_limit_leaves() -> None:
    ask = (
        "import torch, json; from lmforge.plan.out_of_memory import room; print(json.dumps(vars(room(torch.device('cpu'), 1))))"
    )
    limit = 2**33
    done = subprocess.run(
        [sys.executable, "-c", ask],
        capture_output=True,
        text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (limit, limit)),
    )
    told = json.loads(done.stdout)
    assert told["bound"] == "8.00 GiB of address space (ulimit -v)"
    assert told["used"] + told["free"] == limit
