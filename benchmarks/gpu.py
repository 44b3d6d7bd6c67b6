"""Tokens per second and MFU of lmforge compared with others on one GPU: Llama shapes of 124M, 1B,
3B and 8B in bf16 and float8, OLMoE and a hybrid with linear attention in bf16.

A trial is a process: it starts, warms up and compiles, is timed, and ends, so that one that crashes
or runs out of memory or time becomes a marked row, and the table continues. Each row is written at
once, into the one file of this GPU: a call that is killed keeps what it has, and a call for another
size adds to it. One size (`--only 8b`) takes less than eight minutes.

Beside lmforge's rows stands what `lmforge plan` predicts from the GPU's data sheet.

`8b-published` repeats the setting of a published figure, and `8b-best` looks for the fastest that
fits; both are lmforge alone.

Without a GPU a tiny shape takes the same way on the CPU, and nothing is recorded unless `--out`
says where.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from contender_process import Contender, EndedEarly
from contenders import (
    LMFORGE,
    LMFORGE_FLOAT8,
    LMFORGE_OPERATORS,
    PLAIN,
    PLAIN_COMPILED,
    TRAINER,
    WARM_UP_STEPS,
    Contest,
    recipe_of,
)
from setting import RESULTS, add_threads, machine, machine_lines, summarize, tokens_of_stdlib, word

from lmforge.core.distributed.distributed import DistributedContext
from lmforge.core.distributed.rank_info import RankInfo
from lmforge.core.errors import UserError
from lmforge.core.files.atomic_files import atomic_write_json, atomic_write_text
from lmforge.core.model.config import ModelConfig
from lmforge.core.model.config_json import to_config_json
from lmforge.core.model.flops import FLOPS_CONVENTION, parameter_count
from lmforge.core.options.sections import ParallelOptions
from lmforge.core.parallel.peak_flops import rank_peak_flops
from lmforge.core.parallel.precision import has_native_bf16
from lmforge.core.stages.parameter_counts import get_lora_config, training_flops_per_token
from lmforge.lab.bench.step_timing import OUT_OF_MEMORY, ran_out_of_memory
from lmforge.lab.plan.hardware import data_sheets
from lmforge.lab.plan.planning import Machine, predict_step
from lmforge.lab.plan.prediction.predict import Prediction
from lmforge.lab.plan.prediction.step_config import StepConfig
from lmforge.post.options.tuning import LoraOptions

GIB = 2**30
# The fraction of a GPU's memory for weights, gradients and optimizer states; the rest is for
# activations and logits.
SHARE_AT_REST = 0.8
# The time limit for one size, from its first process to the last row. A trial may use the remaining
# time.
SECONDS_A_SIZE = 440.0
# Tokens/s of Llama-3 8B on one H200, published: length 4,096, 4 sequences in each of 2
# micro-batches, full activation checkpointing, compiled, weights and states in bf16.
PUBLISHED_8B = 10_471.0
# Tokens/s of Mistral 7B with adapters beside NF4, published:
# foundation-model-stack/fms-acceleration, which has kernels of Unsloth,
# scripts/benchmarks/refs/a100_80gb.csv, row 36. Rank 16 on four matrices, 4 sequences of 4,096
# tokens, full activation checkpointing, fp16; 14.8 GiB allocated at the peak.
PUBLISHED_QLORA = 3_428.6


@dataclass(frozen=True)
class Size:
    """A shape, its sequences, and how many tokens a forward pass and a step take.

    With `checkpointing_from` that length and longer ones compute activations again, for all
    contenders alike. `variants` are settings of lmforge that are tried in place of the contest, by
    the name of the row: activation checkpointing, and tokens of a forward pass. `published` is a
    figure to compare with, in tokens/s, which `published_on` reached. `lora`: these adapters are
    trained, beside frozen weights.
    """

    shape: ModelConfig
    micro_tokens: int
    step_tokens: int
    length: int = 2048
    checkpointing_from: int | None = None
    variants: dict[str, tuple[str, int]] | None = None
    published: float | None = None
    published_on: str = "one H200"
    lora: LoraOptions | None = None


def llama(
    vocabulary: int, hidden: int, inner: int, layers: int, heads: int, kept: int, tied: bool
) -> ModelConfig:
    return ModelConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kept,
        tie_word_embeddings=tied,
        max_position_embeddings=8192,
        rope_theta=5e5,
    )


# Written out rather than presets, so that results stay comparable when presets change. The number
# of tokens per forward pass leaves room, on 80 GB, for a contender that keeps all of its logits.
LLAMA_8B = llama(128256, 4096, 14336, 32, 32, 8, tied=False)
SIZES = {
    "124m": Size(
        llama(50304, 768, 2048, 12, 12, 12, tied=True), micro_tokens=32_768, step_tokens=65_536
    ),
    "1b": Size(
        llama(128256, 2048, 8192, 16, 32, 8, tied=True), micro_tokens=8_192, step_tokens=65_536
    ),
    "3b": Size(
        llama(128256, 3072, 8192, 28, 24, 8, tied=True),
        micro_tokens=4_096,
        step_tokens=32_768,
        checkpointing_from=8192,
    ),
    "8b": Size(LLAMA_8B, micro_tokens=4_096, step_tokens=8_192, length=4096, checkpointing_from=0),
    "8b-published": Size(
        LLAMA_8B,
        micro_tokens=16_384,
        step_tokens=32_768,
        length=4096,
        variants={"lmforge, as published": ("full", 16_384)},
        published=PUBLISHED_8B,
    ),
    "8b-best": Size(
        LLAMA_8B,
        micro_tokens=4_096,
        step_tokens=32_768,
        length=4096,
        variants={
            "lmforge, selective-ops, 8,192 tokens": ("selective-ops", 8_192),
            "lmforge, selective-blocks, 8,192 tokens": ("selective-blocks", 8_192),
            "lmforge, no checkpointing, 4,096 tokens": ("none", 4_096),
        },
        published=PUBLISHED_8B,
    ),
}
SIZES["7b-qlora"] = Size(
    llama(32000, 4096, 14336, 32, 32, 8, tied=False),
    micro_tokens=16_384,
    step_tokens=16_384,
    length=4096,
    checkpointing_from=0,
    published=PUBLISHED_QLORA,
    published_on="one A100 of 80 GB",
    lora=LoraOptions(
        rank=16,
        alpha=16.0,
        target_modules=("q_proj", "k_proj", "v_proj", "o_proj"),
        base_dtype="nf4",
    ),
)
# A mixture of experts: MFU counts those that a token goes to. Without its auxiliary loss, as all
# contenders.
OLMOE = ModelConfig(
    model_type="olmoe",
    vocab_size=50304,
    hidden_size=2048,
    intermediate_size=1024,
    num_hidden_layers=16,
    num_attention_heads=16,
    num_experts=64,
    num_experts_per_tok=8,
    max_position_embeddings=4096,
)
SIZES["olmoe"] = Size(OLMOE, micro_tokens=4_096, step_tokens=32_768)
SIZES["olmoe-best"] = Size(
    OLMOE,
    micro_tokens=8_192,
    step_tokens=65_536,
    variants={
        "lmforge, no checkpointing, 8,192 tokens": ("none", 8_192),
        "lmforge, selective-ops, 16,384 tokens": ("selective-ops", 16_384),
        "lmforge, full checkpointing, 32,768 tokens": ("full", 32_768),
    },
)
# Of four layers three have the gated delta rule. Trainer's has the kernels of flash-linear-attention
# where they are installed, and lmforge's is plain torch.
HYBRID = ModelConfig(
    model_type="qwen3_5_text",
    vocab_size=50304,
    hidden_size=2048,
    intermediate_size=6144,
    num_hidden_layers=16,
    num_attention_heads=16,
    num_key_value_heads=4,
    head_dim=128,
    partial_rotary_factor=0.25,
    linear_num_key_heads=16,
    linear_num_value_heads=16,
    linear_key_head_dim=128,
    linear_value_head_dim=128,
    linear_conv_kernel_dim=4,
    tie_word_embeddings=True,
)
SIZES["hybrid-1b"] = Size(HYBRID, micro_tokens=8_192, step_tokens=65_536)
TINY = llama(512, 32, 64, 2, 4, 2, tied=True)
TINY_SIZES = {
    "tiny": Size(TINY, micro_tokens=128, step_tokens=256, length=128, checkpointing_from=128),
    "tiny-olmoe": Size(
        ModelConfig(512, 32, 2, 4, 24, model_type="olmoe", num_experts=4, num_experts_per_tok=2),
        128,
        256,
        length=128,
    ),
    "tiny-hybrid": Size(
        replace(
            HYBRID,
            vocab_size=512,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=4,
            layer_types=None,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            linear_num_key_heads=2,
            linear_num_value_heads=4,
            linear_key_head_dim=8,
            linear_value_head_dim=8,
        ),
        128,
        256,
        length=128,
    ),
    "tiny-qlora": Size(
        llama(512, 64, 128, 2, 4, 2, tied=False),
        128,
        256,
        128,
        checkpointing_from=0,
        # So large that ten steps change the loss.
        lora=LoraOptions(rank=16, alpha=256.0, base_dtype="nf4"),
    ),
    "tiny-best": Size(
        TINY,
        128,
        256,
        128,
        variants={"lmforge, selective-ops": ("selective-ops", 256)},
        published=1e9,
    ),
}


def bytes_at_rest(shape: ModelConfig, bytes_a_number: int) -> int:
    """Of weights, gradients and AdamW's two moments."""
    return 4 * bytes_a_number * parameter_count(shape).total


def what_fits(size: Size, length: int, memory_bytes: float) -> dict[str, Any]:
    """Options that all contenders share: bf16 masters (and so bf16 gradients and states) only where
    fp32 finds no room, or where a published figure had them.
    """
    fits = bytes_at_rest(size.shape, 4) <= SHARE_AT_REST * memory_bytes and size.published is None
    checkpointing = size.checkpointing_from is not None and length >= size.checkpointing_from
    return {
        "master_dtype": "fp32" if fits else "bf16",
        "activation_checkpointing": "full" if checkpointing else "none",
    }


def contest_of(
    size: Size, length: int, folder: Path, device: torch.device, chosen: argparse.Namespace
) -> Contest:
    on_gpu = device.type == "cuda"
    micro_rows = max(1, size.micro_tokens // length)
    rows = max(micro_rows, size.step_tokens // length)
    return Contest(
        shape=size.shape,
        rows=rows,
        length=length,
        threads=chosen.threads,
        dtype="bf16" if has_native_bf16(device) else "fp32",
        compiled=on_gpu,
        peak_size=0,
        folder=folder,
        device=device.type,
        accumulation=rows // micro_rows,
        lora=size.lora,
        **what_fits(
            size,
            length,
            torch.cuda.get_device_properties(device).total_memory if on_gpu else 8 * GIB,
        ),
    )


def trials_of(size: Size, contest: Contest) -> dict[str, tuple[str, Contest]]:
    """The contender and the setting of each row."""
    if contest.lora is not None:
        return {name: (name, contest) for name in (LMFORGE, LMFORGE_OPERATORS, TRAINER)}
    if size.variants is None:
        names = LMFORGE, LMFORGE_FLOAT8, PLAIN_COMPILED if contest.compiled else PLAIN, TRAINER
        # float8 has no products of experts, and is not compared for hybrids.
        in_16_bits = contest.shape.num_experts or contest.shape.family.recurrent_type
        return {
            name: (name, contest) for name in names if not (name == LMFORGE_FLOAT8 and in_16_bits)
        }
    results = {}
    for name, (checkpointing, micro_tokens) in size.variants.items():
        accumulation = contest.rows // max(1, micro_tokens // contest.length)
        results[name] = (
            LMFORGE,
            replace(contest, activation_checkpointing=checkpointing, accumulation=accumulation),
        )
    return results


def why(ended: EndedEarly) -> str:
    """A short description for a row of the table."""
    if ran_out_of_memory(ended.status, ended.said):
        return OUT_OF_MEMORY
    last = next(
        (line for line in reversed(ended.said.splitlines()) if line.strip()), "it said nothing"
    )
    return last.removeprefix("lmforge.core.errors.UserError: ").replace("|", "/")[:200]


def warmed_up(
    name: str, contest: Contest, seconds: float, limit: float
) -> tuple[Contender | None, dict[str, Any]]:
    """A contender that may run for `limit` seconds, `seconds` of them timed, and what its trial is
    so far. None: it failed.
    """
    if limit <= seconds:
        return None, {"failed": "no time was left: run it alone with --contender"}
    contender = Contender(name, contest, limit)
    with reported(contender) as trial:
        trial["warm_up_seconds"] = contender.take_turn(0.0).seconds
    return (None if "failed" in trial else contender), trial


def timed(contender: Contender, contest: Contest, seconds: float) -> dict[str, Any]:
    """The rest of its trial. Its process ends."""
    with reported(contender) as trial:
        turn = contender.take_turn(seconds)
        speed = turn.steps * contest.tokens_a_step / turn.seconds
        trial |= {"speed": speed, "memory_gib": turn.memory_gib, "loss": contender.finish()}
    contender.leave()
    return trial


@contextmanager
def reported(contender: Contender) -> Iterator[dict[str, Any]]:
    """A part of a trial, which becomes {"failed": why} where the contender ends early."""
    trial: dict[str, Any] = {}
    try:
        yield trial
    except EndedEarly as ended:
        print(ended, file=sys.stderr, flush=True)
        trial |= {"failed": why(ended)}
        contender.leave()


def hold(
    label: str, size: Size, contest: Contest, chosen: argparse.Namespace
) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """All rounds of one size: after each trial the name of its row, and its trials so far."""
    rows = {
        name: row
        for name, row in trials_of(size, contest).items()
        if name in (chosen.contender or [name])
    }
    trials: dict[str, list[dict[str, Any]]] = {name: [] for name in rows}
    names, until = tuple(rows), time.monotonic() + chosen.limit * chosen.rounds

    def start(name: str) -> tuple[Contender | None, dict[str, Any]]:
        return warmed_up(*rows[name], chosen.seconds, until - time.monotonic())

    for number in range(chosen.rounds):
        shift = number % max(1, len(names))
        left = [
            name
            for name in names[shift:] + names[:shift]
            if not any("failed" in trial for trial in trials[name])
        ]
        # At once, or each when its turn has come.
        with ThreadPoolExecutor(max(1, len(left))) as pool:
            started = list(pool.map(start, left)) if chosen.together else map(start, left)
        for name, (contender, trial) in zip(left, started, strict=True):
            if contender is not None:
                trial |= timed(contender, contest, chosen.seconds)
            trials[name].append(trial)
            say(f"{label}, round {number + 1} of {chosen.rounds}: {name}: {outcome(trial)}")
            yield name, trials[name]


def outcome(trial: dict[str, Any]) -> str:
    if "failed" in trial:
        return trial["failed"]
    return f"{trial['speed']:,.0f} tokens/s, warm after {trial['warm_up_seconds']:.0f} s"


def prediction_of(name: str, contest: Contest, device_name: str) -> Prediction | None:
    """The plan of a row; None for other programs than lmforge, for a GPU that the hardware file
    does not have, and for a model that no plan is made of.
    """
    gpu = data_sheets().find(device_name)
    if gpu is None or gpu.peak_flops(contest.dtype) is None or not name.startswith(LMFORGE):
        return None
    step_config = StepConfig(
        contest.shape,
        ParallelOptions(engine="single", activation_checkpointing=contest.activation_checkpointing),
        world_size=1,
        gpus_per_host=1,
        micro_batch_size=contest.rows // contest.accumulation,
        accumulation=contest.accumulation,
        sequence_length=contest.length,
        dtype=contest.dtype,
        master_dtype=contest.master_dtype,
        compiled=contest.compiled,
        float8=name == LMFORGE_FLOAT8,
        lora=get_lora_config(recipe_of(contest)),
    )
    with suppress(UserError):
        return predict_step(step_config, Machine(gpu, None, 1))
    return None


def figures(
    trials: list[dict[str, Any]],
    flops: float,
    peak: float | None,
    published: float | None,
    prediction: Prediction | None = None,
) -> dict[str, Any]:
    """A row of the record."""
    failed = next((trial["failed"] for trial in trials if "failed" in trial), None)
    if failed is not None:
        return {"failed": failed}
    speeds, memory_gib = (
        [trial["speed"] for trial in trials],
        [trial["memory_gib"] for trial in trials],
    )
    planned, live_gib = (
        (prediction.tokens_per_second, prediction.live_bytes / GIB) if prediction else (None, None)
    )
    return {
        "tokens_per_second": summarize(speeds),
        "mfu": summarize([speed * flops / peak for speed in speeds]) if peak else None,
        "of_the_published": (
            summarize([speed / published for speed in speeds]) if published else None
        ),
        "memory_gib": max(memory_gib),
        "predicted": {"tokens_per_second": planned, "live_gib": live_gib} if prediction else None,
        "predicted_of_speed": summarize([planned / speed for speed in speeds]) if planned else None,
        "predicted_of_memory": (
            summarize([live_gib / gib for gib in memory_gib]) if live_gib else None
        ),
        "loss_of_first_steps": trials[0]["loss"],
    }


def compare(rows: dict[str, dict[str, Any]]) -> None:
    """Add to each row how much faster lmforge is within a round, also for rows that are measured
    later.
    """
    ours = rows.get(LMFORGE, {}).get("tokens_per_second")
    for row in rows.values():
        if "failed" not in row:
            pairs = (
                zip(ours["rounds"], row["tokens_per_second"]["rounds"], strict=False)
                if ours
                else []
            )
            ratios = [mine / theirs for mine, theirs in pairs]
            row["lmforge_is_faster_by"] = summarize(ratios) if ratios else None


class Record:
    """What was measured on one GPU, in a file that each row is written to, beside a table for
    people.
    """

    def __init__(self, folder: Path | None, device: str) -> None:
        self.path = folder / f"gpu-{word(device)}.json" if folder else None
        self.content: dict[str, Any] = {
            "benchmark": "gpu",
            "device": device,
            "convention": FLOPS_CONVENTION,
            "cells": {},
        }
        if self.path is not None and self.path.exists():
            self.content = json.loads(self.path.read_text(encoding="utf-8"))

    def cell(self, label: str, **about: Any) -> dict[str, Any]:
        """The cell of a size; rows that it has are kept, for a later call may measure another
        contender.
        """
        before = self.content["cells"].get(label, {"contenders": {}})
        self.content["cells"][label] = {**before, **about}
        return self.content["cells"][label]["contenders"]

    def write(self) -> None:
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            atomic_write_json(self.path, self.content)
            atomic_write_text(self.path.with_suffix(".md"), table(self.content) + "\n")


COLUMNS = {
    "tokens_per_second": ("tokens/s", "{:,.0f}"),
    "mfu": ("MFU", "{:.1%}"),
    "lmforge_is_faster_by": ("lmforge in bf16 ÷ it", "{:.2f}"),
    "of_the_published": ("÷ published", "{:.2f}"),
    "predicted_of_speed": ("predicted tokens/s ÷ it", "{:.2f}"),
    "predicted_of_memory": ("predicted GiB ÷ it", "{:.2f}"),
}


def table(record: dict[str, Any]) -> str:
    """The record, to be read by people."""
    lines = ["# Training on one GPU, side by side", "", f"- {record['device']}"]
    lines += ["- each trial is a process of its own; median (low–high), ratios in a round"]
    lines += [f"- MFU: {FLOPS_CONVENTION}; of the bf16 peak of the data sheet, float8 too"]
    for label, cell in record["cells"].items():
        lines += ["", f"## {label}: {cell['what']}", "", *machine_lines(cell["machine"])]
        if cell["published"]:
            lines.append(
                f"- published, on {cell.get('published_on', 'one H200')}: {cell['published']:,.0f}"
                " tokens/s"
            )
        titles = [title for title, _ in COLUMNS.values()]
        lines += [
            "",
            f"| contender | {' | '.join((*titles, 'GiB', 'loss, steps 1–10'))} |",
            "|---" * (len(titles) + 3) + "|",
        ]
        for name, row in cell["contenders"].items():
            if "failed" in row:
                lines.append(f"| {name} | {row['failed']} |{' |' * (len(titles) + 1)}")
                continue
            cells = [_of_rounds(row.get(what), form) for what, (_, form) in COLUMNS.items()]
            cells += [f"{row['memory_gib']:.1f}", f"{row['loss_of_first_steps']:.3f}"]
            lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _of_rounds(row: dict[str, Any] | None, form: str) -> str:
    if row is None:
        return ""
    spread = (
        f" ({form.format(row['min'])}–{form.format(row['max'])})" if len(row["rounds"]) > 1 else ""
    )
    return form.format(row["median"]) + spread


def say(line: str) -> None:
    print(line, flush=True)


def describe(contest: Contest) -> str:
    """A description of the cell: what is trained, in which batches, and how it fits in memory."""
    state_bytes = bytes_at_rest(contest.shape, 4 if contest.master_dtype == "fp32" else 2) / GIB
    at_rest = f" ({state_bytes:.1f} GiB at rest)"
    if (lora := contest.lora) is not None:
        at_rest = (
            f", adapters of rank {lora.rank} on {', '.join(lora.target_modules)} beside"
            f" {lora.base_dtype}"
        )
    again = ", activations computed again" if contest.activation_checkpointing != "none" else ""
    return (
        f"{parameter_count(contest.shape).total:,} parameters, {contest.rows} × {contest.length}"
        f" tokens per step in {contest.accumulation} micro-batches, {contest.dtype}, masters"
        f" {contest.master_dtype}{at_rest}{again}"
    )


def arguments(on_gpu: bool) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    sizes, first = (SIZES, list(SIZES)) if on_gpu else (TINY_SIZES, ["tiny"])
    parser.add_argument(
        "--only",
        action="append",
        choices=list(sizes),
        help="this size only; may be given several times",
    )
    parser.add_argument(
        "--contender",
        action="append",
        metavar="ROW",
        help="this row only, beside those that the file has",
    )
    parser.add_argument(
        "--length", type=int, help="tokens of a sequence (default: 2048; of 8b 4096)"
    )
    parser.add_argument(
        "--rounds", type=int, default=1, help="trials of each contender (default: 1)"
    )
    parser.add_argument(
        "--seconds", type=float, default=10.0, help="time that is measured in a trial (default: 10)"
    )
    parser.add_argument(
        "--limit",
        type=float,
        default=SECONDS_A_SIZE,
        help=(
            "seconds that a round of one size may take; later trials are marked (default:"
            f" {SECONDS_A_SIZE:g})"
        ),
    )
    parser.add_argument(
        "--together",
        action="store_true",
        help="all start and compile at once and are timed in turn, where memory has room",
    )
    add_threads(parser)
    parser.add_argument(
        "--out",
        type=Path,
        default=RESULTS if on_gpu else None,
        help="folder of the result (default: benchmarks/results)",
    )
    chosen = parser.parse_args()
    if chosen.rounds < 1 or chosen.threads < 1 or chosen.limit <= 0 or (chosen.length or 1) < 1:
        parser.error("--rounds, --threads, --length: at least 1; --limit: more than 0")
    chosen.only = chosen.only or first
    if chosen.contender:
        folder, device = Path(), torch.device("cuda" if on_gpu else "cpu")
        known = {
            row
            for size in chosen.only
            for row in trials_of(sizes[size], contest_of(sizes[size], 128, folder, device, chosen))
        }
        if unknown := sorted(set(chosen.contender) - known):
            parser.error(
                f"--contender {unknown[0]}: no such row; there are {', '.join(sorted(known))}"
            )
    return chosen


def main() -> int:
    on_gpu = torch.cuda.is_available()
    chosen, environment = arguments(on_gpu), machine()
    device = torch.device("cuda", 0) if on_gpu else torch.device("cpu")
    if not on_gpu:
        say(
            "no GPU that torch can use: a tiny shape on the CPU, uncompiled, to see that this works"
        )
        torch.set_num_threads(chosen.threads)
    record = Record(chosen.out, torch.cuda.get_device_name(device) if on_gpu else "no GPU")
    with tempfile.TemporaryDirectory(prefix="gpu-") as name:
        folder = Path(name)
        tokens_of_stdlib(folder, files=None if on_gpu else 20, vocab_size=4096 if on_gpu else 512)
        for each in chosen.only:
            size = (SIZES if on_gpu else TINY_SIZES)[each]
            length = chosen.length or size.length
            label = each if length == size.length else f"{each}-{length}"
            contest = contest_of(size, length, folder, device, chosen)
            flops = training_flops_per_token(recipe_of(contest), contest.shape, length)
            peak = rank_peak_flops(
                DistributedContext(RankInfo(), device, None),
                torch.bfloat16 if contest.dtype == "bf16" else torch.float32,
            )
            say(f"{label}: {describe(contest)}")
            rows = record.cell(
                label,
                what=describe(contest),
                machine=environment,
                shape=to_config_json(contest.shape),
                flops_per_token=flops,
                peak_flops=peak,
                published=size.published,
                published_on=size.published_on,
                warm_up_steps=WARM_UP_STEPS,
                seconds=chosen.seconds,
            )
            settings = trials_of(size, contest)
            for row, trials in hold(label, size, contest, chosen):
                planned = prediction_of(*settings[row], record.content["device"])
                result = figures(trials, flops, peak, size.published, planned)
                rows[row] = {**result, "git_commit": environment["git_commit"]}
                compare(rows)
                record.write()
    say(f"\n{table(record.content)}\n")
    say(
        f"written to {record.path}"
        if record.path
        else "nothing was recorded: results are of a GPU; --out FOLDER records them"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
