"""The same numbers as transformers, in both directions, for random model configs."""

import random
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from lmforge.core.model.build import build_model
from lmforge.core.model.config_json import to_config_json
from lmforge.core.model.presets import PRESETS, get_preset
from lmforge.hf.export import export_folder
from lmforge.hf.resolve import resolve_model_config
from lmforge.hf.weights import load_folder
from tests.core.model.conftest import (
    MODEL_TYPES,
    ONE_BY_ONE,
    as_transformers_has_them,
    built,
    drawn_config,
    logits,
    one_document,
    shaken,
)

pytestmark = pytest.mark.usefixtures("token_by_token")

# Of the largest logit: fp32 sums of a few dozen terms, in another order. Of 175 models, 25 of each
# family, the farthest was 8e-7 away.
TOLERANCE = 1e-5
# Of 60 models of these, whose norms divide small outputs of states by themselves, transformers was
# up to 1.8e-5 and 0.9e-5 from fp64, lmforge 1.6e-5 and 0.3e-5.
TOLERANCES = {"olmo_hybrid": 5e-5, "kimi_linear": 3e-5}


def their_logits(model: torch.nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(tokens).logits


def assert_equal_to_fp32_precision(
    ours: torch.Tensor, theirs: torch.Tensor, model_type: str
) -> None:
    assert ours.dtype == theirs.dtype == torch.float32
    bound = TOLERANCES.get(model_type, TOLERANCE) * theirs.abs().max().item()
    torch.testing.assert_close(ours, theirs, atol=bound, rtol=0)


@pytest.mark.parametrize(
    ("model_type", "shards"), [("llama", "100GB"), *((each, "20KB") for each in MODEL_TYPES)]
)
def test_a_folder_saved_by_transformers_gives_its_logits(
    model_type: str, shards: str, draw: random.Random, tmp_path: Path
) -> None:
    config = drawn_config(model_type, draw)
    print(config)
    theirs = shaken(
        AutoModelForCausalLM.from_config(
            AutoConfig.for_model(**to_config_json(config)), **ONE_BY_ONE
        )
    ).eval()
    theirs.save_pretrained(tmp_path, max_shard_size=shards)
    assert (tmp_path / "model.safetensors.index.json").exists() == (
        shards == "20KB" and len(list(tmp_path.glob("*.safetensors"))) > 1
    )
    opened = resolve_model_config(tmp_path, {})
    ours = build_model(opened)
    load_folder(tmp_path, ours)
    rows = one_document(2, draw.randrange(25, 60), config.vocab_size, ours)
    assert_equal_to_fp32_precision(
        logits(ours, rows), their_logits(theirs, rows.tokens), model_type
    )


@pytest.mark.parametrize(
    ("model_type", "shard_bytes"),
    [("llama", 5_000_000_000), *((each, 9_000) for each in MODEL_TYPES)],
)
def test_transformers_opens_an_exported_folder_with_equal_logits(
    model_type: str, shard_bytes: int, draw: random.Random, tmp_path: Path
) -> None:
    config = drawn_config(model_type, draw)
    ours = built(config)
    export_folder(ours, config, tmp_path / "out", max_shard_bytes=shard_bytes)
    theirs, report = AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", output_loading_info=True, **ONE_BY_ONE
    )
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert theirs.dtype == torch.float32
    rows = one_document(2, draw.randrange(25, 60), config.vocab_size, ours)
    assert_equal_to_fp32_precision(
        logits(ours, rows), their_logits(theirs, rows.tokens), model_type
    )


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_an_exported_folder_comes_back_bit_for_bit(
    model_type: str, draw: random.Random, tmp_path: Path
) -> None:
    config = drawn_config(model_type, draw)
    ours = built(config)
    export_folder(ours, config, tmp_path / "out")
    assert resolve_model_config(tmp_path / "out", {}) == config
    again = build_model(config)
    load_folder(tmp_path / "out", again)
    for name, parameter in ours.named_parameters():
        assert torch.equal(parameter, again.get_parameter(name)), name


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_has_as_many_parameters_as_transformers_gives_it(name: str) -> None:
    config = get_preset(name)
    with torch.device("meta"):
        theirs = AutoModelForCausalLM.from_config(AutoConfig.for_model(**to_config_json(config)))
    ours = as_transformers_has_them(dict(build_model(config, "meta").named_parameters()), config)
    assert {name: tensor.shape for name, tensor in ours.items()} == {
        name: tensor.shape for name, tensor in theirs.named_parameters()
    }


@pytest.mark.parametrize("model_type", ["qwen3", "olmo2", "gemma3_text"])
def test_bf16_logits_are_those_of_transformers_to_bf16_precision(
    model_type: str, draw: random.Random, tmp_path: Path
) -> None:
    config = drawn_config(model_type, draw)
    export_folder(built(config), config, tmp_path / "out", dtype=torch.bfloat16)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out", **ONE_BY_ONE)
    assert theirs.dtype == torch.bfloat16
    ours = build_model(config).to(torch.bfloat16)
    load_folder(tmp_path / "out", ours)
    exact = build_model(config)
    load_folder(tmp_path / "out", exact)
    rows = one_document(2, 40, config.vocab_size)
    reference = logits(exact, rows)
    our_error = (logits(ours, rows).float() - reference).abs().mean()
    their_error = (their_logits(theirs, rows.tokens).float() - reference).abs().mean()
    # Both round differently; ours keeps angles in fp32, so it should not be the worse by more than
    # chance.
    assert our_error < 1.5 * their_error + 1e-3
