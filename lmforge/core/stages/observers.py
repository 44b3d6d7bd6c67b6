"""Everything that observes a run, in one place: what is called at which point of the loop, and in which order.

The loop (core/loop.py) knows none of it, and would train the same without it. Each is in a package of its own: the watchdog
and the console (monitor/), the comparison with a prediction (plan/), tasks and samples (validation.py), the files of the run
(attempt.py), its report (report/), trackers (trackers/), and the callbacks of plugins (custom_code.py).
"""

import statistics
from collections.abc import Callable
from contextlib import ExitStack
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from lmforge.core.checkpoint import AsyncCheckpointer
from lmforge.core.errors import UserError, format_bytes, format_count
from lmforge.core.model.attention_backend import describe_attention_backend
from lmforge.core.model.flops import describe_experts
from lmforge.core.model.state_bytes import DTYPE_BYTES
from lmforge.core.parallel.precision import has_compiled_blocks
from lmforge.core.stages.attempt import MetricsFile, RunContext
from lmforge.core.stages.build_model import BuiltModel
from lmforge.core.stages.inputs import RunInputs
from lmforge.core.stages.parameter_counts import count_parameters, get_lora_config, training_flops_per_token
from lmforge.core.stages.validation import score_tasks, write_samples
from lmforge.core.stages.weight_source import find_weights
from lmforge.core.steps.bad_steps import BadStep
from lmforge.core.steps.callbacks import BatchSource, LoopCallbacks
from lmforge.core.steps.metrics import Throughput, describe_device
from lmforge.lab.plan.planning import RunPrediction
from lmforge.ops.monitor.expert_load import ExpertLoad
from lmforge.ops.monitor.predicted_loss import LossWatch, read_predicted_loss
from lmforge.ops.monitor.usage.other_trainings import other_trainings
from lmforge.ops.report.page import ReportThread

# By this step everything has been compiled once.
COMPILE_WARMUP_STEPS = 3
# The number of steps after which the prediction is compared with the run.
PREDICTED_STEPS = 20


class Observers(LoopCallbacks):
    """What is attached to the loop of a run. Every rank has one."""

    def __init__(
        self,
        ctx: RunContext,
        inputs: RunInputs,
        built: BuiltModel,
        batches: BatchSource,
        checkpointer: AsyncCheckpointer,
        throughput: Throughput,
        prediction: RunPrediction | str | None,
    ) -> None:
        self._ctx, self._inputs, self._built, self._batches = ctx, inputs, built, batches
        self._checkpointer, self._throughput = checkpointer, throughput
        self._prediction_check = None
        if prediction is not None:
            tokens, log = inputs.batch_plan.tokens, ctx.console.info
            self._prediction_check = PredictionCheck(prediction, tokens, built.point.step, log)
        model = built.parallel_model.model
        self._expert_load: ExpertLoad | None = None
        self._experts_file: MetricsFile | None = None
        if any(model.config.sparse_layers):
            self._expert_load = ExpertLoad(model, ctx.dist_ctx, built.point.step)
            self._experts_file = MetricsFile(ctx.run.experts_path) if ctx.dist_ctx.is_rank0 else None
        self._loss_watch: LossWatch | None = None
        if ctx.config.log.prediction is not None and ctx.dist_ctx.is_rank0:
            try:
                self._loss_watch = LossWatch(read_predicted_loss(ctx.config.log.prediction, ctx.config.train.steps))
            except UserError as problem:  # refused where a run begins; one that resumes needs no prediction to train
                ctx.console.warn(f"{problem}; validation losses are compared with none")
        self._metrics_file = MetricsFile(ctx.run.metrics_path) if ctx.dist_ctx.is_rank0 else None
        self._report = ReportThread(ctx.run)
        trace = ctx.run.path / "profile" / f"rank-{ctx.dist_ctx.rank_info.rank}.json"
        window, device = ctx.config.log.profile_window, ctx.dist_ctx.device
        self._profiler = StepProfiler(window, trace, device, ctx.console.info, ctx.run.holds_lock)

    def on_start(self, step: int) -> None:
        self._ctx.callbacks.call("on_run_start", self._ctx, step, self._built.parallel_model.model)
        self._ctx.console.start_progress(step)
        if step == 0 and self._ctx.config.validation.at_start:
            self.on_record(0, {"step": 0, "tokens": 0, **self._validate(0)})

    def set_phase(self, phase: str, step: int) -> None:
        self._ctx.watch.set_phase(phase, step)

    def on_step_begin(self, step: int) -> None:
        self._profiler.begin(step)

    def on_weights_updated(self, step: int, seconds: float, has_compiled: bool) -> None:
        console, built = self._ctx.console, self._built
        self._profiler.end(step)
        is_first = step == built.point.step + 1
        if self._prediction_check is not None and not is_first and not has_compiled:
            self._prediction_check.add_step(seconds)
        if built.compiled and is_first and not has_compiled_blocks(built.parallel_model.model):
            console.warn("compile is on, but no block was compiled; TORCH_LOGS=dynamo,graph_breaks shows why")
        if has_compiled and step > built.point.step + COMPILE_WARMUP_STEPS:
            console.info(f"step {step}: compiled again, which stalls every rank; TORCH_LOGS=recompiles shows why")
        console.update_progress(step)

    def on_bad_step(self, bad_step: BadStep) -> None:
        if self._ctx.dist_ctx.is_rank0 and self._ctx.run.holds_lock():
            batch, words = self._batches.describe(bad_step.batch_index)
            path = bad_step.write(self._ctx.run.path / "bad", batch)
            self._ctx.events.add("bad step", bad_step.step, reason=bad_step.reason)
            words = words or f"its samples are named in {path}"
            self._ctx.console.warn(f"step {bad_step.step}: {bad_step.reason}; not used, and {words}")

    def on_rollback(self, step: int, to: int, reason: str) -> None:
        if self._expert_load is not None:
            self._expert_load.discard(to)
        self._ctx.events.add("rollback", step, to=to, reason=reason)
        self._ctx.console.warn(f"{reason}: rolled back to step {to}, continuing with the batches after them")

    def on_log(self, step: int, record: dict[str, Any]) -> None:
        if self._prediction_check is not None:
            is_last = step == self._ctx.config.train.steps
            record |= self._prediction_check.compare(step, record["memory_gib"], is_last=is_last)
        if self._expert_load is not None:
            load, lines = self._expert_load.take(step)
            record |= load
            counts = self._expert_load.record(self._ctx.config.train.steps)
            if counts is not None and self._experts_file is not None and self._ctx.run.holds_lock():
                self._experts_file.write(counts)
            for line in lines:
                self._ctx.console.warn(line)
        if warning := self._batches.warning(step, record):
            self._ctx.console.warn(warning)
        pipeline_rank = self._built.parallel_model.pipeline_rank
        for line in self._ctx.watch.check_step_times(step, record["step_seconds"], pipeline_rank):
            self._ctx.console.info(line)

    def validate(self, step: int, required: bool) -> dict[str, float]:
        if not required and not _is_due(self._ctx.config.validation.every_steps, step):
            return {}
        scores = self._validate(step)
        self._ctx.callbacks.call("on_validation_end", self._ctx, step, scores)
        return scores

    def _validate(self, step: int) -> dict[str, float]:
        self._ctx.watch.set_phase("evaluate", step)
        with self._throughput.excluded("validation"):
            scores = self._batches.validate(step)
            return scores | score_tasks(self._ctx, self._inputs, self._built.parallel_model, step)

    def on_record(self, step: int, record: dict[str, Any]) -> None:
        if not self._ctx.run.holds_lock():
            return  # all ranks end at the next step (`Checkpoints.requested_by_clock`)
        if self._metrics_file is not None:
            self._metrics_file.write(record)
            self._report.write_if_due()
        self._ctx.console.log_metrics(record)
        if self._loss_watch is not None and (line := self._loss_watch.check(step, record.get("val/loss"))):
            self._ctx.console.warn(line)
        self._ctx.trackers.wake()

    def on_save(self, step: int, kept: bool) -> None:
        self._ctx.events.add("checkpoint", step, kept=kept)

    def on_step_end(self, step: int, record: dict[str, Any], is_stopping: bool) -> None:
        ctx = self._ctx
        ctx.callbacks.call("on_step_end", ctx, step, record)
        if ctx.callbacks.has("on_checkpoint_saved"):
            for saved in ctx.dist_ctx.broadcast(self._checkpointer.take_saved_steps()):
                ctx.callbacks.call("on_checkpoint_saved", ctx, saved, ctx.run.checkpoint_path(saved))
        if not is_stopping and _is_due(ctx.config.sample.every_steps, step):
            ctx.watch.set_phase("sample", step)
            with self._throughput.excluded("sample"):
                write_samples(ctx, self._built.parallel_model, self._inputs.tokenizer, step)

    def close(self) -> None:
        """Finish what is being written, and close what was opened: all of it, whatever fails."""
        with ExitStack() as stack:
            stack.callback(self._report.close)
            for file in (self._metrics_file, self._experts_file):
                if file is not None:
                    stack.callback(file.close)
            stack.callback(self._profiler.close)
            stack.callback(self._ctx.console.stop_progress)


def _is_due(every_steps: int | None, step: int) -> bool:
    return every_steps is not None and step % every_steps == 0


class PredictionCheck:
    """Compares the prediction for a run with its first steps. It never ends the run, and never waits for the device."""

    def __init__(
        self, prediction: RunPrediction | str, tokens_per_step: int, start_step: int, log: Callable[[str], None]
    ) -> None:
        """`prediction` is a string with the reason where there is no prediction."""
        self._prediction, self._tokens, self._log = prediction, tokens_per_step, log
        self._due_step, self._seconds = start_step + PREDICTED_STEPS, list[float]()

    def add_step(self, seconds: float) -> None:
        """Record the seconds of a step, which is neither the first nor one that compiled."""
        if len(self._seconds) < PREDICTED_STEPS:
            self._seconds.append(seconds)

    def compare(self, step: int, memory_gib: float, *, is_last: bool) -> dict[str, float]:
        """Fields for metrics.jsonl, once: at the first log step after PREDICTED_STEPS, or at the last of a shorter run."""
        prediction = self._prediction
        if isinstance(prediction, str) or not (step >= self._due_step or is_last):
            return {}
        self._prediction = "nothing any more"
        try:
            speed = self._tokens / statistics.median(self._seconds) if self._seconds else None
            self._log(f"predicted  {prediction.compare(memory_gib * 2**30, speed)}")
            fields = {
                "predicted/memory_gib": prediction.memory_bytes / 2**30,
                "measured/memory_gib": memory_gib,
                "predicted/tokens_per_second": prediction.tokens_per_second,
                "measured/tokens_per_second": speed,
            }
            return {name: value for name, value in fields.items() if value is not None}
        except Exception as problem:  # a failed comparison must not end the run
            self._log(f"predicted  failed, and the run continues: {problem}")
            return {}


class StepProfiler:
    """A profiler's trace of the steps `first` to `last` (from 1), in a file that Perfetto (https://ui.perfetto.dev) opens.

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
        self._window, self._path, self._log, self._may_write = window or (0, -1), path, log, may_write
        self._activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
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
        traced, self._profile = self._profile, None
        traced.stop()
        if not self._traced or not self._may_write():  # without a step, the first has failed
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        traced.export_chrome_trace(str(self._path))
        self._log(f"profile    steps {self._traced[0]} to {self._traced[-1]}: {self._path.parent} (open a file with Perfetto)")


def build_throughput(
    ctx: RunContext, inputs: RunInputs, built: BuiltModel, batches: BatchSource, peak_flops: float | None
) -> Throughput:
    """What measures the speed of a run."""
    config = ctx.config
    intervals = {
        "validation": config.validation.every_steps,
        "save": config.checkpoint_every_steps,
        "sample": config.sample.every_steps,
    }
    flops_per_token = cache(partial(training_flops_per_token, config, inputs.model_config))
    return Throughput(built.parallel_model, batches, flops_per_token, peak_flops, config.train.steps, intervals)


def log_summary(
    ctx: RunContext,
    inputs: RunInputs,
    built: BuiltModel,
    peak_flops: float | None,
    prediction: RunPrediction | str | None,
) -> None:
    """Log the model, the data and how it will be trained; `prediction` on rank 0."""
    log, config, model_config, dist_ctx = ctx.console.info, ctx.config, inputs.model_config, ctx.dist_ctx
    counts = count_parameters(model_config, get_lora_config(config))
    flops_per_token = training_flops_per_token(config, model_config, config.data.sequence_length)
    kind = model_config.model_type
    ctx.events.add("model", built.point.step, model_type=kind, parameters=counts.total, trained=counts.trained)
    partly = "" if counts.trained == counts.total else f", {counts.trained:,} of them trained"
    log(f"model      {counts.total:,} parameters ({kind}){partly}, {flops_per_token:.3g} FLOPs per token")
    if counts.quantized:
        master, lora = config.train.master_dtype, get_lora_config(config)
        assert lora is not None
        assert lora.stored is not None
        saved = counts.quantized * DTYPE_BYTES[master] - counts.quantized_bytes
        than = f"{'less' if saved >= 0 else 'more'} than in {master}"  # rows that are padded to a block can take more
        takes = f"{format_bytes(counts.quantized_bytes)}, {format_bytes(abs(saved))} {than}"
        log(f"base       {counts.quantized:,} frozen weights in {lora.stored.describe()}: {takes}")
    if any(model_config.sparse_layers):
        log(f"experts    {describe_experts(model_config)}; {built.parallel_model.model.balance.describe()}")
    if built.point.manifest is None:
        words = [f"random, seed {config.train.seed}"]
        if inputs.load_weights and config.model.source is not None:
            words = [f"of {config.model.source}", *find_weights(config.model.source).notes]
        log(f"weights    {', '.join(words)}")
    log(f"data       {inputs.data_summary}")
    log(f"batch      {inputs.batch_plan}")
    on_gpu = dist_ctx.device.type == "cuda"
    device = describe_device(dist_ctx.device)
    log(f"engine     {built.parallel_model.description}, {format_count(dist_ctx.world_size, 'rank')} on {device}")
    if not on_gpu and (others := other_trainings()):
        log(f"shared     other trainings use these cores too, so each is slower: process {', '.join(map(str, others))}")
    wrapped = model_config.implementation == "transformers"
    attention = "transformers', dense mask"
    if not wrapped:
        context_parallel = config.parallel.context_parallel_degree > 1
        attention = describe_attention_backend(
            dist_ctx.device, built.dtype, model_config.head_dim, context_parallel=context_parallel
        )
    compile_words = f"compile {'on' if built.compiled else 'off'} ({built.compile_reason})"
    float8 = ", products of the blocks in float8 (the MFU is of the bf16 peak)" if config.train.float8 else ""
    log(
        f"compute    {str(built.dtype).removeprefix('torch.')} ({inputs.dtype_reason}){float8},"
        f" master weights in {config.train.master_dtype}, attention {attention}, {compile_words}"
    )
    if prediction is not None:
        log(f"predicted  {prediction if isinstance(prediction, str) else prediction.describe()}")
    if config.train.deterministic:
        log("bits       the same from run to run on these ranks, this hardware and these versions (train.deterministic)")
    if peak_flops is None:
        log("MFU        left out: the peak of this GPU is not in the table")
    else:
        source = "data sheet" if on_gpu else "measured on this machine"
        log(f"MFU        relative to {peak_flops / 1e9:,.0f} GFLOP/s per rank ({source})")
