"""Preference methods: the objective of a recipe, and its batches with the log-probabilities of the reference."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial

import torch

from lmforge.cluster.distributed import DistributedContext
from lmforge.cluster.rank_info import RankInfo
from lmforge.config.align import AlignConfig
from lmforge.config.sections import ParallelOptions
from lmforge.config.stage import StageConfig
from lmforge.data.dataset import PackedDataset
from lmforge.interop.config_json import to_config_json
from lmforge.model import build_model
from lmforge.model.layers import LanguageModel
from lmforge.model.lora import disable_adapters
from lmforge.objectives.kto import KTOObjective
from lmforge.objectives.objective import Objective
from lmforge.objectives.policy import build_policy_loss_config
from lmforge.objectives.preference import (
    PreferenceObjective,
    RewardModelObjective,
    dpo,
    orpo,
    reference_mismatch_warning,
    simpo,
)
from lmforge.parallel.parallel_model import ParallelModel
from lmforge.parallel.parallelize import parallelize
from lmforge.parallel.validate import choose_engine
from lmforge.stages.build_model import MASTER_DTYPES
from lmforge.stages.dataset_batches import DatasetBatches
from lmforge.stages.inputs import find_required_pretrained
from lmforge.stages.reference import PackingWithReference, ReferenceModel, precompute_reference_logprobs, reference_logprobs
from lmforge.train.metrics import MetricsAccumulator
from lmforge.train.trainer import BatchSource, Trainer


def build_preference_objective(config: AlignConfig) -> Objective:
    """The objective of a preference method."""
    options, beta = config.align, config.beta
    match options.method:
        case "dpo":
            loss_fn = partial(dpo, beta=beta, loss_type=options.loss_type, label_smoothing=options.label_smoothing)
            return PreferenceObjective(loss_fn, uses_reference=True)
        case "orpo":
            return PreferenceObjective(partial(orpo, beta=beta), uses_reference=False)
        case "simpo":
            return PreferenceObjective(partial(simpo, beta=beta, gamma=options.gamma), uses_reference=False)
        case "kto":
            weights = {"desirable_weight": options.desirable_weight, "undesirable_weight": options.undesirable_weight}
            return KTOObjective(beta=beta, **weights)
        case "reward":
            return RewardModelObjective(center_rewards_coefficient=options.center_rewards_coefficient)
    raise AssertionError(options.method)


def has_frozen_reference(config: StageConfig) -> bool:
    """Whether a run keeps a frozen copy of its first weights beside the policy."""
    if not isinstance(config, AlignConfig) or config.reference != "copy":
        return False
    return config.align.method != "grpo" or build_policy_loss_config(config.rollout).kl_estimator != "none"


def build_preference_batches(trainer: Trainer) -> BatchSource:
    """The batches of a preference method, with the reference's log-probabilities where it has one. Every rank calls it."""
    config, inputs = _align_config(trainer), trainer.inputs
    if config.reference is None:
        return DatasetBatches(trainer)
    if config.reference == "precomputed":
        # Built only where numbers are missing: a run that resumes finds all of them.
        get_reference = cache(partial(build_reference, trainer))
        for dataset in filter(None, (inputs.train_dataset, inputs.validation_dataset)):
            _precompute_reference(trainer, dataset, get_reference)
        batches = DatasetBatches(trainer)
    else:
        batches = DatasetBatches(trainer, build_reference(trainer).add_logprobs)
    if trainer.start_step == 0:
        _check_reference_agrees(trainer, batches)
    return batches


def _align_config(trainer: Trainer) -> AlignConfig:
    assert isinstance(trainer.ctx.config, AlignConfig)
    return trainer.ctx.config


def build_reference(trainer: Trainer, temperature: float = 1.0) -> ReferenceModel:
    """The reference of a recipe. Where its numbers are precomputed, it is the policy before its first update."""
    config, policy = _align_config(trainer), trainer.parallel_model
    precomputed = config.reference == "precomputed"
    if config.reference == "adapters-off" or (config.lora.rank is not None and precomputed):
        return ReferenceModel(policy, partial(disable_adapters, policy.model), temperature)
    if precomputed and trainer.start_step == 0:
        return ReferenceModel(policy, temperature=temperature)
    return ReferenceModel(_build_frozen_reference(trainer), temperature=temperature)


def _build_frozen_reference(trainer: Trainer) -> ParallelModel:
    """The model that the policy began as, distributed like the policy and never trained."""
    config, dist_ctx = _align_config(trainer), trainer.ctx.dist_ctx
    model = build_model(trainer.inputs.model_config, "meta").to(MASTER_DTYPES[config.train.master_dtype])
    model.requires_grad_(False)
    options = config.parallel
    if choose_engine(options, dist_ctx.world_size, dist_ctx.device.type) in ("single", "ddp"):
        # There are no gradients to exchange.
        options, dist_ctx = ParallelOptions(), DistributedContext(RankInfo(), dist_ctx.device, None)

    def fill(model: LanguageModel) -> None:
        with trainer.ctx.dist_ctx.raise_on_all():
            find_required_pretrained(config).load_weights(model)

    return parallelize(
        model,
        reference_logprobs,
        dist_ctx=dist_ctx,
        dtype=trainer.dtype,  # the policy's, or the two would differ before anything is learned
        float8=config.train.float8,
        options=options.model_copy(update={"activation_checkpointing": "none"}),
        init_weights=fill,
    )


def _precompute_reference(trainer: Trainer, dataset: PackedDataset, get_reference: Callable[[], ReferenceModel]) -> None:
    config = _align_config(trainer)
    depends_on: dict[str, object] = {
        "weights": find_required_pretrained(config).digest,
        "shape": to_config_json(trainer.inputs.model_config),
        "dtype": str(trainer.dtype),
        "masters": config.train.master_dtype,
        "float8": config.train.float8,
    }
    logprobs = precompute_reference_logprobs(trainer, dataset, get_reference, depends_on)
    dataset.packing = PackingWithReference(dataset.packing, logprobs)


def _check_reference_agrees(trainer: Trainer, batches: DatasetBatches) -> None:
    """Log whether policy and reference are the same before the first update, as they have to be."""
    batch = replace(batches.batches(0)[0], rng_keys=None)
    accumulator = MetricsAccumulator(trainer.ctx.dist_ctx)
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        _, metrics = trainer.parallel_model.score(batch, score_fn=trainer.objective.loss)
    accumulator.add(metrics)
    means = accumulator.reduce_and_reset()
    if mismatch := reference_mismatch_warning(means):
        trainer.ctx.console.warn(mismatch)
    else:
        trainer.ctx.console.info(f"reference  agrees with the policy before the first update (loss {means['loss']:.4f})")
