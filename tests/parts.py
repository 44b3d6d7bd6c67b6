"""All tests in parts, for `make test-all`: `python -m tests.parts [--jobs N] [PART …]`.

Every test file is in exactly one part. Four parts are not files: `chaos` and `chaos-of-rollouts`
inject random faults into runs, `repetitions` repeats fast tests that use random numbers, each time
with another seed, and `processors` repeats the tests that compare numbers, slow ones too, as other
processors compute. That takes hours, so it runs only where it is named. The seed is new and
printed.
"""

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests import seeds

ROOT = Path(__file__).parents[1]
CHAOS_MINUTES = 10


@dataclass(frozen=True)
class Part:
    """Test files by patterns below tests/, or a command of its own (arguments of `python`).

    `shared` are further arguments of the command, dealt out to as many processes as may run at
    once.
    """

    patterns: tuple[str, ...] = ()
    command: tuple[str, ...] = ()
    shared: tuple[str, ...] = ()

    def files(self) -> list[str]:
        return sorted(
            str(path.relative_to(ROOT))
            for pattern in self.patterns
            for path in (ROOT / "tests").glob(pattern)
        )


# Fast tests that use random numbers.
REPEATED = (
    "text/test_examples.py",
    "core/data/test_order.py",
    "serve/decoding/test_sampling.py",
    "core/losses/test_cross_entropy.py",
    "core/checkpoint/test_blocks.py",
    "core/steps/test_bad_steps.py",
    "post/rl/test_rollouts.py",
    "ops/monitor/test_stragglers.py",
    "ops/monitor/test_step_time_drift.py",
)
DISTRIBUTED = (
    "balance",
    "chaos",
    "checkpoints",
    "deepseek",
    "determinism",
    "distillation",
    "elastic",
    "expert_parallel",
    "generation",
    "gpu",
    "gpu_attention",
    "gpu_quantized",
    "gpu_tuning",
    "hub",
    "initial_weights",
    "logs",
    "mixture",
    "overlap",
    "resume",
    "signals",
    "tasks",
    "top",
    "tuning",
    "two_runs",
    "watch",
)
STRATEGIES = ("strategies", "same_result", "dropout", "lora", "optimizers", "objectives", "foreign")

PARTS = {
    "strategies": Part(tuple(f"distributed/test_{name}.py" for name in STRATEGIES)),
    "distributed": Part(tuple(f"distributed/test_{name}.py" for name in DISTRIBUTED)),
    "commands": Part(("test_[!d]*.py", "benchmarks/*.py", "recipes/*.py")),
    "docs": Part(("test_docs.py", "website/test_*.py")),
    "core": Part(("core/**/test_*.py",)),
    "text": Part(("text/test_*.py", "hf/test_*.py")),
    "serve": Part(("serve/**/test_*.py",)),
    "post": Part(("post/**/test_*.py",)),
    "ops": Part(("ops/**/test_*.py",)),
    "lab": Part(("lab/**/test_*.py",)),
    "chaos": Part(
        command=("-m", "tests.chaos", "--faults", "200", "--minutes", str(CHAOS_MINUTES))
    ),
    "chaos-of-rollouts": Part(
        command=("-m", "tests.chaos.rollouts", "--faults", "200", "--minutes", str(CHAOS_MINUTES))
    ),
    "processors": Part(command=("-m", "tests.processors")),
    "repetitions": Part(
        command=("-m", "pytest", "--repeat", "20"),
        shared=tuple(f"tests/{name}" for name in REPEATED),
    ),
}
NAMED_ONLY = ("processors",)


def carry_out(name: str, jobs: int) -> int:
    """Run a part and return its exit status."""
    part = PARTS[name]
    args = list(part.command) or [
        "-m",
        "pytest",
        "--numprocesses",
        str(jobs),
        "--dist",
        "loadfile",
        *part.files(),
    ]
    if name == "processors":
        args += ["--jobs", str(jobs)]
    if name.startswith("chaos"):
        args += ["--seed", str(seeds.run_seed())]
    shares = [part.shared[number::jobs] for number in range(jobs)]
    commands = [[sys.executable, *args, *share] for share in shares if share] or [
        [sys.executable, *args]
    ]
    processes = [subprocess.Popen(command, cwd=ROOT) for command in commands]
    return max(abs(process.wait()) for process in processes)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.parts", description="All tests, in parts."
    )
    parser.add_argument(
        "--jobs", type=int, default=2, help="processes that share the tests of a part"
    )
    parser.add_argument(
        "parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)} (default: all)"
    )
    chosen = parser.parse_args(arguments)
    unknown = [name for name in chosen.parts if name not in PARTS]
    if unknown:
        print(f"PART={unknown[0]}: no such part; there are {', '.join(PARTS)}", file=sys.stderr)
        return 2
    os.environ.setdefault(seeds.VARIABLE, "fresh")
    origin = seeds.settle()
    results = []
    for name in chosen.parts or (name for name in PARTS if name not in NAMED_ONLY):
        print(f"--- {name}, seed {seeds.run_seed()} ({origin}) ---", flush=True)
        began = time.monotonic()
        status = carry_out(name, chosen.jobs)
        outcome = "passed" if status == 0 else f"FAILED (status {status})"
        results.append(
            (status, f"{name:<12} {outcome}, {(time.monotonic() - began) / 60:.1f} minutes")
        )
    print(
        f"\nseed {seeds.run_seed()} (to repeat: {seeds.VARIABLE}={seeds.run_seed()} make test-all)"
    )
    print("\n".join(line for _, line in results))
    return 1 if any(status for status, _ in results) else 0


if __name__ == "__main__":
    sys.exit(main())
