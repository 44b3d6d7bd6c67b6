"""Optimizer states in 8 bits and stochastically rounded weights: by the numbers, not by where ranks
cut them.
"""

from typing import Any

import pytest
import torch
import torchao.optim
from torch import Tensor

from lmforge.core.errors import UserError
from lmforge.core.model.build import build_model
from lmforge.core.model.init_weights import init_weights
from lmforge.core.model.quantization.blocks import pack_rows, row_bytes, unpack_rows
from lmforge.core.optim.adamw import AdamW
from lmforge.core.optim.optimizer import build_optimizer, named_optimizer_state
from lmforge.core.optim.stored import StochasticBF16
from lmforge.core.options.options import validate_options
from lmforge.core.options.sections import OptimizerOptions
from lmforge.core.options.stage import PretrainConfig
from lmforge.lab.bench.parity import SMALL_MODEL
from tests.seeds import fresh_random, fresh_seed
from tests.support.grids import parametrize

NUMBERS: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8}


def in_8bit(parameter: Tensor) -> AdamW:
    return AdamW(
        [{"params": [parameter], "stores_8bit": True, "weight_decay": 0.1}],
        state_dtype=torch.uint8,
        **NUMBERS,
    )


@pytest.mark.parametrize("codes", ["int8", "uint8"])
def test_rows_are_packed_as_in_the_whole_and_packing_rounds_by_less_than_a_code(codes: Any) -> None:
    draw = fresh_random()
    rows, columns = draw.randrange(2, 40), draw.randrange(1, 700)
    numbers = torch.randn(
        rows, columns, generator=torch.Generator().manual_seed(draw.randrange(1000))
    )
    numbers = numbers.abs() if codes == "uint8" else numbers
    packed, cut = pack_rows(numbers, codes), draw.randrange(rows)
    assert packed.shape == (rows, row_bytes(columns))
    assert torch.equal(
        torch.cat([pack_rows(numbers[:cut], codes), pack_rows(numbers[cut:], codes)]), packed
    )
    again = unpack_rows(packed, columns, codes)
    # The widest gap between two codes is 0.0141 of a block's largest number.
    assert float((again - numbers).abs().max()) <= 0.0071 * float(numbers.abs().max())
    assert not unpack_rows(torch.zeros_like(packed), columns, codes).any()


def test_steps_are_those_of_torchao_but_for_the_codes_that_rounding_chooses_otherwise() -> None:
    generator = torch.Generator().manual_seed(fresh_seed())
    start = torch.randn(64, 512, generator=generator) * 0.02
    ours, theirs, full = (torch.nn.Parameter(start.clone()) for _ in range(3))
    optimizers = (
        in_8bit(ours),
        torchao.optim.AdamW8bit([theirs], weight_decay=0.1, block_size=256, **NUMBERS),
        AdamW([{"params": [full], "weight_decay": 0.1}], **NUMBERS),
    )
    with torch.compiler.set_stance("force_eager"):
        for _ in range(100):
            gradient = torch.randn(64, 512, generator=generator) * torch.rand(
                64, 1, generator=generator
            )
            for parameter, optimizer in zip((ours, theirs, full), optimizers, strict=True):
                parameter.grad = gradient.clone()
                optimizer.step()
    changed = float((theirs - full).norm())
    assert 0.005 < changed / float((full - start).norm()) < 0.1
    # Rounding of fp32 chooses another code now and then, once in many seeds that of a block's
    # scale.
    apart = (ours - theirs).detach()
    assert float((apart.abs() > 1e-6).float().mean()) < 0.05
    assert float(apart.norm()) < 0.2 * changed


def test_a_step_in_8_bits_is_the_same_wherever_rows_are_cut(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("lmforge.core.optim.adamw.MAX_CHUNK_NUMEL", 700)
    start = torch.randn(30, 300, generator=torch.Generator().manual_seed(fresh_seed()))
    whole = torch.nn.Parameter(start.clone())
    parts = [torch.nn.Parameter(each.clone()) for each in start.split(13)]
    optimizers = {each: in_8bit(each) for each in (whole, *parts)}
    for step in range(4):
        gradient = torch.randn(30, 300, generator=torch.Generator().manual_seed(step))
        for parameter, part in zip((whole, *parts), (gradient, *gradient.split(13)), strict=True):
            parameter.grad = part.clone()
            optimizers[parameter].step()
    assert torch.equal(torch.cat([*parts]), whole)
    for name in ("exp_avg", "exp_avg_sq"):
        state = torch.cat([optimizers[each].state[each][name] for each in parts])
        assert torch.equal(state, optimizers[whole].state[whole][name])
        assert state.dtype == torch.uint8


def test_a_rounded_weight_is_right_on_average_and_the_same_for_any_part_of_it() -> None:
    key, step, skip = fresh_seed(), torch.tensor(5.0), torch.tensor(False)
    numbers = (
        torch.randn(64, 1, generator=torch.Generator().manual_seed(key))
        .expand(64, 5000)
        .contiguous()
    )

    def stored(first: int, last: int, step: Tensor) -> Tensor:
        weight = torch.zeros(5000 * (last - first), dtype=torch.bfloat16)
        part = StochasticBF16(weight, key, step, torch.tensor([5000 * first]), len(weight))
        for chunk, new in zip(
            part.split(1234), numbers[first:last].reshape(-1).split(1234), strict=True
        ):
            chunk.store(new, skip)
        return weight.view(-1, 5000)

    whole = stored(0, 64, step)
    assert torch.equal(torch.cat([stored(0, 23, step), stored(23, 64, step)]), whole)
    assert not torch.equal(stored(0, 64, step + 1), whole)
    # One is off by 2^-7 / 2 at most on average, the mean of 5,000 by 1/70 of it: five times that
    # for luck.
    assert float((whole.double().mean(1) / numbers[:, 0] - 1).abs().max()) < 5 * 2**-8 / 70


@parametrize("name", ["adamw", "muon"], fast=(0,))
def test_steps_below_the_spacing_of_bf16_add_up_only_where_they_are_rounded_at_random(
    name: Any,
) -> None:
    moved = {}
    for rounding in (False, True):
        model = init_weights(build_model(SMALL_MODEL), 0).to(torch.bfloat16)
        weight = model.get_parameter("model.layers.0.mlp.up_proj.weight")
        with torch.no_grad():
            weight.fill_(1.0)
        options = OptimizerOptions(
            name=name, lr=1e-4, weight_decay=0.5, stochastic_rounding=rounding
        )
        optimizer = build_optimizer(model, options)
        for _ in range(100):
            for parameter in model.parameters():
                parameter.grad = torch.zeros_like(parameter)
            optimizer.step()
        moved[rounding] = 1 - float(weight.detach().float().mean())
    assert moved[False] == 0
    # 100 decays by 5e-5; each of 6,400 numbers falls by 2^-8 with a probability of 1/78.
    assert moved[True] == pytest.approx(1 - (1 - 5e-5) ** 100, rel=0.05)


def test_matrices_of_blocks_take_2_1_bytes_and_all_others_stay_in_fp32() -> None:
    model = init_weights(build_model(SMALL_MODEL), 0)
    optimizer = build_optimizer(model, OptimizerOptions(state_dtype="8bit"))
    state = named_optimizer_state(model, optimizer)
    for name, parameter in model.named_parameters():
        moments = [state[name][moment] for moment in ("exp_avg", "exp_avg_sq")]
        in_block = name.startswith("model.layers") and parameter.ndim == 2
        assert {each.dtype for each in moments} == {torch.uint8 if in_block else torch.float32}
        scales = 2 * 4 * parameter.shape[0] if in_block else 0  # the rows are shorter than a block
        assert (
            sum(each.nbytes for each in moments)
            == (2 if in_block else 8) * parameter.numel() + scales
        )
    wide = torch.nn.Parameter(torch.zeros(8, 2048))
    states = [
        each
        for key, each in in_8bit(wide).get_or_init_state(wide, {"stores_8bit": True}).items()
        if key != "step"
    ]
    assert sum(each.nbytes for each in states) <= 2.1 * wide.numel()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"optimizer": {"state_dtype": "8bit"}, "parallel": {"tensor_parallel_degree": 2}},
            "8bit: not with parallel.tensor",
        ),
        (
            {"optimizer": {"state_dtype": "8bit"}, "parallel": {"engine": "fsdp1"}},
            "8bit: not with parallel.engine = fsdp1",
        ),
        ({"optimizer": {"stochastic_rounding": True}}, "only with train.master_dtype = bf16"),
    ],
)
def test_what_does_not_go_together_is_refused_in_a_line(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        validate_options(PretrainConfig, options)
