"""The language model of a folder whose model reads images too, made small and random by
transformers.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from lmforge.cli import run
from lmforge.core.errors import UserError
from lmforge.core.model.build import build_model
from lmforge.core.model.text_tower import TEXT_TOWERS
from lmforge.hf.export import export_folder
from lmforge.hf.resolve import resolve_model_config
from lmforge.hf.weights import describe_folder, load_folder

pytestmark = pytest.mark.usefixtures("token_by_token")

TEXT: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
}
VISION = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
QWEN_VISION = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_heads": 2,
    "out_hidden_size": 32,
    "num_position_embeddings": 16,
}
QWEN_IDS = {
    "image_token_id": 299,
    "video_token_id": 298,
    "vision_start_token_id": 297,
    "vision_end_token_id": 296,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "gemma3": {
        "text_config": {**TEXT, "sliding_window": 8, "query_pre_attn_scalar": 16},
        "vision_config": {"model_type": "siglip_vision_model", **VISION},
        "mm_tokens_per_image": 1,
        "image_token_index": 299,
        "boi_token_index": 298,
        "eoi_token_index": 297,
    },
    "mistral3": {
        "text_config": {"model_type": "mistral", **TEXT},
        "vision_config": {"model_type": "pixtral", "head_dim": 8, **VISION},
        "image_token_index": 299,
    },
    "qwen3_5": {
        "text_config": {
            **TEXT,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
        },
        "vision_config": QWEN_VISION,
        **QWEN_IDS,
    },
    "qwen3_5_moe": {
        "text_config": {
            **TEXT,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 24,
        },
        "vision_config": QWEN_VISION,
        **QWEN_IDS,
    },
    "qwen3_vl": {
        "text_config": TEXT,
        "vision_config": {**QWEN_VISION, "deepstack_visual_indexes": [0]},
        **QWEN_IDS,
    },
}
# Beginnings of names on disk, as these folders are published, and as the modules are called.
MODULES = {
    "language_model.model.": "model.language_model.",
    "language_model.lm_head.": "lm_head.",
    "": "model.",
}


def made(kind: str, folder: Path) -> Any:
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **CONFIGS[kind])
    model = transformers.AutoModelForImageTextToText.from_config(config).eval()
    model.save_pretrained(folder)
    return model


def logits_of(folder: Path) -> tuple[Any, torch.Tensor]:
    config = resolve_model_config(folder, {})
    model = build_model(config, "cpu")
    load_folder(folder, model)
    tokens = torch.arange(3, 93).expand(2, -1)
    positions = torch.arange(90).expand(2, -1)
    with torch.no_grad():
        hidden = model(tokens, positions, torch.zeros_like(tokens, dtype=torch.int32))
        return model, model.lm_head(hidden)


def test_each_kind_of_folder_is_made_here() -> None:
    assert CONFIGS.keys() == TEXT_TOWERS.keys()


@pytest.mark.parametrize("kind", CONFIGS)
def test_the_language_model_computes_what_the_whole_model_does_for_text(
    kind: str, tmp_path: Path
) -> None:
    theirs = made(kind, tmp_path / kind)
    model, logits = logits_of(tmp_path / kind)
    tokens = torch.arange(3, 93).expand(2, -1)
    with torch.no_grad():
        expected = theirs(input_ids=tokens, attention_mask=torch.ones_like(tokens)).logits
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5 * float(expected.abs().max()))
    others = [name for name, _ in theirs.named_parameters() if "vis" in name or "project" in name]
    [note] = describe_folder(tmp_path / kind)
    assert note == (
        f"the language model of a {kind} folder; its {len(others)} other tensors are neither"
        " trained nor exported"
    )
    # What is exported is a model of text, which transformers opens as one.
    export_folder(model, model.config, tmp_path / "text")
    text = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "text").eval()
    assert "vision_config" not in json.loads((tmp_path / "text" / "config.json").read_text())
    with torch.no_grad():
        again = text(input_ids=tokens).logits
    torch.testing.assert_close(again, expected, rtol=0, atol=1e-5 * float(expected.abs().max()))


@pytest.mark.parametrize("kind", ["gemma3", "mistral3"])
def test_names_of_the_modules_are_read_too(kind: str, tmp_path: Path) -> None:
    made(kind, tmp_path)
    _, expected = logits_of(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    renamed = {}
    for name, tensor in tensors.items():
        published = next(each for each in MODULES if name.startswith(each))
        renamed[MODULES[published] + name.removeprefix(published)] = tensor
    assert any(name.startswith("language_model.model.layers.") for name in tensors)
    save_file(renamed, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert torch.equal(logits_of(tmp_path)[1], expected)


def test_experts_are_read_stacked_too_as_qwens_are_published(tmp_path: Path) -> None:
    made("qwen3_5_moe", tmp_path)
    _, expected = logits_of(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    own = ".mlp.experts."
    rest = {name: each for name, each in tensors.items() if own not in name}
    for layer in range(TEXT["num_hidden_layers"]):
        of_layer = f"model.language_model.layers.{layer}{own}"

        def stacked(kind: str, of_layer: str = of_layer) -> torch.Tensor:
            return torch.stack(
                [tensors[f"{of_layer}{each}.{kind}_proj.weight"] for each in range(4)]
            )

        rest[f"{of_layer}gate_up_proj"] = torch.cat((stacked("gate"), stacked("up")), dim=1)
        rest[f"{of_layer}down_proj"] = stacked("down")
    save_file(rest, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert torch.equal(logits_of(tmp_path)[1], expected)


def test_a_text_config_beside_the_tensors_of_the_whole_model_opens_too(tmp_path: Path) -> None:
    made("qwen3_5", tmp_path)
    _, expected = logits_of(tmp_path)
    content = json.loads((tmp_path / "config.json").read_text())
    text = {**content["text_config"], "tie_word_embeddings": False}
    (tmp_path / "config.json").write_text(json.dumps(text))
    assert torch.equal(logits_of(tmp_path)[1], expected)
    assert "of a multimodal folder; its 21 other tensors" in describe_folder(tmp_path)[0]


def test_tensors_that_predict_further_tokens_are_not_read_and_that_is_said(tmp_path: Path) -> None:
    config = transformers.AutoConfig.for_model("qwen3_5_text", **CONFIGS["qwen3_5"]["text_config"])
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    _, expected = logits_of(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["mtp.fc.weight"] = torch.zeros(2, 2)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert torch.equal(logits_of(tmp_path)[1], expected)
    assert describe_folder(tmp_path) == ["without 1 tensor for the prediction of further tokens"]


def test_what_a_published_gemma_leaves_out_is_what_transformers_assumes(tmp_path: Path) -> None:
    content = {
        "model_type": "gemma3",
        "text_config": {
            "model_type": "gemma3_text",
            "hidden_size": 2560,
            "intermediate_size": 10240,
            "num_hidden_layers": 34,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
            "sliding_window": 1024,
        },
    }
    (tmp_path / "config.json").write_text(json.dumps(content))
    config = resolve_model_config(tmp_path, {})
    theirs = transformers.AutoConfig.from_pretrained(tmp_path).text_config
    for name in ("vocab_size", "num_attention_heads", "num_key_value_heads", "head_dim"):
        assert getattr(config, name) == getattr(theirs, name), name
    assert config.tie_word_embeddings
    assert config.written_layer_types == theirs.layer_types


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"text_config": None}, r"text_config: the language model of a mistral3 folder is one of"),
        ({"text_config": {"model_type": "ministral3"}}, r'mistral, got "ministral3"'),
        ({"text_config": {"model_type": "mistral"}}, r"vocab_size: missing"),
    ],
)
def test_what_is_no_language_model_of_the_kind_is_refused(
    changed: dict[str, Any], message: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mistral3", **changed}))
    with pytest.raises(UserError, match=message):
        resolve_model_config(tmp_path, {})


def test_a_missing_tensor_of_the_language_model_is_named(tmp_path: Path) -> None:
    made("mistral3", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    name = next(each for each in tensors if each.endswith("layers.2.mlp.up_proj.weight"))
    tensors.pop(name)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"missing model\.layers\.2\.mlp\.up_proj\.weight"):
        logits_of(tmp_path)


def test_it_is_not_wrapped(tmp_path: Path) -> None:
    made("mistral3", tmp_path)
    with pytest.raises(UserError, match="not of the language model in a mistral3 folder"):
        resolve_model_config(tmp_path, {}, implementation="transformers")


def test_a_classifier_of_images_and_text_is_refused(tmp_path: Path) -> None:
    made("gemma3", tmp_path)
    content = json.loads((tmp_path / "config.json").read_text())
    content["architectures"] = ["Gemma3ForSequenceClassification"]
    (tmp_path / "config.json").write_text(json.dumps(content))
    with pytest.raises(UserError, match="a classifier of type gemma3 is not supported"):
        resolve_model_config(tmp_path, {})


@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize("outer", [None, True, False])
@pytest.mark.parametrize("inner", [None, True, False])
def test_the_outer_config_says_whether_the_head_is_tied(
    kind: str, outer: bool | None, inner: bool | None, tmp_path: Path
) -> None:
    content = transformers.AutoConfig.for_model(kind, **CONFIGS[kind]).to_dict()
    for table, tied in ((content, outer), (content["text_config"], inner)):
        table.pop("tie_word_embeddings", None)
        if tied is not None:
            table["tie_word_embeddings"] = tied
    (tmp_path / "config.json").write_text(json.dumps(content))
    theirs = transformers.AutoConfig.from_pretrained(tmp_path)
    assert resolve_model_config(tmp_path, {}).tie_word_embeddings == theirs.tie_word_embeddings


def test_show_says_what_is_not_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made("mistral3", tmp_path)
    assert run(["show", str(tmp_path)]) == 0
    assert "the language model of a mistral3 folder; its 15 other" in capsys.readouterr().out


def test_adapters_of_it_are_not_exported_as_the_whole_models(
    tiny_tokens: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    base = tmp_path / "base"
    tokenizer = tiny_tokens / "tokenizer"
    size = json.loads((tokenizer / "tokenizer.json").read_text())["model"]["vocab"]
    content = {**CONFIGS["mistral3"], "text_config": {**CONFIGS["mistral3"]["text_config"]}}
    content["text_config"]["vocab_size"] = len(size) + 64
    config = transformers.AutoConfig.for_model("mistral3", **content)
    transformers.AutoModelForImageTextToText.from_config(config).save_pretrained(base)
    for path in tokenizer.iterdir():
        shutil.copy(path, base)
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]
    (tmp_path / "chats.jsonl").write_text(
        "".join(json.dumps({"messages": turns}) + "\n" for _ in range(8))
    )
    words = (
        f"sft --model.source {base} --data.files {tmp_path / 'chats.jsonl'} --train.steps 1"
        f" --run.folder {tmp_path} --run.name adapted --lora.rank 2 --data.sequence_length 64"
        " --train.global_batch_size 2 --train.compile off --schedule.warmup_steps 0"
    )
    assert run(words.split()) == 0, capfd.readouterr().err
    assert run(["export", str(tmp_path / "adapted"), str(tmp_path / "out"), "--adapters"]) == 2
    assert "would not be found in the whole model" in capfd.readouterr().err
    assert not (tmp_path / "out").exists()
    assert run(["export", str(tmp_path / "adapted"), str(tmp_path / "out")]) == 0
    assert transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
