"""Folders of weights: what is read, what is refused, and that no partly written or overwritten file
is left.
"""

import json
import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from lmforge.core.errors import UserError
from lmforge.core.model.build import build_model
from lmforge.core.model.config import ModelConfig
from lmforge.hf.export import export_folder
from lmforge.hf.safetensors_file import SafetensorsFile
from lmforge.hf.weights import load_folder
from tests.conftest import Command
from tests.core.model.conftest import built, drawn_config


def saved(config: ModelConfig, folder: Path) -> dict[str, torch.Tensor]:
    """An exported folder, and its tensors."""
    export_folder(built(config), config, folder)
    return load_file(folder / "model.safetensors")


def refusal(config: ModelConfig, folder: Path) -> str:
    with pytest.raises(UserError) as refused:
        load_folder(folder, build_model(config))
    assert "\n" not in str(refused.value)
    return str(refused.value)


def loaded(config: ModelConfig, folder: Path) -> dict[str, torch.Tensor]:
    model = build_model(config)
    load_folder(folder, model)
    assert (model.lm_head.weight is model.embeddings[0].weight) == config.tie_word_embeddings
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def assert_same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_constants_that_older_versions_stored_are_passed_over(
    draw: random.Random, tmp_path: Path
) -> None:
    config = drawn_config("llama", draw)
    tensors = saved(config, tmp_path / "a")
    old = {**tensors, "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2)}
    save_file(old, tmp_path / "a" / "model.safetensors")
    assert_same(loaded(config, tmp_path / "a"), tensors)


@pytest.mark.parametrize("prefix", ["", "transformer."])
def test_gpt2_is_read_with_and_without_its_prefix(
    prefix: str, draw: random.Random, tmp_path: Path
) -> None:
    config = drawn_config("gpt2", draw, tie_word_embeddings=True)
    tensors = saved(config, tmp_path / "a")
    old = {prefix + name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    old |= {
        f"{prefix}h.0.attn.bias": torch.ones(1, 1, 9, 9),
        f"{prefix}h.0.attn.masked_bias": torch.tensor(-1e4),
    }
    save_file(old, tmp_path / "a" / "model.safetensors")
    assert_same(loaded(config, tmp_path / "a"), tensors)


@pytest.mark.parametrize("stored", ["embedding", "head", "both"])
@pytest.mark.parametrize("model_type", ["llama", "gpt2"])
def test_a_tied_head_may_be_stored_under_either_name_or_both(
    stored: str, model_type: str, draw: random.Random, tmp_path: Path
) -> None:
    config = drawn_config(model_type, draw, tie_word_embeddings=True)
    tensors = saved(config, tmp_path / "a")
    embedding = "model.embed_tokens.weight" if model_type == "llama" else "transformer.wte.weight"
    changed = dict(tensors)
    if stored != "embedding":
        changed["lm_head.weight"] = tensors[embedding].clone()
    if stored == "head":
        del changed[embedding]
    save_file(changed, tmp_path / "a" / "model.safetensors")
    assert_same(loaded(config, tmp_path / "a"), tensors)


def test_weights_are_read_into_the_dtype_of_the_model(draw: random.Random, tmp_path: Path) -> None:
    config = drawn_config("qwen2", draw)
    model = built(config)
    export_folder(model, config, tmp_path / "a", dtype=torch.bfloat16)
    assert json.loads((tmp_path / "a" / "config.json").read_text())["torch_dtype"] == "bfloat16"
    rounded = {
        name: parameter.detach().bfloat16().float() for name, parameter in model.named_parameters()
    }
    assert_same(loaded(config, tmp_path / "a"), rounded)


def test_names_and_shapes_that_do_not_fit_are_named(draw: random.Random, tmp_path: Path) -> None:
    config = drawn_config("llama", draw, num_hidden_layers=2, tie_word_embeddings=False)
    tensors = saved(config, tmp_path / "a")
    file = tmp_path / "a" / "model.safetensors"

    save_file({name: tensor for name, tensor in tensors.items() if "layers.1" not in name}, file)
    assert "missing model.layers.1.input_layernorm.weight, " in refusal(config, tmp_path / "a")
    assert " more; use the config.json" in refusal(config, tmp_path / "a")

    save_file({**tensors, "model.layers.2.mlp.up_proj.weight": torch.ones(2)}, file)
    assert "unexpected model.layers.2.mlp.up_proj.weight; " in refusal(config, tmp_path / "a")

    save_file({**tensors, "model.norm.weight": torch.ones(7)}, file)
    assert f"model.norm.weight is [7] and should be [{config.hidden_size}]" in refusal(
        config, tmp_path / "a"
    )

    save_file({name: tensor for name, tensor in tensors.items() if name != "lm_head.weight"}, file)
    assert "missing lm_head.weight" in refusal(config, tmp_path / "a")

    save_file(
        {**tensors, "model.norm.weight": torch.ones(config.hidden_size, dtype=torch.int8)}, file
    )
    assert "quantized weights cannot be trained" in refusal(config, tmp_path / "a")


def test_a_damaged_or_missing_file_is_named(draw: random.Random, tmp_path: Path) -> None:
    config = drawn_config("llama", draw)
    folder = tmp_path / "a"
    export_folder(built(config), config, folder, max_shard_bytes=1)
    shards = sorted(folder.glob("model-*.safetensors"))
    assert len(shards) > 1

    whole = shards[1].read_bytes()
    shards[1].write_bytes(whole[: len(whole) // 2])
    assert f"{shards[1]}: damaged" in refusal(config, folder)
    shards[1].write_bytes(b"")
    assert f"{shards[1]}: damaged" in refusal(config, folder)
    shards[1].unlink()
    assert f"names {shards[1].name}, which is not in" in refusal(config, folder)

    index = folder / "model.safetensors.index.json"
    index.write_text('{"weight_map": {"model.norm.weight": "../../secret.safetensors"}}')
    assert "names ../../secret.safetensors, which is not in" in refusal(config, folder)
    index.write_text("[]")
    assert "expected an object" in refusal(config, folder)
    index.unlink()
    (folder / "pytorch_model.bin").write_bytes(b"")
    assert "pickled weights are not opened; convert the folder to safetensors" in refusal(
        config, folder
    )
    (folder / "pytorch_model.bin").unlink()
    assert "has neither model.safetensors nor" in refusal(config, folder)


def test_nothing_is_overwritten_unless_asked(draw: random.Random, tmp_path: Path) -> None:
    config = drawn_config("mistral", draw)
    first, second = built(config, seed=1), built(config, seed=2)
    export_folder(first, config, tmp_path / "a")
    before = (tmp_path / "a" / "model.safetensors").read_bytes()
    with pytest.raises(UserError, match="exists already; name another folder, or add --overwrite"):
        export_folder(second, config, tmp_path / "a")
    assert (tmp_path / "a" / "model.safetensors").read_bytes() == before
    export_folder(second, config, tmp_path / "a", overwrite=True)
    assert_same(
        loaded(config, tmp_path / "a"), {name: p.detach() for name, p in second.named_parameters()}
    )
    assert [path.name for path in tmp_path.iterdir()] == ["a"]

    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.txt").write_text("years of work")
    with pytest.raises(UserError, match="exists and is not a model; name another folder"):
        export_folder(second, config, tmp_path / "thesis", overwrite=True)
    assert (tmp_path / "thesis" / "chapter.txt").read_text() == "years of work"


def test_an_export_that_fails_leaves_nothing(
    draw: random.Random, tmp_path: Path, program: Command
) -> None:
    config = drawn_config("llama", draw)
    with pytest.raises(UserError, match=r"holds no tokenizer\.json"):
        export_folder(built(config), config, tmp_path / "a", tokenizer_folder=tmp_path)
    assert list(tmp_path.iterdir()) == []
    # A file-size limit is how a process of its own meets what a full disk does.
    text = (
        "import resource, signal, sys\n"
        "from lmforge.core.model.build import build_model\n"
        "from lmforge.core.model.init_weights import init_weights\n"
        "from lmforge.hf.resolve import resolve_model_config\n"
        "from lmforge.hf.export import export_folder\n"
        "config = resolve_model_config('nano', {'num_hidden_layers': 1})\n"
        "model = init_weights(build_model(config), 0)\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))\n"
        "export_folder(model, config, sys.argv[1])\n"
    )
    done = program(text, tmp_path / "b")
    assert f"UserError: {tmp_path}: no space to write b" in done.stderr, done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_state_is_exported_as_its_model_is(draw: random.Random, tmp_path: Path) -> None:
    config = drawn_config(draw.choice(["llama", "gpt2"]), draw, tie_word_embeddings=True)
    model = built(config)
    assert "lm_head.weight" in model.state_dict()
    export_folder(model.state_dict(), config, tmp_path / "state")
    export_folder(model, config, tmp_path / "model")
    assert_same(
        load_file(tmp_path / "state" / "model.safetensors"),
        load_file(tmp_path / "model" / "model.safetensors"),
    )


def test_an_export_of_another_shape_is_a_defect_of_the_caller(
    draw: random.Random, tmp_path: Path
) -> None:
    config = drawn_config("llama", draw)
    with pytest.raises(ValueError, match="not those of the config"):
        export_folder({"model.norm.weight": torch.ones(3)}, config, tmp_path / "a")


def test_the_files_of_the_tokenizer_go_along(draw: random.Random, tmp_path: Path) -> None:
    config = drawn_config("llama", draw)
    (tmp_path / "t").mkdir()
    (tmp_path / "t" / "tokenizer.json").write_text("{}")
    (tmp_path / "t" / "notes.txt").write_text("mine")
    export_folder(built(config), config, tmp_path / "a", tokenizer_folder=tmp_path / "t")
    assert {path.name for path in (tmp_path / "a").iterdir()} == {
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    }


@pytest.mark.parametrize("width", [7, 3000])
def test_any_rows_and_columns_of_a_tensor_are_read_into_any_dtype(
    width: int, draw: random.Random, tmp_path: Path
) -> None:
    """Columns narrower than a page, and wider, in one's own memory and by way of a block."""
    stored = {
        "a": torch.randn(draw.randrange(5, 60), width),
        "b": torch.randn(9, width).bfloat16(),
        "c": torch.randn(11),
    }
    save_file(stored, tmp_path / "x.safetensors")
    file = SafetensorsFile(tmp_path / "x.safetensors")
    for _ in range(20):
        requested = []
        for name, whole in stored.items():
            cuts = [sorted((draw.randint(0, size), draw.randint(0, size))) for size in whole.shape]
            part = tuple(slice(*cut) for cut in cuts)
            target = torch.full(
                whole[part].shape, torch.nan, dtype=draw.choice([torch.float32, whole.dtype])
            )
            requested.append((name, target, part))
        file.read_parts(requested)
        for name, target, part in requested:
            assert torch.equal(target, stored[name][part].to(target.dtype)), (name, part)


def test_capped_logits_are_not_exported_to_a_family_whose_logits_are_not_capped_elsewhere(
    draw: random.Random, tmp_path: Path
) -> None:
    config = drawn_config("llama", draw, final_logit_softcapping=30.0)
    with pytest.raises(
        UserError, match=r"logits are capped .* which transformers' llama models are not"
    ):
        export_folder(built(config), config, tmp_path / "a")
    assert not (tmp_path / "a").exists()


def test_convolutions_are_written_by_themselves_and_read_however_they_are_cut(
    draw: random.Random, tmp_path: Path
) -> None:
    config = drawn_config(
        "olmo_hybrid",
        draw,
        num_hidden_layers=2,
        layer_types=["linear_attention", "full_attention"],
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=3,
        linear_value_head_dim=5,
    )
    tensors = saved(config, tmp_path / "a")
    before = loaded(config, tmp_path / "a")
    names = [f"model.layers.0.linear_attn.{part}_conv1d.weight" for part in "qkv"]
    assert [len(tensors[name]) for name in names] == [6, 6, 20]
    whole = torch.cat([tensors[name] for name in names])

    def stored_in(*rows: int) -> None:
        cut = dict(zip(names, whole.split(rows), strict=True))
        save_file(tensors | cut, tmp_path / "a" / "model.safetensors")

    stored_in(11, 11, 10)  # as transformers does
    assert_same(loaded(config, tmp_path / "a"), before)
    whole = whole[:31]
    stored_in(11, 11, 9)
    assert "v_conv1d.weight is [9, 1" in refusal(config, tmp_path / "a")
    tensors.pop(names[1])
    save_file(tensors, tmp_path / "a" / "model.safetensors")
    assert "k_conv1d.weight" in refusal(config, tmp_path / "a")
