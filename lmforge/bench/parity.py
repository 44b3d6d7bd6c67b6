"""Does every strategy compute the same here? A small model trained a few steps under each, beside one process alone.

What `lmforge doctor --parity` shows, and what the tests of the strategies check: losses, gradient norms and weights.
"""

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from lmforge.bench.activation_tracker import ActivationTracker
from lmforge.cluster.distributed import DistributedContext
from lmforge.cluster.rank_info import RankInfo
from lmforge.config.run import OptimizerOptions
from lmforge.data.batch import Batch
from lmforge.data.token_rng import token_rng_keys
from lmforge.model import build_model
from lmforge.model.config import ModelConfig
from lmforge.model.init_weights import init_weights
from lmforge.model.lora import LoraConfig, add_lora
from lmforge.objectives.language import NextTokenObjective
from lmforge.parallel.dims import data_parallel_rank_and_size
from lmforge.parallel.parallelize import ParallelStrategy, parallelize
from lmforge.parallel.precision import convert_to_float8
from lmforge.train.loop import train_step
from lmforge.train.metrics import peak_memory_gib
from lmforge.train.optimizer import build_optimizer, named_optimizer_state

SMALL_MODEL = ModelConfig(
    vocab_size=509,
    hidden_size=72,
    intermediate_size=100,
    num_hidden_layers=4,
    num_attention_heads=6,
    num_key_value_heads=2,
)
# A larger epsilon than one trains with: AdamW's step then follows the size of a gradient, so that a gradient of the wrong
# scale is seen, and not the sign of one that is zero but for rounding.
OPTIMIZER = OptimizerOptions(lr=2e-3, eps=1e-3, weight_decay=0.1)
MAX_GRAD_NORM = 0.5


@dataclass(frozen=True)
class ParityCase:
    """One way to train the small model: what is compared, by a name for the table."""

    name: str
    strategy: ParallelStrategy = field(default_factory=ParallelStrategy)
    compile_model: bool = False
    accumulation: int = 1
    model_config: ModelConfig = SMALL_MODEL
    optimizer: OptimizerOptions = OPTIMIZER
    dropout: float = 0.0
    neftune_noise_alpha: float = 0.0
    lora: LoraConfig | None = None
    emulate_float8: bool = False


@dataclass(frozen=True)
class ParityResult:
    """losses, gradient_norms: of each step. weights: whole tensors by name, at the end, on the first rank only.
    bytes: of parameters, gradients and optimizer states that this rank holds at the end of a step, and of activations
    between forward and backward of its first micro-batch; the latter not where blocks are compiled.
    collectives: how many of each kind one step takes; not counted where blocks are compiled."""

    losses: list[float]
    grad_norms: list[float]
    weights: dict[str, Tensor]
    memory_bytes: dict[str, int]
    collective_counts: dict[str, int]
    tokens_per_second: float
    memory_gib: float


@dataclass(frozen=True)
class ParityData:
    """The data: `rows` rows of `length` tokens a step, drawn from the seed. Rows are ragged, and some are all masked."""

    sequences: int
    sequence_length: int = 64
    steps: int = 10
    seed: int = 0

    def batch(self, step: int, vocab_size: int) -> Batch:
        """The global batch of a step, the same on every rank."""
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + step)
        draw = partial(torch.randint, generator=generator)
        tokens = draw(0, vocab_size, (self.sequences, self.sequence_length))
        slots = torch.arange(self.sequence_length).expand(self.sequences, -1)
        cut, end = (
            draw(1, self.sequence_length, (self.sequences, 1)),
            draw(self.sequence_length // 2, self.sequence_length + 1, (self.sequences, 1)),
        )
        documents = torch.where(slots < end, (slots >= cut).int(), -1).int()
        positions = torch.where(slots >= cut, slots - cut, slots)
        # A prediction that can be learnt: what follows a token depends on it alone.
        targets = (tokens * 7 + 3) % vocab_size
        targets[documents < 0] = -100
        targets[torch.rand(targets.shape, generator=generator) < 0.2] = -100
        # In every other step all rows of the first ranks are masked.
        if step % 2:
            targets[: self.sequences // 2] = -100
        keys = torch.from_numpy(
            token_rng_keys(self.seed, step * self.sequences, (step + 1) * self.sequences, self.sequence_length)
        )
        return Batch(tokens, targets, positions, documents, keys)


def run_case(case: ParityCase, data: ParityData, dist_ctx: DistributedContext) -> ParityResult:
    """Train as `case` says, on all ranks together. Raises UserError where it does not fit them."""
    objective = NextTokenObjective()
    model = build_model(case.model_config, "meta")
    model.dropout, model.neftune_noise_alpha = case.dropout, case.neftune_noise_alpha
    if case.lora is not None:
        add_lora(model, case.lora)
    if case.emulate_float8:
        convert_to_float8(model, emulate=True)
    trained = parallelize(
        model,
        objective.loss,
        dist_ctx=dist_ctx,
        dtype=torch.float32,
        compile_model=case.compile_model,
        strategy=case.strategy,
        init_weights=lambda model: init_weights(model, data.seed),
    )
    optimizer = build_optimizer(trained.model, case.optimizer, trained.parameter_shapes())
    losses, norms = [], []
    place, places = data_parallel_rank_and_size(case.strategy, dist_ctx.rank_info.rank, dist_ctx.world_size)
    share = data.sequences // places
    first = place * share
    held: dict[str, int] = {}
    counting, watching = _CollectiveCounter(), ActivationTracker()
    began = 0.0
    for step in range(data.steps):
        if step == 1:
            began = time.perf_counter()
        whole = data.batch(step, case.model_config.vocab_size)
        mine = whole[first : first + share].to(dist_ctx.device)

        observed = step + 1 == data.steps and not case.compile_model

        def weighed(phase: str, observed: bool = observed) -> None:
            if phase == "backward" and observed:
                held.setdefault("activations", watching.live_bytes())
            if phase == "optimizer":
                held["parameters"] = _local_bytes(trained.parameters())
                held["gradients"] = _local_bytes(parameter.grad for parameter in trained.parameters())

        with counting if observed else nullcontext(), watching if observed else nullcontext():
            norm, metrics = train_step(
                trained,
                optimizer,
                list(_split_batch(mine, case.accumulation)),
                objective.num_items,
                lr=case.optimizer.lr,
                max_grad_norm=MAX_GRAD_NORM,
                set_phase=weighed,
            )
        norms.append(norm)
        total, count = (torch.stack([told["loss"][part] for told in metrics]).sum() for part in (0, 1))
        losses.append(dist_ctx.all_reduce_sum(total) / dist_ctx.all_reduce_sum(count).clamp(min=1.0))
    told = torch.stack([*losses, *norms]).double().tolist()
    seconds = time.perf_counter() - began
    held["optimizer"] = _local_bytes(value for state in optimizer.state.values() for value in state.values())
    state = trained.state_dict(optimizer, named_optimizer_state)["model"]
    weights = {name: _full_tensor(tensor).detach().float().cpu().clone() for name, tensor in state.items()}
    if case.strategy.pipeline_parallel_degree > 1:  # each rank has those of its stages
        weights = {name: tensor for part in dist_ctx.all_gather(weights) for name, tensor in part.items()}
    return ParityResult(
        losses=told[: data.steps],
        grad_norms=told[data.steps :],
        weights=weights if dist_ctx.is_rank0 else {},
        memory_bytes=held,
        collective_counts=dict(counting.counts),
        tokens_per_second=(data.steps - 1) * data.sequences * data.sequence_length / seconds,
        memory_gib=peak_memory_gib(dist_ctx.device),
    )


class _CollectiveCounter(TorchDispatchMode):
    """Counts the collectives of the training group while it is entered, by torch's names for them."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        namespace, name = function.name().split("::")
        if namespace in ("c10d", "_c10d_functional") and not name.startswith(("wait", "_wrap")):
            self.counts[name.partition(".")[0].strip("_")] += 1
        return function(*args, **(kwargs or {}))


def _split_batch(batch: Batch, count: int) -> Iterator[Batch]:
    rows = len(batch.tokens) // count
    for number in range(count):
        yield batch[number * rows : (number + 1) * rows]


def _full_tensor(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _local_bytes(tensors: Any) -> int:
    local = (tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors if tensor is not None)
    return sum(tensor.numel() * tensor.element_size() for tensor in local)


def relative_differences(result: ParityResult, reference: ParityResult) -> dict[str, float]:
    """Largest relative differences: of `loss` and `gradient_norm` over all steps, of `weights` to their tensor's largest."""

    def relative(mine: list[float], theirs: list[float]) -> float:
        return max(abs(a - b) / max(abs(b), 1e-12) for a, b in zip(mine, theirs, strict=True))

    weights = max(
        float((result.weights[name] - tensor).abs().max() / tensor.abs().max()) for name, tensor in reference.weights.items()
    )
    return {
        "loss": relative(result.losses, reference.losses),
        "gradient_norm": relative(result.grad_norms, reference.grad_norms),
        "weights": weights,
    }


def run_single(case: ParityCase, data: ParityData, dist_ctx: DistributedContext) -> ParityResult:
    """What this process computes by itself on the same device: what all cases of one shape and optimizer are compared to."""
    lone = DistributedContext(RankInfo(), dist_ctx.device, None)
    return run_case(replace(case, strategy=ParallelStrategy(engine="single"), compile_model=False, accumulation=1), data, lone)


def strategy_cases(world_size: int, compile_model: bool) -> list[ParityCase]:
    """Every strategy that fits this number of ranks."""
    found = (
        [ParityCase("one process, 2 micro-batches", ParallelStrategy(engine="single"), accumulation=2)]
        if world_size == 1
        else []
    )
    engines = [("ddp", None), ("fsdp1", "full-shard"), ("fsdp1", "grad-shard")] if world_size > 1 else []
    engines += [("fsdp2", name) for name in ("full-shard", "grad-shard", "no-shard")]
    found += [ParityCase(" ".join(filter(None, pair)), ParallelStrategy(engine=pair[0], sharding=pair[1])) for pair in engines]
    groups = world_size // 2 if world_size % 2 == 0 else 1
    if world_size > 1:
        # A group of one is no group to fsdp1.
        for engine in ("fsdp1", "fsdp2") if groups > 1 else ("fsdp2",):
            for name in ("hybrid-full-shard", "hybrid-grad-shard"):
                hybrid = ParallelStrategy(engine=engine, sharding=name, shard_degree=groups)
                found.append(ParityCase(f"{engine} {name}, groups of {groups}", hybrid))
    base = ParallelStrategy(engine="fsdp2")
    for how in ("full", "selective-blocks", "selective-ops"):
        found.append(ParityCase(f"fsdp2, recompute {how}", replace(base, activation_checkpointing=how)))
    found.append(ParityCase("fsdp2, 2 micro-batches", base, accumulation=2))
    found.append(
        ParityCase("fsdp2, 2 micro-batches reduced once", replace(base, reduce_every_micro_batch=False), accumulation=2)
    )
    found.append(ParityCase("fsdp2, offload", replace(base, cpu_offload=True)))
    found.append(ParityCase("fsdp2, prefetch 2, no embedding unit", replace(base, prefetch_blocks=2, wrap_embedding=False)))
    if world_size > 1:
        found.append(
            ParityCase(
                "ddp, recompute full, 2 micro-batches",
                ParallelStrategy(engine="ddp", activation_checkpointing="full"),
                accumulation=2,
            )
        )
        found.append(ParityCase("fsdp1, recompute full", ParallelStrategy(engine="fsdp1", activation_checkpointing="full")))
        hybrid = ParallelStrategy(engine="fsdp2", sharding="hybrid-full-shard", shard_degree=groups)
        found.append(ParityCase(f"fsdp2 hybrid-full-shard, groups of {groups}, 2 micro-batches", hybrid, accumulation=2))
    found += _model_parallel_cases(world_size)
    if compile_model:
        found.append(ParityCase("fsdp2, compiled", base, compile_model=True))
        found.append(
            ParityCase("fsdp2, compiled, recompute full", replace(base, activation_checkpointing="full"), compile_model=True)
        )
        chosen = ("tensor 2", "context 2", "pipeline 2, 4 micro-batches")
        found += [replace(case, name=f"{case.name}, compiled", compile_model=True) for case in found if case.name in chosen]
    return found


def _model_parallel_cases(world_size: int) -> list[ParityCase]:
    """Tensor, context and pipeline parallelism that fit: alone and with each other."""
    base = ParallelStrategy(engine="fsdp2")
    found = []
    if world_size % 2 == 0:
        found += [
            ParityCase("tensor 2", replace(base, tensor_parallel_degree=2)),
            ParityCase("context 2", replace(base, context_parallel_degree=2)),
            ParityCase(
                "context 2, recompute operators",
                replace(base, context_parallel_degree=2, activation_checkpointing="selective-ops"),
            ),
            ParityCase("pipeline 2, 4 micro-batches", replace(base, pipeline_parallel_degree=2), accumulation=4),
            ParityCase(
                "pipeline 2, interleaved, 4 micro-batches",
                replace(base, pipeline_parallel_degree=2, pipeline_schedule="interleaved"),
                accumulation=4,
            ),
        ]
    if world_size == 2:
        again = replace(base, tensor_parallel_degree=2, activation_checkpointing="full")
        found.append(ParityCase("tensor 2, recompute full, 2 micro-batches", again, accumulation=2))
    if world_size % 4 == 0:
        found += [
            ParityCase("tensor 2 × context 2", replace(base, tensor_parallel_degree=2, context_parallel_degree=2)),
            ParityCase(
                "tensor 2 × pipeline 2, 2 micro-batches",
                replace(base, tensor_parallel_degree=2, pipeline_parallel_degree=2),
                accumulation=2,
            ),
            ParityCase(
                "context 2 × pipeline 2, 2 micro-batches",
                replace(base, context_parallel_degree=2, pipeline_parallel_degree=2),
                accumulation=2,
            ),
            ParityCase("context 4, grad-shard", replace(base, context_parallel_degree=4, sharding="grad-shard")),
            ParityCase(
                "tensor 2, hybrid-full-shard, groups of 2",
                replace(base, tensor_parallel_degree=2, sharding="hybrid-full-shard", shard_degree=2),
            ),
        ]
    return found
