"""From a recipe and options of `lmforge plan` to a prediction. No torch."""

from dataclasses import dataclass, replace

from lmforge.config.planning import PlanConfig
from lmforge.config.stage import StageConfig
from lmforge.errors import UserError
from lmforge.model.config import ModelConfig
from lmforge.parallel.dims import parallel_dims, plan_batches
from lmforge.parallel.validate import check_parallel, choose_engine
from lmforge.plan.hardware import GPU, Hardware, Network, read_hardware
from lmforge.plan.prediction.predict import Prediction, predict, resolve_reduction
from lmforge.plan.prediction.rates import Rates
from lmforge.plan.prediction.search import estimate
from lmforge.plan.prediction.setting import Setting


@dataclass(frozen=True)
class Machine:
    """What a run is planned for: `gpus_per_host` GPUs on each host. `network` is None for one host."""

    gpu: GPU
    network: Network | None
    gpus_per_host: int

    def rates(self, dtype: str) -> Rates:
        return Rates.of_data_sheets(self.gpu, self.network, self.gpus_per_host, dtype)


def find_machine(config: PlanConfig) -> Machine:
    """Raises UserError for hardware that is not known."""
    options = config.plan
    hardware: Hardware = read_hardware(options.hardware)
    gpu = hardware.gpu(options.gpu_type)
    network = hardware.network(options.network)
    per_host = min(options.gpus_per_host, options.gpus)
    return Machine(gpu, network if options.gpus > per_host else None, per_host)


def choose_dtypes(config: StageConfig, gpu: GPU) -> tuple[str, bool]:
    """The compute dtype and whether blocks are compiled, as `auto` turns out on this device. Raises UserError for float8."""
    fast = not gpu.is_cpu and gpu.peak_flops("bf16") is not None and "bf16" in gpu.tflops
    dtype = config.train.dtype if config.train.dtype != "auto" else ("bf16" if fast else "fp32")
    if config.train.float8 and gpu.peak_flops("fp8") is None:
        raise UserError(f"train.float8: {gpu.name} has no float8 arithmetic; leave it out")
    return dtype, config.train.compile == "on" or (config.train.compile == "auto" and not gpu.is_cpu)


def make_setting(config: StageConfig, model: ModelConfig, gpus: int, machine: Machine) -> Setting:
    """The setting of a recipe on so many GPUs. Raises UserError where it does not fit the ranks, the model or the device."""
    if model.family not in ("llama", "gpt2"):
        raise UserError(f"lmforge plan: there are no formulas for a {model.model_type} model")
    if config.train.epochs is not None:
        raise UserError(f"train.epochs = {config.train.epochs:g}: a plan does not read the data; give --train.steps instead")
    plan = plan_batches(config, gpus)
    check_parallel(config.parallel, model, plan)
    model.check_length(config.data.sequence_length)
    engine = choose_engine(config.parallel, gpus, "cpu" if machine.gpu.is_cpu else "cuda")
    options = config.parallel.model_copy(update={"engine": engine})
    parallel_dims(options, gpus, machine.gpus_per_host)
    dtype, compiled = choose_dtypes(config, machine.gpu)
    return Setting(
        model=model,
        options=options,
        world_size=gpus,
        gpus_per_host=machine.gpus_per_host,
        micro_batch_size=plan.micro_batch_size,
        accumulation=plan.accumulation,
        sequence_length=config.data.sequence_length,
        dtype=dtype,
        master_dtype=config.train.master_dtype,
        optimizer=config.optimizer,
        compiled=compiled,
        float8=config.train.float8,
        on_gpu=not machine.gpu.is_cpu,
    )


def predict_setting(setting: Setting, machine: Machine, usable: float) -> Prediction:
    """The prediction, with what `reduce_every_micro_batch` is by default."""
    rates = machine.rates(setting.dtype)
    return predict(resolve_reduction(setting, machine.gpu, rates, usable), machine.gpu, rates)


def suggest_fit(setting: Setting, machine: Machine, usable: float) -> str:
    """What would make a setting fit that does not, the least change first; what nothing does, in words."""
    budget = usable * machine.gpu.memory_bytes
    ways: list[tuple[str, Setting]] = []
    options = setting.options
    order = ("none", "selective-ops", "full")
    mode = "selective-ops" if options.activation_checkpointing == "selective-blocks" else options.activation_checkpointing
    for other in order[order.index(mode) + 1 :]:
        ways.append((f"parallel.activation_checkpointing = {other}", setting.with_options(activation_checkpointing=other)))
    size = setting.micro_batch_size
    smaller = [each for each in range(size - 1, 0, -1) if size % each == 0]
    for each in smaller:
        cut = replace(setting, micro_batch_size=each, accumulation=setting.accumulation * size // each)
        ways.append((f"train.micro_batch_size = {each}", cut))
    if setting.is_fsdp and setting.options.sharding not in (None, "full-shard"):
        ways.append(("parallel.sharding = full-shard", setting.with_options(sharding="full-shard", shard_degree=None)))
    if not setting.is_fsdp and setting.world_size > 1:
        ways.append(("parallel.engine = fsdp2", setting.with_options(engine="fsdp2")))
    least = setting.with_options(engine="fsdp2", activation_checkpointing="full", sharding=None, shard_degree=None)
    least = replace(least, micro_batch_size=1, accumulation=setting.accumulation * size)
    ways.append(("parallel.activation_checkpointing = full with train.micro_batch_size = 1 under full-shard", least))
    if setting.on_gpu:
        ways.append(("that with parallel.cpu_offload = true", least.with_options(cpu_offload=True)))
    for words, way in ways:
        if estimate(way, machine.gpu, machine.rates(way.dtype), usable).device_bytes <= budget:
            return f"would fit: {words}"
    for factor in (2, 4, 8, 16, 32, 64):
        world = setting.world_size * factor
        more = replace(least, world_size=world, accumulation=max(1, least.accumulation // factor))
        network = machine.network or read_hardware(None).network("infiniband-ndr")
        rates = replace(machine, network=network).rates(more.dtype)
        if estimate(more, machine.gpu, rates, usable).device_bytes <= budget:
            return f"nothing fits on {setting.world_size} GPUs; on {world}, with full checkpointing and full-shard, it would"
    return "nothing fits, even on 64 times as many GPUs; split the model with tensor or pipeline parallelism"
