"""Tests that need a GPU, on one: strategies, compilation, memory, optimizers, offload, scoring,
decoding, NCCL, traces.

Tests that take `gpu_device` run on a CPU too, where they are rehearsed: `python tests/gpu.py
--device cpu`.
"""

import gc
import json
import pickle
import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lmforge.core.checkpoint.async_save import _HostStaging
from lmforge.core.data.batch import Batch
from lmforge.core.data.labels import FUSED_LOGITS_BYTES, loss_chunk_tokens
from lmforge.core.distributed.distributed import DistributedContext, destroy_distributed
from lmforge.core.distributed.rank_info import RankInfo
from lmforge.core.losses.language import NextTokenObjective, cross_entropy_and_z_loss
from lmforge.core.model.build import build_model
from lmforge.core.model.config import ModelConfig
from lmforge.core.model.init_weights import init_weights
from lmforge.core.model.layers import HeadOptions
from lmforge.core.model.state_bytes import count_all, optimizer_state_bytes
from lmforge.core.optim.optimizer import build_optimizer
from lmforge.core.options.sections import OptimizerOptions, ParallelOptions
from lmforge.core.parallel.activation_checkpointing import apply_activation_checkpointing
from lmforge.core.parallel.compiled import compiled_graph_count
from lmforge.core.parallel.ddp import DDPModel
from lmforge.core.parallel.dims import parallel_dims
from lmforge.core.parallel.parallel_model import ParallelModel, train_step
from lmforge.core.parallel.parallelize import parallelize
from lmforge.core.steps.bad_steps import BadStepDetector
from lmforge.lab.bench.parity import SMALL_MODEL, ParityData
from lmforge.lab.plan.operators import ActivationTracker
from lmforge.lab.plan.prediction.step_config import StepConfig
from lmforge.ops.monitor.flight_recorder import recent_collectives
from lmforge.post.reference import ReferenceModel, reference_logprobs
from lmforge.serve.decoding.incremental import incremental_decoder
from tests.conftest import Command
from tests.core.losses.oracle import whole_logits
from tests.distributed.gpu_models import gradients, language_model, trained
from tests.lab.plan.step_program import predicted_activation_bytes

pytestmark = pytest.mark.gpu


def test_every_strategy_of_one_gpu_agrees_with_one_process(
    lmforge: Command, gpu_device: torch.device
) -> None:
    done = lmforge("doctor", "--parity", "--device", gpu_device.type, "--steps", 3)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.skipif(
    torch.cuda.device_count() < 2,
    reason="needs two GPUs: DDP and FSDP1 shard nothing on one, and are refused",
)
def test_every_strategy_of_two_gpus_agrees_with_one_process(lmforge: Command) -> None:
    done = lmforge("doctor", "--parity", "--device", "cuda", "--steps", 3, "--processes", 2)
    assert done.returncode == 0, done.stdout + done.stderr


def test_offloaded_weights_train_as_those_on_the_gpu(
    lmforge: Command, tiny_options: list[str], tmp_path: Path, gpu_device: torch.device
) -> None:
    words = ["--parallel.engine", "fsdp2", "--parallel.cpu_offload"]
    results = {
        offload: trained(lmforge, tiny_options, tmp_path, offload, gpu_device.type, *words, offload)
        for offload in ("false", "true")
    }
    assert results["true"] == pytest.approx(results["false"], rel=1e-4)


def test_offloaded_activations_give_the_same_gradients_and_free_the_gpu(
    gpu_device: torch.device,
) -> None:
    """In page-locked memory and on a stream of its own, of a model whose activations are most of
    the memory.
    """
    config = replace(
        SMALL_MODEL,
        num_hidden_layers=8,
        hidden_size=256,
        intermediate_size=1024,
        num_attention_heads=4,
    )
    batch = (
        ParityData(sequences=16, sequence_length=1024).batch(0, config.vocab_size).to(gpu_device)
    )
    gradients, peaks = dict[bool, dict[str, Tensor]](), dict[bool, int]()
    for offload in (False, True):
        model = parallelize(
            init_weights(build_model(config, gpu_device), 0),
            NextTokenObjective().loss,
            dist_ctx=DistributedContext(RankInfo(), gpu_device, None),
            dtype=torch.bfloat16,
            options=ParallelOptions(activation_offload=offload),
        )
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        model.forward_backward(
            [batch[:8], batch[8:]], torch.tensor(9.0, device=gpu_device), lambda phase: None
        )
        peaks[offload] = torch.cuda.max_memory_allocated() - before
        gradients[offload] = {
            name: each.grad.cpu()
            for name, each in model.model.named_parameters()
            if each.grad is not None
        }
        del model
    for name, expected in gradients[False].items():  # attention sums in any order
        difference = (gradients[True][name] - expected).norm()
        assert difference <= 1e-2 * expected.norm(), name
    assert peaks[True] < 0.6 * peaks[False], peaks


def small_model(
    device: torch.device, config: ModelConfig = SMALL_MODEL, **options: Any
) -> ParallelModel:
    return parallelize(
        init_weights(build_model(config, device), 0),
        reference_logprobs,
        dist_ctx=DistributedContext(RankInfo(), device, None),
        dtype=torch.bfloat16,
        options=ParallelOptions(**options),
    )


def test_scoring_long_sequences_keeps_no_matrix_of_scores() -> None:
    device, length, sequences = torch.device("cuda", 0), 4096, 2
    model = small_model(device)
    tokens = torch.zeros(sequences, length, dtype=torch.int64)
    positions = torch.arange(length).expand(sequences, -1)
    batch = Batch(tokens, tokens, positions, torch.zeros(sequences, length, dtype=torch.int32)).to(
        device
    )
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    ReferenceModel(model).logprobs(batch)
    scores = sequences * SMALL_MODEL.num_attention_heads * length * length * 2
    assert torch.cuda.max_memory_allocated() - before < scores


def test_a_model_with_small_heads_trains_with_dense_masks(gpu_device: torch.device) -> None:
    config = ModelConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=4,
    )
    batch = ParityData(sequences=2).batch(0, 64).to(gpu_device)
    assert torch.isfinite(ReferenceModel(small_model(gpu_device, config)).logprobs(batch)).all()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"state_dtype": "bf16"},
        {"name": "muon"},
        {"state_dtype": "8bit"},
        {"name": "muon", "state_dtype": "8bit"},
        {"name": "muon", "state_dtype": "bf16"},
        {"stochastic_rounding": True},
        {"name": "muon", "state_dtype": "8bit", "stochastic_rounding": True},
    ],
    ids=lambda options: " ".join(map(str, options.values())),
)
def test_no_optimizer_lets_the_host_wait_for_the_gpu(options: dict[str, Any]) -> None:
    objective, device = NextTokenObjective(), torch.device("cuda", 0)
    dist_ctx = DistributedContext(RankInfo(), device, None)
    masters = torch.bfloat16 if options.get("stochastic_rounding") else torch.float32
    model = parallelize(
        init_weights(build_model(SMALL_MODEL, device), 0).to(masters),
        objective.loss,
        dist_ctx=dist_ctx,
        dtype=torch.bfloat16,
        options=ParallelOptions(engine="single"),
    )
    optimizer = build_optimizer(model.model, OptimizerOptions(**options))
    detector = BadStepDetector(dist_ctx, spike_sigmas=6.0, window_steps=32)
    batches = [
        ParityData(sequences=4).batch(step, SMALL_MODEL.vocab_size).to(device) for step in range(3)
    ]
    for step, batch in enumerate(batches):
        # The first step makes what it needs.
        torch.cuda.set_sync_debug_mode("error" if step else "default")
        try:
            train_step(
                model,
                optimizer,
                [batch],
                objective.num_items,
                lr=1e-3,
                max_grad_norm=1.0,
                is_bad_step=partial(detector.check, step + 1),
            )
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_collectives_of_nccl_are_in_the_report_of_a_stall(gpu_device: torch.device) -> None:
    small_model(gpu_device, engine="fsdp2")  # initializes the process group of one rank
    try:
        dist.all_reduce(torch.ones(3, device=gpu_device))
        if gpu_device.type == "cuda":
            torch.cuda.synchronize()
        results = {record.operation for record in recent_collectives()}
        assert any(
            "all_reduce" in operation or "allreduce" in operation for operation in results
        ), results
    finally:
        destroy_distributed()


def test_host_memory_for_saves_is_page_locked_no_larger_than_the_tensor_and_given_back_in_the_end() -> (
    None
):
    tensor = torch.empty(3 * 2**20 + 1, dtype=torch.uint8, device="cuda")
    staging = _HostStaging(tensor.device)
    copy = staging.start_copy({"a": tensor})["a"]
    assert copy.is_pinned()
    assert copy.untyped_storage().nbytes() == tensor.nbytes
    staging.close()
    assert not copy.is_pinned()


def test_a_run_writes_what_the_gpu_held(
    lmforge: Command, tiny_options: list[str], tmp_path: Path
) -> None:
    trained(lmforge, tiny_options, tmp_path, "a", "cuda", "--log.memory_snapshot", "true")
    (snapshot,) = (tmp_path / "a" / "logs").rglob("*.memory.pickle")
    assert pickle.loads(snapshot.read_bytes())["segments"]


# --- one rank, in this process --------------------------------------------------------------------


def test_ddp_with_one_rank_of_nccl_computes_the_gradient_of_one_process(
    gpu_device: torch.device,
) -> None:
    with language_model(gpu_device) as alone:
        expected = gradients(alone, gpu_device)
    backend = "cpu:gloo,cuda:nccl" if gpu_device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        model, objective = (
            init_weights(build_model(SMALL_MODEL, gpu_device), 0),
            NextTokenObjective(),
        )
        dist_ctx = DistributedContext(RankInfo(), gpu_device, None)
        ddp = DDPModel(
            model, objective.loss, dist_ctx, parallel_dims(ParallelOptions(), 1, 1), None, None
        )
        result = gradients(ddp, gpu_device)
    finally:
        destroy_distributed()
    for ours, theirs in zip(result, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("engine", "mode"), [("single", "full"), ("fsdp2", "selective-ops")])
def test_checkpointed_blocks_are_compiled_and_compute_the_same(
    engine: str, mode: str, gpu_device: torch.device
) -> None:
    with language_model(gpu_device) as plain:
        expected = gradients(plain, gpu_device)
    options: dict[str, Any] = {"engine": engine, "activation_checkpointing": mode}
    with language_model(gpu_device, compile_model=True, **options) as model:
        before = compiled_graph_count()
        result = gradients(model, gpu_device)
        assert compiled_graph_count() > before
    for ours, theirs in zip(result, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-5)


MIXTURE = replace(
    SMALL_MODEL,
    model_type="qwen3_moe",
    qk_norm=True,
    num_experts=5,
    num_experts_per_tok=2,
    moe_intermediate_size=36,
)


def test_a_mixture_of_experts_computes_what_it_does_on_a_cpu_compiled_too(
    gpu_device: torch.device,
) -> None:
    with language_model(torch.device("cpu"), MIXTURE) as model:
        expected = gradients(model, torch.device("cpu"))
    with language_model(gpu_device, MIXTURE) as model:
        for ours, theirs in zip(gradients(model, gpu_device), expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-5)
    flat = torch.cat([each.flatten() for each in expected])
    for compiled in (False, True):
        with language_model(gpu_device, MIXTURE, torch.bfloat16, compiled) as model:
            rounded = torch.cat([each.flatten() for each in gradients(model, gpu_device)])
        # Rounding sends a few tokens to other experts; the direction stays.
        assert torch.nn.functional.cosine_similarity(flat, rounded, dim=0) > 0.95


MEMORY_MODEL = ModelConfig(
    vocab_size=8192,
    hidden_size=512,
    intermediate_size=1536,
    num_hidden_layers=4,
    num_attention_heads=8,
    num_key_value_heads=4,
)


ACTIVATION_MODEL = replace(MEMORY_MODEL, vocab_size=512, hidden_size=256, intermediate_size=768)


@pytest.mark.parametrize("mode", ["none", "full"])
def test_activations_on_a_gpu_are_those_of_the_formula(mode: str, gpu_device: torch.device) -> None:
    sequences, length = 2, 256
    batch = (
        ParityData(sequences=sequences, sequence_length=length)
        .batch(0, ACTIVATION_MODEL.vocab_size)
        .to(gpu_device)
    )
    options: dict[str, Any] = {"engine": "fsdp2", "activation_checkpointing": mode}
    with language_model(gpu_device, ACTIVATION_MODEL, torch.bfloat16, **options) as model:
        # Gathered weights have their memory from here on.
        model.model_with_loss(batch)[0].backward()
        tracker = ActivationTracker()
        with tracker:
            total, _ = model.model_with_loss(batch)
        measured = tracker.live_bytes()
        assert total.requires_grad
    on_gpu, chosen = gpu_device.type != "cpu", ParallelOptions(**options)
    step_config = StepConfig(
        ACTIVATION_MODEL, chosen, 1, 1, sequences, 1, length, compiled=False, on_gpu=on_gpu
    )
    predicted = predicted_activation_bytes(step_config)
    # The kernels of a GPU may keep a second copy of their output, in the layout of the next
    # product; and the log-sum-exps of compiled attention are not seen.
    blocks, heads = (
        ACTIVATION_MODEL.num_hidden_layers if mode == "none" else 0,
        ACTIVATION_MODEL.num_attention_heads,
    )
    copies, unseen = (
        blocks * sequences * length * heads * each for each in (2 * ACTIVATION_MODEL.head_dim, 4)
    )
    assert 0.98 * (predicted - unseen) <= measured <= 1.02 * (predicted + copies)


@pytest.mark.parametrize("master_dtype", ["fp32", "bf16"])
def test_between_steps_a_gpu_holds_what_is_predicted(master_dtype: str) -> None:
    device = torch.device("cuda", 0)
    gc.collect()  # what other tests left would be given back in between
    before = torch.cuda.memory_allocated()
    dtype = torch.float32 if master_dtype == "fp32" else torch.bfloat16
    model = parallelize(
        build_model(MEMORY_MODEL, "meta").to(dtype),
        NextTokenObjective().loss,
        dist_ctx=DistributedContext(RankInfo(), device, None),
        dtype=torch.bfloat16,
        options=ParallelOptions(engine="single"),
        init_weights=lambda model: init_weights(model, 0),
    )
    optimizer_options = OptimizerOptions()
    optimizer = build_optimizer(model.model, optimizer_options, model.parameter_shapes)
    batch = ParityData(sequences=2).batch(0, MEMORY_MODEL.vocab_size).to(device)
    train_step(
        model,
        optimizer,
        [batch],
        NextTokenObjective().num_items,
        lr=1e-3,
        max_grad_norm=1.0,
        set_phase=lambda phase: None,
    )
    counts = count_all(MEMORY_MODEL)
    predicted = counts.total * dtype.itemsize + optimizer_state_bytes(
        optimizer_options, master_dtype, counts
    )
    torch.cuda.synchronize()
    held = torch.cuda.memory_allocated() - before
    # A batch, metrics and workspaces of cuBLAS beside it; gradients are gone, or as large as the
    # weights at most. Working weights in bf16 beside fp32 masters are another half of them.
    assert predicted <= held <= predicted + 1.5 * counts.total * dtype.itemsize + 80 * 2**20


# --- runs -----------------------------------------------------------------------------------------


BF16_ROUNDED = ["--train.master_dtype", "bf16", "--optimizer.stochastic_rounding", "true"]
OPTIMIZERS: dict[str, list[object]] = {
    "muon": [],
    "adamw": ["--optimizer.state_dtype", "bf16"],
    "adamw in 8 bits": ["--optimizer.state_dtype", "8bit"],
    "muon in 8 bits": ["--optimizer.state_dtype", "8bit"],
    "muon in bf16": ["--optimizer.state_dtype", "bf16"],
    "adamw, rounded": BF16_ROUNDED,
    "muon in 8 bits, rounded": [*BF16_ROUNDED, "--optimizer.state_dtype", "8bit"],
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_an_optimizer_learns_as_on_a_cpu(
    lmforge: Command,
    tiny_options: list[str],
    tmp_path: Path,
    optimizer: str,
    gpu_device: torch.device,
) -> None:
    words = ["--optimizer.name", re.split("[ ,]", optimizer)[0], *OPTIMIZERS[optimizer]]
    on_cpu, on_gpu = (
        trained(lmforge, tiny_options, tmp_path, f"{number}", device, *words)
        for number, device in enumerate(("cpu", gpu_device.type))
    )
    assert on_gpu[6] < on_gpu[1]
    # Muon orthogonalizes in bf16 on a GPU, and states in bf16 or 8 bits are rounded.
    assert on_gpu == pytest.approx(on_cpu, rel=0.02)


@pytest.mark.parametrize(
    "optimizer",
    [[], ["--optimizer.state_dtype", "8bit", *BF16_ROUNDED]],
    ids=["fp32", "8 bits, rounded"],
)
def test_a_deterministic_run_that_resumes_is_the_same_to_the_last_bit(
    lmforge: Command,
    tiny_options: list[str],
    tmp_path: Path,
    gpu_device: torch.device,
    optimizer: list[str],
) -> None:
    words = ["--train.deterministic", "true", "--schedule.name", "constant", *optimizer]
    whole = trained(lmforge, tiny_options, tmp_path, "whole", gpu_device.type, *words)
    trained(lmforge, tiny_options, tmp_path, "parts", gpu_device.type, *words, "--train.steps", 4)
    assert trained(lmforge, tiny_options, tmp_path, "parts", gpu_device.type, *words) == whole


def test_a_gpu_decodes_what_a_cpu_decodes(
    lmforge: Command, tiny_run: Path, gpu_device: torch.device
) -> None:
    results = []
    for device in ("cpu", gpu_device.type):
        words = ["--temperature", 0, "--max_tokens", 24, "--dtype", "fp32", "--device", device]
        done = lmforge("generate", tiny_run, "def ", "import ", *words)
        assert done.returncode == 0, done.stderr
        results.append(done.stdout)
    assert results[0] == results[1]


def test_cuda_graphs_decode_what_single_kernels_do() -> None:
    """In fp32. Sequences grow and leave: three shapes."""
    prompts = [[5, 6, 7], [8] * 250, [9, 10]]
    results = []
    for graphs in (True, False):
        model = init_weights(build_model(SMALL_MODEL, torch.device("cuda")), 0)
        decoder = incremental_decoder(
            model, 3, 600, device=torch.device("cuda"), dtype=torch.float32
        )
        assert decoder._graphs is not None
        if not graphs:
            decoder._graphs = None
        steps = [decoder.prefill(prompts)]
        with torch.no_grad():
            for step in range(24):
                if step == 12:
                    decoder.select_sequences([2, 1])
                tokens = torch.arange(len(decoder._lengths), device="cuda") + step
                steps.append(decoder.decode_step(tokens))
        if graphs:
            assert not decoder._graphs._failed
            assert sum(each is not None for each in decoder._graphs._recorded.values()) == 3
        results.append(torch.cat(steps))
    torch.testing.assert_close(results[0], results[1], rtol=1e-4, atol=1e-5)


def test_cuda_graphs_decode_a_checkpointed_model_in_autocast() -> None:
    model = init_weights(build_model(SMALL_MODEL, torch.device("cuda")), 0)
    apply_activation_checkpointing(model, "full")
    with torch.no_grad(), torch.autocast("cuda", torch.bfloat16):
        decoder = incremental_decoder(
            model, 2, 600, device=torch.device("cuda"), dtype=torch.bfloat16
        )
        steps = [decoder.prefill([[5, 6, 7], [8, 9]])]
        tokens = torch.tensor([[5, 6, 7] + [1] * 12, [8, 9] + [1] * 13], device="cuda")
        steps += [decoder.decode_step(tokens[:, 14]) for _ in range(12)]
        assert decoder._graphs is not None
        assert not decoder._graphs._failed
        assert any(each is not None for each in decoder._graphs._recorded.values())
        positions = torch.arange(15, device="cuda")[None].expand(2, -1)
        hidden = model(tokens, positions, torch.zeros_like(tokens, dtype=torch.int32))
    expected, result = hidden[:, 14].float(), steps[-1].float()
    assert (result[0] - expected[0]).norm() < 0.05 * expected[0].norm()


def test_a_sharded_run_in_bf16_writes_samples_and_continues(
    lmforge: Command, tiny_options: list[str], tmp_path: Path, gpu_device: torch.device
) -> None:
    heads = ["--model.hidden_size", 64, "--parallel.engine", "fsdp2", "--train.dtype", "bf16"]
    result = trained(
        lmforge, tiny_options, tmp_path, "a", gpu_device.type, *heads, "--sample.every_steps", 3
    )
    assert result[6] < result[1]


def test_a_trace_of_steps_has_the_kernels_of_the_gpu(
    lmforge: Command, tiny_options: list[str], tmp_path: Path
) -> None:
    trained(lmforge, tiny_options, tmp_path, "a", "cuda", "--log.profile_steps", "3:4")
    events = json.loads((tmp_path / "a" / "profile" / "rank-0.json").read_text())["traceEvents"]
    assert any(event.get("cat") == "kernel" for event in events)


def test_when_memory_runs_out_the_run_says_what_would_fit_and_what_it_held(
    program: Command, tiny_options: list[str], tmp_path: Path
) -> None:
    text = """
import sys, torch
torch.cuda.set_per_process_memory_fraction(2**28 / torch.cuda.get_device_properties(0).total_memory)
from lmforge.cli import run
sys.exit(run(sys.argv[1:]))
"""
    sizes = [
        "--model.hidden_size",
        1024,
        "--model.intermediate_size",
        4096,
        "--model.num_hidden_layers",
        8,
    ]
    where = ["--train.device", "cuda", "--run.folder", tmp_path, "--run.name", "a"]
    done = program(text, "pretrain", *tiny_options, *sizes, *where)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "out of memory" in done.stderr
    (snapshot,) = (tmp_path / "a" / "logs").rglob("*.memory.pickle")
    assert str(snapshot) in done.stderr


@pytest.mark.parametrize("head_dim", [16, 64, 128])
def test_grouped_heads_of_every_size_learn_in_bf16_as_in_fp32_on_a_cpu(
    head_dim: int, gpu_device: torch.device
) -> None:
    config = replace(SMALL_MODEL, head_dim=head_dim)
    results = []
    for device, dtype in ((torch.device("cpu"), torch.float32), (gpu_device, torch.bfloat16)):
        with language_model(device, config, dtype) as model:
            batch = ParityData(sequences=2).batch(0, config.vocab_size).to(device)
            total, _ = model.forward_backward(
                [batch], torch.tensor(99.0, device=device), lambda phase: None
            )[0]["loss"]
            results.append(total.item())
    assert results[1] == pytest.approx(results[0], rel=0.01)


@pytest.mark.parametrize(("softcap", "z_weight"), [(None, 0.0), (30.0, 1e-3)])
def test_compiled_loss_passes_in_bf16_are_the_loss_in_fp64_to_what_bf16_rounds(
    softcap: float | None, z_weight: float
) -> None:
    """Several chunks of a real vocabulary.

    Logits are rounded to 8 bits, and so is their gradient.
    """
    vocab, width, tokens = 50257, 256, 25_000
    assert loss_chunk_tokens(vocab, 2, on_gpu=True, fused=True) < tokens
    generator = torch.Generator("cuda").manual_seed(0)
    hidden = (
        torch.randn(tokens, width, device="cuda", generator=generator).bfloat16().requires_grad_()
    )
    weight = (
        (torch.randn(vocab, width, device="cuda", generator=generator) / 8)
        .bfloat16()
        .requires_grad_()
    )
    bias = torch.randn(vocab, device="cuda", generator=generator).requires_grad_()
    labels = torch.randint(0, vocab, (tokens,), device="cuda", generator=generator)
    labels[torch.rand(tokens, device="cuda", generator=generator) < 0.3] = -100
    head = HeadOptions(bias, softcap, "fused")
    total, z_loss, _ = cross_entropy_and_z_loss(hidden, weight, labels, z_weight, head)
    ours = torch.autograd.grad(total / tokens, (hidden, weight, bias))
    assert [gradient.dtype for gradient in ours] == [torch.bfloat16, torch.bfloat16, torch.float32]
    expected, expected_z, sums = (
        0.0,
        0.0,
        [torch.zeros_like(each, dtype=torch.float64) for each in (hidden, weight, bias)],
    )
    # Whole logits in fp64 of all tokens would not fit.
    for part in torch.arange(tokens, device="cuda").split(2000):
        every = whole_logits(hidden[part], weight, labels[part], bias, softcap, z_weight)
        expected, expected_z = (
            expected + float(every.cross_entropy.detach()),
            expected_z + float(every.z_loss.detach()),
        )
        gradients = torch.autograd.grad(
            (every.cross_entropy + every.z_loss) / tokens, (hidden, weight, bias)
        )
        for sum_, gradient in zip(sums, gradients, strict=True):
            sum_ += gradient
    assert total.item() - z_loss.item() == pytest.approx(expected, rel=1e-4)
    assert z_loss.item() == pytest.approx(expected_z, rel=1e-4)
    for mine, reference in zip(ours, sums, strict=True):
        assert (mine.double() - reference).norm() <= 2e-2 * reference.norm()


def test_compiled_loss_passes_in_fp32_are_torchs_operators() -> None:
    hidden = torch.randn(3000, 128, device="cuda").requires_grad_()
    weight = (torch.randn(5003, 128, device="cuda") / 8).requires_grad_()
    labels, result = torch.randint(0, 5003, (3000,), device="cuda"), {}
    for fused in (False, True):
        total, *_ = cross_entropy_and_z_loss(
            hidden,
            weight,
            labels,
            1e-3,
            HeadOptions(softcap=5.0, passes="fused" if fused else "operators"),
        )
        result[fused] = [total, *torch.autograd.grad(total, (hidden, weight))]
    for mine, reference in zip(result[True], result[False], strict=True):
        assert (mine - reference).norm() <= 1e-5 * reference.norm()


@pytest.mark.parametrize("softcap", [None, 30.0])
def test_compiled_loss_passes_need_the_logits_of_a_chunk_and_the_gradient_of_the_head(
    softcap: float | None,
) -> None:
    vocab, width = 128_256, 256
    tokens = 3 * loss_chunk_tokens(vocab, 2, on_gpu=True, fused=True)
    hidden = torch.randn(tokens, width, device="cuda", dtype=torch.bfloat16).requires_grad_()
    weight = torch.randn(vocab, width, device="cuda", dtype=torch.bfloat16).requires_grad_()
    labels = torch.randint(0, vocab, (tokens,), device="cuda")
    for _ in range(2):  # the first time compiles
        hidden.grad = weight.grad = None
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        cross_entropy_and_z_loss(
            hidden, weight, labels, 0.0, HeadOptions(softcap=softcap, passes="fused")
        )[0].backward()
    # The head's gradient as it is summed, as it is scaled, and in bf16; twice that of the hidden
    # states.
    gradients = 10 * weight.numel() + 2 * hidden.nbytes
    assert torch.cuda.max_memory_allocated() - before < FUSED_LOGITS_BYTES * 1.1 + gradients


def test_the_loss_of_a_compiled_model_is_compiled_too() -> None:
    model = parallelize(
        init_weights(build_model(SMALL_MODEL, torch.device("cuda", 0)), 0),
        NextTokenObjective().loss,
        dist_ctx=DistributedContext(RankInfo(), torch.device("cuda", 0), None),
        dtype=torch.bfloat16,
        options=ParallelOptions(),
        compile_model=True,
    )
    assert model.model.lm_head.passes == "fused"
    batch = ParityData(sequences=2).batch(0, SMALL_MODEL.vocab_size).to(torch.device("cuda", 0))
    (metrics,) = model.forward_backward(
        [batch], torch.tensor(9.0, device="cuda"), lambda phase: None
    )
    model.model.lm_head.passes = "operators"
    (by_operators,) = model.forward_backward(
        [batch], torch.tensor(9.0, device="cuda"), lambda phase: None
    )
    assert metrics["loss"][0].item() == pytest.approx(by_operators["loss"][0].item(), rel=1e-5)
