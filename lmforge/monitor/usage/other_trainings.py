"""Other trainings of lmforge on this machine, with which a run shares the cores."""

import itertools
import os
from contextlib import suppress
from pathlib import Path

from lmforge.cluster.processes import read_process_stat
from lmforge.config.load import STAGES

# Pipelines and the quickstart train in their own process, or start ranks.
TRAINING_VERBS = {*STAGES, "quickstart", "run"}


def other_trainings() -> list[int]:
    """Process ids of other trainings; of each the first process, which is the launcher of its ranks. Empty where the system has
    no /proc."""
    parents = {}
    for folder in Path("/proc").glob("[0-9]*"):
        process = int(folder.name)
        with suppress(OSError):  # it has ended
            words = (folder / "cmdline").read_bytes().split(b"\0")
            is_training = _is_training([os.path.basename(word).decode(errors="replace") for word in words])
            if is_training and (stat := read_process_stat(process)):
                parents[process] = stat.parent

    def first(process: int) -> int:
        while parents.get(process) in parents:
            process = parents[process]
        return process

    own = first(os.getpid())
    return sorted({first(process) for process in parents} - {own})


def _is_training(words: list[str]) -> bool:
    """Whether this is the command line, folders left out, of `python … lmforge pretrain …` or of another verb that trains."""
    follows = itertools.pairwise(words)
    return words[0].startswith("python") and any(one == "lmforge" and other in TRAINING_VERBS for one, other in follows)
