"""Numbers, names, values and nesting beyond every limit: one short line, status 2, and nothing is
started.
"""

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub.errors import StrictDataclassFieldValidationError
from transformers import AutoConfig

from lmforge.cli import run
from lmforge.core.data.tokenizer import Tokenizer
from lmforge.core.distributed import memory
from lmforge.core.distributed.distributed import DistributedContext
from lmforge.core.distributed.host_memory import AvailableMemory
from lmforge.core.distributed.rank_info import RankInfo
from lmforge.core.errors import UserError
from lmforge.core.files.untrusted import parse_json, parse_toml, quoted
from lmforge.core.model.build import build_model
from lmforge.core.model.config_json import to_config_json
from lmforge.core.model.presets import get_preset
from lmforge.core.options.load import parse_config
from lmforge.core.options.stage import PretrainConfig
from lmforge.core.records.kinds import is_hub_name
from lmforge.core.stages.attempt import notes_on_ranks
from lmforge.core.stages.inputs import check_model
from lmforge.hf.resolve import resolve_model_config
from lmforge.serve.verbs import generate
from tests.conftest import Command, Refusal
from tests.support.grids import parametrize

LONG = "x" * 5000
DIGITS = "9" * 6000
LARGEST_MODEL = {
    "hidden_size": 2**20,
    "num_attention_heads": 2**10,
    "num_key_value_heads": 2**10,
    "num_hidden_layers": 2**12,
}
MOST_CHARACTERS = 400


def written(folder: Path) -> list[str]:
    """The files below a folder, the lock apart, which a refused run may leave."""
    return sorted(
        path.name for path in folder.rglob("*") if path.is_file() and path.name != ".lock"
    )


# --- numbers --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("train.threads", "1000000000"),
        ("model.num_hidden_layers", "1000000000"),
        ("train.global_batch_size", "1000000000000"),
        ("data.sequence_length", str(2**63)),
        ("model.rope_theta", "1e308"),
        ("train.steps", "1e308"),
        ("optimizer.lr", "1e308"),
        ("launch.processes", DIGITS),
        ("train.seed", f"-{DIGITS}"),
        ("optimizer.lr", DIGITS),
    ],
)
def test_an_option_beyond_its_bound_is_refused_by_name(
    tmp_path: Path, tiny_options: list[str], refused: Refusal, option: str, value: str
) -> None:
    printed = refused(
        "pretrain", *tiny_options, "--run.folder", tmp_path / "runs", f"--{option}", value
    )
    assert printed.startswith(f"--{option}: expected a ")
    assert len(printed) < MOST_CHARACTERS
    assert not (tmp_path / "runs").exists()


@parametrize(
    ("words", "message"),
    [
        (
            [f"--model.{name}={size}" for name, size in LARGEST_MODEL.items()],
            "model, gradients, optimizer and activations of a",
        ),
        (
            [
                "--data.sequence_length",
                2**16,
                "--train.global_batch_size",
                1,
                "--model.hidden_size",
                2**15,
            ],
            "model, gradients, optimizer and activations",
        ),
        (["--train.global_batch_size", 2**24, "--data.sequence_length", 2**12], "; use a smaller "),
        (
            ["--train.global_batch_size", 2**24, "--data.sequence_length", 2**26],
            "more than 68,719,476,736 tokens per step",
        ),
        (["--train.threads", 4096], "train.threads = 4096: this process may use"),
        (
            ["--launch.processes", 2**20, "--train.global_batch_size", 2**20],
            "1,048,576 processes: this machine has",
        ),
    ],
    ids=["model", "sequences", "batch", "product", "threads", "processes"],
    fast=(1, 2, 3, 4, 5),
)
@pytest.mark.parametrize("verb", ["pretrain", "bench"])
def test_sizes_that_are_allowed_alone_and_do_not_fit_this_machine_are_refused(
    tmp_path: Path,
    tiny_options: list[str],
    refused: Refusal,
    verb: str,
    words: list[Any],
    message: str,
) -> None:
    printed = refused(verb, *tiny_options, "--run.folder", tmp_path / "runs", *words)
    assert message in printed
    assert len(printed) < MOST_CHARACTERS
    assert written(tmp_path) == []


@pytest.mark.slow
def test_a_dry_run_tells_what_the_largest_model_costs_on_other_machines(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = [f"--model.{name}={size}" for name, size in LARGEST_MODEL.items()]
    assert (
        run(
            [
                "pretrain",
                "--dry-run",
                *words,
                "--launch.processes",
                "1024",
                "--train.global_batch_size",
                "1024",
            ]
        )
        == 0
    )
    assert "each holds" in capsys.readouterr().out


def test_more_processes_than_a_machine_runs_are_refused_by_prepare(
    tmp_path: Path, refused: Refusal
) -> None:
    (tmp_path / "a.txt").write_text("text")
    assert refused("prepare", tmp_path / "a.txt", tmp_path / "out", "--workers", 4096).startswith(
        "4,096 processes: this"
    )
    assert not (tmp_path / "out").exists()


def test_an_evaluation_of_endless_sequences_is_refused(tiny_run: Path, refused: Refusal) -> None:
    printed = refused("evaluate", tiny_run, "--sequence_length", 2**26, "--batch_size", 2**24)
    assert printed.startswith("16 sequences of 67,108,864 tokens: needs ")


def test_a_batch_of_many_passes_over_the_data_is_refused(
    tmp_path: Path, tiny_options: list[str], refused: Refusal
) -> None:
    words = ["--run.folder", tmp_path / "runs", "--train.global_batch_size", 2**18]
    printed = refused("pretrain", *tiny_options, *words)
    assert printed.startswith("a global batch of 262,144 sequences: the data has ")
    assert written(tmp_path) == []


@pytest.mark.parametrize("verb", ["generate", "evaluate"])
def test_a_folder_of_a_model_without_end_is_refused_before_it_is_built(
    tmp_path: Path, tiny_tokens: Path, refused: Refusal, verb: str
) -> None:
    shutil.copy(tiny_tokens / "tokenizer" / "tokenizer.json", tmp_path)
    content = {
        **to_config_json(get_preset("nano")),
        "vocab_size": 512,
        "intermediate_size": 2**22,
        **LARGEST_MODEL,
    }
    (tmp_path / "config.json").write_text(json.dumps(content))
    words = ["--data", tiny_tokens] if verb == "evaluate" else ["x"]
    printed = refused(verb, tmp_path, *words)
    assert "parameters in fp32: needs" in printed
    assert "use a smaller one" in printed


def test_what_a_model_and_a_cache_need_is_compared_with_what_is_free(
    tiny_run: Path, tmp_path: Path, refused: Refusal, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run(["export", str(tiny_run), str(tmp_path / "long")]) == 0
    config = tmp_path / "long" / "config.json"
    config.write_text(
        json.dumps(json.loads(config.read_text()) | {"max_position_embeddings": 2**22})
    )
    free = AvailableMemory(0, 2**28, "the memory of this host")
    monkeypatch.setattr(memory, "available_memory", lambda device, ranks: free)
    monkeypatch.setattr(memory, "read_kib_table", lambda path: {})
    build_model(get_preset("nano"))
    with pytest.raises(
        UserError,
        match=(
            r"^a model of 123,551,232 parameters in fp32: needs 471 MiB, and 256 MiB are left"
            r" of the"
        ),
    ):
        build_model(get_preset("124m"))
    # 2 layers of 2 key-value heads of width 8 in fp32: 256 bytes per token.
    printed = refused(
        "generate",
        tmp_path / "long",
        "x",
        "--max_tokens",
        2**21,
        "--dtype",
        "fp32",
        "--device",
        "cpu",
    )
    assert printed.startswith("a KV cache of 1 sequences of 2,097,15")
    assert "generate fewer tokens" in printed


@pytest.mark.parametrize(
    ("problem", "words"),
    [
        (MemoryError("Unable to allocate 30.0 GiB for an array"), "30.00 GiB were requested"),
        (
            torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 PiB."),
            "2,097,152.00 GiB were requested",
        ),
        (
            RuntimeError(
                "DefaultCPUAllocator: can't allocate memory: you tried to allocate 1048576 bytes."
            ),
            "1 MiB were",
        ),
        (MemoryError(), "a request was refused"),
    ],
)
def test_memory_that_runs_out_anywhere_is_one_line(
    refused: Refusal, monkeypatch: pytest.MonkeyPatch, problem: Exception, words: str
) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise problem

    monkeypatch.setattr(generate, "load_model", fail)
    printed = refused("generate", "somewhere", "x", status=1)
    assert printed.startswith(f"out of memory: {words}")
    assert printed.endswith("use smaller batches, shorter sequences or a smaller model")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"rope_theta": float("inf")},
            "rope_theta: expected a number of at most 1000000000000000, got Infinity",
        ),
        ({"rope_theta": float("nan")}, "rope_theta: expected a number above zero, got NaN"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers: expected at most 4,096, got 1000000000"),
        (
            {"hidden_size": 2**63},
            "hidden_size: expected a whole number of at most 1048576, got 9223372036854775808",
        ),
        (
            {"vocab_size": 10**300},
            "vocab_size: expected a whole number of at most 16777216, got 1000",
        ),
        ({"rms_norm_eps": 1e308}, "rms_norm_eps: expected a number of at most 1, got 1e+308"),
        (
            {"rope_scaling": {"type": "linear", "factor": 1e308}},
            "needs factor: expected a number of at most 1000000",
        ),
        ({"num_hidden_layers": "2"}, 'num_hidden_layers: expected a whole number, got "2"'),
        ({"architectures": 5}, "architectures: expected a list, got 5"),
        ({"tie_word_embeddings": "no"}, 'tie_word_embeddings: expected true or false, got "no"'),
        ({"eos_token_id": "end"}, "eos_token_id"),
        ({"layer_types": {"a": 1}}, "layer_types: expected a list"),
        ({"hidden_size": LONG}, "hidden_size: expected a whole number above zero, got"),
    ],
)
def test_a_config_json_beyond_the_bounds_is_refused_by_file_and_field(
    tmp_path: Path, refused: Refusal, change: dict[str, Any], message: str
) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps({**to_config_json(get_preset("nano")), **change})
    )
    printed = refused("show", tmp_path)
    assert printed.startswith(f"{tmp_path}/config.json: ")
    assert message in printed
    assert len(printed) < MOST_CHARACTERS + len(str(tmp_path))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"n_embd": None}, "n_embd: missing; add it"),
        ({"n_embd": {}}, "n_embd: expected a whole number, got {}"),
        ({"n_head": None}, "n_head: missing; add it"),
        ({"n_layer": "2"}, 'n_layer: expected a whole number, got "2"'),
        ({"n_inner": [1]}, "n_inner: expected a whole number, got [1]"),
        ({"vocab_size": None}, "vocab_size: missing; add it"),
        ({"vocab_size": {}}, "vocab_size: expected a whole number above zero, got {}"),
        ({"model_type": "qwen2", "num_hidden_layers": None}, "num_hidden_layers: missing; add it"),
        (
            {"model_type": "qwen3", "hidden_size": {}},
            "hidden_size: expected a whole number above zero, got {}",
        ),
        (
            {"model_type": "qwen3", "num_attention_heads": "a"},
            'num_attention_heads: expected a whole number above zero, got "a"',
        ),
    ],
)
def test_a_size_in_a_config_json_that_is_no_number_is_refused_by_field(
    tmp_path: Path, refused: Refusal, content: dict[str, Any], message: str
) -> None:
    gpt2 = {"model_type": "gpt2", "vocab_size": 99, "n_embd": 32, "n_layer": 2, "n_head": 2}
    sizes = {
        "vocab_size": 99,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "use_sliding_window": True,
    }
    (tmp_path / "config.json").write_text(
        json.dumps((sizes if "model_type" in content else gpt2) | content)
    )
    assert refused("show", tmp_path) == f"{tmp_path}/config.json: {message}"


@pytest.mark.parametrize("model_type", ["qwen2", "qwen3"])
def test_null_in_max_window_layers_is_refused_as_by_transformers(
    tmp_path: Path, model_type: str, refused: Refusal
) -> None:
    content = {
        "model_type": model_type,
        "vocab_size": 99,
        "hidden_size": 32,
        "num_hidden_layers": 30,
        "num_attention_heads": 2,
    }
    content |= {"use_sliding_window": True, "num_key_value_heads": 2}
    (tmp_path / "config.json").write_text(json.dumps(content))
    assert resolve_model_config(tmp_path, {}).layer_windows == (None,) * 28 + (4096,) * 2
    content["max_window_layers"] = None
    with pytest.raises(StrictDataclassFieldValidationError, match="max_window_layers"):
        AutoConfig.for_model(**content)
    (tmp_path / "config.json").write_text(json.dumps(content))
    assert (
        refused("show", tmp_path)
        == f"{tmp_path}/config.json: max_window_layers: expected a whole number, got null"
    )


def test_a_flag_of_null_in_a_config_json_is_a_field_left_out(tmp_path: Path) -> None:
    nothing = dict.fromkeys(("mlp_bias", "attention_bias"))
    (tmp_path / "config.json").write_text(
        json.dumps({**to_config_json(get_preset("nano")), **nothing})
    )
    assert run(["show", str(tmp_path)]) == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_hidden_layers": 10**9}, "num_hidden_layers: expected at most 4,096"),
        (
            {"max_position_embeddings": 10**12},
            "max_position_embeddings: expected a number of at most",
        ),
        ({"hidden_size": 1e308}, "hidden_size"),
    ],
)
def test_a_wrapped_model_beyond_the_bounds_is_refused_before_its_modules_are_made(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    content = {
        "model_type": "gpt_neox",
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "vocab_size": 99,
    }
    (tmp_path / "config.json").write_text(json.dumps({**content, **change}))
    with pytest.raises(UserError, match=r"config\.json: ") as caught:
        resolve_model_config(tmp_path, {}, implementation="transformers")
    assert message in str(caught.value)


def test_a_prompt_that_is_longer_than_the_sequences_is_refused_at_set_up(
    tmp_path: Path, tiny_options: list[str], refused: Refusal
) -> None:
    words = ["--run.folder", tmp_path / "runs", "--sample.prompts", "word " * 12_000]
    printed = refused("pretrain", *tiny_options, *words)
    assert printed.startswith('sample.prompts: "word word ')
    assert "does not fit into data.sequence_length = 48 tokens; shorten it" in printed
    assert len(printed) < MOST_CHARACTERS
    printed = refused(
        "pretrain",
        *tiny_options,
        *words[:2],
        "--sample.every_steps",
        2,
        "--sample.max_tokens",
        10**6,
    )
    assert printed.startswith("sample.max_tokens: prompt and sample take 1000")
    assert written(tmp_path) == []


def test_a_prompt_of_megabytes_is_refused_without_encoding_it(
    tiny_tokens: Path, monkeypatch: pytest.MonkeyPatch, tiny_options: list[str]
) -> None:
    tokenizer = Tokenizer.open(tiny_tokens / "tokenizer")
    monkeypatch.setattr(Tokenizer, "encode", lambda self, text: pytest.fail("encoded"))
    config = parse_config(PretrainConfig, [*tiny_options, "--sample.prompts", "a" * 2_000_000])
    with pytest.raises(UserError, match=r"^sample\.prompts"):
        check_model(config, get_preset("nano"), None, tokenizer)  # type: ignore[arg-type]


# --- names and values -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "words",
    [
        [LONG],
        ["pretrain", LONG],
        ["pretrain", f"{LONG}.toml"],
        ["pretrain", f"--{LONG}", "1"],
        ["pretrain", f"--train.{LONG}", "1"],
        ["pretrain", "--train.steps", LONG],
        ["pretrain", "--train.dtype", LONG],
        ["pretrain", "--optimizer.groups", LONG],
        ["pretrain", "--data.folder", LONG],
        ["pretrain", "--model.source", LONG],
        ["pretrain", "--dry-run", "--model.preset", LONG],
        ["pretrain", "--run.name", LONG],
        ["pretrain", "--checkpoint.folder", LONG, "--model.source", "nano"],
        ["prepare", "a", "b", LONG],
        ["prepare", LONG],
        ["evaluate", LONG],
        ["generate", LONG, "x"],
        ["show", LONG],
        ["show", f"{LONG}.toml"],
        ["download", LONG],
        ["import", LONG, "out", "--config_from", LONG],
        ["bench", "--sweep", LONG],
        ["bench", "--sweep", f"{LONG}=1"],
        ["run", LONG],
    ],
    ids=lambda words: " ".join(words).replace(LONG, "LONG"),
)
def test_a_value_of_thousands_of_characters_is_cut_where_it_is_named(
    tmp_path: Path, refused: Refusal, monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert len(refused(*words)) < MOST_CHARACTERS
    assert written(tmp_path) == []


@pytest.mark.parametrize("key", [LONG, f"train.{LONG}", f"{LONG}.{LONG}"])
def test_a_key_of_thousands_of_characters_is_cut_where_it_is_named(
    tmp_path: Path, refused: Refusal, key: str
) -> None:
    (tmp_path / "a.toml").write_text(f"{key} = 1\n")
    assert "no such option" in (printed := refused("pretrain", tmp_path / "a.toml"))
    assert len(printed) < MOST_CHARACTERS + len(str(tmp_path))


@pytest.mark.parametrize(
    "name",
    [
        "x" * 101,
        "🂡" * 60,
        "../x",
        "a/b",
        "/x",
        ".",
        "..",
        ".hidden",
        "-x",
        "a\\b",
        "a\nb",
        "a\x1b[2Jb",
        " ",
        "\x00",
    ],
)
def test_a_name_that_is_no_file_name_is_refused(
    tmp_path: Path, refused: Refusal, name: str
) -> None:
    recipe = tmp_path / "a.toml"
    recipe.write_text(
        f"[run]\nname = {json.dumps(name, ensure_ascii=False)}\nfolder ="
        f" {json.dumps(str(tmp_path / 'runs'))}\n"
    )
    printed = refused("pretrain", recipe)
    assert "run.name: expected a name of at most 100 characters, without slashes" in printed
    assert printed.isprintable()
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("name", ["x" * 100, "Größe 2.0_b+c", "7b"])
def test_a_name_that_is_a_file_name_is_taken(name: str) -> None:
    assert parse_config(PretrainConfig, ["--run.name", name]).run.name == name


def test_a_recipe_whose_file_name_cannot_name_a_run_is_refused(
    tmp_path: Path, refused: Refusal
) -> None:
    recipe = tmp_path / f"{'x' * 120}.toml"
    recipe.write_text("")
    assert refused("pretrain", recipe).endswith("; give a --run.name")


# --- nesting, digits, byte order marks ------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (f"[train]\nsteps = {DIGITS}\n", "not valid TOML: Exceeds the limit"),
        (f"a = {'[' * 3000}\n", "nested too deeply"),
    ],
)
def test_a_recipe_of_endless_numbers_and_nesting_is_refused(
    tmp_path: Path, refused: Refusal, text: str, message: str
) -> None:
    (tmp_path / "a.toml").write_text(text)
    assert refused("pretrain", tmp_path / "a.toml").startswith(f"{tmp_path}/a.toml: {message}")
    table = text.splitlines()[0]
    if " = " in table:
        assert len(refused("pretrain", "--optimizer.groups", "{" + table + "}")) < MOST_CHARACTERS


@pytest.mark.parametrize(
    "text",
    [f'{{"a": {DIGITS}}}', f'{{"a": {"[" * 3000}{"]" * 3000}}}', '{"a":' * 3000 + "1" + "}" * 3000],
)
def test_json_of_endless_numbers_and_nesting_is_refused(text: str) -> None:
    with pytest.raises(UserError) as caught:
        parse_json(text.encode(), dict[str, Any], "a.json")
    assert str(caught.value).startswith("a.json: ")
    assert len(str(caught.value)) < MOST_CHARACTERS


def test_values_that_cannot_be_printed_are_named_by_their_type() -> None:
    nested: list[Any] = []
    for _ in range(100_000):
        nested = [nested]
    assert quoted(nested) == "a value of type list that is too large to print"
    assert quoted(10**6000) == "a value of type int that is too large to print"


def test_a_byte_order_mark_is_ignored(tmp_path: Path, tiny_tokens: Path) -> None:
    mark = "\ufeff".encode()
    assert parse_toml(mark + b"a = 1", "") == {"a": 1}
    assert parse_json(mark + b'{"a": 1}', dict[str, Any], "") == {"a": 1}
    for path in (tiny_tokens / "tokenizer").iterdir():
        (tmp_path / path.name).write_bytes(mark + path.read_bytes())
    assert Tokenizer.open(tmp_path).hash == Tokenizer.open(tiny_tokens / "tokenizer").hash


def test_a_server_without_models_is_refused(refused: Refusal) -> None:
    assert refused("serve", "--models") == "--models: expected at least one"


# --- the environment ------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["1", "9" * 20])
def test_a_launchers_variable_without_a_rank_is_of_another_time(
    tiny_options: list[str], tmp_path: Path, lmforge: Command, launcher: str
) -> None:
    options = ["pretrain", *tiny_options, "--run.folder", tmp_path, "--train.steps", "2"]
    done = lmforge(*options, LMFORGE_LAUNCHER=launcher)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("MASTER_PORT", "abc"),
        ("RANK", "one"),
        ("WORLD_SIZE", DIGITS),
        ("WORLD_SIZE", "0"),
        ("TORCHELASTIC_RESTART_COUNT", "x"),
    ],
)
def test_nonsense_in_a_launchers_variables_is_refused_at_once(
    tmp_path: Path,
    tiny_options: list[str],
    refused: Refusal,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    value: str,
) -> None:
    launched = {
        "RANK": "0",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": "29511",
    }
    for variable, text in {**launched, name: value}.items():
        monkeypatch.setitem(os.environ, variable, text)
    printed = refused("pretrain", *tiny_options, "--run.folder", tmp_path)
    assert printed.startswith("environment: ")
    assert len(printed) < MOST_CHARACTERS
    assert written(tmp_path) == []


# --- what was meant -------------------------------------------------------------------------------


@pytest.mark.parametrize("verb", ["sft", "distill", "align"])
def test_a_dry_run_of_a_recipe_for_pretraining_is_refused_as_the_run_is(
    tmp_path: Path, refused: Refusal, verb: str
) -> None:
    recipe = tmp_path / "a.toml"
    recipe.write_text("[train]\nsteps = 200\n")
    message = refused(verb, recipe)
    assert message.startswith("model.source: name what to begin from")
    assert refused(verb, recipe, "--dry-run") == message
    recipe.write_text('[run]\nstage = "pretrain"\n')
    assert "this recipe is for `lmforge pretrain`" in refused(verb, recipe, "--dry-run")


def test_rewards_are_required_of_a_dry_run_too(tmp_path: Path, refused: Refusal) -> None:
    words = [
        "align",
        "--method",
        "grpo",
        "--model.source",
        tmp_path,
        "--data.files",
        tmp_path / "a.jsonl",
    ]
    assert refused(*words, "--dry-run").startswith(
        "rollout.reward_functions: name a reward function"
    )


@pytest.mark.parametrize(
    ("sweep", "message"),
    [
        (["train.sedd=1,2"], "--sweep train.sedd: no such option; did you mean train.seed?"),
        (["bench.sweep=a"], "--sweep bench.sweep: no such option"),
        (
            [
                "train.seed=" + ",".join(map(str, range(40))),
                "train.steps=" + ",".join(map(str, range(200, 240))),
            ],
            "1,600 combi",
        ),
        (
            ["train.steps=0,many"],
            (
                "none of its 2 combinations can be timed; the first: --train.steps: expected a"
                " number above 0"
            ),
        ),
    ],
)
def test_a_sweep_of_nonsense_is_refused(
    capfd: pytest.CaptureFixture[str], tiny_options: list[str], sweep: list[str], message: str
) -> None:
    assert run(["bench", *tiny_options, "--bench.output", "json", "--sweep", *sweep]) == 2
    assert message in capfd.readouterr().err.splitlines()[-1]


def test_key_value_heads_that_equal_the_query_heads_follow_them() -> None:
    assert resolve_model_config("124m", {"num_attention_heads": 4}).num_key_value_heads == 4
    assert (
        resolve_model_config(
            "124m", {"num_attention_heads": 4, "num_key_value_heads": 2}
        ).num_key_value_heads
        == 2
    )
    # Grouped.
    assert resolve_model_config("smollm-135m", {"num_attention_heads": 6}).num_key_value_heads == 3


@pytest.mark.parametrize("implementation", ["lmforge", "transformers"])
@pytest.mark.parametrize(("grouped", "expected"), [(6, 4), (2, 2)])
def test_key_value_heads_of_a_folder_follow_too(
    tmp_path: Path, implementation: str, grouped: int, expected: int
) -> None:
    content = to_config_json(get_preset("nano")) | {
        "num_attention_heads": 6,
        "num_key_value_heads": grouped,
    }
    (tmp_path / "config.json").write_text(json.dumps(content))
    config = resolve_model_config(
        tmp_path, {"num_attention_heads": 4}, implementation=implementation
    )
    assert config.num_key_value_heads == expected


@pytest.mark.parametrize(
    "source", ["./x", "../x/y", "/nowhere/x", "here/x", "x", "runs/x", "./models/x"]
)
def test_a_path_that_is_not_there_is_not_looked_up_on_the_hub(
    tmp_path: Path,
    refused: Refusal,
    monkeypatch: pytest.MonkeyPatch,
    tiny_options: list[str],
    source: str,
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path)
    assert not is_hub_name(source)
    options = ["--run.folder", "runs", "--model.source", source]
    printed = refused("pretrain", *options, "--dry-run")
    assert printed.startswith(
        f"{source.removeprefix('./')}: no such file or folder; give a run, a checkpoint"
    )


@pytest.mark.parametrize("name", [".", "", "../here"])
def test_the_current_folder_is_prepared_into_and_another_in_use_is_refused(
    tmp_path: Path, refused: Refusal, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "text.txt").write_text("Words.\n" * 2000)
    monkeypatch.chdir(tmp_path / "here")
    words = ["prepare", str(tmp_path / "text.txt"), name, "--vocab_size", "512", "--workers", "1"]
    assert run(words) == 0
    assert Path("manifest.json").is_file()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["here", "text.txt"]
    monkeypatch.chdir(tmp_path)
    assert (
        refused(*words[:2], ".", *words[3:])
        == ".: exists and is not a preparation; name another folder"
    )
    assert (
        refused(*words[:2], "/", *words[3:])
        == "/: exists and is not a preparation; name another folder"
    )


@pytest.mark.parametrize(
    "words",
    [
        "prepare ~nobody-here/x.txt out",
        "prepare TEXT out --hook ~nobody-here/x.py:f",
        "prepare TEXT out --decontaminate ~nobody-here/x.jsonl",
        "prepare TEXT out --plugins ~nobody-here/x.py",
        "sft --model.source RUN --data.files ~nobody-here/x.jsonl --run.folder out",
        "pretrain --plugins ~nobody-here/x.py --run.folder out",
        "show data ~nobody-here/x.jsonl --tokenizer RUN",
        "evaluate RUN --tasks ~nobody-here/x.jsonl",
    ],
)
def test_a_home_directory_that_nobody_has_is_refused_by_name_and_nothing_is_written(
    tmp_path: Path, tiny_run: Path, refused: Refusal, monkeypatch: pytest.MonkeyPatch, words: str
) -> None:
    (tmp_path / "text.txt").write_text("Words.\n" * 200)
    monkeypatch.chdir(tmp_path)
    printed = refused(*words.replace("TEXT", "text.txt").replace("RUN", str(tiny_run)).split())
    assert re.search(
        r"~nobody-here/x\.\w+: the home directory ~nobody-here is not known; write the path in"
        r" full$",
        printed,
    )
    assert written(tmp_path) == ["text.txt"]


def test_a_name_with_a_revision_is_one_of_the_hub_whatever_folders_there_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "owner").mkdir()
    monkeypatch.chdir(tmp_path)
    assert is_hub_name("owner/model@main")
    assert is_hub_name("other/model")
    assert not is_hub_name("owner/model")


def test_importing_a_hugging_face_folder_says_to_use_it_as_it_is(
    tmp_path: Path, refused: Refusal
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(to_config_json(get_preset("nano"))))
    (tmp_path / "model.safetensors").write_bytes(b"")
    printed = refused("import", tmp_path, tmp_path / "out")
    assert (
        printed
        == f"{tmp_path}: is a Hugging Face folder already; use it as it is: lmforge generate"
        f" {tmp_path}, or --model.source {tmp_path}"
    )


@pytest.mark.parametrize(
    ("rank_info", "says"),
    [
        (RankInfo(0, 2, 0, 2, launched=True), True),
        (RankInfo(0, 4, 0, 2, launched=True), False),
        (RankInfo(), False),
    ],
    ids=["one machine", "two machines", "one process"],
)
def test_ranks_that_share_the_cores_of_one_machine_are_reported(
    rank_info: RankInfo, says: bool
) -> None:
    lines = notes_on_ranks(
        parse_config(PretrainConfig, []), DistributedContext(rank_info, torch.device("cpu"), None)
    )
    assert [line.startswith("2 ranks share the ") for line in lines] == [True] * says
