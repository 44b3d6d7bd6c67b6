"""Run by torch's launcher in every rank: several whole pretraining runs, one after another, in one set of processes.

    several_runs.py CASES.json     a list of command lines of `lmforge pretrain`, without the verb

Starting ranks costs more than a tiny run, so that many cases share one start.
"""

import json
import sys
from pathlib import Path

from lmforge.cli import leave, load_config
from lmforge.train.stages import pretrain

if __name__ == "__main__":
    standard = sys.stdout, sys.stderr
    for words in json.loads(Path(sys.argv[1]).read_text()):
        status = pretrain(load_config(words))
        sys.stdout, sys.stderr = standard
        assert status == 0, f"{words}: status {status}"
    leave(0)
