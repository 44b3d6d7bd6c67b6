"""Frozen matrices in 4 and 8 bits on a GPU: their bytes and numbers, and models with adapters that
are trained on them.

Tests that take `gpu_device` run on a CPU too, where they are rehearsed: `python tests/gpu.py
--device cpu`.
"""

import gc
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from itertools import cycle

import pytest
import torch

from lmforge.core.distributed.distributed import DistributedContext
from lmforge.core.distributed.rank_info import RankInfo
from lmforge.core.losses.language import NextTokenObjective
from lmforge.core.model.build import build_model
from lmforge.core.model.config import ModelConfig
from lmforge.core.model.init_weights import init_adapters, init_weights
from lmforge.core.model.layers import LanguageModel
from lmforge.core.model.lora import add_lora
from lmforge.core.model.lora_config import LoraConfig, adapter_parameters
from lmforge.core.model.quantization import blocks
from lmforge.core.model.quantization.blocks import dequantize, quantize
from lmforge.core.model.quantization.formats import BlockFormat
from lmforge.core.model.state_bytes import optimizer_state_bytes
from lmforge.core.optim.optimizer import build_optimizer
from lmforge.core.options.sections import OptimizerOptions, ParallelOptions
from lmforge.core.parallel.compiled import compiled_graph_count
from lmforge.core.parallel.parallel_model import train_step
from lmforge.core.parallel.parallelize import parallelize
from lmforge.core.stages.parameter_counts import count_parameters
from lmforge.lab.bench.parity import SMALL_MODEL, ParityData
from tests.distributed.gpu_models import language_model, loss_and_gradients

pytestmark = pytest.mark.gpu

CPU = torch.device("cpu")
NF4, DOUBLE, INT8 = BlockFormat("nf4"), BlockFormat("nf4", double_quant=True), BlockFormat("int8")
FORMATS = pytest.mark.parametrize("stored", [NF4, DOUBLE, INT8], ids=BlockFormat.describe)
# Blocks and rows that end within a row of the matrix, one number, and more numbers than are
# computed at once.
SHAPES = ((64, 64), (7, 33), (1, 1), (3, 128, 300), (1000, 640), (2050, 1030))


def drawn_numbers(shape: tuple[int, ...], dtype: torch.dtype, size: float) -> torch.Tensor:
    """With a block of zeros, and a zero beside numbers."""
    values = torch.randn(shape) * size
    values.view(-1)[: min(600, values.numel() // 2)] = 0
    return values.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@FORMATS
def test_a_gpu_quantizes_to_the_bytes_of_a_cpu(
    stored: BlockFormat, dtype: torch.dtype, gpu_device: torch.device
) -> None:
    for shape, size in zip(SHAPES, cycle((1e-4, 0.02, 30.0)), strict=False):
        values = drawn_numbers(shape, dtype, size)
        assert torch.equal(
            quantize(values.to(gpu_device), stored).cpu(), quantize(values, stored)
        ), shape


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@FORMATS
def test_the_numbers_of_bytes_are_the_same_to_the_last_bit_on_a_gpu(
    stored: BlockFormat,
    dtype: torch.dtype,
    gpu_device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A number is a product in fp32, or two and a sum, which are rounded alike everywhere, and so
    is it to another dtype.
    """
    monkeypatch.setattr(blocks, "_HAS_BITSANDBYTES", False)
    for shape in SHAPES:
        packed = quantize(drawn_numbers(shape, torch.float32, 0.02), stored)
        on_gpu = dequantize(packed.to(gpu_device), stored, shape, dtype)
        assert torch.equal(on_gpu.cpu(), dequantize(packed, stored, shape, dtype)), shape


@pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("stored", [NF4, DOUBLE], ids=BlockFormat.describe)
def test_the_kernel_of_bitsandbytes_gives_the_numbers_to_one_rounding(
    stored: BlockFormat,
    dtype: torch.dtype,
    gpu_device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its product of a code and a scale is in fp32 too; how that becomes 16 bits is its own, so the
    last bit may be another.
    """
    monkeypatch.setattr(blocks, "_HAS_BITSANDBYTES", True)
    for shape in SHAPES:
        packed = quantize(drawn_numbers(shape, torch.float32, 0.02), stored)
        on_gpu = dequantize(packed.to(gpu_device), stored, shape, dtype)
        expected = dequantize(packed, stored, shape, dtype)
        torch.testing.assert_close(on_gpu.cpu(), expected, rtol=torch.finfo(dtype).eps, atol=0)


# --- models ---------------------------------------------------------------------------------------

MIXTURE = replace(
    SMALL_MODEL, model_type="olmoe", qk_norm=True, num_experts=5, num_experts_per_tok=2
)
EXPERTS = ("experts.gate_up_proj", "experts.down_proj")
ADAPTERS = LoraConfig(4, 8.0, base_dtype="nf4")
LORAS = {
    "nf4": (SMALL_MODEL, ADAPTERS),
    "nf4 double_quant": (SMALL_MODEL, replace(ADAPTERS, double_quant=True)),
    "int8": (SMALL_MODEL, replace(ADAPTERS, base_dtype="int8")),
    "experts nf4": (MIXTURE, replace(ADAPTERS, target_parameters=EXPERTS)),
    "experts int8": (MIXTURE, replace(ADAPTERS, base_dtype="int8", target_parameters=EXPERTS)),
}


def adapted_model(config: ModelConfig, lora: LoraConfig) -> LanguageModel:
    """On the CPU, so that its bytes are those of any device; with adapters that are not zero."""
    model = init_weights(build_model(config, CPU), 0)
    add_lora(model, lora)
    init_adapters(model, 0)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in adapter_parameters(model).items():
            if "lora_B" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / 20)
    return model


def computed(
    kind: str, device: torch.device, dtype: torch.dtype = torch.float32, compile_model: bool = False
) -> tuple[float, list[torch.Tensor]]:
    config, lora = LORAS[kind]
    with language_model(device, config, dtype, compile_model, adapted_model(config, lora)) as model:
        before = compiled_graph_count()
        loss, gradients = loss_and_gradients(model, device)
        # On a GPU attention in fp32 is compiled in any case.
        assert compiled_graph_count() > before or not compile_model
        assert len(gradients) == len(adapter_parameters(model.model))
    return loss, gradients


@pytest.mark.parametrize(
    ("kind", "compiled"),
    [*((kind, False) for kind in LORAS), ("nf4", True), ("int8", True), ("experts nf4", True)],
)
def test_adapters_beside_quantized_matrices_have_the_loss_and_gradients_of_a_cpu(
    kind: str, compiled: bool, gpu_device: torch.device
) -> None:
    expected_loss, expected = computed(kind, CPU)
    loss, gradients = computed(kind, gpu_device, compile_model=compiled)
    assert loss == pytest.approx(expected_loss, rel=1e-5)
    for ours, theirs in zip(gradients, expected, strict=True):
        assert (ours - theirs).norm() <= (1e-3 if compiled else 1e-4) * theirs.norm()


@pytest.mark.parametrize(
    ("kind", "compiled"),
    [
        ("nf4 double_quant", False),
        ("int8", False),
        ("experts nf4", False),
        ("nf4 double_quant", True),
        ("experts nf4", True),
    ],
)
def test_adapters_beside_quantized_matrices_learn_in_bf16_what_they_do_in_fp32(
    kind: str, compiled: bool, gpu_device: torch.device
) -> None:
    expected_loss, expected = computed(kind, CPU)
    loss, gradients = computed(kind, gpu_device, torch.bfloat16, compiled)
    assert loss == pytest.approx(expected_loss, rel=0.01)
    assert all(each.isfinite().all() for each in gradients)
    flat, rounded = (torch.cat([each.flatten() for each in some]) for some in (expected, gradients))
    # Rounding sends a few tokens to other experts; the direction stays.
    assert torch.nn.functional.cosine_similarity(flat, rounded, dim=0) > (
        0.95 if kind.startswith("experts") else 0.99
    )


# Blocks of 200 million parameters: 400 MB in bf16, and 105 in four bits.
LARGE = ModelConfig(
    vocab_size=512,
    hidden_size=1024,
    intermediate_size=3072,
    num_hidden_layers=16,
    num_attention_heads=16,
    num_key_value_heads=8,
)


@pytest.mark.parametrize("base_dtype", ["nf4", "int8"])
def test_between_steps_a_gpu_holds_the_bytes_of_quantized_matrices_that_are_predicted(
    base_dtype: str,
) -> None:
    device, lora = (
        torch.device("cuda", 0),
        LoraConfig(8, 16.0, base_dtype=base_dtype, double_quant=base_dtype == "nf4"),
    )  # type: ignore[arg-type]
    gc.collect()  # what other tests left would be given back in between
    before = torch.cuda.memory_allocated()
    empty = build_model(LARGE, "meta")
    add_lora(empty, lora)
    objective, options = NextTokenObjective(), OptimizerOptions()
    model = parallelize(
        empty,
        objective.loss,
        dist_ctx=DistributedContext(RankInfo(), device, None),
        dtype=torch.bfloat16,
        options=ParallelOptions(engine="single"),
        init_weights=partial(init_weights, seed=0),
    )
    optimizer = build_optimizer(model.model, options, model.parameter_shapes)
    batch = ParityData(sequences=2).batch(0, LARGE.vocab_size).to(device)
    train_step(
        model,
        optimizer,
        [batch],
        objective.num_items,
        lr=1e-3,
        max_grad_norm=1.0,
        set_phase=lambda phase: None,
    )
    counts = count_parameters(LARGE, lora)
    predicted = counts.weight_bytes("fp32") + optimizer_state_bytes(options, "fp32", counts)
    torch.cuda.synchronize()
    held = torch.cuda.memory_allocated() - before
    # Beside it a batch, metrics, workspaces of cuBLAS, and gradients of adapters; and of what is
    # not quantized a copy in bf16.
    assert (
        predicted
        <= held
        <= predicted + 4 * counts.trained + 2 * (counts.total - counts.quantized) + 80 * 2**20
    )
    assert predicted + 100 * 2**20 < 2 * counts.quantized
