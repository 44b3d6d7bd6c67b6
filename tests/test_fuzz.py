"""Damaged and hostile input of nine kinds, drawn from the seed of each test run: every case ends in
time, with one line, and without data loss.

A failure lists the cases that broke the contract (`Contract` in fuzzing.py) with their command
lines. The same seed, which it prints too, draws them again. What was found so has a test by name
beside others of its kind.
"""

import base64
import http.client
import json
import os
import random
import shutil
import socket
import struct
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import lmforge as package
from lmforge.core.data.tokenizer import StreamDecoder, Tokenizer
from lmforge.core.errors import UserError
from lmforge.core.options.options import iter_options
from lmforge.core.options.verbs import VERBS
from tests.conftest import without_shape
from tests.seeds import fresh_random
from tests.serve.conftest import Server, serving  # noqa: F401 - its fixture
from tests.serve.decoding.conftest import byte_tokenizer, models, one_thread, scripted  # noqa: F401
from tests.support.fuzzing import (
    JSON_VALUES,
    RAW_JSON,
    TEXTS,
    Contract,
    a_misspelling,
    a_word,
    contents,
    mutated_bytes,
    mutated_json,
    pieces,
)
from tests.support.grids import parametrize

Draw = Callable[[random.Random, Path], tuple[list[str], str]]
CarryOut = Callable[..., None]
CommandOn = Callable[[random.Random, Path], list[str]]
RECIPES = sorted((Path(package.__file__).parent / "recipes").glob("*.toml"))
TEXT = "A line of text.\n" * 40
CONVERSATION = {
    "messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hey"}]
}


@pytest.fixture
def carry_out(
    tmp_path: Path,
    tiny_run: Path,
    tiny_tokens: Path,
    models: Path,  # noqa: F811 - its fixture
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> CarryOut:
    """`carry_out(draw, cases)`: draws so many cases and requires that each keeps the contract, and
    all what they share.
    """
    for name in ("home", "cache", "temporary"):
        (tmp_path / name).mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "cases").mkdir()
    contract = Contract(tmp_path / "cases", capfd, monkeypatch)

    def carry_out(draw: Draw, cases: int, **how: Any) -> None:
        rng = fresh_random()
        shared = [contents(folder) for folder in (tiny_run, tiny_tokens, models)]
        for _ in range(cases):
            case = contract.new_case()
            words, note = draw(rng, case)
            contract.check(
                case, words, note, trains=words[0] == "pretrain" and "--dry-run" not in words, **how
            )
        if contract.broken:
            pytest.fail(
                f"{len(contract.broken)} of {cases} cases:\n" + "\n".join(contract.broken),
                pytrace=False,
            )
        assert [contents(folder) for folder in (tiny_run, tiny_tokens, models)] == shared
        assert list((tmp_path / "temporary").iterdir()) == []

    return carry_out


# --- options --------------------------------------------------------------------------------------

# The beginning and the end of command lines that are carried out in a moment, or refused whatever
# stands between.
LINES: dict[str, tuple[str, str]] = {
    "quickstart": ("", "--steps 0"),
    "prepare": ("", "--source text.txt --out out --vocab_size 301 --workers 1"),
    "pretrain": ("", "--dry-run"),
    "sft": ("", "--dry-run"),
    "distill": ("", "--dry-run"),
    "align": ("", "--dry-run"),
    "run": ("nothing.toml", ""),
    "evaluate": (
        "RUN",
        "--sequences 2 --sequence_length 16 --batch_size 2 --processes 1 --device cpu",
    ),
    "generate": ("RUN Hi", "--max_tokens 2 --device cpu"),
    "chat": ("MODEL", "--max_tokens 2 --device cpu"),
    "serve": ("nothing", "--models nothing"),
    "export": ("RUN out", "--out out"),
    "import": ("nothing out", "--source nothing"),
    "download": ("nothing/here", "--folder out"),
    "bench": ("", "--bench.sweep nothing=1"),
    "plan": ("", "--gpus 8 --search --configurations 3"),
    "ladder": ("", "--budget 0.1 --dry_run true"),
    "doctor": ("", "--steps 1"),
    "show": ("RUN", ""),
    "runs": ("", "--output json"),
    "compare": ("RUN RUN", ""),
    "report": ("RUN", "--out out.html"),
    "launch": ("nothing.toml", "--dry-run"),
    "stop": ("nothing", "--folder nothing"),
    "logs": ("RUN", "--lines 2"),
    "top": ("", "--once --timeout_seconds 1"),
}


@parametrize("part", range(4), fast=(2, 3))
def test_options(part: int, carry_out: CarryOut, tiny_run: Path, models: Path) -> None:  # noqa: F811
    verbs = list(VERBS)

    def draw(rng: random.Random, case: Path) -> tuple[list[str], str]:
        (case / "text.txt").write_text(TEXT)
        verb = rng.choice([*verbs, "pretrain", "sft", "align", "generate", "evaluate", "show"])
        names = [".".join(path) for path, _ in iter_options(VERBS[verb].options, in_tables=True)]
        words = []
        for _ in range(rng.choice([1, 1, 1, 2, 4])):
            name = rng.choice(names)
            name = a_misspelling(rng, name) if rng.random() < 0.15 else name
            values = [a_word(rng) for _ in range(rng.choice([0, *[1] * 8, 2]))]
            option = (
                [f"--{name}={values[0]}"]
                if values and rng.random() < 0.4
                else [f"--{name}", *values]
            )
            words += option * rng.choice([1] * 8 + [2, 40])
        begin, end = (
            [{"RUN": str(tiny_run), "MODEL": str(models / "hello")}.get(w, w) for w in s.split()]
            for s in LINES[verb]
        )
        name = verb if rng.random() < 0.97 else rng.choice([a_misspelling(rng, verb), a_word(rng)])
        return [name, *begin, *words, *end], "options"

    carry_out(draw, 18)


# --- recipes --------------------------------------------------------------------------------------

# Its last stage is refused before the first begins.
PIPELINE = """\
name = "p"
folder = "runs"
[[stages]]
verb = "pretrain"
name = "base"
arguments = ["--train.steps", "1"]
[[stages]]
verb = "show"
arguments = ["{nothing}"]
"""
TOML_VALUES = pieces(r"""
nan ;; -inf ;; 1e400 ;; 1979-05-27 ;; 07:32:00 ;; [] ;; {} ;; [[[1]]] ;; '' ;; true ;; -1 ;; 2_0 ;; 0.1 ;; 1e18
{a.b.c = 1} ;; "\u0000" ;; "\ud800" ;; ["", 1] ;; [{}] ;; "none" ;; 0 ;; 9223372036854775808
""")
TOML_VALUES += ["9" * 6000, '"' + "x" * 5000 + '"', "[" * 3000 + "]" * 3000]
TOML_LINES = pieces("""
[model] ;; [[model]] ;; [model.model] ;; [train ;; [] ;; [x] ;; run = "x" ;; = ;; "" = 1 ;; model.preset = 1
[run] ;; \x00 ;; stage = "sft" ;; stage = ["align"] ;; train = 3
""")


def mutated_recipe(rng: random.Random, text: str) -> bytes:
    if rng.random() < 0.3:
        return mutated_bytes(rng, text.encode())
    lines = text.split("\n")
    for _ in range(rng.choice([1, 1, 2, 3])):
        at = rng.randrange(len(lines))
        key, equals, _ = lines[at].partition(" = ")
        change = rng.randrange(5)
        if change < 2 and equals:
            lines[at] = f"{key} = {rng.choice(TOML_VALUES)}"
        elif change == 2 and key:
            lines[at] = lines[at].replace(key, a_misspelling(rng, key))
        elif change == 3:
            lines.insert(at, lines[rng.randrange(len(lines))])
        else:
            lines.insert(at, rng.choice(TOML_LINES))
    return "\n".join(lines).encode()


@pytest.mark.parametrize("part", range(3))
def test_recipes(part: int, carry_out: CarryOut) -> None:
    def draw(rng: random.Random, case: Path) -> tuple[list[str], str]:
        file = case / rng.choice(
            ["recipe.toml", "recipe.toml", "r\u00e9 cipe.toml", "-.toml", "x" * 120 + ".toml"]
        )
        source = rng.choice(RECIPES)
        verb = rng.choice(
            [["show"], ["show"], ["pretrain"], ["sft"], ["align"], ["bench"], ["run"]]
        )[0]
        file.write_bytes(
            mutated_recipe(rng, PIPELINE if verb == "run" else source.read_text("utf-8"))
        )
        end = {"show": [], "run": [], "bench": ["--bench.sweep=nothing=1"]}.get(verb, ["--dry-run"])
        return [verb, str(file), *end], f"{source.name}, mutated: {file.read_bytes()[:3000]!r}"

    carry_out(draw, 17)


# --- runs, checkpoints, token folders -------------------------------------------------------------


@pytest.fixture
def command_on(tiny_run: Path, tiny_options: list[str]) -> CommandOn:
    """A command that reads what is in the folder of a case: a run, token shards or a model."""
    onwards = [
        "pretrain",
        *tiny_options,
        "--checkpoint.every_steps",
        "99",
        "--validation.every_steps",
        "99",
    ]
    short = ["--sequences", "2", "--sequence_length", "16", "--device", "cpu"]

    def command(rng: random.Random, thing: Path) -> list[str]:
        if thing.name == "tokens":
            trained = [
                *onwards,
                "--train.steps",
                "1",
                "--data.folder",
                str(thing),
                "--run.folder",
                str(thing.parent / "runs"),
            ]
            return rng.choice(
                [
                    ["show", str(thing)],
                    ["evaluate", str(tiny_run), "--data", str(thing), *short],
                    trained,
                ]
            )
        generate = [
            "generate",
            str(thing),
            "Hi",
            "--max_tokens",
            "2",
            "--temperature",
            "0",
            "--device",
            "cpu",
        ]
        if thing.name == "model":
            text = thing.parent / "text.jsonl"
            text.write_text(json.dumps(CONVERSATION) + "\n")
            chat = [
                "chat",
                str(thing),
                "--max_tokens",
                "2",
                "--temperature",
                "0",
                "--device",
                "cpu",
            ]
            evaluate = ["evaluate", str(thing), "--data", str(text), *short]
            source = [
                "pretrain",
                *without_shape(tiny_options),
                "--model.source",
                str(thing),
                "--dry-run",
            ]
            data = ["show", "data", str(text), "--tokenizer", str(thing)]
            return rng.choice([["show", str(thing)], generate, chat, evaluate, source, data])
        newest = max(thing.glob("checkpoints/step-*"), default=thing)
        again = [*onwards, "--run.folder", str(thing.parent), "--run.name", thing.name]
        commands = [
            ["show", str(thing)],
            ["show", str(newest)],
            ["show", "data", str(thing)],
            generate,
            again,
        ]
        commands += [
            ["evaluate", str(newest), *short],
            ["export", str(thing), str(thing.parent / "out")],
        ]
        commands += [["compare", str(tiny_run), str(thing), "--weights"]]
        return rng.choice(commands)

    return command


def mutate_file(rng: random.Random, path: Path, bytewise: float) -> None:
    if path.suffix != ".json" or rng.random() < bytewise:
        path.write_bytes(mutated_bytes(rng, path.read_bytes()))
        return
    path.write_bytes(mutated_json(rng, json.loads(path.read_text("utf-8"))))


@parametrize("part", range(3), fast=(1,))
def test_manifests(
    part: int, carry_out: CarryOut, tiny_run: Path, tiny_tokens: Path, command_on: CommandOn
) -> None:
    def draw(rng: random.Random, case: Path) -> tuple[list[str], str]:
        source, name = rng.choice([(tiny_run, "tiny"), (tiny_run, "tiny"), (tiny_tokens, "tokens")])
        thing = Path(shutil.copytree(source, case / name))
        files = [
            path
            for path in sorted(thing.rglob("*"))
            if path.is_file() and path.suffix not in (".png", ".log", ".lock")
        ]
        path = rng.choice([each for each in files if each.suffix == ".json"] * 3 + files)
        mutate_file(rng, path, 0.3)
        return command_on(rng, thing), f"{path.relative_to(case)}, mutated"

    carry_out(draw, 15)


# --- what a command writes ------------------------------------------------------------------------

WRITING = {
    "trace": (
        "bench --model.preset nano --data.sequence_length 16 --train.global_batch_size 1"
        " --train.compile off --bench.steps 1 --train.device cpu --bench.trace OUT"
    ),
    "calibration": (
        "bench --calibrate --bench.calibrate_seconds 1 --train.device cpu --bench.out OUT"
    ),
    "recipe": "plan --search --gpus 8 --configurations 3 --write OUT",
    "report": "report RUN --out OUT",
    "answers": "evaluate RUN --device cpu --tasks questions.jsonl --answers OUT",
    "model": "export RUN OUT --overwrite",
    "tokens": "prepare text.txt OUT --vocab_size 301 --workers 1 --overwrite",
}


def test_outputs(carry_out: CarryOut, tiny_run: Path) -> None:
    """Whatever is there under the name that a command is to write, and is not its own, stays."""

    def draw(rng: random.Random, case: Path) -> tuple[list[str], str]:
        (case / "text.txt").write_text(TEXT)
        (case / "questions.jsonl").write_text('{"prompt": "a", "answer": "b"}\n')
        (case / "link.html").symlink_to(neighbour(case / "x") / "notes.txt")
        (case / "gone").symlink_to("nowhere")
        taken = [
            neighbour(case / "x") / "notes.txt",
            neighbour(case / "x"),
            case,
            "link.html",
            "gone",
            "text.txt",
            "/dev/null",
        ]
        taken += [
            tiny_run,
            tiny_run / "recipe.toml",
            tiny_run / "metrics.jsonl",
            "text.txt/below",
            "/proc/nothing",
            "/",
        ]
        words = rng.choice(list(WRITING.values())).replace("RUN", str(tiny_run)).split()
        out = str(rng.choice(taken))
        return [word.replace("OUT", out) for word in words], f"writes {out}"

    carry_out(draw, 8)


# --- prompts --------------------------------------------------------------------------------------


PROMPTS = {
    "special": b"<|end|>" * 10**5,
    "binary": b"\xff" * 99,
    "empty": b"",
    "endless": b"x" * (2**24 + 1),
    "short": "漢\n".encode() * 9,
    "megabytes": b"To be. " * 10**6,
}


@parametrize(
    ("verb", "prompt"),
    [(verb, prompt) for prompt in PROMPTS for verb in ("generate", "chat")],
    fast=(0, 7),
)
def test_prompts(verb: str, prompt: str, carry_out: CarryOut, models: Path) -> None:  # noqa: F811
    text = PROMPTS[prompt]
    words = [
        verb,
        str(models / "hello"),
        "--max_tokens",
        "2",
        "--device",
        "cpu",
        "--temperature",
        "0",
    ]
    carry_out(lambda rng, case: (words, f"a text of {len(text):,} bytes"), 1, stdin=text)


# --- model folders --------------------------------------------------------------------------------


@parametrize("part", range(3), fast=(1,))
def test_headers(part: int, carry_out: CarryOut, models: Path, command_on: CommandOn) -> None:  # noqa: F811
    def draw(rng: random.Random, case: Path) -> tuple[list[str], str]:
        thing = Path(shutil.copytree(models / "hello", case / "model"))
        path = thing / rng.choice(["config.json", "tokenizer.json", "tokenizer_config.json"])
        mutate_file(rng, path, 0.25)
        shown = path.read_bytes()[:2500] if path.stat().st_size < 3000 else path.read_bytes()[:300]
        return command_on(rng, thing), f"{path.name}, mutated: {shown!r}"

    carry_out(draw, 15)


# --- steps of a tokenizer.json --------------------------------------------------------------------

# SentencePiece's precompiled_charsmap of one character: a block of the array, its root, "a" and the
# place of "b".
UNITS = [1 << 10] + [0] * 255
UNITS[1 ^ ord("a")] = 1 << 10 | 1 << 8 | ord("a")
UNITS[1 ^ ord("a") ^ 1] = 1 << 31
CHARSMAP = base64.b64encode(struct.pack("<257I", 1024, *UNITS) + b"b\0").decode()
SENTENCEPIECE_STEPS = [
    {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
    {"type": "ByteFallback"},
    {"type": "Fuse"},
    {"type": "Strip", "content": " ", "start": 1, "stop": 0},
]
STEPS: dict[str, list[dict[str, Any]]] = {
    "decoder": [
        {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        {"type": "Sequence", "decoders": SENTENCEPIECE_STEPS},
        {"type": "WordPiece", "prefix": "##", "cleanup": True},
        {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True},
        {"type": "BPEDecoder", "suffix": "</w>"},
        {"type": "CTC", "pad_token": "<pad>", "word_delimiter_token": "|", "cleanup": True},
    ],
    "normalizer": [
        {
            "type": "Sequence",
            "normalizers": [
                {"type": "Prepend", "prepend": "▁"},
                {"type": "NFKD"},
                {"type": "StripAccents"},
            ],
        },
        {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": "▁"},
        {
            "type": "BertNormalizer",
            "clean_text": True,
            "handle_chinese_chars": True,
            "strip_accents": None,
            "lowercase": True,
        },
        {"type": "Precompiled", "precompiled_charsmap": CHARSMAP},
    ],
}


def read_all_of(tokenizer: Tokenizer) -> None:
    for text in ("Hello  world\n é ▁ ##a|<|end|>", "", "aa\x00 \u3000"):
        ids = tokenizer.encode(text)
        tokenizer.encode_batch([text], is_continuation=True, parse_special_tokens=True)
        tokenizer.decode(ids)
    tokenizer.decode(range(tokenizer.vocab_size), include_special_tokens=True)
    tokenizer.token_byte_lengths()
    decoder = StreamDecoder(tokenizer)
    for id in range(tokenizer.vocab_size):
        decoder.feed(id)


def test_the_steps_that_are_damaged_are_read_where_they_are_whole(
    byte_tokenizer: Tokenizer,  # noqa: F811
) -> None:
    content = json.loads(byte_tokenizer.files["tokenizer.json"])
    for name, steps in STEPS.items():
        for step in steps:
            read_all_of(Tokenizer(json.dumps({**content, name: step}), {}))
    assert Tokenizer(json.dumps({**content, "normalizer": STEPS["normalizer"][-1]}), {}).encode(
        "a"
    ) == byte_tokenizer.encode("b")


@pytest.mark.parametrize("draws", [60, pytest.param(2000, marks=pytest.mark.slow)])
def test_steps_of_a_tokenizer(
    draws: int,
    byte_tokenizer: Tokenizer,  # noqa: F811
    capfd: pytest.CaptureFixture[str],
) -> None:
    rng, content = fresh_random(), json.loads(byte_tokenizer.files["tokenizer.json"])
    outcomes: set[bool] = set()
    for _ in range(draws):
        name = rng.choice(list(STEPS))
        step = rng.choice(STEPS[name])
        text = mutated_json(rng, {name: step}).decode()
        if "precompiled_charsmap" in step and rng.random() < 0.7:
            damaged = bytearray(base64.b64decode(CHARSMAP))
            damaged[rng.randrange(len(damaged))] = rng.randrange(256)
            text = json.dumps(
                {name: {**step, "precompiled_charsmap": base64.b64encode(damaged).decode()}}
            )
        problem = ""
        try:
            read_all_of(Tokenizer(f"{json.dumps(content)[:-1]}, {text[1:]}", {}))
        except UserError as refusal:
            problem = str(refusal)
        except BaseException:
            print(text)
            raise
        assert not problem or problem.startswith("tokenizer.json: "), text
        outcomes.add(not problem)
        assert capfd.readouterr().err == "", text
    assert outcomes == {True, False}


# --- folders --------------------------------------------------------------------------------------


def remove(path: Path) -> None:
    shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


def put_a_link(path: Path, target: str) -> None:
    remove(path)
    path.symlink_to(target)


def neighbour(path: Path) -> Path:
    """The folder of another, beside those of the cases."""
    return next(parent for parent in path.parents if parent.name == "cases") / "neighbour"


def put_a_pipe(path: Path) -> None:
    remove(path)
    os.mkfifo(path)


def put_a_folder(path: Path) -> None:
    remove(path)
    (path / "in it").mkdir(parents=True)


def put_a_file(path: Path, content: bytes) -> None:
    remove(path)
    path.write_bytes(content)


def put_a_hole(path: Path) -> None:
    put_a_file(path, b"")
    os.truncate(path, 2**40)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "missing": remove,
    "a folder": put_a_folder,
    "empty": lambda path: put_a_file(path, b""),
    "a text": lambda path: put_a_file(path, b"nothing of the kind\n"),
    "binary": lambda path: put_a_file(path, bytes(range(256)) * 9),
    "a hole of 1 TiB": put_a_hole,
    "unreadable": lambda path: path.chmod(0),
    "read only": lambda path: path.chmod(0o500 if path.is_dir() else 0o400),
    "a link to itself": lambda path: put_a_link(path, path.name),
    "a link to the folder above": lambda path: put_a_link(path, ".."),
    "a link to nothing": lambda path: put_a_link(path, "nothing"),
    "a link to what cannot be read": lambda path: put_a_link(path, "/proc/self/mem"),
    "a link to what does not end": lambda path: put_a_link(path, "/dev/zero"),
    "a link to a file of the user": lambda path: put_a_link(
        path, str(neighbour(path) / "notes.txt")
    ),
    "a link to a folder of the user": lambda path: put_a_link(path, str(neighbour(path))),
    "a pipe": put_a_pipe,
    "under another name": lambda path: path.rename(path.with_name(path.name + " \x1b[2J")),
    "beside one of a strange name": (
        lambda path: path.with_name("step-99999999999999999999").mkdir()
    ),
    "beside a file of a strange name": lambda path: path.with_name("step-00000009").write_text(""),
    "beside a name of bytes": lambda path: path.with_name("\udcff.json").write_text(""),
}


@parametrize("part", range(3), fast=(1,))
def test_folders(
    part: int,
    carry_out: CarryOut,
    tiny_run: Path,
    tiny_tokens: Path,
    models: Path,  # noqa: F811
    command_on: CommandOn,
) -> None:
    def draw(rng: random.Random, case: Path) -> tuple[list[str], str]:
        source, name = rng.choice(
            [
                (tiny_run, "tiny"),
                (tiny_run, "tiny"),
                (tiny_tokens, "tokens"),
                (models / "hello", "model"),
            ]
        )
        thing = Path(shutil.copytree(source, case / name))
        path = rng.choice(sorted(thing.rglob("*")))
        words = command_on(rng, thing)
        damage = rng.choice(list(DAMAGES))
        DAMAGES[damage](path)
        return words, f"{path.relative_to(case)} is {damage}"

    carry_out(draw, 15)


# --- chat templates -------------------------------------------------------------------------------

# None that takes all memory or years: a template runs in the process, as in transformers.
ATOMS = pieces(r"""
messages ;; messages[0] ;; messages[-1].content ;; bos_token ;; eos_token ;; '' ;; 'x' ;; 0 ;; 1.5 ;; none ;; []
{} ;; range(9) ;; loop ;; self ;; namespace(a=1) ;; nothing ;; tools ;; '%s' * 9 ;; 9 ;; -1
lipsum ;; cycler ;; joiner ;; messages.__class__ ;; ''.__class__.__mro__ ;; raise_exception ;; (1, 2)
'\ud800' ;; '9' * 9 ;; strftime_now('%Y') ;; 'ab' * 9 ;; range(9)|list ;; [1] * 9
""")
FORMS = pieces("""
({} + {}) ;; ({} ~ {}) ;; ({} * {}) ;; ({} % {}) ;; ({} // {}) ;; ({} == {}) ;; ({} in {})
{}[{}] ;; {}[{}:] ;; {}|join({}) ;; {}|center({}) ;; {}|indent({}) ;; {}|replace('', {}) ;; {}|batch({})|list
{}|slice({})|list ;; {}({}) ;; {}.zfill({}) ;; {}|map({})|list ;; {}|sort(attribute={}) ;; {}|tojson(indent={})
{}.format({}) ;; {}|round({}) ;; {}|default({}) ;; {}|groupby({}) ;; {}|sum(start={})
({} if {} else 1) ;; {}|wordwrap({}) ;; {}|select({})|list ;; {}|dictsort(by={}) ;; {}|attr({})
{}.rfind({}) ;; {}.strip({}) ;; {}.rsplit({}) ;; {}.count({}) ;; {}.join({}) ;; {}.partition({}) ;; {}.update({})
{}.index({}) ;; {}.encode({}) ;; {}.translate({}) ;; ({} is divisibleby {}) ;; {}|urlize({}) ;; {}|trim({}) ;; {}|unique({})
""")
STATEMENTS = pieces("""
{{{{ {0} }}}} ;; {{% if {0} %}}{1}{{% endif %}} ;; {{% for m in {0} %}}{1}{{% endfor %}}
{{% set x = {0} %}}{1} ;; {{# ;; {{% for i in range(9) %}}{1}{{% endfor %}}
{{% macro f(a) %}}{1}{{{{ f(a) }}}}{{% endmacro %}}{{{{ f({0}) }}}} ;; {{{{ {0}
{{% generation %}}{1}{{% endgeneration %}} ;; {{% generation %}}{1} ;; {{% break %}} ;; {{% include {0} %}}
{{% {0} %}} ;; {{% filter upper %}}{1}{{% endfilter %}} ;; {{% call {0} %}}{1}{{% endcall %}} ;; <|end|>{1}
{{% for m in messages %}}{1}{{% endfor %}} ;; {{% if messages[0].content == 'Hi' %}}{{{{ {0} }}}}{1}{{% endif %}}
""")
PIECES = [
    "<|assistant|>",
    "{{ messages[-1].content }}",
    "text",
    "",
    "<|end|>",
    "\x00\x1b",
    "\ud800",
    "\U0010fff0",
]


def an_expression(rng: random.Random, depth: int) -> str:
    if depth == 0 or rng.random() < 0.3:
        return rng.choice(ATOMS)
    return rng.choice(FORMS).format(an_expression(rng, depth - 1), an_expression(rng, depth - 1))


def a_template(rng: random.Random, depth: int) -> str:
    if depth == 0:
        return rng.choice(PIECES)
    body = "".join(a_template(rng, depth - 1) for _ in range(rng.choice([1, 1, 2, 3])))
    return rng.choice(STATEMENTS).format(an_expression(rng, 3), body)


@pytest.mark.parametrize("part", range(2))
def test_templates(part: int, carry_out: CarryOut, models: Path, command_on: CommandOn) -> None:  # noqa: F811
    def draw(rng: random.Random, case: Path) -> tuple[list[str], str]:
        thing = Path(shutil.copytree(models / "hello", case / "model"))
        template = a_template(rng, rng.choice([1, 2, 3]))
        template = template * 20_000 if rng.random() < 0.05 else template
        (thing / "chat_template.jinja").write_bytes(template.encode("utf-8", "surrogatepass"))
        words: list[str] = []
        while not words or words[0] not in ("chat", "show") or words[1] == str(thing):
            words = command_on(rng, thing)
        return words, f"template {template[:2000]!r}"

    carry_out(draw, 15)


# --- requests -------------------------------------------------------------------------------------

BODIES: list[dict[str, Any]] = [
    {"prompt": "a", "n": 1, "stop": ["b"], "logprobs": 1, "top_k": 3, "top_p": 0.5, "seed": 1},
    {
        "prompt": ["a <|end|>", "b"],
        "echo": True,
        "logprobs": 1,
        "stop": "<|end|>",
        "min_p": 0,
        "top_k": -1,
    },
    {"prompt": [[1, 2], [3]], "stream": True, "stream_options": {"include_usage": True}},
    {**CONVERSATION, "temperature": 0, "logprobs": True, "top_logprobs": 2},
    {
        "messages": [{"role": "user", "content": "Hi"}],
        "max_completion_tokens": 2,
        "stop": "x",
        "stream": False,
    },
    {
        "messages": [*CONVERSATION["messages"]],
        "continue_final_message": True,
        "chat_template_kwargs": {"enable_thinking": 0},
    },
    {"messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}], "n": 2},
]
ROUTES = ["/v1/completions", "/v1/chat/completions"]
STRANGE_ROUTES = pieces(
    "/ ;; /health ;; /v1/models ;; /v1/models/hello ;; /v1/models/..%2f.. ;; // ;; /%00 ;;"
    " /%ff?a=%zz"
)
HEADERS = pieces("""
Content-Type: text/plain ;; Content-Type: application/json; charset=utf-16 ;; Authorization: Bearer \xff
Host: evil.org ;; Expect: 100-continue ;; Accept: \x80 ;; Content-Encoding: gzip ;; Range: bytes=0-1
""")
HEADERS += ["X: " + "x" * 5000, "Cookie: " + "a=b;" * 999]
POST = "POST /v1/completions HTTP/1.1\r\n"
NOT_HTTP = [
    "GET / HTTP/9.9\r\n\r\n",
    "\x00\x01\x02\r\n\r\n",
    "GET\r\n\r\n",
    "X" * 70_000 + "\r\n\r\n",
    f"{POST}A\r\n\r\n",
]
NOT_HTTP += [
    f"{POST}Content-Length: -1\r\n\r\n",
    f"{POST}Content-Length: 1\r\nContent-Length: 2\r\n\r\n",
]
NOT_HTTP += [
    f"{POST}Host: localhost\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    "GET /\xff HTTP/1.1\r\nHost: a\r\n\r\n",
]


def a_request(rng: random.Random) -> bytes:
    if rng.random() < 0.1:
        return rng.choice(NOT_HTTP).encode("latin-1")
    path = rng.choice(ROUTES if rng.random() < 0.9 else STRANGE_ROUTES)
    body = {"model": "hello", "max_tokens": 2, **rng.choice(BODIES)}
    content = (
        mutated_bytes(rng, json.dumps(body).encode())
        if rng.random() < 0.2
        else mutated_json(rng, body)
    )
    if rng.random() < 0.2:
        fields = {**body, rng.choice([*body, "a", ""]): rng.choice([*JSON_VALUES, *TEXTS])}
        content = (
            json.dumps(fields).encode() if rng.random() < 0.5 else rng.choice(RAW_JSON).encode()
        )
    lines = [
        f"{rng.choice(['POST'] * 9 + ['GET', 'PUT', 'X'])} {path} HTTP/1.1",
        f"Content-Length: {len(content)}",
        "Connection: close",
    ]
    headers = [rng.choice(HEADERS)] if rng.random() < 0.2 else []
    names = [header.partition(":")[0] for header in headers]
    lines += [
        each
        for each in ("Host: localhost", "Content-Type: application/json")
        if each.partition(":")[0] not in names
    ]
    return "\r\n".join([*lines, *headers, "", ""]).encode("latin-1") + content


def answer_to(server: Server, request: bytes) -> tuple[int, str, bytes]:
    """Status, content type and body."""
    host, _, port = server.url.removeprefix("http://").rpartition(":")
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        connection.sendall(request)
        answer = http.client.HTTPResponse(connection, method=request[:3].decode("latin-1"))
        answer.begin()
        return answer.status, answer.getheader("content-type", ""), answer.read()


@pytest.fixture(scope="module")
def server(serving: Callable[..., Server], models: Path) -> Iterator[Server]:  # noqa: F811
    served = serving(
        models / "hello", "--max_batch_size", 4, "--max_length", 200, "--max_body_bytes", 20_000
    )
    yield served
    assert served.process.poll() is None


@pytest.mark.parametrize("part", range(2))
def test_requests(part: int, server: Server) -> None:
    """Each is answered, with what it asked for or with an error object in JSON; and the next one is
    too.
    """
    rng = fresh_random()
    for _ in range(25):
        request = a_request(rng)
        status, kind, body = answer_to(server, request)
        described = f"{request[:3000]!r} got {status} {kind} {body[:1000]!r}"
        assert status == 200 or 400 <= status < 500, described
        if kind.startswith("application/json"):
            assert ("error" in json.loads(body)) == (status != 200), described
            assert len(body) < 5000 or status == 200, described
        elif kind.startswith("text/event-stream"):
            assert body.endswith(b"data: [DONE]\n\n"), described
        else:  # the page, and what is not even HTTP
            assert status == 200 or (status == 400 and request.decode("latin-1") in NOT_HTTP), (
                described
            )
        _, health = server.ask("/health")
        assert health["status"] == "ok", described
    assert server.is_idle()
