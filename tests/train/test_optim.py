"""The learning rate of every step, and what the optimizer does to which tensor."""

import math
import secrets
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lmforge.config import OptimizerOptions, ScheduleOptions
from lmforge.model import build
from lmforge.model.layers import LanguageModel
from lmforge.model.shapes import ModelConfig
from lmforge.train.optim import build_optimizer, learning_rate, set_learning_rate, state_by_name

PEAK = 3e-3
FALLING = ("cosine", "linear", "warmup-stable-decay")
SHAPES: dict[str, dict[str, Any]] = {
    "llama, tied": {
        "intermediate_size": 24,
        "tie_word_embeddings": True,
        "attention_bias": True,
        "attention_output_bias": True,
    },
    "qwen3": {"model_type": "qwen3", "intermediate_size": 24, "qk_norm": True},
    "gpt2": {"model_type": "gpt2", "tie_word_embeddings": True, "max_position_embeddings": 32},
}


def rates(steps: int, **options: Any) -> list[float]:
    return [learning_rate(step, steps, ScheduleOptions(**options), PEAK) for step in range(steps)]


@pytest.mark.parametrize("name", [*FALLING, "constant"])
def test_warm_up_climbs_in_equal_steps_towards_the_peak(name: str) -> None:
    climbing = rates(100, name=name, warmup_steps=9)[:9]
    assert climbing == pytest.approx([PEAK * share / 10 for share in range(1, 10)])


@given(
    name=st.sampled_from(FALLING),
    steps=st.integers(2, 300),
    warmup_share=st.floats(0, 1),
    final_ratio=st.floats(0, 1),
)
def test_after_warm_up_the_rate_is_at_its_peak_and_falls_to_its_final_share(
    name: str, steps: int, warmup_share: float, final_ratio: float
) -> None:
    warmup = int(warmup_share * (steps - 2))
    every = rates(steps, name=name, warmup_steps=warmup, final_ratio=final_ratio)
    assert every[warmup] == PEAK
    assert every[-1] == pytest.approx(PEAK * final_ratio)
    assert all(later <= earlier * (1 + 1e-12) for earlier, later in pairwise(every[warmup:]))
    assert all(0 <= rate <= PEAK * (1 + 1e-12) for rate in every)
    assert all(rate >= PEAK * final_ratio * (1 - 1e-12) for rate in every[warmup:])


def test_the_shapes_of_falling_are_those_of_their_names() -> None:
    linear = rates(102, name="linear", warmup_steps=1, final_ratio=0.2)
    falls = [earlier - later for earlier, later in pairwise(linear[1:])]
    assert falls == pytest.approx([falls[0]] * len(falls))
    cosine = rates(102, name="cosine", warmup_steps=1, final_ratio=0.2)
    assert cosine[51] == pytest.approx(PEAK * 0.6)
    assert cosine[26] == pytest.approx(PEAK * (0.2 + 0.8 * (1 + math.cos(math.pi / 4)) / 2))


@pytest.mark.parametrize(("decay_steps", "falls_from"), [(None, 80), (30, 70), (1, 99)])
def test_warmup_stable_decay_keeps_the_peak_until_its_last_steps(decay_steps: int | None, falls_from: int) -> None:
    every = rates(100, name="warmup-stable-decay", warmup_steps=10, decay_steps=decay_steps, final_ratio=0.0)
    assert every[10:falls_from] == [PEAK] * (falls_from - 10)
    assert every[falls_from] < PEAK
    assert every[-1] == 0.0


def test_a_constant_rate_stays_at_the_peak() -> None:
    assert rates(20, name="constant", warmup_steps=0) == [PEAK] * 20


def test_a_run_may_be_all_warm_up() -> None:
    for name in FALLING:
        assert rates(10, name=name, warmup_steps=10) == pytest.approx([PEAK * share / 11 for share in range(1, 11)])


def model_of(shape: str) -> LanguageModel:
    seed = secrets.randbelow(2**31)
    print(f"seed {seed}")
    sizes: dict[str, Any] = {"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = build(ModelConfig(**sizes, **SHAPES[shape]), seed=seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1)  # biases begin at zero, where decay would not show
    return model


def with_gradients(model: LanguageModel, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)


@pytest.mark.parametrize("shape", SHAPES)
def test_matrices_decay_and_vectors_do_not(shape: str) -> None:
    model = model_of(shape)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    optimizer = build_optimizer(model, OptimizerOptions(lr=0.01, weight_decay=0.5))
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    decayed = set()
    for name, parameter in model.named_parameters():
        if torch.equal(parameter, before[name]):
            continue
        decayed.add(name)
        torch.testing.assert_close(parameter.detach(), before[name] * (1 - 0.01 * 0.5))
    assert decayed == {name for name in before if not name.endswith("bias") and "norm" not in name and ".ln_" not in name}


@pytest.mark.parametrize("shape", SHAPES)
def test_every_parameter_is_in_one_group_and_frozen_ones_in_none(shape: str) -> None:
    model = model_of(shape)
    model.embeddings[0].weight.requires_grad_(False)
    optimizer = build_optimizer(model, OptimizerOptions())
    grouped = [id(parameter) for group in optimizer.param_groups for parameter in group["params"]]
    assert len(grouped) == len(set(grouped))
    assert set(grouped) == {id(parameter) for parameter in model.parameters() if parameter.requires_grad}


def test_steps_are_those_of_adamw_as_published() -> None:
    """Loshchilov and Hutter, algorithm 2, with the options' numbers."""
    options = OptimizerOptions(lr=0.02, beta1=0.8, beta2=0.9, eps=1e-6, weight_decay=0.3)
    model = model_of("llama, tied")
    reference = {name: parameter.detach().double().clone() for name, parameter in model.named_parameters()}
    first = {name: torch.zeros_like(tensor) for name, tensor in reference.items()}
    second = {name: torch.zeros_like(tensor) for name, tensor in reference.items()}
    optimizer = build_optimizer(model, options)
    for step in range(1, 6):
        with_gradients(model, step)
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None
            gradient = parameter.grad.double()
            first[name] = 0.8 * first[name] + 0.2 * gradient
            second[name] = 0.9 * second[name] + 0.1 * gradient**2
            step_size = first[name] / (1 - 0.8**step) / ((second[name] / (1 - 0.9**step)).sqrt() + 1e-6)
            decay = 0.3 if parameter.ndim >= 2 else 0.0
            reference[name] -= 0.02 * (step_size + decay * reference[name])
        optimizer.step()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.detach().double(), reference[name], rtol=1e-4, atol=1e-6)


def copied(state: dict[str, dict[str, Tensor]]) -> dict[str, dict[str, Tensor]]:
    return {name: {key: tensor.detach().clone() for key, tensor in tensors.items()} for name, tensors in state.items()}


def test_state_is_named_after_parameters_and_filling_it_in_place_continues_bit_by_bit() -> None:
    model = model_of("gpt2")
    optimizer = build_optimizer(model, OptimizerOptions(lr=0.01))
    for step in range(3):
        with_gradients(model, step)
        optimizer.step()
    saved = copied(state_by_name(model, optimizer))
    weights = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    assert list(saved) == list(weights)

    other = model_of("gpt2")
    fresh = build_optimizer(other, OptimizerOptions(lr=0.01))
    empty = state_by_name(other, fresh)
    assert all(not tensor.any() for tensors in empty.values() for tensor in tensors.values())
    with torch.no_grad():
        for name, parameter in other.named_parameters():
            parameter.copy_(weights[name])
            for key, tensor in empty[name].items():
                tensor.copy_(saved[name][key])
    for owner, its_optimizer in ((model, optimizer), (other, fresh)):
        with_gradients(owner, 99)
        its_optimizer.step()
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_asking_for_the_state_before_the_first_step_changes_nothing() -> None:
    with_state, without = model_of("qwen3"), model_of("qwen3")
    without.load_state_dict(with_state.state_dict())
    for model in (with_state, without):
        optimizer = build_optimizer(model, OptimizerOptions(lr=0.01))
        if model is with_state:
            state_by_name(model, optimizer)
        with_gradients(model, 1)
        optimizer.step()
    for mine, theirs in zip(with_state.parameters(), without.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_the_rate_is_set_for_every_group_and_embedding_and_head_have_their_multiple() -> None:
    model = model_of("gpt2")
    optimizer = build_optimizer(model, OptimizerOptions(embedding_lr_ratio=4.0))
    set_learning_rate(optimizer, 0.125)
    rates = {id(parameter): group["lr"] for group in optimizer.param_groups for parameter in group["params"]}
    tables = {id(parameter) for module in (*model.embeddings, model.lm_head) for parameter in module.parameters()}
    for parameter in model.parameters():
        assert rates[id(parameter)] == (0.5 if id(parameter) in tables else 0.125)
