"""The policy objective and its advantages against fp64 loops over tokens, and against recorded
results of TRL's trainers.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from lmforge.core import registry
from lmforge.core.data.batch import Batch, Metrics
from lmforge.core.model.layers import LanguageModel
from lmforge.post.objectives.policy import (
    LARGEST_DIFFERENCE,
    MEAN_DIFFERENCE,
    PolicyLossConfig,
    PolicyObjective,
    compute_advantages,
    has_nonzero_std,
    subtract_kl_penalty,
)
from tests.core.losses import tiny
from tests.core.losses.oracle import (
    Document,
    assert_as_trl,
    assert_same,
    drawn,
    drawn_pairs,
    gradient,
    logprobs_under,
    moved,
    packed,
    plain,
    tiny_model,
    trl,
    with_extras,
)

# The configurations that TRL's results were recorded with (regenerate.py).
EXTRAS = ("old_logprobs", "reference_logprobs", "advantages", "truncated")
ADVANTAGES = [1.2, -0.7, 0.4, -1.5, 0.9, -0.3, 0.0, 0.6]
IN_TRL = {
    "grpo token": PolicyLossConfig(loss_aggregation="sequence"),
    "grpo token kl": PolicyLossConfig(loss_aggregation="sequence", kl_estimator="k3", beta=0.04),
    "grpo token kl corrected": PolicyLossConfig(
        loss_aggregation="sequence", kl_estimator="k3", beta=0.04, use_bias_correction_kl=True
    ),
    "bnpo": PolicyLossConfig(loss_aggregation="token"),
    "dr_grpo": PolicyLossConfig(loss_aggregation="constant", max_completion_length=16),
    "dapo": PolicyLossConfig(loss_aggregation="token", epsilon_high=0.28),
    "dapo temperature": PolicyLossConfig(loss_aggregation="token", temperature=0.7),
    "grpo sequence": PolicyLossConfig(
        importance_sampling_level="sequence",
        loss_aggregation="sequence",
        epsilon=0.05,
        epsilon_high=0.06,
    ),
    "rloo": PolicyLossConfig(importance_sampling_level="product", loss_aggregation="sequence"),
}
CORRECTED_IN_TRL = {
    "token_truncate": PolicyLossConfig(
        loss_aggregation="sequence",
        importance_sampling_clip_max=1.15,
        importance_sampling_clip_min=0.9,
    ),
    "token_mask": PolicyLossConfig(
        importance_sampling_clip_max=1.2, importance_sampling_clip_min=0.8
    ),
    "sequence_truncate": PolicyLossConfig(
        loss_aggregation="constant", max_completion_length=16, importance_sampling_clip_max=1.2
    ),
    "sequence_mask": PolicyLossConfig(
        loss_aggregation="sequence",
        importance_sampling_level="sequence",
        importance_sampling_clip_max=1.5,
    ),
    "proximal token_truncate": PolicyLossConfig(
        loss_aggregation="sequence", epsilon=0.1, epsilon_high=0.1, importance_sampling_clip_max=1.2
    ),
    "proximal sequence_mask": PolicyLossConfig(
        kl_estimator="k3", beta=0.04, use_bias_correction_kl=True, importance_sampling_clip_max=3.0
    ),
    "token_truncate off-policy": PolicyLossConfig(
        loss_aggregation="sequence",
        importance_sampling_clip_max=3.0,
        off_policy_mask_threshold=0.02,
    ),
}
ALGORITHMS = {entry.name: entry.build() for entry in registry.entries("algorithm")}
# All algorithms, and combinations that no algorithm has.
CONFIGS = {
    **ALGORITHMS,
    "dr_grpo": replace(ALGORITHMS["dr_grpo"], max_completion_length=9),
    "gspo": replace(ALGORITHMS["gspo"], epsilon=0.03, epsilon_high=0.04),
    "k2, warm": PolicyLossConfig(
        loss_aggregation="sequence", kl_estimator="k2", beta=0.3, temperature=1.7
    ),
    "sequence by token": PolicyLossConfig(
        importance_sampling_level="sequence",
        loss_aggregation="token",
        epsilon=0.05,
        kl_estimator="k3",
        beta=0.1,
        use_bias_correction_kl=True,
    ),
    "product by constant": PolicyLossConfig(
        importance_sampling_level="product",
        loss_aggregation="constant",
        max_completion_length=3,
        epsilon=0.1,
        epsilon_high=0.1,
    ),
    "masked sequences": PolicyLossConfig(
        importance_sampling_mode="sequence_mask",
        importance_sampling_clip_max=1.5,
        off_policy_mask_threshold=0.05,
    ),
    "truncated tokens, product": PolicyLossConfig(
        importance_sampling_level="product",
        importance_sampling_mode="token_truncate",
        importance_sampling_clip_max=1.1,
        importance_sampling_clip_min=0.9,
        epsilon=0.01,
    ),
}


@pytest.mark.parametrize("name", IN_TRL)
def test_losses_and_gradients_are_those_of_trl(name: str) -> None:
    config = IN_TRL[name]
    completions = [
        Document(pair["prompt"], pair[side])
        for pair in tiny.pairs()
        for side in ("chosen", "rejected")
    ]
    batch = packed([completions[:3], completions[3:]])
    batch = with_extras(
        batch,
        advantages=[ADVANTAGES[:3], ADVANTAGES[3:]],
        old_logprobs=logprobs_under(tiny_model(0.004, 2), batch, config.temperature),
        reference_logprobs=logprobs_under(tiny_model(0.02, 1), batch, config.temperature),
    )
    objective = PolicyObjective(config)

    def loss(model: LanguageModel) -> tuple[Tensor, Tensor, Metrics]:
        total, metrics = objective.loss(model, batch)
        return total, objective.num_items(batch), metrics

    metrics = {
        key: float(total / count) for key, (total, count) in assert_as_trl(name, loss).items()
    }
    theirs = trl()[0][name]
    assert metrics["entropy"] == pytest.approx(theirs["entropy"], rel=1e-5)
    if config.importance_sampling_level == "token":
        assert metrics["clip/low"] == pytest.approx(theirs["clip_ratio/low_mean"], rel=1e-5)
        assert metrics["clip/high"] == pytest.approx(theirs["clip_ratio/high_mean"], rel=1e-5)
    if config.kl_estimator != "none":
        assert metrics["kl"] == pytest.approx(theirs["kl"], rel=1e-5)


@pytest.mark.parametrize("name", CORRECTED_IN_TRL)
def test_losses_and_gradients_with_importance_weights_are_those_of_trl(name: str) -> None:
    mode = next(word for word in name.split() if "_" in word)
    config = replace(CORRECTED_IN_TRL[name], importance_sampling_mode=mode)
    completions = [
        Document(pair["prompt"], pair[side])
        for pair in tiny.pairs()
        for side in ("chosen", "rejected")
    ]
    batch = packed([completions[:3], completions[3:]])
    batch = with_extras(
        batch,
        advantages=[ADVANTAGES[:3], ADVANTAGES[3:]],
        old_logprobs=logprobs_under(tiny_model(0.004, 2), batch),
        reference_logprobs=logprobs_under(tiny_model(0.02, 1), batch),
    )
    if name.startswith("proximal"):
        batch = with_extras(batch, proximal_logprobs=logprobs_under(tiny_model(0.002, 3), batch))
    objective = PolicyObjective(config)

    def loss(model: LanguageModel) -> tuple[Tensor, Tensor, Metrics]:
        total, metrics = objective.loss(model, batch)
        return total, objective.num_items(batch), metrics

    metrics = assert_as_trl(name, loss)
    theirs = trl()[0][name]
    total, count = metrics[MEAN_DIFFERENCE]
    assert float(total / count) == pytest.approx(theirs[MEAN_DIFFERENCE], rel=1e-5)
    assert float(metrics[LARGEST_DIFFERENCE][0]) == pytest.approx(
        theirs[LARGEST_DIFFERENCE], rel=1e-5
    )
    if mode.startswith("token"):  # TRL's mean over sequences is not weighted by their tokens
        total, count = metrics["importance_sampling_ratio"]
        assert float(total / count) == pytest.approx(
            theirs["importance_sampling_ratio/mean"], rel=1e-5
        )


@pytest.mark.parametrize("name", ["group none", "group bessel", "leave-one-out none"])
def test_advantages_are_those_of_trl_with_a_reward_missing(name: str) -> None:
    case = trl()[0][f"advantages {name}"]
    baseline, scale = name.split()
    scale = {"bessel": "group"}.get(scale, scale)
    rewards = torch.tensor(
        [math.nan if reward is None else reward for reward in case["rewards"]]
    ).view(2, 4)
    ours = compute_advantages(rewards, PolicyLossConfig(baseline=baseline, scale_rewards=scale))  # type: ignore[arg-type]
    torch.testing.assert_close(
        ours.flatten(), torch.tensor(case["advantages"]), rtol=1e-6, atol=1e-6
    )


@pytest.mark.parametrize("baseline", ["group", "leave-one-out"])
@pytest.mark.parametrize("scale", ["none", "group-population", "group"])
def test_advantages_are_those_of_a_loop_over_completions(baseline: Any, scale: Any) -> None:
    generator, _ = drawn()
    rewards = torch.randn(6, 5, dtype=torch.float64, generator=generator)
    rewards[torch.rand(6, 5, generator=generator) < 0.3] = math.nan
    ours = compute_advantages(
        rewards, PolicyLossConfig(baseline=baseline, scale_rewards=scale)
    ).tolist()
    for group, row in zip(rewards.tolist(), ours, strict=True):
        known = [reward for reward in group if not math.isnan(reward)]
        for place, (reward, result) in enumerate(zip(group, row, strict=True)):
            if math.isnan(reward) or len(known) < 2:
                assert result == 0
                continue
            others = [
                other for at, other in enumerate(group) if at != place and not math.isnan(other)
            ]
            base = known if baseline == "group" else others
            mean = sum(known) / len(known)
            squares = sum((other - mean) ** 2 for other in known)
            divisor = {"group-population": len(known), "group": len(known) - 1}.get(scale)
            expected = (reward - sum(base) / len(base)) / (
                1 if divisor is None else math.sqrt(squares / divisor) + 1e-4
            )
            assert result == pytest.approx(expected, rel=1e-9)


def test_the_two_standard_deviations_differ_by_15_percent_at_four_completions() -> None:
    rewards = torch.tensor([[0.0, 1.0, 1.0, 3.0]])
    wide, narrow = (
        compute_advantages(rewards, PolicyLossConfig(scale_rewards=scale))
        for scale in ("group-population", "group")
    )
    torch.testing.assert_close(
        wide / narrow, torch.full((1, 4), math.sqrt(4 / 3)), rtol=1e-3, atol=0
    )


def test_a_group_of_equal_rewards_has_no_advantages() -> None:
    rewards = torch.tensor(
        [[1.0, 1.0, 1.0], [0.0, 1.0, math.nan], [math.nan, 2.0, math.nan], [math.nan] * 3]
    )
    assert has_nonzero_std(rewards).tolist() == [False, True, False, False]
    assert compute_advantages(rewards, PolicyLossConfig())[[0, 2, 3]].abs().max() == 0


def test_the_kl_penalty_is_subtracted_from_rewards_with_k1_only() -> None:
    rewards, old, reference = (
        torch.tensor([1.0, 2.0]),
        torch.tensor([-3.0, -5.0]),
        torch.tensor([-4.0, -2.0]),
    )
    assert subtract_kl_penalty(
        rewards, old, reference, ALGORITHMS["rloo"]
    ).tolist() == pytest.approx([0.95, 2.15])
    assert subtract_kl_penalty(rewards, old, reference, ALGORITHMS["grpo"]) is rewards


def importance_weight(config: PolicyLossConfig, logs: Sequence[float]) -> float:
    ratio = math.exp(sum(logs))
    low, high = (
        config.importance_sampling_clip_min or 0.0,
        config.importance_sampling_clip_max or math.inf,
    )
    if config.importance_sampling_mode == "none":
        return 1.0
    if config.importance_sampling_mode.endswith("mask"):
        return ratio if low <= ratio <= high else 0.0
    return min(max(ratio, low), high)


def plain_sum(
    config: PolicyLossConfig,
    model: LanguageModel,
    documents: Sequence[Document],
    extras: Sequence[dict[str, Any]],
) -> tuple[Tensor, float]:
    """(sum, weight) as the papers write it: completions one at a time, tokens one at a time."""
    total, weight = torch.zeros((), dtype=torch.float64), 0.0
    for one, extra in zip(documents, extras, strict=True):
        if config.mask_truncated_completions and extra["truncated"]:
            continue
        logprobs = plain(model, one, config.temperature)
        size, advantage = len(logprobs), extra["advantages"]
        apart = [
            float(now.detach() - before)
            for now, before in zip(logprobs, extra["old_logprobs"], strict=True)
        ]
        corrects = config.importance_sampling_mode != "none"
        logs = [
            now - (now.detach() if corrects else before)
            for now, before in zip(logprobs, extra["old_logprobs"], strict=True)
        ]
        weights = [
            importance_weight(
                config, [log] if "token" in config.importance_sampling_mode else apart
            )
            for log in apart
        ]
        threshold = config.off_policy_mask_threshold
        if threshold is not None and advantage < 0 and -sum(apart) / size > threshold:
            weights = [0.0] * size
        if config.importance_sampling_level != "token":
            logs = [
                sum(logs) / (size if config.importance_sampling_level == "sequence" else 1)
            ] * size  # type: ignore[list-item]
        losses = []
        for log, weight_of_loss, logprob, reference in zip(
            logs, weights, logprobs, extra["reference_logprobs"], strict=True
        ):
            ratio = log.exp()
            clipped = min(max(float(ratio), 1 - config.epsilon), 1 + config.epsilon_high)
            loss = (
                -ratio * advantage
                if float(ratio) * advantage <= clipped * advantage
                else torch.tensor(-clipped * advantage)
            )
            further = reference - logprob
            divergence = {"k2": further**2 / 2, "k3": further.exp() - 1 - further}.get(
                config.kl_estimator, torch.zeros(())
            )
            losses.append(
                loss * weight_of_loss
                + config.beta * divergence * (ratio if config.use_bias_correction_kl else 1)
            )
        total = total + sum(losses) / (size if config.loss_aggregation == "sequence" else 1)  # type: ignore[operator]
        weight += {"sequence": 1, "token": size, "constant": config.max_completion_length}[
            config.loss_aggregation
        ]
    return total, weight


def completions_of(generator: torch.Generator, counts: Sequence[int]) -> list[list[Document]]:
    return [[side for pair in drawn_pairs(generator, count) for side in pair] for count in counts]


def with_policy_extras(
    batch: Batch,
    rows: Sequence[Sequence[Document]],
    model: LanguageModel,
    config: PolicyLossConfig,
    seed: int,
) -> Batch:
    """Add advantages of both signs, log-probabilities of an older policy and of a reference, and
    truncated completions.

    The older policy gives the first completion the same log-probabilities: if all were clipped,
    there would be no gradient.
    """
    count = len(rows) * max(map(len, rows))
    first = torch.zeros_like(batch.document_ids, dtype=torch.bool)
    first[0] = batch.document_ids[0] == 0
    now, older = (
        logprobs_under(each, batch, config.temperature)
        for each in (model, moved(model, 0.01, seed))
    )
    values = torch.randn(len(rows), count, generator=torch.Generator().manual_seed(seed))
    return with_extras(
        batch,
        advantages=[values[row, : len(of)].tolist() for row, of in enumerate(rows)],
        truncated=[[float(number % 3 == 1) for number in range(len(of))] for of in rows],
        old_logprobs=torch.where(first, now, older).detach(),
        reference_logprobs=logprobs_under(moved(model, 0.03, seed + 1), batch, config.temperature),
    )


def by_document(batch: Batch, rows: Sequence[Sequence[Document]]) -> list[dict[str, Any]]:
    """The extras of each completion: the values of its scored tokens, or the one value that all of
    it has.
    """
    results = []
    for row, of in enumerate(rows):
        for number in range(len(of)):
            here = (batch.document_ids[row] == number) & (batch.labels[row] != -100)
            values = {name: batch.extra(name)[row, here].double() for name in EXTRAS}
            results.append(
                values | {name: float(values[name][0]) for name in ("advantages", "truncated")}
            )
    return results


@pytest.mark.parametrize("name", CONFIGS)
def test_losses_and_gradients_are_those_of_an_oracle_that_goes_token_by_token(name: str) -> None:
    generator, model = drawn()
    config, rows = CONFIGS[name], completions_of(generator, (3, 1))
    batch = with_policy_extras(packed(rows), rows, model, config, generator.initial_seed())
    objective = PolicyObjective(config)
    total, _ = objective.loss(model, batch)
    loss = total / objective.num_items(batch)
    ours = loss.detach(), gradient(loss, model)
    wide = model.double()
    expected, weight = plain_sum(
        config, wide, [one for row in rows for one in row], by_document(batch, rows)
    )
    # A ratio at the very bound may be clipped in one precision and not in the other; fresh seeds
    # have not met one.
    assert_same(ours, (expected.detach() / weight, gradient(expected / weight, wide)))
    assert objective.num_items(batch).item() == weight


@pytest.mark.parametrize("name", CONFIGS)
def test_the_gradient_is_the_same_for_any_split_of_the_batch_and_any_packing(name: str) -> None:
    generator, model = drawn()
    model.double()
    config, rows = CONFIGS[name], completions_of(generator, (1, 3, 2, 1))
    batch, objective = (
        with_policy_extras(packed(rows), rows, model, config, generator.initial_seed()),
        PolicyObjective(config),
    )
    whole, _ = objective.loss(model, batch)
    reference = whole.detach(), gradient(whole, model)
    parts = [batch[rows_] for rows_ in (slice(0, 1), slice(1, 4))]
    sums = [objective.loss(model, part)[0] for part in parts]
    assert sum(objective.num_items(part) for part in parts) == objective.num_items(batch)
    split = (
        torch.stack(sums).sum().detach(),
        torch.stack([gradient(total, model) for total in sums]).sum(0),
    )
    assert_same(split, reference, tolerance=1e-11)
    apart = packed([[one] for row in rows for one in row])
    extras = by_document(batch, rows)
    spread = {
        each: torch.zeros(apart.batch_size, apart.sequence_length, dtype=torch.float64)
        for each in EXTRAS
    }
    for row, extra in enumerate(extras):
        for each in EXTRAS:
            spread[each][row, apart.labels[row] != -100] = torch.as_tensor(
                extra[each], dtype=torch.float64
            )
    unpacked, _ = objective.loss(model, with_extras(apart, **spread))
    assert_same((unpacked.detach(), gradient(unpacked, model)), reference, tolerance=1e-11)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_batch_without_completions_has_zero_loss_and_zero_gradients(name: str) -> None:
    generator, model = drawn()
    rows = completions_of(generator, (1, 2))
    batch = with_policy_extras(packed(rows), rows, model, CONFIGS[name], generator.initial_seed())
    batch.labels.fill_(-100)
    total, metrics = PolicyObjective(CONFIGS[name]).loss(model, batch)
    assert total.item() == 0.0
    assert PolicyObjective(CONFIGS[name]).num_items(batch).item() == 0.0
    assert all(part.item() == 0.0 for pair in metrics.values() for part in pair)
    assert torch.equal(
        gradient(total, model),
        torch.zeros(sum(each.numel() for each in model.parameters())).double(),
    )


def test_a_masked_truncated_completion_is_neither_in_the_loss_nor_counted() -> None:
    generator, model = drawn()
    rows = completions_of(generator, (2,))
    config = ALGORITHMS["dapo"]
    batch = with_policy_extras(packed(rows), rows, model, config, generator.initial_seed())
    cut = with_extras(batch, truncated=[[0.0, 1.0, 0.0, 0.0]])
    shorter = with_extras(batch, truncated=[[0.0] * 4])
    shorter.labels[shorter.document_ids == 1] = -100
    ours, reference = (PolicyObjective(config).loss(model, each)[0] for each in (cut, shorter))
    assert ours.item() == reference.item()
    assert PolicyObjective(config).num_items(cut).item() == sum(
        len(rows[0][place].completion) for place in (0, 2, 3)
    )


def test_under_the_sampling_policy_every_ratio_is_one_and_nothing_is_clipped() -> None:
    generator, model = drawn()
    rows = completions_of(generator, (2, 1))
    batch = with_policy_extras(
        packed(rows), rows, model, PolicyLossConfig(), generator.initial_seed()
    )
    batch = with_extras(batch, old_logprobs=logprobs_under(model, batch))
    _, metrics = PolicyObjective(PolicyLossConfig()).loss(model, batch)
    assert float(metrics["ratio"][0] / metrics["ratio"][1]) == pytest.approx(1.0, abs=1e-6)
    assert metrics["clip/low"][0].item() == metrics["clip/high"][0].item() == 0


def test_the_loss_types_that_keep_near_a_reference_are_those_that_options_know() -> None:
    with_reference = {entry.name for entry in registry.entries("algorithm") if entry.facts}
    assert with_reference == {
        name for name, config in ALGORITHMS.items() if config.kl_estimator != "none"
    }
