"""What a report shows of one run, read from its directory as values that JSON has.

Everything but the recipe may be missing.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import BaseModel

from lmforge.core.data.shards.folder import TokenFolder
from lmforge.core.errors import UserError, format_count, format_duration
from lmforge.core.files.untrusted import check_content, open_file, parse_json, read_json, read_lines
from lmforge.core.options.load import flat_options
from lmforge.core.options.mixture import is_remote
from lmforge.core.options.options import Options
from lmforge.core.options.stage import PretrainConfig, StageConfig
from lmforge.core.records.manifests import read_manifest
from lmforge.core.records.run_records import (
    Count,
    StepNumber,
    completion_tables,
    newest_values,
    read_first_completions,
)
from lmforge.core.records.runs import Run
from lmforge.ops.monitor.heartbeat import FINAL_PHASES
from lmforge.ops.monitor.predicted_loss import read_predicted_loss
from lmforge.ops.monitor.run_status import RunState, RunStatus, read_run_status
from lmforge.ops.report.expert_map import read_expert_loads
from lmforge.ops.report.source_report import read_source

# More points would make the page slow to open. A longer series is shown with every n-th point and
# the last.
MAX_POINTS = 2000
MAX_SAMPLES = 40
MAX_CELLS = 500_000  # of the map of experts
MAX_TABLES = 8
MAX_TABLE_ROWS = 8
MAX_TEXT = 2000
MAX_LINE_BYTES = 2**20  # of an event; longer ones are left out
MAX_LENGTHS_SOURCES = 20
# Metrics that a run logs once, which are not drawn as curves.
PREDICTION_PREFIXES = ("predicted/", "measured/")
MAX_RANKS = 64


class RunEvent(BaseModel, extra="allow"):
    """A line of events.jsonl: what every event has (see core/stages/run_files.py)."""

    time: str
    kind: str
    step: StepNumber | None


class _ModelEvent(BaseModel):
    """What is shown of the event `model`."""

    model_type: str = ""
    parameters: Count | None = None
    trained: Count | None = None


def read_run(run: Run, state: str | None = None) -> dict[str, Any]:
    """What page.js calls a run.

    `state`: given where the run's end is known before all of its ranks have ended.

    Raises UserError where the recipe or the metrics cannot be read.
    """
    config = run.load_config()
    records = run.read_metrics()
    status = read_run_status(run)
    events, samples = read_events(run)
    return {
        "name": run.path.name,
        "path": str(run.path),
        "stage": config.of_stage,
        "state": state or last_state(run, status),
        "model": _last_model(events),
        "tasks": [Path(task).stem for task in config.validation.tasks],
        "steps": config.train.steps,
        "series": _series(records),
        "last": newest_values(records),
        "prediction": _prediction(records),
        "predicted_loss": _predicted_loss(config),
        "axis": _axis(records),
        "experts": _experts(run, _begin(records)["step"]),
        "step_times": _downsample(_step_times(records), MAX_POINTS),
        "events": [event for event in events if event["kind"] != "model"],
        "samples": _downsample(samples, MAX_SAMPLES),
        "tables": _completion_tables(run),
        "checkpoints": _checkpoints(run),
        "sources": _sources(config),
        "options": dict(flat_options(config)),
        "changed": list(_changed(config)),
        "environment": read_environment(run),
        "ranks": _ranks(status),
    }


def read_events(run: Run) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The events of a run in time order, without its samples; and some of the samples, including
    the last. Invalid lines and those that announce tables of completions are left out.
    """
    events: list[dict[str, Any]] = []
    samples: list[dict[str, Any]] = []
    last: dict[str, Any] | None = None
    count = 0
    every = 1
    with suppress(OSError), open_file(run.events_path) as file:
        for line in read_lines(file, MAX_LINE_BYTES):
            with suppress(UserError):
                event = parse_json(line, RunEvent, str(run.events_path)).model_dump()
                if event["kind"] != "sample":
                    if event["kind"] != "completions":
                        events.append(event)
                    continue
                last = event
                if count % every == 0:
                    samples.append(event)
                count += 1
                if len(samples) > 2 * MAX_SAMPLES:
                    del samples[1::2]
                    every *= 2
    if last is not None and samples[-1] is not last:
        samples.append(last)
    return events, samples


def _last_model(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The last event `model` that is one; empty where there is none."""
    for event in reversed(events):
        with suppress(UserError):
            if event["kind"] == "model":
                return check_content(event, _ModelEvent, "model").model_dump()
    return {}


def last_state(run: Run, status: RunStatus) -> str:
    """The state of a run, from its `status`.

    Where its heartbeats are lost, its events say how its last attempt ended.
    """
    if status.state != "not started":
        return status.state
    # None of a start.
    ends = [
        event.get("state") for event in read_events(run)[0] if event["kind"] in ("start", "end")
    ]
    if ends and ends[-1] in FINAL_PHASES:
        return ends[-1]
    return status.state


def _series(records: list[dict[str, Any]]) -> dict[str, list[list[float]]]:
    """[step, value] of each metric by name."""
    series: dict[str, list[list[float]]] = {}
    for record in records:
        for name, value in record.items():
            left_out = name in ("step", "tokens", "seconds_left") or name.startswith(
                PREDICTION_PREFIXES
            )
            if not left_out and isinstance(value, int | float):
                series.setdefault(name, []).append([record["step"], value])
    return {name: _downsample(points, MAX_POINTS) for name, points in series.items()}


def _prediction(records: list[dict[str, Any]]) -> dict[str, float]:
    """The predictions for the run and the measured values, of its last attempt; empty where there
    are none.
    """
    compared = (
        {name: value for name, value in each.items() if name.startswith(PREDICTION_PREFIXES)}
        for each in records
    )
    return next(filter(None, reversed(list(compared))), {})


def _predicted_loss(config: StageConfig) -> list[tuple[int, float, float, float]]:
    """(step, loss, low, high) of the ladder that has predicted this run; empty where there is none,
    or its file is gone.
    """
    with suppress(UserError):
        if config.log.prediction is not None:
            return read_predicted_loss(config.log.prediction, config.train.steps).points
    return []


def _axis(records: list[dict[str, Any]]) -> dict[str, list[float]]:
    """Steps, and the tokens and the seconds of training up to each.

    The seconds begin at 0, also for a run that began at a later step.
    """
    seconds = [0.0]
    for before, record in pairwise([_begin(records), *records]):
        seconds.append(
            seconds[-1] + (record.get("step_seconds") or 0.0) * (record["step"] - before["step"])
        )
    rows = [
        [each["step"], each.get("tokens"), each_seconds]
        for each, each_seconds in zip(records, seconds[1:], strict=True)
    ]
    columns = zip(*_downsample(rows, MAX_POINTS), strict=True) if rows else ([], [], [])
    return dict(zip(("step", "tokens", "seconds"), map(list, columns), strict=True))


def _begin(records: list[dict[str, Any]]) -> dict[str, Any]:
    """The step from which the first record counts."""
    if len(records) < 2:
        return {"step": records[0]["step"] if records else 0}
    return {"step": max(0, 2 * records[0]["step"] - records[1]["step"])}


def _step_times(records: list[dict[str, Any]]) -> list[list[float]]:
    """Step, and the mean seconds per step since the previous record: total, waiting for data, and
    waiting for a save.
    """
    rows = []
    stalled = 0.0
    for before, record in pairwise([_begin(records), *records]):
        total = record.get("save_stall_seconds") or stalled
        # A running total of one attempt: where it falls, another attempt began at 0.
        stall = total - stalled if total >= stalled else total
        stalled = total
        if seconds := record.get("step_seconds"):
            steps = max(1, record["step"] - before["step"])
            rows.append([record["step"], seconds, record.get("data_seconds") or 0.0, stall / steps])
    return rows


def _downsample(points: list[Any], limit: int) -> list[Any]:
    """At most `limit` points, evenly spaced, including the first and the last."""
    if len(points) <= limit:
        return points
    return [
        points[index]
        for index in np.linspace(0, len(points) - 1, limit).round().astype(int).tolist()
    ]


def _experts(run: Run, begin: int) -> dict[str, Any] | None:
    """Layers, steps from the one where the run began, and loads [steps, layers, experts] up to each
    of the others.
    """
    if not (records := read_expert_loads(run)):
        return None
    shown = _downsample(records, max(2, MAX_CELLS // records[-1]["loads"].size))
    return {
        "layers": shown[-1]["layers"],
        "edges": [begin, *(each["step"] for each in shown)],
        "loads": [each["loads"].tolist() for each in shown],
    }


def _ranks(status: RunStatus) -> dict[str, Any]:
    """The ranks by their last heartbeats: how many are in each phase, and which are in the worst
    state.
    """
    ranks = sorted(status.ranks, key=lambda rank: rank.severity)
    worst = [
        {
            "rank": rank.rank,
            "host": rank.host,
            "phase": rank.phase,
            "step": rank.step if rank.phase else None,
            "seconds": (
                rank.seconds_in_phase if rank.state not in ("missing", "ended", "gone") else None
            ),
            "note": rank.note,
        }
        for rank in ranks[:MAX_RANKS]
    ]
    return {
        "total": len(ranks),
        "counts": Counter(rank.phase or "missing" for rank in ranks),
        "worst": worst,
    }


def _completion_tables(run: Run) -> list[dict[str, Any]]:
    """The first rows of some tables of completions, in the order in which they were sampled."""
    names = completion_tables(run.path)
    sampled = [name for name in names if name.startswith("set-")]
    validated = [name for name in names if name not in sampled]
    tables = []
    for name in [*_downsample(validated, MAX_TABLES // 2), *_downsample(sampled, MAX_TABLES)]:
        rows = [
            row.model_dump()
            | {
                "prompt": row.prompt_text[:MAX_TEXT],
                "completion": row.completion[:MAX_TEXT],
            }
            for row in read_first_completions(run.path, name, MAX_TABLE_ROWS)
        ]
        tables.append({"name": name, "rows": rows})
    return tables


def _checkpoints(run: Run) -> list[dict[str, Any]]:
    """The existing checkpoints: step, bytes, and the metrics when they were saved."""
    checkpoints = []
    with suppress(UserError):
        for step in run.checkpoint_steps():
            with suppress(UserError):
                manifest = read_manifest(run.checkpoint_path(step))
                size = sum(file["bytes"] for file in manifest.files.values())
                checkpoints.append({"step": step, "bytes": size, "metrics": manifest.metrics})
    return checkpoints


def _sources(config: StageConfig) -> list[dict[str, Any]]:
    """The files of a recipe, or its token folders: weight, tokens, and how many documents have 2^k
    to 2^(k+1) − 1 tokens.
    """
    if not isinstance(config, PretrainConfig):
        return [{"name": str(file)} for file in getattr(config.data, "files", ())]
    results = []
    for source in config.data.all_sources[:MAX_LENGTHS_SOURCES]:
        entry: dict[str, Any] = {"name": source.label, "weight": getattr(source, "weight", None)}
        with suppress(UserError, OSError):
            # Otherwise shards of a remote folder would be downloaded only for a chart.
            if not is_remote(source.folder):
                report = read_source(
                    source.folder, TokenFolder.open(source.folder, quarantine=source.quarantine)
                )
                entry |= {
                    "documents": report.documents,
                    "tokens": report.tokens,
                    "bytes": report.text_bytes,
                    "lengths": report.histogram().tolist(),
                }
        results.append(entry)
    return results


def _changed(options: Options, prefix: str = "") -> Iterator[str]:
    """section.name of each option that does not have its default value."""
    for name in options.changed():
        value = getattr(options, name)
        if isinstance(value, Options):
            yield from _changed(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"


def read_environment(run: Run) -> dict[str, str]:
    """Versions, hardware and command of the last attempt, as text."""
    with suppress(OSError, UserError, AttributeError):
        table = read_json(run.path / "environment.json", dict[str, Any])
        packages = table.pop("packages", {})
        if isinstance(table.get("command"), list):
            table["command"] = " ".join(map(str, table["command"]))
        table["packages"] = ", ".join(f"{name} {version}" for name, version in packages.items())
        return {name: str(value) for name, value in table.items() if value is not None}
    return {}


STAGES = {
    "pretrain": "Pretraining",
    "sft": "Supervised fine-tuning",
    "distill": "Distillation",
    "align": "Alignment",
}


def subject(run: dict[str, Any]) -> str:
    """A sentence: what was trained, on what, and how long."""
    model = run["model"]
    options = run["options"]
    axis = run["axis"]
    text = STAGES.get(run["stage"], run["stage"])
    if run["stage"] == "align":
        text += f" ({options.get('align.method')})"
    if isinstance(count := model.get("parameters"), int):
        trained = model.get("trained")
        part = ""
        if isinstance(trained, int) and trained != count:
            part = f", {_short_count(trained)} of them trained"
        text += (
            f" of a model with {_short_count(count)} parameters ({model.get('model_type')}{part})"
        )
    if source := options.get("model.source"):
        text += f", from {source}"
    if names := [source["name"] for source in run["sources"]]:
        text += f", on {', '.join(names[:3])}"
        if len(names) > 3:
            text += f" and {format_count(len(names) - 3, 'other source')}"
    if axis["step"]:
        tokens = ""
        if axis["tokens"][-1]:
            tokens = f"{int(axis['tokens'][-1]):,} tokens in "
        text += f": {tokens}{format_duration(axis['seconds'][-1])} of training"
    return f"{text}."


def _short_count(count: int) -> str:
    """124M, 1.24B, 3,344"""
    for unit, name in ((1e9, "B"), (1e6, "M")):
        if count >= unit:
            return f"{count / unit:.3g}{name}"
    return f"{count:,}"


def _from_to(points: list[list[float]]) -> str:
    """The first and the last value of a series; a single value if it has only one."""
    values = [f"{value:.3f}" for _, value in points]
    if len(values) == 1:
        return values[0]
    return f"{values[0]} → {values[-1]}"


STATE_WORDS: dict[RunState, str] = {
    "not started": "No rank runs",
    "running": "Running",
    "stalled": "No rank makes progress",
    "degraded": "Some ranks cannot continue",
    "done": "Finished",
    "interrupted": "Interrupted",
    "failed": "Failed",
    "lost": "Stopped without an error message",
}


def verdict(run: dict[str, Any]) -> str:
    """One or two sentences: how the run ended, its result, and what went wrong."""
    series = run["series"]
    events = run["events"]
    step = 0
    if run["axis"]["step"]:
        step = run["axis"]["step"][-1]
    text = f"{STATE_WORDS[run['state']]}: {step:,} of {run['steps']:,} steps"
    for name, title in (
        ("val/reward", "validation reward"),
        ("val/loss", "validation loss"),
        ("loss", "loss"),
    ):
        if points := series.get(name):
            text += f", {title} {_from_to(points)}"
            break
    if bits := series.get("val/bits_per_byte"):
        text += f" ({_from_to(bits)} bits per byte)"
    counts = {
        kind: sum(event["kind"] == kind for event in events)
        for kind in ("bad step", "rollback", "stall", "start")
    }
    faults = [
        format_count(counts[kind], kind)
        for kind in ("bad step", "rollback", "stall")
        if counts[kind]
    ]
    if counts["start"] > 1:
        faults.append(format_count(counts["start"] - 1, "restart"))
    for name, what in (("reward_failures", "rewards"), ("environment_failures", "episodes")):
        values = [value for _, value in series.get(name, ())]
        if any(values):
            faults.append(f"{sum(values) / len(values):.2%} of {what} failed")
    if run["last"].get("loss", 0.0) is None:
        faults.append("the loss is not finite")
    if run["state"] == "done" and run["predicted_loss"] and (points := series.get("val/loss")):
        _, loss, low, high = run["predicted_loss"][-1]
        text += f"; its ladder predicted {loss:.4g} ({low:.4g} to {high:.4g})"
        if not low <= points[-1][1] <= high:
            faults.append("the validation loss is outside the ladder's interval")
    trouble = ""
    if faults:
        trouble = f" {', '.join(faults)}."
    trouble += "".join(
        [f" {event['reason']}." for event in events if event["kind"] == "failed rewards"][:1]
    )
    how = [event for event in events if event["kind"] in ("start", "end")][-1:]
    if run["state"] == "failed" and how and how[0].get("error"):
        trouble += f" {how[0]['error']}"
    if not trouble and run["state"] in ("done", "running"):
        trouble = " Nothing went wrong."
    return f"{text}.{trouble}"
