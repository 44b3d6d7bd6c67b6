"""The table of verbs: options and function of each. A verb that is added here is in `lmforge --help` and in pipelines.

Functions are named by strings, so that the table is there without importing what the verbs need.
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass

from lmforge.config import verbs as options
from lmforge.config.align import AlignConfig
from lmforge.config.bench import BenchConfig
from lmforge.config.options import Options
from lmforge.config.pipeline import RunPipelineOptions
from lmforge.config.pretrain import PretrainConfig
from lmforge.config.sft import SftConfig


@dataclass(frozen=True)
class Verb:
    """A verb: what it does, how it is called, its options, and the function that carries it out.

    function: "module:name", called with the options; it returns the exit status.
    distributed: the options name a number of processes; `lmforge` starts that many ranks, which call the function together.
    pass_arguments: the function is called with the command line too, without the verb.
    """

    summary: str
    usage: str
    options: type[Options]
    function: str
    distributed: bool = False
    pass_arguments: bool = False
    notes: str = ""

    def load(self) -> Callable[..., int]:
        module, _, name = self.function.partition(":")
        function: Callable[..., int] = getattr(importlib.import_module(module), name)
        return function


RECIPE = "[RECIPE.toml] [--section.option value]"
TRAINING_NOTES = """\
  --dry-run           print the resolved recipe and the batch arithmetic, and stop
  --resume [VALUE]    the same as --run.resume; without a value, required
  --deterministic     the same as --train.deterministic
"""
VERBS = {
    "quickstart": Verb(
        "the whole way on the Python standard library's source, in minutes",
        "[--option value]",
        options.QuickstartOptions,
        "lmforge.verbs.quickstart:quickstart",
    ),
    "prepare": Verb(
        "text → tokenizer → token shards",
        "[SOURCE] [OUT] [--option value]",
        options.PrepareOptions,
        "lmforge.verbs.prepare:run_prepare",
    ),
    "pretrain": Verb(
        "train a model on token shards, or continue a run",
        RECIPE,
        PretrainConfig,
        "lmforge.stages.run:pretrain",
        distributed=True,
        notes=TRAINING_NOTES,
    ),
    "sft": Verb(
        "fine-tune a model on conversations, all of its weights or adapters",
        RECIPE,
        SftConfig,
        "lmforge.stages.run:sft",
        distributed=True,
        notes=TRAINING_NOTES,
    ),
    "align": Verb(
        "align a model with preferences or rewards",
        "[RECIPE.toml] --method dpo|kto|orpo|simpo|reward|grpo [--section.option value]",
        AlignConfig,
        "lmforge.stages.run:align",
        distributed=True,
        notes=TRAINING_NOTES,
    ),
    "run": Verb(
        "a pipeline: stages in order, each from the run of the one before it",
        "PIPELINE.toml",
        RunPipelineOptions,
        "lmforge.verbs.pipeline:run_pipeline",
    ),
    "evaluate": Verb(
        "loss and bits per byte on validation documents, or scores of tasks",
        "MODEL [--option value]",
        options.EvaluateOptions,
        "lmforge.verbs.evaluate:run_evaluate",
        distributed=True,
    ),
    "generate": Verb(
        "text from a run, a checkpoint or a Hugging Face folder",
        "MODEL [PROMPT …] [--option value]",
        options.GenerateOptions,
        "lmforge.verbs.generate:run_generate",
    ),
    "chat": Verb(
        "a conversation with a model, in the terminal",
        "MODEL [--option value]",
        options.ChatOptions,
        "lmforge.verbs.chat:run_chat",
    ),
    "serve": Verb(
        "an OpenAI-compatible API, and a page to chat on",
        "MODEL [MODEL …] [--option value]",
        options.ServeOptions,
        "lmforge.verbs.serve:run_serve",
    ),
    "export": Verb(
        "a checkpoint as a Hugging Face folder, in bounded memory",
        "MODEL OUT [--option value]",
        options.ExportOptions,
        "lmforge.verbs.export:run_export",
    ),
    "import": Verb(
        "another trainer's checkpoint as a Hugging Face folder",
        "SOURCE OUT [--option value]",
        options.ImportOptions,
        "lmforge.verbs.import_model:run_import",
    ),
    "download": Verb(
        "a model of the Hugging Face hub, for hosts without a network",
        "NAME [FOLDER] [--revision REVISION]",
        options.DownloadOptions,
        "lmforge.verbs.download:run_download",
    ),
    "bench": Verb(
        "what a step of a recipe costs: speed, memory, phases; with --sweep, of many",
        f"{RECIPE} [--sweep section.option=value,value …] [--trace FILE]",
        BenchConfig,
        "lmforge.bench.step_timing:bench",
        distributed=True,
        pass_arguments=True,
    ),
    "doctor": Verb(
        "check this machine: every strategy compared with one process",
        "--parity [--processes N]",
        options.DoctorOptions,
        "lmforge.bench.doctor:doctor",
        distributed=True,
    ),
    "show": Verb(
        "what a recipe, model, shard folder, run or checkpoint is", "THING", options.ShowOptions, "lmforge.verbs.show:run_show"
    ),
}
