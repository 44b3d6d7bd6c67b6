"""A contest of lmforge's model of some kind, the same model under transformers' Trainer, and
lmforge's dense model beside it: mixture_cpu.py and hybrid_cpu.py. They take turns, as in
train_cpu.py.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from contender_process import Contender
from contenders import LMFORGE, LMFORGE_DENSE, TRAINER, Contest
from setting import summarize

from lmforge.core.model.config import ModelConfig


def speeds_of(
    contest: Contest,
    dense: ModelConfig,
    rounds: int,
    seconds: float,
    name_of_ours: str,
    goals: Mapping[str, float],
) -> dict[str, Any]:
    """Let all take `rounds` turns of `seconds`; the figures of the contest's dtype.

    name_of_ours: of lmforge's model of the contest, in the result. goals: of its speed, as a
    multiple of another's.
    """
    contests = {LMFORGE: contest, TRAINER: contest, LMFORGE_DENSE: replace(contest, shape=dense)}
    contenders: list[Contender] = []
    try:
        contenders += [Contender(name, each) for name, each in contests.items()]
        for contender in contenders:
            say(
                f"{contest.dtype}: {contender.name} is warm after"
                f" {contender.take_turn(0.0).seconds:.0f} s"
            )
        speeds: dict[str, list[float]] = {name: [] for name in contests}
        for number in range(rounds):
            shift = number % len(contenders)
            for contender in contenders[shift:] + contenders[:shift]:
                turn = contender.take_turn(seconds)
                speeds[contender.name].append(turn.steps * contest.tokens_a_step / turn.seconds)
            done = ", ".join(f"{name} {of_name[-1]:,.0f}" for name, of_name in speeds.items())
            say(f"{contest.dtype}: round {number + 1} of {rounds}: {done} tokens/s")
        losses = {contender.name: contender.finish() for contender in contenders}
    finally:
        for contender in contenders:
            contender.leave()
    return {
        name_of_ours if name == LMFORGE else name: {
            "tokens_per_second": summarize(of_name),
            "ours_is_faster_by": summarize(
                [mine / its for mine, its in zip(speeds[LMFORGE], of_name, strict=True)]
            ),
            "goal": goals.get(name),
            "loss_of_first_steps": losses[name],
        }
        for name, of_name in speeds.items()
    }


def speed_lines(dtypes: Mapping[str, Any], kind: str) -> list[str]:
    """The figures of `speeds_of` by dtype as tables, of a model of this kind."""
    lines = []
    for dtype, rows in dtypes.items():
        lines += [
            "",
            f"## {dtype}",
            "",
            f"| | tokens/s | {kind} ÷ it | goal | loss, steps 1–10 |",
            "|---|---|---|---|---|",
        ]
        for name, row in rows.items():
            speed = row["tokens_per_second"]
            ratio = row["ours_is_faster_by"]
            lines.append(
                f"| {name} | {speed['median']:,.0f} ({speed['min']:,.0f}–{speed['max']:,.0f}) |"
                f" {ratio['median']:.2f} ({ratio['min']:.2f}–{ratio['max']:.2f}) |"
                f" {row['goal'] or ''} | {row['loss_of_first_steps']:.3f} |"
            )
    return lines


def say(line: str) -> None:
    print(line, flush=True)
