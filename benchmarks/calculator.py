"""What the calculator recipe learns, and what it learns from completions that are sampled while it
trains.

The recipe's pipeline runs with each seed: reward on held-out questions before and after GRPO, and
calls in an episode. Then its last stage alone, from one model of its SFT, with
rollout.max_staleness 0, 1 and 2 and a server that the run starts on the CPU. Speeds are not
compared: one machine samples, trains and serves.
"""

import json
import resource
import statistics
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import Any

from setting import benchmark_parser, machine, machine_lines, write_result

from lmforge.ops.options.running import PipelineOptions
from lmforge.ops.verbs.running.pipeline import PlannedStage, plan_stages

ROOT = Path(__file__).parents[1]
RECIPE = "recipes/calculator"
STALENESS = (0, 1, 2)


def run(name: str, words: list[str], folder: Path) -> float:
    """Carry out a program of Python in `folder`, unless one of this name was.

    Returns its CPU time in seconds, with that of the processes it waited for.
    """
    done = folder / f"{name}.seconds"
    if not done.exists():
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        ended = subprocess.run([sys.executable, *words], cwd=folder, capture_output=True, text=True, check=False)
        if ended.returncode:
            raise SystemExit(f"{words}: {ended.stderr[-2000:]}")
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        done.write_text(str(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime))
    return float(done.read_text())


def stages_of(folder: Path, name: str) -> list[PlannedStage]:
    file = folder / RECIPE / "pipeline.toml"
    table = tomllib.loads(file.read_text(encoding="utf-8")) | {"name": name, "folder": "runs"}
    return plan_stages(PipelineOptions.model_validate(table), file)


def learned(folder: Path, name: str, seed: int, seconds: float) -> dict[str, Any]:
    """Of a run of GRPO: held-out reward before the first and after the last step, and calls in
    sampled episodes.
    """
    lines = (folder / "runs" / name / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    records = [json.loads(line) for line in lines]
    rewards = [record["val/reward"] for record in records if "val/reward" in record]
    calls = [record["tool_calls"] for record in records if "tool_calls" in record]
    staleness = max((record.get("staleness/max", 0.0) for record in records), default=0.0)
    return {
        "seed": seed,
        "before": rewards[0],
        "after": rewards[-1],
        "rewards": rewards,
        "calls_before": calls[0],
        "calls_after": calls[-1],
        "largest_staleness": staleness,
        "cpu_seconds": round(seconds, 1),
    }


def pipeline(folder: Path, seed: int, changed: list[str]) -> dict[str, Any]:
    """The recipe with a seed. `changed`: options of all stages that train."""
    seconds = 0.0
    for stage in stages_of(folder, f"seed-{seed}"):
        if stage.run is None:  # the data are the same for all seeds
            seconds += run(stage.name, ["-m", "lmforge", *stage.arguments], folder)
        else:
            words = ["-m", "lmforge", *stage.arguments, "--train.seed", str(seed), *changed]
            seconds += run(stage.run.name, words, folder)
    return learned(folder, f"seed-{seed}-align", seed, seconds)


def stale(folder: Path, source: str, staleness: int, seed: int, changed: list[str]) -> dict[str, Any]:
    """The recipe's last stage from `source`."""
    name = f"staleness-{staleness}-seed-{seed}"
    arguments = stages_of(folder, name)[-1].arguments
    words = ["--model.source", source, "--run.name", name, "--train.seed", str(seed), "--rollout.engine", "lmforge"]
    words += ["--rollout.engine_start", "cpu", "--rollout.max_staleness", str(staleness), *changed]
    return learned(folder, name, seed, run(name, ["-m", "lmforge", *arguments, *words], folder))


def row(title: str, runs: list[dict[str, Any]]) -> str:
    after = [each["after"] for each in runs]
    cells = (
        ", ".join(f"{each['before']:.2f}" for each in runs),
        ", ".join(f"{value:.2f}" for value in after),
        f"{statistics.median(after):.2f}",
        ", ".join(f"{each['calls_before']:.2f} → {each['calls_after']:.2f}" for each in runs),
        f"{statistics.median(each['cpu_seconds'] for each in runs):.0f}",
    )
    return f"| {title} | {' | '.join(cells)} |"


def main() -> int:
    parser = benchmark_parser(__doc__ or "", 3, "seeds")
    parser.add_argument("--steps", type=int, help="steps of each stage (default: the recipe's)")
    parser.add_argument("--staleness", type=int, nargs="*", default=STALENESS, help="which to compare (default: 0 1 2)")
    parser.add_argument("--folder", type=Path, help="where data and runs stay; what is finished there is not run again")
    options = parser.parse_args()
    environment = machine()
    changed = ["--train.device", "cpu", "--run.overwrite"]
    changed += ["--train.steps", str(options.steps), "--schedule.warmup_steps", "1"] if options.steps else []
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        if not (folder / "recipes").exists():
            (folder / "recipes").symlink_to(ROOT / "recipes")
        run("problems", [f"{RECIPE}/problems.py", "data/calculator"], folder)
        seeds = [pipeline(folder, seed, changed) for seed in range(options.rounds)]
        by_staleness = {
            each: [stale(folder, "runs/seed-0-sft", each, seed, changed) for seed in range(options.rounds)]
            for each in options.staleness
        }
    record = {"benchmark": "calculator", "machine": environment, "recipe": seeds, "staleness": by_staleness}
    lines = ["# The calculator recipe", "", *machine_lines(environment)]
    lines += [f"- {options.rounds} seeds; reward of greedy answers to 100 held-out questions, calls in a sampled episode", ""]
    lines += ["| | before | after | median | calls | CPU seconds |", "|---|---|---|---|---|---|"]
    lines += [row("the pipeline, in process", seeds)]
    lines += [row(f"GRPO alone, with a server, max_staleness {each}", runs) for each, runs in by_staleness.items()]
    table = "\n".join(lines)
    print(table)
    print(f"\n{write_result('calculator', record, table, options.out)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
