"""What a traced block computes and keeps, compared with real blocks on real tensors and with what a
family states.
"""

import gc
import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.decomposition import select_decomp_table
from torch.distributed.device_mesh import init_device_mesh
from torch.profiler import ProfilerActivity, profile
from torch.testing._internal.distributed.fake_pg import FakeStore

from lmforge.core.model.attention import AttentionMask, create_attention_mask
from lmforge.core.model.build import build_model
from lmforge.core.model.config import ModelConfig
from lmforge.core.model.family import load_family
from lmforge.core.model.flops import (
    active_parameters,
    block_parameters,
    flops_per_token,
    parameter_count,
)
from lmforge.core.model.lora import add_lora
from lmforge.core.model.lora_config import LoraConfig
from lmforge.core.model.modules.recurrent import CHUNK
from lmforge.core.model.rope import rotary_embedding
from lmforge.core.options.activation_checkpointing import CHECKPOINTING_MODES
from lmforge.core.options.builtin_names import FAMILIES
from lmforge.core.options.sections import ParallelOptions
from lmforge.core.parallel.activation_checkpointing import apply_activation_checkpointing
from lmforge.core.parallel.tensor_parallel import apply_tensor_parallel
from lmforge.core.parallel.validate import why_not_compiled
from lmforge.lab.plan.operators import Product
from lmforge.lab.plan.traces import TracedModel, model_shapes, trace_block
from tests.support.grids import parametrize

# No dimension of a parameter is their product, or the first.
SEQUENCES, LENGTH = 2, 96
SIZES = {"vocab_size": 512, "hidden_size": 256, "num_hidden_layers": 1, "num_attention_heads": 8}
GROUPED = {**SIZES, "num_key_value_heads": 2, "intermediate_size": 896}
# Of every family; for some more than the sizes.
OPTIONS: dict[str, Any] = {"qwen2": {"attention_bias": True}, "qwen3": {"head_dim": 32}}
OPTIONS |= {
    "mixtral": {"norm_topk_prob": True},
    "minimax_m2": {"norm_topk_prob": True},
    "gpt_oss": {"norm_topk_prob": True},
    "qwen3_moe": {"head_dim": 32, "moe_intermediate_size": 120},
}
EXPERTS = {
    "num_experts": 5,
    "num_experts_per_tok": 3,
    "output_router_logits": True,
    "router_aux_loss_coef": 0.1,
}
CONFIGS = {
    name: ModelConfig(
        model_type=name,
        **SIZES if name == "gpt2" else GROUPED,
        **EXPERTS if load_family(name).stored_experts else {},
        **OPTIONS.get(name, {}),
    )
    for name in FAMILIES
    # Latent attention has other sizes, and no test of its trace yet.
    if name != "deepseek_v3" and not load_family(name).recurrent_type
}
# Of a recurrent layer, whose products with its state no description states.
RECURRENT = {
    "qwen3_5_text": ModelConfig(
        model_type="qwen3_5_text",
        layer_types=("linear_attention",),
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        linear_conv_kernel_dim=4,
        **GROUPED | {"num_hidden_layers": 1},
    ),
    "kimi_linear": ModelConfig(
        model_type="kimi_linear",
        layer_types=("linear_attention",),
        kv_lora_rank=16,
        qk_nope_head_dim=8,
        qk_rope_head_dim=8,
        v_head_dim=8,
        linear_num_key_heads=2,
        linear_key_head_dim=8,
        linear_conv_kernel_dim=4,
        n_shared_experts=1,
        first_k_dense_replace=1,
        **EXPERTS,
        **GROUPED | {"num_hidden_layers": 1, "num_key_value_heads": 0},
    ),
    **{
        f"nemotron_h {kind}": ModelConfig(
            model_type="nemotron_h",
            layer_types=(kind,),
            linear_num_key_heads=2,
            linear_num_value_heads=4,
            linear_key_head_dim=8,
            linear_value_head_dim=8,
            linear_conv_kernel_dim=4,
            conv_bias=True,
            **GROUPED | {"num_hidden_layers": 1},
        )
        for kind in ("linear_attention", "mlp")
    },
    "lfm2": ModelConfig(
        model_type="lfm2",
        layer_types=("conv",),
        linear_conv_kernel_dim=3,
        **GROUPED | {"num_hidden_layers": 1},
    ),
}
LORA = LoraConfig(4, 8.0, target_modules=("q_proj", "down_proj"))
MODES = tuple(CHECKPOINTING_MODES)


@pytest.fixture(autouse=True)
def _new_graphs() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@contextmanager
def real_block(
    config: ModelConfig, mode: str, ranks: int = 1, lora: LoraConfig | None = None
) -> Iterator[tuple[nn.Module, Any]]:
    """A block in bf16 and its arguments, with zeros; of rank 0 of a fake group with tensor
    parallelism.
    """
    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    try:
        model = build_model(config, "cpu")
        if lora is not None:
            add_lora(model, lora)
        model.to(torch.bfloat16)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        if ranks > 1:
            apply_tensor_parallel(model, init_device_mesh("cpu", (ranks,)))
        apply_activation_checkpointing(model, mode, every=1)
        positions = torch.arange(LENGTH).expand(SEQUENCES, LENGTH)
        rotary = rotary_embedding(positions, config.layer_ropes[0], config.head_dim)
        shape = (SEQUENCES, LENGTH // ranks, config.hidden_size)
        hidden = torch.zeros(shape, dtype=torch.bfloat16, requires_grad=True)
        block = model.blocks[0]
        if any(config.sparse_layers):
            block.forward = partial(
                block.forward, is_token=torch.ones(SEQUENCES, LENGTH // ranks, dtype=torch.bool)
            )
        mask = AttentionMask()
        if config.family.recurrent_type:
            mask = AttentionMask(document_ids=torch.zeros(SEQUENCES, LENGTH, dtype=torch.int32))
        yield block, [hidden, rotary, mask, None, None]
    finally:
        dist.destroy_process_group()


def allocated_bytes(block: nn.Module, args: list[Any]) -> int:
    """Bytes that the forward pass of a block allocates and does not free, with its input and
    without its output.
    """
    block(*args).sum().backward()  # what is made once
    hidden, *rest = args
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        made = hidden + 0
        output = block(made, *rest)
        del made
        gc.collect()
    results = profiled.profiler.kineto_results
    changes = sum(event.nbytes() for event in results.events() if event.name() == "[memory]")
    return changes - int(output.nbytes)


def partitioned_bytes(block: nn.Module, args: list[Any]) -> int:
    """Bytes of activations that the compiled forward pass of a block hands to its backward pass,
    each storage once.
    """
    kept: dict[str, Any] = {}

    def partition(joint: Any, inputs: Any, *, num_fwd_outputs: int, **options: Any) -> Any:
        forward, backward = min_cut_rematerialization_partition(
            joint, inputs, compiler="inductor", num_fwd_outputs=num_fwd_outputs, **options
        )
        output = next(node for node in forward.graph.nodes if node.op == "output")
        kept["nodes"] = output.args[0][num_fwd_outputs:]
        return forward, backward

    def run_as_it_is(graph: Any, inputs: Any) -> Any:
        return make_boxed_func(graph.forward)

    backend = aot_autograd(
        fw_compiler=run_as_it_is, partition_fn=partition, decompositions=select_decomp_table()
    )
    torch.compile(block, backend=backend, dynamic=False)(*args)
    sizes = dict[Any, int]()
    for node in kept["nodes"]:
        node = _source(node)
        value = node.meta.get("val")
        experts, chosen = EXPERTS["num_experts"], EXPERTS["num_experts_per_tok"]
        rows = (
            SEQUENCES,
            SEQUENCES * LENGTH,
            SEQUENCES * LENGTH * chosen,
            *([experts] if node.op != "placeholder" else []),
        )
        if (
            not isinstance(value, torch.Tensor)
            or value.dim() == 0
            or value.shape[0] not in rows
            or value.dtype == torch.bool
        ):
            # Parameters, which are there in any case, and what flash attention keeps of random
            # numbers.
            continue
        if (
            value.dim() == 4 and value.shape[-1] == args[1].cos.shape[-1]
            if args[1] is not None
            else False
        ):
            continue  # the angles, which all blocks share
        sizes[node] = value.numel() * value.element_size()
    return sum(sizes.values())


def _source(node: Any) -> Any:
    """The node whose memory this one shows."""
    views = ("view", "permute", "alias", "transpose", "reshape", "expand", "unsqueeze", "squeeze")
    while node.op == "call_function" and any(f"aten.{name}." in str(node.target) for name in views):
        node = node.args[0]
    return node


def traced_bytes(
    config: ModelConfig,
    mode: str,
    ranks: int = 1,
    *,
    compiled: bool,
    lora: LoraConfig | None = None,
) -> int:
    model = TracedModel(config, torch.bfloat16, lora, ranks, ranks)
    trace = trace_block(model, LENGTH, mode, compiled=compiled, on_gpu=True)
    return SEQUENCES * trace.saved_bytes + trace.fixed_bytes


def possible_differences(config: ModelConfig) -> tuple[int, ...]:
    """How many bytes more a trace, which is of one sequence, may have.

    A mixture keeps where the rows of each expert end once, and a number that its auxiliary loss is
    multiplied by, which no operator makes.
    """
    ends, number = (SEQUENCES - 1) * 4 * config.num_experts, 8 * any(config.sparse_layers)
    return 0, ends, -number, ends - number


# In `make test` each mode, and what families differ in: biases, positions, windows and experts.
FEW = [("qwen2", "full"), ("gpt2", "selective-ops"), ("gemma3_text", "none")]
FEW += [("llama", "selective-blocks"), ("mixtral", "none")]
PAIRS = [*itertools.product(CONFIGS, MODES)]


@parametrize(("family", "mode"), PAIRS, fast=[PAIRS.index(pair) for pair in FEW])
def test_a_block_keeps_what_its_trace_keeps(family: str, mode: str) -> None:
    config = CONFIGS[family]
    with real_block(config, mode) as (block, args):
        difference = traced_bytes(config, mode, compiled=False) - allocated_bytes(block, args)
        assert difference in possible_differences(config)


@parametrize(("family", "mode"), [*itertools.product(RECURRENT, ("none", "full"))], fast=(0, 5))
def test_a_recurrent_block_keeps_what_its_trace_keeps(family: str, mode: str) -> None:
    config = RECURRENT[family]
    with real_block(config, mode) as (block, args):
        difference = traced_bytes(config, mode, compiled=False) - allocated_bytes(block, args)
    # Of chunks a few constants are kept once (masks, and of the gated delta rule a unit matrix), and
    # counted for each sequence; and a number is kept that no operator makes.
    constants = 3 * 4 * CHUNK**2 if "linear_attention" in config.written_layer_types else 0
    assert -8 <= difference <= (SEQUENCES - 1) * constants


@parametrize("mode", MODES, fast=(1,))
def test_a_block_with_adapters_keeps_what_its_trace_keeps(mode: str) -> None:
    with real_block(CONFIGS["llama"], mode, lora=LORA) as (block, args):
        scalars = allocated_bytes(block, args) - traced_bytes(
            CONFIGS["llama"], mode, compiled=False, lora=LORA
        )
        assert scalars in (0, 8 * len(LORA.target_modules))  # their scaling


@parametrize("mode", MODES, fast=(2,))
def test_a_rank_of_tensor_parallelism_keeps_what_its_trace_keeps(mode: str) -> None:
    with real_block(CONFIGS["llama"], mode, ranks=2) as (block, args):
        assert traced_bytes(CONFIGS["llama"], mode, 2, compiled=False) == allocated_bytes(
            block, args
        )


@parametrize(("family", "mode"), PAIRS, fast=[PAIRS.index(("gpt2", "none"))])
def test_a_compiled_block_keeps_what_its_trace_keeps(family: str, mode: str) -> None:
    with real_block(CONFIGS[family], mode) as (block, args):
        difference = traced_bytes(CONFIGS[family], mode, compiled=True) - partitioned_bytes(
            block, args
        )
        assert difference in possible_differences(CONFIGS[family])


def compiles_with_tensor_parallelism(mode: str) -> bool:
    options = ParallelOptions(tensor_parallel_degree=2, activation_checkpointing=mode)
    return why_not_compiled(options, "cpu") is None


@pytest.mark.slow
@pytest.mark.parametrize("mode", [*filter(compiles_with_tensor_parallelism, MODES)])
def test_a_compiled_rank_of_tensor_parallelism_keeps_what_its_trace_keeps(mode: str) -> None:
    with real_block(CONFIGS["llama"], mode, ranks=2) as (block, args):
        assert traced_bytes(CONFIGS["llama"], mode, 2, compiled=True) == partitioned_bytes(
            block, args
        )


@parametrize(
    ("compiled", "family"),
    itertools.product((False, True), CONFIGS),
    fast=range(len(CONFIGS) + 1),
)
def test_a_family_states_the_products_and_parameters_that_are_traced(
    family: str, compiled: bool
) -> None:
    config = CONFIGS[family]
    (block,) = config.block_kinds
    traced = TracedModel(config, torch.float32)
    trace = trace_block(traced, LENGTH, "none", compiled=compiled, on_gpu=True)
    linears = block.linears
    rows = [LENGTH * (config.num_experts_per_tok if each.experts > 1 else 1) for each in linears]
    stated = [
        Product(count, each.inputs, each.outputs, 4, each.experts)
        for count, each in zip(rows, linears, strict=True)
    ]
    assert [*trace.forward.products] == stated
    # Gradients of experts' biases are products.
    biases = sum(each.shape[1] for each in block.vectors if len(each.shape) == 2)
    of_biases = 2 * rows[-1] * biases
    assert trace.backward.product_flops == 2 * trace.forward.product_flops + of_biases
    shapes = model_shapes(traced)
    assert sum(rows * columns for rows, columns in shapes.trained) == block_parameters(
        config, block
    )
    total = sum(
        rows * columns
        for part in (shapes.tables, shapes.trained, shapes.head, shapes.rest)
        for rows, columns in part
    )
    tied = config.tie_word_embeddings * config.vocab_size * config.hidden_size
    assert total - tied == parameter_count(config).total


@pytest.mark.parametrize("family", CONFIGS)
def test_flops_by_the_convention_are_those_of_the_trace(family: str) -> None:
    config = CONFIGS[family]
    traced_model = TracedModel(config, torch.float32)
    forward = trace_block(traced_model, LENGTH, "none", compiled=False, on_gpu=True).forward
    head = 2 * config.hidden_size * config.num_outputs
    # The convention has no causal discount, counts vectors as matrices, and a backward pass as
    # twice the forward pass.
    count = parameter_count(config)
    idle = count.total - active_parameters(config) if any(config.sparse_layers) else 0
    vectors = (
        count.active_matmul + idle - count.block_matrices - config.hidden_size * config.vocab_size
    )
    traced = 3 * (
        (forward.product_flops + 2 * forward.attention_flops) / LENGTH + head + 2 * vectors
    )
    assert traced == flops_per_token(config, LENGTH)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("compiled", [False, True])
def test_a_trace_has_what_a_mode_computes_again(mode: str, compiled: bool) -> None:
    chosen = CHECKPOINTING_MODES[mode]
    recomputes = chosen.recomputes_block(1, 1)
    # Of seven products; the backward pass does not need the last one.
    again = recomputes * sum(not chosen.keeps_product(number) for number in range(1, 7))
    traced = TracedModel(CONFIGS["llama"], torch.bfloat16)
    plain, trace = (
        trace_block(traced, LENGTH, each, compiled=compiled, on_gpu=True) for each in ("none", mode)
    )
    recomputed = trace.backward.beyond(plain.backward)
    assert len(recomputed.products) == again
    attends_again = recomputes and not chosen.keeps_operators
    assert recomputed.attention_flops == (plain.forward.attention_flops if attends_again else 0)
    assert (recomputed.moved_bytes > 0) == recomputes


@pytest.mark.parametrize("length", [96, 600])
def test_attention_on_a_cpu_has_the_scores_of_its_chunks(length: int) -> None:
    config = CONFIGS["llama"]
    trace = trace_block(
        TracedModel(config, torch.float32), length, "none", compiled=False, on_gpu=False
    )
    chunk = max(256, -(-length // 8))
    ends = [(start, min(start + chunk, length)) for start in range(0, length, chunk)]
    scores = sum((end - start) * end for start, end in ends)
    assert (
        trace.forward.attention_flops == 4 * config.num_attention_heads * config.head_dim * scores
    )
    mask = partial(create_attention_mask, torch.zeros(1, length, dtype=torch.int32))
    assert mask(None).dense_mask is not None
