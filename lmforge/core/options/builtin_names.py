"""The built-in names, and the implementation of each, which is imported when it is first used. This module does not import
torch. The names are registered as those of plugins are, with `registry.register`. docs/extending.md lists the kinds and the
arguments of an implementation.
"""

from pathlib import Path
from pkgutil import iter_modules
from typing import Any

from lmforge.core import registry
from lmforge.core.registry import BUILT_IN, register

__all__ = ["register"]

# fmt: off
# Suffixes of files, without the dot. Which unit reads which of them is in text/sources/text_sources.py.
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
    "stage": {
        "pretrain": "lmforge.core.stages.specs:pretrain_stage",
        "sft": "lmforge.post.stages:sft_stage",
        "distill": "lmforge.post.stages:distill_stage",
        "align": "lmforge.post.stages:align_stage",
    },
    "objective": {
        "next-token": "lmforge.core.stages.objectives:build_next_token_objective",
        "distillation": "lmforge.post.objectives.builders:build_distillation_objective",
        "dpo": "lmforge.post.objectives.builders:build_dpo",
        "orpo": "lmforge.post.objectives.builders:build_orpo",
        "simpo": "lmforge.post.objectives.builders:build_simpo",
        "kto": "lmforge.post.objectives.builders:build_kto",
        "reward": "lmforge.post.objectives.builders:build_reward_model_objective",
        "grpo": "lmforge.post.objectives.builders:build_policy_objective",
    },
    "optimizer": {
        "adamw": "lmforge.core.optim.optimizer:build_adamw",
        "muon": "lmforge.core.optim.optimizer:build_muon",
    },
    "schedule": {
        "cosine": "lmforge.core.optim.schedules:cosine",
        "linear": "lmforge.core.optim.schedules:linear",
        "warmup-stable-decay": "lmforge.core.optim.schedules:warmup_stable_decay",
        "constant": "lmforge.core.optim.schedules:constant",
    },
    "model_family": dict.fromkeys(FAMILIES, "lmforge.core.model.family:build_module"),
    "implementation": {
        "lmforge": "lmforge.core.model.resolve:build_from_json",
        "transformers": "lmforge.hf.transformers_model:to_transformers_config",
    },
    "weight_source": {"pretrained": "lmforge.hf.pretrained:PretrainedModels"},
    "document_source": {
        suffix: f"lmforge.text.sources.units:{unit}"
        for unit, suffixes in DOCUMENT_SOURCES.items()
        for suffix in suffixes.split()
    },
    "tracker": {
        "tensorboard": "lmforge.ops.trackers.tensorboard_run:TensorBoardRun",
        "wandb": "lmforge.ops.trackers.wandb_run:WandbRun",
        "trackio": "lmforge.ops.trackers.trackio_run:TrackioRun",
        "mlflow": "lmforge.ops.trackers.mlflow_run:MlflowRun",
    },
    "reward": {"python_code": "lmforge.post.rewards.builtin:python_code"},
    "environment": {
        "calculator": "lmforge.post.environments.builtin:Calculator",
        "python": "lmforge.post.environments.builtin:PythonTool",
    },
}
# Properties of a name that are needed without importing its implementation (docs/extending.md).
FACTS: dict[tuple[str, str], dict[str, Any]] = {
    ("stage", "pretrain"): {"config": "lmforge.core.options.stage:PretrainConfig"},
    ("stage", "sft"): {"config": "lmforge.post.options.tuning:SftConfig"},
    ("stage", "distill"): {"config": "lmforge.post.options.tuning:DistillConfig"},
    ("stage", "align"): {"config": "lmforge.post.options.align:AlignConfig"},
    **{("objective", name): {"method": True} for name in ("dpo", "orpo", "simpo", "kto", "reward", "grpo")},
    ("optimizer", "adamw"): {"reads_found_inf": True},
    ("optimizer", "muon"): {"reads_found_inf": True, "needs_matrices": True},
    **{("model_family", name): {"like": name} for name in BUILT_IN_NAMES["model_family"]},
}

with registry.registering(BUILT_IN):
    for _kind, _targets in BUILT_IN_NAMES.items():
        for _name, _target in _targets.items():
            register(_kind, _name, _target, **FACTS.get((_kind, _name), {}))
