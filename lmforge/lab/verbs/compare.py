"""`lmforge compare`: the first step at which runs differ by more than rounding.

It names the bound, and what else differs in the runs. The bounds are in bounds.py. The files of the
runs are read, which may have been resumed on other ranks in between.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from math import inf
from typing import TYPE_CHECKING, Any

from lmforge.core.errors import UserError, format_count, name_some, prefix_errors
from lmforge.core.files.atomic_files import without_non_finite
from lmforge.core.files.untrusted import cut
from lmforge.core.options.load import flat_options
from lmforge.core.records.manifests import Manifest, check_sizes, read_manifest
from lmforge.core.records.runs import Run
from lmforge.lab.bench.bounds import (
    BOUND_STEPS,
    EQUAL_BITS,
    Bound,
    bound_of_splits,
    relative_difference,
)
from lmforge.ops.options.running import CompareOptions
from lmforge.ops.report.run_data import read_environment, read_events

if TYPE_CHECKING:
    from torch import Tensor

# Options that change no step.
NO_STEP = (
    "run.",
    "launch.",
    "watch.",
    "log.",
    "checkpoint.",
    "sample.",
    "data.stage_to",
    "data.cache_",
)
OF_SPLIT = ("parallel.", "train.micro_batch_size", "train.compile", "train.threads")
# They matter where the learning rate that was used differs, or the plan of the data.
OF_LR = ("schedule.", "train.steps", "train.epochs")
OF_PLAN = ("data.folder", "data.files", "data.sources", "data.phases")
# Facts that decide the last bits: of environment.json, and of each start in events.jsonl.
VERSIONS = ("packages", "python", "processor", "cores", "git_commit")
HARDWARE = {"threads": int, "gpu": str}
METRICS = {"loss": "loss", "val/loss": "loss", "grad_norm": "gradient_norm"}


@dataclass(frozen=True)
class Row:
    """A relative difference at a step.

    It is of a metric, with both values, the first run's first; or of the named tensor.
    """

    step: int
    difference: float
    values: tuple[float | None, ...] = ()
    tensor: str = ""


@dataclass(frozen=True)
class Compared:
    """The differences of a metric, or of the weights, at `steps` steps that both runs have.

    largest: the largest of all. first: the first that is beyond `bound`.
    """

    bound: float
    steps: int
    largest: Row
    first: Row | None


@dataclass(frozen=True)
class Comparison:
    """A run and the first one.

    `bound` is None where they do not compute the same; `reason` says why, or why this bound.
    """

    run: str
    differs: dict[str, list[Any]]
    bound: Bound | None
    reason: str
    compared: dict[str, Compared]
    verdict: str
    same: bool


class ComparedRun:
    """The parts of a run that are compared.

    Raises UserError where it is no run, or its recipe or metrics cannot be read.
    """

    def __init__(self, run: Run) -> None:
        if not run.exists():
            raise UserError(f"{run.path}: not a run (it has no recipe.toml)")
        self.run = run
        self.config = run.load_config()
        self.options = dict(flat_options(self.config)) | {"stage": self.config.of_stage}
        self.environment = read_environment(run)
        starts = [event for event in read_events(run)[0] if event["kind"] == "start"]
        self.ranks = sorted(
            {event["ranks"] for event in starts if isinstance(event.get("ranks"), int)}
        )
        # Empty of a run that did not record it, and of a GPU where there is none.
        self.hardware: dict[str, list[Any]] = {
            name: sorted({event[name] for event in starts if isinstance(event.get(name), kind)})
            for name, kind in HARDWARE.items()
        }
        self.device = next(
            (event.get("device") for event in reversed(starts)), self.options["train.device"]
        )
        self.records = {record["step"]: record for record in run.read_metrics()}
        self.checkpoints: dict[int, Manifest] = {}
        for step in run.checkpoint_steps():
            with suppress(UserError):  # a damaged one
                self.checkpoints[step] = read_manifest(run.checkpoint_path(step))
        # Resuming may have changed the split.
        changed = any(
            f"{section}.{name}".startswith(OF_SPLIT)
            and value != self.options.get(f"{section}.{name}")
            for each in self.checkpoints.values()
            for section, values in each.recipe.items()
            for name, value in values.items()
        )
        mixed = any(len(each) > 1 for each in self.hardware.values())
        self.has_one_split = len(self.ranks) == 1 and not changed and not mixed
        self._windows = dict(self._log_windows([event["step"] or 0 for event in starts]))

    def _log_windows(self, starts: Sequence[int]) -> Iterator[tuple[int, int]]:
        """Each log step, and the step after which its mean begins.

        That is the log step before, or the step where the run was resumed.
        """
        kept: list[int] = []
        for start in starts:  # what is after a start is trained again
            kept = [*(each for each in kept if each < start), start]
        before = 0
        for step in sorted(step for step, record in self.records.items() if "loss" in record):
            yield step, max([before, *(start for start in kept if start < step)])
            before = step

    def values(self, metric: str) -> dict[tuple[int, int], float | None]:
        """The values of a metric, by step and where its mean begins.

        Other metrics than the loss are of the step alone.
        """
        begins = self._windows if metric == "loss" else {}
        return {
            (step, begins.get(step, 0)): each[metric]
            for step, each in self.records.items()
            if metric in each
        }


def run_compare(options: CompareOptions) -> int:
    """Compare each run with the first, and print it.

    Returns 1 where one differs. Raises UserError.
    """
    first, *others = (ComparedRun(Run.open(path)) for path in options.runs)
    comparisons = [compare_runs(first, other, weights=options.weights) for other in others]
    if options.output == "json":
        print(json.dumps(without_non_finite([asdict(each) for each in comparisons]), indent=1))
    else:
        for each in comparisons:
            _print(first, each)
    return int(not all(each.same for each in comparisons))


def compare_runs(first: ComparedRun, other: ComparedRun, *, weights: bool = False) -> Comparison:
    """Compare two runs at the steps that both have logged, and in their common checkpoints.

    Raises UserError.
    """
    differs = dict(_differences(first, other))
    bound, reason = _choose_bound(first, other, differs)
    limits = bound or EQUAL_BITS
    compared = {}
    for metric, field in METRICS.items():
        theirs = first.values(metric)
        ours = other.values(metric)
        if metric == "val/loss" and any(name.startswith("validation.") for name in differs):
            continue
        rows = [_row(*key, theirs[key], ours[key]) for key in sorted(theirs.keys() & ours.keys())]
        if rows:
            compared[metric] = _find_differences(rows, getattr(limits, field))
    if not compared:
        raise UserError(
            f"{other.run.path}: no log step in common with {first.run.path}; set log.every_steps"
            " alike"
        )
    if weights:
        compared["weights"] = _find_differences(
            _weight_rows(first, other, limits.weights), limits.weights
        )
    same = not any(each.first for each in compared.values())
    verdict = _describe(first, other, bound, reason, compared)
    return Comparison(str(other.run.path), differs, bound, reason, compared, verdict, same)


def _differences(first: ComparedRun, other: ComparedRun) -> Iterator[tuple[str, list[Any]]]:
    """The differences in options, ranks, device, versions and data, with both values.

    The first run's value is the first.
    """
    for name in first.options | other.options:
        values = [run.options.get(name) for run in (first, other)]
        if values[0] != values[1] and not name.startswith(NO_STEP):
            yield name, values
    facts: dict[str, list[Any]] = {
        "ranks": [first.ranks, other.ranks],
        "device": [first.device, other.device],
    }
    for name in HARDWARE:
        if first.hardware[name] and other.hardware[name]:
            facts[name] = [first.hardware[name], other.hardware[name]]
    for name in VERSIONS:
        facts[name] = [first.environment.get(name), other.environment.get(name)]
    for name, pair in facts.items():
        if pair[0] != pair[1]:
            yield name, pair
    for step in sorted(first.checkpoints.keys() & other.checkpoints.keys()):
        saved = [run.checkpoints[step] for run in (first, other)]
        for name, meaning in (("plan_hash", "data plan"), ("consumed_sequences", "sequences read")):
            pair = [getattr(each, name) for each in saved]
            if pair[0] != pair[1]:
                yield f"{meaning} at step {step}", pair
                return


def _choose_bound(
    first: ComparedRun, other: ComparedRun, differs: dict[str, list[Any]]
) -> tuple[Bound | None, str]:
    """The bound between the runs and why it is this one; None where they compute other things."""
    unlike_plan = any(" at step " in name for name in differs)
    lr = [run.values("lr") for run in (first, other)]
    ignored: tuple[str, ...] = (*OF_SPLIT, *VERSIONS, *HARDWARE, "validation.", "ranks")
    ignored += ("train.device", "train.deterministic")
    if all(lr[0][step] == lr[1][step] for step in lr[0].keys() & lr[1].keys()):
        ignored += OF_LR
    if not unlike_plan and first.checkpoints.keys() & other.checkpoints.keys():
        ignored += OF_PLAN
    names = [name for name in differs if not name.startswith(ignored)]
    if names:
        return None, f"they do not compute the same ({_name_differences(differs, names)})"
    options = first.options
    if "auto" in (options["train.dtype"], other.options["train.dtype"]):
        why = "a recipe says train.dtype = auto, which no longer tells what it was where the run"
        return None, f"{why} began"
    split = [
        name for name in differs if name.startswith((*OF_SPLIT, *VERSIONS[:-1], *HARDWARE, "ranks"))
    ]
    if not split and not (first.has_one_split and other.has_one_split):
        split.append("ranks")
    if not split and (
        first.device == "cpu"
        or (options["train.deterministic"] and other.options["train.deterministic"])
    ):
        return EQUAL_BITS, EQUAL_BITS.reason
    if options["train.float8"] or first.options.get("align.method") == "grpo":
        what = "float8" if options["train.float8"] else "sampled completions"
        parts = _name_differences(differs, split)
        return None, f"there is no bound for {what} with another split ({parts})"
    keeps_bf16 = not {"bf16", "8bit"}.isdisjoint(
        (options["train.master_dtype"], options["optimizer.state_dtype"])
    )
    optimizer = options["optimizer.name"]
    epsilon = options["optimizer.eps"]
    bound = bound_of_splits(options["train.dtype"], first.device, optimizer, epsilon, keeps_bf16)
    why = _name_differences(differs, split) if split else "not --deterministic"
    return bound, f"{bound.reason} ({why})"


def _name_differences(differs: dict[str, list[Any]], names: Sequence[str]) -> str:
    named = [
        f"{name} {_shown(differs[name][0])} and {_shown(differs[name][1])}"
        for name in names
        if name in differs
    ]
    return name_some(named, 4) or "a run was resumed with another split"


def _shown(value: Any) -> str:
    return cut(value if isinstance(value, str) else json.dumps(value), 60)


def _row(step: int, begin: int, theirs: float | None, ours: float | None) -> Row:
    """The difference of two values. None, which is not finite, equals None only."""
    if theirs is None or ours is None:
        return Row(step, 0.0 if theirs is ours else inf, (theirs, ours))
    return Row(step, relative_difference(ours, theirs), (theirs, ours))


def _weight_rows(first: ComparedRun, other: ComparedRun, limit: float) -> Iterator[Row]:
    """The tensors of the checkpoints of both, one after the other.

    What is not finite is infinitely far from everything, but where the limit is 0 from what has the
    same bits. Raises UserError.
    """
    import torch

    from lmforge.hf.stored_model import StoredModel
    from lmforge.lab.bench.parity import weights_difference

    steps = sorted(first.checkpoints.keys() & other.checkpoints.keys())
    if not steps:
        raise UserError(
            f"--weights: {first.run.path} and {other.run.path} have no checkpoint of the same step"
        )
    for step in steps:
        models = []
        for run in (first, other):
            folder = run.run.checkpoint_path(step)
            with prefix_errors(str(folder)):
                check_sizes(folder, run.checkpoints[step])
                models.append(StoredModel(folder, run.checkpoints[step]))
        names = sorted(models[0].tensors.keys() | models[1].tensors.keys())
        for name in names:
            shapes = {model.tensors[name].shape for model in models if name in model.tensors}
            if len(shapes) > 1 or not all(name in model.tensors for model in models):
                yield Row(step, inf, tensor=name)
                continue
            theirs, ours = (model.read(name) for model in models)
            same_bits = theirs.dtype == ours.dtype and torch.equal(_bits(theirs), _bits(ours))
            if same_bits and not limit:  # NaN too
                yield Row(step, 0.0, tensor=name)
                continue
            # A bias may be zero but for its updates. It is added to the product of its weight,
            # whose norm is the weight's for inputs of size 1.
            weight = name.removesuffix("bias") + "weight"
            is_bias = name.endswith(".bias") and weight in models[0].tensors
            scale = 0.0
            if is_bias:
                scale = float(torch.linalg.vector_norm(models[0].read(weight).float()))
            difference = weights_difference(name, ours, theirs, order=2, at_least=max(scale, 1e-12))
            yield Row(step, difference if same_bits else max(1e-300, difference), tensor=name)


def _bits(tensor: "Tensor") -> "Tensor":
    import torch

    return tensor.reshape(-1).view(torch.uint8)


def _find_differences(rows: Iterable[Row], limit: float) -> Compared:
    """The differences in rows that are in order of their steps.

    Tensors of later checkpoints than the first beyond `limit` are not read.
    """
    steps: set[int] = set()
    largest = first = None
    for row in rows:
        if first and row.step > first.step and row.tensor:
            break
        steps.add(row.step)
        if first is None and not row.difference <= limit:
            first = row
        if largest is None or row.difference > largest.difference:
            largest = row
    assert largest is not None
    return Compared(limit, len(steps), largest, first)


def _describe(
    first: ComparedRun,
    other: ComparedRun,
    bound: Bound | None,
    reason: str,
    compared: dict[str, Compared],
) -> str:
    """The verdict in one line."""
    theirs = first.run.path
    ours = other.run.path
    beyond = [(each.first, each.bound, name) for name, each in compared.items() if each.first]
    if not beyond:
        within = "bit for bit" if bound in (None, EQUAL_BITS) else "to rounding"
        what = ", ".join(
            f"{name} at {format_count(each.steps, 'step')}" for name, each in compared.items()
        )
        return f"{ours} agrees with {theirs} {within}: {what}"
    row, limit, name = min(beyond, key=lambda each: each[0].step)
    values = " instead of ".join(map(str, reversed(row.values))) or row.tensor
    text = (
        f"{ours} differs from {theirs} from step {row.step} on: {name} {values}, by"
        f" {row.difference:.1e}"
    )
    if bound is None:
        return f"{text}; no bound applies, as {reason}"
    if bound is EQUAL_BITS:
        return f"{text}, where bits are to be equal: {reason}"
    text += f", and {limit:.2g} is the bound: {reason}"
    begun = min(first.records.keys() & other.records.keys())
    if row.step - begun < BOUND_STEPS:
        return text
    return f"{text}; it holds for {BOUND_STEPS} steps, later training amplifies rounding"


def _print(first: ComparedRun, comparison: Comparison) -> None:
    print(f"{first.run.path} and {comparison.run}")
    for name, pair in comparison.differs.items():
        print(f"  {name}: {' and '.join(map(_shown, pair))}")
    print(f"  bound: {'' if comparison.bound else 'none, as '}{comparison.reason}")
    for name, each in comparison.compared.items():
        row = each.largest
        limit = f" (bound {each.bound:.2g})" if comparison.bound else ""
        words = "all equal"
        if row.difference:
            words = f"largest difference {row.difference:.1e}{limit} at step {row.step}"
            words = f"{words} {row.tensor}".rstrip()
        print(f"  {name}: {format_count(each.steps, 'step')} compared, {words}")
    print(comparison.verdict)
