"""The table of verbs: options and function of each. A verb that is added here is in `lmforge --help` and in pipelines.

Functions are named by strings, so that the table is there without importing what the verbs need.
"""

import gc
import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from lmforge.config import verbs as options
from lmforge.config.align import AlignConfig
from lmforge.config.benching import BenchConfig
from lmforge.config.launch import JobsOptions, LaunchVerbOptions, StopOptions
from lmforge.config.options import Options
from lmforge.config.planning import PlanConfig
from lmforge.config.stage import PretrainConfig
from lmforge.config.tuning import SftConfig
from lmforge.config.watching import LogsOptions, ReportOptions, RunsOptions, TopOptions


@contextmanager
def imports_not_garbage() -> Iterator[None]:
    """Around imports: torch's make hundreds of thousands of objects that stay. The collector, which would look through them
    again and again for half a second, waits for the end, and leaves them out from then on."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_on:
            gc.enable()


@dataclass(frozen=True)
class Verb:
    """A verb: its options, and the function that carries it out.

    options: a class whose docstring begins with the verb's usage and summary, `lmforge VERB ARGUMENTS: SUMMARY.`
    function: "module:name", called with the options; it returns the exit status.
    distributed: the options name a number of processes; `lmforge` starts that many ranks, which call the function together.
    pass_arguments: the function is called with the command line too, without the verb.
    """

    options: type[Options]
    function: str
    distributed: bool = False
    pass_arguments: bool = False

    @property
    def usage(self) -> str:
        return (self.options.__doc__ or "").partition(": ")[0]

    @property
    def summary(self) -> str:
        return (self.options.__doc__ or "").partition(": ")[2].removesuffix(".")

    def load(self) -> Callable[..., int]:
        module, _, name = self.function.partition(":")
        with imports_not_garbage():
            function: Callable[..., int] = getattr(importlib.import_module(module), name)
        return function


VERBS = {
    "quickstart": Verb(options.QuickstartOptions, "lmforge.verbs.quickstart:quickstart"),
    "prepare": Verb(options.PrepareOptions, "lmforge.verbs.prepare:run_prepare"),
    "pretrain": Verb(PretrainConfig, "lmforge.stages.run:pretrain", distributed=True),
    "sft": Verb(SftConfig, "lmforge.stages.run:sft", distributed=True),
    "align": Verb(AlignConfig, "lmforge.stages.run:align", distributed=True),
    "run": Verb(options.RunPipelineOptions, "lmforge.verbs.pipeline:run_pipeline"),
    "launch": Verb(LaunchVerbOptions, "lmforge.verbs.launch:run_launch"),
    "jobs": Verb(JobsOptions, "lmforge.verbs.jobs:run_jobs"),
    "stop": Verb(StopOptions, "lmforge.verbs.jobs:run_stop"),
    "evaluate": Verb(options.EvaluateOptions, "lmforge.verbs.evaluate:run_evaluate", distributed=True),
    "generate": Verb(options.GenerateOptions, "lmforge.verbs.generate:run_generate"),
    "chat": Verb(options.ChatOptions, "lmforge.verbs.chat:run_chat"),
    "serve": Verb(options.ServeOptions, "lmforge.verbs.generate:run_serve"),
    "export": Verb(options.ExportOptions, "lmforge.verbs.export:run_export"),
    "import": Verb(options.ImportOptions, "lmforge.verbs.export:run_import"),
    "download": Verb(options.DownloadOptions, "lmforge.verbs.download:run_download"),
    "bench": Verb(BenchConfig, "lmforge.bench.step_timing:bench", distributed=True, pass_arguments=True),
    "plan": Verb(PlanConfig, "lmforge.verbs.plan:run_plan"),
    "doctor": Verb(options.DoctorOptions, "lmforge.verbs.doctor:run_doctor", distributed=True),
    "logs": Verb(LogsOptions, "lmforge.verbs.logs:run_logs"),
    "top": Verb(TopOptions, "lmforge.verbs.top:run_top"),
    "runs": Verb(RunsOptions, "lmforge.verbs.list_runs:list_runs"),
    "report": Verb(ReportOptions, "lmforge.verbs.report:run_report"),
    "show": Verb(options.ShowOptions, "lmforge.verbs.show:run_show"),
}
