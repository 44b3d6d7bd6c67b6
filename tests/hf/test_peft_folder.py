"""Low-rank adapters alone: exported in PEFT's layout, opened, and trained further with their base
model.
"""

import copy
import json
import random
import shutil
from dataclasses import dataclass
from pathlib import Path

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from lmforge.cli import run as command
from lmforge.core.data.loader import batch_of_token_lists
from lmforge.core.data.tokenizer import Tokenizer
from lmforge.core.errors import UserError
from lmforge.core.model.build import build_model
from lmforge.core.model.config import ModelConfig
from lmforge.core.model.flops import active_parameters
from lmforge.core.model.init_weights import init_weights
from lmforge.core.model.layers import LanguageModel
from lmforge.core.options.sections import ModelOptions
from lmforge.hf.export import export_folder
from lmforge.hf.merge_adapters import merge_adapters
from lmforge.hf.peft_folder import load_peft_folder
from lmforge.hf.pretrained import find_pretrained
from lmforge.serve.decoding.model_loading import load_model
from tests.core.model.conftest import built, drawn_config
from tests.core.model.foreign import theirs_of
from tests.seeds import fresh_seed
from tests.support.grids import parametrize

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Tuned:
    """A run that trained adapters beside the model in `base`, and these exported to `adapters`."""

    base: Path
    run: Path
    adapters: Path
    words: list[str]


@pytest.fixture(
    scope="module",
    params=["gpt2", *(pytest.param(name, marks=pytest.mark.slow) for name in ("llama", "bloom"))],
)
def tuned(
    request: pytest.FixtureRequest,
    byte_tokenizer: Tokenizer,
    tmp_path_factory: pytest.TempPathFactory,
) -> Tuned:
    folder, seed = tmp_path_factory.mktemp("tuned"), fresh_seed()
    byte_tokenizer.save(folder / "tokenizer")
    if request.param == "bloom":  # names as GPT-2's, matrices as everyone's
        theirs_of("bloom", vocab_size=261).save_pretrained(folder / "base")
        byte_tokenizer.save(folder / "base")
    else:
        extra = {"model_type": request.param} | (
            {} if request.param == "gpt2" else {"intermediate_size": 48}
        )
        shape = ModelConfig(
            vocab_size=261, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, **extra
        )
        export_folder(
            init_weights(build_model(shape), seed),
            shape,
            folder / "base",
            tokenizer_folder=folder / "tokenizer",
        )
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello there."}]
    (folder / "chats.jsonl").write_text((json.dumps({"messages": turns}) + "\n") * 40)
    few = {
        "train.steps": 2,
        "train.global_batch_size": 4,
        "data.sequence_length": 48,
        "optimizer.lr": 0.05,
        "schedule.warmup_steps": 0,
    }
    where = {
        "data.files": folder / "chats.jsonl",
        "run.folder": folder,
        "train.device": "cpu",
        "train.dtype": "fp32",
    }
    chosen = few | where | {"train.compile": "off", "train.threads": 1}
    if request.param == "bloom":
        chosen |= {"model.implementation": "transformers"}
    words = [str(word) for name, value in chosen.items() for word in (f"--{name}", value)]
    run = [
        "--model.source",
        folder / "base",
        "--run.name",
        "run",
        "--lora.rank",
        "3",
        "--lora.alpha",
        "7",
    ]
    assert command(["sft", *words, *map(str, run)]) == 0
    assert command(["export", str(folder / "run"), str(folder / "adapters"), "--adapters"]) == 0
    return Tuned(folder / "base", folder / "run", folder / "adapters", words)


def weights(path: Path, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    return dict(load_model(path, CPU, dtype).model.named_parameters())


def test_peft_merges_exported_adapters_to_the_trained_weights(tuned: Tuned) -> None:
    base = AutoModelForCausalLM.from_pretrained(tuned.base)
    theirs = dict(
        peft.PeftModel.from_pretrained(base, tuned.adapters).merge_and_unload().named_parameters()
    )
    ours, before = weights(tuned.run), weights(tuned.base)
    assert any(not torch.equal(ours[name], before[name]) for name in ours)
    for name, value in ours.items():
        # One more sum of three products in fp32.
        torch.testing.assert_close(theirs[name], value, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_folder_of_adapters_opens_as_the_run_does(tuned: Tuned, dtype: torch.dtype) -> None:
    ours, theirs = weights(tuned.run, dtype), weights(tuned.adapters, dtype)
    for name, value in ours.items():
        assert torch.equal(theirs[name], value), name


def test_a_run_starts_from_a_folder_of_adapters_and_exports_a_full_model(
    tuned: Tuned, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    model = build_model(load_model(tuned.base, CPU, torch.float32).config, CPU)
    find_pretrained(tuned.adapters).load_weights(model)
    for name, value in weights(tuned.run).items():
        assert torch.equal(model.get_parameter(name), value), name
    more = [
        "--model.source",
        tuned.adapters,
        "--run.folder",
        tmp_path,
        "--run.name",
        "on",
        "--optimizer.lr",
        1e-30,
    ]
    assert command(["sft", *tuned.words, *map(str, [*more, "--lora.rank", 2])]) == 0
    for name, value in weights(tuned.run).items():
        assert torch.equal(weights(tmp_path / "on")[name], value), name  # a step that small is none
    assert command(["export", str(tmp_path / "on"), str(tmp_path / "out"), "--adapters"]) == 2
    complaint = capfd.readouterr().err
    assert f"began from {tuned.adapters}, which is adapters too" in complaint
    assert "export it without --adapters" in complaint
    assert not (tmp_path / "out").exists()
    assert command(["export", str(tmp_path / "on"), str(tmp_path / "out"), "--dtype", "fp32"]) == 0
    whole = weights(tmp_path / "out")
    for name, value in weights(tmp_path / "on").items():
        assert torch.equal(whole[name], value), name


@pytest.mark.slow
def test_adapters_beside_a_base_in_few_bits_are_trained_further_and_exported_again(
    tuned: Tuned, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    few_bits = [
        "--lora.base_dtype",
        "int8",
        "--run.folder",
        tmp_path,
        "--lora.rank",
        3,
        "--lora.alpha",
        9,
    ]
    begun = [
        *tuned.words,
        "--schedule.name",
        "constant",
        *map(str, [*few_bits, "--model.source", tuned.adapters]),
    ]
    assert command(["sft", *begun, "--run.name", "on", "--train.steps", "3"]) == 0
    for steps in ("2", "3"):  # stopped after two, and resumed
        assert command(["sft", *begun, "--run.name", "resumed", "--train.steps", steps]) == 0
    resumed = weights(tmp_path / "resumed")
    for name, value in weights(tmp_path / "on").items():
        assert torch.equal(resumed[name], value), name
    still = [*begun, "--run.name", "still", "--optimizer.lr", "1e-30"]
    assert command(["sft", *still]) == 0
    assert (
        command(
            [
                "export",
                str(tmp_path / "still"),
                str(tmp_path / "out"),
                "--adapters",
                "--dtype",
                "fp32",
            ]
        )
        == 0
    )
    (config, mine), (theirs_config, theirs) = (
        load_peft_folder(each) for each in (tmp_path / "out", tuned.adapters)
    )
    base = json.loads((tmp_path / "out" / "adapter_config.json").read_text())[
        "base_model_name_or_path"
    ]
    assert (config.alpha, Path(base)) == (9, tuned.base)
    for name, value in theirs.items():
        scale = theirs_config.scaling / config.scaling if "lora_B" in name else 1.0
        torch.testing.assert_close(mine[name].float(), value.float() * scale, rtol=1e-6, atol=0)
    for other, complaint in (
        (["--lora.rank", "2"], "give lora.rank its rank"),
        (
            ["--lora.target_modules", next(iter(theirs)).split(".lora_")[0]],
            "add it to lora.target_modules",
        ),
    ):
        assert command(["sft", *begun, "--run.name", "other", *other, "--run.overwrite"]) == 2
        said = capfd.readouterr().err
        assert f"lora.base_dtype = int8: {tuned.adapters} has" in said
        assert complaint in said
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_text(json.dumps({"prompt": "a", "chosen": "b", "rejected": "c"}) + "\n")
    assert command(["align", *begun, "--run.name", "dpo", "--data.files", str(pairs)]) == 2
    assert "align.reference = adapters-off" in capfd.readouterr().err


def test_adapters_of_a_checkpoint_belong_to_it_wherever_they_are_opened(
    tuned: Tuned, tmp_path: Path
) -> None:
    more = [
        "--model.source",
        tuned.run,
        "--run.folder",
        tmp_path,
        "--run.name",
        "on",
        "--lora.rank",
        2,
    ]
    assert command(["sft", *tuned.words, *map(str, more)]) == 0
    assert command(["export", str(tmp_path / "on"), str(tmp_path / "out"), "--adapters"]) == 0
    again = weights(tmp_path / "out")
    for name, value in weights(tmp_path / "on").items():
        assert torch.equal(again[name], value), name


@pytest.mark.slow
@pytest.mark.parametrize("tuned", ["gpt2"], indirect=True)
def test_adapters_that_peft_would_take_for_those_of_experts_are_not_exported_alone(
    tuned: Tuned, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """PEFT 0.21 renames gate_proj, up_proj and down_proj in a Qwen 3 mixture to stacked experts,
    dense layers or not.
    """
    sizes = {
        "intermediate_size": 24,
        "moe_intermediate_size": 16,
        "num_experts": 3,
        "num_experts_per_tok": 2,
    }
    config = ModelConfig(261, 16, 2, 2, model_type="qwen3_moe", mlp_only_layers=(0,), **sizes)
    tokenizer = tuned.base.parent / "tokenizer"
    export_folder(
        init_weights(build_model(config), 0), config, tmp_path / "base", tokenizer_folder=tokenizer
    )
    for name, targets, code in (
        ("all", [], 2),
        ("attention", ["--lora.target_modules", "q_proj", "v_proj"], 0),
    ):
        more = [
            "--model.source",
            tmp_path / "base",
            "--run.folder",
            tmp_path,
            "--run.name",
            name,
            "--lora.rank",
            2,
        ]
        assert command(["sft", *tuned.words, *map(str, more), *targets]) == 0
        assert (
            command(["export", str(tmp_path / name), str(tmp_path / f"{name}-out"), "--adapters"])
            == code
        )
        assert command(["export", str(tmp_path / name), str(tmp_path / f"{name}-whole")]) == 0
    said = capfd.readouterr()
    assert "has adapters in dense feed-forwards beside experts" in said.err
    active = f"{active_parameters(config):,} parameters are active"
    assert (
        f"experts    2 of 3 for each token, in 1 layer, so {active}; no loss balances them"
        in said.out
    )
    theirs = peft.PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(tmp_path / "base"), tmp_path / "attention-out"
    )
    tokens = torch.randint(0, 261, (1, 9))
    whole = AutoModelForCausalLM.from_pretrained(tmp_path / "attention-whole")
    torch.testing.assert_close(theirs(tokens).logits, whole(tokens).logits)


def test_missing_adapters_and_adapters_of_another_model_are_refused_in_one_line(
    tuned: Tuned, tiny_run: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert command(["export", str(tiny_run), str(tmp_path / "out"), "--adapters"]) == 2
    assert f"{tiny_run}: was not trained with adapters; " in capfd.readouterr().err
    content = json.loads((tuned.adapters / "adapter_config.json").read_text())

    def named(name: str, base: object) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        (folder / "adapter_model.safetensors").symlink_to(
            tuned.adapters / "adapter_model.safetensors"
        )
        (folder / "adapter_config.json").write_text(
            json.dumps(content | {"base_model_name_or_path": base})
        )
        return folder

    for folder, complaint in (
        (named("of nothing", None), "base_model_name_or_path does not say which model"),
        (named("of adapters", str(tuned.adapters)), "which is itself a folder of adapters"),
        (named("of another", str(tiny_run)), "adapters for another model"),
        (named("of none", str(tmp_path / "none")), "none"),
    ):
        with pytest.raises(UserError, match=complaint):
            load_model(folder, CPU, torch.float32)


def test_adapters_of_another_type_are_refused_by_its_name(tmp_path: Path) -> None:
    named = set()
    for peft_type, kind in peft.mapping.PEFT_TYPE_TO_CONFIG_MAPPING.items():
        try:
            kind(base_model_name_or_path="none").save_pretrained(tmp_path)
        except (TypeError, ValueError, ImportError):  # of a package or an option that it needs
            continue
        named.add(peft_type.value)
        complaint = (
            ""
            if peft_type.value == "LORA"
            else f"adapter_config.json: peft_type {peft_type.value}: only LORA"
        )
        with pytest.raises(UserError, match=complaint or "adapter_model.safetensors: no such file"):
            load_peft_folder(tmp_path)
        if complaint:
            with pytest.raises(UserError, match=complaint):
                load_model(tmp_path, CPU, torch.float32)
    assert {
        "LORA",
        "IA3",
        "LOHA",
        "LOKR",
        "PROMPT_TUNING",
        "P_TUNING",
        "PREFIX_TUNING",
        "VERA",
    } <= named


def test_rows_that_a_run_adds_are_exported_with_its_adapters(tuned: Tuned, tmp_path: Path) -> None:
    base = shutil.copytree(tuned.base, tmp_path / "base")
    declared = json.loads((base / "tokenizer_config.json").read_text()) | {
        "extra_special_tokens": ["<|a|>", "<|b|>"]
    }
    (base / "tokenizer_config.json").write_text(json.dumps(declared))
    more = ["--model.source", base, "--run.folder", tmp_path, "--run.name", "run", "--lora.rank", 3]
    more += ["--model.resize_vocab", "true"]
    assert command(["sft", *tuned.words, *map(str, more)]) == 0
    for _ in range(2):  # the second replaces the first
        assert (
            command(
                [
                    "export",
                    str(tmp_path / "run"),
                    str(tmp_path / "out"),
                    "--adapters",
                    "--overwrite",
                ]
            )
            == 0
        )
    tokens = torch.randint(0, 263, (1, 20))
    tokens[0, :2] = torch.tensor([262, 261])
    theirs = peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "out")
    wanted = theirs(tokens).logits[0]
    assert wanted.shape[1] == 263
    for path in (tmp_path / "run", tmp_path / "out"):
        loaded = load_model(path, CPU, torch.float32)
        assert loaded.tokenizer.vocab_size == 263
        torch.testing.assert_close(
            logits(loaded.model, tokens)[:, :263], wanted, rtol=1e-5, atol=1e-5
        )
    # Without new rows PEFT is to leave the base as it is.
    assert not (tuned.adapters / "tokenizer.json").exists()


def logits(model: LanguageModel, tokens: torch.Tensor) -> torch.Tensor:
    batch = batch_of_token_lists(tokens.tolist())
    with torch.no_grad():
        result: torch.Tensor = model.lm_head(
            model(batch.tokens, batch.positions, batch.document_ids)
        )[0]
    return result


@pytest.mark.slow
@pytest.mark.parametrize("tied", [False, True])
def test_folders_that_peft_saved_after_a_resize_are_opened_as_peft_opens_them(
    tied: bool, byte_tokenizer: Tokenizer, draw: random.Random, tmp_path: Path
) -> None:
    torch.manual_seed(draw.randrange(2**32))
    base, embedding = tmp_path / "base", "embed_tokens"
    byte_tokenizer.save(tmp_path / "tokenizer")
    chosen: dict[str, dict[str, object]] = {
        "frozen": {},
        "saved": {"modules_to_save": ["lm_head", embedding]},
        "saved embedding": {"modules_to_save": [embedding]},
        "saved and tied": {"modules_to_save": [embedding], "ensure_weight_tying": True},
        "adapted embedding": {"target_modules": ["q_proj", embedding]},
        "adapted both": {"target_modules": ["lm_head", embedding]},
    }
    if tied:  # else PEFT saves no embedding, whose further rows it then draws
        chosen["adapted head"] = {"target_modules": ["q_proj", "lm_head"]}
    # As many rows as the tokenizer has tokens, fewer, and more.
    for rows, names in ((261, list(chosen)), (250, ["saved"]), (270, ["frozen", "saved"])):
        config = drawn_config(
            "llama", draw, vocab_size=rows, tie_word_embeddings=tied, initializer_range=0.1
        )
        export_folder(
            built(config), config, base, tokenizer_folder=tmp_path / "tokenizer", overwrite=True
        )
        for name in names:
            folder = tmp_path / f"{name} {rows}"
            theirs, tokenizer = (
                each.from_pretrained(base) for each in (AutoModelForCausalLM, AutoTokenizer)
            )
            tokenizer.add_tokens(["<|a|>", "<|b|>"])
            theirs.resize_token_embeddings(len(tokenizer))
            adapted = peft.get_peft_model(
                theirs, peft.LoraConfig(r=2, **{"target_modules": ["q_proj"]} | chosen[name])
            )
            with torch.no_grad():
                for parameter in adapted.parameters():
                    if parameter.requires_grad:
                        parameter.add_(torch.randn_like(parameter) * 0.1)
            adapted.peft_config["default"].base_model_name_or_path = str(base)
            adapted.save_pretrained(folder)
            tokenizer.save_pretrained(folder)
            tokens = torch.tensor([[262, 261, *draw.choices(range(263), k=18)]])
            # It leaves no rows out, so it does not open what had fewer of them.
            opened = (
                adapted.eval()
                if rows > 263
                else peft.AutoPeftModelForCausalLM.from_pretrained(folder)
            )
            wanted = torch.nn.functional.cross_entropy(opened(tokens).logits[0, :-1], tokens[0, 1:])
            loaded, source = load_model(folder, CPU, torch.float32), find_pretrained(folder)
            model = build_model(
                source.resolve_model_config(
                    ModelOptions(source=base), source.tokenizer().vocab_size
                )
            )
            source.load_weights(model)
            for ours in (loaded.model, model):
                loss = torch.nn.functional.cross_entropy(logits(ours, tokens)[:-1], tokens[0, 1:])
                torch.testing.assert_close(loss, wanted, rtol=1e-5, atol=0)
            assert loaded.tokenizer.vocab_size == source.tokenizer().vocab_size == 263


@pytest.mark.parametrize("model_type", ["llama", "gpt2"])
def test_adapters_of_any_shape_peft_has_are_merged_as_peft_merges_them(
    model_type: str, byte_tokenizer: Tokenizer, draw: random.Random, tmp_path: Path
) -> None:
    """Ranks and alphas by pattern, adapters of embedding and head, and whole modules."""
    config = drawn_config(
        model_type, draw, vocab_size=270, tie_word_embeddings=False, num_hidden_layers=2
    )
    byte_tokenizer.save(tmp_path / "base")
    export_folder(built(config), config, tmp_path / "new", tokenizer_folder=tmp_path / "base")
    base = tmp_path / "new"
    linear, embedding, norm = (
        ("q_proj", "embed_tokens", "norm") if model_type == "llama" else ("c_attn", "wte", "ln_f")
    )
    chosen = {
        "patterns": {
            "rank_pattern": {rf".*\.0\..*{linear}": 1, rf"1\..*{linear}": 5},
            "alpha_pattern": {rf".*1\..*{linear}": 11},
        },
        "head": {"target_modules": [linear, "lm_head"], "use_rslora": True},
        "embedding": {"target_modules": [embedding, linear]},
        **(
            {}
            if model_type == "llama"
            else {"positions": {"target_modules": ["wpe", linear], "fan_in_fan_out": True}}
        ),
        "modules": {"modules_to_save": ["lm_head", embedding, norm]},
    }
    for name, options in chosen.items():
        theirs = AutoModelForCausalLM.from_pretrained(base)
        adapted = peft.get_peft_model(
            theirs, peft.LoraConfig(r=3, lora_alpha=7, **{"target_modules": [linear]} | options)
        )
        with torch.no_grad():
            for parameter in adapted.parameters():
                if parameter.requires_grad:
                    parameter.add_(torch.randn_like(parameter) * 0.1)
        adapted.peft_config["default"].base_model_name_or_path = str(base)
        adapted.save_pretrained(tmp_path / name)
        merged = dict(adapted.merge_and_unload().named_parameters())
        found = weights(tmp_path / name)
        assert found.keys() == merged.keys()
        for each, value in found.items():
            torch.testing.assert_close(value, merged[each], rtol=1e-5, atol=1e-6)


@parametrize(
    "model_type", ["qwen3", pytest.param("gpt2", marks=pytest.mark.slow), "bloom"], fast=(0,)
)
def test_adapters_of_half_of_a_tied_pair_untie_it_as_peft_computes_it(
    model_type: str, byte_tokenizer: Tokenizer, draw: random.Random, tmp_path: Path
) -> None:
    """What PEFT computes with adapters is right: its merge of low-rank ones adds to both, and so
    makes another model.

    Weights are merged in fp32, and models computed in fp64: with large adapters they amplify what
    rounding does.
    """
    torch.manual_seed(draw.randrange(2**32))
    base = tmp_path / "base"
    byte_tokenizer.save(tmp_path / "tokenizer")
    if model_type == "bloom":  # computed by transformers
        theirs_of("bloom", vocab_size=261).save_pretrained(base)
        byte_tokenizer.save(base)
    else:
        config = drawn_config(
            model_type, draw, vocab_size=270, tie_word_embeddings=True, initializer_range=0.3
        )
        export_folder(built(config), config, base, tokenizer_folder=tmp_path / "tokenizer")
    linear, embedding = {
        "qwen3": ("q_proj", "embed_tokens"),
        "gpt2": ("c_attn", "wte"),
        "bloom": ("query_key_value", "word_embeddings"),
    }[model_type]
    tokens = torch.tensor([draw.choices(range(261), k=20)])
    batch = batch_of_token_lists([tokens[0].tolist()])
    chosen: dict[str, tuple[dict[str, object], bool]] = {
        "head": ({"target_modules": [linear, "lm_head"]}, False),
        "embedding": ({"target_modules": [linear, embedding]}, False),
        "both": ({"target_modules": [embedding, "lm_head"]}, False),
        "tied": ({"target_modules": [linear, embedding], "ensure_weight_tying": True}, False),
        "whole head": ({"target_modules": [linear], "modules_to_save": ["lm_head"]}, True),
        "whole embedding": ({"target_modules": [linear], "modules_to_save": [embedding]}, True),
    }
    for name, (options, merges) in chosen.items():
        theirs = peft.get_peft_model(
            AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32),
            peft.LoraConfig(r=2, **options),
        ).eval()
        with torch.no_grad():
            for parameter in theirs.parameters():
                if parameter.requires_grad:
                    parameter.add_(torch.randn_like(parameter) * 0.3)
            theirs.peft_config["default"].base_model_name_or_path = str(base)
            theirs.save_pretrained(tmp_path / name)
            wanted = theirs.double()(tokens).logits
            bound = {"rtol": 0, "atol": 1e-5 * wanted.abs().max().item()}
            assert (
                torch.allclose(theirs.merge_and_unload()(tokens).logits, wanted, **bound) == merges
            ), name
            loaded = load_model(tmp_path / name, CPU, torch.float32)
            values = dict(copy.deepcopy(loaded.model).named_parameters())
            ours = loaded.model.double()
            found = ours.lm_head(ours(batch.tokens, batch.positions, batch.document_ids))
        torch.testing.assert_close(found, wanted[0].expand_as(found), **bound)
        source = find_pretrained(tmp_path / name)
        asked = ModelOptions(source=base, implementation=loaded.config.implementation)
        model = build_model(source.resolve_model_config(asked))
        source.load_weights(model)
        for each, value in values.items():
            assert torch.equal(model.get_parameter(each), value), (name, each)
        export_folder(
            model,
            model.config,
            tmp_path / f"{name} merged",
            tokenizer_folder=tmp_path / "tokenizer",
        )
        again = AutoModelForCausalLM.from_pretrained(
            tmp_path / f"{name} merged", dtype=torch.float64
        )
        torch.testing.assert_close(again(tokens).logits, wanted, **bound)
    tied = load_model(base, CPU, torch.float32).model
    with pytest.raises(
        UserError, match="changes the embedding or the head, which its model ties; export that"
    ):
        merge_adapters(tied, *load_peft_folder(tmp_path / "head"), "here")


def test_adapters_of_a_negative_size_are_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 2, "lora_alpha": 4}')
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    header = json.dumps({name: {"dtype": "F32", "shape": [0, -1], "data_offsets": [0, 0]}}).encode()
    (tmp_path / "adapter_model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(
        UserError, match=r"adapter_model\.safetensors: damaged or not a safetensors file \(.*shape"
    ) as caught:
        load_peft_folder(tmp_path)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < len(str(tmp_path)) + 400
