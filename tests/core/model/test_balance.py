"""What keeps experts equally busy: losses by their formulas, biases by the counts of the global
batch.
"""

import random

import pytest
import torch
from torch import Tensor

from lmforge.core.distributed.distributed import DistributedContext
from lmforge.core.distributed.rank_info import RankInfo
from lmforge.core.errors import UserError
from lmforge.core.model.mixture.balance import BalanceConfig
from lmforge.core.model.mixture.experts import MixtureOfExperts
from lmforge.core.options.sections import ModelOptions
from lmforge.hf.resolve import model_config_from_options
from tests.core.model.conftest import Rows, built, drawn_config, packed

ALONE = DistributedContext(RankInfo(), torch.device("cpu"), None)
FIELDS = {
    "num_hidden_layers": 2,
    "first_k_dense_replace": 0,
    "num_experts": 6,
    "n_group": 3,
    "topk_group": 2,
}
FIELDS |= {"num_experts_per_tok": 3, "router_aux_loss_coef": 0.7}
ROWS, TOKENS = torch.tensor(2.0), torch.tensor(62.0)


def stepped(model: torch.nn.Module) -> tuple[Rows, list[MixtureOfExperts]]:
    """Packed rows with padding whose losses of balance alone gave the gradients, and the
    mixtures.
    """
    model.balance.begin_step(ROWS, TOKENS, 1.0)
    rows = packed([[20, 11], [13, 18]], model.config.vocab_size, padding=7)
    (model(rows.tokens, rows.positions, rows.documents) * 0).sum().backward()
    return rows, [block.mlp for block in model.blocks]


def routed(model: torch.nn.Module, rows: Rows) -> list[Tensor]:
    """The logits of the routers, without a loss of balance on the way to them."""
    logits: list[Tensor] = []
    for block in model.blocks:
        block.mlp.balance = None
        block.mlp.gate.register_forward_hook(lambda gate, args, result: logits.append(result[3]))
    model(rows.tokens, rows.positions, rows.documents)
    return logits


@pytest.mark.parametrize("scope", ["row", "global_batch"])
def test_the_losses_are_those_of_their_papers(scope: str, draw: random.Random) -> None:
    model = built(drawn_config("deepseek_v3", draw, output_router_logits=True, **FIELDS))
    model.balance.config = BalanceConfig(scope, z_loss_coef=0.3)
    model.balance.count_on(torch.device("cpu"))
    before = model.balance.previous.copy_(torch.randint(1, 9, (2, 6)))
    rows, mixtures = stepped(model)
    is_token = rows.documents >= 0
    found = [each.gate.weight.grad.clone() for each in mixtures]
    model.zero_grad()
    logits = routed(model, rows)
    loss = torch.zeros(())
    for number, (of_layer, mixture) in enumerate(zip(logits, mixtures, strict=True)):
        scores = of_layer.sigmoid()
        probabilities = (scores / scores.sum(-1, keepdim=True)).unflatten(0, is_token.shape)
        chosen = mixture.gate._to_choose_by(scores.detach()).topk(3).indices
        choices = torch.nn.functional.one_hot(chosen, 6).sum(1).unflatten(0, is_token.shape)
        if scope == "row":
            for row, mask in enumerate(is_token):
                # F of DeepSeek-V3, equation 18.
                fractions = choices[row][mask].sum(0) * 6 / (3 * mask.sum())
                loss = loss + 0.7 * (fractions * probabilities[row][mask].mean(0)).sum() / 2 / 2
        else:
            fractions = before[number] / before[number].sum()
            loss = loss + 0.7 * 6 * (fractions * probabilities[is_token].mean(0)).sum() / 2
        loss = loss + 0.3 * of_layer.logsumexp(-1)[is_token.flatten()].square().mean() / 2
    loss.backward()
    for mixture, gradient in zip(mixtures, found, strict=True):
        wanted = mixture.gate.weight.grad
        torch.testing.assert_close(gradient, wanted, rtol=0, atol=1e-5 * float(wanted.abs().max()))


def test_the_loss_over_the_global_batch_is_constant_before_there_was_one(
    draw: random.Random,
) -> None:
    model = built(drawn_config("deepseek_v3", draw, output_router_logits=True, **FIELDS))
    model.balance.config = BalanceConfig("global_batch")
    model.balance.count_on(torch.device("cpu"))
    _, mixtures = stepped(model)
    assert all(float(each.gate.weight.grad.abs().max()) < 1e-6 for each in mixtures)


def test_the_biases_move_towards_experts_that_got_less_and_not_in_a_bad_step(
    draw: random.Random,
) -> None:
    model = built(drawn_config("deepseek_v3", draw, output_router_logits=False, **FIELDS))
    model.balance.config = BalanceConfig(bias_update_speed=0.25)
    model.balance.count_on(torch.device("cpu"))
    rows, mixtures = stepped(model)
    biases = [each.gate.e_score_correction_bias for each in mixtures]
    before = [each.clone() for each in biases]
    model.balance.end_step(ALONE, torch.tensor(True))
    assert all(torch.equal(*pair) for pair in zip(biases, before, strict=True))
    model.balance.end_step(ALONE, torch.tensor(False))
    for bias, old, mixture in zip(biases, before, mixtures, strict=True):
        assert int(mixture.counts.sum()) == 3 * int((rows.documents >= 0).sum())
        torch.testing.assert_close(
            bias - old, 0.25 * torch.sign(mixture.counts.float().mean() - mixture.counts)
        )


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (
            {"preset": "nano", "router_z_loss_coef": 0.1},
            "model.router_z_loss_coef: this model has no experts to balance",
        ),
        (
            {"preset": "nano-moe", "bias_update_speed": 0.1},
            "so an export would compute other logits; leave it out, or use",
        ),
        (
            {"preset": "olmoe-1b-7b", "router_aux_loss_scope": "global_batch"},
            "the model trains without this loss; add",
        ),
    ],
)
def test_a_way_of_balancing_that_a_model_has_not_is_refused(
    given: dict[str, object], words: str
) -> None:
    with pytest.raises(UserError) as refused:
        model_config_from_options(ModelOptions(**given))
    assert words in str(refused.value)
