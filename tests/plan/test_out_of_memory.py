"""When memory runs out, a run says what would have fitted, and that then fits: real processes under a memory limit."""

import json
import os
import random
import re
import resource
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lmforge.cluster.distributed import DistributedContext
from lmforge.cluster.memory import is_out_of_memory
from lmforge.cluster.rank_info import RankInfo
from lmforge.config.load import load_config
from lmforge.config.sections import ParallelOptions
from lmforge.config.stage import PretrainConfig
from lmforge.interop.resolve import model_config_from_options
from lmforge.parallel.dims import plan_batches
from lmforge.parallel.precision import MIN_STEPS_TO_COMPILE, choose_compile
from lmforge.plan.out_of_memory import HOST_OVERHEAD_BYTES, MemoryEstimator, MemorySetting, suggest_what_fits
from lmforge.plan.parameter_counts import count_parameters
from tests.seeds import fresh_random

STEPS = 2
# Much memory for little work: narrow layers, and large micro-batches.
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
# Prints what a process has mapped when it is about to build its model.
PRINT_STATUS = """
import sys
from lmforge.config.load import load_config
from lmforge.stages import setup, run as stages
def print_status(*arguments, **options):
    print(open("/proc/self/status").read())
    sys.exit()
for module in (setup, stages):
    module.build_model_and_optimizer = print_status
stages.pretrain(load_config(sys.argv[1:]))
"""


def options(tokens: Path, folder: Path, name: str, *more: str) -> list[str]:
    words = [word for key, value in SIZES.items() for word in (f"--{key}", str(value))]
    return [*words, "--data.folder", str(tokens), "--run.folder", str(folder), "--run.name", name, *more]


def estimator_of(
    config: PretrainConfig, ranks: int = 1, vocab_size: int = 512, dtype_bytes: int = 4, on_gpu: bool = False
) -> MemoryEstimator:
    model_config = model_config_from_options(config.model, vocab_size)
    plan = plan_batches(config, ranks)
    counts, compiles = count_parameters(config, model_config), on_gpu and config.train.compile != "off"
    return MemoryEstimator(config, model_config, plan, dtype_bytes, on_gpu, counts, compiles=compiles)


def pretrain_within(limit: int, *words: str) -> subprocess.CompletedProcess[str]:
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
    done = subprocess.run([sys.executable, "-c", PRINT_STATUS, *words], capture_output=True, text=True, timeout=100)
    size = re.search(r"VmSize:\s+(\d+) kB", done.stdout)
    assert size, done.stderr
    return int(size[1]) * 2**10


def suggestions(message: str) -> list[list[str]]:
    """The command lines that a message proposes."""
    ways = message.partition("by estimate would fit: ")[2].partition(";")[0]
    ways = re.sub(r" \(it was \d+\)", "", ways)
    return [
        [word for key, value in re.findall(r"([\w.]+) = ([\w-]+)", way) for word in (f"--{key}", value)]
        for way in ways.split(", or ")
        if way
    ]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_what_is_suggested_fits_under_the_same_limit(tiny_tokens: Path, tmp_path: Path, mapped: int, ranks: int) -> None:
    launch = ["--launch.processes", str(ranks)]
    config = load_config(options(tiny_tokens, tmp_path, "a"))
    setting = MemorySetting(128, ParallelOptions(engine="single"), 1, 1)
    limit = mapped + HOST_OVERHEAD_BYTES + int(0.45 * estimator_of(config).required_bytes(setting))
    failed = pretrain_within(limit, *options(tiny_tokens, tmp_path, "failed", *launch))
    assert failed.returncode == 1, failed.stdout + failed.stderr
    (message,) = failed.stderr.splitlines()
    print(message)
    assert re.match(r"lmforge: rank [01], step [01], (forward|backward): out of memory: \d+ MiB were requested, with ", message)
    assert "GiB of address space (ulimit -v)" in message
    ways = suggestions(message)
    assert ["--train.micro_batch_size", "32"] in ways or ["--train.micro_batch_size", "64"] in ways
    for number, way in enumerate(ways if ranks == 1 else ways[-1:]):
        done = pretrain_within(limit, *options(tiny_tokens, tmp_path, f"way-{number}", *launch, *way))
        assert done.returncode == 0, (way, done.stderr)
        assert f"step {STEPS}/{STEPS}" in done.stdout


def test_a_model_that_does_not_fit_is_refused_with_what_it_needs_at_least(
    tiny_tokens: Path, tmp_path: Path, mapped: int
) -> None:
    large = ["--model.hidden_size", "4096", "--model.intermediate_size", "8192", "--train.micro_batch_size", "1"]
    done = pretrain_within(mapped + 2**29, *options(tiny_tokens, tmp_path, "large", *large))
    assert done.returncode == 2, done.stdout + done.stderr
    (said,) = done.stderr.splitlines()
    print(said)
    assert said.startswith("lmforge: model, gradients, optimizer and activations of a rank: needs ")
    least = re.search(r"by estimate nothing fits: [^;]*? needs at least (\d+\.\d\d) GiB a rank", said)
    assert least
    assert float(least[1]) > 16 * 8 * (4 * 4096**2 + 3 * 4096 * 8192) / 2**30  # weights, gradients, moments
    assert not (tmp_path / "large" / "recipe.toml").exists()


def test_logits_are_estimated_as_they_are_computed_where_auto_turns_out_to_be_off() -> None:
    def estimator(compile_: str, steps: int = 200) -> MemoryEstimator:
        config = load_config(["--train.compile", compile_, "--train.steps", str(steps), "--train.micro_batch_size", "16"])
        return estimator_of(config, vocab_size=5000, dtype_bytes=2, on_gpu=True)

    auto, off = estimator("auto"), estimator("off")
    setting = MemorySetting(16, ParallelOptions(engine="single"), 1, 1)
    assert replace(auto, compiles=False).activation_bytes(setting) == off.activation_bytes(setting)
    assert auto.activation_bytes(setting) != off.activation_bytes(setting)
    alone = DistributedContext(RankInfo(), torch.device("cpu"), None)
    for steps in (MIN_STEPS_TO_COMPILE - 1, MIN_STEPS_TO_COMPILE):
        config = estimator("auto", steps).config
        run = MemoryEstimator.of_run(config, auto.model_config, auto.plan, alone)
        assert run.compiles == choose_compile("auto", alone.device, steps)[0]


def drawn_estimator(draw: random.Random, ranks: int) -> MemoryEstimator:
    options = {
        "model.hidden_size": 64 * draw.randint(1, 40),
        "model.num_attention_heads": 4,
        "model.num_key_value_heads": 2,
        "model.num_hidden_layers": draw.randint(1, 40),
        "model.dropout": draw.choice(["0.0", "0.1"]),
        "data.sequence_length": 2 ** draw.randint(5, 13),
        "train.global_batch_size": ranks * 2 ** draw.randint(0, 9),
        "optimizer.name": draw.choice(["adamw", "muon", "sgd"]),
    }
    config = load_config([word for name, value in options.items() for word in (f"--{name}", str(value))])
    return estimator_of(config, ranks, 5000, draw.choice([2, 4]), on_gpu=draw.random() < 0.5)


def test_only_what_fits_by_the_estimate_is_suggested_and_nothing_that_fits_is_called_too_large() -> None:
    draw = fresh_random()
    suggested = refused = 0
    for _ in range(200):
        ranks = draw.choice([1, 2, 8])
        estimator = drawn_estimator(draw, ranks)
        engine = "single" if ranks == 1 else draw.choice(["ddp", "fsdp2"])
        mode, sharding = draw.choice(["none", "selective-ops", "full"]), draw.choice([None, None, "grad-shard"])
        options = ParallelOptions(
            engine=engine, sharding=sharding if engine == "fsdp2" else None, activation_checkpointing=mode
        )
        current = MemorySetting(estimator.plan.micro_batch_size, options, ranks, ranks)
        available = int(estimator.required_bytes(current) * draw.uniform(0.01, 1.05)) + estimator.overhead_bytes
        message = suggest_what_fits(estimator, current, available)
        for way in suggestions(message):
            suggested += 1
            changes = dict(zip(way[::2], way[1::2], strict=True))
            size = int(changes.pop("--train.micro_batch_size", current.micro_batch_size))
            updated = replace(current, micro_batch_size=size).with_options(
                **{name.removeprefix("--parallel."): value == "true" or value for name, value in changes.items()}
            )
            assert estimator.required_bytes(updated) <= available - estimator.overhead_bytes, message
        if "nothing fits" in message:
            refused += 1
            smallest = replace(current, micro_batch_size=1)
            for setting in (smallest, smallest.with_options(activation_checkpointing="full")):
                assert estimator.required_bytes(setting) > available - estimator.overhead_bytes, message
    assert suggested > 50
    assert refused > 10


def test_gradients_are_reduced_once_a_step_where_a_gpu_holds_them_whole_until_then() -> None:
    words = ["--train.global_batch_size", "64", "--train.micro_batch_size", "4"]
    setting = MemorySetting(4, ParallelOptions(engine="fsdp2"), 4, 4)

    def reduces_once(setting: MemorySetting, gpu_bytes: int | None, *more: str) -> bool:
        estimator = estimator_of(load_config([*words, *more]), 4, dtype_bytes=2, on_gpu=True)
        return replace(estimator, gpu_bytes=gpu_bytes).can_reduce_once(setting)

    needed = estimator_of(load_config(words), 4, dtype_bytes=2, on_gpu=True).required_bytes(setting)
    # The fp32 gradients of the other ranks' shards, and a tenth that is left free.
    full_gradients = 4 * count_parameters(load_config(words), model_config_from_options(load_config(words).model, 512)).trained
    enough = int((needed + 1.1 * full_gradients) / 0.9) + 10
    assert reduces_once(setting, enough)
    assert not reduces_once(setting, enough - full_gradients // 2)
    assert not reduces_once(setting, None)  # on a CPU
    assert not reduces_once(setting, enough, "--train.micro_batch_size", "16")  # one micro-batch a step
    assert not reduces_once(setting.with_options(sharding="no-shard"), enough)
    # Where memory runs out all the same, the other way is suggested.
    estimator = estimator_of(load_config(words), 4, dtype_bytes=2, on_gpu=True)
    message = suggest_what_fits(estimator, setting.with_options(reduce_every_micro_batch=False), needed)
    assert "parallel.reduce_every_micro_batch = true" in message


def test_a_failure_counts_as_a_measurement() -> None:
    """Where the arithmetic says that what has just failed fits, it does not suggest something nearly as large."""
    config = load_config(["--train.global_batch_size", "64", "--train.micro_batch_size", "64"])
    estimator, current = estimator_of(config, on_gpu=True), MemorySetting(64, ParallelOptions(engine="single"), 1, 1)
    needed = estimator.required_bytes(current)
    assert suggest_what_fits(estimator, current, 10 * needed) == suggest_what_fits(estimator, current, needed)


def test_out_of_memory_is_distinguished_from_other_errors() -> None:
    with pytest.raises(RuntimeError) as refused:
        torch.empty(2**52)
    assert is_out_of_memory(refused.value)
    assert is_out_of_memory(MemoryError())
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."))
    with pytest.raises(RuntimeError) as other:
        torch.ones(2) @ torch.ones(3)
    assert not is_out_of_memory(other.value)
    assert not is_out_of_memory(OSError("out of memory"))


def test_available_memory_is_what_the_tightest_limit_leaves() -> None:
    code = (
        "import torch, json; from lmforge.cluster.memory import available_memory;"
        " print(json.dumps(vars(available_memory(torch.device('cpu'), 1))))"
    )
    limit = 2**33
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (limit, limit)),
    )
    available = json.loads(done.stdout)
    assert available["limited_by"] == "8.00 GiB of address space (ulimit -v)"
    assert available["used_bytes"] + available["free_bytes"] == limit
