"""What a policy learns when the trainer samples itself, and when servers do: the reward of each
engine with several seeds.

A small model of random weights learns to write as many different characters as it can, in fp32 on a
CPU. Each run starts its own server (rollout.engine_start); vLLM is taken where the program `vllm`
is on the PATH. Speeds are not compared: one machine samples, trains and serves.
"""

import json
import random
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from setting import benchmark_parser, machine, machine_lines, run_lmforge, summarize, write_result

from lmforge.core.data.tokenizer import train_tokenizer
from lmforge.core.model.build import build_model
from lmforge.core.model.config import ModelConfig
from lmforge.core.model.init_weights import init_weights
from lmforge.hf.export import export_folder

VOCAB_SIZE = 261  # a token a byte
REWARDS = "def variety(prompts, completions):\n    return [len(set(text)) / 12 for text in completions]\n"


def write_inputs(folder: Path) -> None:
    """The model, the prompts and the reward function of all runs."""
    train_tokenizer([""], VOCAB_SIZE).save(folder / "tokenizer")
    sizes: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2}
    # vLLM's attention on a CPU takes heads of 32 numbers.
    config = ModelConfig(vocab_size=VOCAB_SIZE, num_key_value_heads=1, initializer_range=0.2, **sizes)
    export_folder(init_weights(build_model(config), 1), config, folder / "model", tokenizer_folder=folder / "tokenizer")
    chance = random.Random(1)
    prompts = ["".join(chance.choices("abcdefgh", k=chance.randint(2, 9))) for _ in range(200)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    (folder / "rewards.py").write_text(REWARDS)


def train(folder: Path, engine: str, seed: int, steps: int) -> dict[str, Any]:
    """One run.

    Rewards are means over the sampled completions of the first and the last tenth of its steps.
    """
    name = f"{engine}-{seed}"
    options: dict[str, Any] = {"method": "grpo", "model.source": folder / "model", "data.files": folder / "prompts.jsonl"}
    options |= {"rollout.reward_functions": f"{folder / 'rewards.py'}:variety", "rollout.num_generations": 8}
    options |= {"rollout.max_completion_length": 12, "data.sequence_length": 32, "train.global_batch_size": 64}
    options |= {"run.folder": folder, "run.name": name, "train.steps": steps, "train.seed": seed, "train.dtype": "fp32"}
    options |= {"train.device": "cpu", "train.compile": "off", "optimizer.lr": 2e-3, "rollout.loss_type": "dr_grpo"}
    options |= {"log.every_steps": 1, "rollout.engine": engine}
    options |= {} if engine == "in-process" else {"rollout.engine_start": "cpu"}
    words = [str(word) for option, value in options.items() for word in (f"--{option}", value)]
    began = time.perf_counter()
    run_lmforge("align", *words)
    seconds = time.perf_counter() - began
    records = [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
    rewards, tenth = [record["reward"] for record in records], max(1, steps // 10)
    return {
        "seed": seed,
        "first": sum(rewards[:tenth]) / tenth,
        "last": sum(rewards[-tenth:]) / tenth,
        "ratio": max(abs(record["ratio"] - 1) for record in records),
        "seconds": seconds,
    }


def table(record: dict[str, Any]) -> str:
    lines = ["# Reward by engine", "", *machine_lines(record["machine"]), f"- {record['what']}", ""]
    lines += ["| engine | reward at first | at the end: median (lowest–highest) | of each seed | largest \\|ratio − 1\\| |"]
    lines += ["|---|---|---|---|---|"]
    for engine, runs in record["engines"].items():
        last, first = (summarize([run[name] for run in runs]) for name in ("last", "first"))
        each = ", ".join(f"{value:.4f}" for value in last["rounds"])
        ratio = max(run["ratio"] for run in runs)
        spread = f"{last['median']:.4f} ({last['min']:.4f}–{last['max']:.4f})"
        lines.append(f"| {engine} | {first['median']:.4f} | {spread} | {each} | {ratio:.1e} |")
    return "\n".join(lines)


def main() -> int:
    parser = benchmark_parser(__doc__, 3, "seeds of each engine")
    parser.add_argument("--steps", type=int, default=60, help="steps of a run (default: 60)")
    parser.add_argument("--engines", nargs="+", help="default: in-process, lmforge, and vllm if it is on the PATH")
    chosen = parser.parse_args()
    engines = chosen.engines or ["in-process", "lmforge", *(["vllm"] if shutil.which("vllm") else [])]
    environment = machine()
    what = f"{chosen.steps} steps of 8 groups of 8 completions, {chosen.rounds} seeds; reward: different characters ÷ 12"
    results: dict[str, list[dict[str, Any]]] = {engine: [] for engine in engines}
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="rollout-engines-") as name:
        write_inputs(Path(name))
        for seed in range(chosen.rounds):
            for engine in engines:
                results[engine].append(train(Path(name), engine, seed, chosen.steps))
                print(engine, results[engine][-1], flush=True)
    record = {"benchmark": "rollout_engines", "machine": environment, "what": what, "engines": results}
    readable = table(record)
    print(f"{readable}\n\nwritten to {write_result('rollout_engines', record, readable, chosen.out)} and .json beside it")
    return 0


if __name__ == "__main__":
    sys.exit(main())
