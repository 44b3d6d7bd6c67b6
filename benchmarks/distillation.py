"""What is lost where 64 tokens of a teacher are stored instead of all: loss and gradient, of
likeliest and of drawn tokens.

A tokenizer, a small teacher and a smaller student are trained on the standard library's text. Both
score held-out tokens, at temperatures that make the teacher surer. The draws with replacement are
those of arXiv 2503.16870, as a reference.
"""

import argparse
import statistics
import sys
import tempfile
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from setting import benchmark_parser, machine, machine_lines, tokens_of_stdlib, train_run, write_result
from torch import Tensor

from lmforge.core.data.batch import Batch, Extras
from lmforge.core.data.order import token_rng_keys
from lmforge.core.data.shards.folder import TokenFolder
from lmforge.core.losses.top_logprobs import top_log_probs
from lmforge.core.model.layers import LanguageModel
from lmforge.post.distillation.stored import record_dtype
from lmforge.post.objectives.distillation import DistillationConfig, DistillationObjective, TeacherHead
from lmforge.serve.decoding.model_loading import load_model

KEPT, LENGTH, HEAD_DIM = 64, 128, 16
TEMPERATURES = (1.0, 0.5, 0.25)
GOAL_DIFFERENCE, GOAL_BYTES = 0.01, 0.02
KINDS = ("likeliest", "drawn", "drawn with replacement")


def train(folder: Path, name: str, width: int, steps: int) -> LanguageModel:
    """A model of two layers of this width, after these steps of 1,024 tokens."""
    heads = width // HEAD_DIM
    words = ["--data.folder", folder / "tokens", "--data.sequence_length", LENGTH, "--train.steps", steps]
    words += ["--train.global_batch_size", 8, "--train.dtype", "fp32", "--train.device", "cpu", "--train.compile", "off"]
    words += ["--train.threads", 1, "--optimizer.lr", 4e-3, "--schedule.name", "linear", "--schedule.warmup_steps", 1]
    words += ["--model.preset", "nano", "--model.hidden_size", width, "--model.num_hidden_layers", 2]
    words += ["--model.intermediate_size", 3 * width, "--model.num_attention_heads", heads, "--model.head_dim", HEAD_DIM]
    words += ["--model.num_key_value_heads", heads, "--model.initializer_range", 0.05, "--validation.sequences", 64]
    words += ["--model.embedding_initializer_range", 1.0, "--sample.every_steps", "none", "--validation.every_steps", "none"]
    train_run(folder, name, "val/loss", "pretrain", *words)
    return load_model(folder / name, torch.device("cpu"), torch.float32).model


def read_batch(folder: Path, tokens: int) -> Batch:
    """Held-out tokens, in sequences of LENGTH, all scored."""
    ids = torch.from_numpy(TokenFolder.open(folder).split("validation").read(0, tokens + 1).astype("int64"))
    inputs, labels = (each.reshape(-1, LENGTH) for each in (ids[:-1], ids[1:]))
    return Batch(inputs, labels, torch.arange(LENGTH).expand_as(inputs).contiguous(), torch.zeros_like(inputs).int())


class Comparison:
    """Teacher and student on one batch, at one temperature."""

    def __init__(
        self, teacher: LanguageModel, student: LanguageModel, batch: Batch, vocab_size: int, temperature: float
    ) -> None:
        self.teacher, self.student, self.batch = teacher, student, batch
        self.config = DistillationConfig(0.0, temperature, 1.0, vocab_size)
        with torch.no_grad():
            self.hidden = teacher(batch.tokens, batch.positions, batch.document_ids)

    def _score(self, extras: Extras, head: TeacherHead | None = None, sampled: bool = False) -> tuple[float, Tensor]:
        """The divergence of a token in nats, and the student's gradient as one vector."""
        objective = DistillationObjective(replace(self.config, sampled=sampled))
        objective.teacher_head = head
        total, _ = objective.loss(self.student, Batch(**self.batch.tensors, extras=extras))
        gradient = torch.autograd.grad(total, list(self.student.parameters()))
        return total.item() / self.batch.labels.numel(), torch.cat([each.flatten() for each in gradient])

    @cached_property
    def whole(self) -> tuple[float, Tensor]:
        return self._score(Extras(teacher_hidden=self.hidden), TeacherHead(self.teacher.lm_head.weight.detach()))

    def stored(self, kind: str, draw: int) -> tuple[float, Tensor, float]:
        """From what lmforge stores, and what the likeliest tokens weigh."""
        sampled = kind != KINDS[0]
        if kind == KINDS[2]:
            extras, excess = self._draw_with_replacement(draw)
            loss, gradient = self._score(extras, sampled=True)
            return loss - excess, gradient, 0.0
        keys = torch.from_numpy(token_rng_keys(draw, 0, *self.batch.tokens.shape)) if sampled else None
        temperature, vocab_size = self.config.temperature, self.config.vocab_size
        read = partial(top_log_probs, k=KEPT, temperature=temperature, vocab_size=vocab_size, rng_keys=keys)
        ids, values = self.teacher.lm_head(self.hidden, read)
        mass = 0.0 if sampled else 1 - values[..., -1].exp().mean().item()
        return *self._score(Extras(teacher_ids=ids.float(), teacher_logprobs=values), sampled=sampled), mass

    @torch.no_grad()
    def _draw_with_replacement(self, seed: int) -> tuple[Extras, float]:
        """KEPT draws from the teacher itself: a token counts as the fraction of draws that it has.

        And by how much the divergence from these fractions is too large.
        """
        generator = torch.Generator().manual_seed(seed)
        logits = self.teacher.lm_head(self.hidden)[..., : self.config.vocab_size].flatten(0, 1)
        logprobs = (logits / self.config.temperature).log_softmax(-1)
        ids = torch.multinomial(logprobs.exp(), KEPT, replacement=True, generator=generator)
        fractions = ((ids.unsqueeze(1) == ids.unsqueeze(2)).sum(-1) / KEPT).log()
        excess = (fractions - logprobs.gather(1, ids)).mean().item()
        values = torch.cat([fractions, torch.full((len(ids), 1), -700.0)], 1)
        shape = (*self.hidden.shape[:2], -1)
        return Extras(teacher_ids=ids.float().view(shape), teacher_logprobs=values.view(shape)), excess


def measure(comparison: Comparison, kind: str, draws: int) -> dict[str, Any]:
    """Of what is stored in one way: the loss relative to that from the whole teacher, the
    gradient's error and cosine.
    """
    expected, direction = comparison.whole
    losses, gradients, masses = zip(*(comparison.stored(kind, draw) for draw in range(draws)), strict=True)
    norm = direction.norm()
    return {
        "temperature": comparison.config.temperature,
        "kind": kind,
        "whole": expected,
        "losses": losses,
        "difference": statistics.fmean(losses) / expected - 1,
        "standard_deviation": statistics.stdev(losses) / expected if draws > 1 else None,
        "gradient_error": ((gradients[0] - direction).norm() / norm).item(),
        "gradient_error_of_mean": ((torch.stack(gradients).mean(0) - direction).norm() / norm).item(),
        "cosine": torch.cosine_similarity(gradients[0], direction, dim=0).item(),
        "mass": masses[0] or None,
    }


def table(record: dict[str, Any]) -> str:
    """The record, to be read by people."""
    setting = record["setting"]
    teacher, student = (
        f"width {setting[f'{name}_width']}, {setting[f'{name}_steps']} steps" for name in ("teacher", "student")
    )
    size = f"{setting['bytes']} bytes of each place, {setting['bytes_ratio']:.2%} of fp32 logits (goal: {GOAL_BYTES:.0%})"
    lines = ["# Stored tokens of a teacher", "", *machine_lines(record["machine"])]
    lines += [f"- {setting['ids']:,} ids of the standard library; teacher of {teacher}; student of {student}"]
    lines += [f"- {setting['tokens']:,} held-out tokens; forward KL divergence; {KEPT} stored tokens take {size}"]
    lines += [f"- difference: loss, mean of {setting['draws']} draws, ÷ that from the whole teacher − 1, ± standard deviation"]
    lines += [f"  of one draw (goal of the likeliest: {GOAL_DIFFERENCE:.0%})"]
    lines += ["- gradient error: ‖stored − whole‖ ÷ ‖whole‖ of all parameters, of one draw and of the draws' mean", ""]
    lines += ["| temperature | stored | likeliest weigh | loss, nats | difference | gradient error | of the mean | cosine |"]
    lines += ["|---|---|---|---|---|---|---|---|"]
    for row in record["rows"]:
        deviation = "" if row["standard_deviation"] is None else f" ± {row['standard_deviation']:.2%}"
        cells = [f"{row['temperature']:g}", row["kind"], "" if row["mass"] is None else f"{row['mass']:.3f}"]
        cells += [f"{row['whole']:.3f}", f"{row['difference']:+.2%}{deviation}", f"{row['gradient_error']:.3f}"]
        cells += [f"{row['gradient_error_of_mean']:.3f}", f"{row['cosine']:.4f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def run(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    environment = machine()
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "tokens").exists():
        tokens_of_stdlib(folder, files=options.files, vocab_size=options.ids)
    teacher = train(folder, "teacher", options.teacher_width, options.teacher_steps)
    student = train(folder, "student", options.student_width, options.student_steps)
    ids = TokenFolder.open(folder / "tokens").tokenizer.vocab_size
    size = record_dtype(KEPT).itemsize
    setting = {name: getattr(options, name) for name in ("teacher_width", "teacher_steps", "student_width", "student_steps")}
    setting |= {"ids": ids, "tokens": options.tokens, "draws": options.rounds, "bytes": size, "bytes_ratio": size / (4 * ids)}
    batch, rows = read_batch(folder / "tokens", options.tokens), []
    for temperature in TEMPERATURES:
        comparison = Comparison(teacher, student, batch, ids, temperature)
        rows += [measure(comparison, kind, 1 if kind == KINDS[0] else options.rounds) for kind in KINDS]
    return {"benchmark": "distillation", "machine": environment, "setting": setting, "rows": rows}


def main() -> int:
    parser = benchmark_parser(__doc__ or "", 8, "draws")
    parser.add_argument("--ids", type=int, default=32_000, help="of the tokenizer (default: 32,000)")
    parser.add_argument("--files", type=int, help="modules of the standard library (default: all)")
    parser.add_argument("--teacher_width", type=int, default=128)
    parser.add_argument("--teacher_steps", type=int, default=300, help="of 1,024 tokens")
    parser.add_argument("--student_width", type=int, default=64)
    parser.add_argument("--student_steps", type=int, default=100)
    parser.add_argument("--tokens", type=int, default=2_048, help="to score (default: 2,048)")
    parser.add_argument("--folder", type=Path, help="keep data and models here, and go on with those that are here already")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="distillation-") as name:
        record = run(options.folder or Path(name), options)
    print(table(record))
    print(f"\n{write_result('distillation', record, table(record), options.out)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
