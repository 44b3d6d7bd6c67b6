"""Tokens per second of lmforge's generation compared with transformers' `generate` on a CPU.

Both have the same model, prompts and threads. Each runs in a separate process, since a process
shares the allocator's settings, and they take turns. Ratios are within a round, and include the
prefill. Greedy tokens must be the same; where they part, the two likeliest tokens may be as close
as rounding brings them, and then that row is compared no further. Sampled tokens are drawn from the
whole softmax by either, each with numbers of its own.
"""

import json
import multiprocessing
import random
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from setting import add_threads, benchmark_parser, machine, machine_lines, summarize, write_result

from lmforge.core.distributed.distributed import keep_freed_memory
from lmforge.core.model.build import build_model
from lmforge.core.model.config import ModelConfig
from lmforge.core.model.flops import parameter_count
from lmforge.core.model.init_weights import init_weights
from lmforge.core.model.layers import LanguageModel
from lmforge.hf.export import export_folder
from lmforge.hf.resolve import resolve_model_config
from lmforge.hf.weights import load_folder
from lmforge.serve.decoding.engine import Engine, GenerationRequest
from lmforge.serve.decoding.sampling import SamplingParams

OURS, THEIRS = "lmforge", "transformers"
# That of train_cpu.py, and the same with grouped heads. First weights so large that the likeliest
# token stands out.
LLAMA = ModelConfig(
    vocab_size=4096,
    hidden_size=256,
    intermediate_size=704,
    num_hidden_layers=6,
    num_attention_heads=4,
    initializer_range=0.05,
)
SHAPES = {
    "llama": LLAMA,
    "llama, grouped heads": replace(
        LLAMA, num_attention_heads=8, num_key_value_heads=2, head_dim=32
    ),
}
TINY = replace(LLAMA, vocab_size=128, hidden_size=32, intermediate_size=64, num_hidden_layers=2)
SAMPLINGS = {"greedy": SamplingParams(0.0), "sampled": SamplingParams(1.0)}
# The tolerance for two sums of some hundred terms of size one, in different orders.
TIE = 1e-3

Write = Callable[[SamplingParams], list[list[int]]]


@dataclass(frozen=True)
class Work:
    """The input of both: a folder with a model, prompts, the number of tokens to generate after
    each, and threads.
    """

    folder: Path
    prompts: list[list[int]]
    new_tokens: int
    threads: int


def ours(work: Work) -> Write:
    keep_freed_memory()
    config = resolve_model_config(work.folder, {})
    model = opened(work.folder, config)

    def write(sampling: SamplingParams) -> list[list[int]]:
        max_length = max(map(len, work.prompts)) + work.new_tokens
        engine = Engine(
            model,
            vocab_size=config.vocab_size,
            max_batch_size=len(work.prompts),
            max_length=max_length,
        )
        requests = [
            GenerationRequest(prompt, work.new_tokens, sampling, seed, frozenset())
            for seed, prompt in enumerate(work.prompts)
        ]
        written = {engine.add_request(request): list[int]() for request in requests}
        while engine.num_unfinished:
            for token in engine.step():
                written[token.request_id].append(token.token_id)
        return list(written.values())

    return write


def opened(folder: Path, config: ModelConfig) -> LanguageModel:
    model = build_model(config)
    load_folder(folder, model)
    return model


def theirs(work: Work) -> Write:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(work.folder, dtype=torch.float32).eval()
    longest = max(map(len, work.prompts))
    padding = [longest - len(prompt) for prompt in work.prompts]
    tokens = torch.tensor(
        [[0] * pads + prompt for pads, prompt in zip(padding, work.prompts, strict=True)]
    )
    mask = torch.tensor([[0] * pads + [1] * (longest - pads) for pads in padding])

    def write(sampling: SamplingParams) -> list[list[int]]:
        drawn: dict[str, Any] = {
            "do_sample": True,
            "temperature": sampling.temperature,
            "top_k": 0,
            "top_p": 1.0,
        }
        chosen = drawn if sampling.temperature else {"do_sample": False}
        length: dict[str, Any] = {
            "max_new_tokens": work.new_tokens,
            "eos_token_id": None,
            "pad_token_id": 0,
        }
        with torch.inference_mode():
            generated = model.generate(tokens, attention_mask=mask, **length, **chosen)
        return [row[longest:] for row in generated.tolist()]

    return write


def contend(name: str, work: Work, pipe: Connection) -> None:
    """Run in a process of its own: generate once to warm up, then once per request.

    Sends (seconds, tokens).
    """
    torch.set_num_threads(work.threads)
    write = ours(work) if name == OURS else theirs(work)
    write(SAMPLINGS["sampled"])
    pipe.send(None)
    while (sampling := pipe.recv()) is not None:
        began = time.perf_counter()
        written = write(sampling)
        pipe.send((time.perf_counter() - began, written))


def hold(work: Work, shape: ModelConfig, rounds: int) -> dict[str, Any]:
    """Let both take `rounds` turns in each way of choosing tokens; their figures, and how greedy
    tokens compare.
    """
    context = multiprocessing.get_context("spawn")
    pipes, processes = {}, []
    for name in (OURS, THEIRS):
        pipes[name], far = context.Pipe()
        processes.append(context.Process(target=contend, args=(name, work, far), daemon=True))
        processes[-1].start()
        far.close()
        pipes[name].recv()
    speeds: dict[str, dict[str, list[float]]] = {kind: {OURS: [], THEIRS: []} for kind in SAMPLINGS}
    greedy: dict[str, list[list[int]]] = {}
    for number in range(rounds):
        order = (OURS, THEIRS) if number % 2 else (THEIRS, OURS)
        for kind, sampling in SAMPLINGS.items():
            for name in order:
                pipes[name].send(sampling)
                seconds, written = pipes[name].recv()
                speeds[kind][name].append(len(work.prompts) * work.new_tokens / seconds)
                if kind == "greedy":
                    greedy[name] = written
        done = ", ".join(
            f"{kind} {of[OURS][-1]:,.0f} and {of[THEIRS][-1]:,.0f}" for kind, of in speeds.items()
        )
        print(f"round {number + 1} of {rounds}: {done} tokens/s", file=sys.stderr, flush=True)
    for pipe, process in zip(pipes.values(), processes, strict=True):
        pipe.send(None)
        process.join()
    results: dict[str, Any] = {
        "ties": compare(work, opened(work.folder, shape), greedy[OURS], greedy[THEIRS])
    }
    for kind, of in speeds.items():
        ratios = [mine / other for mine, other in zip(of[OURS], of[THEIRS], strict=True)]
        results[kind] = {
            "tokens_per_second": {name: summarize(values) for name, values in of.items()},
            "ratio": summarize(ratios),
        }
    return results


@torch.no_grad()
def compare(work: Work, model: LanguageModel, mine: list[list[int]], other: list[list[int]]) -> int:
    """How many rows part at a tie. Exits where rows part elsewhere."""
    parted = 0
    for prompt, row, their_row in zip(work.prompts, mine, other, strict=True):
        where = next(
            (at for at, pair in enumerate(zip(row, their_row, strict=True)) if pair[0] != pair[1]),
            None,
        )
        if where is None:
            continue
        parted += 1
        read = torch.tensor([prompt + row[:where]])
        hidden = model(
            read, torch.arange(read.shape[1])[None], torch.zeros_like(read, dtype=torch.int32)
        )
        logits = model.lm_head(hidden[0, -1])
        chosen = logits[[row[where], their_row[where]]]
        if (logits.max() - chosen > TIE).any():
            raise SystemExit(
                f"greedy tokens differ after {where}: {row[where]} and {their_row[where]}, logits"
                f" {chosen.tolist()}"
            )
    return parted


def table(record: dict[str, Any]) -> str:
    lines = [
        "# Generation on a CPU, side by side",
        "",
        *machine_lines(record["machine"]),
        f"- {record['what']}",
    ]
    for name, of_shape in record["shapes"].items():
        lines += ["", f"## {name}, {of_shape['parameters'] / 1e6:.1f}M parameters", ""]
        lines += ["| | lmforge, tokens/s | transformers, tokens/s | ratio |", "|---|---|---|---|"]
        for kind in SAMPLINGS:
            speeds, ratio = of_shape[kind]["tokens_per_second"], of_shape[kind]["ratio"]
            cells = [
                f"{each['median']:,.0f} ({each['min']:,.0f}–{each['max']:,.0f})"
                for each in speeds.values()
            ]
            lines.append(
                f"| {kind} | {' | '.join(cells)} | {ratio['median']:.2f}"
                f" ({ratio['min']:.2f}–{ratio['max']:.2f}) |"
            )
        rows = record["rows"]
        lines.append(
            f"\nGreedy tokens are the same in {rows - of_shape['ties']} of {rows} rows; the others"
            " part at a tie."
        )
    return "\n".join(lines)


def main() -> int:
    parser = benchmark_parser(__doc__, 5, "turns of each")
    parser.add_argument(
        "--rows", type=int, default=64, help="prompts, written after together (default: 64)"
    )
    parser.add_argument(
        "--new_tokens", type=int, default=128, help="written after each prompt (default: 128)"
    )
    add_threads(parser)
    parser.add_argument(
        "--tiny", action="store_true", help="a small model, to see that everything works"
    )
    chosen = parser.parse_args()
    environment, shapes = machine(), {"tiny": TINY} if chosen.tiny else SHAPES
    result: dict[str, Any] = {}
    for name, shape in shapes.items():
        draw = random.Random(0)
        prompts = [
            [draw.randrange(shape.vocab_size) for _ in range(draw.randint(16, 64))]
            for _ in range(chosen.rows)
        ]
        with tempfile.TemporaryDirectory(prefix="engine-") as folder:
            export_folder(init_weights(build_model(shape), 0), shape, Path(folder) / "model")
            work = Work(Path(folder) / "model", prompts, chosen.new_tokens, chosen.threads)
            result[name] = {
                "parameters": parameter_count(shape).total,
                **hold(work, shape, chosen.rounds),
            }
    what = (
        f"fp32, {chosen.rows} prompts of 16 to 64 tokens, {chosen.new_tokens} new tokens each,"
        f" {chosen.threads} threads, {chosen.rounds} rounds; median (lowest–highest)"
    )
    record = {
        "benchmark": "engine",
        "machine": environment,
        "what": what,
        "rows": chosen.rows,
        "shapes": result,
    }
    readable = table(record)
    print(
        f"{readable}\n\nwritten to {write_result('engine', record, readable, chosen.out)} and .json"
        " beside it"
    )
    print(
        json.dumps(
            {
                name: {kind: of_shape[kind]["ratio"]["median"] for kind in SAMPLINGS}
                for name, of_shape in result.items()
            }
        )
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
