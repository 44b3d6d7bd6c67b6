"""Plugins: files and packages of users add names, options and callbacks, and errors in one are
reported in one line.
"""

import email.message
import json
import mailbox
import pickle
import shutil
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest

from lmforge.cli import run as command
from lmforge.core import plugins, registry
from lmforge.core.data.shards.folder import TokenFolder
from lmforge.core.errors import UserError
from lmforge.core.options.builtin_names import BUILT_IN_NAMES, DOCUMENT_SOURCES
from lmforge.core.options.extend import extended
from lmforge.core.options.load import parse_config
from lmforge.core.options.options import Options
from lmforge.core.options.stage import PretrainConfig
from lmforge.post.objectives.policy import build_policy_loss_config
from lmforge.post.options.align import AlignConfig, AlignOptions, RolloutOptions
from lmforge.post.rewards.functions import load_reward_functions
from lmforge.text.sources.text_sources import open_text_source
from tests.conftest import Command

ROOT = Path(__file__).parents[1]
PLUGINS = ROOT / "examples" / "plugins"
TINY = """
[data]
folder = "{folder}"
sequence_length = 32
[model]
hidden_size = 32
intermediate_size = 48
num_hidden_layers = 1
num_attention_heads = 2
[train]
steps = 4
global_batch_size = 4
compile = "off"
dtype = "fp32"
device = "cpu"
[schedule]
warmup_steps = 1
[log]
every_steps = 1
[checkpoint]
every_steps = 2
"""


@pytest.fixture
def recipe(tmp_path: Path, tiny_tokens: Path) -> Path:
    """A recipe of a tiny run, without its first line, which names plugins."""
    path = tmp_path / "tiny.toml"
    path.write_text(TINY.format(folder=tiny_tokens))
    return path


def with_plugin(recipe: Path, code: str, more: str = "", name: str = "mine.py") -> Path:
    """The recipe with a plugin of this code beside it, and with more lines at its end."""
    (recipe.parent / name).write_text(code)
    recipe.write_text(f'plugins = ["{name}"]\n{recipe.read_text()}{more}')
    return recipe


def records(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


# --- names and options ----------------------------------------------------------------------------


def test_what_lmforge_brings_is_registered_and_can_be_imported() -> None:
    for kind, targets in BUILT_IN_NAMES.items():
        assert registry.names(kind)[: len(targets)] == list(targets)
        if kind != "document_source":
            for name in targets:
                assert callable(registry.get(kind, name).load()), (kind, name)


def test_files_of_a_registered_suffix_are_read_by_the_unit_that_it_is_registered_for(
    tmp_path: Path,
) -> None:
    entries = [
        entry for entry in registry.entries("document_source") if entry.origin == registry.BUILT_IN
    ]
    # None is of two kinds.
    assert len(entries) == sum(len(suffixes.split()) for suffixes in DOCUMENT_SOURCES.values())
    pyarrow.parquet.write_table(pyarrow.table({"text": ["a"]}), tmp_path / "a.parquet")
    for entry in entries:
        path = tmp_path / f"a.{entry.name}"
        if entry.name != "parquet":
            path.write_text("text")
        assert {type(unit) for unit in open_text_source(str(path), "text").units()} == {
            entry.load()
        }, entry.name


OPTIONS = """
import lmforge

class Mine(lmforge.Options):
    "What is mine."
    strength: float = lmforge.option(0.5, "how strong it is", ge=0, le=1)

lmforge.register("objective", "my-own", "mine_loss:build", options=Mine)
lmforge.register("optimizer", "my-opt", "mine_loss:build", options=Mine)
"""


def test_options_of_a_plugin_are_in_help_without_torch(recipe: Path) -> None:
    with_plugin(recipe, OPTIONS)
    code = (
        "import sys; from lmforge.cli import run; s = run(sys.argv[1:]); sys.exit(9 if 'torch' in"
        " sys.modules else s)"
    )
    for words in (
        ["pretrain", str(recipe), "--help", "all"],
        ["sft", "--plugins", str(recipe.parent / "mine.py"), "--help", "all"],
    ):
        done = subprocess.run(
            [sys.executable, "-c", code, *words], capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, done.stderr
        assert "[objective.my_own]  objective my-own: What is mine" in done.stdout
        assert "how strong it is (default: 0.5)" in done.stdout
        assert "adamw|muon|my-opt" in done.stdout


def test_importing_lmforge_and_a_plugin_imports_no_torch() -> None:
    for program in (
        "import lmforge",
        f"import lmforge.core.plugins as p; p.load_plugins([{str(PLUGINS / 'focal.py')!r}])",
    ):
        code = f"{program}; import sys; sys.exit('torch' in sys.modules)"
        assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_options_of_a_plugin_are_read_from_recipe_and_command_line_and_checked(
    recipe: Path,
) -> None:
    with_plugin(recipe, OPTIONS, '[objective]\nname = "my-own"\nmy_own.strength = 0.25\n')
    assert parse_config(PretrainConfig, [str(recipe)]).objective.my_own.strength == 0.25
    assert (
        parse_config(
            PretrainConfig, [str(recipe), "--objective.my-own.strength", "1"]
        ).objective.my_own.strength
        == 1
    )
    with pytest.raises(
        UserError, match=r"^--objective.my_own.strength: expected a number of at most 1.0, got 2.0$"
    ):
        parse_config(PretrainConfig, [str(recipe), "--objective.my_own.strength", "2"])
    with pytest.raises(
        UserError,
        match=(
            r"^--objective.my_own.strenth: no such option; did you mean objective.my_own.strength"
        ),
    ):
        parse_config(PretrainConfig, [str(recipe), "--objective.my_own.strenth", "1"])


def test_a_recipe_without_plugins_does_not_know_their_options(recipe: Path) -> None:
    recipe.write_text(f'{recipe.read_text()}[objective]\nname = "my-own"\n')
    with pytest.raises(
        UserError, match=r'objective.name: expected .* or grpo, got "my-own"; a plugin may add it'
    ):
        parse_config(PretrainConfig, [str(recipe)])


def test_an_unknown_name_is_refused_with_the_nearest(recipe: Path) -> None:
    with_plugin(recipe, OPTIONS)
    with pytest.raises(
        UserError, match=r'expected adamw, muon or my-opt, got "my-op"; did you mean my-opt\?$'
    ):
        parse_config(PretrainConfig, [str(recipe), "--optimizer.name", "my-op"])


DECLARED = (
    "class O(lmforge.Options):\n    'x'\n    {}\nlmforge.register('{}', '{}', 'a:b', options=O)"
)


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (None, "no such file"),
        ("def broken(:", "cannot be imported: SyntaxError: invalid syntax"),
        ("1 / 0", "cannot be imported: ZeroDivisionError: division by zero"),
        ("import sys\nsys.exit(3)", "cannot be imported: SystemExit: 3"),
        (
            "lmforge.register('optimizer', 'adamw', 'a:b')",
            "optimizer adamw: this name is taken by lmforge",
        ),
        (
            "lmforge.register('optimiser', 'x', 'a:b')",
            "optimiser: nothing of this kind is registered; did you mean",
        ),
        ("lmforge.register('reward', 'Ünfug', 'a:b')", "expected a name of lower-case letters"),
        (
            "lmforge.register('reward', 'x', 'nowhere')",
            "expected a function, a class or module:name",
        ),
        (
            "lmforge.register('objective', 'x', 'a:b', options=dict)",
            "expected a class derived from lmforge.Options",
        ),
        (
            DECLARED.format("a: int = lmforge.option(..., 'a')", "objective", "x"),
            "the option a has no default",
        ),
        (
            DECLARED.format("a: dict = lmforge.option({}, 'a')", "objective", "x"),
            "an option of a type that no recipe can give",
        ),
        (DECLARED.format("", "optimizer", "lr"), "there is another option lr"),
        ("lmforge.register('model_family', 'x', 'a:b')", "give like="),
    ],
)
def test_a_plugin_that_cannot_be_used_is_refused_in_one_line(
    lmforge: Command, recipe: Path, code: str | None, message: str
) -> None:
    with_plugin(recipe, f"import lmforge\n{code}\n")
    if code is None:
        (recipe.parent / "mine.py").unlink()
    done = lmforge("pretrain", recipe, "--run.folder", recipe.parent / "runs")
    assert done.returncode == 2, done.stderr
    assert done.stderr.count("\n") == 1, done.stderr
    assert f"plugin {recipe.parent / 'mine.py'}" in done.stderr
    assert message in done.stderr
    assert not (recipe.parent / "runs").exists()


def test_nothing_of_a_plugin_that_fails_stays_registered(recipe: Path) -> None:
    with_plugin(recipe, "import lmforge\nlmforge.register('reward', 'early', 'a:b')\n1 / 0\n")
    with pytest.raises(UserError, match="division by zero"):
        parse_config(PretrainConfig, [str(recipe)])
    assert registry.find("reward", "early") is None


def test_a_plugin_that_has_changed_is_loaded_again(recipe: Path) -> None:
    with_plugin(recipe, OPTIONS)
    parse_config(PretrainConfig, [str(recipe)])
    (recipe.parent / "mine.py").write_text(OPTIONS.replace("my-own", "another"))
    assert (
        parse_config(PretrainConfig, [str(recipe), "--objective.name", "another"]).objective.name
        == "another"
    )
    assert registry.find("objective", "my-own") is None


def test_two_ranks_refuse_a_broken_plugin_with_one_line_and_one_status(
    lmforge: Command, recipe: Path
) -> None:
    with_plugin(recipe, "1 / 0\n")
    done = lmforge("pretrain", recipe, "--launch.processes", "2")
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1


VERB = '''
import os


class Greet(lmforge.Options):
    """lmforge greet: say hello."""

    environment: str = lmforge.option("auto", "what starts the ranks")
    processes: int = lmforge.option(1, "ranks", ge=1)


@lmforge.register("verb", "greet", config=Greet, distributed=True)
def greet(options):
    print("hello", os.environ.get("RANK", "alone"), flush=True)
    return 0
'''


def test_ranks_of_a_verb_load_the_plugin_that_has_it(tmp_path: Path, lmforge: Command) -> None:
    (tmp_path / "mine.py").write_text(OPTIONS + VERB)
    done = lmforge("--plugins", tmp_path / "mine.py", "greet", "--processes", "2")
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["hello 0", "hello 1"]


def test_a_verb_that_records_its_plugins_takes_them_after_its_name(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert command(["--plugins", str(tmp_path / "mine.py"), "pretrain"]) == 2
    assert (
        capfd.readouterr().err
        == f"lmforge: --plugins {tmp_path}/mine.py: write it after pretrain\n"
    )


def test_a_verb_has_only_the_facts_of_verbs(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.py").write_text(OPTIONS + VERB.replace("distributed=", "distribute="))
    assert command(["--plugins", str(tmp_path / "mine.py"), "greet"]) == 2
    assert capfd.readouterr().err == "lmforge: verb greet: distribute: a verb has no such fact\n"


def test_an_installed_package_is_found_by_its_entry_point(tmp_path: Path, recipe: Path) -> None:
    site = tmp_path / "site"
    (site / "their_plugin-1.5.dist-info").mkdir(parents=True)
    (site / "their_plugin-1.5.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: their-plugin\nVersion: 1.5\n"
    )
    (site / "their_plugin-1.5.dist-info" / "entry_points.txt").write_text(
        "[lmforge.plugins]\ntheirs = their_plugin\n"
    )
    (site / "their_plugin.py").write_text(OPTIONS.replace("my-own", "theirs"))
    code = "import sys; from lmforge.cli import run; sys.exit(run(sys.argv[1:]))"

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        environment = {"PYTHONPATH": f"{site}:{ROOT}", "PATH": "/usr/bin:/bin"}
        command = [sys.executable, "-c", code, *words]
        return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60)

    assert "objective theirs: What is mine" in run("pretrain", "--help", "all").stdout
    with (site / "their_plugin.py").open("a") as file:
        file.write(VERB)
    assert run("greet").stdout == "hello alone\n"
    assert "say hello" in run("--help").stdout
    (site / "their_plugin.py").write_text("1 / 0")
    done = run("pretrain", "--help")
    assert done.returncode == 2
    assert done.stderr.startswith(
        "lmforge: plugin theirs of their-plugin 1.5: cannot be imported: ZeroDivisionError"
    )
    assert done.stderr.count("\n") == 1


def test_a_config_with_options_of_plugins_can_be_sent_to_other_ranks(recipe: Path) -> None:
    with_plugin(recipe, OPTIONS)
    config = parse_config(PretrainConfig, [str(recipe), "--objective.my_own.strength", "0.125"])
    assert isinstance(config, PretrainConfig)
    assert extended(PretrainConfig) is type(config)
    assert pickle.loads(pickle.dumps(config)) == config


# --- what is trained ------------------------------------------------------------------------------

OPTIMIZER = """
import lmforge

class SignOptions(lmforge.Options):
    "Options of sign descent."
    factor: float = lmforge.option(0.5, "multiplies the learning rate", gt=0, le=1)

@lmforge.register("optimizer", "sign", options=SignOptions, states_per_parameter=0)
def build(groups, optimizer, options):
    import torch

    class Sign(torch.optim.Optimizer):
        def get_or_init_state(self, parameter, group):
            return {}

        @torch.no_grad()
        def step(self):
            for group in self.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        parameter -= group["lr"] * options.factor * parameter.grad.sign()

    return Sign(groups, {"lr": optimizer.lr})

@lmforge.register("schedule", "halves")
def halves(step, steps, schedule, options):
    return 1.0 if step < steps // 2 else 0.5

@lmforge.register("callback", "notes")
class Notes:
    def __init__(self, options):
        self.lines = []

    def note(self, run, *words):
        with open(run.run.path / f"notes-{run.dist_ctx.rank_info.rank}.txt", "a") as file:
            print(*words, file=file)

    def on_run_start(self, run, step, model):
        self.note(run, "start", step, type(model).__name__)

    def on_step_end(self, run, step, metrics):
        self.note(run, "step", step, "loss" in metrics)

    def on_validation_end(self, run, step, metrics):
        self.note(run, "validation", step, sorted(metrics)[-1])

    def on_checkpoint_saved(self, run, step, folder):
        self.note(run, "saved", step, (folder / "manifest.json").exists())

    def on_run_end(self, run, step, state):
        self.note(run, "end", step, state)
"""
CHOSEN = """
[optimizer]
name = "sign"
lr = 1e-3
sign.factor = 0.25
"""


def test_optimizer_schedule_and_callbacks_of_a_plugin_train_on_two_ranks_and_are_recorded(
    lmforge: Command, recipe: Path
) -> None:
    text = recipe.read_text().replace(
        "warmup_steps = 1", 'warmup_steps = 1\nname = "halves"\nmin_lr_ratio = 0.0'
    )
    recipe.write_text(text.replace("[train]", '[train]\ncallbacks = ["notes"]'))
    with_plugin(recipe, OPTIMIZER, CHOSEN)
    run = recipe.parent / "runs" / "tiny"
    where = ["--run.folder", run.parent]
    done = lmforge("pretrain", recipe, *where, "--launch.processes", "2")
    assert done.returncode == 0, done.stderr
    assert [record["lr"] for record in records(run)] == pytest.approx([5e-4, 1e-3, 5e-4, 5e-4])
    for rank in (0, 1):
        notes = (run / f"notes-{rank}.txt").read_text().splitlines()
        assert notes[0] == "start 0 Decoder"
        assert [line for line in notes if line.startswith("step")] == [
            f"step {step} True" for step in (1, 2, 3, 4)
        ]
        assert {"saved 2 True", "saved 4 True", "validation 4 val/loss", "end 4 done"} <= set(notes)
    # The plugin is kept with the run, and the checkpoint says which it was.
    assert (run / "plugins" / "mine.py").read_text() == OPTIMIZER
    manifest = json.loads((run / "checkpoints" / "step-00000004" / "manifest.json").read_text())
    assert list(manifest["written_by"]["plugins"]) == ["mine.py"]
    assert manifest["recipe"]["optimizer"]["sign"] == {"factor": 0.25}
    # Looked at without its plugin, and gone on with a changed one, which is said.
    (recipe.parent / "mine.py").write_text(OPTIMIZER + "# changed\n")
    assert lmforge("runs", run.parent).returncode == 0
    done = lmforge("pretrain", recipe, *where, "--train.steps", "5")
    assert done.returncode == 0, done.stderr
    assert "plugins differ from those of that checkpoint: mine.py has changed" in done.stdout
    assert records(run)[-1]["step"] == 5


def test_a_callback_that_raises_on_one_rank_ends_the_run_on_all(
    lmforge: Command, recipe: Path
) -> None:
    code = """
import lmforge

@lmforge.register("callback", "raises")
class Raises:
    def __init__(self, options):
        pass

    def on_step_end(self, run, step, metrics):
        if step == 3 and run.dist_ctx.rank_info.rank == 1:
            raise ValueError("enough")
"""
    with_plugin(recipe, code)
    where = ["--run.folder", recipe.parent / "runs"]
    done = lmforge(
        "pretrain",
        recipe,
        *where,
        "--train.callbacks",
        "raises",
        "--launch.processes",
        "2",
        "--launch.max_restarts",
        "0",
    )
    assert done.returncode == 1
    assert "callback raises: on_step_end raised ValueError: enough" in done.stderr
    assert "last checkpoint: " in done.stderr
    run = recipe.parent / "runs" / "tiny"
    assert [record["step"] for record in records(run)][-1] == 3
    # Rank 0, which it did not raise on, ended with the same error, and wrote it down.
    last = json.loads((run / "events.jsonl").read_text().splitlines()[-1])
    assert (last["kind"], last["state"]) == ("end", "failed")
    assert "on_step_end raised ValueError: enough" in last["error"]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (
            "def on_stepend(self, run, step, metrics): pass",
            "on_stepend is no point of a run; there are on_run_start",
        ),
        ("pass", "has no method that is one"),
        ("def __init__(self, options): raise KeyError('x')", "raised KeyError: 'x'"),
    ],
)
def test_a_callback_that_is_none_is_refused_before_anything_is_written(
    lmforge: Command, recipe: Path, body: str, message: str
) -> None:
    init = "" if "__init__" in body else "    def __init__(self, options): pass\n"
    with_plugin(
        recipe,
        "import lmforge\n@lmforge.register('callback', 'none')\nclass Nothing:\n   "
        f" {body}\n{init}",
    )
    done = lmforge(
        "pretrain", recipe, "--run.folder", recipe.parent / "runs", "--train.callbacks", "none"
    )
    assert done.returncode == 2, done.stderr
    assert message in done.stderr
    assert not (recipe.parent / "runs" / "tiny" / "recipe.toml").exists()


def test_an_objective_with_its_options_changes_what_is_learned_and_resumes(
    lmforge: Command, recipe: Path
) -> None:
    for name in ("focal.py", "focal_loss.py"):
        shutil.copy(PLUGINS / name, recipe.parent)
    recipe.write_text(f'plugins = ["focal.py"]\n{recipe.read_text()}[objective]\nname = "focal"\n')
    runs = recipe.parent / "runs"
    losses = {}
    for name, words in {
        "plain": ["--objective.name", "next-token"],
        "zero": ["--objective.focal.gamma", "0"],
        "two": [],
    }.items():
        done = lmforge("pretrain", recipe, "--run.folder", runs, "--run.name", name, *words)
        assert done.returncode == 0, done.stderr
        losses[name] = records(runs / name)
    assert [each["loss"] for each in losses["zero"]] == pytest.approx(
        [each["loss"] for each in losses["plain"]], rel=1e-6
    )
    assert losses["two"][-1]["loss"] != pytest.approx(losses["plain"][-1]["loss"], rel=1e-6)
    assert 0 < losses["two"][-1]["focal"] < losses["two"][-1]["loss"]
    assert losses["two"][-1]["val/focal"] > 0
    done = lmforge("pretrain", runs / "two" / "recipe.toml", "--train.steps", "6")
    assert done.returncode == 0, done.stderr
    assert records(runs / "two")[-1]["step"] == 6


@pytest.mark.slow
def test_a_model_family_of_a_plugin_trains_and_is_opened_with_it(
    lmforge: Command, recipe: Path
) -> None:
    (recipe.parent / "quiet_llama.py").write_text(
        "from lmforge.core.model.modules.decoder import Decoder\n\n"
        "class QuietLlama(Decoder):\n"
        "    def forward(self, *arguments, **named):\n"
        "        return 0.5 * super().forward(*arguments, **named)\n"
    )
    code = (
        'import lmforge\nlmforge.register("model_family", "quiet", "quiet_llama:QuietLlama",'
        ' like="llama")\n'
    )
    with_plugin(recipe, code)
    runs = recipe.parent / "runs"
    first = {}
    for family in ("llama", "quiet"):
        words = ["--run.folder", runs, "--run.name", family, "--model.model_type", family]
        done = lmforge("pretrain", recipe, *words)
        assert done.returncode == 0, done.stderr
        first[family] = records(runs / family)[0]["loss"]
    assert first["llama"] != first["quiet"], "its arithmetic is used"
    words = ["evaluate", runs / "quiet", "--sequences", "4", "--device", "cpu", "--output", "json"]
    refused = lmforge(*words)
    assert refused.returncode == 2
    assert 'model_type: "quiet" is not supported' in refused.stderr
    done = lmforge(*words, "--plugins", recipe.parent / "mine.py")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["loss"] > 0


def test_a_family_like_gpt2_is_refused_where_gpt2_is(lmforge: Command, recipe: Path) -> None:
    code = (
        'import lmforge\nlmforge.register("model_family", "mine",'
        ' "lmforge.core.model.modules.gpt2:GPT2", like="gpt2")\n'
    )
    words = [
        "--model.model_type",
        "mine",
        "--parallel.tensor_parallel_degree",
        "2",
        "--launch.processes",
        "2",
        "--dry-run",
    ]
    done = lmforge("pretrain", with_plugin(recipe, code), *words)
    assert done.returncode == 2
    assert (
        "parallel.tensor_parallel_degree = 2: gpt2 keeps queries, keys and values in one matrix"
        in done.stderr
    )


# --- documents and rewards ------------------------------------------------------------------------


def write_mail(path: Path, count: int) -> None:
    box = mailbox.mbox(path)
    for number in range(count):
        message = email.message.EmailMessage()
        message["From"], message["Subject"] = "someone@example.org", f"Subject {number} – é"
        message.set_content(
            f"Message {number} says something.\nFrom here it goes on.\n> quoted {number}\n"
        )
        box.add(message)
    box.flush()
    box.close()


def documents(folder: Path) -> list[str]:
    opened, texts = TokenFolder.open(str(folder)), []
    for name in ("train", "validation"):
        split = opened.split(name)
        starts = [0, *map(int, split.document_starts(0, split.num_tokens)), split.num_tokens]
        for start, stop in pairwise(starts):
            if stop > start:
                texts.append(opened.tokenizer.decode(split.read(start, stop).tolist()))
    return texts


def test_mail_is_read_by_a_plugin_with_its_options_by_several_workers(
    lmforge: Command, tmp_path: Path
) -> None:
    for name, count in (("a.mbox", 30), ("b.mbox", 20)):
        (tmp_path / "mail").mkdir(exist_ok=True)
        write_mail(tmp_path / "mail" / name, count)
    common = ["--plugins", PLUGINS / "mbox_source.py", "--tokenizer", "bytes"]
    done = lmforge("prepare", tmp_path / "mail", tmp_path / "out", *common, "--workers", "2")
    assert done.returncode == 0, done.stderr
    read = "\n".join(documents(tmp_path / "out"))
    assert len(documents(tmp_path / "out")) == 50
    assert "Subject: Subject 29 – é" in read
    assert "\nFrom here it goes on." in read
    assert "quoted" not in read
    assert (
        "nothing to do"
        in lmforge("prepare", tmp_path / "mail", tmp_path / "out", *common, "--workers", "1").stdout
    )
    # Other options are another preparation.
    done = lmforge(
        "prepare",
        tmp_path / "mail",
        tmp_path / "out",
        *common,
        "--mbox.quotes",
        "--mbox.headers",
        "false",
    )
    assert done.returncode == 2
    words = ["--mbox.quotes", "--mbox.headers", "false", "--overwrite"]
    assert lmforge("prepare", tmp_path / "mail", tmp_path / "out", *common, *words).returncode == 0
    read = "\n".join(documents(tmp_path / "out"))
    assert "> quoted 7" in read
    assert "Subject" not in read


def test_mail_is_refused_without_its_plugin_and_where_it_is_none(
    lmforge: Command, tmp_path: Path
) -> None:
    write_mail(tmp_path / "mail.mbox", 3)
    done = lmforge("prepare", tmp_path / "mail.mbox", tmp_path / "out")
    assert done.returncode == 2
    assert ".mbox files are not read" in done.stderr
    (tmp_path / "mail.mbox").write_text("no mail\n")
    done = lmforge(
        "prepare", tmp_path / "mail.mbox", tmp_path / "out", "--plugins", PLUGINS / "mbox_source.py"
    )
    assert done.returncode == 2, done.stderr
    assert "no mbox file" in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_reward_of_a_plugin_is_called_with_its_options(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "import lmforge\nclass O(lmforge.Options):\n    'x'\n    most: int = lmforge.option(3,"
        " 'most words', gt=0, le=100)\n@lmforge.register('reward', 'short', options=O)\ndef"
        " short(prompts, completions, options):\n    return [float(len(text.split()) <="
        " options.most) for text in completions]\n"
    )
    plugins.load_plugins([tmp_path / "mine.py"])
    for options, expected in (({}, [1.0, 1.0]), ({"short": '{"most": 1}'}, [1.0, 0.0])):
        with load_reward_functions(["short"], options=options) as rewards:
            assert (
                rewards(["p", "p"], ["one", "one two"], {"other": ["a", "b"]}).rewards == expected
            )


def test_an_algorithm_of_a_plugin_is_a_loss_whose_switches_the_recipe_overrides(
    tmp_path: Path,
) -> None:
    (tmp_path / "mine.py").write_text(
        "import lmforge\nfrom lmforge.post.objectives.policy import PolicyLossConfig\n"
        "@lmforge.register('algorithm', 'mine', reads_reference=True)\ndef mine():\n"
        "    return PolicyLossConfig(epsilon=0.3, kl_estimator='k2', beta=0.1)\n"
    )
    plugins.load_plugins([tmp_path / "mine.py"])
    config = build_policy_loss_config(RolloutOptions(loss_type="mine", beta=0.2))
    assert (config.epsilon, config.kl_estimator, config.beta) == (0.3, "k2", 0.2)
    options = AlignOptions(method="grpo", reference="copy")
    recipe = AlignConfig(align=options, rollout=RolloutOptions(loss_type="mine"))
    assert recipe.copies_reference


@pytest.mark.parametrize("kind", ["packing", "stage", "monitor", "weight_source"])
def test_names_of_kinds_that_only_lmforge_registers_are_refused(kind: str) -> None:
    with pytest.raises(UserError, match=f"^{kind} mine: only lmforge registers names of this kind"):
        registry.register(kind, "mine", "my_module:thing")


def test_an_observer_has_no_options() -> None:
    class Own(Options):
        """Of nothing."""

    with pytest.raises(UserError, match="this kind has no options; leave them out"):
        registry.register("observer", "mine", "my_module:thing", options=Own)


OBSERVING = """
from lmforge.core import registry
from lmforge.core.stages.observer import Observer


class Steps(Observer):
    @classmethod
    def open(cls, config, inputs, resumes):
        return {"steps": config.train.steps, "resumes": resumes}

    def __init__(self, run):
        super().__init__(run)
        self.opened, self.file = run.inputs.opened["steps"], run.ctx.run.path / "observed.txt"

    def on_step_end(self, step, record, is_stopping):
        with self.file.open("a") as file:
            file.write(f"{step} of {self.opened['steps']}, {self.opened['resumes']}\\n")

    def close(self):
        with self.file.open("a") as file:
            file.write("closed\\n")


def refuse(config, run):
    if run.path.name == "refused":
        raise ValueError("no run of this name")


registry.register("observer", "steps", Steps)
registry.register("run_check", "names", refuse)
"""


def test_an_observer_and_a_check_of_a_plugin_see_a_run(
    tiny_options: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "observing.py").write_text(OBSERVING)
    words = [
        "pretrain",
        *tiny_options,
        "--plugins",
        str(tmp_path / "observing.py"),
        "--run.folder",
        str(tmp_path),
    ]
    for steps in ("2", "3"):
        assert command([*words, "--run.name", "a", "--train.steps", steps]) == 0
    seen = (tmp_path / "a" / "observed.txt").read_text().splitlines()
    assert seen == ["1 of 2, False", "2 of 2, False", "closed", "3 of 3, True", "closed"]
    capfd.readouterr()
    assert command([*words, "--run.name", "refused", "--train.steps", "2"]) == 2
    assert "run_check names: raised ValueError: no run of this name" in capfd.readouterr().err


ONE_OF_EACH = '''
import json
import lmforge
from lmforge.core.options.activation_checkpointing import FullCheckpointing


class FirstBlock(FullCheckpointing):
    name = "first-block"
    summary = "of the first block"

    def recomputes_block(self, number, every):
        return number == 1


lmforge.register("checkpointing_mode", "first-block", FirstBlock)


class GreetOptions(lmforge.Options):
    """lmforge greet: say hello."""
    whom: str = lmforge.option("you", "who is greeted")


@lmforge.register("verb", "greet", config=GreetOptions)
def greet(options):
    print(f"hello {options.whom}")
    return 0


@lmforge.register("optimizer", "plain", states_per_parameter=2)
def plain(groups, options, own):
    import torch
    return torch.optim.AdamW(groups, lr=options.lr)


@lmforge.register("tracker", "lines")
class Lines:
    url = None

    def __init__(self, run):
        self.run_id, self.path = "one", run.path / "lines.txt"

    def log_metrics(self, step, values):
        with open(self.path, "a") as file:
            print(step, "loss" in values, file=file)

    def log_table(self, table): pass
    def attach(self, report): pass
    def close(self, state): pass


@lmforge.register("algorithm", "mine")
def mine():
    from lmforge.post.objectives.policy import PolicyLossConfig
    return PolicyLossConfig(epsilon=0.3)


@lmforge.register("document_source", "one")
def one(file, options):
    for line in file:
        yield {"text": line.decode()}


lmforge.register("model_family", "quiet", "quiet_llama:QuietLlama", like="llama")
'''


def test_one_file_adds_one_of_each_and_a_run_uses_them(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plugin = tmp_path / "one_of_each.py"
    plugin.write_text(ONE_OF_EACH)
    (tmp_path / "quiet_llama.py").write_text(
        "from lmforge.core.model.modules.decoder import Decoder\n\n"
        "class QuietLlama(Decoder):\n"
        "    def forward(self, *arguments, **named):\n"
        "        return 0.5 * super().forward(*arguments, **named)\n"
    )
    assert command(["--plugins", str(plugin), "greet", "--whom", "them"]) == 0
    assert capsys.readouterr().out == "hello them\n"
    assert command(["--plugins", str(plugin), "--help"]) == 0
    assert "say hello" in capsys.readouterr().out
    (tmp_path / "text.one").write_text("One line.\nAnd another.\n" * 20)
    words = ["prepare", str(tmp_path / "text.one"), str(tmp_path / "out"), "--tokenizer", "bytes"]
    assert command([*words, "--plugins", str(plugin), "--workers", "1"]) == 0
    assert len(documents(tmp_path / "out")) == 40
    chosen = {
        "--plugins": plugin,
        "--run.folder": tmp_path / "runs",
        "--run.name": "own",
        "--model.model_type": "quiet",
        "--optimizer.name": "plain",
        "--parallel.activation_checkpointing": "first-block",
        "--log.trackers": "lines",
    }
    words = [str(word) for pair in chosen.items() for word in pair]
    assert command(["pretrain", str(recipe), *words]) == 0
    lines = (tmp_path / "runs" / "own" / "lines.txt").read_text().splitlines()
    assert [line for line in lines if line.endswith("True")] == [f"{n} True" for n in (1, 2, 3, 4)]
    assert build_policy_loss_config(RolloutOptions(loss_type="mine")).epsilon == 0.3
