"""The distillation objective against TRL's recorded divergences, and against full logits in
fp64.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from lmforge.core.data.batch import Batch
from lmforge.core.data.labels import IGNORE_INDEX
from lmforge.core.data.order import token_rng_keys
from lmforge.core.losses.language import NextTokenObjective
from lmforge.core.losses.top_logprobs import drawn_tokens, top_log_probs
from lmforge.core.model.layers import LanguageModel
from lmforge.post.objectives import distillation
from lmforge.post.objectives.distillation import (
    DistillationConfig,
    DistillationObjective,
    TeacherHead,
)
from tests.core.losses.oracle import (
    Document,
    assert_as_trl,
    assert_same,
    drawn,
    drawn_pairs,
    gradient,
    moved,
    packed,
    tiny_model,
)
from tests.core.losses.oracle import with_extras as add
from tests.core.losses.tiny import DIVERGENCES, pairs

BETAS = (0.0, 0.3, 1.0)


def hidden_states(model: LanguageModel, batch: Batch) -> Tensor:
    with torch.no_grad():
        return model(batch.tokens, batch.positions, batch.document_ids)


def beside(
    teacher: LanguageModel, batch: Batch, config: DistillationConfig
) -> tuple[DistillationObjective, Batch]:
    """The objective and the batch with a teacher beside the student."""
    objective = DistillationObjective(config)
    objective.teacher_head = TeacherHead(
        teacher.lm_head.weight.detach(), softcap=teacher.lm_head.softcap
    )
    return objective, add(batch, teacher_hidden=hidden_states(teacher, batch))


def stored(
    teacher: LanguageModel, batch: Batch, config: DistillationConfig, k: int
) -> tuple[DistillationObjective, Batch]:
    """The same with the teacher's k likeliest tokens, or k drawn ones."""
    keys = torch.from_numpy(token_rng_keys(0, 0, *batch.tokens.shape)) if config.sampled else None
    ids, values = teacher.lm_head(
        hidden_states(teacher, batch),
        partial(
            top_log_probs,
            k=k,
            temperature=config.temperature,
            vocab_size=config.vocab_size,
            rng_keys=keys,
        ),
    )
    return DistillationObjective(config), add(
        batch, teacher_ids=ids.float(), teacher_logprobs=values
    )


@pytest.mark.parametrize("case", DIVERGENCES)
def test_divergences_and_gradients_are_those_of_trl(case: str) -> None:
    beta, temperature = DIVERGENCES[case]
    batch = packed([[Document(pair["prompt"], pair["chosen"]) for pair in pairs()]])
    objective, batch = beside(
        tiny_model(0.1, 3),
        batch,
        DistillationConfig(beta, temperature, kd_ratio=1.0, vocab_size=128),
    )

    def loss(model: LanguageModel) -> tuple[Tensor, Tensor, Any]:
        total, metrics = objective.loss(model, batch)
        return total, objective.num_items(batch), metrics

    assert_as_trl(case, loss)


def oracle(
    model: LanguageModel, teacher: LanguageModel, batch: Batch, config: DistillationConfig
) -> Tensor:
    """The loss from full logits in fp64, with Σ p log p/q as the paper writes it."""
    scored = batch.labels != IGNORE_INDEX

    def logits(each: LanguageModel) -> Tensor:
        return each.double().lm_head(each(batch.tokens, batch.positions, batch.document_ids))[
            scored
        ]

    ours, theirs = logits(model), logits(teacher).detach()
    s, t = (
        (each[:, : config.vocab_size] / config.temperature).softmax(-1) for each in (ours, theirs)
    )
    mixture = config.beta * t + (1 - config.beta) * s

    def kl(p: Tensor, q: Tensor) -> Tensor:
        return (p * (p / q).log()).sum()

    if config.beta == 0:
        distance = kl(t, s)
    elif config.beta == 1:
        distance = kl(s, t)
    else:
        distance = config.beta * kl(t, mixture) + (1 - config.beta) * kl(s, mixture)
    text = torch.nn.functional.cross_entropy(ours, batch.labels[scored], reduction="sum")
    return config.kd_ratio * distance + (1 - config.kd_ratio) * text


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize(
    ("kd_ratio", "temperature", "vocab_size", "cap"), [(1.0, 1.0, 40, None), (0.6, 1.7, 37, 2.0)]
)
def test_losses_and_gradients_are_those_of_full_logits_also_without_the_ids_that_pad(
    beta: float,
    kd_ratio: float,
    temperature: float,
    vocab_size: int,
    cap: float | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(distillation, "CHUNK_TOKENS", 7)
    generator, model = drawn()
    batch = packed(
        [[side for pair in drawn_pairs(generator, 2) for side in pair] for _ in range(2)]
    )
    batch.labels[batch.labels >= vocab_size] = 0
    model.lm_head.softcap = cap
    teacher = moved(model, 0.05, generator.initial_seed())
    config = DistillationConfig(beta, temperature, kd_ratio, vocab_size)
    objective, given = beside(teacher, batch, config)
    total, metrics = objective.loss(model, given)
    ours = total.detach(), gradient(total, model)
    expected = oracle(model, teacher, batch, config)
    assert_same(ours, (expected.detach(), gradient(expected, model)))
    parts = kd_ratio * metrics["kd_loss"][0] + (1 - kd_ratio) * metrics["lm_loss"][0]
    assert float(parts) == pytest.approx(float(total.detach()), rel=1e-6)


@pytest.mark.parametrize(("beta", "sampled"), [*((beta, False) for beta in BETAS), (0.0, True)])
def test_all_tokens_stored_are_as_the_teacher_itself(beta: float, sampled: bool) -> None:
    generator, model = drawn()
    batch = packed([[side for pair in drawn_pairs(generator, 3) for side in pair]])
    teacher, config = (
        moved(model, 0.05, generator.initial_seed()),
        DistillationConfig(beta, 1.3, 0.8, 40, sampled),
    )
    found = []
    for objective, given in (beside(teacher, batch, config), stored(teacher, batch, config, 40)):
        total, _ = objective.loss(model, given)
        found.append((total.detach(), gradient(total, model)))
    assert_same(*found)


@pytest.mark.parametrize("beta", BETAS)
def test_with_few_stored_tokens_all_others_are_one_outcome(beta: float) -> None:
    generator, model = drawn()
    batch = packed([[side for pair in drawn_pairs(generator, 3) for side in pair]])
    teacher, config = (
        moved(model, 0.05, generator.initial_seed()),
        DistillationConfig(beta, 1.0, 1.0, 38),
    )
    batch.labels[batch.labels >= 38] = 0
    objective, given = stored(teacher, batch, config, 5)
    total, _ = objective.loss(model, given)
    ours = total.detach(), gradient(total, model)
    scored, wide = batch.labels != IGNORE_INDEX, model.double()
    s, t = (
        each.double()
        .lm_head(each(batch.tokens, batch.positions, batch.document_ids))[scored][:, :38]
        .softmax(-1)
        for each in (wide, teacher)
    )
    ids = t.topk(5, dim=-1).indices

    def outcomes(p: Tensor) -> Tensor:
        return torch.cat([p.gather(1, ids), 1 - p.gather(1, ids).sum(-1, keepdim=True)], 1)

    s, t = outcomes(s), outcomes(t).detach()
    mixture = beta * t + (1 - beta) * s
    parts = {0.0: (t * (t / s).log()).sum(), 1.0: (s * (s / t).log()).sum()}
    mixed = beta * (t * (t / mixture).log()).sum() + (1 - beta) * (s * (s / mixture).log()).sum()
    expected = parts.get(beta, mixed)
    assert_same(ours, (expected.detach(), gradient(expected, wide)))


def test_likely_tokens_are_drawn_for_sure_and_no_token_twice() -> None:
    logprobs = (3 * torch.randn(500, 90, generator=torch.Generator().manual_seed(1))).log_softmax(
        -1
    )
    ids, values = drawn_tokens(
        logprobs.clone(), 12, torch.from_numpy(token_rng_keys(0, 0, 500, 1)).flatten()
    )
    assert all(len(set(row)) == 12 for row in ids.tolist())
    assert torch.equal(values[:, :-1], logprobs.gather(1, ids))
    taken = torch.zeros_like(logprobs).scatter(
        1, ids, torch.maximum(values[:, :-1], values[:, -1:]).exp()
    )
    assert torch.allclose(taken.sum(1), torch.ones(500))
    likely = logprobs > values[:, -1:] + 1e-6
    assert torch.equal(taken[likely], logprobs[likely].exp())
    # A teacher that is sure of one token has no others to draw.
    sure = torch.full((1, 9), distillation.NO_TOKEN)
    sure[0, 4] = 0.0
    ids, values = drawn_tokens(sure, 3, torch.zeros(1, dtype=torch.int64))
    assert (ids[0, 0], values[0, 0]) == (4, 0.0)
    assert torch.isfinite(values).all()
    assert torch.maximum(values[0, 1:-1], values[0, -1]).exp().sum() == 0


@pytest.mark.gpu
def test_a_gpu_draws_the_same_tokens_again_where_only_deterministic_algorithms_are_allowed() -> (
    None
):
    logprobs = torch.randn(200, 5000, device="cuda").log_softmax(-1)
    keys = torch.from_numpy(token_rng_keys(0, 0, 200, 1)).flatten().cuda()
    torch.use_deterministic_algorithms(True)
    try:
        (first, first_values), (again, again_values) = (
            drawn_tokens(logprobs, 64, keys) for _ in range(2)
        )
    finally:
        torch.use_deterministic_algorithms(False)
    assert torch.equal(first, again)
    assert torch.equal(first_values, again_values)


def test_drawn_tokens_give_on_average_what_the_whole_teacher_gives_and_the_likeliest_do_not() -> (
    None
):
    """Groups of draws of one batch: their mean is as far from the whole gradient as the variance
    between groups says.
    """
    groups, draws, k = 24, 30, 6
    generator, model = drawn(11)
    single = packed([[side for pair in drawn_pairs(generator, 2) for side in pair]])
    single.labels[single.labels >= 38] = 0
    teacher, config = moved(model, 0.1, 5), DistillationConfig(0.0, 1.2, 1.0, 38)
    objective, given = beside(teacher, single, config)
    total, _ = objective.loss(model, given)
    whole = torch.cat([total.detach().double()[None], gradient(total, model)])

    def average(repeated: Batch, config: DistillationConfig) -> Tensor:
        """Losses and gradients [groups, 1 + parameters] of `draws` copies of the batch each."""
        objective, given = stored(teacher, repeated, config, k)
        found = []
        for group in range(len(repeated.tokens) // draws):
            total, _ = objective.loss(model, given[group * draws : (group + 1) * draws])
            found.append(torch.cat([total.detach().double()[None], gradient(total, model)]) / draws)
        return torch.stack(found)

    found = average(Batch.cat([single] * groups * draws), replace(config, sampled=True))
    error, variance = found.mean(0) - whole, found.var(0) / groups
    assert error[0].abs() < 3 * variance[0].sqrt()
    assert error[1:].norm() < 1.5 * variance[1:].sum().sqrt()
    assert error[1:].norm() < 0.05 * whole[1:].norm()
    likeliest = average(Batch.cat([single] * draws), config)[0]
    assert (likeliest - whole)[1:].norm() > 8 * error[1:].norm()
    assert (likeliest - whole)[0].abs() > 8 * error[0].abs()


def test_a_kd_ratio_of_0_is_fine_tuning_and_sampled_tokens_are_no_text() -> None:
    generator, model = drawn()
    batch = packed([[side for pair in drawn_pairs(generator, 3) for side in pair]])
    objective, given = beside(moved(model, 0.05, 1), batch, DistillationConfig(0.5, 1.0, 0.0, 40))
    total, metrics = objective.loss(model, given)
    expected, _ = NextTokenObjective().loss(model, batch)
    assert_same(
        (total.detach(), gradient(total, model)),
        (expected.detach(), gradient(expected, model)),
        1e-6,
    )
    sampled = add(given, sampled=torch.ones_like(batch.tokens, dtype=torch.float32))
    total, metrics = objective.loss(model, sampled)
    assert (float(total.detach()), *map(float, metrics["lm_loss"])) == (0.0, 0.0, 0.0)
    assert metrics["kd_loss"][0] > 0


def test_a_head_of_a_teacher_is_cut_to_the_ids_of_the_student() -> None:
    head = TeacherHead(torch.arange(12.0).view(6, 2), bias=torch.arange(6.0))
    assert head.rows(2, 3).weight.tolist() == head.weight[2:5].tolist()
    padded = head.rows(4, 4).rows(5, 3)
    assert padded.weight.tolist() == [[10.0, 11.0], [0.0, 0.0], [0.0, 0.0]]
    assert padded.bias is not None
    assert padded.bias.tolist() == [5.0, 0.0, 0.0]
