"""Whether a ladder predicts a run: a target of some two million parameters, near the optimum, and a
ladder of a tenth of it.

For each kind of text of this machine (Python sources and docstrings of the installed packages, C++
headers of torch): the text is prepared, `lmforge ladder` trains and fits, the target is trained,
and its validation loss is compared with the prediction. Each run has one thread. With --folder,
kinds of text can be measured by several commands, and a last one with all of them, which trains
nothing any more, writes the record of all.
"""

import argparse
import ast
import hashlib
import json
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from setting import benchmark_parser, machine, machine_lines, run_lmforge, train_run, write_result

from lmforge.core.model.resolve import stored_model_config
from lmforge.core.records.manifests import read_manifest
from lmforge.core.records.runs import Run
from lmforge.lab.ladder.rungs import scaled_parameters

TOKENS_PER_PARAMETER = 20
VOCABULARY, LENGTH, HEAD_DIM, LAYERS = 1024, 64, 32, 6
BATCH = 32  # sequences: 2,048 tokens
RATES = (2e-3, 4e-3, 8e-3)  # tried by the ladder; the recipe has the middle one
PACKAGES, HEADERS = Path(torch.__file__).parents[1], Path(torch.__file__).parent / "include"
GOAL = 0.01  # of the loss


def shuffled(folder: Path, endings: tuple[str, ...]) -> list[Path]:
    """The files in an order that is the same on every machine: a part of them is of all packages."""
    paths = (each for each in folder.rglob("*") if each.suffix in endings)
    return sorted(paths, key=lambda path: hashlib.sha256(str(path.relative_to(folder)).encode()).digest())


def sources() -> Iterator[str]:
    for path in shuffled(PACKAGES, (".py",)):
        yield path.read_text(encoding="utf-8", errors="replace")


def headers() -> Iterator[str]:
    for path in shuffled(HEADERS, (".h", ".hpp", ".cuh")):
        yield path.read_text(encoding="utf-8", errors="replace")


def docstrings() -> Iterator[str]:
    """English: what the sources say of themselves, a document for each file."""
    for text in sources():
        with suppress(SyntaxError, ValueError, RecursionError), warnings.catch_warnings(action="ignore"):
            kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
            told = [ast.get_docstring(node) for node in ast.walk(ast.parse(text)) if isinstance(node, kinds)]
            if document := "\n\n".join(filter(None, told)):
                yield document


TEXTS: dict[str, Callable[[], Iterator[str]]] = {"python": sources, "c++": headers, "english": docstrings}


def write_text(kind: str, path: Path, most_bytes: int) -> None:
    """Documents of this kind, one JSON object a line, up to so many bytes.

    Of equal paragraphs only the first is kept: packages copy each other, and what is held out must
    not be what was learned by heart.
    """
    written, seen = 0, set[str]()
    with open(path, "w", encoding="utf-8") as file:
        for text in TEXTS[kind]():
            paragraphs = [each for each in text.split("\n\n") if each.strip() and each.strip() not in seen]
            seen.update(each.strip() for each in paragraphs)
            document = "\n\n".join(paragraphs)
            if len(document) > 200 and written < most_bytes:
                written += file.write(json.dumps({"text": document}) + "\n")


def sizes_of(width: int) -> tuple[int, int]:
    """(feed-forward size, parameters without the input embedding) of a target of this width."""
    inner = round(width * 8 / 3 / 8) * 8
    return inner, LAYERS * (4 * width**2 + 3 * width * inner + 2 * width) + VOCABULARY * width + width


def recipe(parameters: float, folder: Path, device: str, lr: float, tiny: bool) -> str:
    """The recipe of a target with about so many parameters."""
    tokens_per_parameter, batch, held_out = (2, 4, 20) if tiny else (TOKENS_PER_PARAMETER, BATCH, 1000)
    width = min(range(2 * HEAD_DIM, 2048, HEAD_DIM), key=lambda each: abs(sizes_of(each)[1] - parameters))
    inner, count = sizes_of(width)
    steps = round(tokens_per_parameter * count / (batch * LENGTH))
    return f"""\
[data]
folder = "{folder}"
sequence_length = {LENGTH}
[model]
hidden_size = {width}
intermediate_size = {inner}
num_hidden_layers = {LAYERS}
num_attention_heads = {width // HEAD_DIM}
num_key_value_heads = {width // HEAD_DIM}
head_dim = {HEAD_DIM}
initializer_range = 0.05
embedding_initializer_range = 1.0
[train]
steps = {steps}
global_batch_size = {batch}
device = "{device}"
dtype = "bf16"
threads = 1
[optimizer]
lr = {lr}
embedding_lr_ratio = 5.0
[schedule]
warmup_steps = {max(1, steps // 50)}
min_lr_ratio = 0.0
name = "linear"
[validation]
sequences = {held_out}
every_steps = {max(1, steps // 10)}
[checkpoint]
keep_last = 1
[log]
every_steps = 100
"""


def measure(kind: str, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Predict and train the target on one kind of text.

    What was done before in this folder is not done again.
    """
    data, runs, file = folder / "tokens", folder / "runs", folder / "target.toml"
    parameters, rates, tiny = options.parameters, options.learning_rates, options.tiny
    if not (text := folder / "text.jsonl").exists():
        # Two passes and a half over the data at most, with some 3 bytes a token.
        most_bytes = 2_000_000 if tiny else round(2 * TOKENS_PER_PARAMETER * parameters)
        write_text(kind, folder / "unfinished.jsonl", most_bytes)
        (folder / "unfinished.jsonl").rename(text)
    if not (data / "manifest.json").exists():
        run_lmforge("prepare", text, data, "--vocab_size", VOCABULARY, "--validation_ratio", 0.02)
    file.write_text(recipe(parameters, data, options.device, rates[len(rates) // 2], tiny))
    words = [file, "--run.folder", runs, "--budget", options.budget, "--ladder.parallel_runs", options.parallel]
    if tiny:
        words += ["--ladder.sizes", 2, "--ladder.tokens_per_parameter", 1.5, 2, 3, 4]
    elif len(rates) > 1:
        words += ["--ladder.learning_rates", *rates]
    run_lmforge("ladder", *words)
    ladder = runs / "target-ladder"
    _, predicted, low, high = json.loads((ladder / "prediction.json").read_text())["points"][-1]
    steps = json.loads((ladder / "prediction.json").read_text())["steps"]
    loss = train_run(runs, "target", "val/loss", "pretrain", ladder / "target.toml")
    table = json.loads((ladder / "ladder.json").read_text())["ladders"][0]
    model = stored_model_config(read_manifest(Run.open(runs / "target").checkpoint_path(steps)))
    return {
        "parameters": scaled_parameters(model),
        "tokens": table["target"]["tokens"],
        "rungs": len(table["rungs"]),
        "share": sum(rung["flops"] for rung in table["rungs"]) / table["target"]["flops"],
        "predicted": predicted,
        "interval": [low, high],
        "reached": loss,
        "error": predicted / loss - 1,
        "inside": low <= loss <= high,
    }


def main() -> int:
    parser = benchmark_parser(__doc__, 1, "not used: each kind of text is one round")
    parser.add_argument("--parameters", type=float, default=2e6, help="of the target, without the input embedding")
    parser.add_argument("--budget", default="0.1", help="of the ladder, as lmforge ladder takes it")
    parser.add_argument("--parallel", type=int, default=2, help="rungs at once")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="where all runs are trained")
    parser.add_argument("--learning_rates", nargs="+", type=float, default=RATES, help="that the ladder tries; one: that one")
    parser.add_argument("--texts", nargs="+", choices=sorted(TEXTS), default=sorted(TEXTS))
    parser.add_argument("--folder", type=Path, help="keep all runs here, and go on with those that are there")
    parser.add_argument("--tiny", action="store_true", help="do as little as possible, to try the program")
    options = parser.parse_args()
    environment, results = machine(), dict[str, Any]()
    if options.device == "cuda":
        environment["gpu"] = torch.cuda.get_device_name()
    with tempfile.TemporaryDirectory() as temporary:
        for kind in options.texts:
            folder = (options.folder or Path(temporary)) / kind
            folder.mkdir(parents=True, exist_ok=True)
            results[kind] = measure(kind, folder, options)
            print(f"{kind}: {results[kind]}", file=sys.stderr, flush=True)
    lines = ["# A ladder and its target", "", *machine_lines(environment), ""]
    lines += ["| text | target | tokens | ladder | predicted | interval (90 %) | reached | error | inside |", "|---" * 9 + "|"]
    for kind, row in results.items():
        interval = f"{row['interval'][0]:.4f} to {row['interval'][1]:.4f}"
        lines.append(
            f"| {kind} | {row['parameters']:,} | {row['tokens']:,} | {row['rungs']} rungs, {row['share']:.1%} of its FLOPs"
            f" | {row['predicted']:.4f} | {interval} | {row['reached']:.4f} | {row['error']:+.2%} | {row['inside']} |"
        )
    lines += ["", f"Loss in nats per token of held-out text. Goal: an error of {GOAL:.0%} at most, inside the interval."]
    record = {"benchmark": "ladder", "machine": environment, "goal": GOAL, "texts": results}
    write_result("ladder", record, "\n".join(lines), options.out)
    print("\n".join(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
