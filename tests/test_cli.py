"""The command as users see it: arguments, output, a message of one line and an exit status."""

import io
import json
import os
import re
import resource
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from lmforge import cli
from lmforge.core.errors import UserError, typed_command
from lmforge.core.options.load import parse_config
from lmforge.core.options.options import iter_options, validate_options
from lmforge.core.options.stage import PretrainConfig, StageConfig
from lmforge.core.options.verbs import VERBS
from lmforge.post.options.tuning import SftConfig
from tests.conftest import Command, Refusal

# Runs a command line in this process, then tells whether torch came with it.
WITHOUT_TORCH = (
    "import sys; from lmforge.cli import run; status = run(sys.argv[1:]); sys.exit(9 if 'torch' in"
    " sys.modules else status)"
)


def assert_refused(done: subprocess.CompletedProcess[str], message: str) -> None:
    """One line on standard error that ends in `message`, nothing else anywhere, status 2."""
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    assert done.stderr.startswith("lmforge: ")
    assert done.stderr.count("\n") == 1, done.stderr
    assert done.stderr.removeprefix("lmforge: ").rstrip("\n") == message


@pytest.fixture(scope="module")
def helps() -> dict[str, str]:
    """What `VERB --help all` prints, by verb, in one process that has not imported torch."""
    program = (
        "import sys; from lmforge.cli import run\n"
        "for verb in sys.argv[1:]: print('\\f', end=''); assert run([verb, '--help', 'all']) == 0\n"
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, *VERBS], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return dict(zip(VERBS, done.stdout.split("\f")[1:], strict=True))


@pytest.mark.parametrize("verb", VERBS)
def test_help_of_a_verb_lists_every_option_with_meaning_and_default_and_needs_no_torch(
    verb: str, helps: dict[str, str]
) -> None:
    assert f"usage: lmforge {verb} " in helps[verb]
    lines = {}
    for line in helps[verb].splitlines():
        named = re.match(r"  (?:--|\[--\])([\w.-]+) \S.*?  +(.*)", line)
        if named:
            lines[named[1]] = named[2]
    if verb == "pretrain":
        assert {"dry-run", "resume"} <= lines.keys() | set(
            re.findall(r"^  --([\w-]+)", helps[verb], re.M)
        )
    for path, field in iter_options(VERBS[verb].options):
        shown = lines[".".join(path)]
        assert field.description is not None
        assert shown.startswith(field.description)
        assert shown.endswith("(required)" if field.is_required() else ")")
        assert field.is_required() or "(default: " in shown


@pytest.mark.parametrize("verb", VERBS)
def test_help_fits_on_a_screen_and_begins_with_what_is_the_verbs_own(
    verb: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run([verb, "--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 42
    options = list(iter_options(VERBS[verb].options))
    listed = [
        name
        for line in lines
        if (name := re.match(r"  (?:--|\[--\])([\w.]+) ", line)) and name[1] != "resume"
    ]
    listed = [name[1] for name in listed if name[1] in {".".join(path) for path, _ in options}]
    if issubclass(VERBS[verb].options, StageConfig):
        assert lines[-1] == f"lmforge {verb} --help all lists all {len(options)} options"
        first = {
            "align": "align",
            "bench": "bench",
            "distill": "distill",
            "ladder": "ladder",
            "plan": "plan",
        }.get(verb, "data")
        assert listed[0].partition(".")[0] == first
        assert listed[-1].startswith(("run.", "launch."))
    elif essential := VERBS[verb].options.ESSENTIAL:
        assert lines[-1] == f"lmforge {verb} --help all lists all {len(options)} options"
        assert listed == essential.split()
    else:
        assert len(listed) == len(options)


@pytest.mark.parametrize("columns", [80, 200])
def test_help_is_wrapped_to_a_terminal_and_loses_no_word(
    columns: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["align", "--help"]) == 0
    text = capsys.readouterr().out
    wrapped = cli.wrap_help(text, columns)
    assert wrapped.split() == text.split()
    assert max(map(len, wrapped.splitlines())) <= columns
    assert "\n  --align.beta NUMBER " in wrapped


def test_help_of_a_verb_is_found_by_help_verb_too(capfd: pytest.CaptureFixture[str]) -> None:
    for words, usual in (
        (["prepare"], ["prepare", "--help"]),
        (["pretrain", "all"], ["pretrain", "--help", "all"]),
    ):
        assert cli.run(["help", *words]) == 0
        printed = capfd.readouterr().out
        assert cli.run(usual) == 0
        assert printed == capfd.readouterr().out
    assert cli.run(["help", "prepre"]) == 2
    assert "prepre: no such verb; did you mean prepare?" in capfd.readouterr().err


@pytest.mark.parametrize("words", ["--help --help", "-h -h", "help help", "--help -h help"])
def test_help_of_help_is_the_overview(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["--help"]) == 0
    overview = capsys.readouterr().out
    assert cli.run(words.split()) == 0
    assert capsys.readouterr().out == overview


def test_the_warm_up_of_fine_tuning_that_help_names_is_the_one_that_holds(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.run(["sft", "--help"]) == 0
    assert "(default: schedule.warmup_ratio of the run)" in capsys.readouterr().out
    assert SftConfig().schedule.warmup(1000) == 100
    assert SftConfig().schedule.warmup(50) == 5


@pytest.mark.parametrize("verb", VERBS)
def test_the_function_of_a_verb_exists_and_its_help_has_usage_and_summary(verb: str) -> None:
    assert callable(VERBS[verb].load())
    assert VERBS[verb].usage.split()[:2] == ["lmforge", verb]
    assert VERBS[verb].summary


def test_help_answers_in_the_time_that_was_promised() -> None:
    """0.4 s on an idle machine: CPU time, which others on the machine do not change."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(
        [sys.executable, "-m", "lmforge", "align", "--help"],
        check=True,
        stdout=subprocess.DEVNULL,
        timeout=60,
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 0.8


def test_without_arguments_the_verbs_are_listed(lmforge: Command) -> None:
    for words in ([], ["--help"], ["help"], ["-h"]):
        done = lmforge(*words)
        assert done.returncode == 0
        for verb, entry in VERBS.items():
            assert re.search(rf"^  {verb} +{re.escape(entry.summary)}$", done.stdout, re.M)


def test_the_installed_command_prints_its_version() -> None:
    command = Path(sys.executable).with_name("lmforge")
    done = subprocess.run([command, "--version"], capture_output=True, text=True, timeout=60)
    assert re.fullmatch(r"lmforge \d+\.\d+\.\d+\n", done.stdout)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("pretrian", "pretrian: no such verb; did you mean pretrain? lmforge --help lists them"),
        ("xyzzy", "xyzzy: no such verb; lmforge --help lists them"),
        ("--train.steps 5", "--train.steps: no such verb; lmforge --help lists them"),
        ("pretrain --train.stepz 5", "--train.stepz: no such option; did you mean train.steps?"),
        ("pretrain --train.steps many", '--train.steps: expected a whole number, got "many"'),
        ("pretrain --train.steps", "--train.steps: needs a value"),
        ("pretrain --train.steps 0", "--train.steps: expected a number above 0, got 0"),
        ("pretrain --optimizer.lr nan", "--optimizer.lr: expected a finite number, got NaN"),
        (
            "pretrain --train.dtype fp8",
            "--train.dtype: expected 'auto', 'fp32' or 'bf16', got \"fp8\"",
        ),
        (
            "pretrain --resume maybe",
            "--run.resume: expected 'auto', 'never' or 'required', got \"maybe\"",
        ),
        ("pretrain none.toml", "none.toml: no such recipe"),
        (
            "pretrain --train.steps 50",
            "schedule.warmup_steps = 100: more than train.steps = 50; lower them or train longer",
        ),
        (
            "pretrain --train.global_batch_size 6 --train.micro_batch_size 4 --launch.processes 4",
            (
                "a global batch of 6 sequences does not divide by micro-batches of 4; nearest"
                " global_batch_size: 4 or 8"
            ),
        ),
        (
            "pretrain --train.global_batch_size 2 --launch.processes 3",
            (
                "3 ranks for a global batch of 2 sequences: a rank would have none; use at most 2"
                " ranks"
            ),
        ),
        ("prepare --vocab_size 7", "--vocab_size: expected a number above 300, got 7"),
        ("prepare a b c", "unexpected argument 'c'; options begin with --"),
        (
            "evaluate",
            (
                "--model: missing; give a run, a checkpoint, a Hugging Face folder or a name on"
                " the hub"
            ),
        ),
        ("evaluate x --sequences -1", "--sequences: expected a number above 0, got -1"),
        ("generate x --top_p 2", "--top_p: expected a number of at most 1.0, got 2.0"),
        (
            "show nowhere",
            (
                "nowhere: no such file or folder; give a recipe, a run, a checkpoint, a token"
                " folder, a Hugging Face folder, a name on the hub or a preset; `lmforge show"
                " presets` lists the presets"
            ),
        ),
        ("quickstart --processes 0", "--processes: expected a number above 0, got 0"),
    ],
)
def test_a_wrong_command_line_is_refused_in_one_line(
    lmforge: Command, tmp_path: Path, words: str, message: str
) -> None:
    assert_refused(lmforge(*words.split(), cwd=tmp_path), message)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        ("[train]\nsteps = 'many'\n", 'a.toml: train.steps: expected a whole number, got "many"'),
        (
            "[train]\nsteps = 1000\nstep = 5\n",
            "a.toml: train.step: no such option; did you mean train.steps?",
        ),
        ("[trian]\nsteps = 5\n", "a.toml: trian: no such option; did you mean train?"),
        ("train = 5\n", "a.toml: train: expected a section, got 5"),
        ("[run]\noverwrite = 'yes'\n", 'a.toml: run.overwrite: expected true or false, got "yes"'),
        ("[sample]\nprompts = 'import'\n", 'a.toml: sample.prompts: expected a list, got "import"'),
        (
            "[model]\npreset = 'nano'\nsource = 'x'\n",
            "a.toml: model.preset and model.source: give one of them, not both",
        ),
        (
            "[train]\nglobal_batch_tokens = 1000\n[data]\nsequence_length = 256\n",
            (
                "a.toml: train.global_batch_tokens = 1000 is not a multiple of data.sequence_length"
                " = 256; nearest: 768 or 1024"
            ),
        ),
        ("steps = \n", "a.toml: not valid TOML: Invalid value (at line 1, column 9)"),
    ],
)
def test_a_wrong_recipe_is_refused_in_one_line(
    lmforge: Command, tmp_path: Path, recipe: str, message: str
) -> None:
    (tmp_path / "a.toml").write_text(recipe)
    assert_refused(lmforge("pretrain", "a.toml", cwd=tmp_path), message)
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.toml"]


@pytest.mark.parametrize("words", [["pretrain"], ["plan"], ["launch"], ["launch", "run"], ["run"]])
def test_a_recipe_whose_name_is_not_text_is_refused_in_one_line(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: Refusal
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("\udcff.toml").write_text("")
    assert refused(*words, "\udcff.toml") == r"'\udcff.toml': not UTF-8 text"
    assert [path.name for path in tmp_path.iterdir()] == ["\udcff.toml"]


@pytest.mark.parametrize("words", ["'", "", '""', "ssh -o 'a"])
def test_a_command_of_ssh_that_no_shell_reads_is_refused(words: str, refused: Refusal) -> None:
    expected = (
        f"--ssh_command: expected words of a shell, with quotes in pairs, got {json.dumps(words)}"
    )
    assert refused("top", "node1", "--once", "--ssh_command", words) == expected


def test_a_source_that_is_a_link_to_itself_is_refused(tmp_path: Path, refused: Refusal) -> None:
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(
        f'[data]\nsources = [{{folder = "{tmp_path}/loop"}}]\n[run]\nfolder = "{tmp_path}/runs"\n'
    )
    assert refused("pretrain", recipe).startswith(
        f"{tmp_path}/loop/manifest.json: Too many levels of symbolic links"
    )
    assert not any((tmp_path / "runs").iterdir())


@pytest.mark.parametrize(("words", "variables"), [(["--debug"], {}), ([], {"LMFORGE_DEBUG": "1"})])
def test_debug_prints_the_traceback_of_an_error(
    lmforge: Command, words: list[str], variables: dict[str, str]
) -> None:
    """The variable is how --debug reaches the ranks that a verb starts."""
    done = lmforge("pretrain", *words, "--train.steps", "many", **variables)
    assert done.returncode == 1
    assert done.stderr.startswith("Traceback (most recent call last):")
    assert (
        'lmforge.core.errors.UserError: --train.steps: expected a whole number, got "many"'
        in done.stderr
    )


def test_a_dry_run_prints_the_recipe_and_the_arithmetic_and_touches_nothing(
    tmp_path: Path, tiny_tokens: Path
) -> None:
    (tmp_path / "a.toml").write_text(
        f"[data]\nfolder = '{tiny_tokens}'\nsequence_length = 64\n[train]\nglobal_batch_size = 24\n"
    )
    words = [
        "pretrain",
        "a.toml",
        "--dry-run",
        "--launch.processes",
        "2",
        "--train.micro_batch_size",
        "3",
    ]
    command = [sys.executable, "-c", WITHOUT_TORCH, *words]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    arithmetic, _, recipe = done.stdout.partition("\n\n")
    assert [line.split()[0] for line in arithmetic.splitlines()] == [
        "batch",
        "run",
        "data",
        "model",
        "memory",
        "sharding",
        "compute",
    ]
    assert set(tomllib.loads(recipe)) == {"run", "data", "train", "launch"}
    resolved = validate_options(PretrainConfig, tomllib.loads(recipe))
    assert (resolved.run.name, resolved.train.micro_batch_size, resolved.launch.processes) == (
        "a",
        3,
        2,
    )
    assert (
        "24 sequences × 64 tokens = 1,536 tokens per step = 2 data-parallel ranks × 4 micro-batches"
        " × 3 sequences" in arithmetic
    )
    assert "1,000 steps = 1,536,000 tokens" in arithmetic
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.toml"]


def test_a_dry_run_of_everything_prints_every_option(
    tiny_tokens: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["pretrain", "--data.folder", str(tiny_tokens), "--train.seed", "7"]
    assert cli.run([*words, "--dry-run", "all", "--train.steps", "200"]) == 0
    table = tomllib.loads(capsys.readouterr().out.partition("\n\n")[2])
    assert (table["train"]["seed"], table["train"]["steps"], table["optimizer"]["beta1"]) == (
        7,
        200,
        0.9,
    )
    assert cli.run([*words, "--dry-run", "--train.steps", "200"]) == 0
    assert "optimizer" not in tomllib.loads(capsys.readouterr().out.partition("\n\n")[2])


@pytest.mark.parametrize(
    ("words", "resume"),
    [
        ("", "auto"),
        ("--resume", "required"),
        ("--resume --train.steps 500", "required"),
        ("--train.steps 500 --resume never", "never"),
        ("--resume=auto", "auto"),
        ("--run.resume never", "never"),
    ],
)
def test_resume_is_short_for_run_resume(words: str, resume: str) -> None:
    assert parse_config(PretrainConfig, words.split()).run.resume == resume


def test_resume_takes_no_other_value() -> None:
    with pytest.raises(UserError, match="expected 'auto', 'never' or 'required', got \"yes\""):
        parse_config(PretrainConfig, ["--resume", "yes"])


def test_an_incomplete_rank_environment_is_refused_in_one_line(
    lmforge: Command, tmp_path: Path
) -> None:
    done = lmforge("pretrain", cwd=tmp_path, RANK="0")
    absent = "WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT"
    assert_refused(
        done,
        f"environment: RANK or WORLD_SIZE is set but {absent} is not; start with torchrun, or unset"
        " them",
    )


@pytest.mark.parametrize("words", [["pretrain", "--help"], ["show", "presets"], []])
def test_a_reader_that_leaves_ends_the_command_quietly(words: list[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    # As usual, output waits in a buffer: what is short meets the closed pipe only when the command
    # ends.
    usual = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    command = [sys.executable, "-m", "lmforge", *words]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, env=usual, timeout=60)
    os.close(writer)
    assert done.stderr == b""
    assert done.returncode == 128 + signal.SIGPIPE


@pytest.mark.skipif(not Path("/dev/full").is_char_device(), reason="/dev/full is missing")
@pytest.mark.parametrize("words", ["--help", "--version", "pretrain --help all", "show presets"])
@pytest.mark.parametrize("buffered", [True, False])
def test_output_that_nothing_can_be_written_to_ends_the_command_in_one_line(
    words: str, buffered: bool, monkeypatch: pytest.MonkeyPatch, refused: Refusal
) -> None:
    with open("/dev/full", "wb", buffering=-1 if buffered else 0) as raw:
        full = io.TextIOWrapper(raw, write_through=not buffered)
        monkeypatch.setattr(sys, "stdout", full)
        assert (
            refused(*words.split())
            == "standard output: No space left on device; nothing more could be printed"
        )
        full.flush()  # as at exit


@pytest.mark.parametrize("words", ["--help", "show presets"])
def test_a_closed_standard_output_is_refused_in_one_line(
    words: str, monkeypatch: pytest.MonkeyPatch, refused: Refusal
) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    assert (
        refused(*words.split())
        == "standard output is closed; redirect it, to /dev/null where nobody reads it"
    )


MAIN = """
import os, sys
from lmforge import cli
try:
    cli.main()
finally:
    print({name: os.environ.get(name) for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")}, "torch" in sys.modules)
"""


@pytest.mark.parametrize("given", [{}, {"OMP_WAIT_POLICY": "active"}, {"GOMP_SPINCOUNT": "5"}])
def test_threads_that_wait_spin_for_a_short_time_unless_the_user_says_otherwise(
    given: dict[str, str],
) -> None:
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
    }
    command = [sys.executable, "-c", MAIN, "--version"]
    done = subprocess.run(
        command, capture_output=True, text=True, env=environment | given, timeout=60
    )
    expected = {"OMP_WAIT_POLICY": None, "GOMP_SPINCOUNT": None} | (
        given or {"GOMP_SPINCOUNT": str(cli.SPIN_COUNT)}
    )
    assert done.stdout.splitlines()[-1] == f"{expected} False", "it is set before torch is imported"


@pytest.mark.parametrize("is_active", [True, False])
def test_a_command_to_type_is_named_so_that_the_shell_finds_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_active: bool
) -> None:
    folder = tmp_path / ".venv" / "bin"
    folder.mkdir(parents=True)
    (folder / "lmforge").touch(0o755)
    monkeypatch.setattr(sys, "executable", str(folder / "python"))
    monkeypatch.setenv("PATH", str(folder) if is_active else "/usr/bin")
    monkeypatch.chdir(tmp_path)
    assert typed_command() == ("lmforge" if is_active else ".venv/bin/lmforge")
    monkeypatch.chdir("/")
    assert typed_command() == (
        "lmforge" if is_active else str(folder / "lmforge").removeprefix("/")
    )
