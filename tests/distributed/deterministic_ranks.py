"""Run in every rank: pretraining runs whose ranks record torch's settings while they train.

deterministic_ranks.py FOLDER CASES.json     a list of command lines of `lmforge pretrain`, without
                                             the verb
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

from lmforge.core import loop
from lmforge.core.options.load import parse_config
from lmforge.core.options.stage import PretrainConfig
from lmforge.core.run import run_stage
from lmforge.core.steps.determinism import REQUIRED_ENVIRONMENT

if __name__ == "__main__":
    standard, step = (sys.stdout, sys.stderr), loop.train_step
    for words in json.loads(Path(sys.argv[2]).read_text()):
        config = parse_config(PretrainConfig, words)

        def watched(*arguments: Any, name: str = config.run.name, **options: Any) -> Any:
            settings = {
                "algorithms": torch.are_deterministic_algorithms_enabled(),
                "warn_only": torch.is_deterministic_algorithms_warn_only_enabled(),
                "cudnn": torch.backends.cudnn.deterministic and not torch.backends.cudnn.benchmark,
                "environment": {variable: os.environ.get(variable) for variable in REQUIRED_ENVIRONMENT},
            }
            Path(sys.argv[1], f"{name}-{os.environ['RANK']}.json").write_text(json.dumps(settings))
            return step(*arguments, **options)

        loop.train_step = watched  # type: ignore[assignment]
        assert run_stage(config) == 0
        sys.stdout, sys.stderr = standard
