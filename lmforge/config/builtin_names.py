"""The built-in names, and the implementation of each, which is imported when it is first used. This module does not import
torch. The names are registered as those of plugins are, with `registry.register`. docs/extending.md lists the kinds and the
arguments of an implementation.
"""

from pathlib import Path
from pkgutil import iter_modules
from typing import Any

from lmforge import registry
from lmforge.registry import BUILT_IN, register

__all__ = ["register"]

# fmt: off
# Suffixes of files, without the dot. Which unit reads which of them is in data/sources/text_sources.py.
TEXT = (
    "txt text md markdown rst adoc org tex xml css yaml yml toml ini cfg py pyi c h cc cpp hpp cu java kt scala js jsx ts tsx"
    " go rs rb php pl lua r jl sh bash sql swift cs hs"
)
# fmt: on
DOCUMENT_SOURCES = {
    "TextUnit": f"{TEXT} html htm xhtml",
    "JsonlUnit": "json jsonl ndjson",
    "ParquetUnit": "parquet",
    "TableUnit": "csv tsv",
    "TarUnit": "tar",
}
# Each is a file of this name.
FAMILIES = sorted(module.name for module in iter_modules([str(Path(__file__).parents[1] / "model" / "families")]))
BUILT_IN_NAMES: dict[str, dict[str, str]] = {
    "objective": {
        "next-token": "lmforge.stages.objectives:build_next_token_objective",
        "distillation": "lmforge.stages.objectives:build_distillation_objective",
        "dpo": "lmforge.stages.objectives:build_dpo",
        "orpo": "lmforge.stages.objectives:build_orpo",
        "simpo": "lmforge.stages.objectives:build_simpo",
        "kto": "lmforge.stages.objectives:build_kto",
        "reward": "lmforge.stages.objectives:build_reward_model_objective",
        "grpo": "lmforge.stages.objectives:build_policy_objective",
    },
    "optimizer": {
        "adamw": "lmforge.train.optimizers.optimizer:build_adamw",
        "muon": "lmforge.train.optimizers.optimizer:build_muon",
    },
    "schedule": {
        "cosine": "lmforge.train.optimizers.schedules:cosine",
        "linear": "lmforge.train.optimizers.schedules:linear",
        "warmup-stable-decay": "lmforge.train.optimizers.schedules:warmup_stable_decay",
        "constant": "lmforge.train.optimizers.schedules:constant",
    },
    "model_family": dict.fromkeys(FAMILIES, "lmforge.model.family:build_module"),
    "document_source": {
        suffix: f"lmforge.data.sources.units:{unit}"
        for unit, suffixes in DOCUMENT_SOURCES.items()
        for suffix in suffixes.split()
    },
    "tracker": {
        "tensorboard": "lmforge.trackers.tensorboard_run:TensorBoardRun",
        "wandb": "lmforge.trackers.wandb_run:WandbRun",
        "trackio": "lmforge.trackers.trackio_run:TrackioRun",
        "mlflow": "lmforge.trackers.mlflow_run:MlflowRun",
    },
    "reward": {"python_code": "lmforge.rewards.builtin:python_code"},
    "environment": {
        "calculator": "lmforge.environments.builtin:Calculator",
        "python": "lmforge.environments.builtin:PythonTool",
    },
}
# Properties of a name that are needed without importing its implementation (docs/extending.md).
FACTS: dict[tuple[str, str], dict[str, Any]] = {
    ("optimizer", "adamw"): {"reads_found_inf": True},
    ("optimizer", "muon"): {"reads_found_inf": True, "needs_matrices": True},
    **{("model_family", name): {"like": name} for name in BUILT_IN_NAMES["model_family"]},
}

with registry.registering(BUILT_IN):
    for _kind, _targets in BUILT_IN_NAMES.items():
        for _name, _target in _targets.items():
            register(_kind, _name, _target, **FACTS.get((_kind, _name), {}))
