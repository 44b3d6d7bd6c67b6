"""Which ranks hold which part of the model and of a batch: the degrees of parallelism, derived from
the options.

The ranks form one device mesh: pipeline × replicate × shard × context × tensor.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from lmforge.core.errors import UserError
from lmforge.core.options.batch_plan import BatchPlan, batch_plan
from lmforge.core.options.sections import ParallelOptions
from lmforge.core.options.stage import StageConfig

if TYPE_CHECKING:  # a dry run derives the dimensions without importing torch
    from torch.distributed.device_mesh import DeviceMesh

PIPELINE = "pipeline"
REPLICATE = "replicate"
SHARD = "shard"
CONTEXT = "context"
TENSOR = "tensor"
EXPERT_SHARD = "expert_shard"
EXPERT = "expert"


@dataclass(frozen=True)
class ParallelDims:
    """Values derived from the options for a given number of ranks.

    sharding: the sharding strategy, the default filled in.
    replicate_degree: number of copies of the model; in a pipeline, of each stage.
    fsdp_degree: number of ranks that FSDP shards each copy over. It includes the ranks of a
        context: they hold other tokens of the same sequences, which makes no difference to FSDP. It
        does not include the ranks of tensor parallelism. The option `shard_degree` includes both;
        torchtitan's `dp_shard` includes neither.
    """

    options: ParallelOptions
    sharding: str
    replicate_degree: int
    fsdp_degree: int

    @property
    def is_hybrid(self) -> bool:
        """Whether the model is both sharded and replicated."""
        return self.replicate_degree > 1

    @property
    def reshard_after_forward(self) -> bool:
        """Whether a unit's gathered weights are freed between its forward and its backward pass,
        and gathered again.
        """
        return self.sharding.endswith("full-shard")

    def build_mesh(self, device_type: str) -> "DeviceMesh":
        """The mesh of all ranks.

        The dimensions that communicate most come last, so that their ranks are consecutive.
        """
        from torch.distributed.device_mesh import init_device_mesh

        sizes = {
            PIPELINE: self.options.pipeline_parallel_degree,
            REPLICATE: self.replicate_degree,
            SHARD: self.fsdp_degree // self.options.context_parallel_degree,
            CONTEXT: self.options.context_parallel_degree,
            TENSOR: self.options.tensor_parallel_degree,
        }
        # A dimension of size 1 only costs time, except for the one that FSDP shards over.
        kept = {name: size for name, size in sizes.items() if size > 1 or name == SHARD}
        return init_device_mesh(device_type, tuple(kept.values()), mesh_dim_names=tuple(kept))

    def fsdp_mesh(self, mesh: "DeviceMesh") -> "DeviceMesh":
        """The part of `mesh` that FSDP uses: replicate (where there are copies) × shard."""
        if self.options.context_parallel_degree == 1:
            return mesh[REPLICATE, SHARD] if self.is_hybrid else mesh[SHARD]
        shards = mesh[SHARD, CONTEXT]._flatten("shard_and_context")
        return type(mesh)._concatenate([mesh[REPLICATE], shards]) if self.is_hybrid else shards

    def expert_meshes(self, mesh: "DeviceMesh") -> tuple["DeviceMesh", "DeviceMesh"]:
        """The part of `mesh` that experts are split over, and the part that FSDP uses for each
        rank's experts.

        The ranks of a copy of the model, shard × context × tensor, are cut anew: expert_shard ×
        expert.
        """
        names = [name for name in (SHARD, CONTEXT, TENSOR) if name in (mesh.mesh_dim_names or ())]
        copy = mesh[tuple(names)]._flatten("copy_of_the_model") if len(names) > 1 else mesh[SHARD]
        degree = self.options.expert_parallel_degree
        cut = copy._unflatten(0, (copy.size() // degree, degree), (EXPERT_SHARD, EXPERT))
        shards = cut[EXPERT_SHARD]
        return cut[EXPERT], (
            type(mesh)._concatenate([mesh[REPLICATE], shards]) if self.is_hybrid else shards
        )

    def __str__(self) -> str:
        return self.sharding + "".join(
            f", {name} over {size}" for name, size in _degrees(self.options, EXPERT).items()
        )


def _degrees(options: ParallelOptions, *others: str) -> dict[str, int]:
    """The degrees above 1 of tensor, context, pipeline and `others` parallelism."""
    degrees = {
        name: getattr(options, f"{name}_parallel_degree")
        for name in (TENSOR, CONTEXT, PIPELINE, *others)
    }
    return {name: degree for name, degree in degrees.items() if degree > 1}


def data_parallel_rank_and_size(
    options: ParallelOptions, rank: int, world_size: int
) -> tuple[int, int]:
    """Which part of a global batch `rank` trains on, and the number of parts.

    The part is not the global rank: ranks of tensor, context and pipeline parallelism train on the
    same sequences. Ranks that fill no group of these stand by (core/distributed/standby.py). Raises
    UserError where there is not even one.
    """
    group = options.model_parallel_size
    if world_size < group:
        degrees = _degrees(options).items()
        requested = ", ".join(
            f"parallel.{name}_parallel_degree = {degree}" for name, degree in degrees
        )
        ranks = "1 rank does" if world_size == 1 else f"{world_size} ranks do"
        raise UserError(f"{requested}: {ranks} not fill that; start at least {group}")
    size = world_size // group
    return rank // (options.context_parallel_degree * options.tensor_parallel_degree) % size, size


def plan_batches(config: StageConfig, world_size: int) -> BatchPlan:
    """How the global batch of a recipe is cut for `world_size` ranks.

    Raises UserError where a rank would have none of it.
    """
    _, size = data_parallel_rank_and_size(config.parallel, 0, world_size)
    return batch_plan(config.train, config.data.sequence_length, size, config.group_size)


def parallel_dims(options: ParallelOptions, world_size: int, local_world_size: int) -> ParallelDims:
    """The dimensions for `world_size` ranks, `local_world_size` of them on each host.

    Hybrid sharding keeps one copy of the model (in a pipeline: of a stage) in each group of
    `shard_degree` ranks, by default the ranks of a host, or of the stage if they are fewer. Raises
    UserError where the ranks do not fill the mesh.
    """
    sharding = options.sharding or "full-shard"
    shard_degree = options.shard_degree
    tensor = options.tensor_parallel_degree
    context = options.context_parallel_degree
    _, size = data_parallel_rank_and_size(options, 0, world_size)
    # Ranks of a pipeline stage, over which FSDP shards or replicates: those that hold the same part
    # of every matrix.
    alike = size * context

    def dims(shards: int) -> ParallelDims:
        copy = shards * tensor
        expert = options.expert_parallel_degree
        if copy % expert:
            fitting = ", ".join(str(each) for each in range(1, copy + 1) if copy % each == 0)
            whose = (
                f"the {copy} ranks of a copy of the model do"
                if copy > 1
                else "the one rank of a copy of the model does"
            )
            raise UserError(
                f"parallel.expert_parallel_degree = {expert}: {whose} not divide by it; use one of"
                f" {fitting}"
            )
        return ParallelDims(options, sharding, alike // shards, shards)

    if not sharding.startswith("hybrid-"):
        if shard_degree is not None:
            raise UserError(
                f"parallel.shard_degree = {shard_degree}: sharding is {sharding}; use"
                " hybrid-full-shard or hybrid-grad-shard"
            )
        if sharding == "no-shard" and context > 1:
            raise UserError(
                "parallel.sharding = no-shard: not with context parallelism; use grad-shard or"
                " full-shard"
            )
        return dims(1 if sharding == "no-shard" else alike)
    stage = alike * tensor
    unit = tensor * context
    group = shard_degree or min(local_world_size, stage)
    if group % unit or stage % group:
        fitting = ", ".join(str(each) for each in range(unit, stage + 1, unit) if stage % each == 0)
        requested = f"parallel.shard_degree = {group}" + (
            "" if shard_degree else " (by default, the ranks of one host)"
        )
        whose = " of each pipeline stage" if options.pipeline_parallel_degree > 1 else ""
        kept = " that keep tensor and context groups together" if unit > 1 else ""
        raise UserError(
            f"{requested}: {stage} ranks{whose} do not divide into groups of it{kept}; use one of"
            f" {fitting}"
        )
    return dims(group // tensor)
