"""`lmforge generate` and `lmforge evaluate` on a trained run, by its name."""

import io
import json
import re
import shutil
import sys
import time
from pathlib import Path

import pytest
import tokenizers
import torch
from starlette.testclient import TestClient
from tokenizers import processors
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from lmforge.cli import run as command
from lmforge.core.data.tokenizer import Tokenizer
from lmforge.core.model.layers import LanguageModel
from lmforge.core.records.runs import Run
from lmforge.lab.bench.bounds import FP32
from lmforge.serve.api import create_app
from lmforge.serve.decoding.engine import generate
from lmforge.serve.decoding.model_loading import load_model
from lmforge.serve.decoding.sampling import SamplingParams
from lmforge.serve.model_registry import ModelRegistry, ServingLimits
from tests.conftest import Command, Refusal
from tests.seeds import fresh_seed
from tests.support.preloaded import preloaded

Capture = pytest.CaptureFixture[str]

# Where a CPU multiplies bf16 that would be taken, and what is likeliest may depend on the shape of
# a batch.
EXACT = ("--dtype", "fp32")


def run(capsys: Capture, *words: object) -> tuple[str, str]:
    """Standard output and error of a command line that succeeds."""
    capsys.readouterr()
    assert command([str(word) for word in words]) == 0
    printed = capsys.readouterr()
    return printed.out, printed.err


def test_generate_prints_the_prompt_and_its_continuation(
    capsys: Capture, tiny_run: Path, tiny_model_and_tokenizer: tuple[LanguageModel, Tokenizer]
) -> None:
    printed, _ = run(
        capsys, "generate", tiny_run, "The king", "--max_tokens", 12, "--temperature", 0, *EXACT
    )
    model, tokenizer = tiny_model_and_tokenizer
    [completion] = generate(
        model, tokenizer, ["The king"], max_tokens=12, sampling=SamplingParams(0.0), seed=0
    )
    assert printed == f"The king{completion.text}\n"


def test_generate_prints_a_drawn_seed_which_repeats_the_text(
    capsys: Capture, tiny_run: Path
) -> None:
    words = ("generate", tiny_run, "The", "--max_tokens", 30)
    printed, aside = run(capsys, *words)
    named = re.fullmatch(r"\(seed (\d+)\)\n", aside)
    assert named
    assert run(capsys, *words, "--seed", named[1]) == (printed, "")
    assert run(capsys, *words)[0] != printed


def test_several_prompts_are_each_printed_with_their_continuation(
    capsys: Capture, tiny_run: Path
) -> None:
    options = ("--max_tokens", 12, "--seed", 3, *EXACT)
    printed, _ = run(capsys, "generate", tiny_run, "The king", "My lord", "", *options)
    parts = re.split(r"--- \d ---\n", printed)
    assert parts[0] == ""
    assert [
        part.startswith(prompt)
        for part, prompt in zip(parts[1:], ("The king", "My lord", ""), strict=True)
    ] == [True] * 3
    assert parts[1] == run(capsys, "generate", tiny_run, "The king", *options)[0]


def test_a_checkpoint_is_named_as_well_as_its_run(capsys: Capture, tiny_run: Path) -> None:
    options = ("The", "--max_tokens", 20, "--temperature", 0)
    of_run = run(capsys, "generate", tiny_run, *options)
    assert run(capsys, "generate", Run(tiny_run).checkpoint_path(6), *options) == of_run


def test_without_a_prompt_standard_input_is_one(lmforge: Command, tiny_run: Path) -> None:
    done = lmforge("generate", tiny_run, "--max_tokens", 5, "--temperature", 0, stdin="The é 漢\n")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("The é 漢\n")
    assert done.stderr == ""


def test_a_prompt_and_a_stop_may_spell_special_tokens(capsys: Capture, models: Path) -> None:
    prompt = "<|user|>Hi<|end|><|assistant|>"
    words = ("generate", models / "hello", prompt, "--temperature", 0, "--max_tokens", 20, *EXACT)
    assert run(capsys, *words, "--stop", "<|end|>")[0] == f"{prompt}Hey <s>\n"
    tokenizer, theirs = (
        Tokenizer.open(models / "hello"),
        AutoTokenizer.from_pretrained(models / "hello"),
    )
    expected = theirs(prompt, add_special_tokens=False)["input_ids"]
    assert tokenizer.encode(prompt, parse_special_tokens=True) == expected
    assert len(tokenizer.encode(prompt)) > len(expected)
    model = load_model(models / "hello", torch.device("cpu"), torch.float32).model
    greedy = {"max_tokens": 20, "sampling": SamplingParams(0.0), "seed": 0}
    [completion] = generate(model, tokenizer, [prompt], stop_strings=["<|end|>"], **greedy)
    assert (completion.finish_reason, completion.token_ids[-1]) == (
        "stop",
        tokenizer.token_to_id("<|end|>"),
    )


@pytest.mark.slow
def test_prompts_beyond_what_the_model_reads_are_refused_and_texts_end_there(
    capfd: Capture, tiny_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = load_model(tiny_run, torch.device("cpu"), torch.float32)
    limit = opened.config.max_position_embeddings

    def refused(text: bytes, *prompt: str) -> str:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text)))
        assert command(["generate", str(tiny_run), *prompt, "--device", "cpu"]) == 2
        printed = capfd.readouterr()
        assert (printed.out, printed.err.count("\n")) == ("", 1)
        return printed.err

    told = (
        rf"this model takes at most {limit} tokens, and got \d+ in the prompt, which leaves no room"
        r" for an answer"
    )
    began = time.monotonic()
    assert re.search(told, refused(b"To be or not to be.\n" * 300_000))
    assert time.monotonic() - began < 60
    assert re.search(told, refused(b"", "x " * limit))
    assert "standard input: larger than 16,777,216 bytes" in refused(b"x" * (2**24 + 1))
    printed, aside = run(
        capfd, "generate", tiny_run, "The", "--max_tokens", limit, "--temperature", 0, *EXACT
    )
    assert f"(ended where prompt and text have {limit} tokens" in aside
    greedy = {"max_tokens": limit, "sampling": SamplingParams(0.0), "seed": 0, "max_length": limit}
    [completion] = generate(opened.model, opened.tokenizer, ["The"], **greedy)
    assert printed == f"The{completion.text}\n"
    assert len(completion.token_ids) + len(opened.tokenizer.encode("The")) == limit


def test_evaluate_measures_what_the_run_measured(
    capsys: Capture, tiny_run: Path, tiny_tokens: Path
) -> None:
    printed, _ = run(capsys, "evaluate", tiny_run, "--sequences", 4, "--output", "json")
    measured = json.loads(printed)
    last = Run(tiny_run).read_metrics()[-1]
    assert measured["loss"] == pytest.approx(last["val/loss"], rel=FP32.loss)
    assert measured["bits_per_byte"] == pytest.approx(last["val/bits_per_byte"], rel=FP32.loss)
    assert measured["model"] == str(Run(tiny_run).checkpoint_path(6))
    assert (measured["data"], measured["split"], measured["sequence_length"]) == (
        str(tiny_tokens),
        "validation",
        48,
    )


def test_files_are_measured_as_if_they_were_prepared(
    capsys: Capture, tiny_run: Path, tmp_path: Path
) -> None:
    """In rows that hold everything nothing depends on where documents lie; texts in files, lines
    and shards are the same.
    """
    texts = [f"Document {number}: " + "well, " * number + "so be it." for number in range(12)]
    (tmp_path / "lines.jsonl").write_text(
        "".join(json.dumps({"text": text}) + "\n" for text in texts)
    )
    (tmp_path / "folder").mkdir()
    for number, text in enumerate(texts):
        (tmp_path / "folder" / f"{number}.txt").write_text(text)
    opened = load_model(tiny_run, torch.device("cpu"), torch.float32)
    prepared = [
        tmp_path / "lines.jsonl",
        tmp_path / "shards",
        "--tokenizer",
        opened.path,
        "--validation_ratio",
        "0.3",
    ]
    assert command(["prepare", *map(str, prepared)]) == 0
    capsys.readouterr()

    def measured(*words: object) -> dict[str, float]:
        assert (
            command(
                [
                    "evaluate",
                    str(tiny_run),
                    *map(str, words),
                    "--sequence_length",
                    "1024",
                    "--output",
                    "json",
                ]
            )
            == 0
        )
        result: dict[str, float] = json.loads(capsys.readouterr().out)
        return result

    lines, folder = (
        measured("--data", tmp_path / "lines.jsonl"),
        measured("--data", tmp_path / "folder"),
    )
    parts = [
        measured("--data", tmp_path / "shards", "--split", split)
        for split in ("train", "validation")
    ]
    for name in ("tokens", "bytes"):
        assert lines[name] == folder[name] == sum(part[name] for part in parts)
    nats = sum(part["loss"] * part["tokens"] for part in parts)
    assert lines["loss"] == pytest.approx(nats / lines["tokens"], rel=1e-6)
    assert folder["loss"] == pytest.approx(lines["loss"], rel=1e-6)
    assert lines["split"] == "all"


@pytest.mark.parametrize("launched", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_several_processes_evaluate_together_and_print_once(
    capsys: Capture, lmforge: Command, tiny_run: Path, tmp_path: Path, launched: bool
) -> None:
    words = [
        "evaluate",
        str(tiny_run),
        "--sequences",
        "7",
        "--batch_size",
        "2",
        "--device",
        "cpu",
        "--output",
        "json",
    ]
    alone, _ = run(capsys, *words)
    several = (
        lmforge(*words, "--processes", 2) if launched else preloaded().run(words, tmp_path, ranks=2)
    )
    assert several.returncode == 0, several.stderr
    one, other = json.loads(alone), json.loads(several.stdout)
    for name in ("loss", "perplexity", "bits_per_byte"):
        assert other.pop(name) == pytest.approx(one.pop(name), rel=FP32.loss)
    assert other == one


def test_evaluate_prints_one_line(capsys: Capture, tiny_run: Path) -> None:
    printed, _ = run(capsys, "evaluate", tiny_run, "--sequences", 2)
    number = r"[\d,]+"
    assert re.search(
        rf"\(validation, {number} tokens, {number} bytes of text\): loss \d\.\d{{4}}, perplexity ",
        printed,
    )
    assert printed.count("\n") == 1


@pytest.mark.parametrize("ends", [[], [1, 2]])
def test_texts_of_a_hugging_face_model_begin_and_end_as_in_transformers(
    capsys: Capture, tmp_path: Path, byte_tokenizer: Tokenizer, ends: list[int]
) -> None:
    seed = fresh_seed()
    torch.manual_seed(seed)
    byte_tokenizer.save(tmp_path)
    dressed = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    begin = byte_tokenizer.token_to_id("<|system|>")
    dressed.post_processor = processors.TemplateProcessing(
        "<|system|> $A", special_tokens=[("<|system|>", begin)]
    )
    dressed.save(str(tmp_path / "tokenizer.json"))
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    theirs = LlamaForCausalLM(
        LlamaConfig(vocab_size=261, initializer_range=1.0, eos_token_id=ends or 0, **sizes)
    )
    theirs.save_pretrained(tmp_path)
    prompt = AutoTokenizer.from_pretrained(tmp_path)("The king", return_tensors="pt")
    assert prompt["input_ids"][0, 0] == begin
    free = theirs.generate(**prompt, max_new_tokens=12, do_sample=False, eos_token_id=None)[0]
    if ends:
        # Whatever it would write fourth is from now on the second of the tokens that end a text.
        ends = [1, int(free[prompt["input_ids"].shape[1] + 3])]
        (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    opened = load_model(tmp_path, torch.device("cpu"), torch.float32)
    assert set(ends) <= opened.stop_token_ids
    # A text ends too where the tokenizer sets texts apart, whatever the model's configuration
    # names.
    stops = opened.stop_token_ids | {byte_tokenizer.eos_token_id}
    expected = theirs.generate(
        **prompt, max_new_tokens=12, do_sample=False, eos_token_id=sorted(stops)
    )[0]
    written = expected[prompt["input_ids"].shape[1] :].tolist()
    text = byte_tokenizer.decode([token for token in written if token not in stops])
    printed, _ = run(
        capsys, "generate", tmp_path, "The king", "--max_tokens", 12, "--temperature", 0, *EXACT
    )
    assert printed == f"The king{text}\n"


def test_the_length_that_a_folder_states_is_that_of_transformers(
    capfd: Capture,
    models: Path,
    tmp_path: Path,
    byte_tokenizer: Tokenizer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In `generate`, `chat` and `serve`: max_length counts the prompt, and max_new_tokens goes
    before it.
    """
    folder = shutil.copytree(models / "endless", tmp_path / "model")
    turn = [{"role": "user", "content": "b"}]
    chat_ids = load_model(folder, torch.device("cpu"), torch.float32).chat_template.encode_prompt(
        turn
    )
    longest = len(chat_ids) + 5
    limits = ServingLimits(max_batch_size=2, max_queue=2, max_length=None, max_models=1)
    for stated in (
        {"max_length": longest},
        {"max_length": 9, "max_new_tokens": 3},
        {"max_length": longest, "max_new_tokens": None},
    ):
        (folder / "generation_config.json").write_text(json.dumps({"do_sample": False} | stated))
        theirs = AutoModelForCausalLM.from_pretrained(folder)

        def expected(ids: list[int], theirs: LlamaForCausalLM = theirs) -> str:
            return byte_tokenizer.decode(
                theirs.generate(torch.tensor([ids]))[0, len(ids) :].tolist()
            )

        prompts = ["ab", "babab"]
        texts = [prompt + expected(byte_tokenizer.encode(prompt)) for prompt in prompts]
        printed, aside = run(capfd, "generate", folder, *prompts, *EXACT)
        assert (printed, aside) == (
            "".join(f"--- {number} ---\n{text}\n" for number, text in enumerate(texts, 1)),
            "",
        )
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"b\n")))
        assert run(capfd, "chat", folder, "--device", "cpu", *EXACT)[0] == expected(chat_ids) + "\n"
        registry = ModelRegistry([folder], limits, torch.device("cpu"), torch.float32, warn=print)
        with TestClient(create_app(registry, 2**20), base_url="http://localhost") as client:
            answer = client.post(
                "/v1/chat/completions", json={"model": "model", "messages": turn}
            ).json()
        assert answer["choices"][0]["message"]["content"] == expected(chat_ids)
    with pytest.raises(ValueError, match="`max_length` is set to"):
        expected(chat_ids[:1] * longest)
    assert command(["generate", str(folder), "a" * longest]) == 2
    assert (
        f"says max_length {longest}, and got {longest} tokens in the prompt"
        in capfd.readouterr().err
    )


def test_records_that_are_neither_texts_nor_conversations_are_refused(
    refused: Refusal, tiny_run: Path, tmp_path: Path
) -> None:
    (tmp_path / "a.jsonl").write_text('{"content": "Well."}\n')
    said = refused("evaluate", tiny_run, "--data", tmp_path / "a.jsonl")
    assert (
        f"{tmp_path}/a.jsonl, record 1: neither a conversation nor a text: its fields are content"
        in said
    )


def test_conversations_in_json_files_of_a_folder_are_measured_and_read_as_asked(
    capfd: Capture, refused: Refusal, tiny_run: Path, tmp_path: Path
) -> None:
    turns = {
        "messages": [
            {"role": "user", "content": "One or two?"},
            {"role": "assistant", "content": "Two."},
        ]
    }
    folder = tmp_path / "chats"
    folder.mkdir()
    (folder / "a.json").write_text(
        json.dumps([turns | {"images": ["a.png"]}, {"messages": 1}, turns])
    )
    (folder / "settings.json").write_text('{"beams": 1}')
    (tmp_path / "same.jsonl").write_text(f"{json.dumps(turns)}\n" * 2)
    said = refused("evaluate", tiny_run, "--data", folder)
    assert f"{folder}/a.json, record 1: holds 'images'" in said
    measured = []
    for data, words in (
        (folder, ["--ignore_media", "--skip_invalid", "--split_turns"]),
        (tmp_path / "same.jsonl", []),
    ):
        printed, _ = run(capfd, "evaluate", tiny_run, "--data", data, *words, "--output", "json")
        measured.append(json.loads(printed))
    assert measured[0]["split"].startswith(
        f"all; 1 left out that cannot be used, such as {folder}/a.json, record 2: "
    )
    assert [each["tokens"] for each in measured] == [measured[0]["tokens"]] * 2
    assert measured[0]["loss"] == pytest.approx(measured[1]["loss"])


def test_data_of_another_tokenizer_is_refused(
    capfd: Capture, tiny_run: Path, tmp_path: Path
) -> None:
    (tmp_path / "text.txt").write_text("Something else altogether.\n\n" * 50)
    run(capfd, "prepare", tmp_path / "text.txt", tmp_path / "tokens", "--vocab_size", 301)
    assert command(["evaluate", str(tiny_run), "--data", str(tmp_path / "tokens")]) == 2
    complaint = capfd.readouterr().err
    assert (
        f"{tmp_path}/tokens: prepared with another tokenizer than the model's; prepare it with"
        " --tokenizer " in complaint
    )


def test_a_tokenizer_may_be_larger_than_the_model_where_no_text_needs_its_further_ids(
    capfd: Capture, refused: Refusal, models: Path, tmp_path: Path
) -> None:
    folder, texts = shutil.copytree(models / "hello", tmp_path / "larger"), tmp_path / "texts.txt"
    rows = json.loads((folder / "config.json").read_text())["vocab_size"]
    path = folder / "tokenizer_config.json"
    path.write_text(
        json.dumps(json.loads(path.read_text()) | {"extra_special_tokens": ["<|tool|>"]})
    )
    (folder / "generation_config.json").write_text(
        json.dumps({"do_sample": False, "repetition_penalty": 1.1})
    )
    texts.write_text("Hey <|tool|>\n" * 9)
    quick = ("--device", "cpu", *EXACT)
    for start, words in (("hello", models / "hello"), ("larger", folder)):
        printed = run(capfd, "generate", words, "Hi", "a<|end|>", "--max_tokens", 3, *quick)[0]
        measured = run(capfd, "evaluate", words, "--data", texts, "--sequence_length", 16, *quick)[
            0
        ]
        assert printed.startswith("--- 1 ---\nHi"), start
        assert "nan" not in measured, start

    problem = (
        f"holds the token id {rows}, and the model's embedding has {rows} rows; use the tokenizer"
        " that belongs to this"
    )
    task = tmp_path / "task.jsonl"
    task.write_text(
        json.dumps({"prompt": "Is <|tool|> a", "choices": ["b", "c"], "answer": 0}) + "\n"
    )
    assert f"the prompt {problem}" in refused("generate", folder, "Hi", "a <|tool|>", *quick)
    assert f"a question {problem}" in refused("evaluate", folder, "--tasks", task, *quick)
    task.write_text(json.dumps({"prompt": "Is <|tool|> a", "answer": "b"}) + "\n")
    assert f"the prompt {problem}" in refused("evaluate", folder, "--tasks", task, *quick)
    # Which ends each document.
    path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token": "<|tool|>"}))
    tokens = json.loads((folder / "tokenizer.json").read_text())
    tokens["added_tokens"].append({**tokens["added_tokens"][0], "id": rows, "content": "<|tool|>"})
    (folder / "tokenizer.json").write_text(json.dumps(tokens))
    said = preloaded().run(
        ["evaluate", folder, "--data", texts, "--sequence_length", 16, *quick], tmp_path, ranks=2
    )
    assert said.returncode == 2, said.stderr
    assert f"the data {problem}" in said.stderr
