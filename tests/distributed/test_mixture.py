"""Runs on mixtures with phases: stopped, continued on other ranks, with phases added meanwhile; and
what is refused.
"""

import json
import random
import re
import shutil
from pathlib import Path

import pytest

from lmforge.core.records.runs import Run
from lmforge.lab.bench.bounds import FP32
from lmforge.text.prepare.prepare import prepare
from tests.conftest import Command, Refusal, only_line
from tests.distributed.conftest import assert_agree, losses
from tests.support.grids import grid, parametrize
from tests.support.rounding import OTHER_ROUNDING

WORDS = {
    "web": "the cat sat on a mat and saw dogs",
    "code": "def return self import class print",
    "math": "one two plus",
}
MODEL = [
    "--model.hidden_size",
    "32",
    "--model.intermediate_size",
    "48",
    "--model.num_hidden_layers",
    "1",
]
MODEL += ["--model.num_attention_heads", "2", "--model.num_key_value_heads", "2"]
TRAINING = [
    "--train.global_batch_size",
    "8",
    "--train.compile",
    "off",
    "--train.dtype",
    "fp32",
    "--train.device",
    "cpu",
]
TRAINING += [
    "--schedule.name",
    "constant",
    "--schedule.warmup_steps",
    "0",
    "--log.every_steps",
    "1",
]


@pytest.fixture(scope="module")
def corpora(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three token folders of one tokenizer: web, code and math."""
    folder, random_ = tmp_path_factory.mktemp("corpora"), random.Random(1)
    for name, words in WORDS.items():
        (folder / f"{name}-text").mkdir()
        for number in range(40):
            text = " ".join(random_.choice(words.split()) for _ in range(random_.randint(20, 60)))
            (folder / f"{name}-text" / f"{number}.txt").write_text(text)
        kind = {"vocab_size": 320} if name == "web" else {"tokenizer": folder / "web" / "tokenizer"}
        prepare(
            str(folder / f"{name}-text"), folder / name, validation_ratio=0.1, workers=1, **kind
        )
    return folder


def recipe(
    corpora: Path, phases: str, sources: str = "web=0.7 code=0.3", where: Path | None = None
) -> Path:
    """A recipe with these sources, NAME=WEIGHT, and TOML of phases."""
    tables = (each.split("=") for each in sources.split())
    listed = "".join(
        f'[[data.sources]]\nfolder = "{corpora / name}"\nweight = {weight}\n'
        for name, weight in tables
    )
    path = (where or corpora) / "mix.toml"
    path.write_text(f"[data]\nsequence_length = 32\n{listed}{phases}")
    return path


PHASE_1 = '[[data.phases]]\nsteps = 4\nweights = ["web=0.7", "code=0.3"]\n'
PHASE_2 = "[[data.phases]]\nsteps = 4\nsequence_length = 16\n"
PHASE_3 = '[[data.phases]]\nweights = ["web=1", "math=3"]\n'


@pytest.mark.slow
def test_a_run_whose_phases_are_added_while_it_is_stopped_on_other_ranks_is_the_run_that_had_them_from_the_start(
    corpora: Path, tmp_path: Path, lmforge: Command
) -> None:
    # An epsilon with which AdamW's step depends on the size of a gradient.
    words = [
        *MODEL,
        *TRAINING,
        "--optimizer.eps",
        "1e-3",
        "--optimizer.lr",
        "3e-3",
        "--run.folder",
        tmp_path,
    ]

    def train(
        name: str,
        steps: int,
        ranks: int,
        phases: str,
        sources: str = "web=0.7 code=0.3 math=0.5",
        **variables: str,
    ) -> Run:
        file = recipe(corpora, phases, sources, tmp_path)
        done = lmforge(
            "pretrain",
            file,
            *words,
            "--run.name",
            name,
            "--train.steps",
            steps,
            ranks=ranks,
            **variables,
        )
        assert done.returncode == 0, done.stderr
        return Run.open(tmp_path / name)

    whole = train("whole", 12, 1, PHASE_1 + PHASE_2 + PHASE_3)
    train("whole rounded", 12, 1, PHASE_1 + PHASE_2 + PHASE_3, **OTHER_ROUNDING)
    train("stopped", 3, 2, "", "web=0.7 code=0.3")  # one endless phase, and a source less
    train("stopped", 6, 1, PHASE_1 + PHASE_2)  # in the middle of the second phase
    stopped = train("stopped", 12, 2, PHASE_1 + PHASE_2 + PHASE_3)
    assert_agree(stopped, whole, validated=False)
    tokens = [record["tokens"] for record in whole.read_metrics() if "loss" in record]
    assert [after - before for before, after in zip([0, *tokens], tokens, strict=False)] == [
        256
    ] * 4 + [128] * 4 + [256] * 4
    shown = lmforge("show", tmp_path / "whole").stdout
    rows = {
        line.split()[0]: line.split()[1:4]
        for line in shown.splitlines()
        if re.match(r" *(web|code|math) ", line)
    }
    # 32 samples of 32 tokens, 32 of 16, and 32 of 32; the proportions are exact to a sample at each
    # end of a phase.
    expected = dict.fromkeys(WORDS, 0.0)
    for size, proportions in (
        (32, (0.7, 0.3, 0)),
        (16, (0.7 / 1.5, 0.3 / 1.5, 0.5 / 1.5)),
        (32, (0.25, 0, 0.75)),
    ):
        for name, proportion in zip(WORDS, proportions, strict=True):
            expected[name] += 32 * size * proportion
    for name, (seen, _, _) in rows.items():
        assert abs(int(seen.replace(",", "")) - expected[name]) < 32 + 16 + 32, (name, shown)
    assert re.search(
        r"phase 2, steps 4 to 7: sequences of 16 tokens; .*; new epochs begin, sequences left"
        r" unread: web ",
        shown,
    )
    sample = lmforge("show", "data", tmp_path / "whole", "--samples", "64:66").stdout
    assert re.search(r"sample 64 \((web|math), sequence \d+\): ", sample)


@pytest.mark.parametrize(
    ("phases", "sources", "said"),
    [
        (
            PHASE_1.replace("4", "3") + PHASE_3,
            "web=0.7 code=0.3 math=1",
            "phase 1: 4 steps of it were trained, here it has 3; a phase",
        ),
        (
            "",
            "web=0.6 code=0.4",
            (
                "phase 1: web was 0.7 of its samples, here 0.6 (data.phases keep the weights of the"
                " past)"
            ),
        ),
        ("", "math=0.7 code=0.3", "source web is missing or has other tokens now"),
        (
            PHASE_1.replace("steps = 4", "steps = 4\nsequence_length = 16") + PHASE_3,
            "web=0.7 code=0.3 math=1",
            "had 32 tokens, here 16",
        ),
    ],
)
def test_a_changed_past_is_refused_and_named(
    corpora: Path,
    tmp_path_factory: pytest.TempPathFactory,
    begun: Path,
    refused: Refusal,
    phases: str,
    sources: str,
    said: str,
) -> None:
    words = [
        recipe(corpora, phases, sources, begun),
        "--run.folder",
        begun,
        "--run.name",
        "begun",
        *MODEL,
        *TRAINING,
    ]
    assert said in refused("pretrain", *words, "--train.steps", 8)


@pytest.fixture(scope="module")
def begun(corpora: Path, tmp_path_factory: pytest.TempPathFactory, lmforge: Command) -> Path:
    """The folder of a run of four steps."""
    folder = tmp_path_factory.mktemp("begun")
    words = [
        recipe(corpora, "", where=folder),
        "--run.folder",
        folder,
        "--run.name",
        "begun",
        *MODEL,
        *TRAINING,
    ]
    assert lmforge("pretrain", *words, "--train.steps", 4).returncode == 0
    return folder


# Where a rank may see it first, and all must leave together.
REFUSED_ON_ALL_RANKS = [
    ("", "web=0 code=1", "data.sources.weight: expected a number above 0.0, got 0"),
    (
        "[[data.phases]]\nsteps = 6\n",
        "web=1",
        "data.phases: they end 2 steps before the run; leave out the length of the last",
    ),
    ("", "web=1 short=1", "short: 4 tokens, less than one sequence of 32"),
    ("", "web=1 other=1", "other: prepared with another tokenizer than"),
    ("", "web=1 empty=1", "empty: no token folder (manifest.json is missing)"),
]


@pytest.mark.parametrize(
    ("phases", "sources", "said"),
    [
        *REFUSED_ON_ALL_RANKS,
        ("", "web=-1 code=1", "data.sources.weight: expected a number above 0.0, got -1"),
        (
            "",
            "web=1 code=1e-9",
            "data.sources: code: its weight gives it less than one sample in a million",
        ),
        ("", "web=1 web=1", "data.sources: two sources are called web; give each a name"),
        (
            PHASE_2 + '[[data.phases]]\nweights = ["wob=1"]',
            "web=1 code=1",
            'phase 2: there is no source "wob"; the sources are web',
        ),
        (
            '[[data.phases]]\nweights = ["web=none"]',
            "web=1",
            "weights: expected NAME=WEIGHT with a weight above 0, such as",
        ),
        (
            "[[data.phases]]\n[[data.phases]]\n",
            "web=1",
            "phase 1: give its steps: only the last phase",
        ),
        (
            "[[data.phases]]\nsequence_length = 64\n",
            "web=1",
            "phase 1: its sequence_length = 64 is more than data.sequence_length = 32",
        ),
        ("", "web=1 same=1", "same: holds the same tokens as"),
        ("", "web=1 gone=1", "gone: no token folder (manifest.json is missing)"),
    ],
)
def test_mixtures_that_cannot_be_are_refused_in_one_line(
    corpora: Path, tmp_path: Path, refused: Refusal, phases: str, sources: str, said: str
) -> None:
    add_unusable(corpora, sources)
    words = [
        recipe(corpora, phases, sources, tmp_path),
        "--run.folder",
        tmp_path,
        *MODEL,
        *TRAINING,
    ]
    assert said in refused("pretrain", *words, "--train.steps", 8)
    assert not (tmp_path / "mix").exists() or not list((tmp_path / "mix").glob("*.toml"))


def add_unusable(corpora: Path, sources: str) -> None:
    """Make the folders among these sources that a mixture cannot use."""
    for name, text, options in (
        ("short", "the cat sat", {"tokenizer": corpora / "web" / "tokenizer"}),
        ("other", "dogs " * 500, {"vocab_size": 300}),
    ):
        if name in sources and not (corpora / name).exists():
            (corpora / f"{name}.txt").write_text(text)
            prepare(
                str(corpora / f"{name}.txt"),
                corpora / name,
                validation_ratio=0.0,
                workers=1,
                **options,
            )
    if "same" in sources and not (corpora / "same").exists():
        shutil.copytree(corpora / "web", corpora / "same")
    if "empty" in sources:
        (corpora / "empty").mkdir(exist_ok=True)


@parametrize(("phases", "sources", "said"), REFUSED_ON_ALL_RANKS, fast=(0,))
def test_ranks_say_once_what_is_wrong_with_a_mixture_and_leave_together(
    corpora: Path, tmp_path: Path, lmforge: Command, phases: str, sources: str, said: str
) -> None:
    add_unusable(corpora, sources)
    words = [
        recipe(corpora, phases, sources, tmp_path),
        "--run.folder",
        tmp_path,
        *MODEL,
        *TRAINING,
        "--train.steps",
        8,
    ]
    done = lmforge("pretrain", *words, ranks=2)
    assert done.returncode == 2, done.stderr
    assert said in only_line(done.stderr)
    assert not (tmp_path / "mix" / "recipe.toml").exists()


@pytest.mark.parametrize(
    ("change", "ranks"), grid(["a phase in the past", "other tokens in a folder"], [1, 2])
)
def test_a_run_is_not_continued_on_another_past(
    corpora: Path, begun: Path, tmp_path: Path, lmforge: Command, change: str, ranks: int
) -> None:
    shutil.copytree(begun, tmp_path / "begun")
    before = {path: path.read_bytes() for path in sorted((tmp_path / "begun").rglob("*.json*"))}
    phases = (
        PHASE_1.replace("4", "2") + "[[data.phases]]\n" if change == "a phase in the past" else ""
    )
    path = recipe(corpora, phases, where=tmp_path)
    if change == "other tokens in a folder":
        # Prepared anew under the same name, from less text.
        shutil.copytree(corpora / "code-text", tmp_path / "code-text")
        next(iter(sorted((tmp_path / "code-text").iterdir()))).unlink()
        prepare(
            str(tmp_path / "code-text"),
            tmp_path / "code",
            validation_ratio=0.1,
            workers=1,
            tokenizer=corpora / "web" / "tokenizer",
        )
        path.write_text(path.read_text().replace(str(corpora / "code"), str(tmp_path / "code")))
    words = [
        path,
        "--run.folder",
        tmp_path / "begun",
        "--run.name",
        "begun",
        *MODEL,
        *TRAINING,
        "--train.steps",
        8,
    ]
    done = lmforge("pretrain", *words, ranks=ranks)
    assert done.returncode == 2, done.stderr
    expected = (
        "phase 1: 4 steps of it were trained, here it has 2"
        if phases
        else "source code is missing or has other tokens now"
    )
    assert expected in only_line(done.stderr)
    assert {
        path: path.read_bytes() for path in sorted((tmp_path / "begun").rglob("*.json*"))
    } == before


@parametrize(
    "strategy",
    [[], ["--parallel.context_parallel_degree", "2"]],
    ids=["data parallel", "context parallel"],
    fast=(1,),
)
def test_the_losses_of_the_sources_add_up_to_the_loss_on_any_ranks(
    corpora: Path, tmp_path: Path, lmforge: Command, strategy: list[str]
) -> None:
    """Steps of 8 samples in blocks of 10: 7 of 10 are of the first source, and nearly all tokens
    are scored.
    """
    words = [
        recipe(corpora, "", where=tmp_path),
        "--run.folder",
        tmp_path,
        *MODEL,
        *TRAINING,
        "--train.steps",
        5,
    ]
    for name, ranks, options in (("alone", 1, []), ("ranks", 2, strategy)):
        done = lmforge("pretrain", *words, "--run.name", name, *options, ranks=ranks)
        assert done.returncode == 0, done.stderr
    alone, ranks_ = Run.open(tmp_path / "alone"), Run.open(tmp_path / "ranks")
    for name in ("loss", "loss/web", "loss/code"):
        assert losses(ranks_, name) == pytest.approx(losses(alone, name), rel=FP32.loss)
    for step, loss in losses(alone).items():
        web, code = losses(alone, "loss/web")[step], losses(alone, "loss/code")[step]
        assert min(web, code) < loss < max(web, code)
        # The part of the first source, from the losses alone.
        assert 0.4 < (loss - code) / (web - code) < 0.95, (step, loss, web, code)
    measured, on_ranks = alone.read_metrics()[-1], ranks_.read_metrics()[-1]
    for name in ("web", "code"):
        done = lmforge("evaluate", alone.path, "--data", corpora / name, "--output", "json")
        by_itself = json.loads(done.stdout)
        for rate in ("loss", "bits_per_byte"):
            assert measured[f"val/{rate}/{name}"] == pytest.approx(by_itself[rate], rel=FP32.loss)
            assert on_ranks[f"val/{rate}/{name}"] == pytest.approx(by_itself[rate], rel=FP32.loss)
    result = lmforge("evaluate", alone.path, "--output", "json")
    whole = json.loads(result.stdout)
    for name in (
        "loss",
        "loss/web",
        "loss/code",
        "bits_per_byte",
        "bits_per_byte/web",
        "bits_per_byte/code",
    ):
        assert whole[name] == pytest.approx(measured[f"val/{name}"], rel=FP32.loss)
    assert whole["data"] == f"{corpora / 'web'}, {corpora / 'code'}"
    lines = lmforge("evaluate", alone.path, "--split", "train").stdout.splitlines()
    assert "(train, " in lines[0]
    assert [line.split(" (")[0] for line in lines[1:]] == ["  web", "  code"]


def test_evaluating_a_run_of_a_mixture_names_a_source_that_is_gone(
    corpora: Path, begun: Path, refused: Refusal
) -> None:
    (corpora / "code").rename(corpora / "moved")
    try:
        assert f"{corpora / 'code'}: " in refused("evaluate", begun / "begun")
    finally:
        (corpora / "moved").rename(corpora / "code")


def test_a_source_of_which_all_is_in_quarantine_is_refused(
    corpora: Path, tmp_path: Path, refused: Refusal
) -> None:
    path = recipe(corpora, "", where=tmp_path)
    path.write_text(
        path.read_text().replace("weight = 0.3", 'weight = 0.3\nquarantine = ["train-00000"]')
    )
    said = refused(
        "pretrain", path, "--run.folder", tmp_path, *MODEL, *TRAINING, "--train.steps", 8
    )
    assert said.startswith(f"{corpora / 'code'}: all of its ")
