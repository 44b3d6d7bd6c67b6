"""The output of `lmforge show`, checked against the things it describes."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lmforge.cli import run
from lmforge.core.data.shards.folder import TokenFolder
from lmforge.core.errors import UserError
from lmforge.core.model.config_json import to_config_json
from lmforge.core.model.flops import parameter_count
from lmforge.core.model.presets import PRESETS, get_preset
from lmforge.core.records.manifests import checkpoint_checksum
from lmforge.core.records.run_records import read_metrics, skipped_batches
from lmforge.core.records.runs import Run
from lmforge.core.stages.training_data import TokenSources
from lmforge.ops.verbs.show.show import show
from tests.conftest import Command, Refusal, only_line


def line(shown: str, name: str) -> str:
    """The line of a description that begins with `name`."""
    return next(line for line in shown.splitlines() if line.startswith(name))


def test_presets_are_listed_with_their_sizes() -> None:
    shown = show("presets").splitlines()
    assert [row.split()[0] for row in shown] == list(PRESETS)
    millions = {row.split()[0]: row.split()[1] for row in shown}
    # As published: model cards of Llama 2 and 3.1, Mistral, GPT-2.
    assert millions["llama2-7b"] == "6,738.4"
    assert millions["llama3.1-405b"] == "405,853.4"
    assert millions["mistral-7b"] == "7,241.7"
    assert millions["gpt2-124m"] == "124.4"


def test_a_preset_is_shown_with_config_cost_and_memory() -> None:
    shown = show("llama3-8b")
    assert (
        "32 layers, width 4096, feed-forward 14336, 32 heads of 128 (8 for keys and values)"
        in shown
    )
    assert "vocabulary 128,256, untied; positions 8,192" in shown
    assert "8,030,261,248 parameters" in shown
    assert "at length 4,096" in shown
    assert "29.9 GiB of fp32 weights; 89.7 GiB with the states of adamw" in shown


def test_showing_a_preset_needs_no_torch() -> None:
    code = (
        "import sys; from lmforge.ops.verbs.show.show import show; show('llama3-8b');"
        " sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_a_recipe_is_shown_resolved_with_its_batch_arithmetic(
    tmp_path: Path, tiny_tokens: Path
) -> None:
    recipe = tmp_path / "small.toml"
    recipe.write_text(
        f'[data]\nfolder = "{tiny_tokens}"\nsequence_length = 50\n[train]\nsteps ='
        " 200\nglobal_batch_size = 10\n"
    )
    shown = show(str(recipe))
    assert 'name = "small"' in shown
    tokens = TokenFolder.open(tiny_tokens).split("train").num_tokens
    assert (
        line(shown, "batch")
        == "batch      10 sequences × 50 tokens = 500 tokens per step = 1 data-parallel rank × 1"
        " micro-batches × 10 sequences"
    )
    assert line(shown, "run   ") == "run        200 steps = 100,000 tokens"
    assert (
        line(shown, "data   ")
        == f"data       {tiny_tokens}: {tokens:,} tokens, so {100_000 / tokens:.2f} epochs"
    )


@pytest.mark.parametrize("method", ["dpo", "reward"])
def test_a_recipe_with_adapters_is_shown_with_their_cost(
    tiny_run: Path, lmforge: Command, method: str
) -> None:
    words = ["align", "--method", method, "--model.source", tiny_run, "--data.files", "pairs.jsonl"]
    whole, adapted = (
        lmforge(*words, *more, "--dry-run").stdout for more in ([], ["--lora.rank", 2])
    )
    [line] = re.findall(r"^adapters .*$", adapted, re.M)
    # Of all weights in fp32, and states that are not there.
    assert not re.search(r"^memory ", adapted, re.M)
    more, trained = (
        int(number.replace(",", "")) for number in re.findall(r"([\d,]+) (?:more|are)", line)
    )
    width = Run(tiny_run).load_config().model.hidden_size
    assert width is not None
    assert trained == more + (width if method == "reward" else 0)
    costs = [
        float(
            re.findall(r"([\d.e+]+) FLOPs in the whole run|([\d.e+]+) FLOPs per token", printed)[
                -1
            ][1]
        )
        for printed in (whole, adapted)
    ]
    assert costs[1] < costs[0]


def test_one_document_is_counted_in_the_singular(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, out = tmp_path / "a.jsonl", tmp_path / "out"
    source.write_text('{"text": "To be, or not to be"}\n{"text": ""}\n')
    assert run(["prepare", str(source), str(out), "--vocab_size", "301"]) == 0
    printed = capsys.readouterr().out
    assert " tokens, 1 document, " in printed
    assert "left out  1 empty document\n" in printed
    assert line(show(str(out)), "train").endswith(" tokens in 1 document")


def test_a_recipe_whose_data_is_not_there_says_how_to_make_it(tmp_path: Path) -> None:
    recipe = tmp_path / "small.toml"
    recipe.write_text('[data]\nfolder = "nowhere"\n')
    assert (
        line(show(str(recipe)), "data   ")
        == "data       nowhere: not there yet; `lmforge prepare SOURCE nowhere` makes it"
    )


def test_token_shards_are_shown_by_split_with_their_tokenizer(tiny_tokens: Path) -> None:
    shown, folder = show(str(tiny_tokens)), TokenFolder.open(tiny_tokens)
    for name in ("train", "validation"):
        split = folder.split(name)
        assert (
            line(shown, name).split(maxsplit=1)[1]
            == f"{split.num_tokens:,} tokens in {split.num_documents:,} documents"
        )
    assert line(shown, "tokenizer").startswith(
        "tokenizer  512 tokens, '<|endoftext|>' (id 0) after each document; "
    )
    assert line(shown, "stored as") == "stored as  uint16"


def test_a_run_and_its_checkpoints_are_shown(tiny_run: Path) -> None:
    run = Run(tiny_run)
    shown = show(str(tiny_run))
    assert shown.startswith(f"run {tiny_run}: 6 of 6 steps\n")
    last = run.read_metrics()[-1]
    assert f"loss {last['loss']:,.4g}, val/loss {last['val/loss']:,.4g}" in line(shown, "last")
    assert f"tokens {last['tokens']:,.0f}, " in line(shown, "last")
    assert "e+" not in line(shown, "last")
    assert line(shown, "saved") == "saved      step 2, step 4, step 6"
    assert show(str(run.checkpoint_path(6))) in shown
    of_step = show(str(run.checkpoint_path(4)))
    assert line(of_step, "step") == "step       4: 16 sequences, 768 tokens"
    assert line(of_step, "written by") == "written by 1 rank, engine single, torch.float32"
    assert line(of_step, "model").endswith(" FLOPs per token at length 48")
    assert "2 layers, width 32, feed-forward 48, 4 heads of 8 (2 for keys and values)" in of_step
    bytes_there = sum(
        file.stat().st_size
        for file in run.checkpoint_path(4).iterdir()
        if file.name != "manifest.json"
    )
    assert line(of_step, "on disk").startswith(f"on disk    {bytes_there / 2**20:,.1f} MiB")


def test_a_run_without_checkpoints_is_shown(tiny_run: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny_run, tmp_path / "tiny")
    shutil.rmtree(tmp_path / "tiny" / "checkpoints")
    (tmp_path / "tiny" / "metrics.jsonl").unlink()
    shown = show(str(tmp_path / "tiny"))
    assert shown == f"run {tmp_path / 'tiny'}: 0 of 6 steps\nsaved      no checkpoint yet"


def test_a_hugging_face_folder_is_shown_as_its_model_config(tmp_path: Path) -> None:
    config = get_preset("smollm-135m")
    (tmp_path / "config.json").write_text(json.dumps(to_config_json(config)))
    shown = show(str(tmp_path))
    assert shown.startswith(f"Hugging Face folder {tmp_path}\n")
    assert f"{parameter_count(config).total:,} parameters" in shown


@pytest.mark.parametrize("content", ["", "{", "[1]", '"text"', "\x00"])
def test_a_manifest_that_cannot_be_read_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "manifest.json").write_text(content)
    with pytest.raises(UserError, match=r"manifest\.json: (not valid JSON|expected an object)"):
        show(str(tmp_path))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("step", 10**400),
        ("consumed_sequences", 10**4000),
        ("consumed_sequences", -5),
        ("recipe.data.sequence_length", 10**400),
        ("written_by.ranks", 10**400),
        ("files.model.bytes", 10**4000),
        ("data_plan.phases[0].samples", 10**4000),
    ],
    ids=str,
)
def test_a_number_that_no_checkpoint_has_is_refused_with_its_field(
    tiny_run: Path, tmp_path: Path, field: str, value: int
) -> None:
    run = Run(tmp_path / "tiny")
    shutil.copytree(tiny_run, run.path)
    path = run.checkpoint_path(6) / "manifest.json"
    manifest = json.loads(path.read_text())
    del manifest["xxh3"]
    manifest["files"] = {"model": {"bytes": 1, "xxh3": []}}
    manifest["data_plan"] = {
        "phases": [{"samples": 1, "sequence_length": 1, "proportions": {}, "packing": []}]
    }
    *parents, last = field.replace("[0]", ".0").split(".")
    table = manifest
    for name in parents:
        table = table[int(name) if name.isdigit() else name]
    table[last] = value
    path.write_text(json.dumps({**manifest, "xxh3": checkpoint_checksum(manifest)}))
    folder = path.parent.rename(tmp_path / "saved")
    with pytest.raises(
        UserError,
        match=re.escape(f"{folder}: manifest.json: {field}: expected a ")
        + r"(finite number|number of at )",
    ):
        show(str(folder))


@pytest.mark.parametrize(
    ("values", "skipped"),
    [([2, "null"], 2), ([2, 0.5], 2), ([2, "1e300"], 2), ([2, "-1e99", 3], 3), (["null"], 0)],
    ids=str,
)
def test_skipped_batches_are_the_last_whole_number_of_them(
    tmp_path: Path, values: list[Any], skipped: int
) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(
        "".join(f'{{"step": {n}, "batch_offset": {value}}}\n' for n, value in enumerate(values, 1))
    )
    assert skipped_batches(read_metrics(path)) == skipped


def write_lines(path: Path, *records: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def trained_on(shown: str) -> list[str]:
    """What stands in brackets, without the bounds of tokens."""
    return [piece.replace("|", "") for piece in re.findall(r"\[(.*?)\]", shown, re.S)]


ASKED, ANSWERED = (
    {"role": "user", "content": "One or two?"},
    {"role": "assistant", "content": "Two."},
)
# "<|end|>" without the bounds between tokens, which `trained_on` removes.
END = "<end>"


@pytest.mark.parametrize(
    ("record", "words", "printed", "taught"),
    [
        ({"prompt": "1 + 1 =", "completion": " 2"}, [], "record 0: ", [" 2<endoftext>"]),
        ({"prompt": "1 + 1 =", "completion": " 2"}, ["--format", "prompts"], "prompt 0: ", []),
        (
            {"prompt": "1 + 1 =", "completion": " 2", "label": False},
            [],
            "record 0, bad: ",
            [" 2<endoftext>"],
        ),
        (
            {"prompt": "1 + 1 =", "completion": " 2", "label": True},
            ["--apply_chat_template"],
            "record 0, good: ",
            [" 2" + END],
        ),
        ({"prompt": "1 + 1 =", "answer": "2"}, [], "prompt 0: ", []),
        ({"prompt": "1 + 1 =", "answer": "2"}, ["--apply_chat_template"], "<|user|>", []),
        ({"messages": [ASKED], "answer": "2"}, ["--format", "prompts"], "<|assistant|>", []),
        ({"question": "1 + 1 =", "fen": ""}, ["--fields", "prompt=question"], "prompt 0: ", []),
        ({"chat": [ASKED, ANSWERED]}, ["--fields", "messages=chat"], "record 0: ", ["Two." + END]),
        (
            {"messages": [ASKED, ANSWERED], "images": ["a.png"]},
            ["--ignore_media", "--split_turns"],
            "answer 0: ",
            ["Two." + END],
        ),
        # Before the first token there is nothing to predict it from.
        (
            {"messages": [ASKED, ANSWERED], "text": "No."},
            ["--format", "text", "--mask", "all"],
            "0: ",
            ["o.<endoftext>"],
        ),
        (
            {"prompt": "a", "chosen": "b", "rejected": "c"},
            [],
            "pair 0, rejected: ",
            ["b<endoftext>", "c<endoftext>"],
        ),
        (
            {"prompt": "a", "chosen": "b", "rejected": "c"},
            ["--apply_chat_template"],
            "pair 0, chosen: ",
            ["b" + END, "c" + END],
        ),
    ],
)
def test_a_file_is_shown_with_what_is_trained_on_of_it_as_its_options_say(
    record: dict[str, Any],
    words: list[str],
    printed: str,
    taught: list[str],
    tiny_run: Path,
    tmp_path: Path,
    lmforge: Command,
) -> None:
    file = write_lines(tmp_path / "file.jsonl", record)
    done = lmforge("show", "data", file, "--tokenizer", tiny_run, *words)
    assert done.returncode == 0, done.stderr
    assert printed in done.stdout
    assert trained_on(done.stdout) == taught


def test_what_cannot_be_used_of_a_file_is_left_out_on_request(
    tiny_run: Path, tmp_path: Path, lmforge: Command
) -> None:
    file = write_lines(tmp_path / "file.jsonl", {"messages": 1}, {"messages": [ASKED, ANSWERED]})
    done = lmforge("show", "data", file, "--tokenizer", tiny_run, "--skip_invalid")
    assert trained_on(done.stdout) == ["Two." + END]
    assert "1 left out that cannot be used" in done.stdout


@pytest.mark.parametrize(
    ("words", "printed"),
    [
        (
            ["data", "FILE", "--apply_chat_template"],
            "show: --apply_chat_template is for `lmforge show data FILE --tokenizer MODEL` alone",
        ),
        (
            ["data", "FILE"],
            "not the file of a bad step; with --tokenizer MODEL a file of examples is shown",
        ),
        (
            ["data", "FILE", "--tokenizer", "RUN", "--fields", "chat"],
            "--fields: expected OURS=THEIRS, such as messages=chat",
        ),
        (
            ["data", "FILE", "--tokenizer", "RUN", "--fields", "prompt=ask"],
            "file.jsonl, record 1: no field 'ask'",
        ),
        (
            ["data", "PAIRS", "--tokenizer", "RUN", "--mask", "all"],
            "--mask all: is for conversations, not for pairs; leave it out",
        ),
        (
            ["data", "PAIRS", "--tokenizer", "RUN", "--split_turns"],
            "--split_turns: is for conversations, not for pairs; leave it out",
        ),
        (
            ["data", "FILE", "--tokenizer", "RUN", "--apply_chat_template"],
            "--apply_chat_template: is for pairs, labelled completions and prompts",
        ),
    ],
)
def test_options_that_do_not_apply_to_a_file_are_refused(
    words: list[str], printed: str, tiny_run: Path, tmp_path: Path, refused: Refusal
) -> None:
    file = write_lines(tmp_path / "file.jsonl", {"prompt": "1 + 1 =", "completion": " 2"})
    pairs = write_lines(
        tmp_path / "pairs.jsonl", {"prompt": "1 + 1 =", "chosen": " 2", "rejected": " 3"}
    )
    places = {"FILE": file, "PAIRS": pairs, "RUN": tiny_run}
    assert printed in refused("show", *(places.get(word, word) for word in words))


def test_the_samples_of_a_run_of_examples_show_what_is_trained_on_of_them(
    tiny_run: Path, tmp_path: Path, lmforge: Command
) -> None:
    turns = [
        [{**ASKED, "content": f"{n} or {n + 1}?"}, {**ANSWERED, "content": f"Not {n}."}]
        for n in range(20)
    ]
    chats = write_lines(tmp_path / "chats.jsonl", *({"messages": turn} for turn in turns))
    words = [
        "--model.source",
        tiny_run,
        "--data.files",
        chats,
        "--data.sequence_length",
        64,
        "--data.folder",
        tmp_path / "examples",
    ]
    words += [
        "--train.global_batch_size",
        2,
        "--train.steps",
        1,
        "--train.device",
        "cpu",
        "--train.compile",
        "off",
    ]
    done = lmforge("sft", *words, "--run.folder", tmp_path, "--run.name", "chat")
    assert done.returncode == 0, done.stderr
    shown = lmforge("show", "data", tmp_path / "chat", "--samples", "0:2")
    assert shown.returncode == 0, shown.stderr
    requested = re.findall(r"<\|user\|>([^\[]*?)<\|end\|>", shown.stdout)
    assert len(requested) >= 2
    numbers = [int(text.replace("|", "").split()[0]) for text in requested]
    assert trained_on(shown.stdout) == [f"Not {number}.{END}" for number in numbers]


STRANGE = [
    None,
    True,
    "x",
    "",
    -1,
    0,
    1.5,
    2**63,
    10**30,
    1e308,
    [],
    {},
    [1],
    [3, 1],
    [0, 10**30],
    [-1, 2],
    "\0",
    "a" * 5000,
]


def test_the_file_of_a_bad_step_with_any_content_is_refused_in_one_line_or_shown(
    tiny_tokens: Path, tmp_path: Path, refused: Refusal, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "recipe.toml").write_text(
        f'[data]\nfolder = "{tiny_tokens}"\nsequence_length = 48\n'
    )
    dataset = TokenSources.open(Run.open(tmp_path).load_config()).training(32)
    of_samples = {
        "step": 3,
        "reason": "loss is nan",
        "samples": [0, 2],
        "plan_hash": dataset.plan_hash_at(2),
    }
    of_rollouts = {
        "step": 3,
        "reason": "loss is nan",
        "completions": "completions/set-000000-rank-*.jsonl",
        "ranks": 2,
    }
    of_rollouts |= {"part": [0, 1]}
    (tmp_path / "completions").mkdir()
    completion = {
        "prompt": "1 + 1 =",
        "completion": " 2",
        "reward": 1.0,
        "tokens": 2,
        "ended": True,
    }
    write_lines(tmp_path / "completions" / "set-000000-rank-1.jsonl", completion)
    file = tmp_path / "bad" / "step-00000003-batch-2.json"
    file.parent.mkdir()
    for record in (of_samples, of_rollouts):
        file.write_text(json.dumps(record))
        assert run(["show", "data", str(file)]) == 0
        contents = [json.dumps(record | {name: value}) for name in record for value in STRANGE]
        contents += [
            json.dumps({key: record[key] for key in record if key != name}) for name in record
        ]
        for content in ["", "[" * 10_000, "\x00", *contents]:
            file.write_text(content)
            capfd.readouterr()
            status, printed = run(["show", "data", str(file)]), capfd.readouterr()
            assert status == 0 or (status == 2 and len(only_line(printed.err)) < 400), (
                content[:300],
                printed.err,
            )
    file.write_text(json.dumps(of_samples))
    for samples in ("0:1000000000000", "5:5", "0:99999999999999999999999", "\u0663:\u0664"):
        assert f"--samples {samples}: " in refused("show", "data", file, "--samples", samples)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b'{"prompt": "1 + 1 ="}\n', "record 1: completion: missing"),
        (b"\xff\xfe\x00", ": not UTF-8 at byte 0"),
        (b'{"prompt": ', ":1: not valid JSON"),
        (b"", "set-000000-rank-*.jsonl: no such files"),
    ],
)
def test_damaged_completions_of_a_bad_step_are_refused_in_one_line(
    tmp_path: Path, refused: Refusal, content: bytes, said: str
) -> None:
    for name in ("bad", "completions"):
        (tmp_path / name).mkdir()
    record = {
        "step": 3,
        "reason": "loss is nan",
        "completions": "completions/set-000000-rank-*.jsonl",
        "ranks": 1,
        "part": [0, 1],
    }
    file = tmp_path / "bad" / "step-00000003-batch-2.json"
    file.write_text(json.dumps(record))
    (tmp_path / "completions" / "set-000000-rank-0.jsonl").write_bytes(content)
    assert said in refused("show", "data", file)


@pytest.mark.parametrize("name", ["manifest.json", "recipe.toml"])
def test_a_folder_in_the_place_of_what_says_what_a_thing_is_is_refused(
    tmp_path: Path, refused: Refusal, name: str
) -> None:
    (tmp_path / name).mkdir()
    assert refused("show", tmp_path).startswith(f"{tmp_path / name}: Is a directory")


def test_a_name_that_is_too_long_for_a_file_is_refused(refused: Refusal) -> None:
    assert (
        refused("show", "a" * 300)
        == f'"{"a" * 79}… (302 characters): File name too long; name something else'
    )


def test_anything_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("hello")
    things = {
        tmp_path: "a folder of no known kind",
        tmp_path / "notes.txt": "a file of no known kind",
    }
    for thing, what in (things | {tmp_path / "nothing": "no such file or folder"}).items():
        with pytest.raises(
            UserError,
            match=re.escape(
                f"{thing}: {what}; give a recipe, a run, a checkpoint, a token folder,"
            ),
        ):
            show(str(thing))
