"""Which ranks share what: the sharding of a strategy as a device mesh of replicate × shard."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from lmforge.errors import Mistake

if TYPE_CHECKING:  # a dry run asks for a strategy without importing torch
    from torch.distributed.device_mesh import DeviceMesh

REPLICATE, SHARD = "replicate", "shard"


@dataclass(frozen=True)
class Sharding:
    """A strategy for a number of ranks: `replicas` copies of the model, each over `shards` ranks.

    keep_gathered: a unit's weights stay whole between its forward and its backward pass.
    """

    name: str
    replicas: int
    shards: int
    keep_gathered: bool

    @property
    def hybrid(self) -> bool:
        return self.replicas > 1

    def mesh(self, device_type: str) -> "DeviceMesh":
        """One dimension where there is one copy, two where there are several: ranks of a copy are neighbours."""
        from torch.distributed.device_mesh import init_device_mesh

        if not self.hybrid:
            return init_device_mesh(device_type, (self.shards,), mesh_dim_names=(SHARD,))
        return init_device_mesh(device_type, (self.replicas, self.shards), mesh_dim_names=(REPLICATE, SHARD))


def sharding(name: str, ranks: int, local_ranks: int, hybrid_ranks: int | None) -> Sharding:
    """The strategy called `name` (as in torch's FSDP) for `ranks` ranks, `local_ranks` of them on a host.

    Hybrid strategies shard over groups of `hybrid_ranks` (default: the ranks of one host) and replicate over groups.
    Raises Mistake where the ranks do not fill it.
    """
    if not name.startswith("hybrid-"):
        if hybrid_ranks is not None:
            raise Mistake(
                f"parallel.hybrid_ranks = {hybrid_ranks}: sharding is {name}; use hybrid-full-shard or hybrid-grad-shard"
            )
        shards = 1 if name == "no-shard" else ranks
        return Sharding(name, ranks // shards, shards, keep_gathered=name != "full-shard")
    shards = hybrid_ranks or local_ranks
    if ranks % shards:
        fitting = ", ".join(str(size) for size in range(1, ranks + 1) if ranks % size == 0)
        raise Mistake(f"parallel.hybrid_ranks = {shards}: {ranks} ranks do not divide into groups of it; use one of {fitting}")
    return Sharding(name, ranks // shards, shards, keep_gathered=name == "hybrid-grad-shard")
