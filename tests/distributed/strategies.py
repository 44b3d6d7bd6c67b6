"""Run in every rank: trials of strategies, one after another, in one set of processes.

    strategies.py FOLDER SEED [dropout | lora]

With a word, of models with dropout, or with low-rank adapters, and fewer of them. Writes FOLDER/NAME.json of each trial (what
it measured and how far it is from one process) from the first rank, and FOLDER/NAME-RANK.json of the memory each rank held.
"""

import json
import sys
from dataclasses import asdict, replace
from pathlib import Path

import torch

from lmforge.bench.parity import ParityData, relative_differences, run_case, run_single
from lmforge.cluster import distributed as cluster
from lmforge.parallel.precision import missing_for_compile
from tests.distributed.shapes import SHAPES, chosen_cases, dropout_cases, lora_cases, shapes_on

CHOICES = {"dropout": dropout_cases, "lora": lora_cases}

if __name__ == "__main__":
    folder, seed = Path(sys.argv[1]), int(sys.argv[2])
    ranks = cluster.init_distributed("cpu", threads=1)
    word = (sys.argv[3:] or [""])[0]
    task = ParityData(sequences=4 * ranks.world_size, sequence_length=48, seed=seed, steps=6 if word else 10)
    for shape in shapes_on(ranks.world_size):
        chosen = CHOICES.get(word, chosen_cases)(shape, ranks.world_size)
        if not chosen:
            continue
        reference = run_single(replace(chosen[0], shape=SHAPES[shape]), task, ranks) if ranks.is_rank0 else None
        for case in chosen:
            if case.compile_model and missing_for_compile(ranks.device):
                continue  # its tests are skipped
            outcome = run_case(replace(case, shape=SHAPES[shape]), task, ranks)
            name = f"{shape} {case.name}"
            (folder / f"{name}-{ranks.rank_info.rank}.json").write_text(json.dumps(outcome.memory_bytes))
            if reference is not None:
                told = {
                    "strategy": asdict(case.strategy),
                    "losses": outcome.losses,
                    "collectives": outcome.collective_counts,
                    **relative_differences(outcome, reference),
                }
                (folder / f"{name}.json").write_text(json.dumps({**told, "reference": reference.losses}))
            torch.compiler.reset()
    cluster.destroy_distributed()
