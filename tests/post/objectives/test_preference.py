"""Preference objectives against an fp64 oracle that goes token by token, and against recorded
results of TRL's trainers.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from lmforge.core.data.batch import Batch, Metrics
from lmforge.core.losses.language import NextTokenObjective
from lmforge.core.model.build import build_model
from lmforge.core.model.config import ModelConfig
from lmforge.core.model.init_weights import init_weights
from lmforge.core.model.layers import LanguageModel
from lmforge.post.objectives.preference import (
    KTOObjective,
    PreferenceObjective,
    RewardModelObjective,
    dpo,
    orpo,
    reference_mismatch_warning,
    simpo,
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
    with_extras,
)

DPO: dict[str, dict[str, Any]] = {
    "dpo": {},
    "dpo smoothed": {"label_smoothing": 0.1},
    "hinge": {"loss_type": "hinge"},
    "ipo": {"loss_type": "ipo"},
    "robust": {"loss_type": "robust", "label_smoothing": 0.2},
    "exo": {"loss_type": "exo", "label_smoothing": 0.2},
    "nca": {"loss_type": "nca"},
    "apo-zero": {"loss_type": "apo-zero"},
    "apo-down": {"loss_type": "apo-down"},
}
OBJECTIVES: dict[str, PreferenceObjective] = {
    **{
        name: PreferenceObjective(partial(dpo, beta=0.1, **options), uses_reference=True)
        for name, options in DPO.items()
    },
    "orpo": PreferenceObjective(partial(orpo, beta=0.1), uses_reference=False),
    "simpo": PreferenceObjective(partial(simpo, beta=2.0, gamma=0.5), uses_reference=False),
}
IN_TRL = {
    "dpo": "dpo sigmoid",
    "dpo smoothed": "cpo smoothed",
    "hinge": "dpo hinge",
    "ipo": "dpo ipo",
    "robust": "dpo robust",
    "exo": "dpo exo_pair",
    "nca": "dpo nca_pair",
    "apo-zero": "dpo apo_zero",
    "apo-down": "dpo apo_down",
    "orpo": "orpo",
    "simpo": "simpo",
}
KTO_WEIGHTS = {"beta": 0.1, "desirable_weight": 1.3, "undesirable_weight": 0.8}

Rows = Sequence[Sequence[Document]]


def one_row(pairs: Sequence[tuple[Document, Document]]) -> list[list[Document]]:
    return [[side for pair in pairs for side in pair]]


def row_each(pairs: Sequence[tuple[Document, Document]]) -> list[list[Document]]:
    return [list(pair) for pair in pairs]


def recorded_pairs(**ranges: tuple[int, int]) -> list[tuple[Document, Document]]:
    made = tiny.pairs(**ranges)
    return [
        tuple(Document(pair["prompt"], pair[side]) for side in ("chosen", "rejected"))
        for pair in made
    ]  # type: ignore[misc]


def with_mismatched(completions: Sequence[Document]) -> list[Document]:
    """Each completion, followed by its prompt with the completion before it, as KTO needs them."""
    rotated = [completions[-1], *completions[:-1]]
    pairs = zip(completions, rotated, strict=True)
    return [each for one, other in pairs for each in (one, Document(one.prompt, other.completion))]


def with_reference(batch: Batch, reference: LanguageModel) -> Batch:
    return with_extras(batch, reference_logprobs=logprobs_under(reference, batch))


@pytest.mark.parametrize("name", IN_TRL)
def test_losses_and_gradients_of_pairs_are_those_of_trl(name: str) -> None:
    pairs = recorded_pairs(prompt=(1, 1), chosen=(8, 8)) if name == "orpo" else recorded_pairs()
    batch = with_reference(packed(one_row(pairs)), tiny_model(0.02, 1))
    if name == "dpo smoothed":
        # TRL smooths labels in its CPO trainer only, which has no reference: log-probabilities of 0
        # take its place.
        batch = with_extras(
            batch, reference_logprobs=torch.zeros(batch.batch_size, batch.sequence_length)
        )
    assert_as_trl(IN_TRL[name], lambda model: _loss_and_num_items(OBJECTIVES[name], model, batch))


def _loss_and_num_items(
    objective: Any, model: LanguageModel, batch: Batch
) -> tuple[Tensor, Tensor, Metrics]:
    total, metrics = objective.loss(model, batch)
    return total, objective.num_items(batch), metrics


@pytest.mark.parametrize(
    ("name", "coefficient", "margins"),
    [("reward", 0.0, [0.0] * 4), ("reward centred", 0.01, tiny.MARGINS)],
)
def test_losses_and_gradients_of_reward_models_are_those_of_trl(
    name: str, coefficient: float, margins: list[float]
) -> None:
    batch = with_extras(
        packed(one_row(recorded_pairs())),
        margins=[[margin for each in margins for margin in (each, 0.0)]],
    )
    objective = RewardModelObjective(center_rewards_coefficient=coefficient)
    assert_as_trl(name, lambda model: _loss_and_num_items(objective, model, batch), reward=True)


def test_loss_and_gradients_of_fine_tuning_are_those_of_trl() -> None:
    batch = packed([[chosen for chosen, _ in recorded_pairs()]])
    assert_as_trl("sft", lambda model: _loss_and_num_items(NextTokenObjective(), model, batch))


def test_loss_and_gradients_of_kto_are_those_of_trl() -> None:
    documents = with_mismatched([chosen for chosen, _ in recorded_pairs()])
    batch = with_reference(packed([documents]), tiny_model(0.02, 1))
    batch = with_extras(batch, kto_labels=[[1, 1, 0, 0, 1, 1, 0, 0]])
    metrics = assert_as_trl(
        "kto", lambda model: _loss_and_num_items(KTOObjective(**KTO_WEIGHTS), model, batch)
    )
    # TRL's own estimate of the KL divergence, from its log. It is above zero; otherwise the loss
    # would not depend on it.
    assert float(metrics["kl"][0] / metrics["kl"][1]) == pytest.approx(1.0061497688293457, rel=1e-5)


def sigma(x: Tensor) -> Tensor:
    return 1 / (1 + (-x).exp())


def plain_loss(
    name: str,
    chosen: list[Tensor],
    rejected: list[Tensor],
    before: tuple[list[Tensor], list[Tensor]],
) -> Tensor:
    """The loss of one pair from log p of each token under the policy and under the reference, as
    the papers write it.
    """
    (c, r), (mean_c, mean_r) = (
        (sum(chosen), sum(rejected)),
        (sum(chosen) / len(chosen), sum(rejected) / len(rejected)),
    )
    if name == "orpo":
        odds = [mean.exp() / (1 - mean.exp()) for mean in (mean_c, mean_r)]
        return -mean_c - 0.1 * sigma((odds[0] / odds[1]).log()).log()
    if name == "simpo":
        return -sigma(2.0 * mean_c - 2.0 * mean_r - 0.5).log()
    a, b = c - sum(before[0]), r - sum(before[1])
    u = 0.1 * (a - b)
    match name:
        case "dpo":
            return -sigma(u).log()
        case "dpo smoothed":
            return -0.9 * sigma(u).log() - 0.1 * sigma(-u).log()
        case "hinge":
            return torch.maximum(1 - u, torch.zeros_like(u))
        case "ipo":
            return (a / len(chosen) - b / len(rejected) - 1 / 0.2) ** 2
        case "robust":
            return (-0.8 * sigma(u).log() + 0.2 * sigma(-u).log()) / 0.6
        case "exo":
            return sigma(u) * (sigma(u) / 0.8).log() + sigma(-u) * (sigma(-u) / 0.2).log()
        case "nca":
            return -sigma(0.1 * a).log() - sigma(-0.1 * a).log() / 2 - sigma(-0.1 * b).log() / 2
        case "apo-zero":
            return 1 - sigma(0.1 * a) + sigma(0.1 * b)
        case "apo-down":
            return sigma(0.1 * a) + 1 - sigma(u)
    raise AssertionError(f"{name}: write its loss here, as the paper has it")


@pytest.mark.parametrize("name", OBJECTIVES)
def test_losses_and_gradients_of_pairs_are_those_of_an_oracle_that_goes_token_by_token(
    name: str,
) -> None:
    generator, model = drawn()
    pairs = drawn_pairs(generator, 4)
    reference = moved(model, 0.02, generator.initial_seed())
    batch = with_reference(packed([one_row(pairs[:3])[0], one_row(pairs[3:])[0]]), reference)
    total, metrics = OBJECTIVES[name].loss(model, batch)
    ours = total, gradient(total, model)
    wide, wide_reference = model.double(), reference.double()
    expected = sum(
        plain_loss(
            name,
            *(plain(wide, side) for side in pair),
            tuple(plain(wide_reference, side) for side in pair),
        )  # type: ignore[arg-type]
        for pair in pairs
    )
    assert isinstance(expected, Tensor)
    assert_same(ours, (expected.detach(), gradient(expected, wide)))
    assert OBJECTIVES[name].num_items(batch).item() == 4
    assert torch.equal(metrics["loss"][0], ours[0].detach())


def test_loss_and_gradient_of_kto_are_those_of_an_oracle_with_a_kl_estimate_for_each_sequence() -> (
    None
):
    generator, model = drawn()
    ones = [chosen for chosen, _ in drawn_pairs(generator, 6)]
    labels = [[1, 0, 1], [0, 1, 0]]
    rows = [ones[:3], ones[3:]]
    reference = moved(model, 0.05, generator.initial_seed())
    batch = with_reference(packed([with_mismatched(row) for row in rows]), reference)
    batch = with_extras(
        batch, kto_labels=[[label for label in row for _ in range(2)] for row in labels]
    )
    objective = KTOObjective(**KTO_WEIGHTS)
    total, _ = objective.loss(model, batch)
    ours = total, gradient(total, model)
    wide, wide_reference = model.double(), reference.double()
    expected = torch.zeros((), dtype=torch.float64)
    for row, of_row in zip(rows, labels, strict=True):
        ratios = [
            sum(plain(wide, one)) - sum(plain(wide_reference, one)) for one in with_mismatched(row)
        ]  # type: ignore[arg-type]
        z = max(0.0, sum(float(ratio) for ratio in ratios[1::2]) / 3)
        for ratio, label in zip(ratios[::2], of_row, strict=True):
            gain = 0.1 * (ratio - z)
            expected = expected + (1.3 * (1 - sigma(gain)) if label else 0.8 * (1 - sigma(-gain)))
    assert_same(ours, (expected.detach(), gradient(expected, wide)))
    assert objective.num_items(batch).item() == 6


def reward_model(seed: int) -> LanguageModel:
    shape = {**tiny.SHAPE, "vocab_size": 40, "hidden_size": 32, "intermediate_size": 48}
    return init_weights(build_model(ModelConfig(**shape, initializer_range=0.2, reward=True)), seed)


@pytest.mark.parametrize(
    ("coefficient", "margins"), [(0.0, [0.0] * 4), (0.01, [0.1, 0.2, 0.3, 0.4])]
)
def test_a_reward_model_learns_the_difference_of_rewards_at_last_tokens(
    coefficient: float, margins: list[float]
) -> None:
    generator, _ = drawn()
    model, pairs = reward_model(generator.initial_seed()), drawn_pairs(generator, 4)
    by_document = [margin for each in margins for margin in (each, 0.0)]
    batch = with_extras(
        packed([one_row(pairs[:3])[0], one_row(pairs[3:])[0]]),
        margins=[by_document[:6], by_document[6:]],
    )
    objective = RewardModelObjective(center_rewards_coefficient=coefficient)
    total, metrics = objective.loss(model, batch)
    ours = total, gradient(total, model)
    wide = model.double()

    def reward(one: Document) -> Tensor:
        ids = torch.tensor([one.prompt + one.completion])
        hidden = wide(
            ids, torch.arange(ids.shape[1])[None], torch.zeros_like(ids, dtype=torch.int32)
        )
        return wide.lm_head(hidden)[0, -1, 0]

    rewards = [(reward(chosen), reward(rejected)) for chosen, rejected in pairs]
    expected = torch.zeros((), dtype=torch.float64)
    for margin, (chosen, rejected) in zip(margins, rewards, strict=True):
        expected = (
            expected
            - sigma(chosen - rejected - margin).log()
            + coefficient * (chosen + rejected) ** 2
        )
    assert_same(ours, (expected.detach(), gradient(expected, wide)))
    right = sum(float(chosen) > float(rejected) for chosen, rejected in rewards)
    assert [part.item() for part in metrics["rewards/accuracy"]] == [right, 4]


EVERY: dict[str, Any] = {**OBJECTIVES, "kto": KTOObjective(**KTO_WEIGHTS)}


def full_batch(
    generator: torch.Generator, model: LanguageModel, arrange: Callable[..., Rows] = one_row
) -> Batch:
    """Five sequences of one to three pairs with the extras of all objectives."""
    rows = [arrange(drawn_pairs(generator, count))[0] for count in (1, 3, 2, 1, 2)]
    batch = with_reference(packed(rows), moved(model, 0.02, generator.initial_seed()))
    return with_extras(
        batch, kto_labels=[[number // 2 % 2 for number in range(len(row))] for row in rows]
    )


@pytest.mark.parametrize("name", EVERY)
def test_the_gradient_is_the_same_for_any_split_of_the_batch(name: str) -> None:
    generator, model = drawn()
    model.double()
    batch = full_batch(generator, model)
    objective = EVERY[name]
    whole, _ = objective.loss(model, batch)
    parts = [batch[rows] for rows in (slice(0, 1), slice(1, 3), slice(3, 5))]
    sums = [objective.loss(model, part)[0] for part in parts]
    assert sum(objective.num_items(part) for part in parts) == objective.num_items(batch)
    together = torch.stack([gradient(total, model) for total in sums]).sum(0)
    assert_same(
        (torch.stack(sums).sum().detach(), together),
        (whole.detach(), gradient(whole, model)),
        tolerance=1e-12,
    )


@pytest.mark.parametrize("name", OBJECTIVES)
def test_packed_pairs_have_the_losses_that_they_have_alone(name: str) -> None:
    generator, model = drawn()
    model.double()
    pairs, reference = drawn_pairs(generator, 4), moved(model, 0.02, generator.initial_seed())
    results = []
    for rows in (one_row(pairs), row_each(pairs)):
        total, _ = OBJECTIVES[name].loss(model, with_reference(packed(rows), reference))
        results.append((total.detach(), gradient(total, model)))
    assert_same(*results, tolerance=1e-11)


@pytest.mark.parametrize("name", EVERY)
def test_a_batch_without_labels_has_zero_loss_and_zero_gradients(name: str) -> None:
    generator, model = drawn()
    batch = full_batch(generator, model)
    batch.labels.fill_(-100)
    total, metrics = EVERY[name].loss(model, batch)
    assert total.item() == 0.0
    assert EVERY[name].num_items(batch).item() == 0.0
    assert all(part.item() == 0.0 for pair in metrics.values() for part in pair)
    assert torch.equal(
        gradient(total, model),
        torch.zeros(sum(each.numel() for each in model.parameters())).double(),
    )


def test_a_side_without_labels_makes_no_pair() -> None:
    generator, model = drawn()
    pairs = drawn_pairs(generator, 3)
    batch, fewer = packed(one_row(pairs)), packed(one_row(pairs[:2]))
    batch.labels[batch.document_ids == 5] = -100
    ours, reference = (OBJECTIVES["simpo"].loss(model, each)[0] for each in (batch, fewer))
    torch.testing.assert_close(ours, reference, rtol=1e-5, atol=0)
    assert OBJECTIVES["simpo"].num_items(batch).item() == 2


@pytest.mark.parametrize("name", ["dpo", "dpo smoothed"])
def test_with_the_policy_as_reference_the_loss_is_ln_2_and_no_pair_counts_as_correct(
    name: str,
) -> None:
    generator, model = drawn()
    batch = with_reference(packed(one_row(drawn_pairs(generator, 3))), model)
    total, metrics = OBJECTIVES[name].loss(model, batch)
    assert total.item() == pytest.approx(3 * math.log(2), rel=1e-6)
    assert metrics["rewards/accuracy"][0].item() == 0
    means = {name: float(sum_ / count) for name, (sum_, count) in metrics.items()}
    assert reference_mismatch_warning(means) is None


def test_a_reference_in_another_dtype_is_warned_of() -> None:
    generator, model = drawn()
    batch = packed(one_row(drawn_pairs(generator, 3)))
    with torch.autocast("cpu", torch.bfloat16):
        batch = with_reference(batch, model)
    _, metrics = OBJECTIVES["dpo"].loss(model, batch)
    warning = reference_mismatch_warning(
        {name: float(sum_ / count) for name, (sum_, count) in metrics.items()}
    )
    assert warning is not None
    assert "nats per token" in warning


def test_metrics_are_of_the_pairs() -> None:
    generator, model = drawn()
    pairs, reference = drawn_pairs(generator, 3), moved(model, 0.1, generator.initial_seed())
    _, metrics = OBJECTIVES["dpo"].loss(model, with_reference(packed(one_row(pairs)), reference))
    policy = [[float(sum(plain(model, side))) for side in pair] for pair in pairs]
    before = [[float(sum(plain(reference, side))) for side in pair] for pair in pairs]
    rewards = [
        [0.1 * (ours - theirs) for ours, theirs in zip(*each, strict=True)]
        for each in zip(policy, before, strict=True)
    ]
    expected = {
        "rewards/chosen": sum(chosen for chosen, _ in rewards),
        "rewards/rejected": sum(rejected for _, rejected in rewards),
        "rewards/margin": sum(chosen - rejected for chosen, rejected in rewards),
        "rewards/accuracy": sum(chosen > rejected for chosen, rejected in rewards),
        "logps/chosen": sum(chosen for chosen, _ in policy),
        "logps/rejected": sum(rejected for _, rejected in policy),
        "tokens/chosen": sum(len(chosen.completion) for chosen, _ in pairs),
        "tokens/rejected": sum(len(rejected.completion) for _, rejected in pairs),
    }
    for name, value in expected.items():
        assert metrics[name][0].item() == pytest.approx(value, rel=1e-4, abs=1e-4), name
        assert metrics[name][1].item() == 3


def test_a_batch_without_reference_logprobs_is_refused_by_name() -> None:
    generator, model = drawn()
    batch = packed(one_row(drawn_pairs(generator, 1)))
    with pytest.raises(ValueError, match="'reference_logprobs'"):
        OBJECTIVES["dpo"].loss(model, batch)
