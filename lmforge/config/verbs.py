"""The options of the verbs that do not train, and the contents of a pipeline file."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar, Literal

from lmforge.config.options import Options, argument, option, section
from lmforge.config.ranges import (
    BYTES,
    COUNT,
    COUNT_OR_0,
    LENGTH,
    MODEL_RANGES,
    NONZERO_FRACTION,
    RANKS,
    SCALE_OR_0,
    SEED,
    SEQUENCES,
    THREADS,
    TOKENS,
)
from lmforge.config.sections import Device, DType, ExampleFormat
from lmforge.config.stage import PretrainConfig
from lmforge.untrusted import cut, name_problem

ExportDType = Literal["fp32", "bf16", "fp16"]
MODEL = "a run, a checkpoint, a Hugging Face folder or a name on the hub"


class PrepareOptions(Options):
    """lmforge prepare [SOURCE] [OUT]: text → tokenizer → token shards."""

    source: str = argument(
        "stdlib",
        "stdlib (the Python standard library's source), functions (requests for its functions), or a file or folder of text",
    )
    out: Path = argument(Path("data/stdlib"), "folder to write (default: data/stdlib, of stdlib alone)")
    tokenizer: Path | None = option(None, "a tokenizer.json, a folder with one, or a name on the hub (default: train one)")
    vocab_size: int = option(4096, "vocabulary size of a tokenizer that is trained here", gt=300, le=1_000_000)
    text_field: str = option("text", "field of the text in jsonl and parquet")
    validation_ratio: float = option(0.02, "fraction of the documents kept for validation", gt=0, lt=1)
    shard_tokens: int = option(100_000_000, "tokens in one shard file", **TOKENS)
    seed: int = option(0, "seed of the order of documents", **SEED)
    workers: int | None = option(None, "worker processes (default: the number of cores)", **THREADS)
    overwrite: bool = option(False, "delete what another preparation left in OUT")

    def problems(self) -> Iterator[str]:
        if self.source != "stdlib" and "out" not in self.model_fields_set:
            example = f"data/{Path(self.source).name.partition('.')[0] or 'mine'}"
            yield f"prepare: name the folder to write after the source, such as {cut(example)}"


class EvaluateOptions(Options):
    """lmforge evaluate MODEL: loss and bits per byte on validation documents, or scores of tasks."""

    model: Path = argument(..., MODEL)
    data: Path | None = option(
        None, "token shards, or files: text, jsonl, parquet, conversations (default: what the run was trained on)"
    )
    split: Literal["validation", "train"] = option("validation", "split of prepared data; of files all is used")
    sequences: int | None = option(None, "sequences to measure, evenly spaced over the split (default: all)", **COUNT)
    sequence_length: int | None = option(None, "tokens in a sequence (default: as in training)", **LENGTH)
    batch_size: int = option(16, "sequences in one forward pass", **SEQUENCES)
    tasks: tuple[str, ...] = option((), "files of questions, one JSON object a line: print their scores instead of the loss")
    lm_eval: tuple[str, ...] = option((), "tasks of lm-evaluation-harness by name: print their scores instead of the loss")
    lm_eval_include_path: Path | None = option(None, "folder with more tasks for the harness, as YAML files")
    num_fewshot: int | None = option(
        None, "examples before each question (default: none, or the harness task's own)", **COUNT_OR_0
    )
    fewshot_file: Path | None = option(None, "file of questions to take the examples from (default: the task's own)")
    limit: int | None = option(None, "use the first so many questions of each task (default: all)", **COUNT)
    max_tokens: int = option(64, "longest generated answer, in tokens", **LENGTH)
    stop: tuple[str, ...] = option(("\n",), "strings that end a generated answer")
    answers: Path | None = option(None, "new file for the answer to each question of the tasks, as JSON lines")
    device: Device = option("auto", "auto is cuda where there is one")
    dtype: DType = option("fp32", "compute dtype")
    processes: int = option(1, "ranks to start on this machine, which share the work; leave it out under torchrun", **RANKS)
    output: Literal["text", "json"] = option("text", "output format")

    def problems(self) -> Iterator[str]:
        scores = bool(self.tasks or self.lm_eval)
        conditions = {
            "data split sequences sequence_length": (
                not scores,
                "of the loss on documents only, which --tasks and --lm_eval replace",
            ),
            "num_fewshot limit": (scores, "only with --tasks or --lm_eval"),
            "fewshot_file max_tokens stop": (bool(self.tasks), "only with --tasks"),
            "answers": (bool(self.tasks) and not self.lm_eval, "only with --tasks, and not with --lm_eval"),
            "lm_eval_include_path": (bool(self.lm_eval), "only with --lm_eval"),
        }
        changed = self.changed()
        for names, (is_read, reason) in conditions.items():
            for name in names.split():
                if name in changed and not is_read:
                    yield f"--{name}: {reason}; leave it out"


class SamplingOptions(Options):
    """How tokens are chosen."""

    temperature: float = option(0.8, "sampling temperature; 0 is greedy", **SCALE_OR_0)
    top_k: int = option(0, "sample from the k likeliest tokens; 0 for all", **COUNT_OR_0)
    top_p: float = option(1.0, "sample from the likeliest tokens that hold this probability", **NONZERO_FRACTION)
    seed: int | None = option(None, "seed of the sampling (default: random)", **SEED)
    device: Device = option("auto", "auto is cuda where there is one")
    dtype: DType = option("auto", "compute dtype")


class GenerateOptions(SamplingOptions):
    """lmforge generate MODEL [PROMPT …]: text from a run, a checkpoint or a Hugging Face folder."""

    model: Path = argument(..., MODEL)
    prompts: tuple[str, ...] = argument((), "one or more prompts; none reads one from standard input")
    max_tokens: int = option(128, "tokens to generate after each prompt", **LENGTH)
    stop: tuple[str, ...] = option((), "strings that end a completion")


class ChatOptions(SamplingOptions):
    """lmforge chat MODEL: a conversation with a model, in the terminal or over pipes, a line a turn."""

    model: Path = argument(..., MODEL)
    system: str | None = option(None, "system message")
    max_tokens: int | None = option(None, "longest answer, in tokens (default: what there is room for)", **LENGTH)
    max_length: int | None = option(
        None, "longest conversation, in tokens (default: what the model was made for, up to 4096)", **LENGTH
    )


class ServeOptions(Options):
    """lmforge serve MODEL [MODEL …]: an OpenAI-compatible API, and a page to chat on."""

    models: tuple[Path, ...] = argument(..., "runs (with all their checkpoints), checkpoints, Hugging Face folders or names")
    host: str = option("127.0.0.1", "address to listen on; 0.0.0.0 and :: are all of this machine's")
    port: int = option(8000, "port to listen on; 0 takes a free one", ge=0, le=65535)
    api_key: str | None = option(None, "key that requests must have (default: the environment's LMFORGE_API_KEY, if set)")
    without_key: bool = option(False, "accept requests without a key on an address that other machines reach")
    max_batch_size: int = option(16, "requests that a model decodes at once", **SEQUENCES)
    max_queue: int = option(64, "further requests that wait for a model; beyond, requests are refused with 429", **COUNT_OR_0)
    max_length: int | None = option(
        None, "longest prompt with its answer, in tokens (default: what the model was made for, up to 4096)", **LENGTH
    )
    max_body_bytes: int = option(4 * 2**20, "largest request, in bytes", **BYTES)
    max_models: int = option(2, "models in memory at once; beyond, the least recently used one is closed", **COUNT)
    device: Device = option("auto", "auto is cuda where there is one")
    dtype: DType = option("auto", "compute dtype")

    def problems(self) -> Iterator[str]:
        if not self.models:
            yield "--models: expected at least one"


class ExportOptions(Options):
    """lmforge export MODEL OUT: a checkpoint as a Hugging Face folder, in bounded memory."""

    model: Path = argument(..., "a run or a checkpoint")
    out: Path = argument(..., "folder to write")
    adapters: bool = option(False, "write the adapters alone, in PEFT's layout, instead of the model with them merged")
    dtype: ExportDType = option("fp32", "dtype of the weights; bf16 and fp16 halve them, and round")
    overwrite: bool = option(False, "replace OUT if it is a folder of a model or of adapters")


class ImportOptions(Options):
    """lmforge import SOURCE OUT: another trainer's checkpoint as a Hugging Face folder."""

    source: Path = argument(..., "nanoGPT's ckpt.pt, a DCP folder of torchtitan, a DCP folder or a .pth of fms-fsdp")
    out: Path = argument(..., "folder to write")
    layout: Literal["auto", "nanogpt", "torchtitan", "fms"] = option("auto", "whose parameter names it has; auto goes by them")
    config_from: str | None = option(
        None, "a preset, a Hugging Face folder or a name on the hub, for values of the next five that are not given"
    )
    num_attention_heads: int | None = option(
        None, "query heads (a nanogpt checkpoint has them)", **MODEL_RANGES["num_attention_heads"]
    )
    rope_theta: float | None = option(
        None, "base of the rotary position embedding's frequencies (torchtitan and fms)", **MODEL_RANGES["rope_theta"]
    )
    rms_norm_eps: float | None = option(None, "epsilon of the norms (default: 1e-5)", **MODEL_RANGES["rms_norm_eps"])
    max_position_embeddings: int | None = option(
        None, "longest sequence it was trained for (default: 4096)", **MODEL_RANGES["max_position_embeddings"]
    )
    activation: Literal["gelu", "gelu_new"] | None = option(
        None, "nanogpt: gelu, or gelu_new where it was trained before June 2023 (default: gelu)"
    )
    tokenizer: Path | None = option(None, "its tokenizer.json, a folder with one, or a name on the hub (default: none)")
    dtype: ExportDType | None = option(None, "dtype of the weights (default: as they are stored)")
    overwrite: bool = option(False, "replace OUT if it is a folder of a model")


class DownloadOptions(Options):
    """lmforge download NAME [FOLDER]: a model of the Hugging Face hub, for hosts without a network."""

    name: str = argument(..., "a model on the hub: organisation/model, or organisation/model@revision")
    folder: Path | None = argument(None, "folder to download to (default: the hub's cache, where its name finds it)")
    revision: str | None = option(None, "branch, tag or commit (default: main)")


class ShowOptions(Options):
    """lmforge show THING [OF]: what a recipe, model, shard folder, run or checkpoint is; `show data OF`: samples of it."""

    thing: str = argument(
        ..., "recipe.toml, preset name, Hugging Face folder or name, shard folder, run, checkpoint, `presets` or `data`"
    )
    of: Path | None = argument(None, "with `data`: a run, the file of a bad step, or a file of conversations, pairs or prompts")
    tokenizer: Path | None = option(None, "with `data` and a file of examples: model whose tokenizer and template to use")
    mask: Literal["assistant", "last", "all"] = option("assistant", "with such a file: tokens in the loss, as data.mask")
    format: ExampleFormat = option("auto", "with such a file: format of the records, as data.format; or prompts")
    fields: tuple[str, ...] = option((), "with such a file: fields that have other names there, OURS=THEIRS, as data.fields")
    apply_chat_template: bool = option(False, "with such a file: strings become turns, as data.apply_chat_template")
    samples: str | None = option(
        None, "with `data`: numbers of samples or records, FIRST:AFTER_LAST (default: the first 3, or those of a bad step)"
    )


class QuickstartOptions(Options):
    """lmforge quickstart: the whole way on the Python standard library's source, some 5 minutes on 2 cores."""

    folder: Path = option(Path("."), "folder for data and runs")
    steps: int | None = option(
        None, "steps of each stage, up to 10 with small batches (default: the recipe's)", **{**COUNT, "gt": 1}
    )
    processes: int | None = option(None, "ranks to start (default: one for each GPU, or one)", **RANKS)
    prompt: str = option("def ", "prompt that the model continues at the end")
    overwrite: bool = option(False, "begin again instead of continuing")


class DoctorOptions(Options):
    """lmforge doctor [--parity [--processes N]]: check this machine; with --parity, compare every strategy with one process."""

    parity: bool = option(False, "train a small model with every strategy that fits the ranks, and compare")
    processes: int = option(1, "ranks to start on this machine; leave it out under torchrun", **RANKS)
    steps: int = option(10, "steps with each strategy", gt=1, le=10_000)
    compile: bool = option(False, "compiled blocks too")
    seed: int = option(0, "seed of weights and data", **SEED)
    device: Device = option("auto", "auto is cuda where there is one")
    output: Literal["text", "json"] = option("text", "output format")

    def problems(self) -> Iterator[str]:
        ignored = [name for name in ("processes", "steps", "compile", "seed") if name in self.changed()]
        if ignored and not self.parity:
            yield f"--{ignored[0]}: applies to --parity only; add --parity, or leave it out"


class BenchOptions(Options):
    """What is timed, and for how long."""

    steps: int = option(10, "timed steps", **COUNT)
    warmup_steps: int = option(3, "untimed steps before them, which include compilation", **COUNT)
    sweep: tuple[str, ...] = option((), "section.option=value,value…: time every combination and print one table")
    trace: Path | None = option(None, "write a profiler trace of one step, for Perfetto (.json or .json.gz)")
    output: Literal["text", "json"] = option("text", "output format")


class BenchConfig(PretrainConfig):
    """lmforge bench [RECIPE.toml] [--sweep section.option=value,value …] [--trace FILE]: speed and memory of a step."""

    ESSENTIAL: ClassVar[tuple[str, ...]] = (
        "bench.steps",
        "bench.warmup_steps",
        "bench.sweep",
        "bench.trace",
        "bench.output",
        "data.sequence_length",
        "model.preset",
        "model.source",
        "train.global_batch_size",
        "train.micro_batch_size",
        "train.dtype",
        "train.compile",
        "parallel.engine",
        "parallel.sharding",
        "parallel.activation_checkpointing",
        "launch.processes",
    )
    bench: BenchOptions = section(BenchOptions, "what is timed")


class RunPipelineOptions(Options):
    """lmforge run PIPELINE.toml: a pipeline: stages in order, each from the run of the one before it."""

    file: Path = argument(..., "a TOML file of [[stages]]: each a verb, with a recipe and arguments")


class PipelineStageOptions(Options):
    """One stage: a verb with its arguments, as typed after `lmforge`."""

    verb: str = option(..., "verb, such as pretrain, sft, align, prepare, evaluate, export")
    name: str | None = option(None, "name by which later stages refer to its run, as {NAME} (default: the verb)")
    recipe: Path | None = option(None, "recipe of a verb that trains, relative to the pipeline file")
    arguments: tuple[str, ...] = option((), "further arguments; {NAME} stands for the run of an earlier stage")


class PipelineOptions(Options):
    """A pipeline file: where its runs are, and [[stages]]."""

    name: str | None = option(None, "name of the pipeline; runs are FOLDER/NAME-STAGE (default: the file's name)")
    folder: Path = option(Path("runs"), "folder that holds the runs")
    stages: tuple[PipelineStageOptions, ...] = option(..., "[[stages]], in order")

    def problems(self) -> Iterator[str]:
        if self.name and (problem := name_problem(self.name)):
            yield f"name: {problem}"
        names = [stage.name or stage.verb for stage in self.stages]
        for name in names:
            if names.count(name) > 1:
                yield f"stages: two are called {cut(name)}; give each its own name"
            if not re.fullmatch(r"[\w.-]+", name):
                yield f"stages: {cut(name)!r} is not a valid name; use letters, digits, dots and dashes"
