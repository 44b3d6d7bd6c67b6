"""The tables in a run's folder `completions`: prompts, completions and rewards, one file for each set and rank."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lmforge.config.align import RolloutOptions
from lmforge.data.sources.records import read_records
from lmforge.errors import UserError

FOLDER = "completions"


def completions_table_name(set_index: int) -> str:
    """The name of the table of a set, without its rank."""
    return f"set-{set_index:06d}"


def is_logged(set_index: int, options: RolloutOptions) -> bool:
    """Whether the completions of a set are written."""
    return set_index % options.log_completions_every == 0


def write_completions(path: Path, records: Sequence[dict[str, Any]]) -> None:
    """Write a table, one JSON object a line."""
    path.parent.mkdir(exist_ok=True)
    with open(path, "w", encoding="utf-8") as file:
        file.writelines(json.dumps(record, ensure_ascii=False) + "\n" for record in records)


def locate_completions(batch_index: int, options: RolloutOptions, world_size: int) -> dict[str, Any]:
    """Where the completions of a batch are, for the file of a bad step.

    {"answers": pattern of their files, relative to the run, or None where they were not written; "ranks": the number of
    ranks; "part": which part of each file the batch is, from 0, and of how many}.
    """
    set_index, iteration = divmod(batch_index, options.num_iterations)
    files = f"{FOLDER}/{completions_table_name(set_index)}-rank-*.jsonl" if is_logged(set_index, options) else None
    return {"answers": files, "ranks": world_size, "part": [iteration, options.num_iterations]}


def read_completions(run_folder: Path, location: dict[str, Any]) -> list[dict[str, Any]]:
    """The records that `locate_completions` has located, rank by rank. Raises UserError where there are none."""
    if location["answers"] is None:
        raise UserError(
            f"{run_folder}: the completions of this step were not written; --rollout.log_completions_every 1 writes those of"
            " every step"
        )
    part, parts = location["part"]
    records: list[dict[str, Any]] = []
    for rank in range(location["ranks"]):  # files of higher ranks are another attempt's
        path = run_folder / location["answers"].replace("*", str(rank))
        if not path.exists():
            continue  # on the disk of another host
        table = [record for _, record in read_records(path)]
        size = len(table) // parts
        records += table[part * size : (part + 1) * size]
    if not records:
        raise UserError(f"{run_folder / location['answers']}: no such files, so the completions of this step cannot be shown")
    return records
