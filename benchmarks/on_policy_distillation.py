"""On-policy distillation of an aligned teacher into the quickstart's model, beside GRPO of that
model: reward for FLOPs.

The quickstart's recipes train the student and a teacher of twice its width, which GRPO aligns.
Then, with each seed, the fine-tuned student is trained by GRPO, and by distillation for a fifth of
those FLOPs. What the teacher cost is not counted.
"""

import argparse
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from setting import benchmark_parser, machine, machine_lines, run_lmforge, write_result

from lmforge.core.model.flops import flops_per_token
from lmforge.core.records.runs import Run
from lmforge.serve.decoding.model_loading import load_model
from lmforge.text.chat.library_functions import TRAIN_FILE, VALIDATION_FILE

RECIPES = Path(__file__).parents[1] / "recipes"
PRETRAINED = {"student": "quickstart", "teacher": "quickstart-teacher"}
# Tokens of a request, some, and of the longest answer; completions of a step.
PROMPT, COMPLETION, GRPO_BATCH, DISTILL_BATCH = 80, 96, 64, 16
GOAL_FLOPS = 0.2
WARMUP_STEPS = 28  # of pretraining, as in the recipes
# Only rewards are measured.
QUIET = ("--validation.every_steps", "none", "--sample.every_steps", "none", "--train.compile", "off", "--train.device", "cpu")


class Runs:
    """The runs in a folder. What is finished there is not run again."""

    def __init__(self, folder: Path, options: argparse.Namespace) -> None:
        self.folder, self._options = folder, options
        folder.mkdir(parents=True, exist_ok=True)
        for name in ("stdlib", "functions"):
            if not (folder / name).exists():
                run_lmforge("prepare", name, folder / name)

    def train(self, name: str, verb: str, recipe: str, steps: int, *words: object) -> Path:
        done = self.folder / f"{name}.done"
        if not done.exists():
            own = ["--run.folder", self.folder, "--run.name", name, "--train.steps", steps, *QUIET]
            own += ["--train.threads", 1]
            run_lmforge(verb, RECIPES / f"{recipe}.toml", *own, *words)
            done.touch()
        return self.folder / name

    def tune(self, name: str, verb: str, recipe: str, steps: int, source: Path, *words: object) -> Path:
        """A run that begins from `source`, on the requests for functions."""
        functions = self.folder / "functions"
        files: list[object] = [
            "--data.folder",
            self.folder / "examples",
            "--data.files",
            functions / TRAIN_FILE,
            "--data.validation_files",
            functions / VALIDATION_FILE,
        ]
        return self.train(name, verb, recipe, steps, "--model.source", source, *files, *words)

    def align(self, name: str, source: Path, steps: int, *words: object) -> list[float]:
        """GRPO: reward of greedy answers to held-out requests, before the first and after the last
        step.
        """
        own = ["--validation.at_start", "true", "--validation.sequences", self._options.prompts]
        run = self.tune(name, "align", "quickstart-align", steps, source, *own, *words)
        return [each["val/reward"] for each in Run(run).read_metrics() if "val/reward" in each]

    def reward(self, name: str, source: Path) -> float:
        """The reward of a model, as a run of GRPO measures it before its first step, which is small
        here.
        """
        return self.align(name, source, 1, "--train.global_batch_size", 8)[0]


def read_flops(model: Path, length: int) -> int:
    """FLOPs of training on one token: a third are those of the forward pass."""
    return flops_per_token(load_model(model, torch.device("cpu"), torch.float32).model.config, length)


def count_flops(student: int, teacher: int, length: int) -> tuple[int, int]:
    """FLOPs of a sequence in GRPO and in on-policy distillation: the student samples it and learns
    from it, the teacher scores it. `length`: its tokens, which all are taken to have.
    """
    grpo = (student // 3 + student) * length
    return grpo, grpo + teacher // 3 * length


def compare(runs: Runs, options: argparse.Namespace) -> dict[str, Any]:
    """All runs, and their rewards by seed."""
    words = ["--data.folder", runs.folder / "stdlib", "--schedule.warmup_steps", min(WARMUP_STEPS, options.steps)]
    models = {name: runs.train(name, "pretrain", recipe, options.steps, *words) for name, recipe in PRETRAINED.items()}
    warmup = ("--schedule.warmup_steps", 5 * options.sft_steps // 6)  # as in the recipe
    tuned = {
        name: runs.tune(f"{name}-sft", "sft", "quickstart-sft", options.sft_steps, models[name], *warmup) for name in models
    }
    student, length = tuned["student"], PROMPT + COMPLETION
    aligned = runs.align("teacher-aligned", tuned["teacher"], options.align_steps)
    teacher = runs.folder / "teacher-aligned"
    grpo_flops, distill_flops = count_flops(read_flops(student, length), read_flops(teacher, length), length)
    grpo_total = grpo_flops * GRPO_BATCH * options.align_steps
    budget = {
        ratio: max(1, round(ratio * grpo_total / (distill_flops * DISTILL_BATCH))) for ratio in (GOAL_FLOPS, *options.more)
    }
    words = ["--distill.teacher", teacher, "--distill.max_completion_length", COMPLETION, "--validation.sequences", 16]
    words += ["--schedule.warmup_steps", 1]
    seeds = []
    for seed in range(options.rounds):
        chosen = ("--train.seed", seed)
        before, after = runs.align(f"grpo-{seed}", student, options.align_steps, *chosen)
        row: dict[str, Any] = {"seed": seed, "before": before, "grpo": after, "distilled": {}}
        for ratio, steps in budget.items():
            name = f"distilled-{ratio:g}-{seed}"
            run = runs.tune(name, "distill", "quickstart-distill", steps, student, *words, *chosen)
            row["distilled"][f"{ratio:g}"] = runs.reward(f"reward-of-{name}", run)
        seeds.append(row)
    flops = {f"{ratio:g}": steps * distill_flops * DISTILL_BATCH / grpo_total for ratio, steps in budget.items()}
    steps = {f"{ratio:g}": steps for ratio, steps in budget.items()}
    return {"teacher": aligned, "grpo_flops": grpo_total, "flops_ratio": flops, "steps": steps, "seeds": seeds}


def table(record: dict[str, Any]) -> str:
    """The record, to be read by people."""
    setting, result = record["setting"], record["result"]
    lines = ["# On-policy distillation beside GRPO", "", *machine_lines(record["machine"])]
    before, after = result["teacher"]
    steps = f"{setting['steps']} steps of pretraining, {setting['sft_steps']} of fine-tuning, {setting['align_steps']} of GRPO"
    lines += [f"- recipes of the quickstart, {steps}; {GRPO_BATCH} completions of up to {COMPLETION} tokens"]
    lines += [
        f"- reward of greedy answers to {setting['prompts']} held-out requests; teacher {before:.3f}, after GRPO {after:.3f}"
    ]
    lines += [
        f"- GRPO: {result['grpo_flops']:.3g} FLOPs, of sequences of {PROMPT + COMPLETION} tokens, sampled and learned from",
        "",
    ]
    rows = [("before", "0", [each["before"] for each in result["seeds"]])]
    rows += [("GRPO", "1", [each["grpo"] for each in result["seeds"]])]
    for ratio, steps in result["steps"].items():
        rewards = [each["distilled"][ratio] for each in result["seeds"]]
        rows.append((f"distilled, {steps} steps of {DISTILL_BATCH}", f"{result['flops_ratio'][ratio]:.2f}", rewards))
    lines += ["| | FLOPs ÷ GRPO's | reward of each seed | mean |", "|---|---|---|---|"]
    for name, ratio, rewards in rows:
        lines.append(f"| {name} | {ratio} | {', '.join(f'{each:.3f}' for each in rewards)} | {statistics.fmean(rewards):.3f} |")
    return "\n".join(lines)


def main() -> int:
    parser = benchmark_parser(__doc__ or "", 3, "seeds")
    parser.add_argument("--steps", type=int, default=1100, help="of pretraining (default: the recipe's 1,100)")
    parser.add_argument("--sft_steps", type=int, default=120, help="of fine-tuning (default: the recipe's 120)")
    parser.add_argument("--align_steps", type=int, default=16, help="of GRPO (default: the recipe's 16)")
    parser.add_argument("--prompts", type=int, default=96, help="held-out requests (default: 96)")
    parser.add_argument("--more", type=float, nargs="*", default=[], help="distil for these parts of GRPO's FLOPs too")
    parser.add_argument("--folder", type=Path, help="keep data and runs here, and go on with those that are here already")
    options = parser.parse_args()
    environment = machine()
    with tempfile.TemporaryDirectory(prefix="on-policy-") as name:
        result = compare(Runs(options.folder or Path(name), options), options)
    setting = {name: getattr(options, name) for name in ("steps", "sft_steps", "align_steps", "prompts", "rounds")}
    record = {"benchmark": "on_policy_distillation", "machine": environment, "setting": setting, "result": result}
    print(table(record))
    print(f"\n{write_result('on_policy_distillation', record, table(record), options.out)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
