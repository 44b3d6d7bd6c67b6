"""`lmforge bench --calibrate`: measures the speeds for `lmforge plan --calibration`.

It takes about two minutes, and writes one file.
All ranks measure at the same time: on a CPU they share cores and memory, as ranks that train do.
Collectives and disks are measured in the same way as by `lmforge doctor`. The form of the file is
in lab/plan/calibration.py.
"""

import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle, pairwise, product
from typing import Any

import torch
from torch.utils.benchmark import Timer

from lmforge.core.distributed.distributed import DistributedContext, init_distributed
from lmforge.core.errors import format_duration
from lmforge.core.files.atomic_files import atomic_write_json, check_output
from lmforge.core.model.attention import attend, create_attention_mask
from lmforge.core.model.mixture.grouped_mm import multiply_groups, sum_outer_products
from lmforge.core.parallel.precision import DTYPES, FLOAT8_MIN_CAPABILITY, has_native_bf16
from lmforge.core.records.runs import describe_environment, is_local, processor_name
from lmforge.lab.options.bench import BenchConfig
from lmforge.lab.plan.calibration import COLLECTIVES, UNITS, VERSION, Calibration, Measurement
from lmforge.ops.doctor.rank_checks import time_collectives
from lmforge.ops.doctor.storage_checks import checkpoint_folder, time_disk

# With less total time than this, the largest sizes are left out.
FEW_SECONDS = 10.0
# As many experts have equal parts of the rows of a product.
EXPERTS = 8
# The operands that are used in turn exceed the caches, since in a step operands come from memory
# too. With two small operands in a CPU's caches, products were 15 % and element-wise operators 5
# times faster than in a step.
RING_BYTES = {"cpu": 2**26, "cuda": 2**28}
MAX_RING = 64


@dataclass(frozen=True)
class Grid:
    """The sizes at which a kind of device is measured.

    widths: of both matrices. attention_elements: of the queries.
    """

    rows: tuple[int, ...]
    widths: tuple[int, ...]
    head_dims: tuple[int, ...]
    lengths: tuple[int, ...]
    array_bytes: tuple[int, ...]
    collective_bytes: tuple[int, ...]
    attention_elements: int
    memory_bytes: int
    copy_bytes: int

    def without_largest(self) -> "Grid":
        """The same with smaller sizes only."""
        smaller: dict[str, Any] = {
            name: sizes[:-1] for name, sizes in vars(self).items() if isinstance(sizes, tuple)
        }
        return replace(self, **smaller)

    @property
    def products(self) -> list[tuple[int, int, int]]:
        """(rows, inner, columns) of each product."""
        return [*product(self.rows, self.widths, self.widths)]


def _powers_of_2(*exponents: int) -> tuple[int, ...]:
    return tuple(2**each for each in exponents)


GRIDS = {
    "cpu": Grid(
        (128, 1024, 4096),
        (128, 512, 2048),
        (32, 64, 128),
        (128, 512, 2048),
        _powers_of_2(14, 18, 20, 22, 24, 26),
        _powers_of_2(12, 16, 20, 22, 24, 26),
        2**19,
        2**27,
        0,
    ),
    "cuda": Grid(
        (1024, 4096, 16384),
        (1024, 4096, 14336),
        (64, 128),
        (1024, 4096, 16384),
        _powers_of_2(20, 24, 27, 29),
        _powers_of_2(16, 20, 24, 27, 29),
        2**25,
        2**31,
        2**28,
    ),
}


def choose_grid(device: torch.device, seconds: float) -> Grid:
    grid = GRIDS[device.type]
    return grid if seconds >= FEW_SECONDS else grid.without_largest()


def calibrate(config: BenchConfig) -> int:
    """Measure and write the file, on rank 0.

    Every rank calls it. Raises UserError where the file exists.
    """
    out = config.bench.out
    began = time.perf_counter()
    with init_distributed(config.train.device, config.train.threads) as dist_ctx:
        with dist_ctx.raise_on_all():
            if dist_ctx.is_rank0:
                check_output(out, "--out")
        calibration = measure_calibration(dist_ctx, config)
        with dist_ctx.raise_on_all():
            if dist_ctx.is_rank0:
                out.parent.mkdir(parents=True, exist_ok=True)
                atomic_write_json(out, calibration.model_dump(mode="json"))
    if dist_ctx.is_rank0:
        taken = format_duration(time.perf_counter() - began)
        print(
            f"{out}: {len(calibration.measurements)} measurements of {calibration.describe()}, in"
            f" {taken}"
        )
    return 0


def measure_calibration(dist_ctx: DistributedContext, config: BenchConfig) -> Calibration:
    """All measurements on these ranks. Every rank calls it and gets the same."""
    device = dist_ctx.device
    on_gpu = device.type == "cuda"
    hosts = len(set(dist_ctx.all_gather(os.uname().nodename)))
    stopwatch = _Stopwatch(dist_ctx, config.bench.calibrate_seconds)
    local = list(stopwatch.measure())
    every = dist_ctx.all_gather([each.value for each in local])
    # A step waits for its slowest rank.
    slowest = [min(values) for values in zip(*every, strict=True)]
    measured = [
        each.model_copy(update={"value": value}) for each, value in zip(local, slowest, strict=True)
    ]
    if dist_ctx.world_size > 1:
        sizes = choose_grid(device, config.bench.calibrate_seconds).collective_bytes
        timed = time_collectives(dist_ctx.world_size, device, sizes, COLLECTIVES)
        measured += [
            _measurement(name, s, bytes=round(size))
            for name, results in timed.items()
            for size, s in results
        ]
    disk = dist_ctx.decide_on_rank0(lambda: _measure_disk(config))
    measured += [_measurement(name, rate) for name, rate in disk.items()]
    environment = describe_environment()
    if on_gpu:
        memory = torch.cuda.mem_get_info()[1]
        name = torch.cuda.get_device_name(device)
    else:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        name = processor_name() or environment["platform"]
    calibration = Calibration(
        version=VERSION,
        kind="cuda" if on_gpu else "cpu",
        device=name,
        ranks=dist_ctx.world_size,
        hosts=hosts,
        threads=torch.get_num_threads(),
        memory_bytes=memory,
        packages=environment["packages"],
        time=environment["time"],
        measurements=tuple(measured),
    )
    return dist_ctx.broadcast(calibration)


def _measurement(what: str, value: float, dtype: str | None = None, **sizes: int) -> Measurement:
    return Measurement(what=what, dtype=dtype, sizes=sizes, value=value, unit=UNITS[what])


def _measure_disk(config: BenchConfig) -> dict[str, float]:
    """Bytes/s written to and read from the recipe's checkpoint folder.

    Returns nothing for an object store.
    """
    folder = checkpoint_folder(config)
    if not is_local(folder):
        return {}
    _, written, read = time_disk(folder)
    return {"disk write": written, "disk read": read}


Operands = Iterator[list[torch.Tensor]]


class _Stopwatch:
    """Measures a single rank's operations, in about this many seconds."""

    def __init__(self, dist_ctx: DistributedContext, seconds: float) -> None:
        self._dist_ctx = dist_ctx
        self._device = dist_ctx.device
        self._on_gpu = self._device.type == "cuda"
        self._grid = choose_grid(self._device, seconds)
        self._dtypes = ["fp32"]
        if has_native_bf16(self._device):
            self._dtypes.append("bf16")
        grid = self._grid
        shapes = len(grid.products)
        attention = len(grid.head_dims) * len(grid.lengths)
        calls = len(self._dtypes) * 2 * (shapes + 1 + attention) + 2 * shapes * self._has_float8
        self._seconds_each = seconds / (calls + len(self._dtypes) * len(grid.array_bytes) + 3)

    @property
    def _has_float8(self) -> bool:
        return (
            self._on_gpu and torch.cuda.get_device_capability(self._device) >= FLOAT8_MIN_CAPABILITY
        )

    def measure(self) -> Iterator[Measurement]:
        """Always in the same order, on every rank."""
        for dtype in self._dtypes:
            yield from self._products(dtype)
            yield from self._products_of_experts(dtype)
            yield from self._attention(dtype)
            yield from self._element_wise(dtype)
        if self._has_float8:
            yield from self._float8_products()
        yield from self._memory()

    def _time(self, call: Callable[[], object]) -> float:
        """Seconds of a call: the median of many.

        On a CPU with one thread only the time in which it ran counts, without the time that other
        programs take.
        """
        threads = torch.get_num_threads()
        clock: dict[str, Any] = {}
        if not self._on_gpu and threads == 1:
            clock["timer"] = time.thread_time
        timer = Timer("call()", globals={"call": call}, num_threads=threads, **clock)
        timer.timeit(1)
        self._dist_ctx.all_reduce_sum(torch.zeros(1, device=self._device))  # ranks begin together
        return float(timer.blocked_autorange(min_run_time=self._seconds_each).median)

    def _random(self, *sizes: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.randn(*sizes, device=self._device).to(dtype)

    def _ring(self, shapes: Sequence[tuple[int, ...]], dtype: torch.dtype) -> Operands:
        """Sets of operands, one after another and again from the first."""
        nbytes = sum(math.prod(shape) for shape in shapes) * dtype.itemsize
        count = max(2, min(MAX_RING, RING_BYTES[self._device.type] // nbytes))
        first = [self._random(*shape, dtype=dtype) for shape in shapes]
        return cycle([first, *([each.clone() for each in first] for _ in range(count - 1))])

    def _products(self, dtype: str) -> Iterator[Measurement]:
        """Measure a linear layer's product, and the two of its backward pass.

        The operands of these lie in memory in other ways.
        """
        for rows, inner, columns in self._grid.products:
            operands = self._ring(((rows, inner), (columns, inner), (rows, columns)), DTYPES[dtype])

            def forward(operands: Operands = operands) -> None:
                x, weight, _ = next(operands)
                torch.mm(x, weight.t())

            def backward(operands: Operands = operands) -> None:
                x, weight, gradient = next(operands)
                torch.mm(gradient, weight)
                torch.mm(gradient.t(), x)

            sizes = {"rows": rows, "inner": inner, "columns": columns}
            flops = 2.0 * rows * inner * columns
            yield _measurement("product", flops / self._time(forward), dtype, **sizes)
            yield _measurement("product backward", 2 * flops / self._time(backward), dtype, **sizes)

    def _products_of_experts(self, dtype: str) -> Iterator[Measurement]:
        """Measure products of experts of one size, for the ratio to a dense product."""
        rows = self._grid.rows[-1]
        width = self._grid.widths[1]
        operands = self._ring(
            ((rows, width), (EXPERTS, width, width), (rows, width)), DTYPES[dtype]
        )
        ends = torch.arange(1, EXPERTS + 1, dtype=torch.int32, device=self._device)
        ends = ends * (rows // EXPERTS)

        def forward() -> None:
            x, weight, _ = next(operands)
            multiply_groups(x, weight, ends, False)

        def backward() -> None:
            x, weight, gradient = next(operands)
            multiply_groups(gradient, weight, ends, True)
            sum_outer_products(gradient, x, ends)

        sizes = {"rows": rows, "inner": width, "columns": width, "experts": EXPERTS}
        flops = 2.0 * rows * width * width
        yield _measurement("product of experts", flops / self._time(forward), dtype, **sizes)
        yield _measurement(
            "product of experts backward", 2 * flops / self._time(backward), dtype, **sizes
        )

    def _float8_products(self) -> Iterator[Measurement]:
        """Products of numbers that are scaled and cast already."""
        one = torch.ones(1, device=self._device)
        for rows, inner, columns in self._grid.products:
            operands = self._ring(((rows, inner), (columns, inner)), torch.float8_e4m3fn)

            def multiply(operands: Operands = operands) -> None:
                x, weight = next(operands)
                torch._scaled_mm(
                    x, weight.t(), one, one, out_dtype=torch.bfloat16, use_fast_accum=True
                )

            sizes = {"rows": rows, "inner": inner, "columns": columns}
            yield _measurement(
                "product", 2.0 * rows * inner * columns / self._time(multiply), "fp8", **sizes
            )

    def _attention(self, dtype: str) -> Iterator[Measurement]:
        """Attention as models compute it on this device, over one document a sequence."""
        for head_dim, length in product(self._grid.head_dims, self._grid.lengths):
            heads = max(1, self._grid.attention_elements // (head_dim * length))
            size = (1, heads, length, head_dim)
            q, k, v = (self._random(*size, dtype=DTYPES[dtype]).requires_grad_() for _ in range(3))
            ids = torch.zeros(1, length, dtype=torch.int32, device=self._device)
            starts = torch.zeros(1, 1, dtype=torch.int64, device=self._device)
            mask = create_attention_mask(
                ids, None, document_starts=starts, dtype=DTYPES[dtype], head_dim=head_dim
            )
            gradient = self._random(*size, dtype=DTYPES[dtype])
            # A GPU computes the causal half; a CPU computes chunks of queries with all keys up to
            # their end.
            scores = length * length / 2 if self._on_gpu else _num_chunked_scores(length)
            flops = 4.0 * heads * head_dim * scores
            sizes = {"head_dim": head_dim, "length": length}
            with torch.no_grad():
                seconds = self._time(partial(attend, q, k, v, mask))
            yield _measurement("attention", flops / seconds, dtype, **sizes)
            result = attend(q, k, v, mask)
            backward = partial(torch.autograd.grad, retain_graph=True)
            seconds = self._time(partial(backward, result, (q, k, v), gradient))
            yield _measurement("attention backward", 2.5 * flops / seconds, dtype, **sizes)

    def _element_wise(self, dtype: str) -> Iterator[Measurement]:
        """An operator that reads two arrays of so many bytes and writes one."""
        for nbytes in self._grid.array_bytes:
            number = nbytes // DTYPES[dtype].itemsize
            operands = self._ring(((number,),) * 3, DTYPES[dtype])

            def add(operands: Operands = operands) -> None:
                a, b, result = next(operands)
                torch.add(a, b, out=result)

            yield _measurement("element-wise", 3 * nbytes / self._time(add), dtype, bytes=nbytes)

    def _memory(self) -> Iterator[Measurement]:
        """The memory's bandwidth, and that of copies to and from a GPU."""
        grid = self._grid
        target, source = (
            torch.ones(grid.memory_bytes, dtype=torch.uint8, device=self._device) for _ in range(2)
        )
        yield _measurement(
            "memory", 2 * grid.memory_bytes / self._time(lambda: target.copy_(source))
        )
        if self._on_gpu:
            pinned = torch.ones(grid.copy_bytes, dtype=torch.uint8).pin_memory()
            part = source[: grid.copy_bytes]
            to_device = self._time(lambda: part.copy_(pinned, non_blocking=True))
            yield _measurement("host to device", grid.copy_bytes / to_device)
            to_host = self._time(lambda: pinned.copy_(part, non_blocking=True))
            yield _measurement("device to host", grid.copy_bytes / to_host)


def _num_chunked_scores(length: int) -> int:
    """The number of scores that attention on a CPU computes for a sequence.

    It computes chunks of queries, each with all keys up to its end.
    """
    chunk = max(256, -(-length // 8))
    ends = [min(start + chunk, length) for start in range(0, length, chunk)]
    return sum((end - start) * end for start, end in pairwise([0, *ends]))
