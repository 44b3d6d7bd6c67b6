"""How a recipe of alignment becomes an objective, and where what it needs beside the batches comes from."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

import torch

from lmforge.cluster.environment import Place
from lmforge.cluster.ranks import Ranks
from lmforge.config_post import AlignConfig
from lmforge.data.stream import Rows
from lmforge.model import build
from lmforge.model.layers import LanguageModel
from lmforge.model.lora import adapters_off
from lmforge.objectives.kto import KTO
from lmforge.objectives.objective import Objective
from lmforge.objectives.preference import Preference, RewardModel, disagreement, dpo, orpo, simpo
from lmforge.parallel.apply import Strategy, spread
from lmforge.parallel.engine import Spread
from lmforge.parallel.fits import choose_engine
from lmforge.train.building import MASTERS
from lmforge.train.feed import Built, Feed
from lmforge.train.loop import Batches
from lmforge.train.metrics import Meter
from lmforge.train.origin import find_origin
from lmforge.train.reference import Extended, Reference, WithReference, compute_reference, reference_logprobs


def objective_of(config: AlignConfig) -> Objective:
    """What a batch of pairs or judged answers is worth under a recipe."""
    options, beta = config.align, config.beta
    match options.method:
        case "dpo":
            return Preference(partial(dpo, beta=beta, label_smoothing=options.label_smoothing), reference=True)
        case "ipo":
            return Preference(partial(dpo, beta=beta, kind="ipo"), reference=True)
        case "orpo":
            return Preference(partial(orpo, weight=beta), reference=False)
        case "simpo":
            return Preference(partial(simpo, beta=beta, gamma=options.gamma), reference=False)
        case "kto":
            weights = {"desirable_weight": options.desirable_weight, "undesirable_weight": options.undesirable_weight}
            return KTO(beta=beta, **weights)
        case "reward":
            return RewardModel(centre=options.centre, margins=True)
    raise AssertionError(options.method)


def feed_of(built: Built, config: AlignConfig) -> Feed:
    """The batches of a preference method, with the reference's log-probabilities where it has one. Every rank calls it."""
    if config.reference is None:
        return Feed(built.loader)
    if config.reference == "computed":
        held_out = built.material.held_out
        # Made only where a number is missing: of a run that goes on, none is.
        reference_then = cache(partial(make_reference, built, config))
        for rows in (built.material.train, *([held_out] if held_out else [])):
            _compute(rows, built, config, reference_then)
        feed = Feed(built.loader)
    else:
        reference = make_reference(built, config)
        feed = Feed(Extended(built.loader, reference.add), reference.add)
    if built.start == 0:
        _check_agreement(feed.batches, built)
    return feed


def make_reference(built: Built, config: AlignConfig, temperature: float = 1.0) -> Reference:
    """The reference of a recipe. With numbers that are computed once it is the policy itself, before its first update, or
    what that was."""
    if config.reference == "adapters-off" or (config.lora.rank is not None and config.reference == "computed"):
        return Reference(built.trained, partial(adapters_off, built.trained.model), temperature)
    if config.reference == "computed" and built.start == 0:
        return Reference(built.trained, temperature=temperature)
    return Reference(_frozen_copy(config, built), temperature=temperature)


def _frozen_copy(config: AlignConfig, built: Built) -> Spread:
    """The model that the policy began as, spread like the policy and never trained."""
    assert config.model.source is not None
    origin, ranks = find_origin(config.model.source, "weights"), built.trained.ranks
    model = build(built.material.shape, seed=None, device="meta").to(MASTERS[config.train.master_dtype])
    model.requires_grad_(False)
    strategy = Strategy(**config.parallel.model_dump())
    if choose_engine(strategy, ranks.count, ranks.device.type) in ("alone", "ddp"):
        # What is not trained has nothing to exchange.
        strategy, ranks = Strategy(engine="alone"), Ranks(Place(), ranks.device, None)

    def fill(model: LanguageModel) -> None:
        with built.trained.ranks.agreeing():
            origin.fill(model)

    strategy = replace(strategy, recompute="none")
    # In the policy's arithmetic, or the two would differ before anything is learnt.
    return spread(
        model,
        reference_logprobs,
        ranks=ranks,
        dtype=built.dtype,
        float8=config.train.float8,
        strategy=strategy,
        fill=fill,
    )


def _compute(rows: Rows, built: Built, config: AlignConfig, reference: Callable[[], Reference]) -> None:
    assert config.model.source is not None
    about: dict[str, object] = {
        "weights": find_origin(config.model.source, "weights").digest,
        "shape": built.material.shape.to_hugging_face(),
        "dtype": str(built.dtype),
        "masters": config.train.master_dtype,
        "float8": config.train.float8,
    }
    folder, batch_rows = Path(built.material.data), built.material.plan.micro_batch_rows
    table = compute_reference(
        rows, reference, built.trained.ranks, folder, about, built.say, batch_rows, partial(built.watch.mark, "evaluate")
    )
    rows.packing = WithReference(rows.packing, table)


def _check_agreement(batches: Batches, built: Built) -> None:
    """Say whether policy and reference are the same before the first update, as they have to be."""
    first = replace(batches.batches(0)[0], keys=None)
    meter = Meter(built.trained.ranks)
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        _, metrics = built.trained.score(first, instead=built.objective.loss)
    meter.add(metrics)
    means = meter.read()
    if complaint := disagreement(means):
        built.complain(complaint)
    else:
        built.say(f"reference  agrees with the policy before the first update (loss {means['loss']:.4f})")
