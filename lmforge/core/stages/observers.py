"""Everything that observes a run, in one place: what is called at which point of the loop, and in
which order.

The loop (core/loop.py) knows none of it, and would train the same without it. Here are the files of
the run, the callbacks of plugins and the profiler; what wings attach is registered as "observer"
(core/stages/observer.py), what watches an attempt as "monitor" and "attempt_observer"
(core/seams.py). The list of all is in core/options/builtin_names.py.
"""

from collections.abc import Callable
from contextlib import ExitStack
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from lmforge.core.checkpoint import AsyncCheckpointer
from lmforge.core.errors import format_bytes, format_count
from lmforge.core.model.attention_backend import describe_attention_backend
from lmforge.core.model.flops import describe_experts
from lmforge.core.model.state_bytes import DTYPE_BYTES
from lmforge.core.parallel.compiled import has_compiled_blocks
from lmforge.core.stages.build_model import BuiltModel
from lmforge.core.stages.context import RunContext
from lmforge.core.stages.inputs import RunInputs
from lmforge.core.stages.observer import ObservedRun, chosen_observers
from lmforge.core.stages.parameter_counts import (
    count_parameters,
    get_lora_config,
    training_flops_per_token,
)
from lmforge.core.stages.run_files import MetricsFile
from lmforge.core.stages.weight_source import find_weights
from lmforge.core.steps.bad_steps import BadStep
from lmforge.core.steps.callbacks import BatchSource, LoopCallbacks, is_due
from lmforge.core.steps.metrics import Throughput, describe_device

# By this step everything has been compiled once.
COMPILE_WARMUP_STEPS = 3


class Observers(LoopCallbacks):
    """All that observes the loop of a run. Every rank has one."""

    def __init__(self, run: ObservedRun, checkpointer: AsyncCheckpointer) -> None:
        self._ctx = run.ctx
        self._inputs = run.inputs
        self._built = run.built
        self._batches = run.batches
        self._checkpointer = checkpointer
        self._throughput = run.throughput
        ctx = run.ctx
        self._metrics_file = MetricsFile(ctx.run.metrics_path) if ctx.dist_ctx.is_rank0 else None
        trace = ctx.run.path / "profile" / f"rank-{ctx.dist_ctx.rank_info.rank}.json"
        window = ctx.config.log.profile_window
        device = ctx.dist_ctx.device
        self._profiler = StepProfiler(window, trace, device, ctx.console.info, ctx.run.holds_lock)
        chosen = chosen_observers(ctx.config, run.inputs.model_config)
        self._attached: list[LoopCallbacks] = [entry.build(run) for entry in chosen]

    def on_start(self, step: int) -> None:
        self._ctx.callbacks.call("on_run_start", self._ctx, step, self._built.parallel_model.model)
        self._ctx.console.start_progress(step)
        for each in self._attached:
            each.on_start(step)
        if step == 0 and self._ctx.config.validation.at_start:
            self.on_record(0, {"step": 0, "tokens": 0, **self._validate(0)})

    def set_phase(self, phase: str, step: int) -> None:
        self._ctx.watch.set_phase(phase, step)

    def on_step_begin(self, step: int) -> None:
        self._profiler.begin(step)
        for each in self._attached:
            each.on_step_begin(step)

    def on_weights_updated(self, step: int, seconds: float, has_compiled: bool) -> None:
        console = self._ctx.console
        built = self._built
        self._profiler.end(step)
        is_first = step == built.point.step + 1
        for each in self._attached:
            each.on_weights_updated(step, seconds, has_compiled)
        if built.compiled and is_first and not has_compiled_blocks(built.parallel_model.model):
            console.warn(
                "compile is on, but no block was compiled; TORCH_LOGS=dynamo,graph_breaks shows why"
            )
        if has_compiled and step > built.point.step + COMPILE_WARMUP_STEPS:
            console.info(
                f"step {step}: compiled again, which stalls every rank; TORCH_LOGS=recompiles"
                " shows why"
            )
        console.update_progress(step)

    def on_bad_step(self, bad_step: BadStep) -> None:
        if self._ctx.dist_ctx.is_rank0 and self._ctx.run.holds_lock():
            batch, words = self._batches.describe(bad_step.batch_index)
            path = bad_step.write(self._ctx.run.path / "bad", batch)
            self._ctx.events.add("bad step", bad_step.step, reason=bad_step.reason)
            words = words or f"its samples are named in {path}"
            self._ctx.console.warn(
                f"step {bad_step.step}: {bad_step.reason}; not used, and {words}"
            )
        for each in self._attached:
            each.on_bad_step(bad_step)

    def on_rollback(self, step: int, to: int, reason: str) -> None:
        for each in self._attached:
            each.on_rollback(step, to, reason)
        self._ctx.events.add("rollback", step, to=to, reason=reason)
        self._ctx.console.warn(
            f"{reason}: rolled back to step {to}, continuing with the batches after them"
        )

    def on_log(self, step: int, record: dict[str, Any]) -> None:
        for each in self._attached:
            each.on_log(step, record)
        if warning := self._batches.warning(step, record):
            self._ctx.console.warn(warning)
        pipeline_rank = self._built.parallel_model.pipeline_rank
        for line in self._ctx.watch.check_step_times(step, record["step_seconds"], pipeline_rank):
            self._ctx.console.info(line)

    def validate(self, step: int, required: bool) -> dict[str, float]:
        if not required and not is_due(self._ctx.config.validation.every_steps, step):
            return {}
        scores = self._validate(step)
        self._ctx.callbacks.call("on_validation_end", self._ctx, step, scores)
        return scores

    def _validate(self, step: int) -> dict[str, float]:
        self._ctx.watch.set_phase("evaluate", step)
        with self._throughput.excluded("validation"):
            scores = self._batches.validate(step)
            for each in self._attached:
                scores |= each.validate(step, required=True)
            return scores

    def on_record(self, step: int, record: dict[str, Any]) -> None:
        if not self._ctx.run.holds_lock():
            return  # all ranks end at the next step (`Checkpoints.requested_by_clock`)
        if self._metrics_file is not None:
            self._metrics_file.write(record)
        for observer in self._ctx.observers:
            observer.on_record()
        self._ctx.console.log_metrics(record)
        for each in self._attached:
            each.on_record(step, record)

    def on_save(self, step: int, kept: bool) -> None:
        self._ctx.events.add("checkpoint", step, kept=kept)
        for each in self._attached:
            each.on_save(step, kept)

    def on_step_end(self, step: int, record: dict[str, Any], is_stopping: bool) -> None:
        ctx = self._ctx
        ctx.callbacks.call("on_step_end", ctx, step, record)
        if ctx.callbacks.has("on_checkpoint_saved"):
            for saved in ctx.dist_ctx.broadcast(self._checkpointer.take_saved_steps()):
                ctx.callbacks.call(
                    "on_checkpoint_saved", ctx, saved, ctx.run.checkpoint_path(saved)
                )
        for each in self._attached:
            each.on_step_end(step, record, is_stopping)

    def close(self) -> None:
        """Finish what is being written, and close what was opened: all of it, whatever fails."""
        with ExitStack() as stack:
            if self._metrics_file is not None:
                stack.callback(self._metrics_file.close)
            for each in self._attached:
                stack.callback(each.close)
            stack.callback(self._profiler.close)
            stack.callback(self._ctx.console.stop_progress)


class StepProfiler:
    """A profiler's trace of the steps `first` to `last` (from 1), in a file that Perfetto
    (https://ui.perfetto.dev) opens.

    `log` is called with a line about the file, which is written if `may_write` says so.
    """

    def __init__(
        self,
        window: tuple[int, int] | None,
        path: Path,
        device: torch.device,
        log: Callable[[str], None],
        may_write: Callable[[], bool],
    ) -> None:
        self._window = window or (0, -1)
        self._path = path
        self._log = log
        self._may_write = may_write
        self._activities = [
            ProfilerActivity.CPU,
            *([ProfilerActivity.CUDA] if device.type == "cuda" else []),
        ]
        self._profile: profile | None = None
        self._step: record_function | None = None
        self._traced: list[int] = []

    def begin(self, step: int) -> None:
        """Before a step (from 1)."""
        first, last = self._window
        if first <= step <= last:
            if self._profile is None:
                self._profile = profile(activities=self._activities)
                self._profile.start()
            self._step = record_function(f"step {step}")
            self._step.__enter__()

    def end(self, step: int) -> None:
        """After a step."""
        if self._step is not None:
            self._step.__exit__(None, None, None)
            self._step = None
            self._traced.append(step)
            if step == self._window[1]:
                self.close()

    def close(self) -> None:
        """Write what has been traced, if it is not yet written."""
        if self._profile is None:
            return
        traced = self._profile
        self._profile = None
        traced.stop()
        if not self._traced or not self._may_write():  # without a step, the first has failed
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        traced.export_chrome_trace(str(self._path))
        self._log(
            f"profile    steps {self._traced[0]} to {self._traced[-1]}: {self._path.parent} (open a"
            " file with Perfetto)"
        )


def build_throughput(
    ctx: RunContext,
    inputs: RunInputs,
    built: BuiltModel,
    batches: BatchSource,
    peak_flops: float | None,
) -> Throughput:
    """What measures the speed of a run."""
    config = ctx.config
    intervals = {
        "validation": config.validation.every_steps,
        "save": config.checkpoint_every_steps,
        "sample": config.sample.every_steps,
    }
    flops_per_token = cache(partial(training_flops_per_token, config, inputs.model_config))
    return Throughput(
        built.parallel_model, batches, flops_per_token, peak_flops, config.train.steps, intervals
    )


def log_summary(
    ctx: RunContext,
    inputs: RunInputs,
    built: BuiltModel,
    peak_flops: float | None,
) -> None:
    """Log the model, the data and how it will be trained."""
    log = ctx.console.info
    config = ctx.config
    model_config = inputs.model_config
    dist_ctx = ctx.dist_ctx
    counts = count_parameters(model_config, get_lora_config(config))
    flops_per_token = training_flops_per_token(config, model_config, config.data.sequence_length)
    kind = model_config.model_type
    ctx.events.add(
        "model", built.point.step, model_type=kind, parameters=counts.total, trained=counts.trained
    )
    partly = "" if counts.trained == counts.total else f", {counts.trained:,} of them trained"
    log(
        f"model      {counts.total:,} parameters ({kind}){partly}, {flops_per_token:.3g} FLOPs per"
        " token"
    )
    if counts.quantized:
        master = config.train.master_dtype
        lora = get_lora_config(config)
        assert lora is not None
        assert lora.stored is not None
        saved = counts.quantized * DTYPE_BYTES[master] - counts.quantized_bytes
        # Rows that are padded to a block can take more.
        than = f"{'less' if saved >= 0 else 'more'} than in {master}"
        takes = f"{format_bytes(counts.quantized_bytes)}, {format_bytes(abs(saved))} {than}"
        log(f"base       {counts.quantized:,} frozen weights in {lora.stored.describe()}: {takes}")
    balance = built.parallel_model.model.balance
    if balance is not None and any(model_config.sparse_layers):
        log(f"experts    {describe_experts(model_config)}; {balance.describe()}")
    if built.point.manifest is None:
        words = [f"random, seed {config.train.seed}"]
        if inputs.load_weights and config.model.source is not None:
            words = [f"of {config.model.source}", *find_weights(config.model.source).notes]
        log(f"weights    {', '.join(words)}")
    log(f"data       {inputs.data_summary}")
    log(f"batch      {inputs.batch_plan}")
    on_gpu = dist_ctx.device.type == "cuda"
    device = describe_device(dist_ctx.device)
    log(
        f"engine     {built.parallel_model.description},"
        f" {format_count(dist_ctx.world_size, 'rank')} on {device}"
    )
    wrapped = model_config.implementation == "transformers"
    attention = "transformers', dense mask"
    if not wrapped:
        context_parallel = config.parallel.context_parallel_degree > 1
        attention = describe_attention_backend(
            dist_ctx.device,
            built.dtype,
            model_config.head_dim,
            context_parallel=context_parallel,
            sinks=model_config.family.attention_sinks,
        )
    compile_words = f"compile {'on' if built.compiled else 'off'} ({built.compile_reason})"
    float8 = (
        ", products of the blocks in float8 (the MFU is of the bf16 peak)"
        if config.train.float8
        else ""
    )
    log(
        f"compute    {str(built.dtype).removeprefix('torch.')} ({inputs.dtype_reason}){float8},"
        f" master weights in {config.train.master_dtype}, attention {attention}, {compile_words}"
    )
    if config.train.deterministic:
        log(
            "bits       the same from run to run on these ranks, this hardware and these versions"
            " (train.deterministic)"
        )
    if peak_flops is None:
        log("MFU        left out: the peak of this GPU is not in the table")
    else:
        source = "data sheet" if on_gpu else "measured on this machine"
        log(f"MFU        relative to {peak_flops / 1e9:,.0f} GFLOP/s per rank ({source})")
