"""The stages of a model's life: each builds the parts and calls the one loop."""

import re
import shlex
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from lmforge import checkpoint, report
from lmforge.checkpoint import Keep, Manifest, Saver, Unsound
from lmforge.checkpoint.blocks import is_local
from lmforge.checkpoint.retention import remove
from lmforge.cluster import ranks as cluster
from lmforge.cluster.ranks import Ranks
from lmforge.config import BatchPlan, Config
from lmforge.data.batch import Batch
from lmforge.data.hub import local_folder
from lmforge.data.loader import Loader
from lmforge.data.sealing import NO_ROOM
from lmforge.data.shards import TokenFolder
from lmforge.data.stream import Stream
from lmforge.data.tokenizer import Tokenizer
from lmforge.errors import Mistake, PeerLost, RunFailed
from lmforge.infer.engine import generate
from lmforge.infer.evaluate import evaluate
from lmforge.infer.sampling import Sampling
from lmforge.model import build
from lmforge.model.attention import backend_name
from lmforge.model.flops import CONVENTION, flops_per_token, parameters, peak_flops
from lmforge.model.initial import initialise
from lmforge.model.layers import LanguageModel
from lmforge.model.shapes import ModelConfig, shape_of
from lmforge.model.weights import load_folder
from lmforge.objectives.language import NextToken, score_text
from lmforge.parallel.apply import Strategy, spread
from lmforge.parallel.engine import Spread
from lmforge.parallel.fits import check_fits, choose_engine
from lmforge.parallel.mesh import data_place, plan_batches, sharding_of
from lmforge.parallel.precision import choose_compile, choose_dtype
from lmforge.runs import Run
from lmforge.train.determinism import be_deterministic, refusal
from lmforge.train.disk import DiskWatch
from lmforge.train.guard import Bad, Guard, write_bad_step
from lmforge.train.loop import Parts, train
from lmforge.train.metrics import MetricsFile, Teller, clock, measured_peak_flops
from lmforge.train.optim import build_optimizer, choose_groups, learning_rate, state_by_name
from lmforge.train.room import Need, within_memory
from lmforge.train.saves import Saves
from lmforge.train.watch import Watch

# What gloo and NCCL say when the other end is gone.
LOST_PEER = re.compile(
    r"[Cc]onnection (closed|reset|refused)|[Bb]roken pipe|remote process exited|NCCL communicator was aborted"
)
NONE_USABLE = "{run}: none of its checkpoints can be used ({reason}); restore one, or begin again with --run.overwrite"
MASTERS = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Entry:
    """How a run is entered: the checkpoint it goes on from, if any, and what to tell of that."""

    folder: Path | None
    manifest: Manifest | None
    lines: list[str]


@dataclass(frozen=True)
class Material:
    """What a run is made from, all of it opened and found to fit together."""

    tokens: TokenFolder
    train: Stream
    held_out: Stream
    shape: ModelConfig
    plan: BatchPlan


def pretrain(config: Config) -> int:
    """Train a model on token shards: from random or given weights, or on from this run's newest checkpoint.

    Every rank calls it. Returns the exit status: 0, or 128 + signal where the run was interrupted and saved. Raises
    Mistake before anything of the run is touched, and RunFailed after that.
    """
    be_deterministic(config.train.deterministic)
    ranks = cluster.start(config.train.device, config.train.threads)
    run = Run.of(config)
    try:
        entry = ranks.decide(partial(enter, run, config))
        with ranks.agreeing():
            check_tracker(config)
            choose_engine(config.parallel, ranks.count, ranks.device.type)
            sharding_of(config.parallel, ranks.count, ranks.place.local_ranks)
        ranks.once_a_host(partial(fetch_source, config))
        with ranks.agreeing():
            material = open_material(config, ranks.count)
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
                status = _pretrain(config, run, entry, material, ranks, watch, teller)
            phase = "interrupted" if status else "done"
            return status
        except RunFailed as failed:
            raise type(failed)(f"{failed}; {_kept(run)}; log: {log}") from failed
        finally:
            watch.stop(phase)
            teller.close()
    except Exception as problem:
        # Peers that lose their groups fail too: whoever knows the cause asks for the word while it still has them.
        cluster.speaks_for_all()
        if isinstance(problem, RuntimeError) and (found := LOST_PEER.search(str(problem))):
            raise PeerLost(f"{run.path}: another rank was lost ({found[0].lower()}); {_kept(run)}") from problem
        if nondeterministic := refusal(problem):
            raise RunFailed(f"{run.path}: {nondeterministic}; {_kept(run)}") from problem
        if isinstance(problem, OSError) and problem.errno in NO_ROOM:
            raise RunFailed(f"{run.path}: no room to write ({problem.strerror}); {_kept(run)}") from problem
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


def _kept(run: Run) -> str:
    steps = run.steps()
    return f"last checkpoint: {run.checkpoint(steps[-1])}" if steps else "no checkpoint had been saved"


def enter(run: Run, config: Config) -> Entry:
    """Decide what becomes of a run directory: begun, continued or refused (Mistake). Changes nothing but the lock."""
    if run.path.exists() and not run.path.is_dir():
        raise Mistake(f"{run.path}: a file, where the run's directory would be; choose another --run.name")
    if run.path.exists() and not run.exists() and any(entry.name != ".lock" for entry in run.path.iterdir()):
        raise Mistake(f"{run.path}: not empty and not a run of lmforge; choose another --run.name")
    if not run.exists() and config.run.resume == "required":
        raise Mistake(f"{run.path}: there is no such run to resume")
    if run.exists() and config.run.resume == "never" and not config.run.overwrite:
        raise Mistake(
            f"{run.path}: this run exists; continue it (leave out --resume never), delete it with --run.overwrite,"
            " or give this one another --run.name"
        )
    run.lock()
    if config.run.overwrite:
        return Entry(None, None, [])
    if not run.exists() and not run.kept_elsewhere:
        return Entry(None, None, [])
    return find_entry(run, config.train.steps)


def find_entry(run: Run, steps: int, before: int | None = None) -> Entry:
    """The newest checkpoint (of a step below `before`) that looks whole and that a run of `steps` can go on from.

    Raises Mistake where there are some and none of them can be used.
    """
    passed_over: list[str] = []
    for folder, manifest in checkpoint.candidates(run, passed_over, before):
        if "optimizer" in manifest.holds or manifest.step >= steps:
            return Entry(folder, manifest, [*passed_over, f"continuing {run.path} from step {manifest.step}"])
        passed_over.append(f"{folder}: holds the model alone; skipped")
    if run.steps() and passed_over:
        reason = passed_over[0].removesuffix("; skipped")
        raise Mistake(NONE_USABLE.format(run=run.path, reason=reason))
    return Entry(None, None, [*passed_over, f"{run.path}: has no checkpoint yet; it begins at step 0"] if run.exists() else [])


def load_entry(
    run: Run, entry: Entry, steps: int, trained: Spread, optimizer: torch.optim.Optimizer, say: Callable[[str], None]
) -> Entry:
    """Load the checkpoint of `entry`, or where it turns out to be spoiled the newest one before it that is not.

    Every rank calls it. Returns the entry that was loaded. Raises Mistake where there is none.
    """
    ranks = trained.ranks
    while True:
        assert entry.folder is not None
        assert entry.manifest is not None
        state = trained.state(optimizer, state_by_name)
        try:
            with ranks.agreeing():
                checkpoint.load(entry.folder, state)
            break
        except Unsound as reason:
            spoiled = f"{entry.folder}: {reason}"
            say(f"{spoiled}; skipped")
            entry = ranks.decide(partial(find_entry, run, steps, entry.manifest.step))
            if entry.manifest is None:
                raise Mistake(NONE_USABLE.format(run=run.path, reason=spoiled)) from None
            for line in entry.lines:
                say(line)
    trained.loaded(optimizer, state)
    # Nothing here draws from torch's generators: weights, rows, dropout and samples are functions of seeds and numbers, and
    # no rank has a random state of its own. What is kept is for what else may run in the process.
    checkpoint.set_rng_state(entry.manifest.rng)
    return entry


def check_tracker(config: Config) -> None:
    """Raise Mistake where metrics are to go to a tracker that is not installed."""
    if config.log.tensorboard and find_spec("tensorboard") is None:
        raise Mistake("log.tensorboard: it is not installed; pip install 'lmforge[tensorboard]', or leave the option out")


def open_material(config: Config, ranks: int) -> Material:
    """Open the data, derive the batch plan and the shape. Raises Mistake where they do not fit."""
    plan = plan_batches(config, ranks)
    tokens = TokenFolder.open(config.data.folder)
    tokenizer = tokens.tokenizer
    source = config.model.source and local_folder(config.model.source, "config.json")
    if source and (source / "tokenizer.json").exists() and Tokenizer.open(source).hash != tokenizer.hash:
        raise Mistake(
            f"{config.data.folder}: prepared with another tokenizer than {source} has; prepare it with --tokenizer {source}"
        )
    shape = shape_of(config.model, tokenizer.vocab_size)
    if config.model.embedding_initializer_range is not None and shape.tie_word_embeddings:
        raise Mistake(
            "model.embedding_initializer_range: this head is tied to the embedding; untie it, or leave that option out"
        )
    limit = shape.longest_row_tokens
    if limit is not None and config.data.length > limit:
        raise Mistake(f"data.length = {config.data.length}: this model has positions for {limit} tokens; use at most that")
    if config.sample.every_steps is not None and limit is not None:
        longest = max(len(tokenizer.encode(prompt)) for prompt in config.sample.prompts) + config.sample.max_tokens
        if longest > limit:
            raise Mistake(f"sample.max_tokens: prompt and sample take {longest} tokens, this model has positions for {limit}")
    check_fits(config.parallel, shape, plan)
    check_weights(config)
    if config.optimizer.groups:
        names = dict(build(shape, seed=None, device="meta").named_parameters())
        choose_groups(names, config.optimizer.groups)  # refuses before anything is touched
    train = Stream(tokens, split="train", length=config.data.length, seed=config.train.seed)
    held_out = Stream(tokens, split="held_out", length=config.data.length, shuffle=False)
    return Material(tokens, train, held_out, shape, plan)


def check_continues(entry: Entry, config: Config, material: Material) -> None:
    """Raise Mistake where the checkpoint of `entry` is of another run than `config` describes."""
    manifest = entry.manifest
    if manifest is None:
        return
    ways = "use the recipe it was begun with, another --run.name, or --run.overwrite"
    if manifest.model_config != material.shape:
        theirs, ours = asdict(manifest.model_config), asdict(material.shape)
        for described in (theirs, ours):  # a wrapped model is all that its config.json says
            described |= described.pop("content", {})
        differing = [
            f"{name} {theirs.get(name)} there, {ours.get(name)} here"
            for name in ours | theirs
            if theirs.get(name) != ours.get(name)
        ] or [f"computed by {manifest.model_config.family} there, by {material.shape.family} here"]
        raise Mistake(f"{entry.folder}: a model of another shape ({'; '.join(differing[:3])}); {ways}")
    optimizer = manifest.recipe["optimizer"].get("name", "adamw")  # the only one there was, before it had a name
    if optimizer != config.optimizer.name:
        raise Mistake(f"{entry.folder}: saved with optimizer.name = {optimizer}, here it is {config.optimizer.name}; {ways}")
    if manifest.tokenizer_hash != material.tokens.tokenizer.hash:
        raise Mistake(f"{entry.folder}: trained with another tokenizer than {config.data.folder} was prepared with; {ways}")
    if manifest.rows != material.plan.rows:
        raise Mistake(f"{entry.folder}: its global batch has {manifest.rows} rows, this recipe's {material.plan.rows}; {ways}")
    if manifest.plan_hash != material.train.plan_hash:
        raise Mistake(f"{entry.folder}: trained on other data, or with another data.length or train.seed; {ways}")


def _pretrain(config: Config, run: Run, entry: Entry, material: Material, ranks: Ranks, watch: Watch, teller: Teller) -> int:
    if entry.folder is not None and entry.manifest is not None and entry.manifest.step >= config.train.steps:
        entry = ranks.decide(partial(_finished, run, entry, config.train.steps))
    for line in [*entry.lines, *_changes(entry, config)]:
        teller.say(line)
    start = entry.manifest.step if entry.manifest else 0
    if start >= config.train.steps:
        teller.say(f"{run.path}: trained to step {start} already; give a larger --train.steps to go on")
        return 0
    watch.mark("building", start)
    dtype, dtype_why = choose_dtype(config.train.dtype, ranks.device)
    with ranks.agreeing():
        compiled, compile_why = choose_compile(config.train.compile, ranks.device, config.train.steps - start)
    objective = NextToken()
    trained, optimizer = prepare_model(config, material.shape, objective, ranks, dtype, compiled, fresh=entry.folder is None)
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
    teller.say(f"MFU is of  {_peak_words(peak, ranks.device)}: {CONVENTION}")

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
    saver = Saver(
        run,
        ranks,
        Keep(
            config.checkpoint.keep_last,
            config.checkpoint.keep_best,
            config.checkpoint.best_metric,
            config.checkpoint.best_is == "highest",
        ),
        about={
            "plan_hash": material.train.plan_hash,
            "rows": material.plan.rows,
            "model": material.shape.to_hugging_face(),
            "recipe": config.model_dump(mode="json"),
            "tokenizer_hash": material.tokens.tokenizer.hash,
            "world": {"ranks": ranks.count, "engine": trained.name, "dtype": str(dtype)},
        },
        tokenizer=material.tokens.tokenizer,
        say=teller.complain,
        asynchronous=config.checkpoint.asynchronous,
        expected_bytes=_checkpoint_bytes(config, material.shape),
    )
    with ranks.agreeing():
        saver.check_room()

    def about_step(step: int) -> dict[str, Any]:
        samples = (step + guard.left_out) * material.plan.rows
        return {"samples": samples, "rng": checkpoint.rng_state(), "guard": guard.state()}

    def state(kinds: tuple[str, ...]) -> dict[str, Any]:
        whole = trained.state(optimizer, state_by_name)
        return {kind: whole[kind] for kind in kinds}

    def tell_bad(bad: Bad) -> None:
        if ranks.first:
            path = write_bad_step(
                run,
                bad,
                rows=material.plan.rows,
                length=config.data.length,
                seed=config.train.seed,
                data=str(config.data.folder),
                plan_hash=material.train.plan_hash,
            )
            teller.complain(f"step {bad.step}: {bad.reason}; not used, and its samples are named in {path}")

    def go_back(before: int) -> int:
        cause = f"step {before + guard.in_a_row}: {guard.in_a_row} bad steps in a row"
        if guard.rollbacks >= config.faults.rollbacks:
            times = f"after going back {guard.rollbacks} times" if guard.rollbacks else "and faults.rollbacks = 0"
            raise RunFailed(f"{cause}, {times}; a lower optimizer.lr or a longer warm-up may help")
        saver.wait()
        found = ranks.decide(partial(find_entry, run, config.train.steps, before + 1))
        if found.manifest is None:
            raise RunFailed(f"{cause}, and no checkpoint from before them to go back to")
        found = load_entry(run, found, config.train.steps, trained, optimizer, teller.complain)
        assert found.manifest is not None
        back = found.manifest.step
        with ranks.agreeing():
            for later in [step for step in run.steps() if step > back] if ranks.first else []:
                remove(run.checkpoint(later))
        guard.remember(found.manifest.guard)
        teller.complain(f"{cause}: back to step {back}, and on with the batches after them")
        return back

    began = time.perf_counter()
    try:
        done, stopped = train(
            Parts(
                spread=trained,
                weight=objective.weight,
                optimizer=optimizer,
                learning_rate=lambda step: learning_rate(step, config.train.steps, config.schedule, config.optimizer.lr),
                batches=loader,
                plan=material.plan,
                ranks=ranks,
                watch=watch,
                teller=teller,
                metrics=metrics,
                steps=config.train.steps,
                clip_norm=config.optimizer.clip_norm,
                log_every=config.log.every_steps,
                validate_every=config.validation.every_steps,
                sample_every=config.sample.every_steps,
                guard=guard,
                bad_steps=config.faults.bad_steps,
                tell_bad=tell_bad,
                go_back=go_back,
                saves=Saves(
                    saver,
                    config.checkpoint,
                    every_steps=config.checkpoint_every_steps,
                    steps=config.train.steps,
                    first=ranks.first,
                    state=state,
                    about=about_step,
                ),
                validate=_validator(config, material, trained, watch),
                sample=_sampler(config, material, trained, teller),
                flops_per_token=flops_per_token(material.shape, config.data.length),
                peak_flops=peak,
            ),
            start,
        )
    except Mistake as problem:  # such as a shard that went bad: the run is on its way, so it has failed
        raise RunFailed(str(problem)) from problem
    finally:
        saver.leave()
        loader.close()
        if metrics is not None:
            metrics.close()
    if stopped:
        teller.say(
            f"stopped by {signal.Signals(stopped).name} after step {done}, which is saved;"
            f" to continue: lmforge pretrain {shlex.quote(str(run.recipe))}"
        )
        return 128 + stopped
    teller.say(f"trained {done - start} steps in {clock(time.perf_counter() - began)}: {run.checkpoint(done)}")
    if ranks.first:
        teller.say(f"loss curve: {report.loss_curve(run)}")
    return 0


def _checkpoint_bytes(config: Config, shape: ModelConfig) -> int:
    """About what a checkpoint takes: the masters, and what the optimizer keeps of each."""
    of_state = config.optimizer.state_dtype if config.train.master_dtype == "fp32" else config.train.master_dtype
    states = 2 if config.optimizer.name == "adamw" else 1
    return parameters(shape).total * (MASTERS[config.train.master_dtype].itemsize + states * MASTERS[of_state].itemsize)


def _finished(run: Run, entry: Entry, steps: int) -> Entry:
    """The entry of a run that has nothing left to train, read whole; or one to train on from, where it is spoiled."""
    assert entry.folder is not None
    assert entry.manifest is not None
    try:
        checkpoint.verify(entry.folder)
        return entry
    except Unsound as reason:
        older = find_entry(run, steps, before=entry.manifest.step)
        return Entry(older.folder, older.manifest, [f"{entry.folder}: {reason}; skipped", *older.lines])


def _introduce(config: Config, material: Material, trained: Spread, teller: Teller, fresh: bool) -> None:
    """Say what is about to be trained, on what, and by whom."""
    ranks, length = trained.ranks, config.data.length
    on_gpu = ranks.device.type == "cuda"
    where = torch.cuda.get_device_name(ranks.device) if on_gpu else f"cpu, {torch.get_num_threads()} threads a rank"
    shape = material.shape
    teller.say(
        f"model      {parameters(shape).total:,} parameters ({shape.model_type}),"
        f" {flops_per_token(shape, length):.3g} FLOPs a token"
    )
    if fresh:
        teller.say(f"weights    {f'of {config.model.source}' if has_weights(config) else f'random, seed {config.train.seed}'}")
    tokens = material.tokens.split("train").tokens
    teller.say(f"data       {config.data.folder}: {tokens:,} tokens, {material.train.rows_per_epoch:,} rows an epoch")
    teller.say(f"batch      {material.plan}")
    teller.say(f"engine     {trained.name}, {ranks.count} {'rank' if ranks.count == 1 else 'ranks'} on {where}")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _float8(config: Config) -> str:
    return ", products of the blocks in float8 (MFU is of the bf16 peak all the same)" if config.train.float8 else ""


def _on(switch: bool) -> str:
    return "on" if switch else "off"


def _changes(entry: Entry, config: Config) -> list[str]:
    """A line that names the options that differ from the checkpoint's recipe."""
    if entry.manifest is None:
        return []
    then, now = entry.manifest.recipe, config.model_dump(mode="json")
    changed = [
        f"{section}.{name} {then.get(section, {}).get(name)} → {value}"
        for section, options in now.items()
        for name, value in options.items()
        if section not in ("run", "launch", "watch") and then.get(section, {}).get(name) != value
    ]
    return [f"changed since that checkpoint: {', '.join(changed)}"] if changed else []


def prepare_model(
    config: Config,
    shape: ModelConfig,
    objective: NextToken,
    ranks: Ranks,
    dtype: torch.dtype,
    compiled: bool,
    fresh: bool,
) -> tuple[Spread, torch.optim.Optimizer]:
    """The model of a recipe spread over the ranks, with first weights unless others are about to be loaded, and its optimizer.

    Raises Mistake, on every rank, where the recipe does not fit them.
    """
    model = build(shape, seed=None, device="meta").to(MASTERS[config.train.master_dtype])
    model.dropout = config.model.dropout
    trained = spread(
        model,
        objective.loss,
        ranks=ranks,
        dtype=dtype,
        compiled=compiled,
        float8=config.train.float8,
        strategy=Strategy(**config.parallel.model_dump()),
        fill=partial(_fill, config, ranks, fresh=fresh),
    )
    return trained, build_optimizer(trained.model, config.optimizer, trained.shapes())


def noise_seed(config: Config) -> int | None:
    """What the keys of tokens are made from; None where nothing is drawn from them."""
    return config.train.seed if config.model.dropout else None


def has_weights(config: Config) -> bool:
    """Whether the recipe begins from a folder's weights."""
    return config.model.source is not None and config.model.load_weights


def fetch_source(config: Config) -> None:
    """Have the model that a recipe begins from on this host. Raises Mistake where it can be neither found nor fetched."""
    if config.model.source is not None:
        local_folder(config.model.source, "weights" if has_weights(config) else "config.json")


def check_weights(config: Config) -> None:
    """Raise Mistake where the recipe begins from the weights of a folder that has none."""
    if not has_weights(config) or config.model.source is None:
        return
    source = local_folder(config.model.source)
    # Those in a format that is not opened count: it is refused with a better reason.
    if not any(any(source.glob(each)) for each in ("*.safetensors*", "pytorch_model*.bin*")):
        raise Mistake(f"{source}: no weights here; to begin with random ones use --model.load_weights false")


def _fill(config: Config, ranks: Ranks, model: LanguageModel, fresh: bool) -> None:
    """Give a model its first weights; with `fresh` false they are about to be loaded. Nothing is sent between ranks."""
    source = config.model.source
    if not fresh:
        return
    with ranks.agreeing():
        if has_weights(config):
            assert source is not None
            load_folder(local_folder(source), model)
        else:
            initialise(model, config.train.seed, config.model.embedding_initializer_range)


def peak_of(device: torch.device, dtype: torch.dtype) -> float | None:
    """FLOP/s of a rank at best: a GPU's from its data sheet (None if unknown), a CPU's timed now."""
    if device.type == "cuda":
        return peak_flops(torch.cuda.get_device_name(device), "bf16" if dtype == torch.bfloat16 else "fp32")
    return measured_peak_flops(dtype)


def _peak_words(peak: float | None, device: torch.device) -> str:
    if peak is None:
        return "an unknown peak (this GPU is not in the table), so it is left out"
    source = "a large matrix product, timed just now" if device.type == "cpu" else "data sheet"
    return f"{peak / 1e9:,.0f} GFLOP/s a rank ({source})"


def _validator(config: Config, material: Material, trained: Spread, watch: Watch) -> Any:
    token_bytes = torch.from_numpy(material.tokens.tokenizer.token_bytes()).to(trained.ranks.device)
    place = data_place(config.parallel, trained.ranks.place.rank, trained.ranks.count)

    def validate(step: int) -> dict[str, float]:
        def score(batch: Batch) -> torch.Tensor:
            watch.mark("evaluate", step)  # each batch is progress, however many there are
            with torch.no_grad():
                return trained.score(batch, instead=partial(score_text, token_bytes=token_bytes))

        measured = evaluate(
            score,
            material.held_out,
            trained.ranks,
            rows=config.validation.rows,
            batch_rows=material.plan.micro_batch_rows,
            place=place,
        )
        return {"val/loss": measured["loss"], "val/bits_per_byte": measured["bits_per_byte"]}

    return validate


def _sampler(config: Config, material: Material, trained: Spread, teller: Teller) -> Any:
    def sample(step: int) -> None:
        # Every rank writes the same text: sharded weights are gathered together, and nobody waits for one that writes.
        with trained.whole() as model, torch.compiler.set_stance("force_eager"), trained.autocast():
            completions = generate(
                model,
                material.tokens.tokenizer,
                config.sample.prompts,
                max_tokens=config.sample.max_tokens,
                sampling=Sampling(config.sample.temperature),
                seed=config.train.seed + step,
            )
        for prompt, completion in zip(config.sample.prompts, completions, strict=True):
            teller.say(f"  sample: {(prompt + completion.text)!r}")

    return sample
