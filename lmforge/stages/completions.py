"""The tables in a run's folder `completions`: what was asked, answered and earned, a file a set of answers and rank."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lmforge.config.align import RolloutOptions
from lmforge.errors import UserError

FOLDER = "completions"


def completions_table_name(set_index: int) -> str:
    """What the table of a set is called, before its rank."""
    return f"set-{set_index:06d}"


def is_logged(set_index: int, options: RolloutOptions) -> bool:
    """Whether the text of a set is written for people."""
    return set_index % options.log_completions_every == 0


def write_completions(path: Path, records: Sequence[dict[str, Any]]) -> None:
    """A file of what was asked, answered and earned."""
    path.parent.mkdir(exist_ok=True)
    with open(path, "w", encoding="utf-8") as file:
        file.writelines(json.dumps(line, ensure_ascii=False) + "\n" for line in records)


def locate_completions(batch_index: int, options: RolloutOptions, world_size: int) -> dict[str, Any]:
    """Where the answers of a batch are, for the file of a bad step: {"answers": their files, below the run, or None where they
    were not written; "ranks": of how many; "part": which part of each file the batch is, from 0, and of how many}."""
    number, update = divmod(batch_index, options.num_iterations)
    files = f"{FOLDER}/{completions_table_name(number)}-rank-*.jsonl" if is_logged(number, options) else None
    return {"answers": files, "ranks": world_size, "part": [update, options.num_iterations]}


def read_completions(run_folder: Path, location: dict[str, Any]) -> list[dict[str, Any]]:
    """The lines of the tables that `place_of` has named, rank by rank. Raises UserError where there are none."""
    if location["answers"] is None:
        raise UserError(
            f"{run_folder}: the answers of this step were not written; --rollout.log_completions_every 1 writes those of every step"
        )
    part, parts = location["part"]
    lines: list[dict[str, Any]] = []
    for rank in range(location["ranks"]):  # others of that name are another attempt's, on more of them
        path = run_folder / location["answers"].replace("*", str(rank))
        try:
            table = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        except FileNotFoundError:
            continue  # on the disk of another host
        except (OSError, ValueError) as problem:
            raise UserError(f"{path}: cannot be read: {problem}") from None
        share = len(table) // parts
        lines += table[part * share : (part + 1) * share]
    if not lines:
        raise UserError(f"{run_folder / location['answers']}: not there, so the answers of this step cannot be shown")
    return lines
