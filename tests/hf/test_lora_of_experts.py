"""Low-rank adapters of a mixture's experts and router: computed, trained and stored as PEFT's
target_parameters are.
"""

import json
import random
from functools import partial
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from pydantic import ValidationError
from torch import Tensor
from transformers import AutoModelForCausalLM

from lmforge.cli import run as command
from lmforge.core.data.tokenizer import Tokenizer
from lmforge.core.errors import UserError
from lmforge.core.model.build import build_model
from lmforge.core.model.config import ModelConfig
from lmforge.core.model.init_weights import init_adapters, init_weights
from lmforge.core.model.lora import add_lora, disable_adapters
from lmforge.core.model.lora_config import LoraConfig, adapter_parameters
from lmforge.core.options.activation_checkpointing import CHECKPOINTING_MODES
from lmforge.core.parallel.activation_checkpointing import apply_activation_checkpointing
from lmforge.core.parallel.working_weights import working_weights
from lmforge.core.records.runs import Run
from lmforge.core.stages.parameter_counts import count_parameters
from lmforge.hf.export import export_folder
from lmforge.hf.merge_adapters import merge_adapters
from lmforge.hf.peft_folder import load_peft_folder, save_peft_folder
from lmforge.hf.turned_experts import adapters_beside_folder, adapters_of_model
from lmforge.hf.weights import load_folder
from lmforge.lab.plan.adapters import block_adapters
from lmforge.post.options.tuning import LoraOptions
from lmforge.serve.decoding.model_loading import load_model
from tests.core.model.conftest import ONE_BY_ONE, built, drawn_config
from tests.core.model.test_experts import MIXTURES, all_sparse
from tests.core.model.test_lora import (
    assert_close,
    gradients,
    logits,
    one_document,
    set_adapters,
    with_adapters,
)
from tests.support.near_ties import drawn_without_near_ties

ALL = ("experts.gate_up_proj", "experts.down_proj", "gate.weight")
TARGETS = {
    "all and linear layers": LoraConfig(
        3, 7.5, target_modules=("q_proj", "o_proj"), target_parameters=ALL
    ),
    "experts": LoraConfig(
        2, 4.0, target_modules=(), target_parameters=("experts.down_proj", "experts.gate_up_proj")
    ),
    "one of them": LoraConfig(
        3, 5, target_modules=(), target_parameters=("mlp.experts.gate_up_proj",), use_rslora=True
    ),
    "router": LoraConfig(
        1, 2.0, target_modules=("v_proj",), target_parameters=("mlp.gate.weight",)
    ),
}
TARGETS_OF = [
    *((model_type, "all and linear layers") for model_type in (*MIXTURES, "gpt_oss")),
    ("qwen3_moe", "experts"),
    *(
        pytest.param("qwen3_moe", name, marks=pytest.mark.slow)
        for name in ("one of them", "router")
    ),
]


def drawn(model_type: str, draw: random.Random, **fixed: Any) -> ModelConfig:
    """With a mixture in the second layer at least."""
    sparse: dict[str, Any] = (
        {"mlp_only_layers": (0,), "decoder_sparse_step": 1} if model_type == "qwen3_moe" else {}
    )
    if model_type == "deepseek_v3":
        sparse = {"first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "q_lora_rank": 0}
    experts = {"num_experts": 5, "num_experts_per_tok": 3}
    return drawn_config(model_type, draw, num_hidden_layers=2, **(experts | sparse | fixed))


def theirs_in(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, **ONE_BY_ONE)


def their_gradients(theirs: Any, shape: ModelConfig) -> dict[str, Tensor]:
    """Of PEFT's model after a backward pass, by our names and in our layout: as its folder is
    read.
    """
    with torch.no_grad():
        for parameter in theirs.parameters():
            if parameter.requires_grad:
                assert parameter.grad is not None
                parameter.copy_(parameter.grad)
    theirs.save_pretrained("gradients")
    return adapters_of_model(load_peft_folder("gradients")[1], shape)


@pytest.mark.parametrize(("model_type", "named"), TARGETS_OF)
def test_forward_gradients_and_merge_are_those_of_peft(
    model_type: str,
    named: str,
    draw: random.Random,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    shape, config = drawn(model_type, draw, output_router_logits=False), TARGETS[named]
    model = built(shape)
    export_folder(model, shape, tmp_path / "base")
    with_adapters(model, config, seed=7)
    batch = drawn_without_near_ties(
        lambda: one_document(3, 17, shape.vocab_size), partial(logits, model)
    )
    with disable_adapters(model):
        plain = logits(model, batch)
    stored = adapters_beside_folder(adapter_parameters(model), shape)
    save_peft_folder(tmp_path / "adapters", stored, config, str(tmp_path / "base"))
    theirs = peft.PeftModel.from_pretrained(
        theirs_in(tmp_path / "base"), tmp_path / "adapters", is_trainable=True
    )
    assert sum(p.requires_grad for p in theirs.parameters()) == len(adapter_parameters(model))
    wanted = theirs(batch.tokens).logits
    assert_close(logits(model, batch), wanted)
    assert float((wanted - plain).detach().abs().max()) > 1e-3

    again, tensors = load_peft_folder(tmp_path / "adapters")
    tensors = adapters_of_model(tensors, shape)
    for name, parameter in adapter_parameters(model).items():
        assert torch.equal(tensors[name], parameter), name
    merged = build_model(shape)
    load_folder(tmp_path / "base", merged)
    merge_adapters(merged, again, tensors, "adapters")
    assert_close(logits(merged, batch), wanted)

    torch.nn.functional.cross_entropy(
        wanted.flatten(0, 1), batch.labels.flatten(), reduction="sum"
    ).backward()
    mine, of_theirs = gradients(model, batch), their_gradients(theirs, shape)
    assert mine.keys() == of_theirs.keys() == adapter_parameters(model).keys()
    for name, gradient in mine.items():
        assert_close(gradient, of_theirs[name])
    with torch.no_grad(), disable_adapters(model):
        assert torch.equal(logits(model, batch), plain)


@pytest.mark.parametrize(
    "options",
    [{"target_modules": "all-linear"}, {"target_modules": [], "target_parameters": [*ALL]}],
)
@pytest.mark.parametrize(
    "model_type",
    ["mixtral", "qwen3_moe", "gpt_oss", pytest.param("olmoe", marks=pytest.mark.slow)],
)
def test_adapters_that_peft_made_are_opened_and_merged(
    model_type: str,
    options: dict[str, Any],
    draw: random.Random,
    tmp_path: Path,
    byte_tokenizer: Tokenizer,
) -> None:
    """For all-linear PEFT takes experts and router too, gate_up_proj with twice the rank."""
    shape = drawn(model_type, draw, vocab_size=270, **all_sparse(model_type))
    byte_tokenizer.save(tmp_path / "tokenizer")
    export_folder(built(shape), shape, tmp_path / "base", tokenizer_folder=tmp_path / "tokenizer")
    patterns = (
        {}
        if "target_parameters" not in options
        else {"rank_pattern": {r"1\.mlp\.experts\.down_proj": 4}}
    )
    if model_type == "gpt_oss" and patterns:
        options = {**options, "target_parameters": [*ALL[:2], "router.weight"]}
    chosen = peft.LoraConfig(r=3, lora_alpha=7, **options, **patterns)
    theirs = peft.get_peft_model(theirs_in(tmp_path / "base"), chosen).eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    theirs.peft_config["default"].base_model_name_or_path = str(tmp_path / "base")
    theirs.save_pretrained(tmp_path / "adapters")
    model = load_model(tmp_path / "adapters", torch.device("cpu"), torch.float32).model
    batch = drawn_without_near_ties(lambda: one_document(2, 13, 261), partial(logits, model))
    wanted = theirs(batch.tokens).logits
    assert_close(logits(model, batch), wanted)
    export_folder(model, shape, tmp_path / "merged")
    assert_close(theirs_in(tmp_path / "merged")(batch.tokens).logits, wanted)
    if not patterns:
        return
    (tmp_path / "adapters" / "adapter_config.json").write_text(
        json.dumps(
            json.loads((tmp_path / "adapters" / "adapter_config.json").read_text())
            | {"rank_pattern": {}}
        )
    )
    with pytest.raises(UserError, match=r"adapters\.down_proj: not a pair of matrices of rank 3"):
        load_peft_folder(tmp_path / "adapters")


def test_dropout_and_targets_that_are_no_parameters_of_a_mixture_are_refused() -> None:
    with pytest.raises(
        ValidationError, match=r"lora\.dropout: not with lora\.target_parameters, as in PEFT"
    ):
        LoraOptions(rank=2, dropout=0.1, target_parameters=ALL)
    mixture = ModelConfig(
        50, 16, 1, 2, 24, model_type="qwen3_moe", num_experts=4, num_experts_per_tok=1
    )
    dense = ModelConfig(50, 16, 1, 2, 24)
    for config, targets, complaint in (
        (
            mixture,
            ("experts.up_proj",),
            "is called experts.up_proj; there are: experts.down_proj, experts.gate_up_proj, gate.w",
        ),
        (
            mixture,
            ("q_proj.weight",),
            "no parameter of a mixture of experts is called q_proj.weight",
        ),
        (dense, ALL, "there are: none, since it has no experts"),
    ):
        with pytest.raises(UserError, match=complaint):
            add_lora(build_model(config), LoraConfig(2, 4, target_parameters=targets))


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("mode", CHECKPOINTING_MODES)
def test_gradients_are_the_same_when_recomputed_and_in_one_compiled_graph(
    mode: str, compiled: bool, draw: random.Random
) -> None:
    shape, config = drawn("olmoe", draw), TARGETS["all and linear layers"]
    batch = one_document(2, 16, shape.vocab_size)
    model = with_adapters(built(shape), config, seed=1)
    wanted = gradients(model, batch)
    apply_activation_checkpointing(model, mode, every=1)
    torch._dynamo.reset()
    if compiled:
        for block in model.blocks:
            block.compile(fullgraph=True, dynamic=False, backend="aot_eager")
    for name, gradient in gradients(model, batch).items():
        assert_close(gradient, wanted[name])


def test_in_bf16_the_gradients_are_those_of_fp32_but_for_rounding(draw: random.Random) -> None:
    shape, config = drawn("qwen3_moe", draw, norm_topk_prob=True), TARGETS["experts"]
    batch = one_document(2, 16, shape.vocab_size)
    model = with_adapters(built(shape), config, seed=1)
    wanted = gradients(model, batch)
    with torch.autocast("cpu", torch.bfloat16), working_weights(model, torch.bfloat16):
        found = gradients(model, batch)
    assert found.keys() == wanted.keys()
    flat, exact = (
        torch.cat([each.flatten() for each in (found, wanted)[which].values()]) for which in (0, 1)
    )
    assert all(each.dtype == torch.float32 for each in found.values())
    # A token near a tie may go to another expert; the direction stays.
    assert torch.nn.functional.cosine_similarity(flat, exact, dim=0) > 0.9


def test_first_values_and_counts_are_those_of_each_expert(draw: random.Random) -> None:
    shape, config = (
        drawn("olmoe", draw),
        LoraConfig(4, 8.0, target_modules=(), target_parameters=ALL),
    )
    batch = one_document(2, 16, shape.vocab_size)
    model = init_weights(build_model(shape), 5)
    plain = logits(model, batch)
    add_lora(model, config)
    init_adapters(model, 11)
    assert torch.equal(logits(model, batch), plain)
    a = model.get_parameter("model.layers.0.mlp.experts.adapters.gate_up_proj.lora_A.weight")
    assert a.shape == (5, 4, shape.hidden_size)
    assert 0.9 < float(a.detach().abs().max()) * shape.hidden_size**0.5 <= 1
    width, inner = shape.hidden_size, shape.expert_size
    each = 5 * 4 * (width + 2 * inner + inner + width) + 4 * (width + 5)
    assert count_parameters(shape, config).trained == 2 * each
    assert sum(parameter.numel() for parameter in adapter_parameters(model).values()) == 2 * each
    of_block = block_adapters(shape, config)
    assert of_block is not None
    assert set(of_block.target_parameters) == {f"mlp.{name}" for name in ALL}
    set_adapters(
        model,
        {name: torch.ones_like(parameter) for name, parameter in adapter_parameters(model).items()},
    )


@pytest.mark.parametrize("model_type", ["qwen3_moe", "gpt_oss"])
def test_a_run_resumes_bit_by_bit_and_its_adapters_open_in_peft_as_the_run_does(
    model_type: str, tmp_path: Path, byte_tokenizer: Tokenizer
) -> None:
    byte_tokenizer.save(tmp_path / "tokenizer")
    sizes = {"intermediate_size": 24, "num_experts": 3, "num_experts_per_tok": 2}
    own: dict[str, Any] = {"norm_topk_prob": True}
    if model_type == "qwen3_moe":
        own = {"moe_intermediate_size": 16, "mlp_only_layers": (0,)}
    shape = ModelConfig(261, 16, 2, 2, model_type=model_type, **sizes, **own)
    base = tmp_path / "base"
    export_folder(
        init_weights(build_model(shape), 0), shape, base, tokenizer_folder=tmp_path / "tokenizer"
    )
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello there."}]
    (tmp_path / "chats.jsonl").write_text((json.dumps({"messages": turns}) + "\n") * 40)
    chosen = {
        "model.source": base,
        "run.folder": tmp_path,
        "data.files": tmp_path / "chats.jsonl",
        "data.sequence_length": 48,
        "train.device": "cpu",
        "train.dtype": "fp32",
        "train.compile": "off",
        "train.threads": 1,
        "train.global_batch_size": 4,
        "optimizer.lr": 0.05,
        "schedule.name": "constant",
        "schedule.warmup_steps": 0,
        "lora.rank": 2,
        "log.every_steps": 1,
    }
    words = [str(word) for name, value in chosen.items() for word in (f"--{name}", value)]
    words += ["--lora.target_modules", "q_proj", "--lora.target_parameters", *ALL]
    for name, steps in (("uncut", 4), ("cut", 2), ("cut", 4)):
        assert command(["sft", *words, "--run.name", name, "--train.steps", str(steps)]) == 0
    weights = {
        name: dict(
            load_model(tmp_path / name, torch.device("cpu"), torch.float32).model.named_parameters()
        )
        for name in ("uncut", "cut")
    }
    before = load_model(base, torch.device("cpu"), torch.float32).model
    for name, value in weights["uncut"].items():
        assert torch.equal(weights["cut"][name], value), name
        changes = name.endswith((*ALL, "q_proj.weight")) and "mlp.gate_proj" not in name
        assert torch.equal(before.get_parameter(name), value) != changes, name
    losses = [
        [each["loss"] for each in Run(tmp_path / name).read_metrics() if "loss" in each]
        for name in ("uncut", "cut")
    ]
    assert losses[0] == losses[1]
    assert command(["export", str(tmp_path / "uncut"), str(tmp_path / "out"), "--adapters"]) == 0
    assert (
        command(["export", str(tmp_path / "uncut"), str(tmp_path / "whole"), "--dtype", "fp32"])
        == 0
    )
    tokens = torch.randint(0, 261, (2, 9))
    wanted = theirs_in(tmp_path / "whole")(tokens).logits
    assert_close(
        peft.PeftModel.from_pretrained(theirs_in(base), tmp_path / "out")(tokens).logits, wanted
    )
