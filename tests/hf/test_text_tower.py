"""The language model of a folder whose model reads images too, made small and random by
transformers.
"""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from lmforge.cli import run
from lmforge.core.errors import UserError
from lmforge.core.model.build import build_model
from lmforge.core.model.config_json import to_config_json
from lmforge.core.model.lora import add_lora
from lmforge.core.model.lora_config import LoraConfig, adapter_parameters
from lmforge.core.model.resolve import model_config_from_json
from lmforge.core.model.text_tower import TEXT_TOWERS, tower_tensor
from lmforge.core.options.sections import ModelOptions
from lmforge.hf.export import export_folder
from lmforge.hf.multimodal import MultimodalFolder
from lmforge.hf.peft_folder import save_peft_folder
from lmforge.hf.pretrained import find_pretrained
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
        "vision_config": {"model_type": "pixtral", "head_dim": 8, **VISION, "image_size": 56},
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


def image_inputs(kind: str) -> dict[str, torch.Tensor]:
    """What the processor of such a model makes of one image and a few words, drawn at random."""
    if kind.startswith("qwen"):
        count = 1
        inputs = {
            "pixel_values": torch.randn(4, 3 * 2 * 16 * 16),
            "image_grid_thw": torch.tensor([[1, 2, 2]]),
        }
    elif kind == "mistral3":
        count = 4
        inputs = {
            "pixel_values": torch.randn(1, 3, 56, 56),
            "image_sizes": torch.tensor([[56, 56]]),
        }
    else:
        count = 1
        inputs = {"pixel_values": torch.randn(1, 3, 28, 28)}
    ids = torch.tensor([[5, 297, *[299] * count, 296, 8]])
    is_image = (ids == 299).int()
    types = {"gemma3": "token_type_ids", "mistral3": ""}.get(kind, "mm_token_type_ids")
    return {"input_ids": ids, **inputs, **({types: is_image} if types else {})}


def opened(folder: Path) -> Any:
    """The full model of a folder. Raises AssertionError unless it has exactly what that needs."""
    model, report = transformers.AutoModelForImageTextToText.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True
    )
    assert not any(report[each] for each in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    return model.eval()


def stored(folder: Path) -> dict[str, torch.Tensor]:
    return {
        name: tensor
        for path in folder.glob("*.safetensors")
        for name, tensor in load_file(path).items()
    }


@torch.no_grad()
def seen(kind: str, model: Any, inputs: dict[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """The features of an image, and the logits of it with words."""
    of_image = {name: each for name, each in inputs.items() if "ids" not in name}
    features = model.model.get_image_features(**of_image).pooler_output
    if not isinstance(features, torch.Tensor):
        features = torch.cat([*features])
    return features, model(**inputs).logits


def as_published(kind: str, folder: Path) -> None:
    """Make the folder that transformers wrote like a published one.

    It has several files, what reads images is in another dtype, it can predict further tokens, and
    files of a processor are beside it.
    """
    tensors = load_file(folder / "model.safetensors")
    content = json.loads((folder / "config.json").read_text())
    for name in tensors:
        if "vis" in name or "project" in name:
            tensors[name] = tensors[name].bfloat16()
    if kind.startswith("qwen3_5"):
        tensors["mtp.fc.weight"] = torch.zeros(2, 2)
        content["text_config"]["mtp_num_hidden_layers"] = 1
    (folder / "model.safetensors").unlink()
    weight_map = {}
    for name in tensors:
        weight_map[name] = (
            f"model-0000{1 + len(weight_map) * 3 // len(tensors)}-of-00003.safetensors"
        )
    for file in {*weight_map.values()}:
        of_file = {name: each for name, each in tensors.items() if weight_map[name] == file}
        save_file(of_file, folder / file, metadata={"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": weight_map})
    )
    (folder / "config.json").write_text(json.dumps(content))
    (folder / "preprocessor_config.json").write_text('{"do_resize": true}')
    (folder / "processor_config.json").write_text('{"image_seq_length": 4}')


@pytest.mark.parametrize("kind", CONFIGS)
def test_an_export_has_the_rest_of_the_folder_as_it_was(kind: str, tmp_path: Path) -> None:
    made(kind, tmp_path / "was")
    as_published(kind, tmp_path / "was")
    theirs = opened(tmp_path / "was")
    inputs = image_inputs(kind)
    expected = seen(kind, theirs, inputs)
    model, _ = logits_of(tmp_path / "was")
    export_folder(
        model,
        model_config_from_json(to_config_json(model.config), "as in a checkpoint"),
        tmp_path / "same",
        multimodal=MultimodalFolder(tmp_path / "was"),
        max_shard_bytes=40_000,
    )
    for ours, each in zip(seen(kind, opened(tmp_path / "same"), inputs), expected, strict=True):
        assert torch.equal(ours, each)
    before = stored(tmp_path / "was")
    after = stored(tmp_path / "same")
    before.pop("mtp.fc.weight", None)
    assert after.keys() == before.keys()
    for name, tensor in before.items():
        assert after[name].dtype == tensor.dtype
        assert torch.equal(after[name], tensor), name
    own, copy = (
        json.loads((tmp_path / each / "config.json").read_text()) for each in ("was", "same")
    )
    if kind.startswith("qwen3_5"):
        own["text_config"]["mtp_num_hidden_layers"] = 0
    assert copy == own
    for name in ("preprocessor_config.json", "processor_config.json"):
        assert (tmp_path / "same" / name).read_bytes() == (tmp_path / "was" / name).read_bytes()
    # Trained further, in bf16.
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_((1.1 * parameter).bfloat16())
    beside = MultimodalFolder(tmp_path / "was")
    export_folder(model, model.config, tmp_path / "out", multimodal=beside, dtype=torch.bfloat16)
    trained = opened(tmp_path / "out")
    features, logits = seen(kind, trained, inputs)
    assert torch.equal(features, expected[0])
    assert not torch.equal(logits, expected[1])
    assert 'dtype "float32" → "bfloat16"' in beside.describe()
    after = stored(tmp_path / "out")
    assert after.keys() == before.keys()
    for name, tensor in before.items():
        if tower_tensor(name) is None:
            assert torch.equal(after[name], tensor), name
        else:
            assert after[name].dtype == torch.bfloat16
    tokens = torch.arange(3, 93).expand(2, -1)
    with torch.no_grad():
        theirs_now = trained(input_ids=tokens, attention_mask=torch.ones_like(tokens)).logits
        hidden = model(
            tokens, torch.arange(90).expand(2, -1), torch.zeros_like(tokens, dtype=torch.int32)
        )
    bound = 1e-5 * float(theirs_now.abs().max())
    torch.testing.assert_close(model.lm_head(hidden), theirs_now, rtol=0, atol=bound)


@pytest.mark.parametrize("kind", ["gemma3", "qwen3_5"])
def test_what_a_run_changed_of_the_language_model_is_in_the_config_or_refused(
    kind: str, tmp_path: Path
) -> None:
    made(kind, tmp_path / "was")
    grown = {"vocab_size": 310, "tie_word_embeddings": False, "max_position_embeddings": 512}
    model = build_model(resolve_model_config(tmp_path / "was", grown))
    load_folder(tmp_path / "was", model)
    beside = MultimodalFolder(tmp_path / "was")
    export_folder(model, model.config, tmp_path / "out", multimodal=beside)
    theirs = opened(tmp_path / "out")
    assert "vocab_size 300 → 310" in beside.describe()
    tokens = torch.arange(3, 93).expand(2, -1)
    with torch.no_grad():
        expected = theirs(input_ids=tokens, attention_mask=torch.ones_like(tokens)).logits
        hidden = model(
            tokens, torch.arange(90).expand(2, -1), torch.zeros_like(tokens, dtype=torch.int32)
        )
    assert expected.shape[-1] == 310
    bound = 1e-5 * float(expected.abs().max())
    torch.testing.assert_close(model.lm_head(hidden), expected, rtol=0, atol=bound)
    other = replace(model.config, rms_norm_eps=1e-3)
    with pytest.raises(UserError, match=r"the run changed rms_norm_eps from .*\(--text_only\)"):
        export_folder(model, other, tmp_path / "no", multimodal=beside)
    assert not (tmp_path / "no").exists()


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
        f"the language model of a {kind} folder; its {len(others)} other tensors are not trained"
    )
    # What is exported alone is a model of text, which transformers opens as one.
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
    model, logits = logits_of(tmp_path)
    assert torch.equal(logits, expected)
    beside = MultimodalFolder(tmp_path)
    export_folder(model, model.config, tmp_path / "out", multimodal=beside)
    again = stored(tmp_path / "out")
    assert again.keys() == rest.keys()
    assert all(torch.equal(again[name], tensor) for name, tensor in rest.items())


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


@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize("target", ["all-linear", r".*layers\.[02]\..*(q_proj|gate_proj)"])
def test_adapters_of_it_are_found_in_the_full_model_and_nowhere_else(
    kind: str, target: str, tmp_path: Path
) -> None:
    made(kind, tmp_path / "base")
    model, _ = logits_of(tmp_path / "base")
    stacks = ("experts.down_proj",) if "moe" in kind and target == "all-linear" else ()
    config = LoraConfig(rank=2, alpha=8.0, target_modules=(target,), target_parameters=stacks)
    add_lora(model, config)
    adapters = adapter_parameters(model)
    with torch.no_grad():
        for parameter in adapters.values():
            parameter.normal_(std=0.1)
    save_peft_folder(tmp_path / "out", adapters, config, str(tmp_path / "base"), in_full_model=True)
    base = transformers.AutoModelForImageTextToText.from_pretrained(tmp_path / "base")
    theirs = peft.PeftModel.from_pretrained(base, tmp_path / "out", is_trainable=True).eval()
    needed = {
        name.replace(".default.", ".")
        for name, each in theirs.named_parameters()
        if each.requires_grad
    }
    assert needed == load_file(tmp_path / "out" / "adapter_model.safetensors").keys()
    tokens = torch.arange(3, 93).expand(2, -1)
    positions = torch.arange(90).expand(2, -1)
    documents = torch.zeros_like(tokens, dtype=torch.int32)
    source = find_pretrained(tmp_path / "out")
    again = build_model(source.resolve_model_config(ModelOptions()))
    source.load_weights(again)
    with torch.no_grad():
        expected = theirs(input_ids=tokens, attention_mask=torch.ones_like(tokens)).logits
        for each in (model, again):
            logits = each.lm_head(each(tokens, positions, documents))
            bound = 1e-5 * float(expected.abs().max())
            torch.testing.assert_close(logits, expected, rtol=0, atol=bound)


def trained(base: Path, tokenizer: Path, folder: Path, *options: str) -> Path:
    """A run of one step on a small folder, and that folder as `base`."""
    size = json.loads((tokenizer / "tokenizer.json").read_text())["model"]["vocab"]
    content = {**CONFIGS["mistral3"], "text_config": {**CONFIGS["mistral3"]["text_config"]}}
    content["text_config"]["vocab_size"] = len(size) + 64
    config = transformers.AutoConfig.for_model("mistral3", **content)
    transformers.AutoModelForImageTextToText.from_config(config).save_pretrained(base)
    as_published("mistral3", base)
    for path in tokenizer.iterdir():
        shutil.copy(path, base)
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]
    (folder / "chats.jsonl").write_text(
        "".join(json.dumps({"messages": turns}) + "\n" for _ in range(8))
    )
    words = (
        f"sft --model.source {base} --data.files {folder / 'chats.jsonl'} --train.steps 1"
        f" --run.folder {folder} --run.name first --lora.rank 2 --data.sequence_length 64"
        " --train.global_batch_size 2 --train.compile off --schedule.warmup_steps 0"
    )
    assert run(words.split()) == 0
    again = words.replace(str(base), str(folder / "first")).replace("first --lora.rank 2", "second")
    assert run(again.split()) == 0
    return folder


def test_what_a_run_and_the_next_one_export_is_the_full_model_unless_its_folder_is_another(
    tiny_tokens: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    base = tmp_path / "base"
    trained(base, tiny_tokens / "tokenizer", tmp_path)
    capfd.readouterr()

    def export(name: str, out: str, *options: object) -> tuple[int, str, str]:
        capfd.readouterr()
        status = run(["export", str(tmp_path / name), str(tmp_path / out), *map(str, options)])
        return status, *capfd.readouterr()

    before = {name: each for name, each in stored(base).items() if tower_tensor(name) is None}
    for name in ("first", "second"):
        status, out, _ = export(name, f"{name}-out", "--dtype", "bf16")
        assert status == 0
        note = f'with 15 tensors of {base} as they were, and its config.json; changed there: dtype "float32"'
        assert note in out
        opened(tmp_path / f"{name}-out")
        after = stored(tmp_path / f"{name}-out")
        assert after.keys() == stored(base).keys()
        for each, tensor in before.items():
            assert torch.equal(after[each], tensor), each
    status, *_ = export("second", "text", "--text_only")
    assert status == 0
    assert transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "text")
    assert export("first", "adapters", "--adapters")[0] == 0
    full = transformers.AutoModelForImageTextToText.from_pretrained(base)
    merged = peft.PeftModel.from_pretrained(full, tmp_path / "adapters").merge_and_unload()
    assert export("first", "whole")[0] == 0
    exact = dict(opened(tmp_path / "whole").named_parameters())
    for name, parameter in merged.named_parameters():
        torch.testing.assert_close(parameter.float(), exact[name], rtol=1e-5, atol=1e-6)
    # A copy elsewhere is the same folder, one of another run is not.
    moved = base.rename(tmp_path / "moved")
    way = "give it with --source, or export the language model alone with --text_only"
    status, _, error = export("second", "gone")
    assert (status, error.count("\n")) == (2, 1)
    assert f"{base}: no such file or folder, and {tmp_path / 'second'} began from" in error
    assert error.strip().endswith(way)
    assert export("second", "found", "--source", moved)[0] == 0
    shard = moved / "model-00003-of-00003.safetensors"
    tensors = load_file(shard)
    for tensor in tensors.values():
        tensor.add_(1)
    save_file(tensors, shard, metadata={"format": "pt"})
    status, _, error = export("second", "gone", "--source", moved)
    assert (status, error.count("\n")) == (2, 1)
    assert f"{moved}: its config.json or weights are not those that" in error
    tensors.popitem()
    save_file(tensors, shard, metadata={"format": "pt"})
    assert "which its files do not hold" in export("second", "gone", "--source", moved)[2]
    shard.unlink()
    status, _, error = export("second", "gone", "--source", moved)
    assert (status, error.count("\n")) == (2, 1)
    assert f"names {shard.name}, which is not in {moved}; copy the missing file" in error
    assert not (tmp_path / "gone").exists()
