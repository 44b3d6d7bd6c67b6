"""The documentation is correct: its commands work, and the names in it exist.

The commands of README.md, of the first page of docs/, the tutorials and the other pages are carried
out in this order, in one new folder that holds the recipes and such material as a reader would
bring. A pretraining is cut down to a few steps of a tiny model and an evaluation to a few sequences
(website/cut_down.py, which lets the site show how), a `make` line is looked up in the Makefile, and
every other command runs as it stands.
"""

import ast
import inspect
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import textwrap
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import zstandard

from lmforge.cli import parse_command
from lmforge.core.data.tokenizer import train_tokenizer
from lmforge.core.errors import how_to_install
from lmforge.core.model.build import build_model
from lmforge.core.model.init_weights import init_weights
from lmforge.core.options.options import iter_options
from lmforge.core.options.verbs import VERBS
from lmforge.core.parallel.parallel_model import train_step
from lmforge.hf.export import export_folder
from lmforge.hf.resolve import resolve_model_config
from lmforge.lab.options.bench import BenchConfig
from lmforge.lab.options.ladder import LadderConfig
from lmforge.lab.options.plan import PlanConfig
from lmforge.post.options.align import AlignConfig
from lmforge.post.options.tuning import DistillConfig
from tests.core.model.foreign import theirs_of
from tests.support.preloaded import preloaded
from tests.support.text import corpus
from website.cut_down import FENCED, TINY_MODEL, is_command, shortened

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "lmforge"
README = ROOT / "README.md"
START = ROOT / "docs" / "getting-started.md"
TUTORIALS = sorted((ROOT / "docs" / "tutorials").glob("*.md"))
EXECUTED = [
    README,
    START,
    *TUTORIALS,
    *sorted(set((ROOT / "docs").rglob("*.md")) - {START, *TUTORIALS}),
]
PAGES = [*EXECUTED, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]
BIN = Path(sys.executable).parent

OF_A_RUN = {
    ".".join(path)
    for tree in (BenchConfig, PlanConfig, LadderConfig, DistillConfig, AlignConfig)
    for path, _ in iter_options(tree)
}
OF_VERBS = {path[0] for verb in VERBS.values() for path, _ in iter_options(verb.options)}
# What metrics are called that have a slash in their names.
METRICS = (
    "loss/",
    "val/",
    "rewards/",
    "logps/",
    "tokens/",
    "predicted/",
    "measured/",
    "experts/",
    "clip/",
    "staleness/",
    "sampling_logp_difference/",
)
OF_FILES = {".py", ".md", ".toml", ".json", ".jsonl", ".txt", ".png"}
FLAGS = {
    "budget",
    "mixtures",
    "method",
    "teacher",
    "environment",
    "help",
    "debug",
    "version",
    "dry-run",
    "resume",
    "deterministic",
    "sweep",
    "trace",
    "calibrate",
}
FLAGS |= set(PlanConfig.SHORT)


@dataclass(frozen=True)
class Piece:
    """Something to carry out: a line of shell, a Python program, or a file to write, and where it
    is told.
    """

    page: Path
    line: int
    kind: str
    text: str

    def __str__(self) -> str:
        return f"{self.page.name}:{self.line}"


def pieces() -> list[Piece]:
    """All there is to carry out, in reading order."""
    results = []
    for page in EXECUTED:
        content = page.read_text(encoding="utf-8")
        for block in FENCED.finditer(content):
            kind, text = block.groups()
            first = content[: block.start(2)].count("\n") + 1
            if kind == "sh":
                lines = enumerate(text.splitlines(), start=first)
                results += [Piece(page, at, kind, line) for at, line in lines if is_command(line)]
            elif kind in ("python", "toml"):
                results.append(Piece(page, first, kind, text))
    return results


def shortened_pipeline(path: Path) -> None:
    """The same stages in a few steps each."""
    table = tomllib.loads(path.read_text(encoding="utf-8"))
    lines = [f"name = {json.dumps(table['name'])}"]
    for stage in table["stages"]:
        words = shlex.split(shortened(shlex.join([stage["verb"], *stage.get("arguments", ())])))[1:]
        stage = stage | {"arguments": words}
        lines += ["[[stages]]", *(f"{name} = {json.dumps(value)}" for name, value in stage.items())]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


@dataclass
class Reader:
    """Follows the documents from top to bottom, each piece once, whichever test asks first.

    The first command of each page and those that start ranks are started as a reader starts them;
    `lmforge` after that, under `torchrun` too, is spared its imports.
    """

    folder: Path
    said: Path
    outcomes: list[str | None] = field(default_factory=list)
    started: set[Path] = field(default_factory=set)

    def outcome(self, number: int) -> str | None:
        """What went wrong with a piece, after all before it were carried out; None where nothing
        did.
        """
        for piece in PIECES[len(self.outcomes) : number + 1]:
            self.outcomes.append(self._carry_out(piece))
        return self.outcomes[number]

    def _carry_out(self, piece: Piece) -> str | None:
        if piece.kind == "toml":
            (self.folder / piece.text.splitlines()[0].removeprefix("# ")).write_text(
                piece.text, encoding="utf-8"
            )
            return None
        if piece.kind == "python" and (named := re.match(r"# (\w+\.py)\n", piece.text)):
            (self.folder / named[1]).write_text(piece.text, encoding="utf-8")
            return None
        if piece.text.startswith("lmforge run "):
            shortened_pipeline(self.folder / piece.text.split()[-1])
        if piece.kind == "sh" and piece.text.startswith("make "):
            return make_line(piece.text)
        line = shortened(piece.text) if piece.kind == "sh" else ""
        command = ["sh", "-c", line] if line else [sys.executable, "-c", piece.text]
        variables = {**os.environ, "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}"}
        if (
            piece.page in self.started
            and "--launch.processes 2" not in line
            and (command_of := of_lmforge(line))
        ):
            words, ranks = command_of
            done = preloaded().run(
                words, self.said, ranks=ranks, cwd=self.folder, variables=variables, timeout=500
            )
        else:
            self.started.add(piece.page)
            done = subprocess.run(
                command,
                cwd=self.folder,
                env=variables,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=500,
            )
        return (
            None
            if done.returncode == 0
            else f"{command} ended with {done.returncode}\n{done.stdout}\n{done.stderr}"
        )


def of_lmforge(line: str) -> tuple[list[str], int] | None:
    """The words of a line that is one call of `lmforge`, and on how many ranks; None of a line with
    more for a shell to do.
    """
    words, torchrun = (
        shlex.split(line, comments=True),
        ["torchrun", "--standalone", "--nproc-per-node", "2", "-m", "lmforge"],
    )
    if re.search(r"[|&;<>$*?`~{}()]", line):
        return None
    if words[:6] == torchrun:
        return words[6:], 2
    return (words[1:], 1) if words[:1] == ["lmforge"] else None


def make_line(line: str) -> str | None:
    """What is wrong with `make TARGET`: the Makefile should have it, and quickstart should call the
    verb of that name.
    """
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    [_, target] = line.split()
    rule = re.search(rf"^{re.escape(target)}:.*\n((?:\t.*\n?)*)", makefile, re.M)
    if rule is None:
        return f"the Makefile has no target {target}"
    if target == "quickstart" and not re.search(r"^\t\S*lmforge quickstart$", rule[1], re.M):
        return f"make quickstart does not call lmforge quickstart but {rule[1]!r}"
    return None


PIECES = pieces()
LAST_OF_README = max(number for number, piece in enumerate(PIECES) if piece.page == README)


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Reader:
    """A folder with the recipes and what a reader brings: books, articles, corpora, a tokenizer, a
    model folder.
    """
    folder = tmp_path_factory.mktemp("reader")
    shutil.copytree(ROOT / "recipes", folder / "recipes")
    shutil.copytree(ROOT / "examples", folder / "examples")
    mail = "".join(
        f"From x\nSubject: {number}\n\nMessage {number} says something.\n\n" for number in range(20)
    )
    (folder / "mail.mbox").write_text(mail, encoding="utf-8")
    chapters = [corpus()[at : at + 10_000] for at in range(0, 200_000, 10_000)]
    (folder / "books").mkdir()
    for number, chapter in enumerate(chapters):
        (folder / "books" / f"{number}.txt").write_text(chapter, encoding="utf-8")
    (folder / "articles").mkdir()
    for number in range(5):
        article = corpus()[200_000 + 10_000 * number : 210_000 + 10_000 * number]
        (folder / "articles" / f"{number}.txt").write_text(article, encoding="utf-8")
    (folder / "crawl.jsonl").write_text(
        json.dumps({"text": chapters[0]}) + '\n{"title": "without a text"}\n', encoding="utf-8"
    )
    lines = "".join(json.dumps({"content": chapter}) + "\n" for chapter in chapters)
    (folder / "corpus.jsonl.zst").write_bytes(zstandard.compress(lines.encode()))
    pyarrow.parquet.write_table(pyarrow.table({"text": chapters}), folder / "corpus.parquet")
    tokenizer = train_tokenizer(chapters, 400)
    tokenizer.save(folder / "made")
    shutil.copy(folder / "made" / "tokenizer.json", folder)
    sizes = {name.removeprefix("model."): value for name, value in TINY_MODEL.items()}
    shape = resolve_model_config("smollm-135m", sizes, tokenizer.vocab_size)
    export_folder(
        init_weights(build_model(shape), 0),
        shape,
        folder / "models" / "smollm",
        tokenizer_folder=folder / "made",
    )
    shutil.copytree(folder / "models" / "smollm", folder / "models" / "CodeLlama-7b-hf")
    theirs_of("gpt_neox", vocab_size=tokenizer.vocab_size).save_pretrained(
        folder / "models" / "pythia"
    )
    shutil.copy(folder / "tokenizer.json", folder / "models" / "pythia")
    shutil.rmtree(folder / "made")
    for name, records in conversations().items():
        (folder / name).write_text(
            "".join(json.dumps(record) + "\n" for record in records), encoding="utf-8"
        )
    return Reader(folder, tmp_path_factory.mktemp("said"))


def conversations() -> dict[str, list[dict[str, Any]]]:
    """Files of conversations, of pairs and of prompts, by name."""
    questions = [
        (f"What is {one} and {other}?", f"{one + other}", f"{one * other + 100}")
        for one in range(6)
        for other in range(6)
    ]

    def turn(role: str, content: str) -> list[dict[str, str]]:
        return [{"role": role, "content": content}]

    return {
        "chats.jsonl": [
            {"messages": turn("user", q) + turn("assistant", good)} for q, good, _ in questions
        ],
        "more-chats.jsonl": [
            {"messages": turn("user", f"{q} Now!") + turn("assistant", good)}
            for q, good, _ in questions
        ],
        "pairs.jsonl": [
            {
                "prompt": turn("user", q),
                "chosen": turn("assistant", good),
                "rejected": turn("assistant", bad),
            }
            for q, good, bad in questions
        ],
        "prompts.jsonl": [{"prompt": turn("user", q), "answer": good} for q, good, _ in questions],
    }


def marks(piece: Piece) -> list[pytest.MarkDecorator]:
    """The README is carried out in every run of the tests, the other pages after it in `make
    test-all`.
    """
    needed = (
        [pytest.mark.needs("a C++ compiler")]
        if re.search(r"train\.compile[ =]on", piece.text)
        else []
    )
    return needed + ([] if piece.page == README else [pytest.mark.slow])


NUMBERS = [
    pytest.param(number, id=str(piece), marks=marks(piece)) for number, piece in enumerate(PIECES)
]
PAGE_PARAMETERS = [
    pytest.param(page, id=page.name, marks=[] if page == README else [pytest.mark.slow])
    for page in PAGES
]


@pytest.mark.parametrize("number", NUMBERS)
def test_every_command_of_the_documents_works(reader: Reader, number: int) -> None:
    problem = reader.outcome(number)
    assert problem is None, f"{PIECES[number]}: {problem}"


COMMANDS = [
    pytest.param(command[0], id=str(piece))
    for piece in PIECES
    if piece.kind == "sh" and (command := of_lmforge(piece.text))
]


@pytest.mark.parametrize("words", COMMANDS)
def test_every_lmforge_command_of_the_documents_is_accepted(words: list[str]) -> None:
    """Verb, options and recipe, where that is in the repository."""
    for folder in ("recipes", "examples"):
        Path(folder).symlink_to(ROOT / folder)
    name, *arguments = words
    if arguments and arguments[0].endswith(".toml") and not Path(arguments[0]).is_file():
        arguments = arguments[1:]
    if name not in ("-h", "--help", "run") and not {"-h", "--help"} & set(arguments):
        parse_command(name, [word for word in arguments if word != "--debug"])


def test_the_readme_begins_with_the_two_commands_of_a_newcomer() -> None:
    assert [piece.text for piece in PIECES[:2]] == ["make quickstart", "make test"]


def test_the_readme_shows_the_training_step_as_it_is() -> None:
    source = textwrap.dedent(inspect.getsource(train_step))
    [function] = ast.parse(source).body
    assert isinstance(function, ast.FunctionDef)
    _, first, *_ = function.body
    lines = source.splitlines()[first.lineno - 1 :]
    step = textwrap.dedent("\n".join(lines))
    assert f"```py\n{step}\n```\n" in README.read_text(encoding="utf-8")
    assert len(lines) <= 25


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_option_that_a_page_names_exists(page: Path) -> None:
    # The last section of the log names what is no more.
    text, _, _ = page.read_text(encoding="utf-8").partition("\n## Dropped, and why\n")
    # The options of launchers and of programs are tried out with the line that has them.
    lines = text.splitlines()
    text = "\n".join(
        line
        for line in lines
        if not line.startswith(("#SBATCH ", "torchrun ", "srun ", "mpiexec ", "python ", "VLLM_"))
    )
    named = set(re.findall(r"(?<![\w-])--([A-Za-z][\w.-]*\w)", text))
    assert {name for name in named if "." in name} <= OF_A_RUN
    assert {name for name in named if "." not in name} <= OF_VERBS | FLAGS
    sections = {name.partition(".")[0] for name in OF_A_RUN}
    written = {
        name
        for name in re.findall(r"`([a-z]+\.[a-z_]+)`", text)
        if name.partition(".")[0] in sections
    }
    assert {name for name in written if not name.endswith((".py", ".toml"))} <= OF_A_RUN


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_make_target_that_a_page_names_exists(page: Path) -> None:
    for line in re.findall(r"`(make [a-z-]+)`", page.read_text(encoding="utf-8")):
        assert make_line(line) is None


def anchors(page: Path) -> set[str]:
    """The anchors of the headings of a page, as GitHub and the site make them."""
    text = re.sub(r"\]\([^)]*\)", "", FENCED.sub("", page.read_text(encoding="utf-8")))
    headings = re.findall(r"^#+ (.*)$", text, re.M)
    return {
        re.sub(r"[^\w -]", "", heading).strip().lower().replace(" ", "-") for heading in headings
    }


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_heading_that_a_link_leads_to_exists(page: Path) -> None:
    links = re.findall(r"\]\(([^)#:\s]*)#([^)\s]+)\)", page.read_text(encoding="utf-8"))
    targets = [((page.parent / file).resolve() if file else page, anchor) for file, anchor in links]
    assert [
        (target, name)
        for target, name in targets
        if target.suffix == ".md" and name not in anchors(target)
    ] == []


@pytest.mark.parametrize("page", PAGE_PARAMETERS)
def test_every_file_that_a_page_names_is_in_the_repository_or_made_by_its_commands(
    reader: Reader, page: Path
) -> None:
    text = page.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#:]+)\)", text):
        assert (page.parent / target).exists(), f"link to {target}"
    reader.outcome(LAST_OF_README if page == README else len(PIECES) - 1)
    names = re.findall(r"`(\.?\w[\w.-]*(?:/[\w.-]+)*/?)`", text)
    for name in names:
        if name.startswith(METRICS) or ("/" not in name and Path(name).suffix not in OF_FILES):
            continue
        if name.startswith(".venv/bin/"):
            assert (BIN / Path(name).name).exists(), name
            continue
        pattern = name.rstrip("/").replace("NAME", "*")
        in_package = any((ROOT / "lmforge").rglob(pattern))
        assert in_package or (ROOT / pattern).exists() or any(reader.folder.rglob(pattern)), name


def test_the_first_page_lists_all_that_is_in_a_run_directory_and_nothing_else(
    reader: Reader,
) -> None:
    reader.outcome(LAST_OF_README)
    [listing] = re.findall(
        r"^runs/small/\n(.*?)^```$", START.read_text(encoding="utf-8"), re.M | re.S
    )
    listed = {line.split()[0].rstrip("/") for line in listing.splitlines()}
    there = {
        entry.name
        for entry in (reader.folder / "runs" / "small").iterdir()
        if not entry.name.startswith(".")
    }
    assert listed == there


def test_extras_are_installed_by_one_command_which_stands_on_the_first_page_alone() -> None:
    page = START.read_text(encoding="utf-8")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert set(
        re.findall(
            r"^\| `(\w+)` \|", page.partition("\n## Extras\n")[2].partition("\n## ")[0], re.M
        )
    ) == (project["optional-dependencies"].keys() - {"dev"})
    pages = [path for path in [*PAGES, *ROOT.glob("recipes/**/*.md")] if path.name != "log.md"]
    commands = {
        page: re.findall(r"^.*pip install.*$", page.read_text(encoding="utf-8"), re.M)
        for page in pages
    }
    assert {page: lines for page, lines in commands.items() if lines} == {
        START: [how_to_install("serve")]
    }
    named = [
        path for path in PACKAGE.rglob("*.py") if "pip install" in path.read_text(encoding="utf-8")
    ]
    assert named == [PACKAGE / "core" / "errors.py"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_row_of_a_table_stands_below_its_head(page: Path) -> None:
    """Rows after a blank line have no head of their own, and are shown as raw pipes."""
    lines = FENCED.sub("", page.read_text(encoding="utf-8")).splitlines()
    first = [
        number
        for number in range(1, len(lines))
        if lines[number].startswith("|") and not lines[number - 1].startswith("|")
    ]
    assert [
        lines[number] for number in first if not re.match(r"\|[\s:|-]+\|$", lines[number + 1])
    ] == []
