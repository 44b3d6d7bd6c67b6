"""Low-rank adapters compute, train, merge and are stored like PEFT's; their random numbers depend
only on tokens and names.
"""

import json
import math
import random
from collections.abc import Mapping
from pathlib import Path

import peft
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from lmforge.core.data.batch import Batch
from lmforge.core.errors import UserError
from lmforge.core.losses.language import NextTokenObjective
from lmforge.core.model.build import build_model
from lmforge.core.model.init_weights import init_adapters, init_weights
from lmforge.core.model.layers import LanguageModel
from lmforge.core.model.lora import LoraLinear, add_lora, disable_adapters
from lmforge.core.model.lora_config import LoraConfig, adapter_parameters
from lmforge.core.optim.optimizer import build_optimizer, named_optimizer_state
from lmforge.core.options.sections import GroupOptions, OptimizerOptions, ParallelOptions
from lmforge.core.parallel.activation_checkpointing import apply_activation_checkpointing
from lmforge.core.parallel.validate import check_lora
from lmforge.hf.export import export_folder
from lmforge.hf.merge_adapters import merge_adapters
from lmforge.hf.peft_folder import load_peft_folder, save_peft_folder
from lmforge.hf.resolve import resolve_model_config
from lmforge.hf.weights import load_folder
from lmforge.lab.bench.parity import ParityData
from tests.core.model.conftest import drawn_config
from tests.distributed.shapes import SHAPES

# fp32 in another order of sums, relative to the largest number.
TOLERANCE = 1e-5
# Sums in another order again, in one layer after another.
MERGED = 1e-6


def with_adapters(model: LanguageModel, config: LoraConfig, seed: int) -> LanguageModel:
    """`model` with adapters as they are after some training: B is no longer zero."""
    add_lora(model, config)
    init_adapters(model, seed)
    for name, parameter in adapter_parameters(model).items():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.05)
    return model


def set_adapters(model: LanguageModel, tensors: Mapping[str, Tensor]) -> None:
    """Give the adapters of `model` these values, all of them."""
    adapters = adapter_parameters(model)
    assert adapters.keys() == tensors.keys()
    with torch.no_grad():
        for name, parameter in adapters.items():
            parameter.copy_(tensors[name])


def logits(model: LanguageModel, batch: Batch, keys: Tensor | None = None) -> Tensor:
    return model.lm_head(model(batch.tokens, batch.positions, batch.document_ids, rng_keys=keys))


def gradients(model: LanguageModel, batch: Batch) -> dict[str, Tensor]:
    model.zero_grad(set_to_none=True)
    NextTokenObjective().loss(model, batch)[0].backward()
    return {
        name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None
    }


def assert_close(mine: Tensor, theirs: Tensor, tolerance: float = TOLERANCE) -> None:
    assert mine.shape == theirs.shape
    assert float((mine - theirs).detach().abs().max()) <= tolerance * float(
        theirs.detach().abs().max()
    )


def one_document(rows: int, length: int, vocabulary: int) -> Batch:
    """Rows of one document each, without padding: what transformers needs no mask for."""
    tokens = torch.randint(0, vocabulary, (rows, length))
    positions = torch.arange(length).expand(rows, -1)
    return Batch(
        tokens,
        torch.randint(0, vocabulary, (rows, length)),
        positions,
        torch.zeros_like(tokens).int(),
    )


@pytest.mark.parametrize(
    ("kind", "config"),
    [
        ("llama", LoraConfig(4, 8.0)),
        ("qwen3", LoraConfig(3, 7.5, target_modules=("q_proj", "down_proj"), use_rslora=True)),
        ("qwen2", LoraConfig(2, 2, target_modules=(r".*layers\.0\..*(gate|up)_proj", "v_proj"))),
        ("gpt2", LoraConfig(5, 16.0)),
    ],
)
def test_forward_gradients_and_merge_are_those_of_peft(
    kind: str, config: LoraConfig, draw: random.Random, tmp_path: Path
) -> None:
    shape = drawn_config(kind, draw, num_hidden_layers=2)
    model = init_weights(build_model(shape), draw.randrange(1000))
    export_folder(model, shape, tmp_path / "base")
    with_adapters(model, config, seed=7)
    save_peft_folder(
        tmp_path / "adapters", adapter_parameters(model), config, str(tmp_path / "base")
    )

    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    theirs = peft.PeftModel.from_pretrained(base, tmp_path / "adapters", is_trainable=True)
    batch = one_document(3, 17, shape.vocab_size)
    # PEFT finds the same layers, or it would have none of their tensors.
    assert sum(p.requires_grad for p in theirs.parameters()) == len(adapter_parameters(model))
    assert_close(logits(model, batch), theirs(batch.tokens).logits)

    scored = theirs(batch.tokens).logits.flatten(0, 1)
    torch.nn.functional.cross_entropy(scored, batch.labels.flatten(), reduction="sum").backward()
    of_theirs = {
        name: each.grad for name, each in theirs.named_parameters() if each.grad is not None
    }
    mine = gradients(model, batch)
    assert len(of_theirs) == len(mine) == len(adapter_parameters(model))
    for name, gradient in mine.items():
        assert_close(
            gradient, of_theirs["base_model.model." + name.replace(".weight", ".default.weight")]
        )

    merged = build_model(shape)
    load_folder(tmp_path / "base", merged)
    merge_adapters(merged, config, adapter_parameters(model), "adapters")
    assert_close(logits(merged, batch), logits(model, batch), MERGED)
    for name, parameter in theirs.merge_and_unload().named_parameters():
        assert_close(merged.get_parameter(name), parameter)


@pytest.mark.parametrize("kind", ["mistral", "gpt2"])
def test_adapters_that_peft_made_are_opened(kind: str, draw: random.Random, tmp_path: Path) -> None:
    shape = drawn_config(kind, draw, num_hidden_layers=3)
    export_folder(init_weights(build_model(shape), 1), shape, tmp_path / "base")
    narrowed = {"layers_to_transform": [0, 2]} if kind == "mistral" else {}
    target = ["q_proj", "o_proj"] if kind == "mistral" else "all-linear"
    options = peft.LoraConfig(
        r=6, lora_alpha=9, target_modules=target, use_rslora=True, lora_dropout=0.25, **narrowed
    )
    theirs = peft.get_peft_model(
        AutoModelForCausalLM.from_pretrained(tmp_path / "base"), options
    ).eval()
    for name, parameter in theirs.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    theirs.save_pretrained(tmp_path / "adapters")

    config, tensors = load_peft_folder(tmp_path / "adapters")
    assert (config.rank, config.alpha, config.dropout, config.use_rslora) == (6, 9, 0.25, True)
    model = build_model(shape)
    load_folder(tmp_path / "base", model)
    add_lora(model, config)
    set_adapters(model, tensors)
    batch = one_document(2, 11, shape.vocab_size)
    assert_close(logits(model, batch), theirs(batch.tokens).logits)
    assert sum(isinstance(module, LoraLinear) for module in model.modules()) == (
        4 if kind == "mistral" else 12
    )


def test_a_wrapped_model_is_adapted_and_merged_as_ours_is(tmp_path: Path) -> None:
    shape = SHAPES["llama"]
    ours = init_weights(build_model(shape), 2)
    export_folder(ours, shape, tmp_path / "base")
    wrapped_shape = resolve_model_config(tmp_path / "base", {}, implementation="transformers")
    wrapped = build_model(wrapped_shape)
    with_adapters(wrapped, LoraConfig(4, 8.0), seed=3)
    load_folder(tmp_path / "base", wrapped)
    add_lora(ours, LoraConfig(4, 8.0))
    set_adapters(ours, adapter_parameters(wrapped))
    batch = one_document(2, 15, shape.vocab_size)
    assert_close(logits(wrapped, batch), logits(ours, batch))
    plain = build_model(wrapped_shape)
    load_folder(tmp_path / "base", plain)
    merge_adapters(plain, LoraConfig(4, 8.0), adapter_parameters(wrapped), "wrapped")
    export_folder(plain, wrapped_shape, tmp_path / "merged")
    merged = build_model(shape)
    load_folder(tmp_path / "merged", merged)
    assert_close(logits(merged, batch), logits(ours, batch))
    with pytest.raises(UserError, match=r"lora\.dropout"):
        add_lora(build_model(wrapped_shape), LoraConfig(4, 8.0, dropout=0.1))


def test_what_would_split_adapters_is_refused_in_a_line() -> None:
    for whole in (
        ParallelOptions(context_parallel_degree=2),
        ParallelOptions(pipeline_parallel_degree=2),
    ):
        check_lora(whole, float8=False)
    with pytest.raises(UserError, match="adapters"):
        check_lora(ParallelOptions(tensor_parallel_degree=2), float8=False)
    with pytest.raises(UserError, match="float8"):
        check_lora(ParallelOptions(), float8=True)


@pytest.mark.parametrize("targets", [("all-linear",), ("k_proj", "up_proj")])
def test_a_folder_of_adapters_comes_back_as_it_was(
    targets: tuple[str, ...], tmp_path: Path
) -> None:
    config = LoraConfig(3, 4.5, target_modules=targets, dropout=0.125)
    model = with_adapters(init_weights(build_model(SHAPES["llama"]), 0), config, seed=1)
    save_peft_folder(tmp_path / "a", adapter_parameters(model), config, "base")
    again, tensors = load_peft_folder(tmp_path / "a")
    other = init_weights(build_model(SHAPES["llama"]), 0)
    add_lora(other, again)
    set_adapters(other, tensors)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, other.get_parameter(name))
    with pytest.raises(UserError, match="exists already"):
        save_peft_folder(tmp_path / "a", tensors, config, "base")
    save_peft_folder(tmp_path / "a", tensors, config, "base", overwrite=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a"]


REFUSED = {
    "rank_pattern.q_proj: expected a number of at least 1": {"rank_pattern": {"q_proj": 0}},
    "use_dora = true": {"use_dora": True},
    "bias": {"bias": "all"},
    "init_lora_weights": {"init_lora_weights": "pissa"},
    "thought_of_later": {"thought_of_later": 1},
    "peft_type VERA": {"peft_type": "VERA"},
    "r: expected a number of at least 1": {"r": 0},
    "lora_alpha: expected a number above 0": {"lora_alpha": 0.0},
    "lora_dropout: expected a number below 1": {"lora_dropout": 1.0},
}


@pytest.mark.parametrize("named", REFUSED)
def test_what_is_not_computed_here_is_refused_by_its_name(named: str, tmp_path: Path) -> None:
    config = LoraConfig(2, 4)
    model = with_adapters(init_weights(build_model(SHAPES["llama"]), 0), config, seed=1)
    save_peft_folder(tmp_path / "a", adapter_parameters(model), config, "base")
    path = tmp_path / "a" / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | REFUSED[named]))
    with pytest.raises(UserError, match=rf"adapter_config.json: .*{named}"):
        load_peft_folder(tmp_path / "a")


def test_folders_and_adapters_that_do_not_fit_are_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such file"):
        load_peft_folder(tmp_path)
    config = LoraConfig(2, 4)
    model = with_adapters(init_weights(build_model(SHAPES["llama"]), 0), config, seed=1)
    tensors = dict(adapter_parameters(model))
    name = next(iter(tensors))
    base = init_weights(build_model(SHAPES["llama"]), 0)
    with pytest.raises(UserError, match=r"here: .*: not a pair of matrices of one rank"):
        merge_adapters(
            base, config, {key: value for key, value in tensors.items() if key != name}, "here"
        )
    with pytest.raises(
        UserError, match=r"here: adapters for another model: they are for .* \[\d+, 3\]"
    ):
        merge_adapters(base, config, tensors | {name: torch.zeros(2, 3)}, "here")
    save_peft_folder(
        tmp_path / "a", tensors | {"model.norm.lora_C.weight": torch.zeros(3)}, config, "base"
    )
    with pytest.raises(UserError, match=r"norm\.lora_C\.weight: not an adapter"):
        load_peft_folder(tmp_path / "a")
    weights = tmp_path / "a" / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-5])
    with pytest.raises(UserError, match="damaged"):
        load_peft_folder(tmp_path / "a")


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        (("q_prj",), "is called q_prj; there are: down_proj"),
        (("lm_head",), "lm_head"),
        (("(",), "not a regular exp"),
        (("x{99999999999}",), "target_modules: not a regular exp"),
        ((), "no layer"),
    ],
)
def test_a_target_that_is_no_layer_is_refused(targets: tuple[str, ...], message: str) -> None:
    with pytest.raises(UserError, match=message):
        add_lora(
            init_weights(build_model(SHAPES["llama"]), 0), LoraConfig(2, 4, target_modules=targets)
        )


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_first_values_depend_on_name_and_seed_alone_and_change_nothing(kind: str) -> None:
    shape = SHAPES[kind]
    batch = ParityData(2).batch(0, shape.vocab_size)
    model, narrow = (init_weights(build_model(shape), 5) for _ in range(2))
    plain = logits(model, batch)
    add_lora(model, LoraConfig(4, 8.0))
    add_lora(
        narrow, LoraConfig(4, 99.0, target_modules=("c_attn" if kind == "gpt2" else "v_proj",))
    )
    init_adapters(model, 11)
    init_adapters(narrow, 11)
    assert torch.equal(logits(model, batch), plain)
    for name, parameter in adapter_parameters(narrow).items():
        assert torch.equal(parameter, model.get_parameter(name))
    tensors = adapter_parameters(model)
    first = [parameter for name, parameter in tensors.items() if "lora_A" in name]
    for parameter in first:
        assert 0.9 < float(parameter.detach().abs().max()) * math.sqrt(parameter.shape[1]) <= 1
    assert not torch.equal(first[0], first[1])
    # On the meta device, and filled with everything else.
    from_meta = build_model(shape, "meta")
    add_lora(from_meta, LoraConfig(4, 8.0))
    from_meta.to_empty(device="cpu")
    from_meta.tie_weights()
    init_weights(from_meta, 11)
    for name, parameter in tensors.items():
        assert torch.equal(parameter, from_meta.get_parameter(name))


def test_names_of_the_weights_stay_and_only_adapters_are_trained() -> None:
    model, plain = (init_weights(build_model(SHAPES["split tied"]), 5) for _ in range(2))
    add_lora(model, LoraConfig(4, 8.0, target_modules=("q_proj", "mlp.down_proj")))
    init_adapters(model, 0)
    names = [name for name, _ in model.named_parameters() if ".lora_" not in name]
    assert names == [name for name, _ in plain.named_parameters()]
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained == {
        f"model.layers.{block}.{layer}.lora_{which}.weight"
        for block in range(4)
        for layer in ("self_attn.q_proj", "mlp.down_proj")
        for which in "AB"
    }
    optimizer = build_optimizer(model, OptimizerOptions())
    assert named_optimizer_state(model, optimizer).keys() == trained
    with pytest.raises(UserError, match="no tensor has embed"):
        build_optimizer(
            model, OptimizerOptions(groups=(GroupOptions(pattern="embed", lr_ratio=0.5),))
        )


def test_with_adapters_off_the_model_is_what_it_was() -> None:
    shape = SHAPES["gpt2"]
    batch = ParityData(3).batch(1, shape.vocab_size)
    plain = logits(init_weights(build_model(shape), 5), batch)
    model = with_adapters(init_weights(build_model(shape), 5), LoraConfig(4, 8.0), seed=0)
    after = logits(model, batch)
    with torch.no_grad(), disable_adapters(model):
        assert torch.equal(logits(model, batch), plain)
    assert torch.equal(logits(model, batch), after)
    assert not torch.allclose(after, plain, atol=0.1)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_dropout_of_adapters_is_the_same_for_any_split_and_when_computed_again(kind: str) -> None:
    shape = SHAPES[kind]
    batch = ParityData(4, sequence_length=33).batch(0, shape.vocab_size)
    config = LoraConfig(4, 8.0, dropout=0.3)
    model = with_adapters(init_weights(build_model(shape), 5), config, seed=0)
    whole = gradients(model, batch)
    assert not torch.equal(logits(model, batch), logits(model, batch, batch.rng_keys))
    halves = [gradients(model, batch[rows]) for rows in (slice(0, 1), slice(1, 4))]
    apply_activation_checkpointing(model, "full")
    again = gradients(model, batch)
    for name, gradient in whole.items():
        assert torch.equal(again[name], gradient)
        assert_close(halves[0][name] + halves[1][name], gradient)


def test_dropout_of_adapters_zeroes_what_goes_into_them_and_nothing_else() -> None:
    """With B A the identity, what an adapted layer adds is its input after dropout."""
    shape = SHAPES["llama"]
    model = init_weights(build_model(shape), 5)
    width, rate = shape.hidden_size, 0.25
    add_lora(
        model, LoraConfig(width, float(width), target_modules=("q_proj", "o_proj"), dropout=rate)
    )
    batch = ParityData(8).batch(0, shape.vocab_size)
    noise = model.make_token_rng(batch.rng_keys, batch.document_ids)
    assert noise is not None
    masks = []
    for number, layer in enumerate(
        module for module in model.modules() if isinstance(module, LoraLinear)
    ):
        torch.nn.init.eye_(layer.lora_A.weight)
        torch.nn.init.eye_(layer.lora_B.weight)
        x = torch.rand(*batch.tokens.shape, width) + 1
        with torch.no_grad():
            plain = torch.nn.functional.linear(x, layer.weight, layer.bias)
            added = layer(x, noise.for_block(number // 2)) - plain
        kept = added.abs() > 1e-3
        # Sums of some forty numbers around 1: they leave what is subtracted to about 1e-5.
        assert torch.allclose(added[kept], (x / (1 - rate))[kept], atol=1e-4)
        assert float((~kept).float().mean()) == pytest.approx(rate, abs=0.02)
        masks.append(kept)
    for number, mask in enumerate(masks):
        for other in masks[:number]:
            # Both keep a number as often as chance has it.
            assert float((mask & other).float().mean()) == pytest.approx((1 - rate) ** 2, abs=0.02)
