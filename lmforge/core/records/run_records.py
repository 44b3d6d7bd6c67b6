"""Reads the records of a run: the lines of metrics.jsonl and of its tables of completions, and
files of bad steps. No torch.

core/stages/run_files.py and post/rl/scoring.py write them. Here are also the types of the numbers in
all files of a run, which bound them: another program may have written these files, or a disk
damaged them.
"""

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, Field, FiniteFloat

from lmforge.core.errors import UserError
from lmforge.core.files.untrusted import open_file, parse_json, read_json, read_lines
from lmforge.core.options.ranges import COUNT_OR_0, RANKS

MAX_METRICS_LINE_BYTES = 2**20
# How much of the end of metrics.jsonl is read, which may have gigabytes. The last validation may be
# many log steps back.
METRICS_TAIL_BYTES = 2**18
COMPLETIONS_FOLDER = "completions"  # in the run
MAX_COMPLETION_LINE_BYTES = 2**22  # with its prompt; longer ones are left out
# The last words of metrics of which the highest is best; in pass@K any K. Of all others, such as
# losses, the lowest is.
HIGHER_IS_BETTER = frozenset(
    {
        "acc",
        "acc_norm",
        "exact_match",
        "contains",
        "regex",
        "accuracy",
        "margin",
        "reward",
        "pass@k",
    }
)
LARGEST_METRIC = 1e100  # more than fp32 has; sums and products with numbers of steps stay finite


def _known_metric(value: float) -> float | None:
    return value if abs(value) <= LARGEST_METRIC else None


# The numbers in files of a run. Sums and products of a few of them can be printed, and fit into a
# double.
StepNumber = Annotated[int, Field(**COUNT_OR_0)]
NumRanks = Annotated[int, Field(**RANKS)]
Count = Annotated[int, Field(ge=0, le=2**62)]  # bytes, tokens, process ids
Measure = Annotated[float, Field(ge=-LARGEST_METRIC, le=LARGEST_METRIC)]
EpochSeconds = Annotated[float, Field(ge=0, le=2.5e11)]  # Python has no date after the year 9999
# A metric that is larger counts as not finite, so that the others of its line are kept.
Metric = Annotated[FiniteFloat, AfterValidator(_known_metric)] | None


def higher_is_better(metric: str) -> bool:
    """Whether the highest value of a metric is best, by its name: an accuracy, a reward or a pass
    rate.
    """
    name = metric.removeprefix("val/")
    if name.startswith(("loss/", "bits_per_byte/")):  # then the last word is the name of a source
        return False
    word = name.rpartition("/")[2]
    return re.sub(r"@\w+$", "@k", word) in HIGHER_IS_BETTER


class MetricsRecord(BaseModel, extra="allow"):
    """A line of metrics.jsonl: the step, and metrics by name."""

    __pydantic_extra__: dict[str, Metric] = Field(init=False)
    step: StepNumber


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Every record of a file; of a step that was trained twice (after a resume), the last one
    counts.

    Lines that are no record with a step are skipped, such as half a line. Raises OSError.
    """
    with open_file(path) as file:
        return without_repeated_steps(_parsed(read_lines(file, MAX_METRICS_LINE_BYTES)))


def without_repeated_steps(records: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Records in ascending order of their "step": where that falls, those from there on are
    replaced.
    """
    kept: list[dict[str, Any]] = []
    for record in records:
        while kept and kept[-1]["step"] >= record["step"]:
            kept.pop()
        kept.append(record)
    return kept


def read_last_metrics(path: Path) -> dict[str, Any]:
    """`newest_values` of the last METRICS_TAIL_BYTES of a file. Raises OSError."""
    with open_file(path) as file:
        begin = file.seek(max(0, file.seek(0, os.SEEK_END) - METRICS_TAIL_BYTES))
        lines = file.read(METRICS_TAIL_BYTES).split(b"\n")
    return newest_values(_parsed(lines[1:] if begin else lines))


def newest_values(records: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """The newest value of each metric, None where that is not finite; validation is rarer than
    other metrics.
    """
    return {name: value for record in records for name, value in record.items()}


def skipped_batches(records: Sequence[dict[str, Any]]) -> int:
    """How many batches rollbacks had left out at the last step (`batch_offset`); 0 where no record
    says so.
    """
    # Records of validation alone do not have it.
    offsets = (record.get("batch_offset") for record in reversed(records))
    is_count = (
        value
        for value in offsets
        if value is not None and value.is_integer() and abs(value) <= COUNT_OR_0["le"]
    )
    return int(next(is_count, 0))


def _parsed(lines: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    for line in lines:
        with suppress(UserError):
            yield parse_json(line, MetricsRecord, "").model_dump()


class CompletionRecord(BaseModel):
    """A line of a table of completions: the reward, None where there is none, as a whole and by
    function (`parts`), and whether a stop token ended the completion.
    """

    prompt: str | list[dict[str, Any]]
    completion: str
    reward: Metric
    parts: dict[str, Metric] = Field(default_factory=dict)
    tokens: Count
    ended: bool

    @property
    def prompt_text(self) -> str:
        """The prompt as text: turns of a conversation after their roles."""
        if isinstance(self.prompt, str):
            return self.prompt
        return "\n\n".join(f"{turn.get('role')}: {turn.get('content')}" for turn in self.prompt)


def completions_path(run_folder: Path, table: str, rank: int | str) -> Path:
    """The file of a table of completions that a rank has written."""
    return run_folder / COMPLETIONS_FOLDER / f"{table}-rank-{rank}.jsonl"


def completion_tables(run_folder: Path) -> list[str]:
    """The names of the tables that rank 0 has written."""
    paths = run_folder.glob(str(completions_path(Path(), "*", 0)))
    ending = completions_path(Path(), "", 0).name
    return sorted(path.name.removesuffix(ending) for path in paths)


def read_first_completions(run_folder: Path, table: str, limit: int) -> Iterator[CompletionRecord]:
    """The completions of rank 0 in the first `limit` lines of a table.

    Invalid lines are left out; a missing file has none.
    """
    path = completions_path(run_folder, table, 0)
    with suppress(OSError), open_file(path) as file:
        for line in islice(read_lines(file, MAX_COMPLETION_LINE_BYTES), limit):
            with suppress(UserError):
                yield parse_json(line, CompletionRecord, path.name)


class BadStepFile(BaseModel, extra="allow"):
    """The file of a bad step: its samples, or with rollouts its completions."""

    step: Count
    reason: str = Field(max_length=200)
    samples: tuple[Count, Count] | None = None
    plan_hash: str = ""
    completions: str | None = Field(None, pattern=r"^completions/[A-Za-z0-9_-]+\*\.jsonl$")
    ranks: int = Field(1, ge=1, le=1_000_000)
    part: tuple[Count, Annotated[int, Field(ge=1)]] = (0, 1)


def read_bad_step(file: Path) -> BadStepFile:
    """The file that core/steps/bad_steps.py has written. Raises UserError for any other."""
    with suppress(UserError):
        record = read_json(file, BadStepFile)
        samples = record.samples
        if (
            samples and samples[0] < samples[1] and record.plan_hash
        ) or "completions" in record.model_fields_set:
            return record
    raise UserError(
        f"{file}: not the file of a bad step; with --tokenizer MODEL a file of examples is shown"
    )
