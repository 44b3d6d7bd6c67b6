"""Run in every rank: several whole runs, one after another, in one set of processes.

    several_runs.py CASES.json     a list of command lines of verbs that train; those without a verb
                                   are of pretrain

Starting ranks costs more than a tiny run, so that many cases share one start.
"""

import gc
import json
import sys
from pathlib import Path

from lmforge.core import run as stages
from lmforge.core.options.load import STAGES, parse_config

if __name__ == "__main__":
    standard = sys.stdout, sys.stderr
    for words in json.loads(Path(sys.argv[1]).read_text()):
        verb, rest = ("pretrain", words) if words[0].startswith("-") else (words[0], words[1:])
        gc.freeze()  # what is there already, modules above all, need not be looked through at each run
        status = stages.run_stage(parse_config(STAGES[verb], rest))
        sys.stdout, sys.stderr = standard
        assert status == 0, f"{words}: status {status}"
