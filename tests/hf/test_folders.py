"""A folder is what transformers says it is: drawn folders with redundant, contradicting and legacy
keys are read as AutoModelForCausalLM, AutoTokenizer and GenerationConfig read them, or refused.
"""

import json
import math
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    TokenizersBackend,
)
from transformers.utils import logging

from lmforge.cli import run as command
from lmforge.core.data.tokenizer import Tokenizer, train_tokenizer
from lmforge.core.errors import UserError
from lmforge.core.model.build import build_model
from lmforge.core.model.config_json import to_config_json
from lmforge.core.model.family import load_family
from lmforge.core.model.resolve import model_config_from_json
from lmforge.hf import weights
from lmforge.hf.export import export_folder
from lmforge.hf.safetensors_file import SafetensorsFile
from lmforge.serve.decoding.engine import Engine, GenerationRequest
from lmforge.serve.decoding.model_loading import LoadedModel, load_model
from lmforge.serve.decoding.sampling import (
    TRANSFORMERS_SAMPLING,
    SamplingParams,
    penalize_repetition,
    sampling_probs,
)
from lmforge.text.chat.layout import encode_layouts
from lmforge.text.chat.templates import ChatTemplate, build_layouts
from tests.core.model.conftest import (
    MODEL_TYPES,
    ONE_BY_ONE,
    built,
    drawn_config,
    drawn_rope,
    logits,
    one_document,
)
from tests.support.preloaded import preloaded

logging.set_verbosity_error()
TEXT = (
    "The king said: 12 of <|tool|>, and <|think|> with [PAD] <plain> \n\tto"
    " <|end|><|user|><|endoftext|>."
)
NOISE = {
    "use_cache": False,
    "attention_dropout": 0.1,
    "pretraining_tp": 2,
    "transformers_version": "4.30.0",
    "n_ctx": 7,
}


def drawn_folder(folder: Path, draw: random.Random) -> None:
    """A folder of a native family in which some things are said twice, against each other, or as
    older versions did.
    """
    tokenizer = write_tokenizer(folder, draw)
    config = drawn_config(
        draw.choice(MODEL_TYPES), draw, vocab_size=tokenizer.vocab_size + draw.choice([0, 9])
    )
    export_folder(built(config, seed=draw.randrange(99)), config, folder / "model")
    for file in (folder / "model").iterdir():
        file.rename(folder / file.name)
    content = json.loads((folder / "config.json").read_text())
    for change in draw.sample(
        [say_rope, say_sizes, say_windows, say_flags, say_tokens], draw.randrange(1, 4)
    ):
        change(content, draw)
    content |= {name: NOISE[name] for name in draw.sample(list(NOISE), 2)}
    (folder / "config.json").write_text(json.dumps(content, indent=1))
    if draw.random() < 0.3:
        change_weights(folder / "model.safetensors", content, draw)
    if draw.random() < 0.8:
        (folder / "generation_config.json").write_text(json.dumps(drawn_generation(draw), indent=1))


def say_rope(content: dict[str, Any], draw: random.Random) -> None:
    positions = content.get("max_position_embeddings") or 128
    for name in ("rope_parameters", "rope_scaling"):
        if draw.random() < 0.6:
            table = drawn_rope(draw) or {"rope_type": "default"}
            if draw.random() < 0.3:
                table.pop("original_max_position_embeddings", None)
            if draw.random() < 0.4:
                table = {
                    "type" if key == "rope_type" else key: value for key, value in table.items()
                }
            if draw.random() < 0.4:
                table["rope_theta"] = draw.choice([777.0, 20000.0])
            if draw.random() < 0.1:
                table["partial_rotary_factor"] = draw.choice([0.5, 1.0])
            if (
                content["model_type"] == "gemma3_text"
                and name == "rope_parameters"
                and draw.random() < 0.7
            ):
                table = {
                    "full_attention": table,
                    "sliding_attention": {"rope_type": "default", "rope_theta": 99.0},
                }
            content[name] = table
    if draw.random() < 0.2:
        content["original_max_position_embeddings"] = positions // 4
    if draw.random() < 0.2:
        content.pop("rope_theta", None)


def say_sizes(content: dict[str, Any], draw: random.Random) -> None:
    if content["model_type"] == "gpt2":
        for common, own in (
            ("num_attention_heads", "n_head"),
            ("hidden_size", "n_embd"),
            ("num_hidden_layers", "n_layer"),
        ):
            if draw.random() < 0.5:
                content[common] = (
                    content[own] if common != "num_attention_heads" else draw.choice([1, 2, 3, 6])
                )
        if draw.random() < 0.3:
            content.pop("n_embd" if "hidden_size" in content else "n_inner")
        content["intermediate_size"] = content["hidden_act"] = None
    else:
        name = draw.choice(
            [
                "num_key_value_heads",
                "head_dim",
                "rms_norm_eps",
                "hidden_act",
                "max_position_embeddings",
            ]
        )
        if draw.random() < 0.5:
            content[name] = None
        else:
            content.pop(name, None)


def say_windows(content: dict[str, Any], draw: random.Random) -> None:
    content["sliding_window"] = draw.choice([None, 3, 4096])
    for name, values in {
        "use_sliding_window": [True, False],
        "max_window_layers": [0, 1, 28],
        "layer_types": [None, ["full_attention"] * content.get("num_hidden_layers", 1)],
        "sliding_window_pattern": [2, 6],
    }.items():
        if draw.random() < 0.4:
            content[name] = draw.choice(values)


def say_flags(content: dict[str, Any], draw: random.Random) -> None:
    name = draw.choice(
        [
            "tie_word_embeddings",
            "attention_bias",
            "mlp_bias",
            "final_logit_softcapping",
            "hidden_act",
        ]
    )
    values = {"final_logit_softcapping": [30.0, None], "hidden_act": ["silu", "swish", "gelu"]}.get(
        name, [True, False]
    )
    content[name] = draw.choice(values)
    if draw.random() < 0.3:
        del content[name]


def say_tokens(content: dict[str, Any], draw: random.Random) -> None:
    content["eos_token_id"] = draw.choice([None, 0, 3, [0, 4], [5]])
    content["bos_token_id"] = draw.choice([None, 1])
    if draw.random() < 0.3:
        del content["eos_token_id"]
    if draw.random() < 0.3:
        content |= {"do_sample": True, "temperature": 0.7, "max_length": 11}


def change_weights(file: Path, content: dict[str, Any], draw: random.Random) -> None:
    tensors = load_file(file)
    embedding = next(
        name for name in tensors if name.endswith(("embed_tokens.weight", "wte.weight"))
    )
    head = tensors.pop("lm_head.weight", tensors[embedding])
    match draw.choice(["head", "equal head", "none", "bias"]):
        case "head":
            tensors["lm_head.weight"] = head + 0.1
        case "equal head":
            tensors["lm_head.weight"] = tensors[embedding].clone()
        case "bias":
            tensors["model.layers.0.self_attn.q_proj.bias"] = torch.ones(4)
    save_file(tensors, file, {"format": "pt"})


def drawn_generation(draw: random.Random) -> dict[str, Any]:
    values: dict[str, list[Any]] = {
        "eos_token_id": [None, 0, [0, 3], [4]],
        "do_sample": [True, True, False, None],
        "temperature": [0.6, 1.0, None],
        "top_k": [5, 0, None],
        "top_p": [0.8, 1.0],
        "min_p": [0.1],
        "repetition_penalty": [1.3, 1.0],
        "num_beams": [1, 1, 1, 3],
        "max_length": [30, 9, None],
        "max_new_tokens": [4, None],
        "bos_token_id": [1],
        "typical_p": [1.0],
        "transformers_version": ["4.30.0"],
    }
    return {
        name: draw.choice(values[name]) for name in draw.sample(list(values), draw.randrange(1, 8))
    }


def write_tokenizer(folder: Path, draw: random.Random) -> Tokenizer:
    """A byte-level BPE, of which other files than tokenizer.json say which tokens are special or
    added.
    """
    train_tokenizer(["The king said: to the people of the land."] * 5, 300).save(folder)
    content = json.loads((folder / "tokenizer.json").read_text())
    for token in content["added_tokens"]:
        token["special"] = token["special"] and draw.random() < 0.7
    if draw.random() < 0.5:
        content["added_tokens"] = content["added_tokens"][: draw.randrange(1, 6)]
    (folder / "tokenizer.json").write_text(json.dumps(content))
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|endoftext|>",
    }
    mapped: dict[str, Any] = {}
    if draw.random() < 0.4:
        mapped["eos_token"] = draw.choice(
            ["<|end|>", {"content": "<|end|>", "lstrip": False, "rstrip": False}]
        )
    for place in (config, mapped):
        if draw.random() < 0.4:
            place[draw.choice(["pad_token", "unk_token", "mask_token"])] = draw.choice(
                ["[PAD]", "<|user|>"]
            )
        listed = draw.sample(["<|tool|>", "<|think|>", "<|user|>"], 2)
        if draw.random() < 0.4:
            place[draw.choice(["additional_special_tokens", "extra_special_tokens"])] = listed
    if draw.random() < 0.3:
        config["extra_special_tokens"] = {"think_token": "<|think|>"}
    if draw.random() < 0.4:
        kinds = {"lstrip": False, "rstrip": False, "single_word": False}
        new = {"content": "<|tool|>", "normalized": False, "special": draw.random() < 0.7, **kinds}
        old = {"content": "<|user|>", "normalized": False, "special": True, **kinds}
        config["added_tokens_decoder"] = (
            {"300": new, "2": old} if draw.random() < 0.5 else {"2": old}
        )
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    if mapped:
        (folder / "special_tokens_map.json").write_text(json.dumps(mapped))
    if draw.random() < 0.3:
        (folder / "added_tokens.json").write_text(json.dumps({"<plain>": 300, "<|tool|>": 301}))
    return Tokenizer.open(folder)


def assert_same_tokens(ours: Tokenizer, folder: Path) -> None:
    theirs: Any = AutoTokenizer.from_pretrained(folder)
    # A family's own class, which splits as its own models do, not as the file says.
    if type(theirs) is not TokenizersBackend:
        theirs = TokenizersBackend.from_pretrained(folder)
    assert ours.eos_token_id == theirs.eos_token_id
    assert ours.vocab_size == len(theirs)
    # The library goes on hiding a token whose flag another file has taken away.
    hidden = {
        id
        for id in theirs.added_tokens_decoder
        if not theirs.decode([id], skip_special_tokens=True)
    }
    flagged = hidden | {id for id, token in theirs.added_tokens_decoder.items() if token.special}
    assert ours.all_special_ids == flagged | set(theirs.all_special_ids)
    # What is said to be special is special here even where the library does not flag it: no text
    # may spell the end of a text.
    text = TEXT
    for id in ours.all_special_ids - flagged:
        text = text.replace(ours.id_to_token(id), "")
    assert (
        ours.encode(text)
        == theirs(text, add_special_tokens=False, split_special_tokens=True).input_ids
    )


def test_flags_of_added_tokens_are_those_that_transformers_takes(tmp_path: Path) -> None:
    names = ("lstrip", "rstrip", "normalized", "single_word", "special")
    base = json.loads(
        train_tokenizer(["The king said: to the people of the land."] * 5, 300).files[
            "tokenizer.json"
        ]
    )
    # So that `normalized` matters.
    base["normalizer"] = {"type": "Replace", "pattern": {"String": "@"}, "content": "<|T|>"}
    end = max(base["model"]["vocab"].values()) + 1
    text = "a <|T|> b<|T|>c  <|T|>\n@ x@y <|image|> z <|user|>"
    template = "{% for m in messages %}<|T|>{{ m.content }} <|T|> {% endfor %}"
    said = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "a b"}]
    refused = 0
    seen = set()
    for number in range(64):
        in_map, *declared = (bool(number >> bit & 1) for bit in range(6))
        own = [bool(number * 37 + 11 >> bit & 1) for bit in range(5)]
        token, theirs = (
            {"content": "<|T|>", **dict(zip(names, flags, strict=True))}
            for flags in (declared, own)
        )
        config: dict[str, Any] = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": "<|endoftext|>",
        }
        if not in_map:
            config["added_tokens_decoder"] = {str(end): token}
        elif not theirs["special"]:
            config["unk_token"] = {"__type": "AddedToken", **token}
        if number % 3:
            config["model_specific_special_tokens"] = {
                "image_token": "<|image|>",
                "unit_token": {"__type": "AddedToken", **token},
            }
        if number % 3 == 2:  # which transformers takes instead
            config["audio_token"] = "<|audio|>"
        folder = tmp_path / str(number)
        folder.mkdir()
        added = [*base["added_tokens"], {"id": end, **theirs}]
        (folder / "tokenizer.json").write_text(json.dumps({**base, "added_tokens": added}))
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
        if in_map:
            (folder / "special_tokens_map.json").write_text(json.dumps({"pad_token": token}))
        ours = Tokenizer.open(folder)
        assert_same_tokens(ours, folder)
        reference = AutoTokenizer.from_pretrained(folder)
        ids = reference(text, add_special_tokens=False).input_ids
        assert ours.encode(text, parse_special_tokens=True) == ids, number
        assert ours.decode(ids) == reference.decode(ids, skip_special_tokens=True), number
        [built] = build_layouts([ChatTemplate(ours, template).chat_example(said, "all")])
        if isinstance(built, UserError):
            assert "single_word or normalized" in str(built), number
            refused += 1
        else:
            [example] = encode_layouts(ours, built)
            expected = reference.apply_chat_template(
                said, chat_template=template, return_dict=True
            ).input_ids
            assert example.tokens.tolist() == expected, number
        seen.add(tuple(ids))
    assert 0 < refused < 50
    assert len(seen) > 20


def assert_same_sampling(ours: LoadedModel, theirs: Any) -> None:
    """The distribution of the next token, with which transformers' `generate` would draw it."""
    stated = ours.config.generation_config or {}
    if (
        not any(stated.get(name) is not None for name in TRANSFORMERS_SAMPLING)
        and stated.get("do_sample") is not False
    ):
        return
    prepared, _ = theirs._prepare_generation_config(None)
    size = ours.config.vocab_size
    scores, prompt = torch.randn(1, size) * 3, torch.randint(0, size, (1, 8))
    processors = theirs._get_logits_processor(prepared, input_ids_seq_length=8, device="cpu")
    wanted = processors(prompt, scores.clone()).softmax(-1)
    params = ours.sampling(0.8)
    seen = torch.zeros(1, size, dtype=torch.bool).scatter(1, prompt, True)
    found = sampling_probs(penalize_repetition(scores, seen, params.repetition_penalty), params)
    assert params.is_greedy == (not prepared.do_sample)
    if params.is_greedy:
        assert found.argmax() == wanted.argmax()
    else:
        torch.testing.assert_close(found, wanted, atol=1e-6, rtol=1e-5)


def assert_same_length(ours: LoadedModel, theirs: Any) -> None:
    """The most tokens after a prompt of eight; where nothing says, each library has its own
    default.
    """
    prepared, _ = theirs._prepare_generation_config(None)
    by_default = theirs.generation_config.max_length is None
    theirs._prepare_generated_length(prepared, by_default, True, "input_ids", 8, None)
    stated = theirs.generation_config.max_new_tokens is not None or not by_default
    assert ours.answer_length(8, 77) == (prepared.max_length - 8 if stated else 77)


def compare(folder: Path) -> str | None:
    """None where ours and theirs are equal, else why it is refused."""
    try:
        ours = load_model(folder, torch.device("cpu"), torch.float32)
        ours.sampling(0.8)
    except UserError as refused:
        return str(refused)
    try:
        theirs, report = AutoModelForCausalLM.from_pretrained(
            folder, output_loading_info=True, dtype=torch.float32, **ONE_BY_ONE
        )
    except Exception as problem:  # whatever a family's own checks raise: nothing to compare with
        return f"transformers: {problem}"
    assert not report["missing_keys"], report
    rows = one_document(2, 40, ours.config.vocab_size, ours.model)
    try:
        with torch.no_grad():
            wanted = theirs(rows.tokens).logits
    except Exception as problem:
        return f"transformers: {problem}"
    torch.testing.assert_close(
        logits(ours.model, rows), wanted, atol=1e-5 * wanted.abs().max().item(), rtol=0
    )
    ends = theirs.generation_config.eos_token_id
    ends = {ends} if isinstance(ends, int) else set(ends or ())
    assert ours.stop_token_ids == {id for id in ends if id < ours.config.vocab_size}
    assert_same_tokens(ours.tokenizer, folder)
    assert_same_sampling(ours, theirs)
    assert_same_length(ours, theirs)
    return None


@pytest.mark.usefixtures("token_by_token")
@pytest.mark.parametrize("count", [10, pytest.param(300, marks=pytest.mark.slow)])
def test_a_drawn_folder_is_read_as_transformers_reads_it_or_refused(
    count: int, draw: random.Random, tmp_path: Path
) -> None:
    refusals = []
    for number in range(4 * count):  # by chance nearly all of the first ten may be refused
        if number >= count and refusals.count(None) >= count // 4:
            break
        folder = tmp_path / str(number)
        folder.mkdir()
        drawn_folder(folder, draw)
        try:
            refusals.append(compare(folder))
        except BaseException:
            for file in sorted(folder.glob("*.json")):
                print(file.name, file.read_text()[:3000] if file.name != "tokenizer.json" else "")
            raise
    print("\n".join(sorted({each for each in refusals if each})))
    assert not any(
        "\n" in each for each in refusals if each and not each.startswith("transformers")
    )
    assert refusals.count(None) >= count // 4


def test_tokens_that_a_folder_adds_are_trained_and_its_sampling_reaches_the_export(
    draw: random.Random,
    byte_tokenizer: Tokenizer,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    base = tmp_path / "base"
    byte_tokenizer.save(tmp_path / "tokenizer")
    size = byte_tokenizer.vocab_size
    config = drawn_config(
        "llama", draw, vocab_size=size, tie_word_embeddings=False, rope_scaling=None
    )
    export_folder(built(config), config, base, tokenizer_folder=tmp_path / "tokenizer")
    declared = json.loads((base / "tokenizer_config.json").read_text()) | {
        "extra_special_tokens": ["<|tool|>", "<|think|>"]
    }
    (base / "tokenizer_config.json").write_text(json.dumps(declared))
    sampling = {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "repetition_penalty": 1.2}
    stated = sampling | {
        "eos_token_id": [0, 4],
        "stop_strings": ["\n\n"],
        "max_new_tokens": 7,
        "suppress_tokens": None,
    }
    (base / "generation_config.json").write_text(json.dumps(stated))
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello there."}]
    (tmp_path / "chats.jsonl").write_text((json.dumps({"messages": turns}) + "\n") * 40)
    options = {
        "train.steps": 1,
        "train.global_batch_size": 4,
        "data.sequence_length": 48,
        "optimizer.lr": 1e-30,
    }
    options |= {
        "data.files": tmp_path / "chats.jsonl",
        "run.folder": tmp_path,
        "run.name": "run",
        "model.source": base,
    }
    options |= {
        "train.device": "cpu",
        "train.dtype": "fp32",
        "train.compile": "off",
        "train.threads": 1,
    }
    words = [
        "sft",
        *(str(word) for name, value in options.items() for word in (f"--{name}", value)),
    ]
    assert command(words) == 2
    assert f"vocab_size is {size} and the tokenizer has {size + 2} entries" in (
        said := capfd.readouterr().err
    )
    assert "--model.resize_vocab true" in said
    assert command([*words, "--model.resize_vocab", "true"]) == 0
    assert command(["export", str(tmp_path / "run"), str(tmp_path / "out")]) == 0
    more = [
        "--model.resize_vocab",
        "true",
        "--parallel.engine",
        "fsdp2",
    ]
    sharded = preloaded().run([*words, *more, "--run.name", "sharded"], tmp_path, ranks=2)
    assert sharded.returncode == 0, sharded.stderr
    assert command(["export", str(tmp_path / "sharded"), str(tmp_path / "of two ranks")]) == 0
    alone, of_two = (
        load_file(tmp_path / name / "model.safetensors") for name in ("out", "of two ranks")
    )
    assert alone.keys() == of_two.keys()
    assert all(torch.equal(value, of_two[name]) for name, value in alone.items())

    rows = size + 2
    theirs, before = (
        AutoModelForCausalLM.from_pretrained(tmp_path / "out"),
        load_file(base / "model.safetensors"),
    )
    assert theirs.config.vocab_size == rows
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        found, old = theirs.get_parameter(name), before[name]
        assert torch.equal(found[:size], old)
        torch.testing.assert_close(found[size:], old.mean(0).expand(rows - size, -1))
        parts = [
            torch.empty(len(range(*each.indices(rows))), old.shape[1])
            for each in (slice(0, size + 1), slice(size + 1, rows))
        ]
        requests = [(name, parts[0], (slice(0, size + 1), slice(0, old.shape[1])))]
        requests += [(name, parts[1], (slice(size + 1, rows), slice(0, old.shape[1])))]
        for request in requests:  # as ranks do, each its own rows
            weights._read_parts(SafetensorsFile(base / "model.safetensors"), [request], {name})
        assert torch.equal(torch.cat(parts), found)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.convert_tokens_to_ids(["<|tool|>", "<|think|>"]) == [size, size + 1]
    generation = GenerationConfig.from_pretrained(tmp_path / "out")
    for place in (base, tmp_path / "run", tmp_path / "out"):
        loaded = load_model(place, torch.device("cpu"), torch.float32)
        assert loaded.sampling(0.8) == SamplingParams(0.6, 50, 0.9, 0.0, 1.2)
        assert loaded.sampling(0.8, temperature=0.0).temperature == 0
        assert (loaded.stop_strings, loaded.answer_length(5, 77)) == (["\n\n"], 7)
        assert {0, 4} <= loaded.stop_token_ids
    assert {name: getattr(generation, name) for name in sampling} == sampling
    assert {0, 4} <= set(generation.eos_token_id)
    assert (generation.stop_strings, generation.max_new_tokens) == (["\n\n"], 7)


def test_a_vocabulary_grows_whatever_the_tensors_are_called_and_whatever_the_head_is(
    draw: random.Random, tmp_path: Path
) -> None:
    """GPT-2's first releases leave out a prefix of the names; a reward model's head has one row,
    which stays.
    """
    for name, reward in (("first", False), ("reward", True)):
        config = drawn_config(
            "gpt2", draw, vocab_size=40, tie_word_embeddings=not reward, reward=reward
        )
        export_folder(built(config), config, tmp_path / name)
        file = tmp_path / name / "model.safetensors"
        tensors = {
            each.removeprefix("transformer."): value.clone()
            for each, value in load_file(file).items()
        }
        file.unlink()
        save_file(tensors, file, {"format": "pt"})
        model = build_model(replace(config, vocab_size=48))
        weights.load_folder(tmp_path / name, model)
        grown = torch.cat([tensors["wte.weight"], tensors["wte.weight"].mean(0).expand(8, -1)])
        torch.testing.assert_close(model.get_parameter("transformer.wte.weight"), grown)
        head = tensors["score.weight"] if reward else grown
        torch.testing.assert_close(model.get_parameter("lm_head.weight"), head)


@pytest.mark.parametrize(
    ("stated", "complaint"),
    [
        ({"eos_token_id": "x"}, "generation_config.json: eos_token_id"),
        ({"temperature": "hot"}, "generation_config.json: temperature: expected a number"),
        (
            {"repetition_penalty": 1e-40},
            "generation_config.json: repetition_penalty: expected a number of at least 0.01",
        ),
        ({"top_p": 7.0}, "generation_config.json: top_p: expected a number of at most 1"),
        (
            {"no_repeat_ngram_size": 3},
            "generation_config.json: no_repeat_ngram_size: 3 is not supported; remove it there",
        ),
        (
            {"encoder_no_repeat_ngram_size": 2},
            "generation_config.json: encoder_no_repeat_ngram_size: 2 is not supported",
        ),
        ([], "generation_config.json: expected an object"),
    ],
)
def test_a_wrong_generation_config_is_named_with_its_key(
    stated: Any, complaint: str, draw: random.Random, byte_tokenizer: Tokenizer, tmp_path: Path
) -> None:
    byte_tokenizer.save(tmp_path / "tokenizer")
    config = drawn_config("llama", draw, vocab_size=byte_tokenizer.vocab_size)
    export_folder(
        built(config), config, tmp_path / "model", tokenizer_folder=tmp_path / "tokenizer"
    )
    (tmp_path / "model" / "generation_config.json").write_text(json.dumps(stated))
    with pytest.raises(UserError) as refused:
        load_model(tmp_path / "model", torch.device("cpu"), torch.float32).sampling(0.8)
    assert f"{tmp_path / 'model'}/{complaint}" in str(refused.value)


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_a_null_that_transformers_does_not_take_is_refused_by_name(
    model_type: str, draw: random.Random
) -> None:
    """Sizes with one possible value are derived, a flag is off as the weights must say, and rates
    of dropout are not used.
    """
    content = to_config_json(drawn_config(model_type, draw, rope_scaling=None))
    harmless = {
        "num_key_value_heads",
        "head_dim",
        "attention_bias",
        "mlp_bias",
        "attention_dropout",
        "attn_pdrop",
        "embd_pdrop",
        "resid_pdrop",
        "residual_dropout",
        "hidden_dropout",
        # These repeat each other.
        *("linear_attn_config", "linear_num_heads", "linear_head_dim"),
    }
    if model_type == "kimi_linear":
        harmless.add("linear_conv_kernel_dim")
    for name in content.keys() - harmless - {"architectures", "model_type"}:
        changed = content | {name: None}
        try:
            theirs = AutoModelForCausalLM.from_config(AutoConfig.for_model(**changed), **ONE_BY_ONE)
            theirs(torch.zeros(1, 2, dtype=torch.long), use_cache=False)
        except Exception:  # whatever a family's own checks raise
            with pytest.raises(UserError, match=f"^here: .*({name}|layer_types)"):
                model_config_from_json(changed, "here")


@pytest.mark.parametrize(
    "model_type",
    [each for each in MODEL_TYPES if load_family(each).rotates == "all" and each != "gpt2"],
)
def test_yarn_is_decoded_with_a_cache_as_transformers_decodes_it(
    model_type: str, draw: random.Random, byte_tokenizer: Tokenizer, tmp_path: Path
) -> None:
    """Greedily, with a penalty of repetition that the folder asks for."""
    byte_tokenizer.save(tmp_path / "tokenizer")
    yarn = {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 16,
        "mscale": 1.2,
        "mscale_all_dim": 0.7,
    }
    config = drawn_config(
        model_type,
        draw,
        vocab_size=byte_tokenizer.vocab_size,
        rope_scaling=yarn,
        time_step_limit=(0.0, math.inf),  # transformers has no limits when it decodes
    )
    export_folder(
        built(config), config, tmp_path / "model", tokenizer_folder=tmp_path / "tokenizer"
    )
    stated = {"do_sample": False, "repetition_penalty": 1.7, "eos_token_id": None}
    (tmp_path / "model" / "generation_config.json").write_text(json.dumps(stated))
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "model", **ONE_BY_ONE)
    ours = load_model(tmp_path / "model", torch.device("cpu"), torch.float32)
    engine = Engine(ours.model, vocab_size=config.vocab_size, max_batch_size=2, max_length=60)
    prompts = [draw.choices(range(5, config.vocab_size), k=length) for length in (9, 21)]
    ids = [
        engine.add_request(GenerationRequest(each, 30, ours.sampling(0.8), 0, frozenset()))
        for each in prompts
    ]
    found: dict[int, list[int]] = {id: [] for id in ids}
    while engine.num_unfinished:
        for token in engine.step():
            found[token.request_id].append(token.token_id)
    for id, prompt in zip(ids, prompts, strict=True):
        wanted = theirs.generate(torch.tensor([prompt]), max_new_tokens=30)[0, len(prompt) :]
        assert found[id] == wanted.tolist()
