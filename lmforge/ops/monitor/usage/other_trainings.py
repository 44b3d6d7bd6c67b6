"""Other trainings of lmforge on this machine, with which a run shares the cores."""

import itertools
import os

import psutil

from lmforge.core.options.load import STAGES
from lmforge.core.stages.observer import ObservedRun, Observer

# Pipelines and the quickstart train in their own process, or start ranks.
TRAINING_VERBS = {*STAGES, "quickstart", "run"}


def other_trainings() -> list[int]:
    """Process ids of other trainings; of each the first process, which is the launcher of its
    ranks.
    """
    processes = psutil.process_iter(["cmdline", "ppid"])
    parents = {each.pid: each.info["ppid"] for each in processes if _is_training(each.info["cmdline"] or [""])}

    def first(process: int) -> int:
        while parents.get(process) in parents:
            process = parents[process]
        return process

    own = first(os.getpid())
    return sorted({first(process) for process in parents} - {own})


def _is_training(command: list[str]) -> bool:
    """Whether this is the command line, folders left out, of `python … lmforge pretrain …` or of
    another verb that trains.
    """
    words = [os.path.basename(word) for word in command]
    follows = itertools.pairwise(words)
    return words[0].startswith("python") and any(one == "lmforge" and other in TRAINING_VERBS for one, other in follows)


class SharedCores(Observer):
    """Says at the start of a run on CPUs which other trainings use its cores."""

    def __init__(self, run: ObservedRun) -> None:
        super().__init__(run)
        if run.ctx.dist_ctx.device.type != "cuda" and (others := other_trainings()):
            processes = ", ".join(map(str, others))
            run.ctx.console.info(f"shared     other trainings use these cores too, so each is slower: process {processes}")
