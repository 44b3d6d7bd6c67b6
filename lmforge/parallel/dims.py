"""Which ranks share what: a strategy as one device mesh, pipeline × replicate × shard × context × tensor."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from lmforge.config.batch_plan import BatchPlan, batch_plan
from lmforge.config.stage import StageConfig
from lmforge.errors import UserError

if TYPE_CHECKING:  # a dry run asks for a strategy without importing torch
    from torch.distributed.device_mesh import DeviceMesh

PIPELINE, REPLICATE, SHARD, CONTEXT, TENSOR = "pipeline", "replicate", "shard", "context", "tensor"


class ParallelSettings(Protocol):
    """The options of `[parallel]` that decide what fits; a ParallelOptions, or a Strategy."""

    @property
    def engine(self) -> str: ...
    @property
    def sharding(self) -> str | None: ...
    @property
    def shard_degree(self) -> int | None: ...
    @property
    def cpu_offload(self) -> bool: ...
    @property
    def prefetch_blocks(self) -> int: ...
    @property
    def limit_all_gathers(self) -> bool: ...
    @property
    def forward_prefetch(self) -> bool: ...
    @property
    def tensor_parallel_degree(self) -> int: ...
    @property
    def context_parallel_degree(self) -> int: ...
    @property
    def pipeline_parallel_degree(self) -> int: ...
    @property
    def pipeline_schedule(self) -> str: ...
    @property
    def pipeline_stages_per_rank(self) -> int | None: ...


@dataclass(frozen=True)
class ParallelDims:
    """A strategy for a number of ranks: `replicas` copies of the model, each sharded over `shards` ranks.

    keep_gathered: a unit's weights stay whole between its forward and its backward pass.
    tensor, context, pipeline: over how many ranks each matrix, each row and the blocks are spread. The ranks of a context
    are among the `shards`: they hold other tokens of the same rows, so to FSDP they are as good as any.
    """

    sharding_name: str
    replicate_degree: int
    fsdp_degree: int
    keep_unsharded: bool
    tensor_parallel_degree: int = 1
    context_parallel_degree: int = 1
    pipeline_parallel_degree: int = 1

    @property
    def is_hybrid(self) -> bool:
        return self.replicate_degree > 1

    def build_mesh(self, device_type: str) -> "DeviceMesh":
        """The mesh of all ranks; those that a model exchanges most with are neighbours."""
        from torch.distributed.device_mesh import init_device_mesh

        sizes = (
            self.pipeline_parallel_degree,
            self.replicate_degree,
            self.fsdp_degree // self.context_parallel_degree,
            self.context_parallel_degree,
            self.tensor_parallel_degree,
        )
        names = PIPELINE, REPLICATE, SHARD, CONTEXT, TENSOR
        # A dimension of one rank only costs time, but for the one that FSDP shards over.
        kept = [place for place, size in enumerate(sizes) if size > 1 or names[place] == SHARD]
        return init_device_mesh(
            device_type, tuple(sizes[place] for place in kept), mesh_dim_names=tuple(names[place] for place in kept)
        )

    def fsdp_mesh(self, mesh: "DeviceMesh") -> "DeviceMesh":
        """The part of `mesh` that parameters are sharded over and, where there are replicas, replicated: last is shards."""
        if self.context_parallel_degree == 1:
            return mesh[REPLICATE, SHARD] if self.is_hybrid else mesh[SHARD]
        shards = mesh[SHARD, CONTEXT]._flatten("shard_and_context")
        return type(mesh)._concatenate([mesh[REPLICATE], shards]) if self.is_hybrid else shards

    def __str__(self) -> str:
        more = {
            "tensor": self.tensor_parallel_degree,
            "context": self.context_parallel_degree,
            "pipeline": self.pipeline_parallel_degree,
        }
        return self.sharding_name + "".join(f", {name} over {size}" for name, size in more.items() if size > 1)


def data_parallel_size(
    world_size: int, tensor_parallel_degree: int, context_parallel_degree: int, pipeline_parallel_degree: int
) -> int:
    """How many of `ranks` get rows of their own; others share those rows. Raises UserError where they do not fill the mesh."""
    together = tensor_parallel_degree * context_parallel_degree * pipeline_parallel_degree
    if world_size % together:
        given = [
            ("tensor", tensor_parallel_degree),
            ("context", context_parallel_degree),
            ("pipeline", pipeline_parallel_degree),
        ]
        asked = ", ".join(f"parallel.{name}_parallel_degree = {size}" for name, size in given if size > 1)
        needed = f"a multiple of {together}" if world_size > together else f"at least {together}"
        raise UserError(f"{asked}: {world_size} {'rank does' if world_size == 1 else 'ranks do'} not fill that; start {needed}")
    return world_size // together


def make_parallel_dims(
    sharding_name: str,
    world_size: int,
    local_world_size: int,
    shard_degree: int | None,
    tensor_parallel_degree: int = 1,
    context_parallel_degree: int = 1,
    pipeline_parallel_degree: int = 1,
) -> ParallelDims:
    """The strategy called `name` (as in torch's FSDP) for `ranks` ranks, `local_ranks` of them on a host.

    Hybrid strategies keep a copy (with a pipeline, a stage's copy) in each group of `shard_degree` (default: the ranks
    of one host, or of the stage if they are fewer). Raises UserError where the ranks do not fill it.
    """
    # Of a pipeline's stage, over the ranks that hold the same part of every matrix.
    alike = (
        data_parallel_size(world_size, tensor_parallel_degree, context_parallel_degree, pipeline_parallel_degree)
        * context_parallel_degree
    )
    more = {
        "tensor_parallel_degree": tensor_parallel_degree,
        "context_parallel_degree": context_parallel_degree,
        "pipeline_parallel_degree": pipeline_parallel_degree,
    }
    if not sharding_name.startswith("hybrid-"):
        if shard_degree is not None:
            raise UserError(
                f"parallel.shard_degree = {shard_degree}: sharding is {sharding_name}; use hybrid-full-shard or hybrid-grad-shard"
            )
        if sharding_name == "no-shard" and context_parallel_degree > 1:
            raise UserError(
                "parallel.sharding = no-shard: a context's ranks share the weights out; use grad-shard or full-shard"
            )
        shards = 1 if sharding_name == "no-shard" else alike
        return ParallelDims(sharding_name, alike // shards, shards, keep_unsharded=sharding_name != "full-shard", **more)
    of_stage = alike * tensor_parallel_degree
    group = shard_degree or min(local_world_size, of_stage)
    unit = tensor_parallel_degree * context_parallel_degree
    if group % unit or of_stage % group:
        fitting = ", ".join(str(size) for size in range(unit, of_stage + 1, unit) if of_stage % size == 0)
        asked = f"parallel.shard_degree = {group}" + ("" if shard_degree else " (by default, the ranks of one host)")
        whose = " of each pipeline stage" if pipeline_parallel_degree > 1 else ""
        kept = " that keep tensor and context groups together" if unit > 1 else ""
        raise UserError(f"{asked}: {of_stage} ranks{whose} do not divide into groups of it{kept}; use one of {fitting}")
    shards = group // tensor_parallel_degree
    return ParallelDims(sharding_name, alike // shards, shards, keep_unsharded=sharding_name == "hybrid-grad-shard", **more)


def plan_batches(config: StageConfig, world_size: int) -> BatchPlan:
    """How the global batch of a recipe is cut for so many ranks in all. Raises UserError where it does not divide."""
    _, places = data_parallel_rank_and_size(config.parallel, 0, world_size)
    return batch_plan(config.train, config.data.sequence_length, places)


def data_parallel_rank_and_size(options: ParallelSettings, rank: int, world_size: int) -> tuple[int, int]:
    """(which share of the rows `rank` gets, how many shares there are). Raises UserError where ranks do not fill the mesh."""
    count = data_parallel_size(
        world_size, options.tensor_parallel_degree, options.context_parallel_degree, options.pipeline_parallel_degree
    )
    return rank // (options.context_parallel_degree * options.tensor_parallel_degree) % count, count


def parallel_dims(options: ParallelSettings, world_size: int, local_world_size: int) -> ParallelDims:
    """`sharding` as the options of a recipe ask for it."""
    return make_parallel_dims(
        options.sharding or "full-shard",
        world_size,
        local_world_size,
        options.shard_degree,
        tensor_parallel_degree=options.tensor_parallel_degree,
        context_parallel_degree=options.context_parallel_degree,
        pipeline_parallel_degree=options.pipeline_parallel_degree,
    )
