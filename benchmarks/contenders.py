"""The contenders of train_cpu.py, mixture_cpu.py and gpu.py, each in a separate process: what they
have in common, and their training loops. lmforge does everything that a run does except validation
and saving. The others get the cheapest setup: their data is in memory, their AdamW is fused, and
the compiled loop has its loss in the graph.
"""

import json
import os
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lmforge.core.checkpoint import AsyncCheckpointer, RetentionPolicy
from lmforge.core.data.dataset import TokenDataset
from lmforge.core.data.shards.folder import TokenFolder
from lmforge.core.distributed import distributed as cluster
from lmforge.core.loop import train
from lmforge.core.losses.language import NextTokenObjective
from lmforge.core.model.build import build_model
from lmforge.core.model.config import ModelConfig
from lmforge.core.model.config_json import to_config_json
from lmforge.core.model.init_weights import init_adapters, init_weights
from lmforge.core.model.lora import add_lora
from lmforge.core.model.lora_config import adapter_parameters
from lmforge.core.model.quantization import blocks
from lmforge.core.optim.schedules import build_schedule
from lmforge.core.options.batch_plan import BatchPlan
from lmforge.core.options.operation import CheckpointOptions, LogOptions
from lmforge.core.options.sections import (
    OptimizerOptions,
    ParallelOptions,
    ScheduleOptions,
    TrainOptions,
)
from lmforge.core.options.stage import PretrainConfig, StageConfig
from lmforge.core.parallel.precision import DTYPES
from lmforge.core.records.runs import Run
from lmforge.core.seams import Monitors
from lmforge.core.stages.build_model import BuiltModel, build_model_and_optimizer
from lmforge.core.stages.context import RunContext
from lmforge.core.stages.dataset_batches import DatasetBatches
from lmforge.core.stages.inputs import RunInputs
from lmforge.core.stages.observer import ObservedRun
from lmforge.core.stages.observers import Observers
from lmforge.core.stages.parameter_counts import get_lora_config, training_flops_per_token
from lmforge.core.stages.run_files import RunEvents
from lmforge.core.steps.bad_steps import BadStepDetector
from lmforge.core.steps.checkpoints import Checkpoints
from lmforge.core.steps.metrics import Throughput, peak_memory_gib
from lmforge.core.steps.resume import ResumePoint
from lmforge.ops.monitor.console import ConsoleLogger
from lmforge.ops.monitor.rank_log import RankLog
from lmforge.ops.monitor.watchdog import Watchdog
from lmforge.post.options.tuning import (
    LoraOptions,
    SftConfig,
    TunedTrainOptions,
    TuningOptimizer,
    TuningSchedule,
)

WARM_UP_STEPS = 10
LOG_EVERY_STEPS = 10
ENDLESS_STEPS = 1_000_000
LR = 1e-3
OPTIMIZER = OptimizerOptions(lr=LR)


@dataclass(frozen=True)
class Contest:
    """The settings that all contenders share.

    `rows` is the number of sequences per step, in `accumulation` micro-batches. With `lora`
    adapters are trained beside frozen weights.
    """

    shape: ModelConfig
    rows: int
    length: int
    threads: int
    dtype: str
    compiled: bool
    peak_size: int
    folder: Path
    device: str = "cpu"
    accumulation: int = 1
    activation_checkpointing: str = "none"  # the others: all blocks
    master_dtype: Literal["fp32", "bf16"] = "fp32"
    lora: LoraOptions | None = None

    @property
    def tokens_a_step(self) -> int:
        return self.rows * self.length

    def stream(self) -> TokenDataset:
        return TokenDataset(TokenFolder.open(self.folder / "tokens"), sequence_length=self.length)

    def autocast(self) -> AbstractContextManager[Any]:
        return (
            nullcontext()
            if self.dtype == "fp32"
            else torch.autocast(self.device, dtype=DTYPES[self.dtype])
        )

    def settle(self) -> None:
        """Wait until the device has finished its work."""
        if self.device == "cuda":
            torch.cuda.synchronize()


@dataclass(frozen=True)
class Turn:
    steps: int
    seconds: float
    fastest_step_seconds: float
    memory_gib: float


class Over(Exception):
    """The contest has ended."""


class Turns:
    """Called after each step of a contender; lets it continue, or reports the turn and waits for
    the next one.
    """

    def __init__(self, pipe: Connection, contest: Contest) -> None:
        """Returns when it is this contender's turn to warm up."""
        self._pipe, self._contest = pipe, contest
        self._begin(steps=WARM_UP_STEPS, seconds=pipe.recv())

    def _begin(self, steps: int, seconds: float) -> None:
        self._least_steps, self._steps, self._fastest = steps, 0, float("inf")
        self._began = self._before = time.perf_counter()
        self._until = self._began + seconds

    def step_done(self) -> None:
        now = time.perf_counter()
        self._steps += 1
        self._fastest = min(self._fastest, now - self._before)
        self._before = now
        if self._steps >= self._least_steps and now >= self._until:
            self._contest.settle()
            memory = peak_memory_gib(torch.device(self._contest.device))
            self._pipe.send(
                Turn(self._steps, time.perf_counter() - self._began, self._fastest, memory)
            )
            seconds = self._pipe.recv()
            if seconds is None:
                raise Over
            self._begin(steps=1, seconds=seconds)


class TakesTurns(ConsoleLogger):
    """Reports each finished step.

    A checkpoint cannot be used for this, since the loop reads all metrics before it saves one.
    """

    def __init__(self, turns: Turns, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._turns = turns

    def update_progress(self, step: int) -> None:
        super().update_progress(step)
        self._turns.step_done()


def recipe_of(contest: Contest, *, float8: bool = False) -> StageConfig:
    """What lmforge trains in a contest."""
    steps, shared = (
        {"steps": ENDLESS_STEPS, "master_dtype": contest.master_dtype, "float8": float8},
        {"name": "constant"},
    )
    common: dict[str, Any] = {
        "parallel": ParallelOptions(activation_checkpointing=contest.activation_checkpointing),
        "log": LogOptions(every_steps=LOG_EVERY_STEPS),
        "checkpoint": CheckpointOptions(every_steps=ENDLESS_STEPS),
    }
    if contest.lora is None:
        schedule = ScheduleOptions(**shared, warmup_steps=0)
        return PretrainConfig(
            optimizer=OPTIMIZER, train=TrainOptions(**steps), schedule=schedule, **common
        )
    return SftConfig(
        lora=contest.lora,
        optimizer=TuningOptimizer(**OPTIMIZER.model_dump()),
        train=TunedTrainOptions(**steps),
        schedule=TuningSchedule(**shared, warmup_steps=0),
        **common,
    )


def run_lmforge(
    contest: Contest,
    turns: Turns,
    first_losses: list[float],
    *,
    compiled: bool,
    float8: bool = False,
    bitsandbytes: bool = True,
) -> None:
    """lmforge's own loop with its own parts: loader, objective, clip, optimizer, heartbeat, metrics
    and log. `bitsandbytes`: whether its kernels are used where they are installed.
    """
    folder = Path(tempfile.mkdtemp(dir=contest.folder))
    blocks._HAS_BITSANDBYTES &= bitsandbytes
    ranks = cluster.init_distributed(contest.device, contest.threads)
    objective = NextTokenObjective()
    config = recipe_of(contest, float8=float8)
    dtype, compiled = DTYPES[contest.dtype], compiled and contest.compiled
    parallel_model, optimizer = build_model_and_optimizer(
        config, contest.shape, objective, ranks, dtype, compiled, None
    )
    plan = BatchPlan(
        contest.rows, contest.length, 1, contest.rows // contest.accumulation, contest.accumulation
    )
    tokenizer = TokenFolder.open(contest.folder / "tokens").tokenizer
    log = RankLog(folder / "log", ranks.rank_info, attempt=1)
    watch = Watchdog(ranks, folder, log.path)
    console = TakesTurns(turns, ranks, ENDLESS_STEPS, log.path)
    ctx = RunContext(config, Run(folder), ranks, Monitors(log, watch, console), RunEvents(None))
    checkpointer = AsyncCheckpointer(
        ctx.run, ranks, RetentionPolicy(1), metadata={}, tokenizer=tokenizer, log=ctx.console.info
    )
    inputs = RunInputs(tokenizer, contest.stream(), None, contest.shape, plan, "", "", None)
    detector = BadStepDetector(ranks, spike_sigmas=None, window_steps=1)
    built = BuiltModel(
        parallel_model, optimizer, objective, detector, ResumePoint(), dtype, compiled, ""
    )
    batches = DatasetBatches(ctx, inputs, built)
    flops = partial(training_flops_per_token, config, contest.shape)
    throughput = Throughput(parallel_model, batches, flops, None, ENDLESS_STEPS, {})
    observers = Observers(ObservedRun(ctx, inputs, built, batches, throughput), checkpointer)
    try:
        train(
            parallel_model,
            optimizer,
            build_schedule(config.schedule, ENDLESS_STEPS, OPTIMIZER.lr),
            objective,
            batches,
            detector,
            Checkpoints(checkpointer, config, parallel_model, optimizer, batches, detector),
            throughput,
            observers,
            start_step=0,
            steps=ENDLESS_STEPS,
            max_grad_norm=OPTIMIZER.max_grad_norm,
            max_bad_steps=config.faults.max_bad_steps,
            log_every_steps=LOG_EVERY_STEPS,
        )
    except Over:
        with open(folder / "metrics.jsonl", encoding="utf-8") as file:
            first_losses.append(json.loads(file.readline())["loss"])
        raise
    finally:
        ctx.watch.stop("done")
        observers.close()
        checkpointer.close()
        batches.close()


def transformers_model(contest: Contest) -> nn.Module:
    """transformers' model of the same family with the weights that lmforge begins with; experts are
    its grouped products.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    if contest.device == "cpu":
        torch.set_num_threads(contest.threads)
    config = AutoConfig.for_model(**{**to_config_json(contest.shape), "use_cache": False})
    grouped = {"experts_implementation": "grouped_mm"} if contest.shape.num_experts else {}
    with torch.device(contest.device):
        model = AutoModelForCausalLM.from_config(config, **grouped)
    for parameter in model.parameters():  # not its buffers, which include the rotary frequencies
        parameter.data = parameter.data.to(DTYPES[contest.master_dtype])
    # On the CPU, since the device may have memory for one copy only; beside adapters, which need no
    # gradients of it, for two.
    first = build_model(contest.shape, contest.device if contest.lora else "cpu").to(
        DTYPES[contest.master_dtype]
    )
    model.load_state_dict(
        init_weights(first, 0).state_dict(), strict=not contest.shape.tie_word_embeddings
    )
    if contest.lora:
        del first
        model = adapted_by_peft(model, contest.lora, contest)
    if contest.activation_checkpointing != "none":
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model.train()


def first_adapters(contest: Contest) -> dict[str, nn.Parameter]:
    """The adapters that lmforge begins with, by name, on the CPU."""
    model, config = build_model(contest.shape, "meta"), get_lora_config(recipe_of(contest))
    assert config is not None
    add_lora(model, config)
    for name, each in adapter_parameters(model).items():
        owner, _, last = name.rpartition(".")
        setattr(model.get_submodule(owner), last, nn.Parameter(torch.empty(each.shape)))
    init_adapters(model, 0)
    return adapter_parameters(model)


def adapted_by_peft(model: nn.Module, lora: LoraOptions, contest: Contest) -> nn.Module:
    """A model of transformers with PEFT's adapters, which begin as lmforge's, its linear layers
    quantized by bitsandbytes. Memory is counted from here on.
    """
    import bitsandbytes
    import peft

    for name, layer in list(model.named_modules()):
        if isinstance(layer, nn.Linear) and name != "lm_head":
            kind: dict[str, Any] = {
                "quant_type": lora.base_dtype,
                "compress_statistics": lora.double_quant,
            }
            ours = bitsandbytes.nn.Linear4bit(
                layer.in_features,
                layer.out_features,
                bias=False,
                compute_dtype=DTYPES[contest.dtype],
                device="meta",
                **kind,
            )
            matrix = bitsandbytes.nn.Params4bit(
                layer.weight.detach().cpu(), requires_grad=False, module=ours, **kind
            )
            ours.weight = matrix
            model.set_submodule(name, ours.to(contest.device))
    targets = {
        "target_modules": lora.target_modules[0]
        if len(lora.target_modules) == 1
        else [*lora.target_modules]
    }
    adapters: Any = {"r": lora.rank, "lora_alpha": lora.alpha, **targets}
    adapted: Any = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", **adapters))
    with torch.no_grad():
        for name, values in first_adapters(contest).items():
            adapted.get_parameter(
                "base_model.model." + name.replace(".weight", ".default.weight")
            ).copy_(values)
    if contest.device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    return adapted


def rows_at_hand(contest: Contest) -> tuple[Tensor, Tensor]:
    """Tokens and targets of an epoch, int64 [rows, length], in lmforge's order and in memory: no
    contender waits for them.
    """
    stream = contest.stream()
    rows = stream.sequences(0, stream.sequences_per_epoch // contest.rows * contest.rows)
    return torch.stack([torch.from_numpy(row.tokens) for row in rows]), torch.stack(
        [torch.from_numpy(row.labels) for row in rows]
    )


def run_trainer(contest: Contest, turns: Turns, first_losses: list[float]) -> None:
    """transformers' Trainer with its defaults, except for the shared settings."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class AlsoTakesTurns(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            turns.step_done()

    arguments = TrainingArguments(
        output_dir=tempfile.mkdtemp(dir=contest.folder),
        use_cpu=contest.device == "cpu",
        bf16=contest.dtype == "bf16",
        max_steps=ENDLESS_STEPS,
        per_device_train_batch_size=contest.rows // contest.accumulation,
        gradient_accumulation_steps=contest.accumulation,
        train_sampling_strategy="sequential",
        optim="adamw_torch_fused",
        learning_rate=LR,
        lr_scheduler_type="constant",
        adam_beta1=OPTIMIZER.beta1,
        adam_beta2=OPTIMIZER.beta2,
        adam_epsilon=OPTIMIZER.eps,
        weight_decay=OPTIMIZER.weight_decay,
        max_grad_norm=OPTIMIZER.max_grad_norm,
        logging_steps=LOG_EVERY_STEPS,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    model = transformers_model(contest)
    dataset: Any = [{"input_ids": row, "labels": row} for row in rows_at_hand(contest)[0]]
    trainer = Trainer(
        model=model, args=arguments, train_dataset=dataset, callbacks=[AlsoTakesTurns()]
    )
    try:
        trainer.train()
    except Over:
        first_losses.append(trainer.state.log_history[0]["loss"])
        raise


def run_plain(contest: Contest, turns: Turns, first_losses: list[float], *, compiled: bool) -> None:
    """The usual hand-written loop; compiled, model and loss are one graph."""
    model = transformers_model(contest)
    tokens, targets = (rows.to(contest.device) for rows in rows_at_hand(contest))
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=LR,
        betas=(OPTIMIZER.beta1, OPTIMIZER.beta2),
        eps=OPTIMIZER.eps,
        weight_decay=OPTIMIZER.weight_decay,
        fused=True,
    )

    def score(tokens: Tensor, targets: Tensor) -> Tensor:
        logits = model(input_ids=tokens).logits
        return nn.functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten())

    scored: Callable[[Tensor, Tensor], Tensor] = (
        torch.compile(score, dynamic=False) if compiled else score
    )
    losses: list[Tensor] = []
    micro = contest.rows // contest.accumulation
    for step in range(ENDLESS_STEPS):
        start = step * contest.rows % len(tokens)
        for first in range(start, start + contest.rows, micro):
            with contest.autocast():
                loss = (
                    scored(tokens[first : first + micro], targets[first : first + micro])
                    / contest.accumulation
                )
            loss.backward()
            if step < LOG_EVERY_STEPS:
                losses.append(loss.detach())
        nn.utils.clip_grad_norm_(model.parameters(), OPTIMIZER.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        if step + 1 == LOG_EVERY_STEPS:
            first_losses.append(torch.stack(losses).sum().item() / LOG_EVERY_STEPS)
        turns.step_done()


def run_peak(contest: Contest, turns: Turns, first_losses: list[float]) -> None:
    """Large matrix products: the fastest one is taken as this machine's peak."""
    torch.set_num_threads(contest.threads)
    left, right = (
        torch.randn(contest.peak_size, contest.peak_size).to(DTYPES[contest.dtype])
        for _ in range(2)
    )
    first_losses.append(0.0)
    while True:
        torch.mm(left, right)
        turns.step_done()


LMFORGE, TRAINER, PLAIN, PLAIN_COMPILED = (
    "lmforge",
    "Trainer",
    "plain loop",
    "plain loop, compiled whole",
)
LMFORGE_DENSE = "lmforge, dense"  # with a contest of its own
LMFORGE_UNCOMPILED, LMFORGE_FLOAT8, PEAK = "lmforge, uncompiled", "lmforge, float8", "peak"
LMFORGE_OPERATORS = "lmforge, NF4 without bitsandbytes"
RUNS: dict[str, Callable[[Contest, Turns, list[float]], None]] = {
    LMFORGE: partial(run_lmforge, compiled=True),
    LMFORGE_DENSE: partial(run_lmforge, compiled=True),
    LMFORGE_FLOAT8: partial(run_lmforge, compiled=True, float8=True),
    LMFORGE_OPERATORS: partial(run_lmforge, compiled=True, bitsandbytes=False),
    LMFORGE_UNCOMPILED: partial(run_lmforge, compiled=False),
    TRAINER: run_trainer,
    PLAIN: partial(run_plain, compiled=False),
    PLAIN_COMPILED: partial(run_plain, compiled=True),
    PEAK: run_peak,
}


def contend(name: str, contest: Contest, pipe: Connection, log: Path) -> None:
    """Entry of a contender's process: turns until the contest is over, then the mean loss of the
    first steps.
    """
    with open(log, "w", encoding="utf-8") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    first_losses: list[float] = []
    try:
        RUNS[name](contest, Turns(pipe, contest), first_losses)
    except Over:
        pipe.send(first_losses[0])
    except (EOFError, BrokenPipeError):
        pass  # the contest was cancelled
