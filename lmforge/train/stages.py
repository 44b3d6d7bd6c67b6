"""The stages of a model's life: each builds the parts and calls the one loop."""

import re
import shlex
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from lmforge import checkpoint, report
from lmforge.checkpoint import Keep, Saver
from lmforge.cluster import ranks as cluster
from lmforge.cluster.ranks import Ranks
from lmforge.config import Config, StageConfig
from lmforge.config_post import AlignConfig, SftConfig
from lmforge.data.batch import Batch
from lmforge.data.loader import Loader
from lmforge.data.sealing import NO_ROOM
from lmforge.errors import Mistake, PeerLost, RunFailed
from lmforge.infer.engine import generate
from lmforge.infer.evaluate import evaluate, shared_out
from lmforge.infer.sampling import Sampling
from lmforge.model.attention import backend_name
from lmforge.model.flops import CONVENTION
from lmforge.objectives.language import NextToken, score_text
from lmforge.objectives.objective import Objective
from lmforge.parallel.engine import Spread
from lmforge.parallel.fits import choose_engine
from lmforge.parallel.mesh import data_place, sharding_of
from lmforge.parallel.precision import choose_compile, choose_dtype
from lmforge.runs import Run, is_local
from lmforge.train.alignment import feed_of, objective_of
from lmforge.train.building import checkpoint_bytes, noise_seed, peak_of, peak_words, prepare_model
from lmforge.train.determinism import be_deterministic, refusal
from lmforge.train.disk import DiskWatch
from lmforge.train.entering import Entry, changes, check_continues, enter, find_entry, finished, kept, load_entry
from lmforge.train.examples import open_examples, prepare_examples
from lmforge.train.feed import Built, Feed
from lmforge.train.guard import Guard
from lmforge.train.loop import Parts, train
from lmforge.train.material import (
    Material,
    check_tracker,
    counted,
    fetch_source,
    open_material,
    step_flops_per_token,
)
from lmforge.train.metrics import Meter, MetricsFile, Teller, clock
from lmforge.train.optim import learning_rate, state_by_name
from lmforge.train.origin import as_begun, settled
from lmforge.train.policy import check_prompts, open_prompts, policy_of, rollouts_of
from lmforge.train.recovery import Recovery
from lmforge.train.room import Need, within_memory
from lmforge.train.saves import Saves
from lmforge.train.tasks import asker, open_tasks
from lmforge.train.watch import Watch

# What gloo and NCCL say when the other end is gone.
LOST_PEER = re.compile(
    r"[Cc]onnection (closed|reset|refused)|[Bb]roken pipe|remote process exited|NCCL communicator was aborted"
)


@dataclass(frozen=True)
class Stage:
    """What one stage of a model's life does its own way.

    fetch      has what the recipe names on this host; called once a host
    open       data, tokenizer, shape and plan, for so many ranks
    objective  what a batch is worth
    feed       where batches come from once the model is there; every rank calls it
    """

    fetch: Callable[[Any], None]
    open: Callable[[Any, int], Material]
    objective: Callable[[Any], Objective]
    feed: Callable[[Built, Any], Feed] = lambda built, config: Feed(built.loader)


def pretrain(config: Config) -> int:
    """Train a model on token shards: from random or given weights, or on from this run's newest checkpoint.

    Every rank calls it. Returns the exit status: 0, or 128 + signal where the run was interrupted and saved. Raises
    Mistake before anything of the run is touched, and RunFailed after that.
    """
    return run_stage(config, Stage(fetch_source, open_material, lambda config: NextToken()))


def sft(config: SftConfig) -> int:
    """Fine-tune a model on conversations; as `pretrain` in all else."""
    return run_stage(config, Stage(prepare_examples, open_examples, lambda config: NextToken()))


def align(config: AlignConfig) -> int:
    """Align a model with what people prefer, or what a function rewards; as `pretrain` in all else."""
    if config.align.method == "grpo":
        return run_stage(config, Stage(check_prompts, open_prompts, policy_of, rollouts_of))
    return run_stage(config, Stage(prepare_examples, open_examples, objective_of, feed_of))


def run_stage(config: StageConfig, stage: Stage) -> int:
    """Carry out a stage: enter the run, open what it is made from, build, train. See `pretrain`."""
    be_deterministic(config.train.deterministic)
    ranks = cluster.start(config.train.device, config.train.threads)
    run = Run.of(config)
    try:
        goes_on = ranks.decide(partial(enter, run, config))
        with ranks.agreeing():
            check_tracker(config)
            choose_engine(config.parallel, ranks.count, ranks.device.type)
            sharding_of(config.parallel, ranks.count, ranks.place.local_ranks)
        config = ranks.decide(partial(settled, config))
        ranks.once_a_host(partial(stage.fetch, config))
        with ranks.agreeing():
            material = stage.open(config, ranks.count)
            config = config.of_rows(material.uses * material.train.rows_per_epoch, material.plan.rows)
        material = replace(material, tasks=ranks.decide(partial(open_tasks, config, material)))
        entry = ranks.decide(partial(find_entry, run, config.train.steps)) if goes_on else Entry(None, None, [])
        config, noted = as_begun(config, entry.manifest)
        entry = replace(entry, lines=[*entry.lines, *noted])
        with ranks.agreeing():
            check_continues(entry, config, material)
        attempt = ranks.decide(partial(run.begin, config))
        log = run.log(attempt, ranks.place.rank)
        if not ranks.first:
            sys.stdout = sys.stderr = open(log, "a", encoding="utf-8", buffering=1)  # noqa: SIM115 - until the process ends
        watch = Watch(
            ranks,
            run.health,
            log,
            stall_seconds=config.watch.stall_seconds,
            give_up_seconds=config.watch.give_up_seconds,
            disk=DiskWatch(run.checkpoints, partial(next_bytes, run)) if is_local(run.checkpoints) else None,
        )
        teller = Teller(ranks, config.train.steps, log)
        phase = "failed"
        try:
            number_bytes = choose_dtype(config.train.dtype, ranks.device)[0].itemsize
            need = Need(config, material.shape, material.plan, number_bytes, ranks.device.type == "cuda")
            with within_memory(need, ranks, watch.where):
                status = _train(config, stage, run, entry, material, ranks, watch, teller)
            phase = "interrupted" if status else "done"
            return status
        except RunFailed as failed:
            raise type(failed)(f"{failed}; {kept(run)}; log: {log}") from failed
        finally:
            watch.stop(phase)
            teller.close()
    except Exception as problem:
        # Peers that lose their groups fail too: whoever knows the cause asks for the word while it still has them.
        cluster.speaks_for_all()
        if isinstance(problem, RuntimeError) and (found := LOST_PEER.search(str(problem))):
            raise PeerLost(f"{run.path}: another rank was lost ({found[0].lower()}); {kept(run)}") from problem
        if nondeterministic := refusal(problem):
            raise RunFailed(f"{run.path}: {nondeterministic}; {kept(run)}") from problem
        if isinstance(problem, OSError) and problem.errno in NO_ROOM:
            raise RunFailed(f"{run.path}: no room to write ({problem.strerror}); {kept(run)}") from problem
        raise
    finally:
        cluster.stop()
        run.unlock()


def next_bytes(run: Run) -> int:
    """What the next checkpoint is going to take: as much as the newest; 0 where there is none yet."""
    steps = run.steps()
    if not steps:
        return 0
    try:
        return sum(described["bytes"] for described in checkpoint.read_manifest(run.checkpoint(steps[-1])).files.values())
    except (Mistake, OSError):
        return 0  # it is being written, or deleted


def _train(
    config: StageConfig,
    stage: Stage,
    run: Run,
    entry: Entry,
    material: Material,
    ranks: Ranks,
    watch: Watch,
    teller: Teller,
) -> int:
    if entry.folder is not None and entry.manifest is not None and entry.manifest.step >= config.train.steps:
        entry = ranks.decide(partial(finished, run, entry, config.train.steps))
    for line in [*entry.lines, *changes(entry, config)]:
        teller.say(line)
    start = entry.manifest.step if entry.manifest else 0
    if start >= config.train.steps:
        teller.say(f"{run.path}: trained to step {start} already; give a larger --train.steps to go on")
        return 0
    watch.mark("building", start)
    dtype, dtype_why = choose_dtype(config.train.dtype, ranks.device)
    with ranks.agreeing():
        compiled, compile_why = choose_compile(config.train.compile, ranks.device, config.train.steps - start)
    objective = stage.objective(config)
    trained, optimizer = prepare_model(
        config,
        material.shape,
        objective,
        ranks,
        dtype,
        compiled,
        fresh=entry.folder is None,
        origin=material.origin,
    )
    guard = Guard(ranks, spike_sigmas=config.faults.spike_sigmas, window_steps=config.faults.spike_window_steps)
    if entry.folder is not None:
        watch.mark("loading", start)
        entry = load_entry(run, entry, config.train.steps, trained, optimizer, teller.say)
        assert entry.manifest is not None
        start = entry.manifest.step
        guard.restore(entry.manifest.guard, entry.manifest.skipped_batches)
    peak = peak_of(ranks.device, dtype)
    _introduce(config, material, trained, teller, fresh=entry.folder is None)
    attention = "transformers', dense mask" if material.shape.family == "transformers" else backend_name(ranks.device)
    teller.say(
        f"compute    {_name(dtype)} ({dtype_why}){_float8(config)}, masters {config.train.master_dtype},"
        f" attention {attention}, compile {_on(compiled)} ({compile_why})"
    )
    if config.train.deterministic:
        teller.say("bits       the same from run to run on these ranks, this hardware and these versions (train.deterministic)")
    teller.say(f"MFU is of  {peak_words(peak, ranks.device)}: {CONVENTION}")

    place, places = data_place(config.parallel, ranks.place.rank, ranks.count)
    loader = Loader(
        material.train,
        global_batch_rows=material.plan.rows,
        micro_batch_rows=material.plan.micro_batch_rows,
        rank=place,
        ranks=places,
        device=ranks.device,
        noise_seed=noise_seed(config),
    )
    metrics = MetricsFile(run.metrics, run.path / "tensorboard" if config.log.tensorboard else None) if ranks.first else None
    saver = _saver(run, config, material, trained, dtype, teller)
    with ranks.agreeing():
        if ranks.first:
            saver.check_room()

    def about_step(step: int) -> dict[str, Any]:
        samples = (step + guard.left_out) * material.plan.rows
        return {"samples": samples, "rng": checkpoint.rng_state(), "guard": guard.state()}

    def state(kinds: tuple[str, ...]) -> dict[str, Any]:
        whole = trained.state(optimizer, state_by_name)
        if feed.state is not None and "optimizer" in kinds:
            return whole | {"rollouts": feed.state()}
        return {kind: whole[kind] for kind in kinds}

    built = Built(run, material, objective, trained, loader, watch, dtype, start, entry.folder, teller.say, teller.complain)
    ask = asker(config, material, trained, watch, teller)
    feed = Feed(loader)
    began = time.perf_counter()
    try:
        feed = stage.feed(built, config)
        measure = _validator(config, material, trained, watch, objective, feed)
        done, stopped = train(
            Parts(
                spread=trained,
                weight=objective.weight,
                optimizer=optimizer,
                learning_rate=lambda step: learning_rate(step, config.train.steps, config.schedule, config.optimizer.lr),
                batches=feed.batches,
                plan=material.plan,
                ranks=ranks,
                watch=watch,
                teller=teller,
                metrics=metrics,
                steps=config.train.steps,
                clip_norm=config.optimizer.clip_norm,
                log_every=config.log.every_steps,
                validate_every=config.validation.every_steps,
                validate_at_start=config.validation.at_start,
                sample_every=config.sample.every_steps,
                guard=guard,
                bad_steps=config.faults.bad_steps,
                recovery=Recovery(run, config, material, trained, optimizer, guard, saver, teller.complain),
                saves=Saves(
                    saver,
                    config.checkpoint,
                    every_steps=config.checkpoint_every_steps,
                    steps=config.train.steps,
                    first=ranks.first,
                    state=state,
                    about=about_step,
                ),
                validate=lambda step: measure(step) | ask(step),
                sample=_sampler(config, material, trained, teller),
                flops_per_token=step_flops_per_token(config, material.shape),
                peak_flops=peak,
            ),
            start,
        )
    except Mistake as problem:  # such as a shard that went bad: the run is on its way, so it has failed
        raise RunFailed(str(problem)) from problem
    finally:
        saver.leave()
        feed.close()
        loader.close()
        if metrics is not None:
            metrics.close()
    if stopped:
        teller.say(
            f"stopped by {signal.Signals(stopped).name} after step {done}, which is saved;"
            f" to continue: lmforge {config.of_stage} {shlex.quote(str(run.recipe))}"
        )
        return 128 + stopped
    teller.say(f"trained {done - start} steps in {clock(time.perf_counter() - began)}: {run.checkpoint(done)}")
    if ranks.first and any(record.get("loss") is not None for record in run.read_metrics()):
        teller.say(f"loss curve: {report.loss_curve(run)}")
    return 0


def _saver(run: Run, config: StageConfig, material: Material, trained: Spread, dtype: torch.dtype, teller: Teller) -> Saver:
    chosen = config.checkpoint
    return Saver(
        run,
        trained.ranks,
        Keep(chosen.keep_last, chosen.keep_best, chosen.best_metric, chosen.best_is == "highest"),
        about={
            "plan_hash": material.train.plan_hash,
            "rows": material.plan.rows,
            "model": material.shape.to_hugging_face(),
            "recipe": config.model_dump(mode="json"),
            "tokenizer_hash": material.tokenizer.hash,
            "world": {"ranks": trained.ranks.count, "engine": trained.name, "dtype": str(dtype), "data": material.data},
        },
        tokenizer=material.tokenizer,
        say=teller.complain,
        asynchronous=chosen.asynchronous,
        expected_bytes=checkpoint_bytes(config, material.shape),
    )


def _introduce(config: StageConfig, material: Material, trained: Spread, teller: Teller, fresh: bool) -> None:
    """Say what is about to be trained, on what, and by whom."""
    ranks, shape = trained.ranks, material.shape
    total, learnt = counted(config, shape)
    on_gpu = ranks.device.type == "cuda"
    where = torch.cuda.get_device_name(ranks.device) if on_gpu else f"cpu, {torch.get_num_threads()} threads a rank"
    teller.say(
        f"model      {total:,} parameters ({shape.model_type}){'' if learnt == total else f', {learnt:,} of them trained'},"
        f" {step_flops_per_token(config, shape):.3g} FLOPs a token"
    )
    if fresh:
        teller.say(f"weights    {f'of {config.model.source}' if material.origin else f'random, seed {config.train.seed}'}")
    teller.say(f"data       {material.about_data}")
    teller.say(f"batch      {material.plan}")
    teller.say(f"engine     {trained.name}, {ranks.count} {'rank' if ranks.count == 1 else 'ranks'} on {where}")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _float8(config: StageConfig) -> str:
    return ", products of the blocks in float8 (MFU is of the bf16 peak all the same)" if config.train.float8 else ""


def _on(switch: bool) -> str:
    return "on" if switch else "off"


def _validator(
    config: StageConfig, material: Material, trained: Spread, watch: Watch, objective: Objective, feed: Feed
) -> Callable[[int], dict[str, float]]:
    if feed.validate is not None:
        return feed.validate
    if (held_out := material.held_out) is None:
        return lambda step: {}
    token_bytes = torch.from_numpy(material.tokenizer.token_bytes()).to(trained.ranks.device)
    place = data_place(config.parallel, trained.ranks.place.rank, trained.ranks.count)

    def validate(step: int) -> dict[str, float]:
        def score(batch: Batch) -> torch.Tensor:
            watch.mark("evaluate", step)  # each batch is progress, however many there are
            with torch.no_grad():
                return trained.score(batch, instead=partial(score_text, token_bytes=token_bytes))

        measured = evaluate(
            score,
            held_out,
            trained.ranks,
            rows=config.validation.rows,
            batch_rows=material.plan.micro_batch_rows,
            place=place,
        )
        return {"val/loss": measured["loss"], "val/bits_per_byte": measured["bits_per_byte"]}

    def validate_objective(step: int) -> dict[str, float]:
        meter = Meter(trained.ranks)
        for batch in shared_out(held_out, place, rows=config.validation.rows, batch_rows=material.plan.micro_batch_rows):
            watch.mark("evaluate", step)
            with torch.no_grad():
                _, metrics = trained.score(feed.add(batch.to(trained.ranks.device)), instead=objective.loss)
            meter.add(metrics)
        return {f"val/{name}": value for name, value in meter.read().items()}

    return validate if isinstance(objective, NextToken) else validate_objective


def _sampler(config: StageConfig, material: Material, trained: Spread, teller: Teller) -> Any:
    def sample(step: int) -> None:
        # Every rank writes the same text: sharded weights are gathered together, and nobody waits for one that writes.
        with trained.whole() as model, torch.compiler.set_stance("force_eager"), trained.autocast():
            completions = generate(
                model,
                material.tokenizer,
                config.sample.prompts,
                max_tokens=config.sample.max_tokens,
                sampling=Sampling(config.sample.temperature),
                seed=config.train.seed + step,
            )
        for prompt, completion in zip(config.sample.prompts, completions, strict=True):
            teller.say(f"  sample: {(prompt + completion.text)!r}")

    return sample
