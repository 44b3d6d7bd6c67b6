"""The table of verbs: options and function of each. A verb that is added here is in `lmforge --help` and in pipelines.

Functions are named by strings, so that reading the table imports nothing that the verbs need.
"""

import gc
import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from lmforge.core.options.options import Options
from lmforge.core.options.stage import PretrainConfig
from lmforge.lab.options import bench, ladder, plan
from lmforge.ops.options import examine, running
from lmforge.post.options.align import AlignConfig
from lmforge.post.options.tuning import DistillConfig, SftConfig
from lmforge.serve.options import models
from lmforge.text.options import prepare


@contextmanager
def imports_not_garbage() -> Iterator[None]:
    """For a block of imports: importing torch creates hundreds of thousands of lasting objects. The garbage collector would
    scan them repeatedly, which takes half a second. It is paused for the block, and excludes these objects afterwards."""
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
    writes: its work is what it writes or serves, not what it prints: it goes on where nothing reads its output.
    pass_arguments: the function is called with the command line too, without the verb.
    """

    options: type[Options]
    function: str
    distributed: bool = False
    writes: bool = False
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
    "quickstart": Verb(running.QuickstartOptions, "lmforge.lab.verbs.quickstart:quickstart", writes=True),
    "prepare": Verb(prepare.PrepareOptions, "lmforge.text.verbs.prepare:run_prepare", writes=True),
    "pretrain": Verb(PretrainConfig, "lmforge.core.run:run_stage", distributed=True, writes=True),
    "sft": Verb(SftConfig, "lmforge.core.run:run_stage", distributed=True, writes=True),
    "distill": Verb(DistillConfig, "lmforge.core.run:run_stage", distributed=True, writes=True),
    "align": Verb(AlignConfig, "lmforge.core.run:run_stage", distributed=True, writes=True),
    "run": Verb(running.RunPipelineOptions, "lmforge.ops.verbs.running.pipeline:run_pipeline", writes=True),
    "launch": Verb(running.LaunchVerbOptions, "lmforge.ops.verbs.running.launch:run_launch", writes=True),
    "jobs": Verb(running.JobsOptions, "lmforge.ops.verbs.running.jobs:run_jobs"),
    "stop": Verb(running.StopOptions, "lmforge.ops.verbs.running.jobs:run_stop"),
    "evaluate": Verb(models.EvaluateOptions, "lmforge.serve.verbs.evaluate:run_evaluate", distributed=True),
    "generate": Verb(models.GenerateOptions, "lmforge.serve.verbs.generate:run_generate"),
    "chat": Verb(models.ChatOptions, "lmforge.serve.verbs.chat:run_chat"),
    "serve": Verb(models.ServeOptions, "lmforge.serve.verbs.generate:run_serve", writes=True),
    "export": Verb(models.ExportOptions, "lmforge.ops.verbs.export:run_export", writes=True),
    "import": Verb(models.ImportOptions, "lmforge.ops.verbs.export:run_import", writes=True),
    "download": Verb(models.DownloadOptions, "lmforge.ops.verbs.download:run_download", writes=True),
    "bench": Verb(bench.BenchConfig, "lmforge.lab.bench.step_timing:bench", distributed=True, pass_arguments=True),
    "plan": Verb(plan.PlanConfig, "lmforge.lab.verbs.plan:run_plan"),
    "ladder": Verb(ladder.LadderConfig, "lmforge.lab.verbs.ladder:run_ladder", writes=True),
    "doctor": Verb(examine.DoctorOptions, "lmforge.ops.verbs.doctor:run_doctor", distributed=True),
    "logs": Verb(running.LogsOptions, "lmforge.ops.verbs.running.logs:run_logs"),
    "top": Verb(running.TopOptions, "lmforge.ops.verbs.running.top:run_top"),
    "runs": Verb(running.RunsOptions, "lmforge.ops.verbs.running.list_runs:list_runs"),
    "compare": Verb(running.CompareOptions, "lmforge.lab.verbs.compare:run_compare"),
    "report": Verb(running.ReportOptions, "lmforge.ops.verbs.running.report:run_report"),
    "show": Verb(examine.ShowOptions, "lmforge.ops.verbs.show.show:run_show"),
}
