"""gpt-oss: attention with sinks, by every kernel, and folders in MXFP4."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn.attention import flex_attention as flex_module
from torch.nn.attention.flex_attention import create_block_mask
from transformers import AutoModelForCausalLM
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from lmforge.core.errors import UserError
from lmforge.core.model.attention import (
    AttentionMask,
    create_attention_mask,
    document_mask_mod,
)
from lmforge.core.model.build import build_model
from lmforge.core.model.config_json import to_config_json
from lmforge.core.model.modules import sinks
from lmforge.core.model.modules.sinks import attend_with_sinks
from lmforge.core.model.resolve import model_config_from_json
from lmforge.hf.export import export_folder
from lmforge.hf.resolve import resolve_model_config
from lmforge.hf.safetensors_file import SafetensorsFile
from lmforge.hf.turned_experts import TurnedStack, turned_stacks
from lmforge.hf.weights import describe_folder, load_folder
from tests.core.model.conftest import built, drawn_config, logits, one_document

MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
EXPERTS = "model.layers.0.mlp.experts"


def by_definition(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    seen: torch.Tensor,
    scale: float,
    sinks: torch.Tensor,
) -> torch.Tensor:
    """A softmax over the scores and the sink of each head, which then is left out."""
    copies = queries.shape[1] // keys.shape[1]
    keys, values = (each.repeat_interleave(copies, dim=1) for each in (keys, values))
    scores = (queries @ keys.transpose(2, 3) * scale).masked_fill(~seen, -torch.inf)
    of_sinks = sinks.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
    return torch.cat((scores, of_sinks), -1).softmax(-1)[..., :-1] @ values


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("kernel", ["dense mask", "no mask", "block mask", "one query", "groups"])
@pytest.mark.parametrize("window", [None, 7])
def test_every_kernel_divides_by_the_sink_too_and_gives_its_gradient(
    kernel: str, window: int | None, draw: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against a softmax that has it. In fp32 where the kernel has no fp64."""
    length = 300  # more than a chunk of queries
    documents = torch.tensor([[0] * 170 + [1] * 100 + [-1] * 30, [0] * 300], dtype=torch.int32)
    dtype = torch.float32 if kernel == "block mask" else torch.float64
    q, k, v = (
        torch.randn(2, heads, length, 16, dtype=dtype, requires_grad=True) for heads in (6, 2, 2)
    )
    learned = (2 * torch.randn(6, dtype=dtype)).requires_grad_()
    dense = create_attention_mask(documents, window)
    assert dense.dense_mask is not None
    seen = dense.dense_mask
    mask = dense
    if kernel == "no mask":
        mask = AttentionMask()
        seen = torch.ones(length, length, dtype=torch.bool).tril()
    elif kernel == "block mask":
        rule = document_mask_mod(documents, documents, torch.arange(length), window)
        mask = AttentionMask(
            block_mask=create_block_mask(rule, 2, None, length, length, device="cpu")
        )
        monkeypatch.setattr(sinks, "compiled", lambda function: function)
        # It refuses a backward pass on a CPU, since compiled code has none there.
        monkeypatch.setattr(flex_module, "_validate_device", lambda *tensors: None)
    elif kernel in ("one query", "groups"):
        q = q[:, :, -1:].detach().requires_grad_()
        seen = seen[:, :, 200:201] if kernel == "groups" else seen[:, :, -1:]
        groups = ((slice(0, 1), slice(0, 201)), (slice(1, 2), slice(0, 220)))
        mask = AttentionMask(seen, groups=groups if kernel == "groups" else ())
    found = attend_with_sinks(q, k, v, mask, 0.3, learned)
    wanted = by_definition(q, k, v, seen, 0.3, learned)
    upstream = torch.randn_like(wanted)
    for ours, exact in zip(
        (found, *torch.autograd.grad(found, (q, k, v, learned), upstream)),
        (wanted, *torch.autograd.grad(wanted, (q, k, v, learned), upstream)),
        strict=True,
    ):
        bound = 1e-5 if dtype == torch.float32 else 1e-12
        torch.testing.assert_close(
            ours, exact, rtol=0, atol=bound * float(exact.detach().abs().max())
        )


def packed_folder(folder: Path, draw: random.Random, **fields: Any) -> dict[str, torch.Tensor]:
    """Write a folder as gpt-oss is published, with bytes of all kinds; returns its tensors."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_experts": 5}
    config = drawn_config("gpt_oss", draw, num_experts_per_tok=2, **sizes)
    export_folder(built(config), config, folder, dtype=torch.bfloat16)
    tensors = load_file(folder / "model.safetensors")
    for name in ("gate_up_proj", "down_proj"):
        experts, inputs, rows = tensors.pop(f"{EXPERTS}.{name}").shape
        blocks = torch.randint(0, 256, (experts, rows, inputs // 32, 16), dtype=torch.uint8)
        scales = torch.randint(0, 256, blocks.shape[:3], dtype=torch.uint8)
        if not fields.get("extreme"):
            scales = scales % 8 + 120
        tensors |= {f"{EXPERTS}.{name}_blocks": blocks, f"{EXPERTS}.{name}_scales": scales}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    content = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(content | {"quantization_config": MXFP4}))
    return tensors


@pytest.mark.parametrize("extreme", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_mxfp4_is_read_bit_by_bit_as_transformers_dequantizes_it_and_exported_plain(
    dtype: torch.dtype, extreme: bool, draw: random.Random, tmp_path: Path
) -> None:
    tensors = packed_folder(tmp_path / "packed", draw, extreme=extreme)
    config = resolve_model_config(tmp_path / "packed", {})
    model = build_model(config).to(dtype)
    load_folder(tmp_path / "packed", model)
    assert describe_folder(tmp_path / "packed") == ["dequantized from MXFP4"]
    export_folder(model, config, tmp_path / "plain", dtype=torch.bfloat16)
    plain = load_file(tmp_path / "plain" / "model.safetensors")
    for name in ("gate_up_proj", "down_proj"):
        wanted = convert_moe_packed_tensors(
            tensors[f"{EXPERTS}.{name}_blocks"], tensors[f"{EXPERTS}.{name}_scales"]
        )
        found = plain.pop(f"{EXPERTS}.{name}")
        assert found.shape == wanted.shape
        torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True)
    for name, each in plain.items():
        assert torch.equal(each, tensors[name]), name
    assert "quantization_config" not in json.loads((tmp_path / "plain/config.json").read_text())
    if extreme or dtype == torch.bfloat16:
        return
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "plain", dtype=torch.float32)
    rows = one_document(2, 20, config.vocab_size, model)
    with torch.no_grad():
        reference = theirs(rows.tokens).logits
    bound = 1e-5 * float(reference.abs().max())
    torch.testing.assert_close(logits(model, rows), reference, rtol=0, atol=bound)


def test_a_rank_reads_its_part_of_a_stack(draw: random.Random, tmp_path: Path) -> None:
    packed_folder(tmp_path / "packed", draw)
    file = SafetensorsFile(tmp_path / "packed" / "model.safetensors")
    for stack in turned_stacks(dict.fromkeys(file.entries, file)).values():
        if not isinstance(stack, TurnedStack):
            continue
        whole = torch.empty(stack.shape)
        stack.read(whole, tuple(slice(0, size) for size in stack.shape))
        part = tuple(slice(size // 3, size - 1) for size in stack.shape)
        read = torch.empty_like(whole[part])
        stack.read(read, part)
        assert torch.equal(read, whole[part])


def _without_scales(tensors: dict[str, torch.Tensor]) -> None:
    tensors.pop(f"{EXPERTS}.down_proj_scales")


def _fewer_scales(tensors: dict[str, torch.Tensor]) -> None:
    name = f"{EXPERTS}.gate_up_proj_scales"
    tensors[name] = tensors[name][:, :, 1:].contiguous()


def _flat_blocks(tensors: dict[str, torch.Tensor]) -> None:
    name = f"{EXPERTS}.gate_up_proj_blocks"
    tensors[name] = tensors[name].flatten(2)


def _fewer_experts(tensors: dict[str, torch.Tensor]) -> None:
    for end in ("blocks", "scales"):
        name = f"{EXPERTS}.down_proj_{end}"
        tensors[name] = tensors[name][1:].contiguous()


def _more_sinks(tensors: dict[str, torch.Tensor]) -> None:
    name = "model.layers.0.self_attn.sinks"
    tensors[name] = torch.cat((tensors[name], tensors[name]))


def _flat_bias(tensors: dict[str, torch.Tensor]) -> None:
    name = f"{EXPERTS}.down_proj_bias"
    tensors[name] = tensors[name].flatten()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_without_scales, f"{EXPERTS}.down_proj: in MXFP4 without {EXPERTS}.down_proj_scales"),
        (_fewer_scales, "gate_up_proj_scales: is torch.uint8 [5, 192, 1] and should be"),
        (_flat_blocks, "gate_up_proj_blocks: is torch.uint8 [5, 192, 32] and should be"),
        (_fewer_experts, "down_proj is [4, 64, 96] and should be [5, 64, 96]"),
        (_more_sinks, "self_attn.sinks is ["),
        (_flat_bias, "down_proj_bias is [320] and should be [5, 64]"),
    ],
)
def test_a_folder_with_a_missing_or_misshapen_tensor_is_refused_by_its_name(
    change: Any, words: str, draw: random.Random, tmp_path: Path
) -> None:
    tensors = packed_folder(tmp_path / "packed", draw)
    change(tensors)
    save_file(tensors, tmp_path / "packed" / "model.safetensors")
    model = build_model(resolve_model_config(tmp_path / "packed", {}))
    with pytest.raises(UserError) as refused:
        load_folder(tmp_path / "packed", model)
    assert words in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_plain_experts_in_few_bits_are_refused_by_their_name(
    dtype: torch.dtype, draw: random.Random, tmp_path: Path
) -> None:
    config = drawn_config("gpt_oss", draw)
    export_folder(built(config), config, tmp_path / "plain")
    path = tmp_path / "plain" / "model.safetensors"
    tensors = load_file(path)
    tensors[f"{EXPERTS}.down_proj"] = tensors[f"{EXPERTS}.down_proj"].to(dtype)
    save_file(tensors, path)
    with pytest.raises(UserError, match=f"{EXPERTS}.down_proj: is {dtype}"):
        load_folder(tmp_path / "plain", build_model(config))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"swiglu_limit": 5.0},
            "swiglu_limit: 5.0 is not supported for gpt_oss; use a model with 7",
        ),
        ({"swiglu_alpha": 2}, "swiglu_alpha: 2 is not supported"),
        ({"hidden_act": "gelu"}, 'hidden_act: "gelu" is not supported in a gpt_oss model'),
        (
            {"quantization_config": {"quant_method": "awq"}},
            "quantization_config: quantized weights",
        ),
        (
            {"layer_types": ["chunked_attention"]},
            'layer_types: "chunked_attention" is not supported',
        ),
        ({"sliding_window": None}, "sliding_window: null is not supported"),
    ],
)
def test_what_a_gpt_oss_cannot_be_is_refused_by_its_name(
    change: dict[str, Any], words: str, draw: random.Random
) -> None:
    content = to_config_json(drawn_config("gpt_oss", draw, num_hidden_layers=1))
    with pytest.raises(UserError) as refused:
        model_config_from_json(content | change, "here")
    assert words in str(refused.value)


def test_a_config_json_that_says_little_is_read_as_transformers_reads_it(
    draw: random.Random,
) -> None:
    """Scaled positions, a window in every other layer from the first on."""
    config = drawn_config("gpt_oss", draw, num_hidden_layers=3)
    kept = ("model_type", "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")
    content = {name: each for name, each in to_config_json(config).items() if name in kept}
    read = model_config_from_json(content | {"num_attention_heads": 8}, "here")
    assert read.layer_types == ("sliding_attention", "full_attention", "sliding_attention")
    assert read.sliding_window == 128
    assert read.rope_scaling is not None
    assert (read.rope_scaling.factor, read.rope_scaling.truncate) == (32.0, False)
    assert (read.rope_theta, read.head_dim, read.num_experts) == (150_000.0, 64, 128)
