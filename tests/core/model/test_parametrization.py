"""Settings transfer over widths and depths: activations and changes keep their size, and steps are
those of the papers.
"""

import json
import math
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from lmforge.cli import run
from lmforge.core.losses.language import NextTokenObjective
from lmforge.core.model.build import build_model
from lmforge.core.model.config import ModelConfig
from lmforge.core.model.fields import Multipliers
from lmforge.core.model.init_weights import init_weights
from lmforge.core.model.layers import LanguageModel
from lmforge.core.model.parametrization import Parametrization, relative_to_base
from lmforge.core.model.presets import PRESETS, get_preset
from lmforge.core.model.setup import ModelSetup
from lmforge.core.optim.optimizer import build_optimizer
from lmforge.core.options.sections import GroupOptions, ModelOptions, OptimizerOptions
from lmforge.core.options.stage import PretrainConfig
from lmforge.core.stages.build_model import empty_model
from lmforge.lab.bench.coordinates import Coordinates, compare, drawn_batch, small
from lmforge.lab.bench.coordinates_table import FLAT, bars
from lmforge.lab.bench.parity import SMALL_MIXTURE, SMALL_MODEL
from lmforge.ops.verbs.show.tensor_table import describe_tensors
from tests.conftest import Refusal
from tests.support.grids import parametrize

_DENSE: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
}
_DENSE |= {"initializer_range": 0.05}
_GATED = _DENSE | {"intermediate_size": 176, "num_key_value_heads": 2}
_EXPERTS: dict[str, Any] = {"num_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 176}
_LATENTS = {
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
}
FAMILIES = {
    "llama": ModelConfig(**_GATED),
    "mistral": ModelConfig(model_type="mistral", sliding_window=8, **_GATED),
    "qwen2": ModelConfig(model_type="qwen2", attention_bias=True, **_GATED),
    "qwen3": ModelConfig(model_type="qwen3", qk_norm=True, **_GATED),
    "olmo2": ModelConfig(model_type="olmo2", **_GATED),
    "gemma3": ModelConfig(
        model_type="gemma3_text", head_dim=16, tie_word_embeddings=True, **_GATED
    ),
    "granite": ModelConfig(
        model_type="granite", multipliers=Multipliers(8.0, 0.1, 0.3, 4.0), **_GATED
    ),
    "tied": ModelConfig(tie_word_embeddings=True, **_GATED),
    "gpt2": ModelConfig(
        model_type="gpt2", tie_word_embeddings=True, max_position_embeddings=64, **_DENSE
    ),
    "mixtral": ModelConfig(model_type="mixtral", norm_topk_prob=True, **_DENSE, **_EXPERTS),
    "qwen3_moe": ModelConfig(
        model_type="qwen3_moe",
        qk_norm=True,
        norm_topk_prob=True,
        moe_intermediate_size=64,
        **_DENSE,
        **_EXPERTS,
    ),
    "olmoe": ModelConfig(model_type="olmoe", **_DENSE, **_EXPERTS),
    "deepseek_v3": ModelConfig(
        model_type="deepseek_v3",
        n_shared_experts=1,
        first_k_dense_replace=1,
        n_group=1,
        topk_group=1,
        moe_intermediate_size=64,
        **_DENSE,
        **_EXPERTS,
        **_LATENTS,
    ),
}
STANDARD, MUP = ModelOptions(), ModelOptions(parametrization="mup", base_width=64)
LR = 4e-3


def largest_spread(
    configs: list[ModelConfig], options: ModelOptions, optimizer: str, seeds: int = 1
) -> dict[str, float]:
    found = compare(configs, options, OptimizerOptions(name=optimizer, lr=LR), 10, seeds)
    assert {"embedding", "attention", "feed-forward", "residual stream", "logits"} == {
        each.module for each in found
    }
    return {each.module: each.spread for each in found}


def assert_flat_but_for_standard(
    family: str, optimizer: str, widths: tuple[int, ...], seeds: int = 2
) -> None:
    configs = [small(FAMILIES[family], width) for width in widths]
    assert max(largest_spread(configs, MUP, optimizer, seeds).values()) <= FLAT
    # Where there is a norm after attention and feed-forward, only these show it.
    assert max(largest_spread(configs, STANDARD, optimizer).values()) > 2 * FLAT


@parametrize(("family", "optimizer"), [("llama", "muon"), ("gpt2", "adamw")], fast=(1,))
def test_sizes_and_changes_do_not_depend_on_the_width(family: str, optimizer: str) -> None:
    assert_flat_but_for_standard(family, optimizer, (64, 256), seeds=1)


@pytest.mark.slow  # a minute with Muon
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("family", FAMILIES)
def test_sizes_and_changes_of_every_family_do_not_depend_on_the_width(
    family: str, optimizer: str
) -> None:
    assert_flat_but_for_standard(family, optimizer, (64, 128, 256, 512))


@parametrize("optimizer", ["adamw", "muon"], fast=(0,))
@parametrize("family", ["llama", "olmo2"], fast=(0,))
def test_with_completep_changes_do_not_depend_on_the_depth_either(
    family: str, optimizer: str
) -> None:
    configs = [replace(FAMILIES[family], num_hidden_layers=layers) for layers in (2, 6, 18)]
    base = {"base_width": 64, "embedding_initializer_range": 1.0}
    spreads = []
    for options in (
        ModelOptions(parametrization="completep", base_depth=2, **base),
        ModelOptions(parametrization="mup", **base),
    ):
        found = compare(configs, options, OptimizerOptions(name=optimizer, lr=LR), 10, 1)
        changes = {each.module: max(each.changes) / min(each.changes) for each in found}
        spreads.append([changes[name] for name in ("embedding", "residual stream", "logits")])
    assert max(spreads[0]) <= FLAT
    assert max(spreads[1]) > FLAT


def trained(
    config: ModelConfig, options: ModelOptions, optimizer_options: OptimizerOptions, steps: int = 5
) -> tuple[LanguageModel, list[float]]:
    """The model and its losses, in fp64."""
    model = build_model(config, torch.device("cpu"))
    model.setup = ModelSetup(relative_to_base(options, config))
    model = init_weights(model, 0).double()
    optimizer = build_optimizer(model, optimizer_options)
    return model, losses_of(model, optimizer, optimizer_options.lr, steps)


def losses_of(
    model: LanguageModel, optimizer: torch.optim.Optimizer, lr: float, steps: int
) -> list[float]:
    objective, batch, losses = NextTokenObjective(), drawn_batch(model.config.vocab_size, 0), []
    for _ in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = lr * group.get("lr_ratio", 1.0)
        total, _metrics = objective.loss(model, batch)
        losses.append(total.item() / objective.num_items(batch).item())
        (total / objective.num_items(batch)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return losses


@pytest.mark.parametrize("name", ["adamw", "muon"])
@pytest.mark.parametrize(
    "config",
    [SMALL_MODEL, SMALL_MIXTURE, FAMILIES["gpt2"], FAMILIES["gemma3"]],
    ids=["llama", "mixture", "gpt2", "gemma3"],
)
def test_the_base_model_itself_trains_as_in_the_standard_parametrization(
    config: ModelConfig, name: str
) -> None:
    optimizer = OptimizerOptions(name=name, lr=LR)
    base = ModelOptions(
        parametrization="completep",
        base_width=config.hidden_size,
        base_depth=config.num_hidden_layers,
    )
    assert trained(config, base, optimizer)[1] == trained(config, STANDARD, optimizer)[1]


@pytest.mark.parametrize("tied", [False, True])
def test_steps_are_those_of_the_form_with_multipliers(tied: bool) -> None:
    """CompleteP as its paper has it (table 1): logits are divided by the width, what a block adds
    by the depth, and learning rates, decay and epsilon are those of the table. A tied head has the
    multiplier alone.
    """
    config = replace(SMALL_MODEL, tie_word_embeddings=tied)
    width, depth, lr, eps, decay = 4.0, 2.0, LR, 1e-4, 0.1
    options = ModelOptions(parametrization="completep", base_width=16, base_depth=2)
    _, losses = trained(config, options, OptimizerOptions(lr=lr, eps=eps, weight_decay=decay))
    paper = init_weights(build_model(config, torch.device("cpu")), 0).double()
    paper.lm_head.register_forward_pre_hook(lambda module, args: (args[0] / width, *args[1:]))
    groups = []
    for name, parameter in paper.named_parameters():
        in_block = ".layers." in name
        is_matrix, residual = (
            parameter.ndim > 1,
            name.endswith(("o_proj.weight", "down_proj.weight")),
        )
        if in_block and is_matrix:
            with torch.no_grad():  # the base model's, of two layers
                parameter *= width**-0.5 * (depth**0.5 if residual else 1.0)
        of_branch = 1 / depth if in_block else 1.0
        groups.append(
            {
                "params": [parameter],
                "lr": lr / width if in_block and is_matrix else lr,
                "eps": eps / width * of_branch,
                "weight_decay": (decay * width if in_block else decay) if is_matrix else 0.0,
            }
        )
    for block in paper.blocks:
        for module in (block.self_attn, block.mlp):
            module.register_forward_hook(lambda module, args, output: output / depth)  # type: ignore[misc]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95))
    objective, batch = NextTokenObjective(), drawn_batch(config.vocab_size, 0)
    for step in range(5):
        total, _metrics = objective.loss(paper, batch)
        items = objective.num_items(batch)
        assert total.item() / items.item() == pytest.approx(losses[step], rel=1e-6), step
        (total / items).backward()
        optimizer.step()
        optimizer.zero_grad()


def test_scores_of_wider_heads_are_divided_by_their_width_and_not_by_its_root() -> None:
    for config in (FAMILIES["llama"], FAMILIES["qwen3"]):
        wider = replace(config, num_attention_heads=2, num_key_value_heads=2, head_dim=32)
        models = []
        for options in (MUP, MUP.model_copy(update={"base_head_dim": 16})):
            model = build_model(wider, torch.device("cpu"))
            model.setup = ModelSetup(relative_to_base(options, wider))
            models.append(dict(init_weights(model, 0).named_parameters()))
        name = "model.layers.0.self_attn." + (
            "q_norm.weight" if config.family.qk_norm else "q_proj.weight"
        )
        assert torch.allclose(models[1][name], models[0][name] * 0.5**0.5)
        others = [each for each in models[0] if ".q_" not in each]
        assert all(torch.equal(models[0][each], models[1][each]) for each in others)


def test_an_exported_model_has_the_logits_of_transformers() -> None:
    """No multiplier is left that a folder could not hold."""
    transformers = pytest.importorskip("transformers")
    for family in ("tied", "gemma3"):
        config = FAMILIES[family]
        options = ModelOptions(parametrization="completep", base_width=16, base_depth=1)
        model, _ = trained(config, options, OptimizerOptions(lr=LR))
        theirs = to_transformers(model, transformers)
        batch = drawn_batch(config.vocab_size, 1)
        with torch.no_grad():
            ours: Tensor = model.lm_head(model(batch.tokens, batch.positions, batch.document_ids))
            assert torch.allclose(theirs(input_ids=batch.tokens).logits, ours, atol=1e-5)


def to_transformers(model: LanguageModel, transformers: Any) -> Any:
    from lmforge.core.model.config_json import to_config_json

    content = to_config_json(model.config)
    theirs = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model(**content)
    ).double()
    theirs.load_state_dict(dict(model.state_dict()), strict=not model.config.tie_word_embeddings)
    theirs.tie_weights()
    return theirs.eval()


@pytest.mark.slow
def test_doctor_says_which_modules_keep_their_size(
    capfd: pytest.CaptureFixture[str], tmp_path: Any
) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text('[model]\npreset = "nano"\nnum_hidden_layers = 1\n[optimizer]\nlr = 4e-3\n')
    assert run(["doctor", str(recipe), "--coordinates", "--output", "json"]) == 0
    found = json.loads(capfd.readouterr().out)
    (over_widths,) = found["comparisons"]
    assert (over_widths["widths"], over_widths["parametrization"]) == ([64, 128, 256, 512], "mup")
    assert max(each["spread"] for each in over_widths["modules"]) <= found["flat"]
    assert max(each["standard"] for each in over_widths["modules"]) > 2 * found["flat"]


@pytest.mark.slow  # some seconds
def test_doctor_checks_a_recipe_with_completep_over_depths_too(
    capfd: pytest.CaptureFixture[str], tmp_path: Any
) -> None:
    recipe = tmp_path / "recipe.toml"
    base = (
        'parametrization = "completep"\nbase_width = 64\nbase_depth ='
        " 2\nembedding_initializer_range = 1.0\n"
    )
    recipe.write_text(f'[model]\npreset = "nano"\n{base}[optimizer]\nlr = 4e-3\n')
    assert run(["doctor", str(recipe), "--coordinates", "--output", "json"]) == 0
    found = json.loads(capfd.readouterr().out)
    over_depths = found["comparisons"][1]
    assert (over_depths["depths"], over_depths["parametrization"]) == ([2, 4, 8, 16], "completep")
    assert [each["module"] for each in over_depths["modules"]] == [
        "embedding",
        "residual stream",
        "logits",
    ]
    assert max(each["spread"] for each in over_depths["modules"]) <= found["flat"]
    assert max(each["standard"] for each in over_depths["modules"]) > found["flat"]


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_the_table_of_a_recipe_has_the_numbers_of_its_optimizer(name: str) -> None:
    optimizer = OptimizerOptions(
        name=name,
        lr=0.01,
        embedding_lr_ratio=5.0,
        groups=(GroupOptions(pattern="down_proj", weight_decay=0.3, lr_ratio=2.0),),
    )
    options = ModelOptions(preset="nano", parametrization="mup", base_width=64)
    config = PretrainConfig(model=options, optimizer=optimizer)
    model_config = get_preset("nano")
    _, _, *rows = describe_tensors(config, model_config)
    printed = {row.split()[0]: [float(each) for each in row.split()[3:]] for row in rows}
    model = empty_model(config, model_config)
    of_tensor = {parameter: name for name, parameter in model.named_parameters()}
    built = build_optimizer(model, optimizer)
    for group in built.param_groups:
        for parameter in group["params"]:
            numbers = [0.01 * group["lr_ratio"], group["weight_decay"], group["eps"]]
            row = printed[re.sub(r"\.\d+\.", ".N.", of_tensor[parameter])]
            assert row == pytest.approx(numbers, rel=1e-3)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            "--model.parametrization mup",
            "model.parametrization = mup: give model.base_width, of the model its settings are for",
        ),
        (
            "--model.parametrization completep --model.base_width 64",
            (
                "model.parametrization = completep: give model.base_depth, of the model its"
                " settings are for"
            ),
        ),
        (
            "--model.base_width 64",
            "model.base_width: not with model.parametrization = standard; leave it out",
        ),
        (
            "--model.parametrization mup --model.base_width 64 --model.base_depth 2",
            "model.base_depth: not with model.parametrization = mup; leave it out",
        ),
    ],
)
def test_a_parametrization_without_its_base_model_is_refused(
    tiny_options: list[str], words: str, message: str, refused: Refusal
) -> None:
    assert message in refused("pretrain", *tiny_options, *words.split())


@pytest.mark.parametrize("preset", [name for name in PRESETS if name != "nano"])
def test_every_preset_has_small_models_for_the_check(preset: str) -> None:
    for width in (64, 512):
        assert small(get_preset(preset), width).hidden_size == width


def test_what_diverges_or_stands_still_is_not_flat() -> None:
    for changes in ((1.0, math.nan), (math.inf, 1.0), (0.0, 1.0)):
        each = Coordinates("attention", (1.0, 1.0), changes)
        assert each.spread == math.inf
        assert len(bars(changes)) == 2


def test_adapters_share_the_factor_of_a_branch() -> None:
    """B has it; A has the learning rate of a hidden matrix."""
    scale = Parametrization(4.0, 2.0)
    config = FAMILIES["llama"]
    name = "model.layers.0.self_attn.o_proj"
    first, second = (
        scale.scale(f"{name}.lora_{each}.weight", (4, 4), "block", config) for each in "AB"
    )
    assert (first.init, first.lr) == (1.0, 0.25)
    assert (second.lr, scale.scale(f"{name}.weight", (4, 4), "block", config).lr) == (0.5, 0.125)
