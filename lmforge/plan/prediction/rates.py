"""How fast a device computes and moves bytes, and what a collective takes, from data sheets.

What holds for no single device but for all is a constant here, with where it comes from. None was fitted to a published
training speed.
"""

import math
from dataclasses import dataclass

from lmforge.plan.hardware import GB, GPU, Network

# Of the data sheet's memory bandwidth, what a streaming kernel reaches (BabelStream on A100 and H100: 0.85 to 0.92).
MEMORY_FRACTION = 0.87
# Of a link's bandwidth, what NCCL's collectives reach for large messages (nccl-tests' busbw over NVLink 3 and 4; and RDMA).
LINK_FRACTION, NETWORK_FRACTION = 0.80, 0.90
# Seconds until the first byte of a collective has arrived, and for each further host of its ring.
LINK_LATENCY = 15e-6
# Streaming multiprocessors that a collective occupies while it runs beside kernels (NCCL's channels on NVLink).
COLLECTIVE_SMS = 16
# Seconds of the host for a kernel, and for the hooks of an FSDP unit.
LAUNCH_SECONDS, UNIT_SECONDS = 5e-6, 400e-6
# Tiles of matrix products, and the length of a product's inner dimension that costs as much as filling its pipeline.
TILE_ROWS, TILE_COLUMNS, PIPELINE_FILL = 128, 256, 128
# Of the peak of float8, what products with scaling reach; bf16 inputs are read twice and written once to be scaled and cast.
FLOAT8_FRACTION = 0.65
# Bytes a second of a host's memory that an optimizer in host memory reaches, for each rank of 8.
HOST_OPTIMIZER_BYTES = 25e9


@dataclass(frozen=True)
class Group:
    """Ranks that communicate: `size` of them on `hosts` hosts, with `per_host` on each."""

    size: int
    hosts: int
    per_host: int


def make_group(size: int, stride: int, gpus_per_host: int) -> Group:
    """`size` ranks, each `stride` after the one before."""
    per_host = max(1, min(size, gpus_per_host // stride))
    return Group(size, math.ceil(size / per_host), per_host)


@dataclass(frozen=True)
class Rates:
    """Of one device and its connections. FLOP/s and bytes/s are what is reached, not peaks.

    product_flops: of large matrix products in the compute dtype; float8_flops: in float8.
    attention_flops: of the forward and the backward pass.
    network: of a host, in one direction; None for one host.
    """

    product_flops: float
    float8_flops: float
    attention_flops: tuple[float, float]
    memory: float
    link: float
    network: float | None
    network_latency: float
    host_copy: float
    sms: int
    launch_seconds: float
    gpus_per_host: int
    is_cpu: bool

    @classmethod
    def of_data_sheets(cls, gpu: GPU, network: Network | None, gpus_per_host: int, dtype: str) -> "Rates":
        peak = gpu.peak_flops(dtype if dtype == "fp32" else "bf16") or gpu.peak_flops("fp16") or gpu.peak_flops("fp32")
        assert peak is not None
        (forward, backward), clock = gpu.attention_fractions, gpu.power_factor
        return cls(
            product_flops=peak * gpu.product_fraction * clock,
            float8_flops=(gpu.peak_flops("fp8") or peak) * FLOAT8_FRACTION * clock,
            attention_flops=(peak * forward * clock, peak * backward * clock),
            memory=gpu.memory_gb_s * GB * MEMORY_FRACTION,
            link=gpu.link_gb_s * GB * LINK_FRACTION,
            network=None if network is None else network.host_bytes_per_second(gpus_per_host) * NETWORK_FRACTION,
            network_latency=0.0 if network is None else network.latency_us * 1e-6,
            host_copy=gpu.pcie_gb_s * GB * LINK_FRACTION,
            sms=gpu.sms,
            launch_seconds=LAUNCH_SECONDS,
            gpus_per_host=gpus_per_host,
            is_cpu=gpu.is_cpu,
        )

    def product_seconds(self, rows: int, inner: int, columns: int, number_bytes: int, float8: bool = False) -> float:
        """[rows, inner] x [inner, columns]: whole waves of tiles, or what reading and writing takes, if that is more."""
        flops = 2.0 * rows * inner * columns
        moved = number_bytes * (rows * inner + inner * columns + rows * columns) / self.memory
        if self.is_cpu:
            return max(flops / self.product_flops, moved)
        tiles = math.ceil(rows / TILE_ROWS) * math.ceil(columns / TILE_COLUMNS)
        waves = tiles / self.sms
        efficiency = waves / math.ceil(waves) * inner / (inner + PIPELINE_FILL)
        if not float8:
            return max(flops / (self.product_flops * efficiency), moved)
        cast = (2 * number_bytes + 1) * (rows * inner + inner * columns) / self.memory
        return max(flops / (self.float8_flops * efficiency), moved) + cast

    def gather_seconds(self, nbytes: float, group: Group) -> float:
        """An all-gather to, or a reduce-scatter of, `nbytes` on each rank of the group."""
        if group.size == 1 or nbytes == 0:
            return 0.0
        seconds = LINK_LATENCY
        if group.per_host > 1:
            seconds += nbytes * (group.size - 1) / group.size / self.link
        if group.hosts > 1:
            seconds = max(seconds, nbytes * (group.hosts - 1) / group.hosts / self._group_network(group))
            seconds += self.network_latency * group.hosts
        return seconds

    def all_reduce_seconds(self, nbytes: float, group: Group) -> float:
        return 2 * self.gather_seconds(nbytes, group)

    def _group_network(self, group: Group) -> float:
        """Bytes/s of a host for one group: those of the host's other ranks communicate at the same time."""
        assert self.network is not None
        return self.network * group.per_host / self.gpus_per_host
