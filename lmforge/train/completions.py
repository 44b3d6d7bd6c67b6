"""The tables in a run's folder `completions`: what was asked, answered and earned, a file a set of answers and rank."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lmforge.config_post import RolloutOptions
from lmforge.errors import Mistake

FOLDER = "completions"


def set_name(number: int) -> str:
    """What the table of a set is called, before its rank."""
    return f"set-{number:06d}"


def is_written(number: int, options: RolloutOptions) -> bool:
    """Whether the text of a set is written for people."""
    return number % options.table_every == 0


def write_table(path: Path, lines: Sequence[dict[str, Any]]) -> None:
    """A file of what was asked, answered and earned."""
    path.parent.mkdir(exist_ok=True)
    with open(path, "w", encoding="utf-8") as file:
        file.writelines(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)


def place_of(batch: int, options: RolloutOptions, ranks: int) -> dict[str, Any]:
    """Where the answers of a batch are, for the file of a bad step: {"answers": their files, below the run, or None where they
    were not written; "ranks": of how many; "part": which part of each file the batch is, from 0, and of how many}."""
    number, update = divmod(batch, options.updates)
    files = f"{FOLDER}/{set_name(number)}-rank-*.jsonl" if is_written(number, options) else None
    return {"answers": files, "ranks": ranks, "part": [update, options.updates]}


def answers_at(run: Path, place: dict[str, Any]) -> list[dict[str, Any]]:
    """The lines of the tables that `place_of` has named, rank by rank. Raises Mistake where there are none."""
    if place["answers"] is None:
        raise Mistake(f"{run}: the answers of this step were not written; --rollout.table_every 1 writes those of every step")
    part, parts = place["part"]
    lines: list[dict[str, Any]] = []
    for rank in range(place["ranks"]):  # others of that name are another attempt's, on more of them
        path = run / place["answers"].replace("*", str(rank))
        try:
            table = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        except FileNotFoundError:
            continue  # on the disk of another host
        except (OSError, ValueError) as problem:
            raise Mistake(f"{path}: cannot be read: {problem}") from None
        share = len(table) // parts
        lines += table[part * share : (part + 1) * share]
    if not lines:
        raise Mistake(f"{run / place['answers']}: not there, so the answers of this step cannot be shown")
    return lines
