"""Mixtures of experts: their products, their gradients, what is recomputed, and their optimizer."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM

from lmforge.core.errors import UserError
from lmforge.core.model.build import build_model
from lmforge.core.model.config import ModelConfig
from lmforge.core.model.config_json import to_config_json
from lmforge.core.model.init_weights import named_tensors
from lmforge.core.model.mixture.experts import MixtureOfExperts, Router
from lmforge.core.model.mixture.grouped_mm import grouped_linear
from lmforge.core.optim.muon import Muon
from lmforge.core.options.activation_checkpointing import CHECKPOINTING_MODES
from lmforge.core.options.sections import ModelOptions
from lmforge.core.parallel.activation_checkpointing import apply_activation_checkpointing
from lmforge.hf.export import export_folder
from lmforge.hf.resolve import model_config_from_options, resolve_model_config
from lmforge.hf.safetensors_file import SafetensorsFile, write_safetensors
from lmforge.hf.stored_experts import pieces, stored_name
from lmforge.hf.weights import load_folder
from tests.core.model.conftest import (
    ONE_BY_ONE,
    as_transformers_has_them,
    built,
    drawn_config,
    logits,
    one_document,
)
from tests.support.near_ties import drawn_without_near_ties, near_ties

# Each expert has tensors of its own on disk.
MIXTURES = ("mixtral", "olmoe", "qwen3_moe", "deepseek_v3")
BALANCED_BY_TRANSFORMERS = ("mixtral", "olmoe", "qwen3_moe", "gpt_oss")


def all_sparse(model_type: str) -> dict[str, Any]:
    """Fields with which every layer is a mixture."""
    own = {
        "qwen3_moe": {"mlp_only_layers": (), "decoder_sparse_step": 1},
        "deepseek_v3": {"first_k_dense_replace": 0},
    }
    return (
        {"n_group": 1, "topk_group": 1, **own[model_type]}
        if model_type == "deepseek_v3"
        else own.get(model_type, {})
    )


def assert_equal_gradients(ours: nn.Module, theirs: nn.Module, config: ModelConfig) -> None:
    gradients = {
        name: parameter.grad
        for name, parameter in ours.named_parameters()
        if parameter.grad is not None
    }
    found = as_transformers_has_them(gradients, config)
    for name, parameter in theirs.named_parameters():
        assert parameter.grad is not None, name
        bound = 1e-5 * float(parameter.grad.abs().max())
        torch.testing.assert_close(found[name], parameter.grad, rtol=0, atol=bound, msg=name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sizes", [(5, 6, 10), (8, 16, 32), (3, 7, 5), (1, 3, 2)])
def test_each_expert_multiplies_its_own_rows_whatever_the_widths(
    sizes: tuple[int, int, int], dtype: torch.dtype, draw: random.Random
) -> None:
    experts, outputs, inputs = sizes
    counts = [draw.choice([0, 1, 4, 9, 40]) for _ in range(experts - 1)] + [5]
    ends = torch.tensor(counts).cumsum(0).int()
    rows = torch.randn(sum(counts), inputs, dtype=dtype, requires_grad=True)
    weight = torch.randn(experts, outputs, inputs, dtype=dtype, requires_grad=True)

    def one_by_one(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
        return torch.cat(
            [each @ matrix.t() for each, matrix in zip(rows.split(counts), weight, strict=True)]
        )

    wanted = one_by_one(rows, weight, ends)
    upstream = torch.randn_like(wanted)
    compiled = torch.compile(grouped_linear, fullgraph=True, backend="aot_eager")
    with FlopCounterMode(display=False) as counted:
        found = grouped_linear(rows, weight, ends)
        gradients = torch.autograd.grad(found, (rows, weight), upstream)
    assert counted.get_total_flops() == 3 * 2 * sum(counts) * outputs * inputs
    tolerance = (
        {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 0.02, "atol": 0.1}
    )
    for each in (found, compiled(rows, weight, ends)):
        torch.testing.assert_close(each, wanted, **tolerance)
    torch.testing.assert_close(
        gradients, torch.autograd.grad(wanted, (rows, weight), upstream), **tolerance
    )


def test_on_a_cpu_numbers_of_rows_return_in_products_of_16_bits_since_each_new_one_needs_new_code(
    draw: random.Random,
) -> None:
    experts, width, rows = 4, 8, 1024
    shapes, weight = (
        set(),
        torch.randn(experts, width, width, dtype=torch.bfloat16, requires_grad=True),
    )
    for _ in range(30):
        counts = torch.tensor(draw.choices(range(experts), k=rows)).bincount(minlength=experts)
        inputs = torch.randn(rows, width, dtype=torch.bfloat16, requires_grad=True)
        with torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True
        ) as profile:
            grouped_linear(inputs, weight, counts.cumsum(0).int()).sum().backward()
        products = [
            str(event.input_shapes) for event in profile.events() if event.name == "aten::mm"
        ]
        assert len(products) == 3 * experts
        shapes |= set(products)
    assert len(shapes) < 30  # of 360


@pytest.mark.parametrize("scores", ["drawn", "equal"])
@pytest.mark.parametrize(
    ("model_type", "groups"),
    [
        *((each, 0) for each in BALANCED_BY_TRANSFORMERS),
        *(("deepseek_v3", each) for each in (1, 2, 3)),
    ],
)
def test_the_loss_and_every_gradient_are_those_of_transformers(
    model_type: str, groups: int, scores: str, draw: random.Random
) -> None:
    fields: dict[str, Any] = {
        "num_experts": 5,
        "num_experts_per_tok": 3,
        "output_router_logits": False,
    }
    if groups:
        fields |= {
            "n_group": groups,
            "topk_group": max(1, groups - 1),
            "num_experts": 5 if groups == 1 else 6,
        }
        fields |= {
            "num_hidden_layers": 2,
            "first_k_dense_replace": 1,
            "q_lora_rank": 14 * (groups % 2),
        }
    config = drawn_config(model_type, draw, **fields)
    ours = built(config)
    if scores == "equal":
        with torch.no_grad():
            for module in ours.modules():
                if isinstance(module, MixtureOfExperts):
                    for parameter in module.gate.parameters():
                        parameter.zero_()
    theirs = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(**to_config_json(config)), **ONE_BY_ONE
    )
    theirs.load_state_dict(
        as_transformers_has_them(dict(named_tensors(ours)), config), strict=False
    )
    rows = one_document(2, 30, config.vocab_size, None if scores == "equal" else ours)
    weights = torch.randn(2, 30, config.vocab_size)
    (ours.lm_head(ours(rows.tokens, rows.positions, rows.documents)) * weights).sum().backward()
    (theirs(rows.tokens).logits * weights).sum().backward()
    assert_equal_gradients(ours, theirs, config)


@pytest.mark.parametrize("model_type", BALANCED_BY_TRANSFORMERS)
def test_the_auxiliary_loss_of_one_row_is_that_of_transformers_divided_by_top_k(
    model_type: str, draw: random.Random
) -> None:
    fields = {
        "num_experts": 5,
        "num_experts_per_tok": 3,
        "router_aux_loss_coef": 0.7,
        "output_router_logits": True,
    }
    config = drawn_config(model_type, draw, num_hidden_layers=1, **fields | all_sparse(model_type))
    ours = built(config)
    theirs = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(**to_config_json(config)), **ONE_BY_ONE
    )
    theirs.load_state_dict(
        as_transformers_has_them(dict(named_tensors(ours)), config), strict=False
    )
    rows = one_document(1, 30, config.vocab_size, ours)
    weights = torch.randn(1, 30, config.vocab_size)
    ours.balance.begin_step(torch.tensor(1.0), torch.tensor(30.0), 1.0)
    (ours.lm_head(ours(rows.tokens, rows.positions, rows.documents)) * weights).sum().backward()
    result = theirs(rows.tokens, output_router_logits=True)
    ((result.logits * weights).sum() + 0.7 * result.aux_loss / 3).backward()
    assert_equal_gradients(ours, theirs, config)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (
            {"preset": "olmoe-1b-7b"},
            "the model trains without this loss (output_router_logits is false); add",
        ),
        (
            {"preset": "nano-moe", "output_router_logits": False},
            "the model trains without this loss",
        ),
        (
            {"source": "folder", "implementation": "transformers"},
            "not with model.implementation = transformers",
        ),
    ],
)
def test_a_weight_of_the_auxiliary_loss_that_nothing_would_use_is_refused(
    given: dict[str, Any], words: str
) -> None:
    with pytest.raises((UserError, ValidationError)) as refused:
        model_config_from_options(ModelOptions(**given, router_aux_loss_coef=0.1))
    assert words in str(refused.value)
    assert (
        model_config_from_options(
            ModelOptions(preset="nano-moe", router_aux_loss_coef=0.1)
        ).router_aux_loss_coef
        == 0.1
    )


def test_no_token_is_dropped_where_all_choose_one_expert() -> None:
    config = ModelConfig(
        100,
        16,
        1,
        2,
        24,
        model_type="qwen3_moe",
        num_experts=4,
        num_experts_per_tok=1,
        norm_topk_prob=True,
    )
    (block,) = config.block_kinds
    assert block.mixture
    mixture = MixtureOfExperts(config, block.mixture)
    with torch.no_grad():
        for parameter in mixture.parameters():
            parameter.normal_()
        mixture.gate.weight.zero_()
        mixture.gate.weight[2] = 1.0
    x = torch.rand(2, 50, 16)  # above zero, so that expert 2 has the highest score
    gate, up = (x @ mixture.experts.gate_up_proj[2].t()).chunk(2, dim=-1)
    wanted = (torch.nn.functional.silu(gate) * up) @ mixture.experts.down_proj[2].t()
    torch.testing.assert_close(mixture(x), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.needs("a C++ compiler")
def test_experts_are_chosen_in_compiled_code_whether_or_not_they_are_counted() -> None:
    """As validation does it, which counts nothing."""

    def choose(scores: Tensor, counts: Tensor | None) -> Tensor:
        return router(scores, None, counts)[1]

    config = ModelConfig(
        100, 16, 1, 2, 24, model_type="qwen3_moe", num_experts=4, num_experts_per_tok=2
    )
    router, rows = Router(config), torch.randn(9, 16)
    torch.nn.init.normal_(router.weight)
    compiled = torch.compile(choose, fullgraph=True, dynamic=False)
    for counts in (None, torch.zeros(4, dtype=torch.long)):
        assert torch.equal(compiled(rows, counts), choose(rows, counts))


class _Choices(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.count += function is torch.ops.lmforge.choose_experts.default
        return function(*args, **kwargs or {})


@pytest.mark.parametrize("mode", CHECKPOINTING_MODES)
def test_a_recomputation_uses_the_experts_that_the_forward_pass_chose(
    mode: str, draw: random.Random
) -> None:
    config = drawn_config("olmoe", draw, num_hidden_layers=3)
    model, plain = built(config), build_model(config)
    plain.load_state_dict(model.state_dict())
    apply_activation_checkpointing(model, mode)
    rows = one_document(2, 20, config.vocab_size, plain)
    with _Choices() as choices:
        for each in (model, plain):
            each(rows.tokens, rows.positions, rows.documents).square().sum().backward()
    assert choices.count == 2 * config.num_hidden_layers
    for name, parameter in model.named_parameters():
        if not name.startswith("lm_head"):
            torch.testing.assert_close(
                parameter.grad, plain.get_parameter(name).grad, rtol=1e-5, atol=1e-6, msg=name
            )


@pytest.mark.parametrize("groups", [1, 3])
def test_near_ties_of_experts_and_of_groups_are_counted_and_drawn_again(
    groups: int, draw: random.Random
) -> None:
    fields = {
        "num_experts": 6,
        "n_group": groups,
        "topk_group": 1,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 0,
    }
    model = built(drawn_config("deepseek_v3", draw, num_hidden_layers=1, **fields))
    rows, gate = one_document(2, 9, model.config.vocab_size), model.blocks[0].mlp.gate
    apart, tied = (
        [3.0, 2, 1, 0, -1, -2],
        [2, 1, 1 + 1e-6, 0, 0, 0] if groups == 1 else [2, 1, 2 + 1e-6, 1, 0, 0],
    )

    @torch.no_grad()
    def run(biases: list[float]) -> None:
        gate.weight.zero_()
        gate.e_score_correction_bias.copy_(torch.tensor(biases))
        logits(model, rows)

    with near_ties() as found:
        run(tied)
    assert found == [18]
    draws = iter([tied, apart])
    assert drawn_without_near_ties(lambda: next(draws), run) is apart


def test_muon_makes_the_matrix_of_each_expert_orthogonal_by_itself() -> None:
    stack = torch.nn.Parameter(torch.randn(3, 8, 5))
    single = [torch.nn.Parameter(each.clone()) for each in stack.detach()]
    gradient = torch.randn(3, 8, 5)
    for parameters, gradients in (([stack], [gradient]), (single, [*gradient])):
        options = {"lr": 0.1, "momentum": 0.9, "betas": (0.9, 0.95), "eps": 1e-8}
        optimizer = Muon(
            [{"params": parameters, "orthogonal": True, "weight_decay": 0.1}], **options
        )
        for parameter, each in zip(parameters, gradients, strict=True):
            parameter.grad = each.clone()
        optimizer.step()
    torch.testing.assert_close(
        stack.detach(), torch.stack([each.detach() for each in single]), rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize("model_type", MIXTURES)
def test_a_folder_that_lacks_an_expert_is_refused_with_its_layer(
    model_type: str, draw: random.Random, tmp_path: Path
) -> None:
    fields = {"num_experts": 5, "num_experts_per_tok": 2, "num_hidden_layers": 2}
    config = drawn_config(model_type, draw, **fields | all_sparse(model_type))
    model = built(config)
    export_folder(model, config, tmp_path / "out")
    file = SafetensorsFile(tmp_path / "out" / "model.safetensors")
    lost = next(name for name in file.entries if ".1." in name and ".experts.3." in name)
    tensors = {name: file.read(name) for name in file.entries if name != lost}
    write_safetensors(file.path, tensors, tensors.__getitem__)
    with pytest.raises(UserError, match=f"missing {lost}"):
        load_folder(tmp_path / "out", build_model(config))


def test_a_rank_reads_the_rows_of_its_own_experts_only(draw: random.Random) -> None:
    """Of every piece on disk, what the parts of all ranks ask for is there once, wherever a stack
    is cut.
    """
    config = drawn_config(
        "mixtral", draw, num_experts=5, num_experts_per_tok=2, num_hidden_layers=1
    )
    stack = torch.randn(5, 2 * config.expert_size, 6)
    name = "model.layers.0.mlp.experts.gate_up_proj"
    on_disk = {piece.name: piece.cut(stack) for piece in pieces(name, stack.shape, config)}
    assert [*on_disk][:2] == [
        f"model.layers.0.block_sparse_moe.experts.0.{each}.weight" for each in ("w1", "w3")
    ]
    assert (
        stored_name("model.layers.0.mlp.gate.weight", config)
        == "model.layers.0.block_sparse_moe.gate.weight"
    )
    rebuilt, numbers = torch.zeros_like(stack), 0
    cut = draw.randrange(1, 2 * config.expert_size)
    for experts in (slice(0, 2), slice(2, 3), slice(3, 5)):
        for rows in (slice(0, cut), slice(cut, 2 * config.expert_size)):
            local, part = rebuilt[experts, rows], (experts, rows, slice(0, 6))
            for piece in pieces(name, stack.shape, config):
                if (asked := piece.cut_part(local, part)) is not None:
                    target, wanted = asked
                    target.copy_(on_disk[piece.name][wanted])
                    numbers += target.numel()
    assert torch.equal(rebuilt, stack)
    assert numbers == stack.numel()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("model_type", MIXTURES)
def test_a_mixture_of_transformers_comes_back_byte_by_byte(
    model_type: str, dtype: torch.dtype, draw: random.Random, tmp_path: Path
) -> None:
    """All tensors, under their names, and every field of its config."""
    config = drawn_config(
        model_type,
        draw,
        num_experts=5,
        num_experts_per_tok=3,
        num_hidden_layers=2,
        **all_sparse(model_type),
    )
    theirs = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(**to_config_json(config)), dtype=dtype
    )
    for module in theirs.modules():
        # In fp32 in published files, and where transformers opens them.
        if hasattr(module, "e_score_correction_bias"):
            module.e_score_correction_bias = module.e_score_correction_bias.float()
    theirs.save_pretrained(tmp_path / "theirs")
    again = build_model(resolve_model_config(tmp_path / "theirs", {}))
    load_folder(tmp_path / "theirs", again)
    export_folder(again, again.config, tmp_path / "ours", dtype=dtype)
    stored, back = (
        SafetensorsFile(tmp_path / name / "model.safetensors") for name in ("theirs", "ours")
    )
    assert {name: (each.dtype, each.shape) for name, each in back.entries.items()} == {
        name: (each.dtype, each.shape) for name, each in stored.entries.items()
    }
    for name in stored.entries:
        assert torch.equal(
            back.read(name).view(torch.uint8), stored.read(name).view(torch.uint8)
        ), name
    read = [AutoConfig.from_pretrained(tmp_path / name).to_dict() for name in ("theirs", "ours")]
    for each in read:
        del each["_name_or_path"]
    assert read[0] == read[1]
