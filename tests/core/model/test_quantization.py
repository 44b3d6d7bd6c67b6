"""Numbers in 4 and 8 bits, and models with such matrices, are those of bitsandbytes."""

import json
import random
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import bitsandbytes.functional as bnb
import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from lmforge.core.errors import UserError
from lmforge.core.model.build import build_model
from lmforge.core.model.init_weights import init_adapters, init_weights
from lmforge.core.model.layers import LanguageModel
from lmforge.core.model.lora import add_lora, disable_adapters
from lmforge.core.model.lora_config import LoraConfig, adapter_parameters
from lmforge.core.model.quantization.blocks import dequantize, dynamic_values, quantize
from lmforge.core.model.quantization.formats import BlockFormat, quantized_matrices
from lmforge.core.parallel.activation_checkpointing import apply_activation_checkpointing
from lmforge.hf.export import export_folder
from lmforge.hf.peft_folder import save_peft_folder
from lmforge.hf.pretrained import find_pretrained
from lmforge.hf.resolve import resolve_model_config
from lmforge.hf.weights import describe_folder, load_folder
from tests.core.model.foreign import described
from tests.core.model.test_lora import (
    assert_close,
    gradients,
    logits,
    one_document,
    set_adapters,
    with_adapters,
)
from tests.distributed.shapes import SHAPES
from tests.seeds import fresh_random

PLAIN, DOUBLE, INT8 = BlockFormat("nf4"), BlockFormat("nf4", double_quant=True), BlockFormat("int8")


def drawn_numbers(draw: random.Random) -> torch.Tensor:
    """A matrix whose blocks may end within a row, with zeros, a block of zeros, and numbers of any
    size. Rows are even: of others bitsandbytes compiles its kernel.
    """
    shape = draw.choice([(64, 64), (7, 34), (3, 6), (128, 300), (1000, 640), (1, 20_000)])
    values = torch.randn(
        shape, generator=torch.Generator().manual_seed(draw.randrange(1000))
    ) * 10.0 ** draw.randrange(-6, 4)
    values.view(-1)[: min(70, values.numel() // 2)] = 0
    return values


def theirs_of(
    values: torch.Tensor, stored: BlockFormat
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """What bitsandbytes stores of numbers, and what it makes of it again."""
    if stored.bits == "int8":
        codes, state = bnb.quantize_blockwise(values, blocksize=256)
        return {"codes": codes, "scales": state.absmax}, bnb.dequantize_blockwise(codes, state)
    codes, state = bnb.quantize_4bit(
        values, quant_type="nf4", compress_statistics=stored.double_quant
    )
    kept = {"codes": codes, "scales": state.absmax}
    if stored.double_quant:
        kept |= {"nested": state.state2.absmax, "mean": state.offset}
    return kept, bnb.dequantize_4bit(codes, state)


@pytest.mark.parametrize("stored", [PLAIN, DOUBLE, INT8], ids=BlockFormat.describe)
def test_bytes_and_numbers_are_those_of_bitsandbytes_bit_for_bit(stored: BlockFormat) -> None:
    draw = fresh_random()
    for _ in range(6):
        values = drawn_numbers(draw)
        packed = quantize(values, stored)
        codes, rest = packed[:, : stored.code_bytes], packed[:, stored.code_bytes :].contiguous()
        mine = {
            "codes": codes.flatten(),
            "scales": rest.view(torch.float32) if not stored.double_quant else rest[:, :256],
        }
        if stored.double_quant:
            mine |= {
                "nested": rest[:, 256:260].contiguous().view(torch.float32),
                "mean": rest[:, 260:].contiguous().view(torch.float32),
            }
        kept, again = theirs_of(values, stored)
        for name, expected in kept.items():
            assert torch.equal(mine[name].flatten()[: expected.numel()], expected.flatten()), name
        assert torch.equal(dequantize(packed, stored, values.shape, torch.float32), again)
        assert torch.equal(
            dequantize(packed, stored, values.shape, torch.bfloat16), again.bfloat16()
        )
    assert torch.equal(torch.tensor(dynamic_values()), bnb.create_dynamic_map())
    assert torch.equal(
        torch.tensor(dynamic_values(signed=False)), bnb.create_dynamic_map(signed=False)
    )


@pytest.mark.parametrize("stored", [PLAIN, DOUBLE, INT8], ids=BlockFormat.describe)
def test_any_rows_hold_all_that_their_numbers_need(stored: BlockFormat) -> None:
    draw = fresh_random()
    values = torch.randn(draw.randrange(1, 200), draw.randrange(200, 400))
    packed = quantize(values, stored)
    assert packed.shape == stored.stored_shape(values.numel())
    whole = dequantize(packed, stored, (packed.shape[0] * stored.row_numel,), torch.float32)
    cut = draw.randrange(len(packed))
    parts = [
        dequantize(each, stored, (len(each) * stored.row_numel,), torch.float32)
        for each in (packed[:cut], packed[cut:])
    ]
    assert torch.equal(torch.cat(parts), whole)


def loaded(folder: Path, config: LoraConfig | None = None) -> LanguageModel:
    model = build_model(resolve_model_config(folder, {}))
    if config is not None:
        add_lora(model, config)
    load_folder(folder, model)
    return model


def opened_by_bitsandbytes(folder: Path, *, double_quant: bool = False) -> Any:
    quantization = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=double_quant,
        bnb_4bit_compute_dtype=torch.float32,
    )
    return AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=quantization, dtype=torch.float32
    )


@pytest.mark.parametrize("double_quant", [False, True])
def test_logits_and_gradients_of_adapters_are_those_of_peft_on_bitsandbytes(
    double_quant: bool, draw: random.Random, tmp_path: Path
) -> None:
    # Its kernel needs widths that 32 divides.
    shape = replace(SHAPES["llama"], intermediate_size=128, num_hidden_layers=2)
    export_folder(init_weights(build_model(shape), draw.randrange(1000)), shape, tmp_path / "base")
    config = LoraConfig(
        4, 8.0, target_modules=("q_proj", "down_proj"), base_dtype="nf4", double_quant=double_quant
    )
    model = loaded(tmp_path / "base", config)
    with_values = with_adapters(
        build_model(shape), LoraConfig(4, 8.0, target_modules=config.target_modules), seed=7
    )
    set_adapters(model, adapter_parameters(with_values))
    save_peft_folder(
        tmp_path / "adapters", adapter_parameters(model), config, str(tmp_path / "base")
    )

    base = opened_by_bitsandbytes(tmp_path / "base", double_quant=double_quant)
    # Else it computes in bf16.
    theirs = peft.PeftModel.from_pretrained(base, tmp_path / "adapters", is_trainable=True).train()
    batch = one_document(3, 17, shape.vocab_size)
    assert_close(logits(model, batch), theirs(batch.tokens).logits)
    # A run that begins from the folder: of the same adapters, another scaling, and an adapted layer
    # more, which begins at zero.
    again = build_model(shape)
    add_lora(again, replace(config, alpha=5.0, target_modules=("q_proj", "down_proj", "up_proj")))
    init_adapters(again, 3)
    find_pretrained(tmp_path / "adapters").load_weights(again)
    assert_close(logits(again, batch), theirs(batch.tokens).logits)
    torch.nn.functional.cross_entropy(
        theirs(batch.tokens).logits.flatten(0, 1), batch.labels.flatten(), reduction="sum"
    ).backward()
    of_theirs = {
        name: each.grad for name, each in theirs.named_parameters() if each.grad is not None
    }
    mine = gradients(model, batch)
    assert len(of_theirs) == len(mine) == len(adapter_parameters(model))
    for name, gradient in mine.items():
        assert_close(
            gradient, of_theirs["base_model.model." + name.replace(".weight", ".default.weight")]
        )


@pytest.mark.parametrize("double_quant", [False, True])
def test_a_folder_that_bitsandbytes_quantized_is_taken_as_it_is(
    double_quant: bool, tmp_path: Path
) -> None:
    shape = replace(SHAPES["llama"], intermediate_size=128)
    export_folder(init_weights(build_model(shape), 3), shape, tmp_path / "base")
    opened_by_bitsandbytes(tmp_path / "base", double_quant=double_quant).save_pretrained(
        tmp_path / "stored"
    )
    config = LoraConfig(2, 4.0, base_dtype="nf4", double_quant=double_quant)
    direct, taken = (loaded(tmp_path / name, config) for name in ("base", "stored"))
    for name in quantized_matrices(direct):
        assert torch.equal(direct.get_parameter(name), taken.get_parameter(name))
    plain, other = (
        loaded(tmp_path / "stored"),
        loaded(tmp_path / "stored", LoraConfig(2, 4.0, base_dtype="nf4")),
    )
    for name, matrix in quantized_matrices(direct).items():
        numbers = matrix.dequantize(direct.get_parameter(name))
        assert torch.equal(plain.get_parameter(name), numbers)
        # The largest of a block stays the largest, so that a second quantization changes nothing.
        assert torch.equal(
            quantized_matrices(other)[name].dequantize(other.get_parameter(name)), numbers
        )
    assert describe_folder(tmp_path / "stored") == ["stored in NF4 by bitsandbytes"]
    stored = load_file(tmp_path / "stored" / "model.safetensors")
    damages = [
        (".quant_state.bitsandbytes__nf4", each, "bytes")
        for each in (torch.float32, torch.int8, torch.int64)
    ]
    damages.append(
        (
            ".absmax",
            torch.float32 if double_quant else torch.uint8,
            "bytes" if double_quant else "floating-point",
        )
    )
    for end, dtype, expected in damages:
        name = next(each for each in stored if each.endswith(end))
        shutil.copytree(tmp_path / "stored", tmp_path / "damaged", dirs_exist_ok=True)
        value = -stored[name].to(dtype) if expected == "bytes" else stored[name].to(dtype)
        save_file(stored | {name: value}, tmp_path / "damaged" / "model.safetensors")
        with pytest.raises(
            UserError,
            match=rf"{re.escape(name)}: expected {expected}.*, got {dtype}; copy the folder again",
        ):
            loaded(tmp_path / "damaged")
    content = json.loads((tmp_path / "stored" / "config.json").read_text())
    content["quantization_config"]["bnb_4bit_quant_type"] = "fp4"
    (tmp_path / "stored" / "config.json").write_text(json.dumps(content))
    with pytest.raises(UserError, match="quantized weights cannot be trained"):
        loaded(tmp_path / "stored")


@pytest.mark.parametrize("kind", ["llama", "gpt2", "mixture"])
@pytest.mark.parametrize("stored", [DOUBLE, INT8], ids=BlockFormat.describe)
def test_a_quantized_model_is_the_model_of_the_dequantized_matrices(
    kind: str, stored: BlockFormat
) -> None:
    shape = SHAPES[kind]
    experts = ("experts.gate_up_proj",) if shape.num_experts else ()
    config = LoraConfig(
        3,
        6.0,
        target_modules=("c_attn" if kind == "gpt2" else "o_proj",),
        target_parameters=experts,
    )
    plain = with_adapters(init_weights(build_model(shape), 5), config, seed=0)
    add_lora(
        model := init_weights(build_model(shape), 5),
        LoraConfig(
            **vars(config) | {"base_dtype": stored.bits, "double_quant": stored.double_quant}
        ),
    )
    set_adapters(model, adapter_parameters(plain))
    matrices = quantized_matrices(model)
    blocks = [
        name
        for name, each in plain.named_parameters()
        if ".lora_" not in name and each.ndim > 1 and "gate.w" not in name
    ]
    assert matrices.keys() == {name for name in blocks if name.startswith(plain.blocks_name)}
    # Every rank draws the whole matrix, and so has the same bytes.
    drawn = build_model(shape, "meta")
    add_lora(drawn, model.lora_config)
    drawn.to_empty(device="cpu")
    drawn.tie_weights()
    init_weights(drawn, 5)
    for name, matrix in matrices.items():
        assert torch.equal(drawn.get_parameter(name), model.get_parameter(name))
        with torch.no_grad():
            plain.get_parameter(name).copy_(matrix.dequantize(model.get_parameter(name)))
    batch = one_document(2, 13, shape.vocab_size)
    assert_close(logits(model, batch), logits(plain, batch))
    with torch.no_grad(), disable_adapters(model), disable_adapters(plain):
        assert_close(logits(model, batch), logits(plain, batch))
    theirs = gradients(plain, batch)
    for mode in ("none", "full", "selective-ops"):
        apply_activation_checkpointing(model, mode)
        mine = gradients(model, batch)
        assert mine.keys() == theirs.keys()
        for name, gradient in mine.items():
            assert_close(gradient, theirs[name])


def test_a_mixture_whose_experts_would_stay_in_full_precision_is_refused() -> None:
    model = build_model(described("mixtral"), "meta")
    with pytest.raises(
        UserError,
        match=r"lora\.base_dtype = nf4: 0\.mlp\.experts\.gate_up_proj would stay in full precision",
    ):
        add_lora(model, LoraConfig(rank=2, alpha=4.0, base_dtype="nf4"))
