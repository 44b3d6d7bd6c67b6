"""How a recipe of alignment becomes an objective, and where what it needs beside the batches comes from."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

import torch

from lmforge.cluster.distributed import DistributedContext
from lmforge.cluster.rank_info import RankInfo
from lmforge.config.align import AlignConfig
from lmforge.config.sections import ParallelOptions
from lmforge.data.dataset import PackedDataset
from lmforge.interop.config_json import to_config_json
from lmforge.model import build_model
from lmforge.model.layers import LanguageModel
from lmforge.model.lora import disable_adapters
from lmforge.objectives.kto import KTOObjective
from lmforge.objectives.objective import Objective
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
from lmforge.stages.feed import StageBatches, StageContext
from lmforge.stages.pretrained import find_pretrained
from lmforge.stages.reference import (
    BatchesWithExtras,
    PackingWithReference,
    ReferenceModel,
    precompute_reference_logprobs,
    reference_logprobs,
)
from lmforge.stages.setup import MASTER_DTYPES
from lmforge.train.loop import BatchSource
from lmforge.train.metrics import MetricsAccumulator


def build_preference_objective(config: AlignConfig) -> Objective:
    """The objective of a recipe on pairs or labelled completions."""
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


def build_preference_batches(context: StageContext, config: AlignConfig) -> StageBatches:
    """The batches of a preference method, with the reference's log-probabilities where it has one. Every rank calls it."""
    if config.reference is None:
        return StageBatches(context.loader)
    if config.reference == "precomputed":
        held_out = context.inputs.validation_dataset
        # Made only where a number is missing: of a run that goes on, none is.
        reference_then = cache(partial(build_reference, context, config))
        for rows in (context.inputs.train_dataset, *([held_out] if held_out else [])):
            _precompute_reference(rows, context, config, reference_then)
        feed = StageBatches(context.loader)
    else:
        reference = build_reference(context, config)
        feed = StageBatches(BatchesWithExtras(context.loader, reference.add_logprobs), reference.add_logprobs)
    if context.start_step == 0:
        _check_reference_agrees(feed.batch_source, context)
    return feed


def build_reference(context: StageContext, config: AlignConfig, temperature: float = 1.0) -> ReferenceModel:
    """The reference of a recipe. With numbers that are computed once it is the policy itself, before its first update, or
    what that was."""
    if config.reference == "adapters-off" or (config.lora.rank is not None and config.reference == "precomputed"):
        return ReferenceModel(context.parallel_model, partial(disable_adapters, context.parallel_model.model), temperature)
    if config.reference == "precomputed" and context.start_step == 0:
        return ReferenceModel(context.parallel_model, temperature=temperature)
    return ReferenceModel(_build_frozen_reference(config, context), temperature=temperature)


def _build_frozen_reference(config: AlignConfig, context: StageContext) -> ParallelModel:
    """The model that the policy began as, spread like the policy and never trained."""
    assert config.model.source is not None
    origin, ranks = find_pretrained(config.model.source, "weights"), context.parallel_model.dist_ctx
    model = build_model(context.inputs.model_config, "meta").to(MASTER_DTYPES[config.train.master_dtype])
    model.requires_grad_(False)
    options = config.parallel
    if choose_engine(options, ranks.world_size, ranks.device.type) in ("single", "ddp"):
        # What is not trained has nothing to exchange.
        options, ranks = ParallelOptions(), DistributedContext(RankInfo(), ranks.device, None)

    def fill(model: LanguageModel) -> None:
        with context.parallel_model.dist_ctx.raise_on_all():
            origin.load_weights(model)

    # In the policy's arithmetic, or the two would differ before anything is learnt.
    return parallelize(
        model,
        reference_logprobs,
        dist_ctx=ranks,
        dtype=context.dtype,
        float8=config.train.float8,
        options=options.model_copy(update={"activation_checkpointing": "none"}),
        init_weights=fill,
    )


def _precompute_reference(
    dataset: PackedDataset, context: StageContext, config: AlignConfig, get_reference: Callable[[], ReferenceModel]
) -> None:
    assert config.model.source is not None
    about: dict[str, object] = {
        "weights": find_pretrained(config.model.source, "weights").digest,
        "shape": to_config_json(context.inputs.model_config),
        "dtype": str(context.dtype),
        "masters": config.train.master_dtype,
        "float8": config.train.float8,
    }
    folder, batch_rows = Path(context.inputs.data_source), context.inputs.batch_plan.micro_batch_size
    table = precompute_reference_logprobs(
        dataset,
        get_reference,
        context.parallel_model.dist_ctx,
        folder,
        about,
        context.info,
        batch_rows,
        partial(context.watch.set_phase, "evaluate"),
    )
    dataset.packing = PackingWithReference(dataset.packing, table)


def _check_reference_agrees(batch_source: BatchSource, context: StageContext) -> None:
    """Say whether policy and reference are the same before the first update, as they have to be."""
    first = replace(batch_source.batches(0)[0], rng_keys=None)
    meter = MetricsAccumulator(context.parallel_model.dist_ctx)
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        _, metrics = context.parallel_model.score(first, score_fn=context.objective.loss)
    meter.add(metrics)
    means = meter.reduce_and_reset()
    if complaint := reference_mismatch_warning(means):
        context.warn(complaint)
    else:
        context.info(f"reference  agrees with the policy before the first update (loss {means['loss']:.4f})")
