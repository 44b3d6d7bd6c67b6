"""Memory and time of a step, and the cost of a run.

`predict` simulates the step's operations and adds memory that belongs to no operation. `run_cost`
goes from there to the whole run: days, GPU-hours, energy, money, checkpoints and the cost of
failures.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from lmforge.core.errors import UserError
from lmforge.core.model.flops import adapted_flops_per_token, flops_per_token
from lmforge.core.model.state_bytes import DTYPE_BYTES, checkpoint_bytes
from lmforge.lab.plan.hardware import GB, GPU, data_sheets
from lmforge.lab.plan.prediction.program import StepProgram
from lmforge.lab.plan.prediction.rates import COLLECTIVE_SMS, CONSTANTS, Rates, make_group
from lmforge.lab.plan.prediction.simulator import (
    COMPUTE,
    HOST_COPIES,
    NETWORK,
    Simulation,
    simulate,
)
from lmforge.lab.plan.prediction.step_config import StepConfig
from lmforge.lab.plan.prediction.units import Stage

# torch's allocator with expandable segments: pages of 2 MiB, and holes between blocks. An estimate:
# not measured here.
ROUNDING_FRACTION = 0.03
# The memory of CUDA's context and the libraries' workspaces, and of NCCL's buffers per
# communicator.
CONTEXT_BYTES = int(0.6 * 2**30)
COMMUNICATOR_BYTES = int(0.35 * 2**30)
# The memory of any training process on a CPU, with the pages that the C library keeps.
HOST_BYTES = 320 * 2**20
# How far the true value may be below and above a prediction with constants from data sheets.
SPEED_INTERVAL = (0.70, 1.20)
MEMORY_INTERVAL = (0.92, 1.10)
# torch's allocator of page-locked memory rounds each tensor up to a power of two. Sizes that are
# spread evenly over the factors from 1 to 2 take so much more on average: 1 / ln 2.
PAGE_LOCKED_ROUNDING = 1.44
# The kind of memory that does not belong to tensors.
OVERHEAD = "context and libraries"
# The same where every constant was measured on the device: the goal of benchmarks/plan_cpu.py,
# whose 12 rows are within 8 %.
CALIBRATED_SPEED_INTERVAL = (0.85, 1.15)
# The average fraction of its power limit that a GPU uses in training, and what the rest of a host
# adds to its GPUs.
POWER_FRACTION = 0.9
HOST_POWER = 1.35
# Micro-batches that are simulated one by one; all between the first and the last are alike.
SIMULATED = 3
# All ranks together write a checkpoint at this rate, unless a calibration has measured the disk.
DISK_GB_S = 2.0
# Llama 3 (arXiv 2407.21783) had 419 failures in 54 days on 16,384 GPUs.
FAILURE_GPU_HOURS = 50_000.0
# From a failure to the first new step.
RESTART_SECONDS = 600.0


@dataclass(frozen=True)
class Prediction:
    """The requirements of a step.

    memory: bytes by kind at the peak of the fullest rank, of live tensors; `peak_at` says where in
    the step that is.
    live_bytes, reserved_bytes, device_bytes: of live tensors, with what the allocator keeps, and
    with context and libraries.
    seconds: by kind of operation, overlapping ones too. exposed_seconds: exposed communication and
    copies of activations. timeline: (operation, live bytes) in order of issue.
    offloaded_bytes: activations in host memory. calibrated_fraction: of the time of all operations,
    what comes from measured constants.
    """

    step_config: StepConfig
    memory: dict[str, float]
    peak_at: str
    live_bytes: float
    reserved_bytes: float
    device_bytes: float
    step_seconds: float
    seconds: dict[str, float]
    exposed_seconds: float
    bubble_seconds: float
    host_seconds: float
    timeline: list[tuple[str, float]]
    mfu: float
    offloaded_bytes: float = 0.0
    calibrated_fraction: float = 0.0

    @property
    def tokens_per_second(self) -> float:
        """The speed of one rank."""
        return self.step_config.tokens_per_step / self.step_seconds / self.step_config.world_size

    @property
    def speed_interval(self) -> tuple[float, float]:
        """The interval of `tokens_per_second`.

        It is narrower in proportion to the part of the step whose constants were measured.
        """
        part = self.calibrated_fraction
        speed = self.tokens_per_second
        low, high = (
            part * measured + (1 - part) * sheet
            for measured, sheet in zip(CALIBRATED_SPEED_INTERVAL, SPEED_INTERVAL, strict=True)
        )
        return speed * low, speed * high

    @property
    def memory_interval(self) -> tuple[float, float]:
        return self.device_bytes * MEMORY_INTERVAL[0], self.device_bytes * MEMORY_INTERVAL[1]

    @property
    def host_bytes(self) -> float:
        """The bytes that offload keeps on a host, for all its ranks.

        They are activations, or master weights, gradients and optimizer states.
        """
        step_config = self.step_config
        of_a_rank = self.offloaded_bytes * PAGE_LOCKED_ROUNDING
        if step_config.options.cpu_offload:
            counts = step_config.parameters
            master = step_config.master_dtype
            nbytes = (
                checkpoint_bytes(step_config.optimizer, master, counts)
                + counts.trained * DTYPE_BYTES[master]
            )
            of_a_rank += nbytes / (step_config.shards * step_config.tensor * step_config.pipeline)
        return of_a_rank * min(step_config.gpus_per_host, step_config.world_size)

    @property
    def parts(self) -> dict[str, float]:
        """Seconds of the device by kind, including waiting."""
        beside = (
            "all-gather",
            "reduce-scatter",
            "all-reduce",
            "copies of activations",
            COMPUTE,
            NETWORK,
            HOST_COPIES,
        )
        parts = {name: seconds for name, seconds in self.seconds.items() if name not in beside}
        return parts | {
            "exposed communication": self.exposed_seconds,
            "pipeline bubble": self.bubble_seconds,
            "waiting for the host": self.host_seconds,
        }

    @property
    def bottleneck(self) -> str:
        """The kind of operation that takes most of a step's time."""
        most = max(self.parts.items(), key=lambda part: part[1])[0]
        return "the host, which launches kernels" if most == "waiting for the host" else most


def check_estimated(step_config: StepConfig) -> None:
    """Raise UserError where memory and time are not known: under context parallelism a rank is
    given whole sequences for recurrent layers, which is not counted.
    """
    if step_config.context > 1 and step_config.model.family.recurrent_type:
        raise UserError(
            f"parallel.context_parallel_degree = {step_config.context}: the cost of a"
            f" {step_config.model.model_type} model is not estimated with it; plan it with 1"
        )


def predict(step_config: StepConfig, gpu: GPU, rates: Rates) -> Prediction:
    """The fullest rank's memory, and the time of a step.

    Raises UserError where the options do not fit the ranks, and as `check_estimated`.
    """
    check_estimated(step_config)
    stages = _stages(step_config)
    simulated = [_simulate(step_config, rates, stage) for stage in stages]
    simulation = max(simulated, key=lambda each: each.reserved)
    slowest = max(simulated, key=lambda each: each.seconds)
    seconds = slowest.seconds
    busy = slowest.busy
    exposed = slowest.exposed
    network = busy.get(NETWORK, 0.0)
    hidden = max(0.0, network - exposed)
    if rates.is_cpu:  # collectives compute on the cores that the ranks have
        seconds += hidden
        exposed = network
    else:  # they use a part of the device while other kernels run
        seconds += hidden * COLLECTIVE_SMS / rates.sms
    bubble = 0.0
    if step_config.pipeline > 1:
        per_micro_batch = seconds / step_config.accumulation
        hops = step_config.options.stages_per_rank
        hidden_bytes = float(
            step_config.tokens
            * step_config.model.hidden_size
            * step_config.dtype_bytes
            / step_config.tensor
        )
        stride = step_config.world_size // step_config.pipeline
        hop = rates.gather_seconds(
            2 * hidden_bytes, make_group(2, stride, step_config.gpus_per_host)
        )
        exposed += 2 * hop * hops * step_config.accumulation
        bubble = (step_config.pipeline - 1) / hops * per_micro_batch
        seconds += bubble + 2 * hop * hops * step_config.accumulation
    memory = _memory_by_kind(step_config, simulation)
    live = sum(simulation.live_peak.values())
    device_bytes = sum(memory.values())
    counts = step_config.parameters
    per_token = flops_per_token(step_config.model, step_config.sequence_length)
    if not step_config.trains_all:
        per_token = adapted_flops_per_token(
            step_config.model, step_config.sequence_length, counts.total, counts.trained
        )
    peak = gpu.peak_flops(step_config.dtype)
    assert peak is not None, "rates has one"
    mfu = step_config.tokens_per_step / seconds / step_config.world_size * per_token / peak
    return Prediction(
        step_config,
        memory,
        simulation.peak_at,
        live,
        device_bytes - memory[OVERHEAD],
        device_bytes,
        seconds,
        busy,
        exposed,
        bubble,
        slowest.host_bound,
        simulation.timeline,
        mfu,
        _offloaded_bytes(step_config, rates, stages),
        _calibrated_fraction(busy, rates),
    )


def _calibrated_fraction(busy: dict[str, float], rates: Rates) -> float:
    """The fraction of the seconds of operations whose constants were measured."""
    kinds = {
        name: seconds
        for name, seconds in busy.items()
        if name not in (COMPUTE, NETWORK, HOST_COPIES)
    }
    measured = {kind for name in rates.calibrated for kind in CONSTANTS[name]}
    total = sum(kinds.values())
    if total:
        return sum(seconds for kind, seconds in kinds.items() if kind in measured) / total
    return 0.0


def _offloaded_bytes(step_config: StepConfig, rates: Rates, stages: Sequence[Stage]) -> float:
    """The most activations that a rank has in host memory."""
    if not step_config.offloads_activations:
        return 0.0
    return max(
        stage.in_flight * StepProgram(step_config, rates, stage).saved_bytes for stage in stages
    )


def peak_memory(step_config: StepConfig) -> dict[str, float]:
    """`Prediction.memory`, the fullest rank's bytes by kind, which does not depend on speeds."""
    gpu = data_sheets().gpu("h100-80" if step_config.on_gpu else "cpu")
    network = data_sheets().network("infiniband-ndr")
    rates = Rates.of_data_sheets(gpu, network, step_config.gpus_per_host, step_config.dtype)
    simulation = max(
        (_simulate(step_config, rates, stage) for stage in _stages(step_config)),
        key=lambda each: each.reserved,
    )
    return _memory_by_kind(step_config, simulation)


def _memory_by_kind(step_config: StepConfig, simulation: Simulation) -> dict[str, float]:
    """Live tensors at the peak, and memory that belongs to no operation."""
    if not step_config.on_gpu:
        return {**simulation.live_peak, "allocator": 0.0, OVERHEAD: float(HOST_BYTES)}
    live = sum(simulation.live_peak.values())
    reserved = simulation.reserved * (1 + ROUNDING_FRACTION)
    sizes = (
        step_config.shards,
        step_config.replicas,
        step_config.tensor,
        step_config.context,
        step_config.pipeline,
        step_config.expert,
    )
    overhead = CONTEXT_BYTES + sum(size > 1 for size in sizes) * COMMUNICATOR_BYTES
    return {**simulation.live_peak, "allocator": reserved - live, OVERHEAD: float(overhead)}


def can_reduce_once(step_config: StepConfig) -> bool:
    """Return True where gradients can be reduced once per step instead of every micro-batch."""
    return (
        step_config.on_gpu
        and step_config.is_fsdp
        and step_config.shards > 1
        and step_config.pipeline == 1
        and step_config.accumulation > 1
    )


def _stages(step_config: StepConfig) -> list[Stage]:
    """The parts of the model that may need most memory or most time."""
    layers = step_config.model.num_hidden_layers
    degree = step_config.pipeline
    if degree == 1:
        return [Stage(layers)]
    most = -(-layers // degree)
    in_flight = min(step_config.accumulation, degree)
    if step_config.options.stages_per_rank > 1:
        in_flight = min(
            step_config.accumulation, degree + (degree - 1) // step_config.options.stages_per_rank
        )
    return [Stage(most, True, False, in_flight), Stage(most, False, True, 1)]


def _simulate(step_config: StepConfig, rates: Rates, stage: Stage) -> Simulation:
    """The step of a rank with this part of the model."""
    program = StepProgram(step_config, rates, stage)
    operations = program.build(min(step_config.accumulation, SIMULATED))
    held = program.held()
    if len(program.starts) < SIMULATED:
        return simulate(operations, held)
    repeated = (program.starts[1], program.starts[2])
    return simulate(operations, held, repeated, step_config.accumulation - SIMULATED)


@dataclass(frozen=True)
class RunCost:
    """The cost of a whole run, by the expected speed.

    checkpoint_seconds: until all ranks have written one. checkpoint_every_seconds: the interval by
    Young and Daly (10.1016/j.future.2004.11.016), sqrt(2 · cost · time between failures). goodput:
    the fraction of the time that trains.
    """

    steps: int
    tokens: int
    days: float
    gpu_hours: float
    kilowatt_hours: float
    price: float
    checkpoint_bytes: int
    checkpoint_seconds: float
    checkpoint_every_seconds: float
    checkpoint_every_steps: int
    failures: float
    goodput: float


def run_cost(
    phases: Sequence[tuple[int, Prediction]],
    price: float,
    gpu: GPU,
    *,
    async_save: bool,
    disk_gb_s: float = DISK_GB_S,
) -> RunCost:
    """The cost of a run with these numbers of steps of each kind, at the price of a GPU-hour.

    An asynchronous save costs the time to copy a rank's part to host memory. All ranks together
    write a checkpoint at `disk_gb_s` GB per second.
    """
    step_config = phases[0][1].step_config
    steps = sum(count for count, _ in phases)
    step_seconds = sum(count * each.step_seconds for count, each in phases) / steps
    size = checkpoint_bytes(step_config.optimizer, step_config.master_dtype, step_config.parameters)
    writing = size / (disk_gb_s * GB)
    cost = writing
    if async_save:
        hosts = math.ceil(step_config.world_size / step_config.gpus_per_host)
        writers = 1
        if step_config.is_fsdp:
            writers = step_config.shards * step_config.tensor * step_config.pipeline
        cost = min(writing, size / writers / (gpu.pcie_gb_s * GB) + 0.1 * hosts**0.5)
    between = FAILURE_GPU_HOURS * 3600 / step_config.world_size
    # A save cannot begin before the one before it is written.
    every = max(math.sqrt(2 * cost * between), writing)
    lost = cost / every + (every / 2 + RESTART_SECONDS + writing) / between
    goodput = 1 / (1 + lost)
    seconds = steps * step_seconds / goodput
    gpu_hours = seconds / 3600 * step_config.world_size
    watts = gpu.watts * POWER_FRACTION * HOST_POWER
    return RunCost(
        steps,
        sum(count * each.step_config.tokens_per_step for count, each in phases),
        seconds / 86400,
        gpu_hours,
        gpu_hours * watts / 1000,
        gpu_hours * price,
        size,
        writing,
        every,
        max(1, round(every / step_seconds)),
        seconds / between,
        goodput,
    )
