"""How the tests cut the long commands of the documents down, which the site shows below each of
them.
"""

import re
import shlex
import tomllib

from website.links import ROOT

FENCED = re.compile(r"^```(\w+)\n(.*?)^```$", re.M | re.S)
TRAINING = ("pretrain", "sft", "distill", "align")

TINY_MODEL = {
    "model.hidden_size": 32,
    "model.intermediate_size": 48,
    "model.num_hidden_layers": 1,
    "model.num_attention_heads": 2,
    "model.num_key_value_heads": 2,
}
FEW_STEPS = {
    "data.sequence_length": 64,
    "train.global_batch_tokens": "none",
    "train.global_batch_size": 4,
    "train.device": "cpu",
    "train.compile": "off",
    "schedule.warmup_steps": 1,
    "validation.sequences": 4,
}


# What makes the rungs of a ladder short: the big run is not trained.
SMALL_LADDER = {
    "data.sequence_length": 16,
    "model.hidden_size": 64,
    "model.intermediate_size": 160,
    "model.num_hidden_layers": 2,
    "model.num_attention_heads": 8,
    "model.num_key_value_heads": 8,
    "model.head_dim": 8,
    "train.global_batch_size": 2,
    "train.steps": 20_000,
    "train.compile": "off",
    "validation.sequences": 4,
    "ladder.sizes": 2,
    "ladder.tokens_per_parameter": "0.1 0.15 0.2 0.25",
}


def shortened(line: str) -> str:
    """A training in 4 steps of 4 short sequences on a CPU, or in 6 where the line gives
    train.steps.

    The model config of a preset becomes tiny; that of a model folder, which is tiny already, stays.
    The ranks are those the line says, not its recipe. An evaluation on documents sees 32 sequences.
    A benchmark is cut down alike, to one step. Of games of chess there are a few, and a ladder has
    short rungs.
    """
    words = shlex.split(line)
    if "recipes/chess/games.py" in words:
        return f"{line} --games 20 --positions 4 --nodes 10 --workers 1"
    if words[:2] == ["lmforge", "evaluate"] and "--tasks" not in words:
        return f"{line} --sequences 32"
    if words[:2] == ["lmforge", "ladder"] and "--dry-run" not in words:
        return " ".join([line, *(f"--{name} {value}" for name, value in SMALL_LADDER.items())])
    if not {*TRAINING, "bench"} & set(words) or {"--dry-run", "--help"} & set(words):
        return line
    # A recipe that a page writes itself is not in the repository.
    files = [ROOT / word for word in words if word.startswith("recipes/") and (ROOT / word).is_file()]
    recipes = [tomllib.loads(file.read_text(encoding="utf-8")) for file in files if file.suffix == ".toml"]
    begun = any("source" in recipe.get("model", {}) for recipe in recipes)
    shape = {} if begun or {"--model.source", "sft", "align"} & set(words) else TINY_MODEL
    alone = {} if {"torchrun", "--launch.processes"} & set(words) else {"launch.processes": 1}
    chosen = {**FEW_STEPS, **shape, **alone, "train.steps": 6 if "--train.steps" in words else 4}
    if "grpo" in words:  # whole groups of answers
        chosen |= {"train.global_batch_size": 8, "rollout.max_completion_length": 16}
    if "data/calculator/chats.jsonl" in words:  # with the tool's schema
        chosen |= {"data.sequence_length": 192}
    if "--rollout.environment" in words:  # prompts with the tools' schemas, and what they return
        chosen |= {"data.sequence_length": 768, "rollout.max_completion_length": 64}
    if any(word.endswith("-ladder/target.toml") for word in words):  # whose prediction is of the whole run
        chosen |= {"log.prediction": "none"}
    if "bench" in words:
        chosen |= {"bench.steps": 1, "bench.warmup_steps": 1}
    if "--calibrate" in words:
        chosen |= {"bench.calibrate_seconds": 0.5}
    return " ".join([line, *(f"--{name} {value}" for name, value in chosen.items())])


def is_command(line: str) -> bool:
    """Whether a line of a fenced block is one that is typed."""
    return bool(line.strip()) and not line.startswith("#")


def with_cut_downs(markdown: str) -> str:
    """The page with a folded note below each block of shell that tests do not run as it stands."""

    def noted(block: re.Match[str]) -> str:
        kind, text = block.groups()
        lines = [line for line in text.splitlines() if is_command(line)] if kind == "sh" else []
        added = [shortened(line).removeprefix(line).strip() for line in lines]
        if not any(added):
            return block[0]
        title = "The tests add" if len(lines) == 1 else "The tests add, line by line"
        note = [f'??? example "{title}"', "", "    ```sh", *(f"    {each or '(nothing)'}" for each in added), "    ```"]
        return "\n".join([block[0], "", *note, ""])

    return FENCED.sub(noted, markdown)
