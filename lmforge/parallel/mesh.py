"""Which ranks share what: the sharding of a strategy as a device mesh of replicate × shard."""

from dataclasses import dataclass

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from lmforge.cluster.ranks import Ranks
from lmforge.errors import Mistake

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

    def mesh(self, ranks: Ranks) -> DeviceMesh:
        """One dimension where there is one copy, two where there are several: ranks of a copy are neighbours."""
        if not self.hybrid:
            return init_device_mesh(ranks.device.type, (self.shards,), mesh_dim_names=(SHARD,))
        return init_device_mesh(ranks.device.type, (self.replicas, self.shards), mesh_dim_names=(REPLICATE, SHARD))


def sharding(name: str, ranks: Ranks, hybrid_ranks: int | None) -> Sharding:
    """The strategy called `name` (as in torch's FSDP) for these ranks. Raises Mistake where they do not fill it.

    Hybrid strategies shard over groups of `hybrid_ranks` (default: the ranks of one host) and replicate over groups.
    """
    if not name.startswith("hybrid-"):
        if hybrid_ranks is not None:
            raise Mistake(
                f"parallel.hybrid_ranks = {hybrid_ranks}: sharding is {name}; use hybrid-full-shard or hybrid-grad-shard"
            )
        shards = 1 if name == "no-shard" else ranks.count
        return Sharding(name, ranks.count // shards, shards, keep_gathered=name != "full-shard")
    shards = hybrid_ranks or ranks.place.local_ranks
    if ranks.count % shards:
        fitting = ", ".join(str(size) for size in range(1, ranks.count + 1) if ranks.count % size == 0)
        raise Mistake(
            f"parallel.hybrid_ranks = {shards}: {ranks.count} ranks do not divide into groups of it; use one of {fitting}"
        )
    return Sharding(name, ranks.count // shards, shards, keep_gathered=name == "hybrid-grad-shard")
