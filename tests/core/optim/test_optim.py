"""The learning rate of every step, and the optimizer's update of each tensor."""

import math
import re
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import lmforge.core.optim.schedules  # noqa: F401  imported when first used: the time of that is no example's
from lmforge.core import registry
from lmforge.core.errors import UserError
from lmforge.core.model.build import build_model
from lmforge.core.model.config import ModelConfig
from lmforge.core.model.init_weights import init_weights
from lmforge.core.model.layers import LanguageModel
from lmforge.core.optim.adamw import AdamW, stochastic_round_
from lmforge.core.optim.muon import orthogonalize
from lmforge.core.optim.optimizer import build_optimizer, named_optimizer_state
from lmforge.core.optim.schedules import build_schedule
from lmforge.core.options.builtin_names import BUILT_IN_NAMES
from lmforge.core.options.sections import GroupOptions, OptimizerOptions, ScheduleOptions
from lmforge.core.parallel.parallel_model import set_learning_rate
from tests.seeds import fresh_seed

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
    return [*map(build_schedule(ScheduleOptions(**options), steps, PEAK), range(steps))]


@pytest.mark.parametrize("name", [*FALLING, "constant"])
def test_warm_up_climbs_in_equal_steps_towards_the_peak(name: str) -> None:
    climbing = rates(100, name=name, warmup_steps=9)[:9]
    assert climbing == pytest.approx([PEAK * share / 10 for share in range(1, 10)])


@given(
    name=st.sampled_from(FALLING),
    steps=st.integers(2, 300),
    warmup_ratio=st.floats(0, 1),
    # Smaller ones round to few bits, so that nothing holds to 1e-12 of them.
    min_lr_ratio=st.just(0.0) | st.floats(1e-9, 1),
)
def test_after_warm_up_the_rate_is_at_its_peak_and_falls_to_its_final_share(
    name: str, steps: int, warmup_ratio: float, min_lr_ratio: float
) -> None:
    warmup = int(warmup_ratio * (steps - 2))
    every = rates(steps, name=name, warmup_steps=warmup, min_lr_ratio=min_lr_ratio)
    assert every[warmup] == PEAK
    assert every[-1] > 0  # a step at a rate of 0 would be wasted
    assert all(later <= earlier * (1 + 1e-12) for earlier, later in pairwise(every[warmup:]))
    assert all(0 <= rate <= PEAK * (1 + 1e-12) for rate in every)
    assert all(rate >= PEAK * min_lr_ratio * (1 - 1e-12) for rate in every[warmup:])


@pytest.mark.parametrize("name", FALLING)
@pytest.mark.parametrize(
    ("steps", "warmup", "decay"),
    [(1, 0, 1), (2, 1, 1), (9, 9, None), (100, 0, None), (101, 13, 30), (100, 10, 90), (100, 5, 1)],
)
def test_after_warm_up_each_step_has_the_rate_that_transformers_gives_it(
    name: str, steps: int, warmup: int, decay: int | None
) -> None:
    from transformers import optimization as theirs

    optimizer = torch.optim.SGD([torch.zeros(1)], lr=PEAK)
    # transformers' linear schedule has no other end.
    min_lr_ratio = 0.0 if name == "linear" else 0.2
    if name == "linear":
        scheduler = theirs.get_linear_schedule_with_warmup(optimizer, warmup, steps)
    elif name == "cosine":
        scheduler = theirs.get_cosine_with_min_lr_schedule_with_warmup(
            optimizer, warmup, steps, min_lr_rate=min_lr_ratio
        )
    else:
        last = decay or max(1, steps // 5)
        stable = max(0, steps - warmup - last)
        scheduler = theirs.get_wsd_schedule(
            optimizer,
            warmup,
            last,
            num_stable_steps=stable,
            decay_type="linear",
            min_lr_ratio=min_lr_ratio,
        )
    expected = []
    for _ in range(steps):
        expected += scheduler.get_last_lr()
        optimizer.step()
        scheduler.step()
    found = rates(
        steps, name=name, warmup_steps=warmup, decay_steps=decay, min_lr_ratio=min_lr_ratio
    )
    assert found[warmup:] == pytest.approx(expected[warmup:], rel=1e-13)


def test_a_constant_rate_stays_at_the_peak() -> None:
    assert rates(20, name="constant", warmup_steps=0) == [PEAK] * 20


def test_a_run_may_be_all_warm_up() -> None:
    for name in FALLING:
        assert rates(10, name=name, warmup_steps=10) == pytest.approx(
            [PEAK * share / 11 for share in range(1, 11)]
        )


def model_of(shape: str) -> LanguageModel:
    seed = fresh_seed()
    sizes: dict[str, Any] = {
        "vocab_size": 40,
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    model = init_weights(build_model(ModelConfig(**sizes, **SHAPES[shape])), seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1)  # biases begin at zero, where decay would not show
    return model


def with_gradients(model: LanguageModel, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)


# Every kind of optimizer there is.
KINDS: dict[str, dict[str, Any]] = {
    "adamw": {},
    "adamw bf16": {"state_dtype": "bf16"},
    "muon": {"name": "muon"},
    "muon bf16": {"name": "muon", "state_dtype": "bf16"},
    "adamw 8bit": {"state_dtype": "8bit"},
    "muon 8bit": {"name": "muon", "state_dtype": "8bit"},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_matrices_decay_and_vectors_do_not(shape: str, kind: str) -> None:
    model = model_of(shape)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    optimizer = build_optimizer(model, OptimizerOptions(lr=0.01, weight_decay=0.5, **KINDS[kind]))
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    decayed = set()
    for name, parameter in model.named_parameters():
        if torch.equal(parameter, before[name]):
            continue
        decayed.add(name)
        torch.testing.assert_close(parameter.detach(), before[name] * (1 - 0.01 * 0.5))
    assert decayed == {
        name
        for name in before
        if not name.endswith("bias") and "norm" not in name and ".ln_" not in name
    }


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_every_parameter_is_in_one_group_and_frozen_ones_in_none(shape: str, name: Any) -> None:
    model = model_of(shape)
    model.embeddings[0].weight.requires_grad_(False)
    some = (
        GroupOptions(pattern="up_proj|c_fc", lr_ratio=2.0),
        GroupOptions(pattern="norm|ln_", weight_decay=1.0),
    )
    optimizer = build_optimizer(model, OptimizerOptions(name=name, groups=some))
    grouped = [id(parameter) for group in optimizer.param_groups for parameter in group["params"]]
    assert len(grouped) == len(set(grouped))
    assert set(grouped) == {
        id(parameter) for parameter in model.parameters() if parameter.requires_grad
    }


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("lot", [2**25, 50])
def test_steps_are_those_of_adamw_as_published(
    own: bool, lot: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loshchilov and Hutter, algorithm 2, with the options' numbers; in lots that cut matrices as
    in ones that do not.
    """
    monkeypatch.setattr("lmforge.core.optim.adamw.MAX_CHUNK_NUMEL", lot)
    options = OptimizerOptions(lr=0.02, beta1=0.8, beta2=0.9, eps=1e-6, weight_decay=0.3)
    model = model_of("llama, tied")
    reference = {
        name: parameter.detach().double().clone() for name, parameter in model.named_parameters()
    }
    first = {name: torch.zeros_like(tensor) for name, tensor in reference.items()}
    second = {name: torch.zeros_like(tensor) for name, tensor in reference.items()}
    optimizer = build_optimizer(model, options)
    if own:
        optimizer = AdamW(optimizer.param_groups, lr=options.lr, betas=(0.8, 0.9), eps=1e-6)
    for step in range(1, 6):
        with_gradients(model, step)
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None
            gradient = parameter.grad.double()
            first[name] = 0.8 * first[name] + 0.2 * gradient
            second[name] = 0.9 * second[name] + 0.1 * gradient**2
            step_size = (
                first[name] / (1 - 0.8**step) / ((second[name] / (1 - 0.9**step)).sqrt() + 1e-6)
            )
            decay = 0.3 if parameter.ndim >= 2 else 0.0
            reference[name] -= 0.02 * (step_size + decay * reference[name])
        optimizer.step()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(
            parameter.detach().double(), reference[name], rtol=1e-4, atol=1e-6
        )


def copied(state: dict[str, dict[str, Tensor]]) -> dict[str, dict[str, Tensor]]:
    return {
        name: {key: tensor.detach().clone() for key, tensor in tensors.items()}
        for name, tensors in state.items()
    }


@pytest.mark.parametrize("kind", KINDS)
def test_state_is_named_after_parameters_and_filling_it_in_place_continues_bit_by_bit(
    kind: str,
) -> None:
    options = OptimizerOptions(lr=0.01, **KINDS[kind])
    model = model_of("gpt2")
    optimizer = build_optimizer(model, options)
    for step in range(3):
        with_gradients(model, step)
        optimizer.step()
    saved = copied(named_optimizer_state(model, optimizer))
    weights = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    assert list(saved) == list(weights)

    other = model_of("gpt2")
    fresh = build_optimizer(other, options)
    empty = named_optimizer_state(other, fresh)
    kinds = [
        {name: (tensor.shape, tensor.dtype) for name, tensor in of.items()}
        for of in (*empty.values(), *saved.values())
    ]
    assert kinds[: len(empty)] == kinds[len(empty) :]
    assert all(not tensor.any() for tensors in empty.values() for tensor in tensors.values())
    with torch.no_grad():
        for name, parameter in other.named_parameters():
            parameter.copy_(weights[name])
            for key, tensor in empty.get(name, {}).items():
                tensor.copy_(saved[name][key])
    for owner, its_optimizer in ((model, optimizer), (other, fresh)):
        with_gradients(owner, 99)
        its_optimizer.step()
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("kind", KINDS)
def test_asking_for_the_state_before_the_first_step_changes_nothing(kind: str) -> None:
    with_state, without = model_of("qwen3"), model_of("qwen3")
    without.load_state_dict(with_state.state_dict())
    for model in (with_state, without):
        optimizer = build_optimizer(model, OptimizerOptions(lr=0.01, **KINDS[kind]))
        if model is with_state:
            named_optimizer_state(model, optimizer)
        with_gradients(model, 1)
        optimizer.step()
    for mine, theirs in zip(with_state.parameters(), without.parameters(), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_the_rate_is_set_for_every_group_and_embedding_and_head_have_their_multiple(
    name: Any,
) -> None:
    model = model_of("gpt2")
    optimizer = build_optimizer(model, OptimizerOptions(name=name, embedding_lr_ratio=4.0))
    set_learning_rate(optimizer, 0.125)
    rates = {
        id(parameter): group["lr"]
        for group in optimizer.param_groups
        for parameter in group["params"]
    }
    tables = {
        id(parameter)
        for module in (*model.embeddings, model.lm_head)
        for parameter in module.parameters()
    }
    for parameter in model.parameters():
        assert rates[id(parameter)] == (0.5 if id(parameter) in tables else 0.125)


def test_the_first_group_whose_pattern_matches_a_name_counts() -> None:
    model = model_of("qwen3")
    groups = (
        GroupOptions(pattern=r"layers\.1\..*norm", lr_ratio=3.0),
        GroupOptions(pattern="norm|embed", weight_decay=0.25),
        GroupOptions(pattern="lm_head", lr_ratio=0.0, weight_decay=0.0),
    )
    optimizer = build_optimizer(
        model, OptimizerOptions(weight_decay=0.5, embedding_lr_ratio=4.0, groups=groups)
    )
    set_learning_rate(optimizer, 0.125)
    numbers = {
        id(parameter): (group["lr"], group["weight_decay"])
        for group in optimizer.param_groups
        for parameter in group["params"]
    }
    expected = {
        "model.layers.0.input_layernorm.weight": (0.125, 0.25),
        "model.layers.1.input_layernorm.weight": (0.375, 0.0),
        "model.layers.1.self_attn.q_norm.weight": (0.375, 0.0),
        "model.norm.weight": (0.125, 0.25),
        "model.embed_tokens.weight": (0.5, 0.25),
        "lm_head.weight": (0.0, 0.0),
        "model.layers.1.mlp.up_proj.weight": (0.125, 0.5),
    }
    result = {
        name: numbers[id(parameter)]
        for name, parameter in model.named_parameters()
        if name in expected
    }
    assert result == expected


@pytest.mark.parametrize(
    ("patterns", "complaint"),
    [
        (
            ["up_porj"],
            "no tensor has up_porj in its name; nearest: model.layers.0.mlp.up_proj.weight, ",
        ),
        (["norm", "^norm"], "no tensor has ^norm in its name; nearest: model.norm.weight, "),
        (
            ["mlp", "up_proj"],
            "all tensors with up_proj in their name are in an earlier group; put it before",
        ),
    ],
)
def test_a_pattern_without_a_parameter_is_refused_with_the_nearest_names(
    patterns: list[str], complaint: str
) -> None:
    options = OptimizerOptions(groups=tuple(GroupOptions(pattern=pattern) for pattern in patterns))
    with pytest.raises(UserError, match="^" + re.escape(f"optimizer.groups: {complaint}")):
        build_optimizer(model_of("qwen3"), options)


@pytest.mark.parametrize("shape", [(1, 24, 24), (3, 16, 48), (2, 48, 16), (1, 1, 7)])
def test_orthogonalising_brings_all_singular_values_near_one_and_keeps_their_directions(
    shape: tuple[int, ...],
) -> None:
    seed = fresh_seed()
    generator = torch.Generator().manual_seed(seed)
    rows, columns = shape[1:]
    left, _ = torch.linalg.qr(torch.randn(shape[0], rows, min(rows, columns), generator=generator))
    right, _ = torch.linalg.qr(
        torch.randn(shape[0], columns, min(rows, columns), generator=generator)
    )
    # A share of 1/50 of the length is what five iterations lift to where the others are.
    strengths = 0.1 + torch.rand(shape[0], 1, min(rows, columns), generator=generator)
    done = orthogonalize(left * strengths @ right.mT * 1000)
    values = left.mT @ done @ right
    diagonal = values.diagonal(dim1=1, dim2=2)
    assert diagonal.min() > 0.6
    assert diagonal.max() < 1.3
    torch.testing.assert_close(values, torch.diag_embed(diagonal), rtol=0, atol=1e-4)


def test_orthogonalising_zero_gives_zero() -> None:
    assert not orthogonalize(torch.zeros(2, 5, 3)).any()


@pytest.mark.parametrize("shape", SHAPES)
def test_muon_steps_hidden_matrices_as_torch_does_and_all_else_as_adamw(
    shape: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # torch's iteration runs in bf16 wherever it is: ours is made to here, and then the two differ
    # by how products round.
    monkeypatch.setattr("lmforge.core.optim.muon._compute_dtype", lambda device: torch.bfloat16)
    ours, theirs = model_of(shape), model_of(shape)
    theirs.load_state_dict(ours.state_dict())
    options: dict[str, Any] = {"lr": 0.01, "weight_decay": 0.3}
    optimizer = build_optimizer(ours, OptimizerOptions(name="muon", **options))
    hidden = [parameter for parameter in theirs.blocks.parameters() if parameter.ndim == 2]
    others = [
        parameter
        for parameter in theirs.parameters()
        if not any(parameter is matrix for matrix in hidden)
    ]
    references = [
        torch.optim.Muon(hidden, momentum=0.95, adjust_lr_fn="match_rms_adamw", **options),
        torch.optim.AdamW(
            [p for p in others if p.ndim == 2], betas=(0.9, 0.95), eps=1e-8, **options
        ),
        torch.optim.AdamW(
            [p for p in others if p.ndim == 1],
            betas=(0.9, 0.95),
            eps=1e-8,
            lr=0.01,
            weight_decay=0.0,
        ),
    ]
    for step in range(5):
        for model in (ours, theirs):
            with_gradients(model, step)
        for each in (optimizer, *references):
            each.step()
    for name, parameter in theirs.named_parameters():
        # Five steps of 0.01, of which 1/100 is bf16's rounding in five iterations.
        is_hidden = any(parameter is matrix for matrix in hidden)
        torch.testing.assert_close(
            ours.get_parameter(name), parameter, rtol=1e-5, atol=1e-3 if is_hidden else 1e-6
        )


def test_moments_in_bf16_take_half_the_memory_and_steps_stay_close_to_those_of_fp32() -> None:
    wide, narrow = model_of("qwen3"), model_of("qwen3")
    narrow.load_state_dict(wide.state_dict())
    before = {name: parameter.detach().clone() for name, parameter in wide.named_parameters()}
    optimizers = {
        model: build_optimizer(
            model, OptimizerOptions(lr=0.01, weight_decay=0.0, state_dtype=dtype)
        )
        for model, dtype in ((wide, "fp32"), (narrow, "bf16"))
    }
    for step in range(20):
        for model, optimizer in optimizers.items():
            with_gradients(model, step)
            optimizer.step()
    state = named_optimizer_state(narrow, optimizers[narrow])
    assert {
        tensor.dtype
        for tensors in state.values()
        for key, tensor in tensors.items()
        if key != "step"
    } == {torch.bfloat16}
    for name, parameter in wide.named_parameters():
        moved = (parameter - before[name]).norm()
        # Each step is off by some 2^-9 of itself, and they do not add up in one direction.
        assert (narrow.get_parameter(name) - parameter).norm() < 0.01 * moved, name


def test_the_second_moment_in_bf16_falls_as_it_does_in_fp32() -> None:
    """A step of 1/1000 is less than bf16 tells apart: rounded to nearest, this moment would stay
    where it was.
    """
    parameter = torch.nn.Parameter(torch.zeros(4096))
    optimizer = AdamW(
        [{"params": [parameter]}], lr=0.0, betas=(0.9, 0.999), eps=1e-8, state_dtype=torch.bfloat16
    )
    for step in range(1500):
        parameter.grad = torch.full((4096,), 1.0 if step < 500 else 0.0)
        optimizer.step()
    expected = (1 - 0.999**500) * 0.999**1000
    # The mean of 4096 numbers, each of which is off by some 1000 roundings of 2^-9 at random: 6 %
    # of itself.
    assert float(optimizer.state[parameter]["exp_avg_sq"].float().mean()) == pytest.approx(
        expected, rel=0.01
    )


def test_dithered_numbers_fit_bf16_and_are_right_on_average() -> None:
    seed = fresh_seed()
    numbers = torch.randn(50, 1, generator=torch.Generator().manual_seed(seed))
    dithered = numbers.expand(50, 10_000).contiguous()
    stochastic_round_([dithered], torch.tensor(float(seed % 2**20)))
    assert torch.equal(dithered, dithered.bfloat16().float())
    assert float((dithered / numbers - 1).abs().max()) <= 2**-7
    # One is off by 2^-7 / 2 at most on average, the mean of 10,000 by 1/100 of it: five times that
    # for luck.
    assert float((dithered.double().mean(1) / numbers[:, 0] - 1).abs().max()) < 5 * 2**-8 / 100
    exact = torch.tensor([0.0, -0.0, 1.5, -3.0, math.inf])
    kept = exact.clone()
    stochastic_round_([kept], torch.tensor(3.0))
    assert torch.equal(kept, exact)


def test_rounding_of_bf16_states_is_frozen() -> None:
    # A resumed run goes on with the same bits only while these stay. 1 + 2^-8 lies half way between
    # two numbers of bf16.
    upper = {0: "0111100011011001", 7: "0110011110100110"}
    for step, expected in upper.items():
        numbers = torch.full((16,), 1 + 2**-8)
        stochastic_round_([numbers], torch.tensor(float(step)))
        assert "".join("1" if number > 1 else "0" for number in numbers.tolist()) == expected


@pytest.mark.parametrize("name", BUILT_IN_NAMES["optimizer"])
def test_the_host_waits_for_the_device_in_no_step_of_an_optimizer_of_ours(name: str) -> None:
    assert registry.get("optimizer", name).facts["reads_found_inf"]


def test_stochastic_rounding_is_refused_where_an_optimizer_would_not_do_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(registry, "_entries", dict(registry._entries))
    registry.register("optimizer", "plain", lambda groups, options, own: torch.optim.AdamW(groups))
    options = OptimizerOptions.model_construct(name="plain", stochastic_rounding=True)
    with pytest.raises(
        UserError, match=r"stochastic_rounding: not with optimizer\.name = plain; use adamw or muon"
    ):
        build_optimizer(model_of(next(iter(SHAPES))), options)
