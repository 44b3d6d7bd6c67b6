"""`lmforge ladder`: which rungs it plans, what it refuses, that it goes on wherever it was killed,
and what it writes.
"""

import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from lmforge.cli import run
from lmforge.core.errors import UserError
from lmforge.core.model.parametrization import relative_to_base
from lmforge.core.options.load import parse_config
from lmforge.core.options.stage import PretrainConfig
from lmforge.core.records.manifests import read_manifest
from lmforge.core.records.runs import MANIFEST, Run
from lmforge.core.stages.training_data import TokenSources
from lmforge.hf.resolve import model_config_from_options
from lmforge.lab.ladder.law import LEAST_OTHERS, SHORT_STEPS
from lmforge.lab.ladder.rungs import (
    LEAST_STEPS,
    LEAST_USED,
    Trial,
    best_rate,
    make_rung,
    resized,
    shapes,
    with_changes,
)
from lmforge.lab.ladder.runs import Reached, check_same_text, read_reached
from lmforge.lab.ladder.text import adopt, repeated
from lmforge.lab.options.ladder import Budget, LadderConfig
from lmforge.text.prepare.prepare import prepare
from tests.conftest import Command, Refusal

RECIPE = """
[data]
folder = "{tokens}"
sequence_length = 16
[model]
hidden_size = 64
intermediate_size = 160
num_hidden_layers = 4
num_attention_heads = 8
num_key_value_heads = 4
[train]
steps = 20000
global_batch_size = 2
dtype = "fp32"
device = "cpu"
compile = "off"
threads = 1
[optimizer]
lr = 1e-2
[schedule]
warmup_steps = 2000
[validation]
sequences = 8
"""
# A ladder of five rungs of 100 steps and more.
SMALL = [
    "--ladder.sizes",
    "2",
    "--ladder.tokens_per_parameter",
    "0.15",
    "0.2",
    "0.3",
    "--budget",
    "0.02",
]
RATES = ["--ladder.learning_rates", "5e-3", "1e-2"]
PLANNED = ["--gpu_type", "a100-80"]


@pytest.fixture
def recipe(tiny_tokens: Path) -> Path:
    """The recipe of a big run, in the test's folder."""
    Path("big.toml").write_text(RECIPE.format(tokens=tiny_tokens))
    return Path("big.toml")


@pytest.fixture
def target(recipe: Path) -> Trial:
    config = parse_config(PretrainConfig, [str(recipe)])
    return Trial(config, model_config_from_options(config.model, 512))


@pytest.mark.parametrize(
    ("text", "budget"),
    [
        ("0.1", Budget(0.1, "share")),
        ("10%", Budget(0.1, "share")),
        ("1e18", Budget(1e18, "FLOPs")),
        ("2.5h", Budget(2.5, "GPU-hours")),
        ("500$", Budget(500, "price")),
        ("1e-2", Budget(0.01, "share")),
    ],
)
def test_a_budget_is_a_share_flops_hours_or_a_price(text: str, budget: Budget) -> None:
    assert parse_config(LadderConfig, ["--budget", text]).ladder.budget == budget
    if budget.unit != "share":
        assert parse_config(LadderConfig, ["--ladder.target", text]).ladder.target == budget


@pytest.mark.parametrize("text", ["-1", "0", "some", "1e999", "true"])
def test_other_words_are_no_budget(text: str) -> None:
    with pytest.raises(UserError, match=r"--ladder\.budget: expected a share such as 0\.1, "):
        parse_config(LadderConfig, ["--budget", text])


def test_smaller_models_have_the_proportions_of_the_big_one(target: Trial) -> None:
    models = shapes(target.model)
    assert len(models) == 8
    assert models[-1] == target.model
    for model in models:
        assert model.head_dim == target.model.head_dim
        assert model.hidden_size == model.num_attention_heads * model.head_dim
        assert abs(model.intermediate_size / model.hidden_size - 2.5) <= 0.5
        if model.num_attention_heads % 2 == 0:
            assert model.num_attention_heads == 2 * model.num_key_value_heads


def test_a_rung_has_the_big_runs_data_and_settings_and_a_schedule_of_its_own(target: Trial) -> None:
    shape = shapes(target.model)[3]
    rung = make_rung(target, shape, 64_000, 512, Path("ladder"))
    big, config = target.config, rung.config
    assert config.train.steps == 2000
    assert config.schedule.warmup(2000) == 200
    assert config.validation.every_steps == 400
    for same in ("sequence_length", "folder", "sources"):
        assert getattr(config.data, same) == getattr(big.data, same)
    assert (config.train.seed, config.train.global_batch_size) == (
        big.train.seed,
        big.train.global_batch_size,
    )
    # The big run's settings are for its own model: a narrower one has larger rates.
    assert relative_to_base(config.model, rung.model).width == shape.hidden_size / 64
    assert relative_to_base(config.model, rung.model).depth == shape.num_hidden_layers / 4


def test_phases_of_a_rung_are_shorter_in_proportion(target: Trial, tiny_tokens: Path) -> None:
    data = target.config.data.model_dump(mode="json") | {
        "phases": [{"steps": 5000, "sequence_length": 8}, {"steps": 2500}, {}]
    }
    config = PretrainConfig.model_validate_json(
        json.dumps(target.config.model_dump(mode="json") | {"data": data})
    )
    rung = make_rung(
        replace(target, config=config), shapes(target.model)[0], 64_000, 512, Path("ladder")
    )
    assert [phase.steps for phase in rung.config.data.phases] == [500, 250, None]


def test_a_chosen_run_has_the_proportions_of_the_recipes(target: Trial) -> None:
    changes = {
        "schedule": {"name": "warmup-stable-decay", "warmup_steps": 8000, "decay_steps": 4000},
        "data": {"phases": [{"steps": 15_000}, {"steps": 5000}]},
        "validation": {"every_steps": 2000},
    }
    big = Trial(with_changes(target.config, changes), target.model)
    for steps in (100_000, 5000):
        chosen = resized(big, shapes(target.model)[3], steps * 32, 512).config
        share = steps / 20_000
        assert chosen.train.steps == steps
        assert (chosen.schedule.warmup(steps), chosen.schedule.decay_steps) == (
            8000 * share,
            4000 * share,
        )
        assert [phase.steps for phase in chosen.data.phases] == [15_000 * share, None]
        assert chosen.validation.every_steps == 2000 * share


@pytest.mark.slow
def test_a_ladder_costs_at_most_its_budget_and_says_so_first(
    recipe: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(["ladder", str(recipe), "--budget", "0.1", "--ladder.dry_run", *PLANNED]) == 0
    lines = capfd.readouterr().out.splitlines()
    (ladder,) = (line for line in lines if line.startswith("ladder "))
    assert 1 < (share := float(ladder.rpartition(": ")[2].partition("%")[0])) <= 10, ladder
    assert any(line.startswith("unused ") for line in lines) == (share < 10 * LEAST_USED)
    assert not Path("runs").exists()


def test_a_plan_says_why_much_of_a_budget_stays_unused(
    recipe: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for budget, reason in (
        ("100000%", "no larger size is below it"),
        ("1000%", "the next larger size takes "),
    ):
        words = ["--budget", budget, "--ladder.sizes", "2", "--ladder.dry_run", *PLANNED]
        assert run(["ladder", str(recipe), *words]) == 0
        (line,) = (
            line for line in capfd.readouterr().out.splitlines() if line.startswith("unused ")
        )
        assert f"% of the budget: {reason}" in line


def test_rungs_that_the_fit_would_leave_out_are_not_planned(
    recipe: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def steps(lengths: str) -> list[int]:
        sizes = [
            "--train.global_batch_size",
            "32",
            "--ladder.tokens_per_parameter",
            *lengths.split(),
            "--budget",
            "100000%",
        ]
        assert run(["ladder", str(recipe), *sizes, "--ladder.dry_run", *PLANNED]) == 0
        return [
            int(line.split()[-2].replace(",", ""))
            for line in capfd.readouterr().out.splitlines()
            if line.endswith(" steps")
        ]

    many, few = steps("3 5 10 20 40"), steps("3 5")
    assert (len(many) >= LEAST_OTHERS, min(many) >= SHORT_STEPS) == (True, True), many
    assert (len(few) < LEAST_OTHERS, LEAST_STEPS <= min(few) < SHORT_STEPS) == (True, True), few


def test_hours_and_prices_are_budgets(
    recipe: Path, capfd: pytest.CaptureFixture[str], refused: Refusal
) -> None:
    assert (
        run(
            [
                "ladder",
                str(recipe),
                "--budget",
                "0.05h",
                "--ladder.dry_run",
                "--price",
                "2",
                *PLANNED,
            ]
        )
        == 0
    )
    hours = capfd.readouterr().out
    assert (
        run(
            [
                "ladder",
                str(recipe),
                "--budget",
                "0.1$",
                "--ladder.dry_run",
                "--price",
                "2",
                *PLANNED,
            ]
        )
        == 0
    )
    assert capfd.readouterr().out == hours
    assert "add --price" in refused(
        "ladder", recipe, "--budget", "5$", "--ladder.dry_run", *PLANNED
    )
    # Before anything is trained.
    assert "add --price" in refused(
        "ladder", recipe, "--budget", "0.1", "--ladder.target", "5$", *PLANNED
    )
    assert (
        run(
            [
                "ladder",
                str(recipe),
                "--budget",
                "0.1",
                "--ladder.target",
                "3e12",
                "--ladder.dry_run",
                *PLANNED,
            ]
        )
        == 0
    )
    assert "pays 3e+12 FLOPs" in capfd.readouterr().out


def test_a_gpu_that_is_given_is_counted_with_also_where_it_is_the_default(
    recipe: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(["ladder", str(recipe), *SMALL, "--ladder.dry_run", "--gpu_type", "h100-80"]) == 0
    assert "of GPU (h100-80)\n" in capfd.readouterr().out


@pytest.mark.slow
def test_a_share_is_of_the_run_that_ladder_target_pays(
    recipe: Path, capfd: pytest.CaptureFixture[str], target: Trial
) -> None:
    paid, outs = 4 * target.flops, []
    for budget in ("0.02", f"{0.02 * paid}"):
        words = [
            "--budget",
            budget,
            "--ladder.target",
            f"{paid}",
            *SMALL[:-2],
            "--ladder.dry_run",
            *PLANNED,
        ]
        assert run(["ladder", str(recipe), *words]) == 0
        outs.append(capfd.readouterr().out)
    assert outs[0] == outs[1]
    (share,) = re.findall(r": ([\d.]+)% of the target's FLOPs", outs[0])
    assert 0.5 < float(share) <= 2
    assert (
        run(
            [
                "ladder",
                str(recipe),
                *words[:2],
                "--ladder.target",
                f"{400 * target.flops}",
                *words[4:],
            ]
        )
        == 0
    )
    assert "far        the target has " in capfd.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("", "--ladder.budget: say what the rungs may cost"),
        ("--budget much", "--ladder.budget: expected a share such as 0.1, FLOPs such as 1e18"),
        ("--budget 0.1 --ladder.target 0.1", "--ladder.target: expected FLOPs such as 1e18"),
        ("--budget 1e6", "--ladder.budget: the smallest ladder of this recipe takes"),
        (
            "--budget 0.1 --train.global_batch_size 16384",
            "rungs of this recipe would have fewer than 100 steps",
        ),
        ("--budget 0.1 --ladder.target 1e30", "--ladder.target: it pays 1"),
        ("--budget 0.1 --ladder.target 1e3", "--ladder.target: it pays 1"),
        ("--ladder.runs runs/a runs/b runs/../runs/a", 'runs/a" twice; leave one out'),
        (
            "--budget 0.1 --ladder.mixtures p/mix.toml q/mix.toml",
            '--ladder.mixtures: "mix" twice; rename one',
        ),
        (
            "--budget 0.1 --ladder.tokens_per_parameter 5 10 10",
            '--ladder.tokens_per_parameter: "10" twice',
        ),
        (
            "--budget 0.1 --ladder.learning_rates 1e-3 0.001",
            '--ladder.learning_rates: "0.001" twice',
        ),
        (
            "--budget 0.1 --ladder.tokens_per_parameter 20",
            "--ladder.tokens_per_parameter: give two numbers or more",
        ),
        ("--budget 0.1 --train.epochs 2", "train.epochs = 2: a ladder counts tokens"),
        ("--ladder.runs runs/none", "runs/none: no run of lmforge"),
        ("--budget 0.1 --ladder.mixtures none.toml", "none.toml: no such recipe"),
        ("--budget 0.1 --gpu_type none", "none"),
        ("--budget 0.1 --ladder.dry_run --validation.tasks none.jsonl", "none.jsonl"),
    ],
)
def test_what_no_ladder_leads_from_is_refused_in_one_line(
    recipe: Path, refused: Refusal, options: str, message: str
) -> None:
    assert message in refused("ladder", recipe, *PLANNED, *options.split())
    assert not Path("runs").exists()


def test_more_than_four_passes_and_a_far_target_are_said(
    recipe: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(["ladder", str(recipe), "--ladder.dry_run", *PLANNED, *SMALL]) == 0
    out = capfd.readouterr().out
    assert "epochs     the target reads tokens" in out
    assert "times the FLOPs of the largest rung" in out


def test_each_run_that_reads_its_data_too_often_is_named(target: Trial) -> None:
    rungs = [
        make_rung(target, shapes(target.model)[1], tokens, 512, Path("ladder"))
        for tokens in (64_000, 480_000, 560_000)
    ]
    lines = repeated(target, rungs, TokenSources.open(target.config))
    assert [line.partition(" reads ")[0] for line in lines] == [
        "the target",
        rungs[1].name,
        rungs[2].name,
    ]
    of_fewer, of_more = (
        repeated(target, [], TokenSources.open(target.config), times * target.tokens)
        for times in (0.01, 2)
    )
    assert of_fewer == lines[:1]
    read, best = (float(line.split(" reads tokens ")[1].split()[0]) for line in of_more)
    assert of_more[1].startswith("the best run for as many FLOPs reads ")
    assert best == pytest.approx(2 * read, abs=0.2)


def test_mixtures_with_other_held_out_text_are_refused(
    recipe: Path, tiny_tokens: Path, refused: Refusal
) -> None:
    shutil.copytree(tiny_tokens, "other")
    for name, weights in (("a", "1.0"), ("b", "3.0")):
        Path(f"{name}.toml").write_text(
            f'[data]\nsources = [{{folder = "{tiny_tokens}", weight = {weights}}}]\n'
        )
    Path("c.toml").write_text('[data]\nsources = [{folder = "other"}]\n')
    Path("d.toml").write_text("[train]\nsteps = 3\n")
    ladder = ["ladder", recipe, "--budget", "0.2", *PLANNED, "--ladder.mixtures", "a.toml"]
    assert run([str(word) for word in (*ladder, "b.toml", "--ladder.dry_run")]) == 0
    assert "c has other sources than a" in refused(*ladder, "c.toml")
    Path("long.toml").write_text(Path("a.toml").read_text() + "sequence_length = 32\n")
    assert "long has other sequences than a: data.sequence_length = 32, not 16" in refused(
        *ladder, "long.toml"
    )
    assert "d.toml: no [data] section" in refused(*ladder, "d.toml")


def pretended(tiny_run: Path, name: str, loss: float | None = 5.0, **changes: object) -> Path:
    """A copy of a finished run that has reached another loss, with other fields of its manifest."""
    path = Path("runs") / name
    shutil.copytree(tiny_run, path)
    checkpoint = Run.open(path).checkpoint_path(6)
    manifest = replace(read_manifest(checkpoint), **changes)  # type: ignore[arg-type]
    (checkpoint / MANIFEST).write_text(manifest.json_text)
    records = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    records[-1]["val/loss"] = loss
    (path / "metrics.jsonl").write_text("".join(f"{json.dumps(record)}\n" for record in records))
    return path


def test_runs_that_do_not_compare_or_are_not_finished_are_refused(
    recipe: Path, tiny_run: Path, refused: Refusal
) -> None:
    runs = [pretended(tiny_run, f"rung-{number}") for number in range(4)]
    text = ["--data.sequence_length", "48", "--validation.sequences", "4"]
    assert "rung-0: trained with another data.sequence_length than the big run" in refused(
        "ladder", recipe, *PLANNED, "--ladder.runs", *runs
    )
    adopt = ["ladder", recipe, *PLANNED, *text, "--ladder.runs", *runs]
    assert "4 runs cannot fix them: add at least 1 more run" in refused(*adopt)
    other = pretended(tiny_run, "other", tokenizer_hash="ab")
    assert "other: trained with another tokenizer than the big run" in refused(*adopt, other)
    plan = read_manifest(Run.open(tiny_run).checkpoint_path(6)).data_plan
    elsewhere = pretended(
        tiny_run,
        "elsewhere",
        data_plan=plan | {"phases": [plan["phases"][0] | {"proportions": {"cd": "1"}}]},
    )
    assert "elsewhere: trained with other data than the big run" in refused(*adopt, elsewhere)
    (other / "checkpoints/step-00000006" / MANIFEST).write_text("{")
    assert "other/checkpoints/step-00000006: manifest.json: not valid JSON" in refused(
        *adopt, other
    )
    shutil.rmtree(runs[0] / "checkpoints/step-00000006")
    assert "rung-0: not finished" in refused(*adopt)


def test_a_run_says_what_it_has_reached(tiny_run: Path) -> None:
    reached = read_reached(tiny_run)
    last = Run.open(tiny_run).read_metrics()[-1]
    assert (reached.tokens, reached.loss) == (6 * 4 * 48, last["val/loss"])
    assert reached.point.steps == 6
    assert [part for part, _ in reached.curve] == [0.5, 1.0]
    check_same_text([reached, Reached("diverged", 1, 1, float("nan"), float("nan"), (), {}, {})])


@pytest.mark.slow
def test_adopted_runs_make_a_page_that_names_what_was_left_out_and_read_too_often(
    recipe: Path, tiny_run: Path, capfd: pytest.CaptureFixture[str], refused: Refusal
) -> None:
    config = read_manifest(Run.open(tiny_run).checkpoint_path(6)).hf_config
    runs = []
    for number, (layers, batch) in enumerate([(2, 4), (2, 16), (4, 8), (4, 32), (8, 16), (8, 64)]):
        loss = 3.0 + layers**-0.5 + batch**-0.4
        model = config | {"num_hidden_layers": layers}
        runs.append(
            str(
                pretended(
                    tiny_run, f"{number}/base", loss, hf_config=model, global_batch_size=batch
                )
            )
        )
    runs.append(str(pretended(tiny_run, "spiked", 9.0, global_batch_size=64)))
    text = [
        "--data.sequence_length",
        "48",
        "--validation.sequences",
        "4",
        "--ladder.target",
        "1e12",
        "--run.name",
        "my big",
    ]
    assert run(["ladder", str(recipe), *PLANNED, *text, "--ladder.runs", *runs]) == 0
    out = capfd.readouterr().out
    numbers = json.loads(Path("runs/my big-ladder/ladder-fit.json").read_text())["ladders"][0]
    assert [point["name"] for point in numbers["points"]] == runs[:-1]
    assert numbers["left_out"][0]["name"] == "spiked"
    (repeated,) = (
        line for line in numbers["cautions"] if line.startswith("the target reads tokens")
    )
    assert f"caution    {repeated}" in out
    assert " pretrain 'runs/my big-ladder/target.toml'\n" in out
    assert repeated in Path("runs/my big-ladder/ladder.html").read_text()
    chosen = parse_config(PretrainConfig, ["runs/my big-ladder/target.toml"])
    assert chosen.train.steps != 20_000
    assert chosen.schedule.warmup_ratio == 0.1
    written = {
        path.name: path.read_bytes()
        for path in Path("runs/my big-ladder").iterdir()
        if path.is_file()
    }
    assert "add at least 1 more run" in refused(
        "ladder", recipe, *PLANNED, *text, "--ladder.runs", *runs[:4]
    )
    assert all(
        (Path("runs/my big-ladder") / name).read_bytes() == content
        for name, content in written.items()
    )


def test_the_ladders_own_rungs_count_once_and_equal_names_are_told_apart(
    target: Trial, tiny_run: Path
) -> None:
    rung = make_rung(target, shapes(target.model)[0], 64_000, 512, Path("runs"))
    paths = [pretended(tiny_run, name) for name in (rung.name, "a/base", "b/base", "c")]
    assert [each.name for each in adopt(paths, [rung])] == ["runs/a/base", "runs/b/base", "c"]


def test_the_best_rate_is_the_vertex_of_a_parabola_or_the_outer_one() -> None:
    rates = [1e-3, 2e-3, 4e-3, 8e-3]
    losses = [(math.log(rate / 3e-3)) ** 2 for rate in rates]
    assert best_rate(rates, losses) == (3e-3, False)
    assert best_rate(rates, [1.0, 2.0, 3.0, math.nan]) == (1e-3, True)
    assert best_rate(rates, [3.0, 2.0, math.nan, math.nan]) == (2e-3, False)
    with pytest.raises(UserError, match="every run diverged"):
        best_rate(rates, [math.nan] * 4)


# --- whole ladders --------------------------------------------------------------------------------


def files_of(folder: Path) -> dict[str, str]:
    """What a ladder says in the end, by file."""
    return {name: (folder / name).read_text() for name in ("prediction.json", "target.toml")}


@pytest.mark.slow
def test_a_ladder_that_is_killed_goes_on_and_ends_as_an_unbroken_one(
    recipe: Path, lmforge: Command
) -> None:
    words = ["ladder", str(recipe), *SMALL]
    for folder in ("whole", "broken"):
        Path(folder).mkdir()
        shutil.copy(recipe, folder)
    assert (done := lmforge(*words, cwd=Path("whole").resolve())).returncode == 0, done.stderr
    ladder = subprocess.Popen(
        [sys.executable, "-m", "lmforge", *words], cwd="broken", stdout=subprocess.DEVNULL
    )
    runs = Path("broken/runs/big-ladder")
    while not list(runs.glob("*/checkpoints/step-*")):  # of the first rung
        assert ladder.poll() is None
        time.sleep(0.1)
    ladder.kill()
    ladder.wait()
    # Its rung goes on alone; the next ladder waits for it, or finds it finished. The rung after
    # that is killed.
    again = subprocess.Popen(
        [sys.executable, "-m", "lmforge", *words], cwd="broken", stdout=subprocess.PIPE, text=True
    )
    while len(holders := list(runs.glob("*/metrics.jsonl"))) < 2:
        assert again.poll() is None
        time.sleep(0.1)
    newest = max(holders, key=lambda path: path.stat().st_mtime_ns).parent
    os.kill(int((newest / ".lock").read_text().split()[1]), signal.SIGKILL)
    out, _ = again.communicate()
    assert again.returncode == 0, out
    assert files_of(runs) == files_of(Path("whole/runs/big-ladder"))
    assert (repeated := lmforge(*words, cwd=Path("broken").resolve())).returncode == 0, (
        repeated.stderr
    )
    assert files_of(runs) == files_of(Path("whole/runs/big-ladder"))


@pytest.mark.slow
def test_rungs_at_once_make_a_recipe_that_is_ready_to_start(recipe: Path, lmforge: Command) -> None:
    done = lmforge(
        "ladder", recipe, *SMALL, "--ladder.parallel_runs", "2", "--run.name", "both", *RATES
    )
    assert done.returncode == 0, done.stderr
    assert "rate       " in done.stdout
    table = json.loads(Path("runs/both-ladder/ladder.json").read_text())
    names = [rung["name"] for rung in table["ladders"][0]["rungs"]]
    assert len(names) == 5
    for name in names:
        assert Run.open(Path("runs/both-ladder") / name).checkpoint_steps()
    predicted = json.loads(Path("runs/both-ladder/prediction.json").read_text())
    assert predicted["steps"] == 20_000
    # So far beyond its rungs the law is a guess.
    assert all(low <= high for _, _, low, high in predicted["points"])
    numbers = json.loads(Path("runs/both-ladder/ladder-fit.json").read_text())["ladders"][0]
    assert predicted["points"][-1][1:] == pytest.approx(
        [numbers["target"]["loss"][name] for name in ("value", "low", "high")]
    )
    assert set(numbers["curves"]) == {point["name"] for point in numbers["points"]}
    assert numbers["points"][0]["name"] in Path("runs/both-ladder/ladder.html").read_text()
    started = lmforge("pretrain", "runs/both-ladder/target.toml", "--dry-run")
    assert "both-ladder/prediction.json" in started.stdout


@pytest.mark.slow
def test_mixtures_are_compared_on_one_page_and_their_rungs_can_be_adopted(
    recipe: Path, tiny_tokens: Path, lmforge: Command
) -> None:
    Path("half").mkdir()
    for path in sorted((tiny_tokens.parent / "text").iterdir())[::2]:
        shutil.copy(path, "half")
    prepare(
        "half", "other", tokenizer=str(tiny_tokens / "tokenizer"), validation_ratio=0.1, workers=1
    )
    for name, weight in (("even", 1.0), ("uneven", 3.0)):
        sources = (
            f'sources = [{{folder = "{tiny_tokens}", weight = {weight}}}, {{folder = "other",'
            " weight = 1.0}]"
        )
        Path(f"{name}.toml").write_text(f"[data]\n{sources}\n")
    words = [
        *SMALL[:-1],
        "0.04",
        "--ladder.parallel_runs",
        "2",
        "--ladder.mixtures",
        "even.toml",
        "uneven.toml",
    ]
    done = lmforge("ladder", recipe, *words)
    assert done.returncode == 0, done.stderr
    folder = Path("runs/big-ladder")
    numbers = json.loads((folder / "ladder-fit.json").read_text())
    assert [each["name"] for each in numbers["ladders"]] == ["even", "uneven"]
    (pair,) = numbers["comparison"]
    assert (pair["first"], pair["second"]) == ("even", "uneven")
    assert "compared   even less uneven" in done.stdout
    assert done.stdout.count("mixture    uneven\n") == 2  # above its plan, and above its prediction
    assert "Mixtures at the target" in (folder / "ladder.html").read_text()
    started = lmforge("pretrain", folder / "uneven-target.toml", "--dry-run")
    assert started.returncode == 0, started.stderr
    # The same runs, adopted one by one under the recipe with their data, give the same law.
    rungs = [str(folder / point["name"]) for point in numbers["ladders"][1]["points"]]
    adopted = lmforge(
        "ladder", folder / "uneven-target.toml", "--run.name", "adopted", "--ladder.runs", *rungs
    )
    assert adopted.returncode == 0, adopted.stderr
    (again,) = json.loads(Path("runs/adopted-ladder/ladder-fit.json").read_text())["ladders"]
    assert again["law"] == numbers["ladders"][1]["law"]
    assert all(
        Path(rung).name in Path("runs/adopted-ladder/ladder.html").read_text() for rung in rungs
    )


@pytest.mark.slow
def test_a_rung_that_is_refused_ends_the_ladder_in_one_line(recipe: Path, lmforge: Command) -> None:
    done = lmforge("ladder", recipe, *SMALL, "--log.trackers", "none-such")
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
