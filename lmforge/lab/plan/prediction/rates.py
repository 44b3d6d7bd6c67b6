"""The speed of a device and the time of a collective, from data sheets or measurements.

`Rates.calibrate` uses a file of `lmforge bench --calibrate` instead of the data sheet, for the
values that it has. Values that hold for all devices are constants here, with their sources. None
was fitted to a published training speed.
"""

import math
from dataclasses import dataclass, replace

import numpy as np

from lmforge.core.model.state_bytes import DTYPE_BYTES
from lmforge.lab.plan.calibration import COLLECTIVES, Calibration, RateTable
from lmforge.lab.plan.hardware import GB, GPU, Network
from lmforge.lab.plan.operators import Product

# The fraction of the data sheet's memory bandwidth that a streaming kernel reaches (BabelStream on
# A100 and H100: 0.85 to 0.92).
MEMORY_FRACTION = 0.87
# The fraction of a link's bandwidth that NCCL's collectives reach for large messages (nccl-tests'
# busbw over NVLink 3 and 4; and RDMA).
LINK_FRACTION = 0.80
NETWORK_FRACTION = 0.90
# Seconds until the first byte of a collective has arrived, and for each further host of its ring.
LINK_LATENCY = 15e-6
# Seconds of the products of experts, which are one kernel, over those of a dense product with as
# many rows, by dtype. On a GPU: 16 experts on an H200 at 705 TFLOP/s (pytorch/pytorch#156203), over
# what dense products reach there; on a CPU: measured here, with 8 experts.
GROUPED_RATIO = 1.13
CPU_GROUPED_RATIO = {"fp32": 1.13, "bf16": 1.66}
# Streaming multiprocessors that a collective occupies while it runs beside kernels (NCCL's channels
# on NVLink).
COLLECTIVE_SMS = 16
# Seconds of the host for a kernel, and for the hooks of an FSDP unit.
LAUNCH_SECONDS = 5e-6
UNIT_SECONDS = 400e-6
# Tiles of matrix products, and the length of a product's inner dimension that costs as much as
# filling its pipeline.
TILE_ROWS = 128
TILE_COLUMNS = 256
PIPELINE_FILL = 128
# The fraction of the float8 peak that products with scaling reach; bf16 inputs are read twice and
# written once to be scaled and cast.
FLOAT8_FRACTION = 0.65
# Kinds of operations of a step, by the constants that their time comes from.
CONSTANTS = {
    "matrix products": ("matrix products", "head and loss"),
    "products of experts": ("products of experts",),
    "attention": ("attention",),
    "memory": ("element-wise", "optimizer", "copies of parameters"),
    "collectives": (
        "all-gather",
        "reduce-scatter",
        "all-reduce",
        "tensor-parallel collectives",
        "context-parallel gathers",
        "all-to-all of tokens",
    ),
    "host copies": (),
}
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
class Measured:
    """Measured values, used instead of formulas.

    products, backward_products: what the formula's seconds of a product are multiplied by, by
    (rows, inner, columns); float8_products likewise. attention: FLOP/s of both passes by (head_dim,
    length). element_wise: bytes/s by the bytes of an array. collectives: seconds by bytes, of
    `group` ranks.
    """

    products: RateTable
    backward_products: RateTable
    float8_products: RateTable | None
    attention: tuple[RateTable, RateTable]
    element_wise: RateTable
    collectives: dict[str, RateTable]
    group: Group


@dataclass(frozen=True)
class Rates:
    """The rates of one device and its connections.

    FLOP/s and bytes/s are achieved values, not peaks.

    product_flops: of large matrix products in the compute dtype; float8_flops: in float8;
        fp32_flops: in fp32. grouped_ratios: of the seconds of experts' products to those of dense
        ones, in the forward and the backward pass.
    attention_flops: of the forward and the backward pass.
    network: of a host, in one direction; None for one host.
    measured: what a calibration has by shape and size. calibrated: which of CONSTANTS come from
    one.
    """

    product_flops: float
    float8_flops: float
    fp32_flops: float
    grouped_ratios: tuple[float, float]
    attention_flops: tuple[float, float]
    memory: float
    link: float
    network: float | None
    network_latency: float
    host_copy: float
    sms: int
    gpus_per_host: int
    is_cpu: bool
    measured: Measured | None = None
    calibrated: tuple[str, ...] = ()

    @classmethod
    def of_data_sheets(
        cls, gpu: GPU, network: Network | None, gpus_per_host: int, dtype: str
    ) -> "Rates":
        peak = gpu.peak_flops(dtype)
        assert peak is not None, "check_dtype refuses what has none"
        forward, backward = gpu.attention_fractions
        clock = gpu.power_factor
        grouped_ratio = CPU_GROUPED_RATIO[dtype] if gpu.is_cpu else GROUPED_RATIO
        bandwidth = None
        latency = 0.0
        if network is not None:
            bandwidth = network.host_bytes_per_second(gpus_per_host) * NETWORK_FRACTION
            latency = network.latency_us * 1e-6
        return cls(
            product_flops=peak * gpu.product_fraction * clock,
            float8_flops=(gpu.peak_flops("fp8") or peak) * FLOAT8_FRACTION * clock,
            fp32_flops=(gpu.peak_flops("fp32") or peak) * gpu.product_fraction * clock,
            grouped_ratios=(grouped_ratio, grouped_ratio),
            attention_flops=(peak * forward * clock, peak * backward * clock),
            memory=gpu.memory_gb_s * GB * MEMORY_FRACTION,
            link=gpu.link_gb_s * GB * LINK_FRACTION,
            network=bandwidth,
            network_latency=latency,
            host_copy=gpu.pcie_gb_s * GB * LINK_FRACTION,
            sms=gpu.sms,
            gpus_per_host=gpus_per_host,
            is_cpu=gpu.is_cpu,
        )

    def calibrate(self, calibration: Calibration, dtype: str) -> "Rates":
        """These rates with measured values where they exist.

        For a dtype that was not measured, only those that do not depend on it.
        """
        c = calibration
        calibrated = ["memory"]
        rates = replace(self, memory=c.required("memory", None).at())
        to_device = c.value("host to device")
        to_host = c.value("device to host")
        if to_device and to_host:
            rates = replace(rates, host_copy=min(to_device, to_host))
            calibrated.append("host copies")
        products = c.table("product", dtype)
        float8 = c.table("product", "fp8")
        if products is not None:
            rates = replace(
                rates,
                product_flops=products.largest,
                fp32_flops=c.required("product", "fp32").largest,
            )
            if float8 is not None:
                rates = replace(rates, float8_flops=float8.largest)
            collectives = {
                name: table for name in COLLECTIVES if (table := c.table(name)) is not None
            }
            measured = Measured(
                rates._beside_formula(products, DTYPE_BYTES[dtype]),
                rates._beside_formula(c.required("product backward", dtype), DTYPE_BYTES[dtype]),
                None if float8 is None else rates._beside_formula(float8, 1, float8=True),
                (c.required("attention", dtype), c.required("attention backward", dtype)),
                c.required("element-wise", dtype),
                collectives,
                Group(c.ranks, c.hosts, c.ranks_per_host),
            )
            rates = replace(rates, measured=measured)
            forward = c.table("product of experts", dtype)
            backward = c.table("product of experts backward", dtype)
            if forward is not None and backward is not None:
                ratios = (
                    rates._beside_dense(forward, dtype, False),
                    rates._beside_dense(backward, dtype, True),
                )
                rates = replace(rates, grouped_ratios=ratios)
                calibrated.append("products of experts")
            calibrated += ["matrix products", "attention"]
            if collectives:
                calibrated.append("collectives")
        return replace(rates, calibrated=tuple(name for name in CONSTANTS if name in calibrated))

    def _beside_formula(
        self, flops: RateTable, number_bytes: int, float8: bool = False
    ) -> RateTable:
        """Measured seconds divided by the formula's.

        Between two shapes the formula is better than linear interpolation.
        """
        values: dict[tuple[int, ...], float] = {}
        for (rows, inner, columns), rate in flops.items():
            formula = self._formula_seconds(Product(rows, inner, columns, number_bytes), float8)
            values[rows, inner, columns] = 2.0 * rows * inner * columns / rate / formula
        return RateTable(values)

    def _beside_dense(self, flops: RateTable, dtype: str, backward: bool) -> float:
        """Measured seconds of experts' products over those of dense ones."""
        ungrouped = replace(self, grouped_ratios=(1.0, 1.0))
        ratios = list[float]()
        for (rows, inner, columns, experts), rate in flops.items():
            product = Product(rows, inner, columns, DTYPE_BYTES[dtype], experts)
            seconds = (4.0 if backward else 2.0) * rows * inner * columns / rate
            ratios.append(seconds / ungrouped.product_seconds(product, backward=backward))
        return sum(ratios) / len(ratios)

    def product_seconds(
        self, product: Product, float8: bool = False, backward: bool = False
    ) -> float:
        """The seconds of a product, or with `backward` of the two of its backward pass."""
        rows, inner, columns, number_bytes, experts = product
        count = 2 if backward else 1
        ratio = self.grouped_ratios[backward] if experts > 1 else 1.0
        seconds = self._formula_seconds(product, float8) * (count * ratio)
        if self.measured is not None:
            table = self.measured.backward_products if backward else self.measured.products
            if float8 and self.measured.float8_products is not None:
                table = self.measured.float8_products
            seconds *= table.at(rows, inner, columns)
        if float8:
            casts = (2 * number_bytes + 1) * (rows * inner + inner * columns) / self.memory
            seconds += casts * count
        return seconds

    def attention_seconds(
        self, flops: float, head_dim: int, length: int, *, backward: bool
    ) -> float:
        """The seconds of attention for this number of FLOPs of a forward or backward pass."""
        if self.measured is None:
            return flops / self.attention_flops[backward]
        return flops / self.measured.attention[backward].at(head_dim, length)

    def element_wise_seconds(self, moved: float, array_bytes: float) -> float:
        """The seconds of operators on arrays of this size that move `moved` bytes in total."""
        if self.measured is None or array_bytes < 1:
            return moved / self.memory
        return moved / self.measured.element_wise.at(array_bytes)

    def _formula_seconds(self, product: Product, float8: bool) -> float:
        """The time of full waves of tiles, or of reading and writing, if that is longer.

        Without the casts of float8.

        The last tile of rows of an expert is half empty on average.
        """
        rows, inner, columns, number_bytes, experts = product
        moved = (
            number_bytes * (rows * inner + experts * inner * columns + rows * columns) / self.memory
        )
        speed = self.product_flops
        if float8:
            speed = self.float8_flops
        elif number_bytes == DTYPE_BYTES["fp32"]:
            speed = self.fp32_flops
        if self.is_cpu:
            return max(2.0 * rows * inner * columns / speed, moved)
        filled = rows + experts * TILE_ROWS / 2 if experts > 1 else rows
        tiles = math.ceil(filled / TILE_ROWS) * math.ceil(columns / TILE_COLUMNS)
        waves = tiles / self.sms
        efficiency = waves / math.ceil(waves) * inner / (inner + PIPELINE_FILL)
        return max(2.0 * filled * inner * columns / (speed * efficiency), moved)

    def gather_seconds(self, nbytes: float, group: Group, name: str = "all-gather") -> float:
        """The seconds of an all-gather to `nbytes` on each rank of the group.

        name: "reduce-scatter" for one of that size.
        """
        if group.size == 1 or nbytes == 0:
            return 0.0
        measured = self._measured_collective(name, nbytes, group)
        if measured is not None:
            return measured
        seconds = LINK_LATENCY
        if group.per_host > 1:
            seconds += nbytes * (group.size - 1) / group.size / self.link
        if group.hosts > 1:
            seconds = max(
                seconds, nbytes * (group.hosts - 1) / group.hosts / self._group_network(group)
            )
            seconds += self.network_latency * group.hosts
        return seconds

    def all_reduce_seconds(self, nbytes: float, group: Group) -> float:
        if group.size > 1 and nbytes:
            measured = self._measured_collective("all-reduce", nbytes, group)
            if measured is not None:
                return measured
        return 2 * self.gather_seconds(nbytes, group)

    def all_to_all_seconds(self, nbytes: float, group: Group) -> float:
        """The seconds of an all-to-all.

        Each rank sends `nbytes` in equal parts to all ranks of the group, itself included.
        """
        if group.size == 1:
            return 0.0
        seconds = LINK_LATENCY + nbytes * (group.per_host - 1) / group.size / self.link
        if group.hosts == 1:
            return seconds
        leaving = nbytes * (group.size - group.per_host) / group.size * group.per_host
        return max(seconds, leaving / self._group_network(group)) + self.network_latency

    def _measured_collective(self, name: str, nbytes: float, group: Group) -> float | None:
        """The seconds of a collective by the measured one.

        None without a measured one, and for a group on more hosts, or on one where it had several.

        Bytes that each link carries grow as (ranks - 1) / ranks, in a group of any size.
        """
        if self.measured is None or name not in self.measured.collectives:
            return None
        timed = self.measured.group
        if (timed.hosts > 1) != (group.hosts > 1) or group.hosts > timed.hosts:
            return None
        sizes, seconds = zip(
            *((size[0], value) for size, value in self.measured.collectives[name].items()),
            strict=True,
        )
        nbytes *= (group.size - 1) / group.size / ((timed.size - 1) / timed.size)
        # Below the smallest size its time, above the largest by its rate.
        return float(np.interp(nbytes, sizes, seconds)) * max(1.0, nbytes / sizes[-1])

    def _group_network(self, group: Group) -> float:
        """Bytes/s of a host for one group.

        The groups of the host's other ranks communicate at the same time.
        """
        assert self.network is not None
        return self.network * group.per_host / self.gpus_per_host
