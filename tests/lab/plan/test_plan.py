"""`lmforge plan`: what it prints, refuses and writes; that predictions change in the right
direction.
"""

import itertools
import json
import re
import shutil
import subprocess
import sys
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lmforge.cli import run
from lmforge.core.model.config import ModelConfig
from lmforge.core.model.flops import active_parameters, flops_per_token, parameter_count
from lmforge.core.model.presets import get_preset
from lmforge.core.options.activation_checkpointing import CHECKPOINTING_MODES
from lmforge.core.options.load import read_config
from lmforge.core.options.sections import ParallelOptions
from lmforge.core.options.stage import PretrainDataOptions
from lmforge.lab.plan.hardware import HARDWARE_FILE, data_sheets
from lmforge.lab.plan.planning import Machine
from lmforge.lab.plan.prediction import predict as prediction_module
from lmforge.lab.plan.prediction.predict import Prediction, can_reduce_once, predict
from lmforge.lab.plan.prediction.search import (
    FEW_BLOCKS,
    FINALISTS,
    Candidate,
    candidates,
    estimate,
    search,
)
from lmforge.lab.plan.prediction.simulator import COMPUTE, NETWORK, Operation, simulate
from lmforge.lab.plan.prediction.step_config import StepConfig
from lmforge.lab.plan.traces import trace_block
from tests.conftest import Refusal
from tests.support.grids import parametrize

ROOT = Path(__file__).parents[3]
RECIPE = ROOT / "recipes" / "llama2-7b.toml"


def step_config_of(preset: str = "llama3-8b", gpus: int = 8, **changes: Any) -> StepConfig:
    names = {name: changes.pop(name) for name in [*changes] if name in ParallelOptions.model_fields}
    options = ParallelOptions(**{"engine": "fsdp2" if gpus > 1 else "single", **names})
    numbers = {"micro_batch_size": 2, "accumulation": 1, "sequence_length": 4096, **changes}
    return StepConfig(get_preset(preset), options, gpus, 8, **numbers)


def prediction_of(
    step_config: StepConfig, gpu: str = "h100-80", network: str = "infiniband-ndr"
) -> Prediction:
    machine = Machine(data_sheets().gpu(gpu), data_sheets().network(network), 8)
    return predict(step_config, machine.gpu, machine.rates(step_config.dtype))


def plan_json(capfd: pytest.CaptureFixture[str], *words: object) -> dict[str, Any]:
    assert run(["plan", *map(str, words), "--output", "json"]) == 0
    return dict(json.loads(capfd.readouterr().out))


# --- the simulator --------------------------------------------------------------------------------


def test_streams_overlap_and_wait_for_each_other() -> None:
    gather, compute = Operation("gather", NETWORK, 2.0), Operation("compute", COMPUTE, 3.0)
    both = simulate([gather, compute], {})
    assert (both.seconds, both.exposed) == (3.0, 0.0)
    waiting = simulate([gather, replace(compute, after=(0,))], {})
    assert (waiting.seconds, waiting.exposed) == (5.0, 2.0)
    last = simulate([compute, replace(gather, after=(0,))], {})
    assert (last.seconds, last.exposed) == (5.0, 2.0)


def test_pools_of_streams_add_up_although_their_peaks_are_apart() -> None:
    operations = [
        Operation("a", COMPUTE, allocate={"activations": 10.0}, free={"activations": 10.0}),
        Operation("b", NETWORK, allocate={"gather buffers": 4.0}),
    ]
    simulated = simulate(operations, {"weights": 1.0})
    assert (sum(simulated.live_peak.values()), simulated.peak_at, simulated.reserved) == (
        11.0,
        "a",
        15.0,
    )


@pytest.mark.slow
def test_repeated_micro_batches_take_the_time_that_simulating_each_takes() -> None:
    step_config = step_config_of(accumulation=3, micro_batch_size=1)
    three, six = prediction_of(step_config), prediction_of(replace(step_config, accumulation=6))
    four, five = (prediction_of(replace(step_config, accumulation=count)) for count in (4, 5))
    assert six.step_seconds - five.step_seconds == pytest.approx(
        four.step_seconds - three.step_seconds, rel=1e-6
    )
    assert six.live_bytes == three.live_bytes


# --- predictions ----------------------------------------------------------------------------------


def test_what_is_kept_between_steps_is_what_the_model_has() -> None:
    total = parameter_count(get_preset("llama3-8b")).total
    alone = prediction_of(step_config_of(gpus=1), gpu="b200").memory
    assert alone["weights"] == pytest.approx(4 * total, rel=1e-9)
    assert alone["optimizer states"] == pytest.approx(8 * total, rel=1e-9)
    sharded = prediction_of(step_config_of(gpus=64)).memory
    assert sharded["weights"] == pytest.approx(4 * total / 64, rel=1e-9)


@parametrize(
    ("compiled", "preset"),
    itertools.product((False, True), ["llama3-8b", "qwen3-0.6b", "gpt2-124m", "mistral-7b"]),
    fast=range(4),
)
def test_checkpointing_trades_memory_for_time(preset: str, compiled: bool) -> None:
    length = {"gpt2-124m": 1024}.get(preset, 4096)
    base = step_config_of(preset, compiled=compiled, sequence_length=length, micro_batch_size=4)
    results = [
        prediction_of(base.with_options(activation_checkpointing=mode))
        for mode in CHECKPOINTING_MODES
    ]
    activations = [each.memory["activations"] for each in results]
    assert activations[0] == max(activations)
    assert activations[-1] == min(activations)
    # The smallest of them waits for the host, whatever it computes.
    seconds = [each.step_seconds for each in results]
    assert seconds[0] == min(seconds)
    assert max(seconds) <= 1.001 * seconds[-1]


# Its third layer is dense.
MIXED = replace(get_preset("nano-moe"), mlp_only_layers=(2,), num_hidden_layers=12)


@parametrize(
    "name", ["nano-moe", "olmoe-1b-7b", "mixtral-8x7b", "qwen3-30b-a3b", "mixed"], fast=(0,)
)
def test_a_mixture_is_planned_with_all_its_parameters_and_the_flops_of_the_active_ones(
    name: str,
) -> None:
    step_config = replace(
        step_config_of("nano-moe", gpus=8), model=MIXED if name == "mixed" else get_preset(name)
    )
    prediction = prediction_of(step_config)
    # The ranks divide the experts, and every other first dimension.
    assert prediction.memory["weights"] == pytest.approx(
        4 * parameter_count(step_config.model).total / 8, rel=1e-9
    )
    assert prediction.memory["optimizer states"] == pytest.approx(
        2 * prediction.memory["weights"], rel=1e-9
    )
    flops = flops_per_token(step_config.model, 4096) * prediction.tokens_per_second
    assert prediction.mfu == pytest.approx(
        flops / data_sheets().gpu("h100-80").tflops["bf16"] / 1e12
    )
    assert 0 < prediction.seconds["products of experts"] < prediction.step_seconds
    assert prediction.mfu < 0.7


@pytest.mark.slow
def test_expert_parallelism_splits_experts_over_a_copy_of_the_model_and_sends_tokens() -> None:
    tensor = step_config_of("qwen3-30b-a3b", gpus=16, tensor_parallel_degree=2)
    whole, split = (
        prediction_of(tensor.with_options(expert_parallel_degree=degree)) for degree in (1, 8)
    )
    model = tensor.model
    experts = (
        model.num_hidden_layers * model.num_experts * 3 * model.hidden_size * model.expert_size
    )
    # Without, each rank of tensor parallelism has all experts, sharded over 8; with, they are split
    # over all 16 ranks.
    assert whole.memory["weights"] - split.memory["weights"] == pytest.approx(
        4 * experts / 16, rel=1e-6
    )
    assert split.memory.get("gathered weights", 0.0) < whole.memory["gathered weights"] / 3
    # Two all-to-alls forward and two backward of three quarters and more of the rows of eight
    # choices, in bf16.
    rows = tensor.tokens / 2 * 8 * model.hidden_size * 2
    at_least = (
        4 * model.num_hidden_layers * rows * 7 / 8 / data_sheets().gpu("h100-80").link_gb_s / 1e9
    )
    assert at_least < split.seconds["all-to-all of tokens"] < 3 * at_least
    again = prediction_of(
        tensor.with_options(expert_parallel_degree=8, activation_checkpointing="full")
    )
    assert again.seconds["all-to-all of tokens"] == pytest.approx(
        1.5 * split.seconds["all-to-all of tokens"]
    )
    across = prediction_of(tensor.with_options(expert_parallel_degree=16))
    assert across.seconds["all-to-all of tokens"] > 2 * split.seconds["all-to-all of tokens"]


def test_a_search_tries_expert_parallelism_where_there_are_experts() -> None:
    degrees = {}
    for preset in ("nano-moe", "124m"):
        tried = candidates(step_config_of(preset, gpus=8, sequence_length=512), 8, False)
        degrees[preset] = {
            (each.expert, each.options.engine)
            for each in tried
            if each.tensor == each.pipeline == 1
        }
    assert degrees["nano-moe"] == {(1, "ddp"), *((degree, "fsdp2") for degree in (1, 2, 4, 8))}
    assert degrees["124m"] == {(1, "ddp"), (1, "fsdp2")}


def test_experts_that_are_fewer_than_the_ranks_are_sharded_over_all_of_them() -> None:
    few, many = (
        prediction_of(step_config_of("mixtral-8x7b", gpus=gpus)).memory["weights"]
        for gpus in (8, 64)
    )
    assert many == pytest.approx(few / 8, rel=0.01)


@pytest.mark.slow
def test_a_mixture_takes_longer_than_the_dense_model_of_its_active_parameters_and_less_than_that_of_all() -> (
    None
):
    base = step_config_of("nano-moe", micro_batch_size=16)
    chosen, experts = base.model.num_experts_per_tok, base.model.num_experts
    dense = {
        "num_experts": 0,
        "num_experts_per_tok": 0,
        "norm_topk_prob": False,
        "output_router_logits": False,
    }
    dense |= {"router_aux_loss_coef": 0.0, "model_type": "qwen3", "moe_intermediate_size": 0}
    sizes = (256 * count for count in (chosen, experts))
    seconds = []
    for model in (
        base.model,
        *(replace(base.model, **dense, intermediate_size=size) for size in sizes),
    ):
        busy = prediction_of(replace(base, model=model)).seconds
        seconds.append(busy["matrix products"] + busy.get("products of experts", 0.0))
    assert seconds[1] < seconds[0] < seconds[2]


def test_more_ranks_take_less_memory_each_and_slow_networks_take_time() -> None:
    few, many = prediction_of(step_config_of(gpus=8)), prediction_of(step_config_of(gpus=128))
    assert many.device_bytes < few.device_bytes
    steps = {"accumulation": 4, "micro_batch_size": 1}
    slow = prediction_of(step_config_of(gpus=128, **steps), network="ethernet-25")
    assert slow.step_seconds > 3 * many.step_seconds
    assert slow.bottleneck == "exposed communication"
    hybrid = prediction_of(
        step_config_of(gpus=128, sharding="hybrid-full-shard", **steps), network="ethernet-25"
    )
    assert hybrid.step_seconds < slow.step_seconds


def test_a_pipeline_waits_less_with_more_micro_batches() -> None:
    few, many = (
        prediction_of(
            step_config_of(
                gpus=16, pipeline_parallel_degree=4, micro_batch_size=1, accumulation=count
            )
        )
        for count in (4, 32)
    )
    assert few.bubble_seconds / few.step_seconds > 2 * many.bubble_seconds / many.step_seconds


@pytest.mark.slow
def test_splitting_the_model_splits_its_memory() -> None:
    whole = prediction_of(step_config_of("llama3-70b", gpus=64, micro_batch_size=1))
    for name in ("tensor_parallel_degree", "context_parallel_degree"):
        split = prediction_of(
            step_config_of("llama3-70b", gpus=64, micro_batch_size=1, **{name: 8})
        )
        assert split.device_bytes < whole.device_bytes
        assert split.step_seconds < whole.step_seconds  # fewer tokens


@parametrize(
    ("preset", "changes"),
    [
        ("llama2-34b", {"pipeline_parallel_degree": 2}),
        ("llama2-34b", {}),
        ("llama2-34b", {"activation_checkpointing": "full"}),
        ("llama2-34b", {"tensor_parallel_degree": 2}),
        ("olmoe-1b-7b", {"tensor_parallel_degree": 2}),
    ],
    fast=(0,),
)
def test_an_estimate_of_a_search_is_near_the_prediction(
    preset: str, changes: dict[str, Any]
) -> None:
    step_config = step_config_of(preset, gpus=32, accumulation=4, micro_batch_size=1, **changes)
    machine = Machine(data_sheets().gpu("h100-80"), data_sheets().network("infiniband-ndr"), 8)
    estimated = estimate(step_config, machine.gpu, machine.rates("bf16"), 0.0)
    whole = prediction_of(step_config)
    assert estimated.step_seconds == pytest.approx(whole.step_seconds, rel=0.02)
    assert estimated.device_bytes == pytest.approx(whole.device_bytes, rel=0.05)


@pytest.mark.slow
def test_each_block_costs_what_its_own_window_makes_it_cost() -> None:
    long = step_config_of("gemma3-1b", gpus=8, micro_batch_size=1, sequence_length=32768)

    def attention(model: ModelConfig) -> float:
        return prediction_of(replace(long, model=model)).parts["attention"]

    layers = long.model.num_hidden_layers
    kinds = ("sliding_attention", "full_attention")
    windowed, full = (
        attention(replace(long.model, layer_types=(kind,) * layers)) for kind in kinds
    )
    assert full > 10 * windowed
    num_full = long.model.layer_windows.count(None)
    assert (num_full, layers) == (4, 26)
    assert attention(long.model) == pytest.approx(
        (num_full * full + (layers - num_full) * windowed) / layers
    )
    machine = Machine(data_sheets().gpu("h100-80"), data_sheets().network("infiniband-ndr"), 8)
    estimated, whole = estimate(long, machine.gpu, machine.rates("bf16"), 0.0), prediction_of(long)
    assert estimated.parts["attention"] == pytest.approx(whole.parts["attention"])
    assert estimated.step_seconds == pytest.approx(whole.step_seconds, rel=0.02)
    assert estimated.device_bytes == pytest.approx(whole.device_bytes, rel=0.05)


def test_an_estimate_of_a_search_counts_dense_and_sparse_layers_as_often_as_there_are() -> None:
    step_config = replace(
        step_config_of("nano-moe", micro_batch_size=16), model=replace(MIXED, num_hidden_layers=24)
    )
    machine = Machine(data_sheets().gpu("h100-80"), data_sheets().network("infiniband-ndr"), 8)
    estimated, whole = (
        estimate(step_config, machine.gpu, machine.rates("bf16"), 0.0),
        prediction_of(step_config),
    )
    assert estimated.parts["products of experts"] == pytest.approx(
        whole.parts["products of experts"]
    )
    assert estimated.device_bytes == pytest.approx(whole.device_bytes, rel=0.05)


@pytest.mark.slow
def test_every_entry_of_the_hardware_file_can_be_planned_for_and_names_its_source() -> None:
    for gpu in data_sheets().gpus:
        assert gpu.source
        step_config = step_config_of(
            "124m", sequence_length=512, dtype="bf16" if "bf16" in gpu.tflops else "fp32"
        )
        assert prediction_of(step_config, gpu=gpu.name).tokens_per_second > 0
        if gpu.matches:
            assert data_sheets().find(f"NVIDIA {gpu.matches} 1GB") == gpu
    for network in data_sheets().networks:
        assert prediction_of(step_config_of(gpus=16), network=network.name).tokens_per_second > 0


# --- the verb -------------------------------------------------------------------------------------


def test_a_plan_says_memory_speed_and_cost_with_intervals(
    capfd: pytest.CaptureFixture[str],
) -> None:
    assert run(["plan", str(RECIPE), "--gpus", "128", "--gpu_type", "a100-80", "--price", "2"]) == 0
    text = capfd.readouterr().out
    for words in (
        "from data sheets: NVIDIA A100 data sheet",
        "optimizer states",
        "peak in: ",
        "fits into",
        "MFU",
    ):
        assert words in text
    for words in (
        "matrix products",
        "most time: ",
        "GPU-hours",
        " kWh",
        "a GPU-hour",
        "Young-Daly",
        "goodput",
        " to ",
    ):
        assert words in text
    planned = plan_json(capfd, RECIPE, "--gpus", 128, "--gpu_type", "a100-80", "--price", 2)
    assert max(planned["timeline_bytes"]) == planned["live_bytes"]
    low, high = planned["tokens_per_second_per_gpu_interval"]
    assert low < planned["tokens_per_second_per_gpu"] < high
    assert sum(planned["memory_bytes"].values()) == pytest.approx(planned["device_bytes"], rel=1e-6)
    cost = planned["run"]
    assert cost["price"] == pytest.approx(2 * cost["gpu_hours"])
    for name, (least, most) in planned["run_intervals"].items():
        assert least < cost[name] < most
    assert cost["tokens"] == 1_000_000 * 256 * 4096
    assert planned["fits"] is True


@pytest.mark.slow
def test_a_plan_of_a_mixture_says_its_total_and_active_parameters(
    capfd: pytest.CaptureFixture[str],
) -> None:
    words = ["plan", "--model.preset", "olmoe-1b-7b", "--gpus", "8"]
    total, active = (
        count(get_preset("olmoe-1b-7b"))
        for count in (lambda model: parameter_count(model).total, active_parameters)
    )
    assert run(words) == 0
    assert (
        f"\n{total:,} parameters; experts: 8 of 64 for each token, in 16 layers, so {active:,}"
        " parameters are active\n" in (capfd.readouterr().out)
    )
    planned = plan_json(capfd, *words[1:])
    assert (planned["parameters"], planned["active_parameters"]) == (total, active)
    assert run([*words, "--search", "--configurations", "40"]) == 0
    assert "why slower" in capfd.readouterr().out


@pytest.mark.slow
def test_a_preset_keeps_its_vocabulary_unless_data_is_named(
    tiny_tokens: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """What lies in the default folder, as after the quickstart, is not the data of a run that does
    not name it.
    """
    shutil.copytree(tiny_tokens, PretrainDataOptions().folder)
    words, line = (
        ["plan", "--model.preset", "smollm-135m"],
        "\nvocabulary 49,152 tokens, the model's own\n",
    )
    for more in ([], ["--search", "--configurations", "1"]):
        assert run([*words, *more]) == 0
        assert line in capfd.readouterr().out
    assert (
        plan_json(capfd, *words[1:])["parameters"]
        == parameter_count(get_preset("smollm-135m")).total
    )
    assert run([*words, "--data.folder", str(tiny_tokens)]) == 0
    assert f"\nvocabulary 512 tokens, of the tokenizer in {tiny_tokens}\n" in capfd.readouterr().out
    # A model that is given by its sizes has no vocabulary of its own: a run would take that of the
    # default folder.
    sizes = [
        "--model.hidden_size",
        "64",
        "--model.num_hidden_layers",
        "1",
        "--model.num_attention_heads",
        "2",
    ]
    assert run(["plan", *sizes]) == 0
    assert (
        f"\nvocabulary 512 tokens, of the tokenizer in {PretrainDataOptions().folder}\n"
        in capfd.readouterr().out
    )
    shutil.rmtree(PretrainDataOptions().folder)
    assert run(["plan", *sizes]) == 0
    assert "\nvocabulary 4,096 tokens, lmforge's default\n" in capfd.readouterr().out


def test_a_chip_is_known_by_its_name_and_each_gpu_has_a_sequence(
    capfd: pytest.CaptureFixture[str],
) -> None:
    words = ["--model.preset", "llama2-7b", "--gpus", 256, "--train.steps", 10**6]
    same = plan_json(capfd, *words, "--gpu_type", "H100")
    assert same == plan_json(
        capfd, *words, "--gpu_type", "h100-80", "--train.global_batch_size", 256
    )
    assert run(["plan", *map(str, words)]) == 0
    printed = capfd.readouterr().out
    assert printed.startswith(
        "train.global_batch_size = 256, one sequence for each GPU, since the default is "
    )
    assert re.search(rf": {same['run']['days']:,.1f} days \(", printed), printed


@pytest.mark.slow
def test_what_offload_keeps_on_a_host_is_part_of_the_verdict(
    capfd: pytest.CaptureFixture[str],
) -> None:
    """405 billion parameters, each with 16 bytes on one host of 2 TiB, or on eight."""
    words = [
        "--model.preset",
        "llama3.1-405b",
        "--parallel.cpu_offload",
        "true",
        "--data.sequence_length",
        2048,
    ]
    words += [
        "--parallel.activation_checkpointing",
        "full",
        "--train.steps",
        1000,
        "--train.micro_batch_size",
        1,
    ]
    one, eight = (plan_json(capfd, *words, "--gpus", 8 * hosts) for hosts in (1, 8))
    assert (one["fits"], eight["fits"]) == (False, True), (one["advice"], eight["advice"])
    assert one["device_bytes"] < one["capacity_bytes"]
    assert re.fullmatch(
        r"it takes 6,\d{3}\.\d GiB of host memory on each host, .*, which has 2,048\.0 GiB; .*",
        one["advice"],
    )


def test_offloaded_activations_are_of_two_blocks_on_the_gpu_and_of_all_on_the_host() -> None:
    base = step_config_of(gpus=64)
    layers = base.model.num_hidden_layers
    for mode in ("none", "full"):
        kept, moved = (
            prediction_of(
                base.with_options(activation_checkpointing=mode, activation_offload=offload)
            )
            for offload in (False, True)
        )
        of_a_block = moved.offloaded_bytes / layers
        assert kept.memory["activations"] == pytest.approx(layers * of_a_block, rel=0.1)
        at_most = 2.2 * of_a_block if mode == "none" else kept.memory["activations"]
        assert of_a_block < moved.memory["activations"] <= at_most
        copies = 2 * moved.offloaded_bytes / (data_sheets().gpu("h100-80").pcie_gb_s * 1e9)
        assert copies < moved.seconds["copies of activations"] < 1.5 * copies
        # Copies of inputs are hidden, those of all activations are not.
        assert (moved.step_seconds > 1.2 * kept.step_seconds) == (mode == "none")


def test_a_search_tries_to_offload_activations_on_gpus_alone() -> None:
    tried = {
        on_gpu: {
            each.options.activation_checkpointing
            for each in candidates(
                step_config_of("124m", sequence_length=512, on_gpu=on_gpu), 8, False
            )
            if each.options.activation_offload
        }
        for on_gpu in (True, False)
    }
    assert tried == {True: {"none", "full"}, False: set()}


@pytest.mark.slow
def test_a_search_leaves_out_what_the_host_cannot_hold() -> None:
    base, gpu = step_config_of("124m", gpus=1, sequence_length=512), data_sheets().gpu("h100-80")
    results = {}
    for name, sheet in (("roomy", gpu), ("small", gpu.model_copy(update={"host_memory_gb": 0.5}))):
        machine = Machine(sheet, None, 1)
        results[name] = search(base, 2, sheet, machine.rates("bf16"), gpu.memory_bytes, 40, False)
    assert max(each.host_bytes for each in results["roomy"].fitting) > 2**29
    assert not results["roomy"].too_large
    assert 0 < max(each.host_bytes for each in results["small"].fitting) <= 2**29
    assert min(each.host_bytes for each in results["small"].too_large) > 2**29
    assert " on a host" in results["small"].too_large[0].needs


def test_a_search_stores_states_in_8_bits_where_nothing_fits_otherwise(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    words = [
        "--model.preset",
        "124m",
        "--gpu_type",
        "cpu",
        "--train.global_batch_size",
        1,
        "--data.sequence_length",
        64,
    ]
    least = ["--parallel.activation_checkpointing", "full"]
    planned = [
        plan_json(capfd, *words, *least, "--optimizer.state_dtype", dtype)
        for dtype in ("fp32", "8bit")
    ]
    whole, fewer = (each["device_bytes"] for each in planned)
    assert fewer < 0.9 * whole
    usable = (fewer + whole) / 2 / data_sheets().gpu("cpu").memory_bytes
    written = tmp_path / "found.toml"
    found = plan_json(capfd, *words, "--plan.usable", usable, "--search", "--write", written)
    assert {each["optimizer.state_dtype"] for each in found["best"]} == {"8bit"}
    assert read_config(written).optimizer.state_dtype == "8bit"


def test_a_plan_that_does_not_fit_says_what_would(capfd: pytest.CaptureFixture[str]) -> None:
    words = [RECIPE, "--gpus", 128, "--gpu_type", "a100-40"]
    planned = plan_json(capfd, *words)
    assert planned["fits"] is False
    ways = planned["advice"].removeprefix("by estimate would fit: ").split(", or ")
    assert len(ways) > 1
    for way in ways:
        name, _, value = way.partition(" (it was ")[0].partition(" = ")
        assert plan_json(capfd, *words, f"--{name}", value)["fits"] is True


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--gpu_type", "h100-8"], '--gpu_type: no "h100-8"; nearest: h100-80, '),
        (["--network", "infiniband"], '--network: no "infiniband"; nearest: infiniband-'),
        (["--gpus", 512], "512 ranks for a global batch of 256 sequences: a rank would have none"),
        (
            ["--gpus", 8, "--parallel.tensor_parallel_degree", 3],
            "parallel.tensor_parallel_degree = 3: num_attention_heads",
        ),
        (
            ["--gpus", 8, "--parallel.pipeline_parallel_degree", 64],
            "do not fill that; start at least 64",
        ),
        (
            ["--gpus", 8, "--parallel.shard_degree", 3],
            "parallel.shard_degree = 3: 8 ranks do not divide",
        ),
        (
            ["--gpus", 8, "--gpu_type", "a100-80", "--train.float8", "true"],
            "train.float8: a100-80 has no float8 arithmetic",
        ),
        (
            ["--gpus", 8, "--train.float8", "true", "--train.dtype", "fp32"],
            "train.float8: the rest is computed in bf16",
        ),
        (
            ["--gpus", 8, "--gpu_type", "v100"],
            "train.dtype: no bf16 among the tflops of v100; use train.dtype = fp32",
        ),
        (["--model.source", "nobody/nothing"], "nobody/nothing"),
        (["--write", "a.toml"], "--write: only with --search"),
        (["--search", "--finalists", 2], "--finalists: only with --write"),
        (["--search", "--finalists", 2, "--write", "."], "--write: . is a folder; name a file"),
        (
            ["--search", "--write", "a.toml", "--finalists", 25],
            "--plan.finalists: expected a number of at most 24, got 25",
        ),
        (
            ["--gpus", 12, "--gpus_per_host", 5],
            "--gpus 12 do not fill hosts of 5; use 10 or 15, or another --gpus_per_host",
        ),
        (
            ["--train.float8", "true", "--model.intermediate_size", 11000],
            "gate_proj is 4096 × 11000, and float8 needs multiples",
        ),
        (
            [
                "--train.float8",
                "true",
                "--model.preset",
                "gpt2-124m",
                "--data.sequence_length",
                512,
            ],
            "train.float8: a gpt2 model has no linear layers",
        ),
        (
            ["--train.float8", "true", "--model.preset", "nano-moe"],
            "train.float8: not with a mixture of experts",
        ),
        (["--hardware", "nothing.toml"], "--hardware: nothing.toml: no such file"),
        (["--gpus", 0], "--plan.gpus: expected a"),
        (["--gpus", 8, "--train.epochs", 2], "train.epochs = 2: a plan does not read the data"),
    ],
)
def test_bad_input_is_one_line(
    tmp_path: Path,
    refused: Refusal,
    monkeypatch: pytest.MonkeyPatch,
    words: list[object],
    message: str,
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(tmp_path)
    assert message in refused("plan", RECIPE, *words)
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize("gpus", [8, 2**20])
def test_a_run_of_any_number_of_gpus_has_a_cost(
    gpus: int, capfd: pytest.CaptureFixture[str]
) -> None:
    cost = plan_json(capfd, RECIPE, "--gpus", gpus, "--train.global_batch_size", gpus)["run"]
    assert 0 < cost["goodput"] <= 1
    assert cost["checkpoint_every_steps"] >= 1


def test_a_gpu_of_ones_own_is_read_from_a_table(
    tmp_path: Path, refused: Refusal, capfd: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "own.toml"
    table = "name = 'Mine'\nmemory_gb = 80\nmemory_gb_s = 2000\nlink_gb_s = 100\n"
    file.write_text(f"[[gpus]]\n{table}tflops = {{ bf16 = 500 }}\n")
    planned = plan_json(capfd, RECIPE, "--gpus", 8, "--gpu_type", "mine", "--hardware", file)
    assert planned["tokens_per_second_per_gpu"] > 0
    file.write_text(f"[[gpus]]\n{table}tflops = {{ bf16 = -1 }}\n")
    assert str(file) in refused("plan", RECIPE, "--gpu_type", "mine", "--hardware", file)
    file.write_text("[[gpus]]\nname = 'mine'\n")
    assert "memory_gb" in refused("plan", RECIPE, "--gpu_type", "mine", "--hardware", file)


def test_a_gpu_without_the_peak_of_a_dtype_is_refused_in_it(
    tmp_path: Path, refused: Refusal
) -> None:
    file = tmp_path / "own.toml"
    words = ["plan", RECIPE, "--gpus", 8, "--gpu_type", "mine", "--hardware", file, "--train.dtype"]
    head = "[[gpus]]\nname = 'mine'\nmemory_gb = 80\nmemory_gb_s = 2000\nlink_gb_s = 100\n"
    file.write_text(f"{head}tflops = {{ bf16 = 100 }}\n")
    assert "no fp32 among the tflops of mine; use train.dtype = bf16" in refused(*words, "fp32")
    file.write_text(f"{head}tflops = {{ tf32 = 100 }}\n")
    assert "no bf16 among the tflops of mine; give bf16 or fp32 in its entry" in refused(
        *words, "bf16"
    )
    file.write_text(f"{head}tflops = {{ bf61 = 100 }}\n")
    assert "bf61" in refused(*words, "bf16")


def test_entries_of_ones_own_may_have_brackets_and_the_name_of_a_network_leaves_gpus_alone(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "own.toml"
    table = (
        "name = 'mine'\nmemory_gb = 80\nmemory_gb_s = 2000\nlink_gb_s = 100\ntflops = { bf16 ="
        " 500 }\n"
    )
    file.write_text(
        f"[[gpus]]\n{table}source = 'a page [/specs]'\n[[networks]]\nname = 'h200'\ngb_s = 20\n"
    )
    words = [
        "plan",
        str(RECIPE),
        "--gpus",
        "16",
        "--hardware",
        str(file),
        "--network",
        "h200",
        "--gpu_type",
    ]
    assert run([*words, "mine"]) == 0
    assert (
        "16 × mine, 8 per host, h200; constants from data sheets: a page [/specs]"
        in capfd.readouterr().out
    )
    assert run([*words, "h200"]) == 0


def test_a_search_writes_a_recipe_that_fits_and_says_why_others_lose(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], refused: Refusal
) -> None:
    out = tmp_path / "new" / "found.toml"
    words = [
        "plan",
        str(RECIPE),
        "--gpus",
        "16",
        "--gpu_type",
        "h100-80",
        "--search",
        "--configurations",
        "300",
    ]
    assert run([*words, "--write", str(out)]) == 0
    text = capfd.readouterr().out
    assert "300 configurations tried" in text
    assert "does not fit: " in text
    assert " slower: " in text
    read_config(out)
    assert "plan" not in tomllib.loads(out.read_text())
    result = plan_json(capfd, out, "--gpus", 16, "--gpu_type", "h100-80")
    given = plan_json(capfd, RECIPE, "--gpus", 16, "--gpu_type", "h100-80")
    assert result["fits"]
    assert result["tokens_per_second_per_gpu"] >= given["tokens_per_second_per_gpu"]
    assert run(["pretrain", str(out), "--dry-run", "--launch.processes", "16"]) == 0
    capfd.readouterr()
    assert "exists already; name another file" in refused(*words, "--write", out)
    assert f"--write: {out}" in refused(*words, "--write", out / "below-a-file.toml")


def test_finalists_are_written_all_or_none_and_each_says_what_it_is(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], refused: Refusal
) -> None:
    out, second, third = (
        tmp_path / name for name in ("found.toml", "found-2.toml", "found-3.toml")
    )
    words = [
        "plan",
        str(RECIPE),
        "--gpus",
        "16",
        "--gpu_type",
        "h100-80",
        "--search",
        "--configurations",
        "100",
    ]
    words += ["--write", str(out), "--finalists", "3"]
    third.touch()
    assert refused(*words) == f"--write: {third} exists already; name another file"
    assert [*tmp_path.iterdir()] == [third]
    third.unlink()
    assert run([*words, "--output", "json"]) == 0
    printed = capfd.readouterr()
    best = json.loads(printed.out)["best"]
    for file, result in zip((out, second, third), best, strict=False):
        assert file.read_text().startswith(
            f"# Found by `lmforge plan --search` for 16 x h100-80: {result['configuration']}.\n"
        )
        planned = plan_json(capfd, file, "--gpus", 16, "--gpu_type", "h100-80")
        assert planned["tokens_per_second_per_gpu"] == pytest.approx(
            result["tokens_per_second_per_gpu"], rel=1e-9
        )
    last = printed.err.splitlines()[-1]
    assert last == "to measure them: on 16 GPUs, torchrun … -m lmforge bench FILE for each"


def test_fewer_finalists_than_requested_are_said_and_a_comma_in_a_name_is_in_no_sweep(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    words = [
        "plan",
        str(RECIPE),
        "--gpus",
        "8",
        "--gpu_type",
        "h100-80",
        "--search",
        "--configurations",
        "60",
    ]
    assert run([*words, "--write", str(tmp_path / "a,b.toml"), "--finalists", "24"]) == 0
    *wrote, fewer, measure = capfd.readouterr().err.splitlines()
    assert 1 < len(wrote) == len([*tmp_path.iterdir()]) < 24
    assert fewer == f"--finalists 24: only {len(wrote)} are known to fit"
    assert measure == "to measure them: lmforge bench FILE --launch.processes 8 for each"


def test_a_short_run_is_said_in_seconds_and_small_amounts_are_not_none(
    capfd: pytest.CaptureFixture[str],
) -> None:
    assert (
        run(["plan", str(ROOT / "recipes" / "quickstart.toml"), "--gpus", "1", "--price", "2"]) == 0
    )
    [cost] = [line for line in capfd.readouterr().out.splitlines() if line.startswith("run ")]
    assert re.search(
        r"tokens: \d+s \(\d+s to \d+s\), 0\.\d+ GPU-hours \(0\.\d+ to 0\.\d+\), 0\.\d+ kWh ", cost
    )


def test_a_search_without_a_fitting_configuration_fails_in_one_line(
    tmp_path: Path, refused: Refusal
) -> None:
    words = [
        "plan",
        ROOT / "recipes" / "llama3.1-405b.toml",
        "--gpus",
        1,
        "--gpu_type",
        "rtx-4090",
        "--search",
    ]
    printed = refused(*words, "--write", tmp_path / "a.toml", status=1)
    assert "no configuration fits into" in printed
    assert printed.endswith("; use more GPUs")
    assert refused(*words, "--configurations", 1, status=1).endswith(
        "; raise --configurations, or use more GPUs"
    )
    assert not (tmp_path / "a.toml").exists()


@pytest.mark.slow
def test_published_rows_are_predicted(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "plan.py")],
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    rows = json.loads((ROOT / "benchmarks" / "published.json").read_text())["rows"]
    assert all(row["source"] for row in rows)
    assert "not scored: length and batch" in done.stdout
    assert f"of {len(rows) - 1} rows" in done.stdout


def test_the_hardware_file_is_in_the_package() -> None:
    assert HARDWARE_FILE.is_file()
    assert 'plan" = ["hardware.toml"]' in (ROOT / "pyproject.toml").read_text()


# --- recipes that are not one pretraining with one sequence length --------------------------------


def tuned(folder: Path, *lines: str) -> Path:
    recipe = folder / "sft.toml"
    head = [
        "[run]",
        'stage = "sft"',
        "[model]",
        'preset = "llama3-8b"',
        "[train]",
        "steps = 10",
        "global_batch_size = 8",
    ]
    recipe.write_text(
        "\n".join([*head, "[data]", 'files = ["a.jsonl"]', "sequence_length = 2048", *lines, ""])
    )
    return recipe


@pytest.mark.slow
def test_a_plan_of_adapters_has_frozen_weights_without_gradients_and_optimizer_states(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], refused: Refusal
) -> None:
    whole = plan_json(capfd, tuned(tmp_path), "--gpus", 8)
    recipe = tuned(tmp_path, "[lora]", "rank = 16")
    adapted = plan_json(capfd, recipe, "--gpus", 8)
    total = parameter_count(get_preset("llama3-8b")).total
    # Of a rank of 8: two moments in fp32, over 8 ranks.
    adapters = adapted["memory_bytes"]["optimizer states"]
    assert 0 < adapters < total / 100
    assert adapted["memory_bytes"]["weights"] == pytest.approx(4 * (total + adapters) / 8, rel=0.01)
    assert (
        adapted["memory_bytes"]["optimizer states"]
        < whole["memory_bytes"]["optimizer states"] / 100
    )
    assert adapted["device_bytes"] < whole["device_bytes"]
    assert adapted["run"]["checkpoint_bytes"] < whole["run"]["checkpoint_bytes"] / 2
    assert adapted["step_seconds"] < whole["step_seconds"]
    assert (
        run(
            [
                "plan",
                str(recipe),
                "--gpus",
                "8",
                "--search",
                "--configurations",
                "30",
                "--write",
                str(tmp_path / "b.toml"),
            ]
        )
        == 0
    )
    capfd.readouterr()
    assert read_config(tmp_path / "b.toml").of_stage == "sft"
    assert "lora.rank: not with parallel.tensor" in refused(
        "plan", recipe, "--parallel.tensor_parallel_degree", 2
    )


def test_a_plan_says_where_gradients_may_be_reduced_once_a_step(
    capfd: pytest.CaptureFixture[str],
) -> None:
    words = [
        "plan",
        str(RECIPE),
        "--gpus",
        "8",
        "--train.micro_batch_size",
        "1",
        "--train.global_batch_size",
        "16",
    ]
    assert run(words) == 0
    said = capfd.readouterr().out
    assert "once per step" not in said
    assert re.search(
        r"parallel.reduce_every_micro_batch = false fits too: \d+\.\d% faster, \d+\.\d GiB more per"
        r" rank",
        said,
    )
    assert run([*words, "--parallel.reduce_every_micro_batch", "false"]) == 0
    said = capfd.readouterr().out
    assert "gradients reduced once per step (reduce_every_micro_batch = false)" in said
    assert "fits too" not in said
    assert run([*words, "--gpu_type", "rtx-4090"]) == 0
    assert "fits too" not in capfd.readouterr().out


def folder_of(folder: Path, model_type: str, **fields: Any) -> Path:
    sizes = {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "vocab_size": 128,
        "intermediate_size": 128,
    }
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": model_type, **sizes, **fields}))
    return folder


MACHINES = (
    ("--gpus", 8),
    ("--gpus", 1, "--gpu_type", "cpu"),
    ("--gpus", 8, "--train.compile", "off"),
)


# In `make test` each model and each machine.
@parametrize(
    ("model_type", "machine"),
    [*itertools.product(("gpt_neox", "gemma2", "phi3"), MACHINES)],
    fast=(0, 4, 8),
)
def test_a_wrapped_model_is_planned(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], model_type: str, machine: tuple[object, ...]
) -> None:
    folder = folder_of(
        tmp_path / "model", model_type, head_dim=32, num_key_value_heads=2, pad_token_id=0
    )
    words = ("--model.source", folder, "--data.sequence_length", 256, *machine)
    wrapped = plan_json(capfd, *words, "--model.implementation", "transformers")
    assert wrapped["tokens_per_second_per_gpu"] > 0
    assert wrapped["memory_bytes"]["activations"] > 0


def test_a_wrapped_model_is_planned_as_ours_is(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Its matrices and states are the same; its operators differ."""
    folder = folder_of(tmp_path / "model", "llama", rms_norm_eps=1e-6, tie_word_embeddings=False)
    words = (
        "--model.source",
        folder,
        "--data.sequence_length",
        256,
        "--gpus",
        8,
        "--train.micro_batch_size",
        4,
    )
    ours, wrapped = (
        plan_json(capfd, *words, "--model.implementation", each)
        for each in ("lmforge", "transformers")
    )
    for name in ("weights", "gradients", "optimizer states"):
        assert wrapped["memory_bytes"][name] == pytest.approx(ours["memory_bytes"][name], rel=1e-3)
    assert wrapped["seconds"]["matrix products"] == pytest.approx(
        ours["seconds"]["matrix products"], rel=1e-6
    )


def test_a_model_whose_work_depends_on_its_data_is_refused_in_one_line(
    tmp_path: Path, refused: Refusal
) -> None:
    experts = {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "num_key_value_heads": 2,
        "head_dim": 32,
    }
    folder = folder_of(tmp_path / "model", "mixtral", **experts)
    words = (
        "--model.source",
        folder,
        "--model.implementation",
        "transformers",
        "--gpus",
        8,
        "--data.sequence_length",
        256,
    )
    assert "a mixtral model cannot be traced without data: " in refused("plan", *words)


def aligned(folder: Path, method: str, *lines: str) -> Path:
    recipe = folder / f"{method}.toml"
    head = [
        "[run]",
        'stage = "align"',
        "[model]",
        f'source = "{folder / "model"}"',
        "[train]",
        "steps = 10",
    ]
    head += [
        "global_batch_size = 16",
        "micro_batch_size = 2",
        "[data]",
        'files = ["a.jsonl"]',
        "sequence_length = 256",
    ]
    recipe.write_text("\n".join([*head, "[align]", f'method = "{method}"', *lines, ""]))
    return recipe


@pytest.fixture
def small_folder(tmp_path: Path) -> Path:
    folder_of(tmp_path / "model", "llama", rms_norm_eps=1e-6, num_key_value_heads=2)
    return tmp_path


def test_preference_methods_are_planned_with_their_reference(
    small_folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    plans = {
        name: plan_json(capfd, aligned(small_folder, name), "--gpus", 8)
        for name in ("orpo", "simpo", "dpo", "reward")
    }
    plans["kto"] = plan_json(capfd, aligned(small_folder, "kto"), "--gpus", 8)
    precomputed = plan_json(
        capfd, aligned(small_folder, "dpo"), "--gpus", 8, "--align.reference", "precomputed"
    )
    assert (
        plans["orpo"]["step_seconds"]
        == plans["simpo"]["step_seconds"]
        == precomputed["step_seconds"]
    )
    assert precomputed["device_bytes"] == plans["simpo"]["device_bytes"]
    for name in ("dpo", "kto"):
        memory = plans[name]["memory_bytes"]
        assert memory["reference"] == memory["weights"]
        # A forward pass more, without gradients.
        assert 1.15 < plans[name]["step_seconds"] / precomputed["step_seconds"] < 1.7
    assert plans["reward"]["seconds"]["head and loss"] < plans["simpo"]["seconds"]["head and loss"]
    assert plans["reward"]["memory_bytes"]["weights"] < plans["simpo"]["memory_bytes"]["weights"]
    off = plan_json(
        capfd,
        aligned(small_folder, "dpo", "[lora]", "rank = 2"),
        "--gpus",
        8,
        "--align.reference",
        "adapters-off",
    )
    assert "reference" not in off["memory_bytes"]
    none = plan_json(
        capfd,
        aligned(small_folder, "dpo", "[lora]", "rank = 2"),
        "--gpus",
        8,
        "--align.reference",
        "precomputed",
    )
    assert off["step_seconds"] > 1.15 * none["step_seconds"]


def test_grpo_is_refused_in_one_line(small_folder: Path, refused: Refusal) -> None:
    recipe = aligned(small_folder, "grpo", "[rollout]", 'reward_functions = ["length"]')
    assert "align.method = grpo is not predicted: most of its step samples completions" in refused(
        "plan", recipe
    )


def test_phases_with_other_lengths_have_times_of_their_own_and_the_memory_of_the_longest(
    capfd: pytest.CaptureFixture[str],
) -> None:
    words = [
        "--model.preset",
        "llama3-8b",
        "--train.global_batch_size",
        16,
        "--train.steps",
        100,
        "--gpus",
        8,
    ]
    long = plan_json(capfd, *words, "--data.sequence_length", 4096)
    short = plan_json(capfd, *words, "--data.sequence_length", 1024)
    phases = [
        "--data.sequence_length",
        4096,
        "--data.phases",
        "[{steps = 90, sequence_length = 1024}, {}]",
    ]
    mixed = plan_json(capfd, *words, *phases)
    assert mixed["device_bytes"] == long["device_bytes"]
    assert [(each["steps"], each["sequence_length"]) for each in mixed["phases"]] == [
        (90, 1024),
        (10, 4096),
    ]
    seconds = 90 * short["step_seconds"] + 10 * long["step_seconds"]
    assert sum(each["steps"] * each["step_seconds"] for each in mixed["phases"]) == pytest.approx(
        seconds, rel=0.02
    )
    assert mixed["run"]["tokens"] == 16 * (90 * 1024 + 10 * 4096)
    assert run(["plan", *map(str, words + phases)]) == 0
    assert "phase      90 steps with sequences of 1,024 tokens: " in capfd.readouterr().out
    assert run(["plan", *map(str, words + phases), "--search", "--configurations", "100"]) == 0
    text = capfd.readouterr().out
    assert "the search is for the longest, 4,096 tokens" in text
    assert "--train.float8 true" in text
    assert (
        run(
            [
                "plan",
                *map(str, words),
                "--gpu_type",
                "A100-80",
                "--search",
                "--configurations",
                "100",
            ]
        )
        == 0
    )
    assert "float8" not in capfd.readouterr().out


@pytest.mark.slow
def test_a_search_simulates_few_blocks_for_each_configuration_and_the_whole_model_for_the_best(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    simulate_stage, depths = prediction_module._simulate, list[int]()

    def counted(step_config: StepConfig, rates: Any, stage: Any) -> Any:
        depths.append(stage.blocks)
        return simulate_stage(step_config, rates, stage)

    monkeypatch.setattr(prediction_module, "_simulate", counted)
    base = step_config_of("llama2-7b", gpus=8)
    machine = Machine(data_sheets().gpu("h100-80"), None, 8)
    trace_block.cache_clear()
    most, layers = 150, base.model.num_hidden_layers
    result = search(
        base, 64, machine.gpu, machine.rates("bf16"), machine.gpu.memory_bytes, most, False
    )
    estimated = len(result.fitting) + len(result.too_large)
    assert (result.tried, result.refused) == (most, most - estimated)
    assert estimated > 0.9 * most

    def stages(candidate: Candidate) -> int:
        return 1 if candidate.step_config.pipeline == 1 else 2  # the first and the last

    def tries(candidate: Candidate) -> int:
        """With gradients that wait for the last micro-batch, where there is a choice, and without,
        where those do not fit.
        """
        return 1 + (
            can_reduce_once(candidate.step_config)
            and candidate.step_config.options.reduce_every_micro_batch is True
        )

    # All are estimated by two short models, and the best predicted in full.
    short = sum(2 * stages(each) * tries(each) for each in (*result.fitting, *result.too_large))
    assert {tries(each) for each in (*result.fitting, *result.too_large)} == {1, 2}
    assert sum(blocks in FEW_BLOCKS for blocks in depths) == short
    assert len(depths) - short == sum(stages(each) for each in result.fitting[:FINALISTS])
    assert max(depths) == layers
    # Each shape of a block is traced once: recomputing every second block, or every one, is the
    # same to a block.
    tried = [each.step_config for each in (*result.fitting, *result.too_large)]
    names = {"selective-blocks": "full"}
    shapes = {
        (each.tensor, names.get(mode, mode))
        for each in tried
        for mode in ("none", each.checkpointing.name)
    }
    assert trace_block.cache_info().misses == len(shapes)
