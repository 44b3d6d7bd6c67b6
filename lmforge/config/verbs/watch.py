"""The options of the verbs that look at what runs."""

from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from lmforge.config.options import OUTPUT_FORMAT, Options, argument, option
from lmforge.config.ranges import COUNT, RANKS
from lmforge.untrusted import cut, words_problem


class LogsOptions(Options):
    """lmforge logs RUN [--rank N] [--follow] [--errors]: the logs of all ranks in one view, the first error first."""

    run: Path = argument(..., "directory of a run")
    rank: int | None = option(None, "show only this rank (default: all)", ge=0, lt=RANKS["le"])
    follow: bool = option(False, "keep printing new lines, across restarts, until the run ends")
    errors: bool = option(False, "show only errors of failed ranks, the cause first; of all attempts without --attempt")
    attempt: int | None = option(None, "number of the attempt (default: the last)", **COUNT)
    lines: int | None = option(50, "print the last N lines of all ranks together; none prints all", **COUNT)


class RunsOptions(Options):
    """lmforge runs [FOLDER]: all runs in a folder: state, step, loss, speed, and when they last wrote."""

    folder: Path = argument(Path("runs"), "folder that holds the runs")
    watch: bool = option(False, "update the table every two seconds, until Ctrl-C")
    output: Literal["text", "json"] = option("text", "output format: text, or one JSON object per run")

    def problems(self) -> Iterator[str]:
        if self.watch and self.output == "json":
            yield "--watch: not with --output json; call it again instead"


class CompareOptions(Options):
    """lmforge compare RUN RUN [RUN …]: where runs begin to differ by more than rounding, and what else differs in them."""

    runs: tuple[Path, ...] = argument(..., "directories of runs; each is compared with the first")
    weights: bool = option(False, "compare the checkpoints of the same steps too")
    output: Literal["text", "json"] = OUTPUT_FORMAT

    def problems(self) -> Iterator[str]:
        if len(self.runs) < 2:
            yield "runs: name two runs or more"


class ReportOptions(Options):
    """lmforge report RUN [RUN …]: one HTML page of a run, several side by side, or all stages of a pipeline."""

    runs: tuple[Path, ...] = argument(..., "runs, or the TOML file of a pipeline for the runs of its stages")
    out: Path | None = option(None, "file to write (default: report.html, of a single run in its directory)")

    def problems(self) -> Iterator[str]:
        if not self.runs:
            yield "runs: name a run"
        if self.out is not None and self.out.suffix not in (".html", ".htm"):
            yield f"--out: {cut(str(self.out))}: expected a name that ends with .html"


class TopOptions(Options):
    """lmforge top [RUN|HOST …]: what hosts, GPUs and the ranks of a run do, live; without a name, this host."""

    names: tuple[str, ...] = argument((), "directories of runs, and hosts that are asked over ssh (default: this host)")
    slurm_job: int | None = option(None, "ask the hosts of this Slurm job too, over srun", **COUNT)
    once: bool = option(False, "print once, as plain text, and end")
    output: Literal["text", "json"] = option(
        "text", "output format: text, or JSON: without --once one object per line every --interval_seconds"
    )
    interval_seconds: float = option(2.0, "seconds between two samples", ge=0.5, le=3600)
    timeout_seconds: float = option(10.0, "seconds to wait for the first answer of a host", ge=1, le=3600)
    ssh_command: str = option("ssh", "ssh with options of its own, such as `ssh -p 2222`")
    remote_command: str | None = option(
        None, "command that runs lmforge on the other hosts (default: this Python, at the same path there)"
    )

    def problems(self) -> Iterator[str]:
        if problem := words_problem(self.ssh_command):
            yield f"--ssh_command: {problem}"
