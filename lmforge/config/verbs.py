"""The options of the verbs that do not train, and the contents of a pipeline file."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar, Literal

from lmforge.config.operation import WHO_STARTED_RANKS, EnvironmentName, JobOptions, LaunchOptions
from lmforge.config.options import PLUGINS_MEANING, Options, argument, option, section
from lmforge.config.ranges import (
    BYTES,
    COUNT,
    COUNT_OR_0,
    DURATION,
    LENGTH,
    MODEL_RANGES,
    NONZERO_FRACTION,
    RANKS,
    SCALE_OR_0,
    SEED,
    SEQUENCES,
    THREADS,
    TOKEN_ID,
    TOKENS,
)
from lmforge.config.sections import Device, DType, ExampleFormat
from lmforge.untrusted import cut, name_problem

ExportDType = Literal["fp32", "bf16", "fp16"]
PACK_OPTIONS = ("pack", "best_fit_length", "workers")
MODEL = "a run, a checkpoint, a Hugging Face folder or a name on the hub"


class PrepareOptions(Options):
    """lmforge prepare [SOURCE] [OUT]: text → tokenizer → token shards."""

    source: str = argument(
        "stdlib",
        "stdlib (the Python standard library's source), functions (requests for its functions), a file or folder of text or of"
        " tokens, or a Hugging Face dataset: a name or a folder",
    )
    out: Path = argument(Path("data/stdlib"), "folder to write (default: data/stdlib, of stdlib alone)")
    tokenizer: Path | None = option(
        None,
        "tokenizer.json, folder with one, SentencePiece .model, name on the hub, bytes, or characters (default: train one)",
    )
    vocab_size: int = option(4096, "vocabulary size of a tokenizer that is trained here", gt=300, le=1_000_000)
    text_field: str = option("text", "field of the text in jsonl, parquet, csv, tsv and tar")
    text_suffixes: tuple[str, ...] = option((), "suffixes of further files that are plain text, such as .log")
    split: str | None = option(None, "split of a Hugging Face dataset (default: train)")
    subset: str | None = option(None, "subset of a Hugging Face dataset, where it has several")
    separator_id: int | None = option(
        None, "id between documents of imported tokens (default: the tokenizer's end- and beginning-of-text ids)", **TOKEN_ID
    )
    hook: str | None = option(
        None, "FILE.py:FUNCTION that is given each document, as a dict, and returns it, or None to leave it out"
    )
    deduplicate: Literal["exact", "near"] | None = option(
        None, "keep the first of equal documents; near: of nearly equal ones too"
    )
    decontaminate: tuple[Path, ...] = option(
        (), "files of questions as --tasks of evaluate takes them; documents that contain one are left out"
    )
    validation_ratio: float = option(0.02, "fraction of the documents kept for validation", gt=0, lt=1)
    shard_tokens: int = option(100_000_000, "tokens in one shard file", **TOKENS)
    best_fit_length: int | None = option(
        None, "pack the training documents for pretrain's data.packing = best-fit, with sequences of so many tokens", **LENGTH
    )
    seed: int = option(0, "seed of the order of documents", **SEED)
    workers: int | None = option(None, "worker processes (default: the number of cores)", **THREADS)
    overwrite: bool = option(False, "delete what another preparation left in OUT")
    environment: EnvironmentName = option("auto", WHO_STARTED_RANKS)
    plugins: tuple[str, ...] = option((), PLUGINS_MEANING)
    verify: str | None = option(None, "instead: read every block of this folder of shards, and name the damaged ones")
    pack: str | None = option(None, "instead: pack this folder of shards, prepared before, for --best_fit_length")

    def problems(self) -> Iterator[str]:
        if self.verify is not None and (given := [name for name in self.changed() if name != "verify"]):
            yield f"--verify: reads a folder and writes none; leave out {given[0]}"
        elif self.pack is not None and (given := [name for name in self.changed() if name not in PACK_OPTIONS]):
            yield f"--pack: reads no source, and writes to the folder that it names; leave out {given[0]}"
        elif self.pack is not None and self.best_fit_length is None:
            yield "--pack: say for how long sequences, such as --best_fit_length 2048"
        if self.source != "stdlib" and "out" not in self.model_fields_set:
            example = f"data/{Path(self.source).name.partition('.')[0] or 'mine'}"
            yield f"prepare: name the folder to write after the source, such as {cut(example)}"
        for suffix in self.text_suffixes:
            if not re.fullmatch(r"\.[^./\0]{1,20}", suffix):
                yield f"--text_suffixes: {cut(suffix)!r} is no suffix; write it with its dot, such as .log"


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
    environment: EnvironmentName = option("auto", WHO_STARTED_RANKS)
    output: Literal["text", "json"] = option("text", "output format")
    plugins: tuple[str, ...] = option((), PLUGINS_MEANING)

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
    plugins: tuple[str, ...] = option((), PLUGINS_MEANING)


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
    plugins: tuple[str, ...] = option((), PLUGINS_MEANING)

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
    plugins: tuple[str, ...] = option((), PLUGINS_MEANING)


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
    """lmforge download NAME [FOLDER]: a model or data set of the Hugging Face hub, or all that a recipe names, for later."""

    name: str = argument(
        ..., "a model or data set on the hub: organisation/name, or organisation/name@revision; or a recipe or pipeline, .toml"
    )
    folder: Path | None = argument(None, "folder to download to (default: the hub's cache, where its name finds it)")
    revision: str | None = option(None, "branch, tag or commit (default: main)")
    dataset: bool = option(False, "NAME is a data set, for lmforge prepare")
    weights: bool = option(True, "of a model the weights too; false: its configuration and tokenizer alone")

    def problems(self) -> Iterator[str]:
        if self.dataset and not self.weights:
            yield "--weights: of a model, and --dataset says that NAME is a data set; leave one of them out"
        if Path(self.name).suffix == ".toml" and (given := [name for name in self.changed() if name != "name"]):
            yield f"--{given[0]}: not with a recipe, which says what to download to the hub's cache; leave it out"


class ShowOptions(Options):
    """lmforge show THING [OF]: what a recipe, model, shard folder, run or checkpoint is; `show data OF`: its data."""

    thing: str = argument(
        ..., "recipe.toml, preset name, Hugging Face folder or name, shard folder, run, checkpoint, `presets` or `data`"
    )
    of: Path | None = argument(
        None, "with `data`: a run, recipe or shard folder, the file of a bad step, or of conversations, pairs or prompts"
    )
    tokenizer: Path | None = option(None, "with `data` and a file of examples: model whose tokenizer and template to use")
    mask: Literal["assistant", "last", "all"] = option("assistant", "with such a file: tokens in the loss, as data.mask")
    format: ExampleFormat = option("auto", "with such a file: format of the records, as data.format; or prompts")
    fields: tuple[str, ...] = option((), "with such a file: fields that have other names there, OURS=THEIRS, as data.fields")
    apply_chat_template: bool = option(False, "with such a file: strings become turns, as data.apply_chat_template")
    samples: str | None = option(
        None, "with `data`: numbers of samples or records, FIRST:AFTER_LAST (default: the first 3, or those of a bad step)"
    )
    sample: int | None = option(
        None, "with `data` and a run, recipe or shard folder: print so many samples, evenly spaced over it", gt=0, le=10_000
    )
    picture: Path | None = option(
        None, "with `data` and a recipe or shard folder: draw the report of its sources and documents too, as FILE.png"
    )

    def problems(self) -> Iterator[str]:
        chosen = [name for name in ("tokenizer", "samples", "sample", "picture") if name in self.changed()]
        if len(chosen) > 1 and chosen != ["tokenizer", "samples"]:
            yield f"--{chosen[1]}: does not go with --{chosen[0]}; leave one of them out"
        if self.picture is not None and self.picture.suffix != ".png":
            yield f"--picture: {cut(str(self.picture))}: expected a name that ends with .png"


class QuickstartOptions(Options):
    """lmforge quickstart: the whole way on the Python standard library's source, some 5 minutes on 2 cores."""

    folder: Path = option(Path("."), "folder for data and runs")
    steps: int | None = option(
        None, "steps of each stage, up to 10 with small batches (default: the recipe's)", **{**COUNT, "gt": 1}
    )
    processes: int | None = option(None, "ranks to start (default: one for each GPU, or one)", **RANKS)
    prompt: str = option("def ", "prompt that the model continues at the end")
    overwrite: bool = option(False, "begin again instead of continuing")


class DoctorOptions(JobOptions):
    """lmforge doctor [RECIPE.toml] [--on slurm]: check machine, data and network before a run; --parity compares strategies."""

    recipe: Path | None = argument(None, "recipe whose data, model and checkpoint folder are checked too, on every host")
    parity: bool = option(False, "train a small model with every strategy that fits the ranks, and compare")
    on: Literal["local", "ssh", "slurm", "pbs", "mpi"] | None = option(  # type: ignore[assignment]
        None, "check the hosts of a job that this starts, as lmforge launch does; what follows is then as with launch"
    )
    timeout_seconds: float = option(60.0, "seconds after which a rank that has not answered is named", **DURATION)
    steps: int = option(10, "with --parity: steps with each strategy", gt=1, le=10_000)
    compile: bool = option(False, "with --parity: compiled blocks too")
    dtype: Literal["fp32", "bf16"] = option("fp32", "with --parity: compute dtype of the strategies and of the one process")
    seed: int = option(0, "with --parity: seed of weights and data", **SEED)
    device: Device = option("auto", "auto is cuda where there is one")
    output: Literal["text", "json"] = option("text", "output format")

    ESSENTIAL: ClassVar[tuple[str, ...]] = (
        *("recipe", "on", "nodes", "processes", "hosts", "parity", "timeout_seconds", "device", "output"),
    )

    def problems(self) -> Iterator[str]:
        ignored = [name for name in ("steps", "compile", "dtype", "seed") if name in self.changed()]
        if ignored and not self.parity:
            yield f"--{ignored[0]}: applies to --parity only; add --parity, or leave it out"
        of_checks = [name for name in ("recipe", "timeout_seconds") if name in self.changed()]
        if of_checks and self.parity:
            yield f"--{of_checks[0]}: not with --parity, which checks nothing but the strategies; leave one of them out"
        of_jobs = [name for name in JobOptions.model_fields if name not in ("on", "processes", "environment")]
        if not self.is_elsewhere and (given := [name for name in of_jobs if name in self.changed()]):
            yield f"--{given[0]}: applies to --on ssh, slurm, pbs and mpi only; add one of them, or leave it out"
        yield from super().problems()

    @property
    def is_elsewhere(self) -> bool:
        """Whether other hosts are to be checked than this one."""
        return self.on not in (None, "local")


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
    launch: LaunchOptions = section(LaunchOptions, "how `lmforge launch` starts it")

    def problems(self) -> Iterator[str]:
        if self.name and (problem := name_problem(self.name)):
            yield f"name: {problem}"
        names = [stage.name or stage.verb for stage in self.stages]
        for name in names:
            if names.count(name) > 1:
                yield f"stages: two are called {cut(name)}; give each its own name"
            if not re.fullmatch(r"[\w.-]+", name):
                yield f"stages: {cut(name)!r} is not a valid name; use letters, digits, dots and dashes"
