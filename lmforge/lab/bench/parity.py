"""The comparison of every parallel strategy with one process, on a small model.

It is trained a few steps with each. `lmforge doctor --parity` prints the comparison, and the tests
of the strategies check it: losses, gradient norms, weights.
"""

import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from math import inf, isfinite
from typing import Any

import torch
from torch import Tensor

from lmforge.core.data.batch import Batch
from lmforge.core.data.labels import IGNORE_INDEX
from lmforge.core.data.order import token_rng_keys
from lmforge.core.distributed.distributed import DistributedContext
from lmforge.core.distributed.rank_info import RankInfo
from lmforge.core.losses.language import NextTokenObjective
from lmforge.core.model.build import build_model
from lmforge.core.model.config import ModelConfig
from lmforge.core.model.init_weights import init_weights
from lmforge.core.model.layers import LanguageModel
from lmforge.core.optim.optimizer import build_optimizer, named_optimizer_state
from lmforge.core.options.activation_checkpointing import (
    CHECKPOINTING_MODES,
    FullCheckpointing,
    SelectiveOperators,
)
from lmforge.core.options.sections import OptimizerOptions, ParallelOptions
from lmforge.core.parallel.dims import data_parallel_rank_and_size
from lmforge.core.parallel.parallel_model import (
    ParallelModel,
    full_tensor,
    local_tensor,
    train_step,
)
from lmforge.core.parallel.parallelize import parallelize
from lmforge.core.steps.metrics import peak_memory_gib
from lmforge.lab.bench.bounds import relative_difference
from lmforge.lab.plan.operators import ActivationTracker

_SIZES: dict[str, Any] = {
    "vocab_size": 509,
    "hidden_size": 64,  # heads of 16, the smallest that FlexAttention takes
    "intermediate_size": 100,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
SMALL_MODEL = ModelConfig(**_SIZES)
# Scores of experts that lie far enough apart for rounding to choose the same ones.
SMALL_MIXTURE = ModelConfig(
    **_SIZES,
    model_type="qwen3_moe",
    num_experts=8,
    num_experts_per_tok=3,
    moe_intermediate_size=40,
    mlp_only_layers=(1,),
    router_aux_loss_coef=0.5,
    output_router_logits=True,
    initializer_range=0.2,
)
# Three layers of the gated delta rule and one of attention. With a large eps, since a norm divides
# the small outputs of a young state by themselves.
_HYBRID_SIZES: dict[str, Any] = {
    **_SIZES,
    "partial_rotary_factor": 0.5,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "rms_norm_eps": 1e-2,
    "initializer_range": 0.2,
}
SMALL_HYBRID = ModelConfig(**_HYBRID_SIZES, model_type="qwen3_5_text")
SMALL_HYBRID_MIXTURE = ModelConfig(
    **_HYBRID_SIZES,
    model_type="qwen3_next",
    num_experts=8,
    num_experts_per_tok=3,
    moe_intermediate_size=40,
    shared_expert_intermediate_size=24,
    norm_topk_prob=True,
    mlp_only_layers=(1,),
    router_aux_loss_coef=0.5,
    output_router_logits=True,
)
# The strategies that these are trained with, besides expert parallelism.
OTHER_MODELS_CASES = (
    "ddp",
    "fsdp1 full-shard",
    "fsdp2 full-shard",
    "fsdp2, checkpointing full",
    "fsdp2, 2 micro-batches",
    "tensor 2",
    "context 2",
    "pipeline 2, 4 micro-batches",
    "fsdp2, compiled",
)
# A larger epsilon than in training: AdamW's step then depends on the size of a gradient. So a
# gradient of the wrong scale is detected, while the sign of a gradient that is zero up to rounding
# does not matter.
OPTIMIZER = OptimizerOptions(lr=2e-3, eps=1e-3, weight_decay=0.1)
MAX_GRAD_NORM = 0.5
NOTHING = nullcontext()
# Biases of keys. Softmax ignores them: their gradient is rounding, of which AdamW makes whole
# steps. Those of GPT-2 are a third of `c_attn`; how other fused biases are laid out is up to their
# family.
KEY_BIASES = tuple(
    f"{name}.bias" for name in ("k_proj", "key", "query_key_value", "qkv", "qkv_proj")
)


@dataclass(frozen=True)
class ParityCase:
    """One way to train the small model, with a name for the table.

    `change_model` is called before it is parallelized.
    """

    name: str
    options: ParallelOptions
    accumulation: int = 1
    compile_model: bool = False
    model_config: ModelConfig = SMALL_MODEL
    optimizer: OptimizerOptions = OPTIMIZER
    dtype: torch.dtype = torch.float32
    change_model: Callable[[LanguageModel], None] = lambda model: None


@dataclass(frozen=True)
class ParityResult:
    """The result of a case.

    losses, grad_norms: of each step.
    hidden_dtypes: of the residual stream, at the input of each block on any rank; not where blocks
    are compiled.
    weights: full tensors by name after the last step, on rank 0 only; of norms what they multiply
        by, since some weights themselves begin at 0.
    memory_bytes: of this rank's parameters, gradients and optimizer states after a step, and of
        activations between forward and backward of its first micro-batch; the last not where blocks
        are compiled.
    memory_gib: peak memory.
    """

    losses: list[float]
    grad_norms: list[float]
    hidden_dtypes: set[torch.dtype]
    weights: dict[str, Tensor]
    memory_bytes: dict[str, int]
    tokens_per_second: float
    memory_gib: float


@dataclass(frozen=True)
class ParityData:
    """Random data from a seed: `sequences` of `sequence_length` tokens per step.

    They are ragged, and some have no label at all.
    """

    sequences: int
    sequence_length: int = 64
    steps: int = 10
    seed: int = 0

    def batch(self, step: int, vocab_size: int) -> Batch:
        """The global batch of a step, the same on every rank."""
        count = self.sequences
        length = self.sequence_length
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + step)
        draw = partial(torch.randint, generator=generator)
        tokens = draw(0, vocab_size, (count, length))
        slots = torch.arange(length).expand(count, -1)
        cut = draw(1, length, (count, 1))
        end = draw(length // 2, length + 1, (count, 1))
        document_ids = torch.where(slots < end, (slots >= cut).int(), -1).int()
        positions = torch.where(slots >= cut, slots - cut, slots)
        # A prediction that can be learned: the label depends on the token alone.
        labels = (tokens * 7 + 3) % vocab_size
        labels[document_ids < 0] = IGNORE_INDEX
        labels[torch.rand(labels.shape, generator=generator) < 0.2] = IGNORE_INDEX
        # In every other step the first ranks have nothing to score.
        if step % 2:
            labels[: count // 2] = IGNORE_INDEX
        keys = torch.from_numpy(token_rng_keys(self.seed, step * count, (step + 1) * count, length))
        return Batch(tokens, labels, positions, document_ids, keys)


def run_case(
    case: ParityCase,
    data: ParityData,
    dist_ctx: DistributedContext,
    last_step: AbstractContextManager[object] = NOTHING,
) -> ParityResult:
    """Train as `case` says, on all ranks together; uncompiled, the last step is inside `last_step`.

    Raises UserError.
    """
    objective = NextTokenObjective()
    model = _build_model(case, data.seed, objective, dist_ctx)
    optimizer = build_optimizer(model.model, case.optimizer, model.parameter_shapes)
    part, num_parts = data_parallel_rank_and_size(
        case.options, dist_ctx.rank_info.rank, dist_ctx.world_size
    )
    size = data.sequences // num_parts
    micro_size = size // case.accumulation
    tracker = ActivationTracker()
    memory_bytes: dict[str, int] = {}
    hidden_dtypes = set() if case.compile_model else _observe_hidden_dtypes(model)

    def set_phase(phase: str) -> None:
        if phase == "backward" and observed:
            memory_bytes.setdefault("activations", tracker.live_bytes())
        if phase == "optimizer":
            parameters = model.parameters()
            gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
            memory_bytes.update(
                parameters=_local_bytes(parameters), gradients=_local_bytes(gradients)
            )

    losses = []
    norms = []
    began = 0.0
    for step in range(data.steps):
        if step == 1:
            began = time.perf_counter()
        global_batch = data.batch(step, case.model_config.vocab_size)
        batch = global_batch[part * size : (part + 1) * size].to(dist_ctx.device)
        micro_batches = [
            batch[number * micro_size : (number + 1) * micro_size]
            for number in range(case.accumulation)
        ]
        observed = step + 1 == data.steps and not case.compile_model
        with ExitStack() as stack:
            if observed:
                stack.enter_context(last_step)
                stack.enter_context(tracker)
            norm, metrics = train_step(
                model,
                optimizer,
                micro_batches,
                objective.num_items,
                lr=case.optimizer.lr,
                max_grad_norm=MAX_GRAD_NORM,
                set_phase=set_phase,
            )
        norms.append(norm)
        total = torch.stack([each["loss"][0] for each in metrics]).sum()
        count = torch.stack([each["loss"][1] for each in metrics]).sum()
        items = dist_ctx.all_reduce_sum(count).clamp(min=1.0)
        losses.append(dist_ctx.all_reduce_sum(total) / items)
    values = torch.stack([*losses, *norms]).double().tolist()
    seconds = time.perf_counter() - began
    states = [value for state in optimizer.state.values() for value in state.values()]
    tensors = model.state_dict(optimizer, named_optimizer_state)["model"]
    weights = {
        name: full_tensor(tensor).detach().float().cpu().clone() for name, tensor in tensors.items()
    }
    for name, tensor in weights.items():
        if tensor.ndim == 1:
            tensor += case.model_config.norm_offset(name)
    if case.options.pipeline_parallel_degree > 1:  # each rank has those of its stages
        weights = {
            name: tensor for part in dist_ctx.all_gather(weights) for name, tensor in part.items()
        }
    return ParityResult(
        losses=values[: data.steps],
        grad_norms=values[data.steps :],
        hidden_dtypes=set().union(*dist_ctx.all_gather(hidden_dtypes)),
        weights=weights if dist_ctx.is_rank0 else {},
        memory_bytes={**memory_bytes, "optimizer": _local_bytes(states)},
        tokens_per_second=(data.steps - 1) * data.sequences * data.sequence_length / seconds,
        memory_gib=peak_memory_gib(dist_ctx.device),
    )


def _observe_hidden_dtypes(model: ParallelModel) -> set[torch.dtype]:
    """A set that the dtypes of the blocks' inputs are added to as they are computed."""
    dtypes: set[torch.dtype] = set()
    for block in model.model.blocks:
        block.register_forward_pre_hook(lambda block, args: dtypes.add(args[0].dtype))
    return dtypes


def _build_model(
    case: ParityCase, seed: int, objective: NextTokenObjective, dist_ctx: DistributedContext
) -> ParallelModel:
    model = build_model(case.model_config, "meta")
    case.change_model(model)
    return parallelize(
        model,
        objective.loss,
        dist_ctx=dist_ctx,
        dtype=case.dtype,
        options=case.options,
        compile_model=case.compile_model,
        init_weights=lambda model: init_weights(model, seed),
    )


def _local_bytes(tensors: Iterable[Tensor]) -> int:
    return sum(local.numel() * local.element_size() for local in map(local_tensor, tensors))


def relative_differences(result: ParityResult, reference: ParityResult) -> dict[str, float]:
    """Largest relative differences, by the names of a `Bound`, over all steps and tensors."""

    def largest(ours: list[float], theirs: list[float]) -> float:
        return max(map(relative_difference, ours, theirs))

    weights = [
        weights_difference(name, result.weights[name], tensor)
        for name, tensor in reference.weights.items()
    ]
    return {
        "loss": largest(result.losses, reference.losses),
        "gradient_norm": largest(result.grad_norms, reference.grad_norms),
        "weights": max(weights),
    }


def weights_difference(
    name: str, ours: Tensor, theirs: Tensor, order: float = inf, at_least: float = 1e-12
) -> float:
    """The norm of a tensor's difference, relative to that of `theirs`, or to a larger `at_least`.

    order: of the norm, by default that of the largest elements. Infinite where anything is not
    finite. Biases on keys are left out.
    """
    difference = ours.float() - theirs.float()
    if not (difference.isfinite().all() and isfinite(at_least)):
        return inf
    if name.endswith(KEY_BIASES):
        return 0.0
    if name.endswith("c_attn.bias"):
        queries, _, values = difference.chunk(3)
        difference = torch.cat([queries, values])
    norm = partial(torch.linalg.vector_norm, ord=order, dtype=torch.float64)
    return float(norm(difference) / norm(theirs.float()).clamp(min=at_least))


def run_single(case: ParityCase, data: ParityData, dist_ctx: DistributedContext) -> ParityResult:
    """The result of one process on the same device.

    It is the reference for all cases of one model and optimizer.
    """
    single = ParallelOptions(engine="single")
    case = replace(case, options=single, compile_model=False, accumulation=1)
    return run_case(case, data, DistributedContext(RankInfo(), dist_ctx.device, None))


def strategy_cases(
    world_size: int, compile_model: bool, dtype: torch.dtype = torch.float32
) -> list[ParityCase]:
    """Every strategy that fits this number of ranks, computing in `dtype`."""
    half = world_size // 2 if world_size % 2 == 0 else 1
    full: dict[str, Any] = {"activation_checkpointing": FullCheckpointing.name}
    hybrid: dict[str, Any] = {"sharding": "hybrid-full-shard", "shard_degree": half}
    fsdp1 = partial(_case, engine="fsdp1")
    fsdp2 = partial(_case, engine="fsdp2")
    hybrids = [
        ("hybrid-full-shard", hybrid),
        ("hybrid-grad-shard", {**hybrid, "sharding": "hybrid-grad-shard"}),
    ]
    cases = []
    if world_size == 1:
        cases.append(_case("one process, 2 micro-batches", 2, engine="single"))
    else:
        cases.append(_case("ddp", engine="ddp"))
        cases += [fsdp1(f"fsdp1 {name}", sharding=name) for name in ("full-shard", "grad-shard")]
    cases += [
        fsdp2(f"fsdp2 {name}", sharding=name) for name in ("full-shard", "grad-shard", "no-shard")
    ]
    if half > 1:  # fsdp1 does not shard over groups of one
        cases += [fsdp1(f"fsdp1 {name}, groups of {half}", **options) for name, options in hybrids]
    if world_size > 1:
        cases += [fsdp2(f"fsdp2 {name}, groups of {half}", **options) for name, options in hybrids]
    for mode in [*CHECKPOINTING_MODES][1:]:
        cases.append(fsdp2(f"fsdp2, checkpointing {mode}", activation_checkpointing=mode))
    cases += [
        fsdp2("fsdp2, 2 micro-batches", 2),
        fsdp2("fsdp2, 2 micro-batches reduced once", 2, reduce_every_micro_batch=False),
        fsdp2("fsdp2 grad-shard, 2 micro-batches", 2, sharding="grad-shard"),
        fsdp2("fsdp2, CPU offload", cpu_offload=True),
        fsdp2("fsdp2, activation offload, 2 micro-batches", 2, activation_offload=True),
        fsdp2("fsdp2, prefetch 2, embedding not wrapped", prefetch_blocks=2, wrap_embedding=False),
    ]
    if world_size > 1:
        cases += [
            _case("ddp, checkpointing full, 2 micro-batches", 2, engine="ddp", **full),
            fsdp1("fsdp1, checkpointing full", **full),
            fsdp2(f"fsdp2 hybrid-full-shard, groups of {half}, 2 micro-batches", 2, **hybrid),
        ]
    cases += _model_parallel_cases(world_size)
    if compile_model:
        chosen = ("tensor 2", "context 2", "pipeline 2, 4 micro-batches")
        compiled = [fsdp2("fsdp2"), fsdp2("fsdp2, checkpointing full", **full)]
        compiled += [each for each in cases if each.name in chosen]
        cases += [
            replace(case, name=f"{case.name}, compiled", compile_model=True) for case in compiled
        ]
    return [replace(case, dtype=dtype) for case in cases]


def _case(name: str, accumulation: int = 1, **options: Any) -> ParityCase:
    return ParityCase(name, ParallelOptions(**options), accumulation)


def _model_parallel_cases(world_size: int) -> list[ParityCase]:
    """Tensor, context and pipeline parallelism that fit, alone and together."""
    full: dict[str, Any] = {"activation_checkpointing": FullCheckpointing.name}
    fsdp2 = partial(_case, engine="fsdp2")
    tensor, context, pipeline = (
        {f"{name}_parallel_degree": 2} for name in ("tensor", "context", "pipeline")
    )
    cases = []
    if world_size % 2 == 0:
        cases += [
            fsdp2("tensor 2", **tensor),
            fsdp2("context 2", **context),
            fsdp2(
                "context 2, checkpointing selective-ops",
                activation_checkpointing=SelectiveOperators.name,
                **context,
            ),
            fsdp2("pipeline 2, 4 micro-batches", 4, **pipeline),
            fsdp2(
                "pipeline 2, interleaved, 4 micro-batches",
                4,
                pipeline_schedule="interleaved",
                **pipeline,
            ),
        ]
    if world_size == 2:
        cases.append(fsdp2("tensor 2, checkpointing full, 2 micro-batches", 2, **full, **tensor))
        cases.append(fsdp2("tensor 2, activation offload", activation_offload=True, **tensor))
        cases.append(
            fsdp2(
                "pipeline 2, activation offload, 4 micro-batches",
                4,
                activation_offload=True,
                **full,
                **pipeline,
            )
        )
    if world_size % 4 == 0:
        cases += [
            fsdp2("tensor 2 × context 2", **tensor, **context),
            fsdp2("tensor 2 × pipeline 2, 2 micro-batches", 2, **tensor, **pipeline),
            fsdp2("context 2 × pipeline 2, 2 micro-batches", 2, **context, **pipeline),
            fsdp2("context 4, grad-shard", context_parallel_degree=4, sharding="grad-shard"),
            fsdp2(
                "tensor 2, hybrid-full-shard, groups of 2",
                sharding="hybrid-full-shard",
                shard_degree=2,
                **tensor,
            ),
        ]
    return cases


def cases_of_other_models(
    world_size: int, compile_model: bool, dtype: torch.dtype = torch.float32
) -> list[ParityCase]:
    """Strategies of a small mixture of experts, a hybrid with linear attention, and one that is
    both, in fp32.

    The rounding of bf16 chooses other experts for some tokens.
    """
    if dtype != torch.float32:
        return []
    plain = [
        case
        for case in strategy_cases(world_size, compile_model)
        if case.name in OTHER_MODELS_CASES
    ]
    experts = [
        case
        for case in expert_parallel_cases(world_size)
        if compile_model or not case.compile_model
    ]
    models = {
        "mixture": (SMALL_MIXTURE, [*plain, *experts]),
        "hybrid": (SMALL_HYBRID, plain),
        "hybrid mixture": (SMALL_HYBRID_MIXTURE, [*plain, *experts]),
    }
    return [
        replace(case, name=f"{name}: {case.name}", model_config=model)
        for name, (model, cases) in models.items()
        for case in cases
    ]


def expert_parallel_cases(world_size: int) -> list[ParityCase]:
    """Expert parallelism that fits, alone and with other cuts, for a mixture of 8 experts."""
    full: dict[str, Any] = {"activation_checkpointing": FullCheckpointing.name}
    selective: dict[str, Any] = {"activation_checkpointing": SelectiveOperators.name}
    tensor, context, pipeline, experts = (
        {f"{name}_parallel_degree": 2} for name in ("tensor", "context", "pipeline", "expert")
    )
    fsdp2 = partial(_case, engine="fsdp2")
    cases = []
    if world_size % 2 == 0:
        cases += [
            fsdp2("experts 2", **experts),
            fsdp2("experts 2, checkpointing full, 2 micro-batches", 2, **experts, **full),
            fsdp2(
                "experts 2 grad-shard, CPU offload",
                sharding="grad-shard",
                cpu_offload=True,
                **experts,
            ),
            fsdp2("experts 2 × tensor 2", **experts, **tensor),
            fsdp2(
                "experts 2 × context 2, checkpointing selective-ops",
                **experts,
                **context,
                **selective,
            ),
            replace(
                fsdp2("experts 2, checkpointing full, compiled", **experts, **full),
                compile_model=True,
            ),
        ]
    if world_size % 4 == 0:
        cases += [
            fsdp2("experts 4", expert_parallel_degree=4),
            fsdp2(
                "experts 2, hybrid-full-shard, groups of 2",
                sharding="hybrid-full-shard",
                shard_degree=2,
                **experts,
            ),
            fsdp2("experts 2 × tensor 2, no-shard", sharding="no-shard", **experts, **tensor),
            fsdp2(
                "experts 4 × tensor 2 × context 2", expert_parallel_degree=4, **tensor, **context
            ),
            fsdp2(
                "experts 2 × pipeline 2, interleaved",
                4,
                pipeline_schedule="interleaved",
                **experts,
                **pipeline,
                **full,
            ),
            fsdp2("experts 2 × tensor 2 × pipeline 2", 2, **experts, **tensor, **pipeline),
        ]
    if world_size % 8 == 0:
        name = "experts 4 × tensor 2 × pipeline 2"
        cases.append(fsdp2(name, 2, expert_parallel_degree=4, **tensor, **pipeline))
    return cases
