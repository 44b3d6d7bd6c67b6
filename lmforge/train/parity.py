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

from lmforge.cluster.environment import Place
from lmforge.cluster.ranks import Ranks
from lmforge.config import OptimizerOptions
from lmforge.data.batch import Batch
from lmforge.data.noise import token_keys
from lmforge.model import build
from lmforge.model.initial import initialise
from lmforge.model.lora import LoraConfig, add_lora
from lmforge.model.shapes import ModelConfig
from lmforge.objectives.language import NextToken
from lmforge.parallel.apply import Strategy, spread
from lmforge.parallel.mesh import data_place
from lmforge.parallel.precision import use_float8
from lmforge.train.loop import train_step
from lmforge.train.memory import Activations
from lmforge.train.metrics import peak_memory_gib
from lmforge.train.optim import build_optimizer, state_by_name

SMALL = ModelConfig(
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
LONGEST_GRADIENT = 0.5


@dataclass(frozen=True)
class Case:
    """One way to train the small model: what is compared, by a name for the table."""

    name: str
    strategy: Strategy = field(default_factory=Strategy)
    compiled: bool = False
    accumulation: int = 1
    shape: ModelConfig = SMALL
    optimizer: OptimizerOptions = OPTIMIZER
    dropout: float = 0.0
    neftune_alpha: float = 0.0
    lora: LoraConfig | None = None
    float8_emulated: bool = False


@dataclass(frozen=True)
class Outcome:
    """losses, gradient_norms: of each step. weights: whole tensors by name, at the end, on the first rank only.
    bytes: of parameters, gradients and optimizer states that this rank holds at the end of a step, and of activations
    between forward and backward of its first micro-batch; the latter not where blocks are compiled.
    collectives: how many of each kind one step takes; not counted where blocks are compiled."""

    losses: list[float]
    gradient_norms: list[float]
    weights: dict[str, Tensor]
    bytes: dict[str, int]
    collectives: dict[str, int]
    tokens_per_second: float
    memory_gib: float


@dataclass(frozen=True)
class Task:
    """The data: `rows` rows of `length` tokens a step, drawn from the seed. Rows are ragged, and some are all masked."""

    rows: int
    length: int = 64
    steps: int = 10
    seed: int = 0

    def batch(self, step: int, vocabulary: int) -> Batch:
        """The global batch of a step, the same on every rank."""
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + step)
        draw = partial(torch.randint, generator=generator)
        tokens = draw(0, vocabulary, (self.rows, self.length))
        slots = torch.arange(self.length).expand(self.rows, -1)
        cut, end = draw(1, self.length, (self.rows, 1)), draw(self.length // 2, self.length + 1, (self.rows, 1))
        documents = torch.where(slots < end, (slots >= cut).int(), -1).int()
        positions = torch.where(slots >= cut, slots - cut, slots)
        # A prediction that can be learnt: what follows a token depends on it alone.
        targets = (tokens * 7 + 3) % vocabulary
        targets[documents < 0] = -100
        targets[torch.rand(targets.shape, generator=generator) < 0.2] = -100
        # In every other step all rows of the first ranks are masked.
        if step % 2:
            targets[: self.rows // 2] = -100
        keys = torch.from_numpy(token_keys(self.seed, step * self.rows, (step + 1) * self.rows, self.length))
        return Batch(tokens, targets, positions, documents, keys)


def trial(case: Case, task: Task, ranks: Ranks) -> Outcome:
    """Train as `case` says, on all ranks together. Raises Mistake where it does not fit them."""
    objective = NextToken()
    model = build(case.shape, seed=None, device="meta")
    model.dropout, model.neftune_alpha = case.dropout, case.neftune_alpha
    if case.lora is not None:
        add_lora(model, case.lora)
    if case.float8_emulated:
        use_float8(model, emulate=True)
    trained = spread(
        model,
        objective.loss,
        ranks=ranks,
        dtype=torch.float32,
        compiled=case.compiled,
        strategy=case.strategy,
        fill=lambda model: initialise(model, task.seed),
    )
    optimizer = build_optimizer(trained.model, case.optimizer, trained.shapes())
    losses, norms = [], []
    place, places = data_place(case.strategy, ranks.place.rank, ranks.count)
    share = task.rows // places
    first = place * share
    held: dict[str, int] = {}
    counting, watching = _Collectives(), Activations()
    began = 0.0
    for step in range(task.steps):
        if step == 1:
            began = time.perf_counter()
        whole = task.batch(step, case.shape.vocab_size)
        mine = whole[first : first + share].to(ranks.device)

        observed = step + 1 == task.steps and not case.compiled

        def weighed(phase: str, observed: bool = observed) -> None:
            if phase == "backward" and observed:
                held.setdefault("activations", watching.bytes_alive())
            if phase == "optimizer":
                held["parameters"] = _bytes(trained.parameters())
                held["gradients"] = _bytes(parameter.grad for parameter in trained.parameters())

        with counting if observed else nullcontext(), watching if observed else nullcontext():
            norm, metrics = train_step(
                trained,
                optimizer,
                list(_micro_batches(mine, case.accumulation)),
                objective.weight,
                lr=case.optimizer.lr,
                clip_norm=LONGEST_GRADIENT,
                mark=weighed,
            )
        norms.append(norm)
        total, count = (torch.stack([told["loss"][part] for told in metrics]).sum() for part in (0, 1))
        losses.append(ranks.sum_(total) / ranks.sum_(count).clamp(min=1.0))
    told = torch.stack([*losses, *norms]).double().tolist()
    seconds = time.perf_counter() - began
    held["optimizer"] = _bytes(value for state in optimizer.state.values() for value in state.values())
    state = trained.state(optimizer, state_by_name)["model"]
    weights = {name: _whole(tensor).detach().float().cpu().clone() for name, tensor in state.items()}
    if case.strategy.pipeline_ranks > 1:  # each rank has those of its stages
        weights = {name: tensor for part in ranks.gather(weights) for name, tensor in part.items()}
    return Outcome(
        losses=told[: task.steps],
        gradient_norms=told[task.steps :],
        weights=weights if ranks.first else {},
        bytes=held,
        collectives=dict(counting.seen),
        tokens_per_second=(task.steps - 1) * task.rows * task.length / seconds,
        memory_gib=peak_memory_gib(ranks.device),
    )


class _Collectives(TorchDispatchMode):
    """Counts the collectives of the training group while it is entered, by torch's names for them."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        namespace, name = function.name().split("::")
        if namespace in ("c10d", "_c10d_functional") and not name.startswith(("wait", "_wrap")):
            self.seen[name.partition(".")[0].strip("_")] += 1
        return function(*args, **(kwargs or {}))


def _micro_batches(batch: Batch, count: int) -> Iterator[Batch]:
    rows = len(batch.tokens) // count
    for number in range(count):
        yield batch[number * rows : (number + 1) * rows]


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _bytes(tensors: Any) -> int:
    local = (tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors if tensor is not None)
    return sum(tensor.numel() * tensor.element_size() for tensor in local)


def difference(outcome: Outcome, reference: Outcome) -> dict[str, float]:
    """Largest relative differences: of `loss` and `gradient_norm` over all steps, of `weights` to their tensor's largest."""

    def relative(mine: list[float], theirs: list[float]) -> float:
        return max(abs(a - b) / max(abs(b), 1e-12) for a, b in zip(mine, theirs, strict=True))

    weights = max(
        float((outcome.weights[name] - tensor).abs().max() / tensor.abs().max()) for name, tensor in reference.weights.items()
    )
    return {
        "loss": relative(outcome.losses, reference.losses),
        "gradient_norm": relative(outcome.gradient_norms, reference.gradient_norms),
        "weights": weights,
    }


def alone(case: Case, task: Task, ranks: Ranks) -> Outcome:
    """What this process computes by itself on the same device: what all cases of one shape and optimizer are compared to."""
    lone = Ranks(Place(), ranks.device, None)
    return trial(replace(case, strategy=Strategy(engine="alone"), compiled=False, accumulation=1), task, lone)


def cases(ranks: int, compiled: bool) -> list[Case]:
    """Every strategy that fits this number of ranks."""
    found = [Case("one process, 2 micro-batches", Strategy(engine="alone"), accumulation=2)] if ranks == 1 else []
    engines = [("ddp", None), ("fsdp1", "full-shard"), ("fsdp1", "grad-shard")] if ranks > 1 else []
    engines += [("fsdp2", name) for name in ("full-shard", "grad-shard", "no-shard")]
    found += [Case(" ".join(filter(None, pair)), Strategy(engine=pair[0], sharding=pair[1])) for pair in engines]
    groups = ranks // 2 if ranks % 2 == 0 else 1
    if ranks > 1:
        # A group of one is no group to fsdp1.
        for engine in ("fsdp1", "fsdp2") if groups > 1 else ("fsdp2",):
            for name in ("hybrid-full-shard", "hybrid-grad-shard"):
                hybrid = Strategy(engine=engine, sharding=name, hybrid_ranks=groups)
                found.append(Case(f"{engine} {name}, groups of {groups}", hybrid))
    base = Strategy(engine="fsdp2")
    for how in ("full", "blocks", "operators"):
        found.append(Case(f"fsdp2, recompute {how}", replace(base, recompute=how)))
    found.append(Case("fsdp2, 2 micro-batches", base, accumulation=2))
    found.append(Case("fsdp2, 2 micro-batches reduced once", replace(base, reduce_every_micro_batch=False), accumulation=2))
    found.append(Case("fsdp2, offload", replace(base, offload=True)))
    found.append(Case("fsdp2, prefetch 2, no embedding unit", replace(base, prefetch=2, embedding_unit=False)))
    if ranks > 1:
        found.append(Case("ddp, recompute full, 2 micro-batches", Strategy(engine="ddp", recompute="full"), accumulation=2))
        found.append(Case("fsdp1, recompute full", Strategy(engine="fsdp1", recompute="full")))
        hybrid = Strategy(engine="fsdp2", sharding="hybrid-full-shard", hybrid_ranks=groups)
        found.append(Case(f"fsdp2 hybrid-full-shard, groups of {groups}, 2 micro-batches", hybrid, accumulation=2))
    found += _model_parallel(ranks)
    if compiled:
        found.append(Case("fsdp2, compiled", base, compiled=True))
        found.append(Case("fsdp2, compiled, recompute full", replace(base, recompute="full"), compiled=True))
        chosen = ("tensor 2", "context 2", "pipeline 2, 4 micro-batches")
        found += [replace(case, name=f"{case.name}, compiled", compiled=True) for case in found if case.name in chosen]
    return found


def _model_parallel(ranks: int) -> list[Case]:
    """Tensor, context and pipeline parallelism that fit: alone and with each other."""
    base = Strategy(engine="fsdp2")
    found = []
    if ranks % 2 == 0:
        found += [
            Case("tensor 2", replace(base, tensor_ranks=2)),
            Case("context 2", replace(base, context_ranks=2)),
            Case("context 2, recompute operators", replace(base, context_ranks=2, recompute="operators")),
            Case("pipeline 2, 4 micro-batches", replace(base, pipeline_ranks=2), accumulation=4),
            Case(
                "pipeline 2, interleaved, 4 micro-batches",
                replace(base, pipeline_ranks=2, pipeline_schedule="interleaved"),
                accumulation=4,
            ),
        ]
    if ranks == 2:
        again = replace(base, tensor_ranks=2, recompute="full")
        found.append(Case("tensor 2, recompute full, 2 micro-batches", again, accumulation=2))
    if ranks % 4 == 0:
        found += [
            Case("tensor 2 × context 2", replace(base, tensor_ranks=2, context_ranks=2)),
            Case("tensor 2 × pipeline 2, 2 micro-batches", replace(base, tensor_ranks=2, pipeline_ranks=2), accumulation=2),
            Case("context 2 × pipeline 2, 2 micro-batches", replace(base, context_ranks=2, pipeline_ranks=2), accumulation=2),
            Case("context 4, grad-shard", replace(base, context_ranks=4, sharding="grad-shard")),
            Case(
                "tensor 2, hybrid-full-shard, groups of 2",
                replace(base, tensor_ranks=2, sharding="hybrid-full-shard", hybrid_ranks=2),
            ),
        ]
    return found
