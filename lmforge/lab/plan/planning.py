"""Predictions of a recipe, with the options of `lmforge plan` or on the ranks of a run.

A run logs the memory and the speed that `lmforge plan` predicts before its first step, and later
the measured values with them. There is no speed for unknown hardware.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from lmforge.core.errors import UserError, format_bytes
from lmforge.core.files.untrusted import cut
from lmforge.core.model.config import ModelConfig
from lmforge.core.options.batch_plan import DEFAULT_GLOBAL_BATCH_SIZE, BatchPlan
from lmforge.core.options.mixture import tokens_by_length
from lmforge.core.options.stage import PretrainConfig, StageConfig
from lmforge.core.parallel.dims import plan_batches
from lmforge.core.parallel.precision import is_bf16_faster
from lmforge.core.parallel.validate import (
    check_compiled,
    check_float8_dtype,
    check_lora,
    check_parallel,
    choose_engine,
)
from lmforge.core.stages.parameter_counts import check_float8, get_lora_config
from lmforge.lab.options.plan import AnyPlanConfig, MachineOptions
from lmforge.lab.plan.adapters import block_adapters
from lmforge.lab.plan.calibration import Calibration, read_calibration
from lmforge.lab.plan.hardware import GB, GPU, Hardware, Network, data_sheets, read_hardware
from lmforge.lab.plan.prediction.predict import (
    DISK_GB_S,
    MEMORY_INTERVAL,
    OVERHEAD,
    Prediction,
    can_reduce_once,
    peak_memory,
    predict,
)
from lmforge.lab.plan.prediction.rates import CONSTANTS, Rates
from lmforge.lab.plan.prediction.step_config import Distillation, StepConfig
from lmforge.lab.plan.traces import LossKind
from lmforge.post.objectives.policy import build_policy_loss_config
from lmforge.post.options.align import AlignConfig
from lmforge.post.options.tuning import DistillConfig

# Data sheets have the peak at the boost clock, above which a chip may run for a while.
MOST_OF_PEAK = 1.25


@dataclass(frozen=True)
class Machine:
    """The hardware that a run is planned for: `gpus_per_host` GPUs on each host.

    `network` is None for one host.

    calibration: what was measured on such a GPU; None for data sheets alone.
    """

    gpu: GPU
    network: Network | None
    gpus_per_host: int
    calibration: Calibration | None = None

    @property
    def host_memory_bytes(self) -> float:
        return self.gpu.host_memory_gb * 2**30 * self.gpus_per_host

    def rates(self, dtype: str) -> Rates:
        rates = Rates.of_data_sheets(self.gpu, self.network, self.gpus_per_host, dtype)
        if self.calibration is None:
            return rates
        return rates.calibrate(self.calibration, dtype)

    def describe_constants(self, dtype: str) -> str:
        """A phrase that says which constants were measured and which are from a data sheet."""
        measured, rest = self.constants(dtype)
        if self.calibration is None:
            return f"constants from data sheets: {self.gpu.source}"
        sheets = f"; from data sheets ({self.gpu.source}): {', '.join(rest)}" if rest else ""
        return f"constants measured ({self.calibration.describe()}): {', '.join(measured)}{sheets}"

    def constants(self, dtype: str) -> tuple[list[str], list[str]]:
        """The names of the constants that were measured, and of those from data sheets."""
        measured = list(self.rates(dtype).calibrated)
        rest = [name for name in CONSTANTS if name not in measured]
        if self._disk is not None:
            measured.append("disk")
        if self.gpu.is_cpu:  # copies on the device itself
            rest.remove("host copies")
        if self.network is not None and (self.calibration is None or self.calibration.hosts == 1):
            rest.append("network")
        return measured, rest

    @property
    def _disk(self) -> float | None:
        return None if self.calibration is None else self.calibration.value("disk write")

    @property
    def disk_gb_s(self) -> float:
        """GB per second at which all ranks together write a checkpoint."""
        return DISK_GB_S if self._disk is None else self._disk / GB


def find_machine(options: MachineOptions) -> Machine:
    """The hardware that the options name.

    Raises UserError for hardware that is not known, and for a calibration of another device.
    """
    hardware: Hardware = read_hardware(options.hardware)
    network = hardware.network(options.network)
    per_host = min(options.gpus_per_host, options.gpus)
    if options.gpus % per_host:
        near = options.gpus // per_host * per_host
        way = f"use {near} or {near + per_host}, or another --gpus_per_host"
        raise UserError(f"--gpus {options.gpus} do not fill hosts of {per_host}; {way}")
    gpu = hardware.gpu(options.gpu_type)
    calibration = None
    if options.calibration is not None:
        calibration = read_calibration(options.calibration)
        gpu = calibrated_gpu(gpu, calibration, hardware, options.calibration, per_host)
    return Machine(gpu, network if options.gpus > per_host else None, per_host, calibration)


def calibrated_gpu(
    gpu: GPU, calibration: Calibration, hardware: Hardware, path: Path, per_host: int
) -> GPU:
    """The device with what was measured of it.

    Raises UserError for a calibration of another one.
    """
    measured: GPU | None = hardware.gpu("cpu")
    if calibration.kind != "cpu":
        measured = hardware.find(calibration.device)
    if measured is None or measured.name != gpu.name:
        way = "; describe it in a file for --hardware, with `matches`"
        if measured:
            way = f"; give --gpu_type {measured.name}"
        raise UserError(
            f"--calibration: {path}: of {cut(calibration.device)}, and the plan is for"
            f" {gpu.name}{way}"
        )
    if not gpu.is_cpu:
        _check_peaks(gpu, calibration, path)
        return gpu
    if calibration.ranks_per_host != per_host:
        raise UserError(
            f"--calibration: {path}: ranks on a CPU share its cores: {calibration.ranks_per_host}"
            f" measured, {per_host} planned per host; run lmforge bench --calibrate"
            f" --launch.processes {per_host}"
        )
    products = {
        dtype: table
        for dtype in ("fp32", "bf16")
        if (table := calibration.table("product", dtype)) is not None
    }
    tflops = gpu.tflops | {dtype: table.largest / 1e12 for dtype, table in products.items()}
    return gpu.model_copy(
        update={"tflops": tflops, "memory_gb": calibration.memory_bytes / 2**30 / per_host}
    )


def _check_peaks(gpu: GPU, calibration: Calibration, path: Path) -> None:
    """Raise UserError where measured products were faster than the data sheet permits."""
    for dtype in ("fp32", "bf16", "fp8"):
        table = calibration.table("product", dtype)
        peak = gpu.peak_flops(dtype)
        if table is not None and peak is not None and table.largest > MOST_OF_PEAK * peak:
            raise UserError(
                f"--calibration: {path}: products in {dtype} at {table.largest / 1e12:,.0f}"
                f" TFLOP/s, and the data sheet of {gpu.name} has {peak / 1e12:,.0f}; run lmforge"
                " bench --calibrate again"
            )


def choose_dtypes(
    config: StageConfig, gpu: GPU, calibration: Calibration | None
) -> tuple[str, bool]:
    """The compute dtype and whether blocks are compiled, as `auto` resolves on this device.

    Raises UserError for a dtype that the device does not have, float8 included.
    """
    fast = "bf16" in gpu.tflops
    if gpu.is_cpu:  # an unmeasured one may have bf16 or not, at any speed
        measured = calibration is not None and calibration.table("product", "bf16") is not None
        fast = measured and is_bf16_faster(gpu.tflops["bf16"], gpu.tflops["fp32"])
    train = config.train
    dtype: str = train.dtype
    if dtype == "auto":
        dtype = "bf16" if fast else "fp32"
    check_dtype(gpu, dtype)
    if train.float8:
        if gpu.peak_flops("fp8") is None:
            raise UserError(f"train.float8: {gpu.name} has no float8 arithmetic; leave it out")
        check_float8_dtype(dtype)
    return dtype, train.compile == "on" or (train.compile == "auto" and not gpu.is_cpu)


def check_dtype(gpu: GPU, dtype: str) -> None:
    """Raise UserError where there is no peak to predict speed from."""
    if gpu.peak_flops(dtype) is None:
        known = [name for name in ("bf16", "fp32") if name in gpu.tflops]
        way = "give bf16 or fp32 in its entry of the hardware file"
        if known:
            way = f"use train.dtype = {known[0]}"
        raise UserError(f"train.dtype: no {dtype} among the tflops of {cut(gpu.name)}; {way}")


def build_step_config(
    config: StageConfig,
    model: ModelConfig,
    plan: BatchPlan,
    *,
    world_size: int,
    gpus_per_host: int,
    on_gpu: bool,
    dtype: str,
    compiled: bool,
    teacher: ModelConfig | None = None,
) -> StepConfig:
    """The StepConfig of a recipe on these ranks; arguments are as its fields.

    Raises UserError for an impossible engine.
    """
    engine = choose_engine(config.parallel, world_size, "cuda" if on_gpu else "cpu")
    loss: LossKind = "tokens"
    reference: Literal["none", "copy", "policy"] = "none"
    if isinstance(config, AlignConfig):
        loss = "rewards" if config.align.method == "reward" else "logprobs"
        reference = _reference(config)
    return StepConfig(
        model=model,
        options=config.parallel.model_copy(update={"engine": engine}),
        world_size=world_size,
        gpus_per_host=gpus_per_host,
        micro_batch_size=plan.micro_batch_size,
        accumulation=plan.accumulation,
        sequence_length=plan.sequence_length,
        dtype=dtype,
        master_dtype=config.train.master_dtype,
        optimizer=config.optimizer,
        compiled=compiled,
        float8=config.train.float8,
        on_gpu=on_gpu,
        lora=block_adapters(model, get_lora_config(config)),
        loss=loss,
        reference=reference,
        has_dropout=config.model.dropout > 0,
        distillation=Distillation.of_recipe(config, teacher),
    )


def _reference(config: AlignConfig) -> Literal["none", "copy", "policy"]:
    """The reference that scores batches while a recipe trains.

    It is "none" where the reference's log-probabilities were computed before.
    """
    if config.reference in (None, "precomputed"):
        return "none"
    is_grpo = config.align.method == "grpo"
    if is_grpo and build_policy_loss_config(config.rollout).kl_estimator == "none":
        return "none"
    return "copy" if config.reference == "copy" else "policy"


def _check_predictable(config: StageConfig) -> None:
    """Raise UserError for a recipe whose step is not one update on given batches."""
    if isinstance(config, DistillConfig) and config.distill.lmbda:
        raise UserError(
            f"distill.lmbda = {config.distill.lmbda:g} is not predicted: its steps sample answers"
            " first; plan without it"
        )
    if isinstance(config, AlignConfig) and config.align.method == "grpo":
        raise UserError(
            "align.method = grpo is not predicted: most of its step samples completions and rewards"
            " them"
        )


def with_default_batch(config: AnyPlanConfig) -> tuple[AnyPlanConfig, list[str]]:
    """The recipe with a large enough global batch, and the lines that say what was changed.

    Where it gives no global batch and the default has fewer sequences than there are GPUs, it gets
    one sequence for each GPU.
    """
    train = config.train
    gpus = config.plan.gpus
    if train.global_batch_size or train.global_batch_tokens or gpus <= DEFAULT_GLOBAL_BATCH_SIZE:
        return config, []
    note = (
        f"train.global_batch_size = {gpus}, one sequence for each GPU, since the default is"
        f" {DEFAULT_GLOBAL_BATCH_SIZE}"
    )
    train = train.model_copy(update={"global_batch_size": gpus})
    return config.model_copy(update={"train": train}), [note]


def make_step_config(
    config: StageConfig,
    model: ModelConfig,
    gpus: int,
    machine: Machine,
    teacher: ModelConfig | None = None,
) -> StepConfig:
    """The StepConfig of a recipe on this number of GPUs.

    Raises UserError where it does not fit the ranks, the model or the device.
    """
    _check_predictable(config)
    if config.train.epochs is not None:
        raise UserError(
            f"train.epochs = {config.train.epochs:g}: a plan does not read the data; give"
            " --train.steps instead"
        )
    plan = plan_batches(config, gpus)
    check_parallel(config.parallel, model, plan)
    lora = get_lora_config(config)
    if lora is not None:
        check_lora(config.parallel, config.train.float8, lora.base_dtype)
    model.check_length(config.data.sequence_length)
    dtype, compiled = choose_dtypes(config, machine.gpu, machine.calibration)
    if config.train.float8:
        check_float8(model)
    if compiled:
        check_compiled(config.parallel, "cpu" if machine.gpu.is_cpu else "cuda")
    step_config = build_step_config(
        config,
        model,
        plan,
        world_size=gpus,
        gpus_per_host=machine.gpus_per_host,
        on_gpu=not machine.gpu.is_cpu,
        dtype=dtype,
        compiled=compiled,
        teacher=teacher,
    )
    if teacher is not None:
        check_parallel(config.parallel, teacher, plan)
    _ = step_config.dims  # refused here where the ranks do not fill the mesh
    return step_config


def predict_step(step_config: StepConfig, machine: Machine) -> Prediction:
    return predict(step_config, machine.gpu, machine.rates(step_config.dtype))


def suggest_reduction(prediction: Prediction, machine: Machine, usable: float) -> str:
    """A line that says what reducing gradients once per step would bring.

    It is empty where that is done, makes no difference, or may not fit.
    """
    step_config = prediction.step_config
    if not can_reduce_once(step_config) or not step_config.options.reduce_every_micro_batch:
        return ""
    once = predict_step(step_config.with_options(reduce_every_micro_batch=False), machine)
    if once.memory_interval[1] > usable * machine.gpu.memory_bytes:
        return ""
    faster = once.tokens_per_second / prediction.tokens_per_second - 1
    more = format_bytes(max(0.0, once.device_bytes - prediction.device_bytes))
    return (
        f"parallel.reduce_every_micro_batch = false fits too: {faster:.1%} faster, {more} more per"
        " rank"
    )


def predict_phases(
    config: StageConfig, prediction: Prediction, machine: Machine
) -> list[tuple[int, Prediction]]:
    """(steps, prediction) of each phase of the run.

    Its sequences may be shorter than those of `prediction`, which has the longest.
    """
    step_config = prediction.step_config
    steps = config.train.steps
    if not isinstance(config, PretrainConfig) or not config.data.phases:
        return [(steps, prediction)]
    size = plan_batches(config, step_config.world_size).global_batch_size
    known = {step_config.sequence_length: prediction}
    by_length = tokens_by_length(config.data.phases, steps, size, step_config.sequence_length)
    rates = machine.rates(step_config.dtype)
    for length, _ in by_length:
        if length not in known:
            phase = replace(step_config, sequence_length=length)
            known[length] = predict(phase, machine.gpu, rates)
    return [(tokens // (length * size), known[length]) for length, tokens in by_length if tokens]


@dataclass(frozen=True)
class RunPrediction:
    """The prediction of a step of a run.

    memory_bytes, memory_interval: at the peak of the fullest rank, of what `memory_gib` in
        metrics.jsonl measures: tensors on a GPU, resident memory on a CPU.
    tokens_per_second, speed_interval: of all ranks, padding included; None where it is not
    predicted.
    speed_source: where its constants are from, or why there is no speed.
    """

    memory_bytes: float
    memory_interval: tuple[float, float]
    tokens_per_second: float | None
    speed_interval: tuple[float, float] | None
    speed_source: str

    def describe(self) -> str:
        """The prediction in one line."""
        speed = f"{self._speed_words} tokens/s" if self.speed_interval else "no speed"
        return f"memory {self._memory_words} per rank; {speed} ({self.speed_source})"

    def as_json(self) -> dict[str, Any]:
        """The fields, with memory in GiB."""
        speeds = None if self.speed_interval is None else list(self.speed_interval)
        return {
            "memory_gib": self.memory_bytes / 2**30,
            "memory_gib_interval": [each / 2**30 for each in self.memory_interval],
            "tokens_per_second": self.tokens_per_second,
            "tokens_per_second_interval": speeds,
            "source": self.speed_source,
        }

    def compare(self, memory_bytes: float, tokens_per_second: float | None) -> str:
        """A phrase with the measured values and the prediction beside them."""
        words = f"memory {format_bytes(memory_bytes)} (predicted {self._memory_words})"
        if tokens_per_second is not None:
            predicted = f" (predicted {self._speed_words})" if self.speed_interval else ""
            words += f"; {tokens_per_second:,.0f} tokens/s{predicted}"
        return words

    @property
    def _memory_words(self) -> str:
        return " to ".join(map(format_bytes, self.memory_interval))

    @property
    def _speed_words(self) -> str:
        return " to ".join(f"{each:,.0f}" for each in self.speed_interval or ())


def predict_run(
    step_config: StepConfig,
    config: StageConfig,
    device_name: str | None,
    resident: tuple[float, float],
) -> RunPrediction:
    """The prediction of a run.

    Args:
        device_name: of the GPU, as torch gives it; None on a CPU.
        resident: on a CPU the bytes of this process before it builds anything, and the upper end of
            the interval: libraries take more from the first step on, and the C library keeps more
            than is live.

    Raises UserError, in words for the reader, where nothing can be predicted.
    """
    _check_predictable(config)
    kinds = peak_memory(step_config)
    memory = sum(kinds.values()) - kinds[OVERHEAD] - kinds["allocator"]
    interval = memory * MEMORY_INTERVAL[0], memory * MEMORY_INTERVAL[1]
    if not step_config.on_gpu:
        before, most = resident
        memory += before
        interval = (interval[0] + before, most)
    try:
        machine = _find_machine(step_config, config, device_name)
    except UserError as problem:
        return RunPrediction(memory, interval, None, None, str(problem))
    prediction = predict_step(step_config, machine)
    ranks = step_config.world_size
    slow, fast = prediction.speed_interval
    source = machine.describe_constants(step_config.dtype)
    return RunPrediction(
        memory, interval, prediction.tokens_per_second * ranks, (slow * ranks, fast * ranks), source
    )


def _find_machine(step_config: StepConfig, config: StageConfig, device_name: str | None) -> Machine:
    """The hardware of a run. Raises UserError where a constant would be a guess."""
    if len(set(getattr(config.data, "sequence_lengths", ()))) > 1:
        raise UserError("data.phases has several sequence lengths")
    path = config.log.calibration
    per_host = step_config.gpus_per_host
    gpu = data_sheets().gpu("cpu") if device_name is None else data_sheets().find(device_name)
    if gpu is None:
        raise UserError(f"{device_name} is not in the hardware file")
    check_dtype(gpu, step_config.dtype)
    calibration = None if path is None else read_calibration(path)
    if calibration is None and gpu.is_cpu:
        raise UserError(
            "no measurements of this CPU; lmforge bench --calibrate makes them, log.calibration"
            " names the file"
        )
    network = None
    if step_config.world_size > per_host:
        if calibration is None or calibration.hosts == 1:
            raise UserError(
                "no measurements of the network between hosts; lmforge bench --calibrate on several"
                " hosts makes them"
            )
        # What was measured takes the place of the data sheet.
        network = data_sheets().network("infiniband-ndr")
    if path is not None and calibration is not None:
        gpu = calibrated_gpu(gpu, calibration, data_sheets(), path, per_host)
    return Machine(gpu, network, per_host, calibration)
