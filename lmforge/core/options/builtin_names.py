"""The built-in names, and the implementation of each, which is imported when it is first used.

This module does not import torch. The names are registered as those of plugins are, with
`registry.register`. docs/extending.md lists the kinds and the arguments of an implementation.
"""

from pathlib import Path
from pkgutil import iter_modules
from typing import Any

from lmforge.core import registry
from lmforge.core.registry import BUILT_IN, register

__all__ = ["register"]

# Suffixes of files, without the dot. Which unit reads which of them is in
# text/sources/text_sources.py.
TEXT = (
    "txt text md markdown rst adoc org tex xml css yaml yml toml ini cfg py pyi c h cc cpp hpp cu"
    " java kt scala js jsx ts tsx go rs rb php pl lua r jl sh bash sql swift cs hs"
)
DOCUMENT_SOURCES = {
    "TextUnit": f"{TEXT} html htm xhtml",
    "JsonlUnit": "json jsonl ndjson",
    "ParquetUnit": "parquet",
    "TableUnit": "csv tsv",
}
# Each is a file of this name.
FAMILIES = sorted(
    module.name for module in iter_modules([str(Path(__file__).parents[1] / "model" / "families")])
)
BUILT_IN_NAMES: dict[str, dict[str, str]] = {
    # In the order of `lmforge --help`.
    "verb": {
        "quickstart": "lmforge.lab.verbs.quickstart:quickstart",
        "prepare": "lmforge.text.verbs.prepare:run_prepare",
        "pretrain": "lmforge.core.run:run_stage",
        "sft": "lmforge.core.run:run_stage",
        "distill": "lmforge.core.run:run_stage",
        "align": "lmforge.core.run:run_stage",
        "run": "lmforge.ops.verbs.running.pipeline:run_pipeline",
        "launch": "lmforge.ops.verbs.running.launch:run_launch",
        "stop": "lmforge.ops.verbs.running.jobs:run_stop",
        "evaluate": "lmforge.serve.verbs.evaluate:run_evaluate",
        "generate": "lmforge.serve.verbs.generate:run_generate",
        "chat": "lmforge.serve.verbs.chat:run_chat",
        "serve": "lmforge.serve.verbs.generate:run_serve",
        "export": "lmforge.ops.verbs.export:run_export",
        "import": "lmforge.ops.verbs.export:run_import",
        "download": "lmforge.ops.verbs.download:run_download",
        "bench": "lmforge.lab.bench.step_timing:bench",
        "plan": "lmforge.lab.verbs.plan:run_plan",
        "ladder": "lmforge.lab.verbs.ladder:run_ladder",
        "doctor": "lmforge.ops.verbs.doctor:run_doctor",
        "logs": "lmforge.ops.verbs.running.logs:run_logs",
        "top": "lmforge.ops.verbs.running.top:run_top",
        "runs": "lmforge.ops.verbs.running.list_runs:list_runs",
        "compare": "lmforge.lab.verbs.compare:run_compare",
        "report": "lmforge.ops.verbs.running.report:run_report",
        "show": "lmforge.ops.verbs.show.show:run_show",
    },
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
        "muon": "lmforge.core.optim.muon:build_muon",
    },
    "schedule": {
        "cosine": "lmforge.core.optim.schedules:cosine",
        "linear": "lmforge.core.optim.schedules:linear",
        "warmup-stable-decay": "lmforge.core.optim.schedules:warmup_stable_decay",
        "constant": "lmforge.core.optim.schedules:constant",
    },
    # From the one that recomputes least to the one that keeps least.
    "checkpointing_mode": {
        "none": "lmforge.core.options.activation_checkpointing:NoCheckpointing",
        "selective-ops": "lmforge.core.options.activation_checkpointing:SelectiveOperators",
        "selective-blocks": "lmforge.core.options.activation_checkpointing:SelectiveBlocks",
        "full": "lmforge.core.options.activation_checkpointing:FullCheckpointing",
    },
    # Of a block.
    "mixer": {
        "attention": "lmforge.core.model.modules.decoder:Attention",
        "latent-attention": "lmforge.core.model.modules.decoder:LatentAttention",
        "output-gated-attention": "lmforge.core.model.modules.decoder:OutputGatedAttention",
        "attention-with-sinks": "lmforge.core.model.modules.sinks:AttentionWithSinks",
        "short-convolution": "lmforge.core.model.modules.short_convolution:ShortConvolution",
        "mamba2": "lmforge.core.model.modules.mamba2:Mamba2",
        "gated-delta-rule": "lmforge.core.model.modules.gated_delta:GatedDeltaRule",
        "gated-delta-rule-by-key-head": (
            "lmforge.core.model.modules.gated_delta:GatedDeltaRuleByKeyHead"
        ),
        "reflecting-delta-rule": "lmforge.core.model.modules.gated_delta:ReflectingDeltaRule",
        "kimi-delta-attention": "lmforge.core.model.modules.kimi_delta:KimiDeltaAttention",
        "feed-forward": "lmforge.core.model.layers:FeedForward",
        "fused-feed-forward": ("lmforge.core.model.modules.fused_feed_forward:FusedFeedForward"),
        "mixture": "lmforge.core.model.mixture.experts:MixtureOfExperts",
        "clamped-mixture": "lmforge.core.model.mixture.clamped:ClampedMixture",
    },
    "packing": {
        "concat": "lmforge.core.data.dataset:pack_concat",
        "best-fit": "lmforge.core.data.best_fit_index:pack_best_fit",
    },
    # What a model is wrapped in.
    "engine": {
        "single": "lmforge.core.parallel.parallel_model:ParallelModel",
        "ddp": "lmforge.core.parallel.ddp:DDPModel",
        "fsdp1": "lmforge.core.parallel.fsdp1:FSDP1Model",
        "fsdp2": "lmforge.core.parallel.fsdp2:FSDP2Model",
        "pipeline": "lmforge.core.parallel.pipeline_parallel:PipelineModel",
    },
    # What changes a model in place before it is wrapped.
    "transform": {
        "lora": "lmforge.core.model.lora:add_lora",
        "expert-parallel": "lmforge.core.parallel.expert_parallel:apply_expert_parallel",
        "tensor-parallel": "lmforge.core.parallel.tensor_parallel:apply_tensor_parallel",
        "activation-offload": "lmforge.core.parallel.activation_offload:offload_activations",
    },
    "model_family": dict.fromkeys(FAMILIES, "lmforge.core.model.config:build_module"),
    "implementation": {
        "lmforge": "lmforge.core.model.resolve:build_from_json",
        "transformers": "lmforge.hf.transformers_model:to_transformers_config",
    },
    "monitor": {"monitors": "lmforge.ops.monitor.attach:open_monitors"},
    # On rank 0, before a run is locked.
    "run_check": {
        "job": "lmforge.ops.jobs.launchers:check_no_job_of",
        "trackers": "lmforge.ops.trackers.tracker:check_trackers_of",
    },
    # What follows the files of a run, in the order in which it is told of their end.
    "attempt_observer": {
        "report": "lmforge.ops.report.page:RunReport",
        "trackers": "lmforge.ops.trackers.run_trackers:RunTrackers",
    },
    # What is attached to the loop, in this order.
    "observer": {
        "shared-cores": "lmforge.ops.monitor.usage.other_trainings:SharedCores",
        "prediction": "lmforge.lab.plan.observer:PredictionObserver",
        "experts": "lmforge.ops.monitor.expert_load:ExpertObserver",
        "predicted-loss": "lmforge.ops.monitor.predicted_loss:LossObserver",
        "tasks": "lmforge.serve.validation:TaskObserver",
        "samples": "lmforge.serve.validation:SampleObserver",
    },
    "memory_advice": {"search": "lmforge.lab.plan.out_of_memory:suggest_for_run"},
    "data_sheets": {"gpus": "lmforge.lab.plan.hardware:gpu_peak_flops"},
    "doctor_check": {
        "parity": "lmforge.lab.bench.parity_table:check_parity",
        "coordinates": "lmforge.lab.bench.coordinates_table:check_coordinates",
    },
    "chat_tools": {"environment": "lmforge.post.environments.chat_tools:ChatTools"},
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
    "algorithm": {
        name: f"lmforge.post.objectives.algorithms.{name}:{name}"
        for name in ("grpo", "dr_grpo", "dapo", "gspo", "rloo")
    },
    "reward": {"python_code": "lmforge.post.rewards.builtin:python_code"},
    "environment": {
        "calculator": "lmforge.post.environments.builtin:Calculator",
        "python": "lmforge.post.environments.builtin:PythonTool",
    },
}
# Properties of a name that are needed without importing its implementation (docs/extending.md).
FACTS: dict[tuple[str, str], dict[str, Any]] = {
    ("verb", "quickstart"): {
        "config": "lmforge.ops.options.running:QuickstartOptions",
        "writes": True,
    },
    ("verb", "prepare"): {"config": "lmforge.text.options.prepare:PrepareOptions", "writes": True},
    ("verb", "pretrain"): {
        "config": "lmforge.core.options.stage:PretrainConfig",
        "distributed": True,
        "writes": True,
    },
    ("verb", "sft"): {
        "config": "lmforge.post.options.tuning:SftConfig",
        "distributed": True,
        "writes": True,
    },
    ("verb", "distill"): {
        "config": "lmforge.post.options.tuning:DistillConfig",
        "distributed": True,
        "writes": True,
    },
    ("verb", "align"): {
        "config": "lmforge.post.options.align:AlignConfig",
        "distributed": True,
        "writes": True,
    },
    ("verb", "run"): {"config": "lmforge.ops.options.running:RunPipelineOptions", "writes": True},
    ("verb", "launch"): {
        "config": "lmforge.ops.options.running:LaunchVerbOptions",
        "parse": "lmforge.ops.options.running:parse_launch",
        "writes": True,
    },
    ("verb", "stop"): {"config": "lmforge.ops.options.running:StopOptions"},
    ("verb", "evaluate"): {
        "config": "lmforge.serve.options.models:EvaluateOptions",
        "distributed": True,
    },
    ("verb", "generate"): {"config": "lmforge.serve.options.models:GenerateOptions"},
    ("verb", "chat"): {"config": "lmforge.serve.options.models:ChatOptions"},
    ("verb", "serve"): {"config": "lmforge.serve.options.models:ServeOptions", "writes": True},
    ("verb", "export"): {"config": "lmforge.serve.options.models:ExportOptions", "writes": True},
    ("verb", "import"): {"config": "lmforge.serve.options.models:ImportOptions", "writes": True},
    ("verb", "download"): {
        "config": "lmforge.serve.options.models:DownloadOptions",
        "writes": True,
    },
    ("verb", "bench"): {
        "config": "lmforge.lab.options.bench:BenchConfig",
        "distributed": True,
        "pass_arguments": True,
    },
    ("verb", "plan"): {"config": "lmforge.lab.options.plan:PlanConfig"},
    ("verb", "ladder"): {"config": "lmforge.lab.options.ladder:LadderConfig", "writes": True},
    ("verb", "doctor"): {
        "config": "lmforge.ops.options.examine:DoctorOptions",
        "distributed": True,
    },
    ("verb", "logs"): {"config": "lmforge.ops.options.running:LogsOptions"},
    ("verb", "top"): {"config": "lmforge.ops.options.running:TopOptions"},
    ("verb", "runs"): {"config": "lmforge.ops.options.running:RunsOptions"},
    ("verb", "compare"): {"config": "lmforge.ops.options.running:CompareOptions"},
    ("verb", "report"): {"config": "lmforge.ops.options.running:ReportOptions"},
    ("verb", "show"): {"config": "lmforge.ops.options.examine:ShowOptions"},
    ("observer", "prediction"): {"when": "config.log.predict"},
    ("observer", "experts"): {"when": "model.sparse_layers"},
    ("observer", "predicted-loss"): {"when": "config.log.prediction"},
    ("observer", "tasks"): {"when": "config.validation.tasks"},
    ("observer", "samples"): {"when": "config.sample.every_steps"},
    ("attempt_observer", "trackers"): {"when": "config.log.trackers"},
    ("run_check", "job"): {"when": "run.has_job"},
    ("run_check", "trackers"): {"when": "config.log.trackers"},
    ("stage", "pretrain"): {"config": "lmforge.core.options.stage:PretrainConfig"},
    ("stage", "sft"): {"config": "lmforge.post.options.tuning:SftConfig"},
    ("stage", "distill"): {"config": "lmforge.post.options.tuning:DistillConfig"},
    ("stage", "align"): {"config": "lmforge.post.options.align:AlignConfig"},
    **{
        ("objective", name): {"method": True}
        for name in ("dpo", "orpo", "simpo", "kto", "reward", "grpo")
    },
    # The KL divergence from a reference model is part of their losses.
    **{("algorithm", name): {"reads_reference": True} for name in ("grpo", "rloo")},
    ("optimizer", "adamw"): {"reads_found_inf": True},
    ("optimizer", "muon"): {
        "reads_found_inf": True,
        "needs_matrices": True,
        "states_per_matrix": 1,
    },
    **{("model_family", name): {"like": name} for name in BUILT_IN_NAMES["model_family"]},
}

with registry.registering(BUILT_IN):
    for _kind, _targets in BUILT_IN_NAMES.items():
        for _name, _target in _targets.items():
            register(_kind, _name, _target, **FACTS.get((_kind, _name), {}))
