"""The cost of a step of one recipe on these ranks.

A trial builds what training would build, runs whole optimizer steps and times them and their
phases. It then runs a step under the profiler, to time communication. Tokens come from the recipe's
shards, or are random where there are none.
"""

import gc
import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from lmforge.core.data.batch import Batch
from lmforge.core.data.loader import BatchLoader
from lmforge.core.distributed.distributed import DistributedContext, init_distributed
from lmforge.core.distributed.waiting import print_line
from lmforge.core.files.atomic_files import check_output
from lmforge.core.losses.language import NextTokenObjective
from lmforge.core.model.flops import FLOPS_CONVENTION, flops_per_token, parameter_count
from lmforge.core.options.batch_plan import BatchPlan
from lmforge.core.parallel.dims import data_parallel_rank_and_size, plan_batches
from lmforge.core.parallel.parallel_model import train_step
from lmforge.core.parallel.peak_flops import rank_peak_flops
from lmforge.core.parallel.precision import DTYPES, choose_compile, with_dtype
from lmforge.core.parallel.validate import check_parallel, describe_unused_sharding
from lmforge.core.stages.build_model import build_model_and_optimizer
from lmforge.core.stages.dataset_batches import build_loader
from lmforge.core.stages.run_memory import RunMemory
from lmforge.core.stages.training_data import TokenSources, find_missing_folders
from lmforge.core.stages.weight_source import find_weights, resolve_model_config
from lmforge.core.steps.determinism import set_determinism
from lmforge.core.steps.metrics import describe_device, peak_memory_gib
from lmforge.lab.options.bench import BenchConfig
from lmforge.lab.plan.out_of_memory import MemoryEstimator

TIMED_PHASES = ("data", "forward", "backward", "reduce", "optimizer")
COLLECTIVE_NAMES = ("gloo:", "ncclDevKernel", "ncclKernel")


def measure(config: BenchConfig) -> dict[str, Any]:
    """Times and rates of one recipe on these ranks.

    Every rank calls it and gets rank 0's result.
    """
    set_determinism(config.train.deterministic)
    with init_distributed(config.train.device, config.train.threads) as dist_ctx:
        trial = _Trial(config, dist_ctx)
        with closing(trial.data):
            return dist_ctx.broadcast(trial.run())


class _Trial:
    """A model of a recipe that is trained and timed."""

    def __init__(self, config: BenchConfig, dist_ctx: DistributedContext) -> None:
        self._config = config
        self._device = dist_ctx.device
        self._is_rank0 = dist_ctx.is_rank0
        self._plan = plan_batches(config, dist_ctx.world_size)
        # Compared steps must have one sequence length.
        config = config.model_copy(update={"data": config.data.model_copy(update={"phases": ()})})
        tokens = None if find_missing_folders(config) else TokenSources.open(config)
        vocab_size = tokens.tokenizer.vocab_size if tokens else None
        pretrained = find_weights(config.model.source) if config.model.source else None
        self._model_config = resolve_model_config(config, pretrained, vocab_size)
        check_parallel(config.parallel, self._model_config, self._plan)
        unused = describe_unused_sharding(config.parallel, dist_ctx.world_size, self._device.type)
        for line in unused:
            print_line(line)
        config, _ = with_dtype(config, dist_ctx)
        with dist_ctx.raise_on_all():
            if config.bench.trace and self._is_rank0:
                check_output(config.bench.trace, "--trace")
            memory = RunMemory.of_run(config, self._model_config, self._plan, dist_ctx)
            estimator = MemoryEstimator.of_run(memory)
            memory.check()
        self._prediction = estimator.predict_run(config, self._device)
        self._dtype = DTYPES[config.train.dtype]
        self._compiled, _ = choose_compile(config, self._device, config.train.steps)
        self._objective = NextTokenObjective(z_loss=config.train.z_loss)
        load_weights = None
        if pretrained and config.model.load_weights:
            load_weights = pretrained.load_weights
        self._model, self._optimizer = build_model_and_optimizer(
            config,
            self._model_config,
            self._objective,
            dist_ctx,
            self._dtype,
            self._compiled,
            load_weights,
        )
        self._step_number = itertools.count()
        self.data: BatchLoader | _RandomBatches
        self._data_words = tokens.location if tokens else "random tokens"
        if tokens is None:
            rank, _ = data_parallel_rank_and_size(
                config.parallel, dist_ctx.rank_info.rank, dist_ctx.world_size
            )
            self.data = _RandomBatches(
                self._model_config.vocab_size, self._plan, self._device, seed=rank
            )
        else:
            self.data = build_loader(
                config, tokens.training(self._plan.global_batch_size), self._plan, dist_ctx
            )

    def run(self) -> dict[str, Any]:
        """Time steps and their phases, then communication."""
        bench = self._config.bench
        warmup_seconds = sum(sum(self._timed_step().values()) for _ in range(bench.warmup_steps))
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        cpu_before = time.process_time()
        steps = sorted(
            (self._timed_step() for _ in range(bench.steps)),
            key=lambda phases: sum(phases.values()),
        )
        cpu_seconds = (time.process_time() - cpu_before) / bench.steps
        memory_gib = peak_memory_gib(self._device)
        if isinstance(self._prediction, str):
            predicted: dict[str, Any] = {"source": self._prediction}
        else:
            predicted = self._prediction.as_json()
        return self._row([sum(phases.values()) for phases in steps]) | {
            "warmup_seconds": warmup_seconds,
            # Of all threads of rank 0 in a step, not of other processes.
            "cpu_seconds": cpu_seconds,
            "memory_gib": memory_gib,
            "phase_seconds": steps[(len(steps) - 1) // 2],
            **self._profile(bench.trace if self._is_rank0 else None),
            "predicted": predicted,
            "data": self._data_words,
        }

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize()

    def _step(self, set_phase: Callable[[str], None] = lambda phase: None) -> None:
        set_phase("data")
        train_step(
            self._model,
            self._optimizer,
            self.data.batches(next(self._step_number)),
            self._objective.num_items,
            lr=self._config.optimizer.lr,
            max_grad_norm=self._config.optimizer.max_grad_norm,
            set_phase=set_phase,
        )

    def _timed_step(self) -> dict[str, float]:
        """Seconds of each phase of a step, which add up to the step.

        No phase waits for the device: a GPU stamps its events.
        """
        on_gpu = self._device.type == "cuda"
        marks: list[tuple[str, Any]] = []

        def mark(phase: str) -> None:
            now: Any = time.perf_counter()
            if on_gpu:
                now = torch.cuda.Event(enable_timing=True)
                now.record()
            marks.append((phase, now))

        self._step(mark)
        mark("")
        if on_gpu:
            torch.cuda.synchronize()
        seconds = dict.fromkeys(TIMED_PHASES, 0.0)
        for (phase, start), (_, end) in itertools.pairwise(marks):
            seconds[phase] += start.elapsed_time(end) / 1e3 if on_gpu else end - start
        return seconds

    def _row(self, seconds: list[float]) -> dict[str, Any]:
        """The timed values, the rates, and their conditions.

        The lower median is used, which is the value of an actual step.
        """
        median = statistics.median_low(seconds)
        tokens_per_second = self._plan.tokens / median
        world_size = self._model.dist_ctx.world_size
        per_token = flops_per_token(self._model_config, self._plan.sequence_length)
        flops = tokens_per_second / world_size * per_token
        # That of bf16 for float8 too, so that the two compare.
        peak = rank_peak_flops(self._model.dist_ctx, self._dtype)
        float8 = ", float8 in blocks" if self._config.train.float8 else ""
        return {
            "engine": self._model.description,
            "ranks": world_size,
            "device": describe_device(self._device),
            "dtype": str(self._dtype).removeprefix("torch.") + float8,
            "compiled": self._compiled,
            "parameters": parameter_count(self._model_config).total,
            "batch": str(self._plan),
            "step_seconds": {
                "median": median,
                "min": min(seconds),
                "max": max(seconds),
                "steps": len(seconds),
            },
            "tokens_per_second": tokens_per_second,
            "tflops_a_rank": flops / 1e12,
            "mfu": flops / peak if peak else None,
            "convention": FLOPS_CONVENTION,
            "torch": torch.__version__,
        }

    def _profile(self, trace_file: Path | None) -> dict[str, float]:
        """Measure one step under the profiler.

        Returns seconds in which collectives run, overlapped by computation or not, and live tensors
        at the step's peak.
        """
        on_gpu = self._device.type == "cuda"
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        self._synchronize()
        live_before = 0
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
        else:
            live_before = _live_bytes()
        with profile(activities=activities, profile_memory=not on_gpu) as profiled:
            self._step()
            self._synchronize()
        if trace_file is not None:
            trace_file.parent.mkdir(parents=True, exist_ok=True)
            # The suffix says whether to compress.
            partial = trace_file.with_name(f".partial-{trace_file.name}")
            profiled.export_chrome_trace(str(partial))
            partial.rename(trace_file)
        spans = [
            event.time_range
            for event in profiled.events() or []
            if event.name.startswith(COLLECTIVE_NAMES)
        ]
        results = profiled.profiler.kineto_results
        if on_gpu:
            live = torch.cuda.max_memory_allocated()
        else:
            live = _peak_bytes(results.events(), live_before)
        communication_seconds = _union_length([(span.start, span.end) for span in spans]) / 1e6
        return {"communication_seconds": communication_seconds, "live_gib": live / 2**30}


def _union_length(spans: list[tuple[float, float]]) -> float:
    """Length of the union of intervals, since collectives may overlap."""
    total = 0.0
    until = float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total


class _RandomBatches:
    """A batch of random tokens for every step, one document a sequence.

    It is used where the recipe's data is missing.
    """

    def __init__(self, vocab_size: int, plan: BatchPlan, device: torch.device, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        size = plan.micro_batch_size, plan.sequence_length
        tokens = torch.randint(0, vocab_size, size, generator=generator)
        positions = torch.arange(plan.sequence_length).expand(size).contiguous()
        # Random too, and used only where the model has dropout.
        keys = torch.randint(-(2**63), 2**63 - 1, size, generator=generator)
        batch = Batch(
            tokens, tokens.roll(-1, dims=1), positions, torch.zeros(size, dtype=torch.int32), keys
        )
        self._batches = [batch.to(device)] * plan.accumulation

    def batches(self, step: int) -> list[Batch]:
        return self._batches

    def close(self) -> None: ...


def _live_bytes() -> int:
    """Bytes of all tensors on the CPU that Python can see between two steps.

    The buckets of DDP are among them: its reducer keeps the gradients that are views of them, and a
    gradient that Python has seen once, as optimizers do, stays visible.
    """
    gc.collect()  # what only reference cycles hold is not needed
    tensors = (each for each in gc.get_objects() if issubclass(type(each), torch.Tensor))
    storages = {}
    for tensor in tensors:
        # What vmap hands out has none of its own.
        if tensor.device.type != "cpu" or not torch._C._has_storage(tensor):
            continue
        if type(tensor) in (torch.Tensor, torch.nn.Parameter):
            storage = tensor.untyped_storage()
            storages[storage._cdata] = storage.nbytes()
    return sum(storages.values())


def _peak_bytes(events: Sequence[Any], live_before: int) -> int:
    """The maximum of live bytes, from the events of a profiler that recorded memory.

    `live_before` bytes were live before.
    """
    changes = sorted(
        (event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]"
    )
    live = peak = live_before
    for _, nbytes in changes:
        live += nbytes
        peak = max(peak, live)
    return peak
