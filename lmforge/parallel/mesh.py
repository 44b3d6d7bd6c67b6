"""Which ranks share what: a strategy as one device mesh, pipeline × replicate × shard × context × tensor."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from lmforge.config import BatchPlan, StageConfig, batch_plan
from lmforge.errors import Mistake

if TYPE_CHECKING:  # a dry run asks for a strategy without importing torch
    from torch.distributed.device_mesh import DeviceMesh

PIPELINE, REPLICATE, SHARD, CONTEXT, TENSOR = "pipeline", "replicate", "shard", "context", "tensor"


class Chosen(Protocol):
    """The options of `[parallel]` that decide what fits; a ParallelOptions, or a Strategy."""

    @property
    def engine(self) -> str: ...
    @property
    def sharding(self) -> str | None: ...
    @property
    def hybrid_ranks(self) -> int | None: ...
    @property
    def offload(self) -> bool: ...
    @property
    def prefetch(self) -> int: ...
    @property
    def limit_all_gathers(self) -> bool: ...
    @property
    def forward_prefetch(self) -> bool: ...
    @property
    def tensor_ranks(self) -> int: ...
    @property
    def context_ranks(self) -> int: ...
    @property
    def pipeline_ranks(self) -> int: ...
    @property
    def pipeline_schedule(self) -> str: ...
    @property
    def pipeline_stages(self) -> int | None: ...


@dataclass(frozen=True)
class Sharding:
    """A strategy for a number of ranks: `replicas` copies of the model, each sharded over `shards` ranks.

    keep_gathered: a unit's weights stay whole between its forward and its backward pass.
    tensor, context, pipeline: over how many ranks each matrix, each row and the blocks are spread. The ranks of a context
    are among the `shards`: they hold other tokens of the same rows, so to FSDP they are as good as any.
    """

    name: str
    replicas: int
    shards: int
    keep_gathered: bool
    tensor: int = 1
    context: int = 1
    pipeline: int = 1

    @property
    def hybrid(self) -> bool:
        return self.replicas > 1

    def mesh(self, device_type: str) -> "DeviceMesh":
        """The mesh of all ranks; those that a model exchanges most with are neighbours."""
        from torch.distributed.device_mesh import init_device_mesh

        sizes = self.pipeline, self.replicas, self.shards // self.context, self.context, self.tensor
        names = PIPELINE, REPLICATE, SHARD, CONTEXT, TENSOR
        # A dimension of one rank only costs time, but for the one that FSDP shards over.
        kept = [place for place, size in enumerate(sizes) if size > 1 or names[place] == SHARD]
        return init_device_mesh(
            device_type, tuple(sizes[place] for place in kept), mesh_dim_names=tuple(names[place] for place in kept)
        )

    def fsdp_mesh(self, mesh: "DeviceMesh") -> "DeviceMesh":
        """The part of `mesh` that parameters are sharded over and, where there are replicas, replicated: last is shards."""
        if self.context == 1:
            return mesh[REPLICATE, SHARD] if self.hybrid else mesh[SHARD]
        shards = mesh[SHARD, CONTEXT]._flatten("shard_and_context")
        return type(mesh)._concatenate([mesh[REPLICATE], shards]) if self.hybrid else shards

    def __str__(self) -> str:
        more = {"tensor": self.tensor, "context": self.context, "pipeline": self.pipeline}
        return self.name + "".join(f", {name} over {size}" for name, size in more.items() if size > 1)


def data_ranks(ranks: int, tensor: int, context: int, pipeline: int) -> int:
    """How many of `ranks` get rows of their own; others share those rows. Raises Mistake where they do not fill the mesh."""
    together = tensor * context * pipeline
    if ranks % together:
        given = [("tensor", tensor), ("context", context), ("pipeline", pipeline)]
        asked = ", ".join(f"parallel.{name}_ranks = {size}" for name, size in given if size > 1)
        needed = f"a multiple of {together}" if ranks > together else f"at least {together}"
        raise Mistake(f"{asked}: {ranks} {'rank does' if ranks == 1 else 'ranks do'} not fill that; start {needed}")
    return ranks // together


def sharding(
    name: str,
    ranks: int,
    local_ranks: int,
    hybrid_ranks: int | None,
    tensor: int = 1,
    context: int = 1,
    pipeline: int = 1,
) -> Sharding:
    """The strategy called `name` (as in torch's FSDP) for `ranks` ranks, `local_ranks` of them on a host.

    Hybrid strategies keep a copy (with a pipeline, a stage's copy) in each group of `hybrid_ranks` (default: the ranks
    of one host, or of the stage if they are fewer). Raises Mistake where the ranks do not fill it.
    """
    # Of a pipeline's stage, over the ranks that hold the same part of every matrix.
    alike = data_ranks(ranks, tensor, context, pipeline) * context
    more = {"tensor": tensor, "context": context, "pipeline": pipeline}
    if not name.startswith("hybrid-"):
        if hybrid_ranks is not None:
            raise Mistake(
                f"parallel.hybrid_ranks = {hybrid_ranks}: sharding is {name}; use hybrid-full-shard or hybrid-grad-shard"
            )
        if name == "no-shard" and context > 1:
            raise Mistake("parallel.sharding = no-shard: a context's ranks share the weights out; use grad-shard or full-shard")
        shards = 1 if name == "no-shard" else alike
        return Sharding(name, alike // shards, shards, keep_gathered=name != "full-shard", **more)
    of_stage = alike * tensor
    group = hybrid_ranks or min(local_ranks, of_stage)
    unit = tensor * context
    if group % unit or of_stage % group:
        fitting = ", ".join(str(size) for size in range(unit, of_stage + 1, unit) if of_stage % size == 0)
        asked = f"parallel.hybrid_ranks = {group}" + ("" if hybrid_ranks else " (by default, the ranks of one host)")
        whose = " of each pipeline stage" if pipeline > 1 else ""
        kept = " that keep tensor and context groups together" if unit > 1 else ""
        raise Mistake(f"{asked}: {of_stage} ranks{whose} do not divide into groups of it{kept}; use one of {fitting}")
    shards = group // tensor
    return Sharding(name, alike // shards, shards, keep_gathered=name == "hybrid-grad-shard", **more)


def plan_batches(config: StageConfig, ranks: int) -> BatchPlan:
    """How the global batch of a recipe is cut for so many ranks in all. Raises Mistake where it does not divide."""
    _, places = data_place(config.parallel, 0, ranks)
    return batch_plan(config.train, config.data.length, places)


def data_place(chosen: Chosen, rank: int, ranks: int) -> tuple[int, int]:
    """(which share of the rows `rank` gets, how many shares there are). Raises Mistake where ranks do not fill the mesh."""
    count = data_ranks(ranks, chosen.tensor_ranks, chosen.context_ranks, chosen.pipeline_ranks)
    return rank // (chosen.context_ranks * chosen.tensor_ranks) % count, count


def sharding_of(chosen: Chosen, ranks: int, local_ranks: int) -> Sharding:
    """`sharding` as the options of a recipe ask for it."""
    return sharding(
        chosen.sharding or "full-shard",
        ranks,
        local_ranks,
        chosen.hybrid_ranks,
        tensor=chosen.tensor_ranks,
        context=chosen.context_ranks,
        pipeline=chosen.pipeline_ranks,
    )
