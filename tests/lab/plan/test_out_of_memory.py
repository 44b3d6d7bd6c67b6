"""When memory runs out, a run suggests options that fit, and these do fit: real processes under a
memory limit.
"""

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

from lmforge.core.distributed.distributed import DistributedContext
from lmforge.core.distributed.memory import is_out_of_memory
from lmforge.core.distributed.rank_info import RankInfo
from lmforge.core.options.activation_checkpointing import CHECKPOINTING_MODES
from lmforge.core.options.load import parse_config
from lmforge.core.options.sections import ParallelOptions
from lmforge.core.options.stage import PretrainConfig, StageConfig
from lmforge.core.parallel.dims import plan_batches
from lmforge.core.parallel.precision import MIN_STEPS_TO_COMPILE, choose_compile
from lmforge.core.stages.run_memory import RunMemory
from lmforge.hf.resolve import model_config_from_options
from lmforge.lab.plan.hardware import data_sheets
from lmforge.lab.plan.out_of_memory import MemoryEstimator
from lmforge.lab.plan.planning import Machine, build_step_config, make_step_config
from lmforge.lab.plan.prediction.predict import HOST_BYTES, peak_memory
from lmforge.lab.plan.prediction.search import in_fewer_bits
from lmforge.post.options.tuning import SftConfig
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
from lmforge.core.options.load import parse_config
from lmforge.core.options.stage import PretrainConfig
from lmforge.lab.options.plan import USABLE_FRACTION
from lmforge.core import run as stages
from lmforge.core.stages import build_model
def print_status(*arguments, **options):
    print(open("/proc/self/status").read())
    sys.exit()
build_model.build_model_and_optimizer = print_status
stages.run_stage(parse_config(PretrainConfig, sys.argv[1:]))
"""


def options(tokens: Path, folder: Path, name: str, *more: str) -> list[str]:
    words = [word for key, value in SIZES.items() for word in (f"--{key}", str(value))]
    return [
        *words,
        "--data.folder",
        str(tokens),
        "--run.folder",
        str(folder),
        "--run.name",
        name,
        *more,
    ]


def estimator_of(
    config: StageConfig,
    ranks: int = 1,
    vocab_size: int = 512,
    dtype: str = "fp32",
    on_gpu: bool = False,
) -> MemoryEstimator:
    model_config = model_config_from_options(config.model, vocab_size)
    plan = plan_batches(config, ranks)
    step_config = build_step_config(
        config,
        model_config,
        plan,
        world_size=ranks,
        gpus_per_host=ranks,
        on_gpu=on_gpu,
        dtype=dtype,
        compiled=on_gpu and config.train.compile != "off",
    )
    return MemoryEstimator(step_config)


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
    done = subprocess.run(
        [sys.executable, "-c", PRINT_STATUS, *words], capture_output=True, text=True, timeout=100
    )
    size = re.search(r"VmSize:\s+(\d+) kB", done.stdout)
    assert size, done.stderr
    return int(size[1]) * 2**10


def suggestions(message: str) -> list[list[str]]:
    """The command lines that a message proposes."""
    ways = message.partition("by estimate would fit: ")[2].partition(";")[0]
    ways = re.sub(r" \(it was \d+\)", "", ways)
    return [
        [
            word
            for key, value in re.findall(r"([\w.]+) = ([\w-]+)", way)
            for word in (f"--{key}", value)
        ]
        for way in ways.split(", or ")
        if way
    ]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_what_is_suggested_fits_under_the_same_limit(
    tiny_tokens: Path, tmp_path: Path, mapped: int, ranks: int
) -> None:
    launch = ["--launch.processes", str(ranks)]
    config = parse_config(PretrainConfig, options(tiny_tokens, tmp_path, "a"))
    estimator = estimator_of(config)
    limit = mapped + HOST_BYTES + int(0.45 * estimator.required_bytes(estimator.step_config))
    failed = pretrain_within(limit, *options(tiny_tokens, tmp_path, "failed", *launch))
    assert failed.returncode == 1, failed.stdout + failed.stderr
    (message,) = failed.stderr.splitlines()
    print(message)
    assert re.match(
        r"lmforge: rank [01], step [01], (forward|backward): out of memory: \d+ MiB were requested,"
        r" with ",
        message,
    )
    assert "GiB of address space (ulimit -v)" in message
    ways = suggestions(message)
    assert ["--train.micro_batch_size", "32"] in ways or ["--train.micro_batch_size", "64"] in ways
    for number, way in enumerate(ways if ranks == 1 else ways[-1:]):
        done = pretrain_within(
            limit, *options(tiny_tokens, tmp_path, f"way-{number}", *launch, *way)
        )
        assert done.returncode == 0, (way, done.stderr)
        assert f"step {STEPS}/{STEPS}" in done.stdout


@pytest.mark.slow
def test_a_model_that_does_not_fit_is_refused_with_what_it_needs_at_least(
    tiny_tokens: Path, tmp_path: Path, mapped: int
) -> None:
    large = [
        "--model.hidden_size",
        "4096",
        "--model.intermediate_size",
        "8192",
        "--train.micro_batch_size",
        "1",
    ]
    done = pretrain_within(mapped + 2**29, *options(tiny_tokens, tmp_path, "large", *large))
    assert done.returncode == 2, done.stdout + done.stderr
    (said,) = done.stderr.splitlines()
    print(said)
    assert said.startswith("lmforge: model, gradients, optimizer and activations of a rank: needs ")
    least = re.search(
        r"by estimate nothing fits: [^;]*?8bit[^;]*? needs at least (\d+\.\d) GiB per rank", said
    )
    assert least
    numbers = 8 * (4 * 4096**2 + 3 * 4096 * 8192)
    # Weights, gradients, and moments in 8 bits.
    assert 16 * numbers / 2**30 > float(least[1]) > 10 * numbers / 2**30
    assert not (tmp_path / "large" / "recipe.toml").exists()


def test_logits_are_predicted_as_they_are_computed_where_auto_turns_out_to_be_off() -> None:
    def estimator(compile_: str) -> MemoryEstimator:
        config = parse_config(
            PretrainConfig, ["--train.compile", compile_, "--train.micro_batch_size", "16"]
        )
        return estimator_of(config, vocab_size=5000, dtype="bf16", on_gpu=True)

    auto, off = estimator("auto").step_config, estimator("off").step_config
    assert replace(auto, compiled=False) == off
    assert peak_memory(auto)["loss"] != peak_memory(off)["loss"]
    alone = DistributedContext(RankInfo(), torch.device("cpu"), None)
    for steps in (MIN_STEPS_TO_COMPILE - 1, MIN_STEPS_TO_COMPILE):
        config = parse_config(PretrainConfig, ["--train.steps", str(steps)])
        model_config, plan = model_config_from_options(config.model, 512), plan_batches(config, 1)
        run = MemoryEstimator.of_run(RunMemory.of_run(config, model_config, plan, alone))
        assert run.step_config.compiled == choose_compile(config, alone.device, steps)[0]
        resumed = MemoryEstimator.of_run(
            RunMemory.of_run(config, model_config, plan, alone, step=1)
        )
        assert resumed.step_config.compiled == choose_compile(config, alone.device, steps - 1)[0]


def test_adapters_are_predicted_without_gradients_and_optimizer_states_of_frozen_weights(
    tmp_path: Path,
) -> None:
    words = [
        "--data.files",
        str(tmp_path / "a.jsonl"),
        "--model.num_hidden_layers",
        "4",
        "--train.global_batch_size",
        "8",
    ]
    configs = [
        parse_config(SftConfig, [*words, "--train.dtype", "fp32", *more])
        for more in ([], ["--lora.rank", "4"])
    ]
    whole, adapted = (estimator_of(config, 4, 5000) for config in configs)
    counts = adapted.step_config.parameters
    assert counts.trained < counts.total / 20
    for parameters, estimator in ((counts.total - counts.trained, whole), (counts.total, adapted)):
        memory = peak_memory(
            replace(estimator.step_config.with_options(engine="ddp"), world_size=4)
        )
        assert memory["weights"] == 4 * parameters
        assert memory["optimizer states"] == 8 * estimator.step_config.parameters.trained
        assert memory["gradients"] == 4 * estimator.step_config.parameters.trained
    ranks, cpu = RankInfo(0, 4), torch.device("cpu")
    memories = [
        RunMemory(config, whole.step_config.model, plan_batches(config, 4), ranks, cpu)
        for config in configs
    ]
    least = [memory.least_state_bytes() for memory in memories]
    assert least[1] < least[0] / 3
    assert adapted.required_bytes(adapted.step_config) < whole.required_bytes(whole.step_config)


def drawn_estimator(draw: random.Random, ranks: int) -> MemoryEstimator:
    options = {
        "model.hidden_size": 64 * draw.randint(1, 40),
        "model.num_attention_heads": 4,
        "model.num_key_value_heads": 2,
        "model.num_hidden_layers": draw.randint(1, 12),
        "model.dropout": draw.choice(["0.0", "0.1"]),
        "data.sequence_length": 2 ** draw.randint(5, 13),
        "train.global_batch_size": ranks * 2 ** draw.randint(0, 9),
        "optimizer.name": draw.choice(["adamw", "muon"]),
        "train.compile": draw.choice(["auto", *["off"] * 5]),
    }
    config = parse_config(
        PretrainConfig,
        [word for name, value in options.items() for word in (f"--{name}", str(value))],
    )
    return estimator_of(config, ranks, 5000, draw.choice(["fp32", "bf16"]), draw.random() < 0.5)


@pytest.mark.parametrize("draws", [6, pytest.param(60, marks=pytest.mark.slow)])
def test_only_what_fits_by_the_estimate_is_suggested_and_nothing_that_fits_is_called_too_large(
    draws: int,
) -> None:
    draw = fresh_random()
    suggested = refused = 0
    # Nothing fits into no memory at all.
    for share in (0.0, *(draw.uniform(0.01, 1.05) for _ in range(draws))):
        ranks = draw.choice([1, 2, 8])
        estimator = drawn_estimator(draw, ranks)
        engine = "single" if ranks == 1 else draw.choice(["ddp", "fsdp2"])
        mode, sharding = (
            draw.choice([*CHECKPOINTING_MODES]),
            draw.choice([None, None, "grad-shard"]),
        )
        options = ParallelOptions(
            engine=engine,
            sharding=sharding if engine == "fsdp2" else None,
            activation_checkpointing=mode,
        )
        current = replace(estimator.step_config, options=options)
        estimator = replace(estimator, step_config=current)
        available = int(estimator.required_bytes(current) * share + estimator.overhead_bytes)
        message = estimator.suggest_what_fits(available)
        for way in suggestions(message):
            suggested += 1
            changes = dict(zip(way[::2], way[1::2], strict=True))
            size = int(changes.pop("--train.micro_batch_size", current.micro_batch_size))
            states = {
                "state_dtype": changes.pop("--optimizer.state_dtype", current.optimizer.state_dtype)
            }
            updated = replace(current, optimizer=current.optimizer.model_copy(update=states))
            updated = updated.with_micro_batch_size(size).with_options(
                **{
                    name.removeprefix("--parallel."): value == "true" or value
                    for name, value in changes.items()
                }
            )
            assert estimator.required_bytes(updated) <= available - estimator.overhead_bytes, (
                message
            )
        if "nothing fits" in message:
            refused += 1
            smallest = current.with_micro_batch_size(1)
            for step_config in (smallest, smallest.with_options(activation_checkpointing="full")):
                assert (
                    estimator.required_bytes(step_config) > available - estimator.overhead_bytes
                ), message
    assert suggested > draws / 3
    assert refused > draws / 20


@pytest.mark.slow
def test_whole_gradients_are_predicted_where_they_are_reduced_once_a_step_and_the_other_way_is_advised() -> (
    None
):
    words = [
        "--train.global_batch_size",
        "64",
        "--train.micro_batch_size",
        "4",
        "--parallel.engine",
        "fsdp2",
    ]
    once = estimator_of(
        parse_config(PretrainConfig, [*words, "--parallel.reduce_every_micro_batch", "false"]),
        4,
        dtype="bf16",
        on_gpu=True,
    )
    every = estimator_of(parse_config(PretrainConfig, words), 4, dtype="bf16", on_gpu=True)
    assert every.step_config == once.step_config.with_options(reduce_every_micro_batch=True)
    more = sum(peak_memory(once.step_config).values()) - sum(
        peak_memory(every.step_config).values()
    )
    # The fp32 gradients that are whole, beside a shard of them.
    assert 0.5 < more / (4 * every.step_config.parameters.trained) < 1.3
    available = once.required_bytes(every.step_config) + once.overhead_bytes
    assert "parallel.reduce_every_micro_batch = true" in once.suggest_what_fits(available)


@pytest.mark.parametrize(
    ("words", "advised"),
    [
        ([], "optimizer.state_dtype = 8bit"),
        (["--lora.rank", "8"], "lora.base_dtype = int8"),
        (["--lora.rank", "8", "--lora.base_dtype", "nf4"], None),
    ],
)
def test_storage_in_fewer_bits_is_advised_last_and_only_where_it_would_fit(
    words: list[str], advised: str | None
) -> None:
    stage = SftConfig if "--lora.rank" in words else PretrainConfig
    given = [
        "--train.global_batch_size",
        "2",
        "--train.micro_batch_size",
        "2",
        "--model.preset",
        "124m",
        *words,
    ]
    needs = {"--model.source": "none", "--data.files": "none"} if stage is SftConfig else {}
    estimator = estimator_of(
        parse_config(stage, [*given, *(word for each in needs.items() for word in each)]),
        dtype="bf16",
    )
    current = estimator.step_config
    for fewer in in_fewer_bits(current)[:1]:
        assert estimator.required_bytes(fewer) < estimator.required_bytes(current)
        message = estimator.suggest_what_fits(
            estimator.required_bytes(fewer) + estimator.overhead_bytes
        )
        ways = message.removeprefix("by estimate would fit: ").split(", or ")
        assert ways[-1] == advised
    assert bool(in_fewer_bits(current)) == (advised is not None)


def test_a_plan_and_a_run_have_the_same_inputs() -> None:
    words = [
        "--train.global_batch_size",
        "64",
        "--train.micro_batch_size",
        "4",
        "--parallel.engine",
        "fsdp2",
    ]
    config = parse_config(PretrainConfig, words)
    for gpu in ("rtx-4090", "h100-80"):
        machine = Machine(data_sheets().gpu(gpu), None, 4)
        planned = make_step_config(config, model_config_from_options(config.model, 512), 4, machine)
        assert planned == estimator_of(config, 4, dtype="bf16", on_gpu=True).step_config


@pytest.mark.slow
def test_a_failure_counts_as_a_measurement() -> None:
    """Where the prediction says that what has just failed fits, nothing nearly as large is
    suggested.
    """
    config = parse_config(
        PretrainConfig, ["--train.global_batch_size", "64", "--train.micro_batch_size", "64"]
    )
    estimator = estimator_of(config, on_gpu=True)
    needed = estimator.required_bytes(estimator.step_config) + estimator.overhead_bytes
    assert estimator.suggest_what_fits(10 * needed) == estimator.suggest_what_fits(needed)


def test_out_of_memory_is_distinguished_from_other_errors() -> None:
    with pytest.raises(RuntimeError) as refused:
        torch.empty(2**52)
    assert is_out_of_memory(refused.value)
    assert is_out_of_memory(MemoryError())
    assert is_out_of_memory(
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    )
    with pytest.raises(RuntimeError) as other:
        torch.ones(2) @ torch.ones(3)
    assert not is_out_of_memory(other.value)
    assert not is_out_of_memory(OSError("out of memory"))


def test_available_memory_is_what_the_tightest_limit_leaves() -> None:
    code = (
        "import torch, json; from lmforge.core.distributed.memory import available_memory;"
        " print(json.dumps(vars(available_memory(torch.device('cpu'), 1))))"
    )
    limit = 2**32  # less than any host that runs the tests has left
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (limit, limit)),
    )
    available = json.loads(done.stdout)
    assert available["limited_by"] == "4.00 GiB of address space (ulimit -v)"
    assert available["used_bytes"] + available["free_bytes"] == limit
