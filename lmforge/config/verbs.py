"""The options of the verbs that do not train: preparing, measuring, writing, chatting, serving, exporting, showing."""

from pathlib import Path
from typing import Literal

from pydantic import model_validator

from lmforge.config.options import Options, argument, option
from lmforge.config.run import LARGEST_SEED, Device, DType, ExampleFormat


class PrepareOptions(Options):
    """lmforge prepare SOURCE OUT: text → tokenizer → token shards."""

    source: str = argument(
        "stdlib",
        "stdlib (the Python standard library's source) or functions (of it, to be asked for), or a file or folder of text",
    )
    out: Path = argument(Path("data/stdlib"), "folder to write")
    tokenizer: Path | None = option(None, "a tokenizer.json, a folder with one, or a name on the hub (default: train one)")
    vocab_size: int = option(4096, "vocabulary of a tokenizer that is trained here", gt=300, le=1_000_000)
    text_field: str = option("text", "field of the text in jsonl and parquet")
    validation_ratio: float = option(0.02, "share of the documents held out for validation", ge=0, lt=1)
    shard_tokens: int = option(100_000_000, "tokens in one shard file", gt=0)
    seed: int = option(0, "seed of the order of documents", ge=0, le=LARGEST_SEED)
    workers: int | None = option(None, "processes (default: the cores there are)", gt=0)
    overwrite: bool = option(False, "delete what another preparation left in OUT")


class EvaluateOptions(Options):
    """lmforge evaluate MODEL: loss and bits per byte on held-out documents, or the scores of tasks."""

    model: Path = argument(..., "a run, a checkpoint, a Hugging Face folder or a name on the hub")
    data: Path | None = option(
        None, "token shards, or files: text, jsonl, parquet, conversations (default: what the run was trained on)"
    )
    split: Literal["validation", "train"] = option("validation", "which documents of what was prepared; of files it is all")
    sequences: int | None = option(None, "so many rows, evenly spaced over the split (default: all)", gt=0)
    sequence_length: int | None = option(None, "tokens in a row (default: as in training)", gt=0)
    batch_size: int = option(16, "rows in one forward pass", gt=0)
    tasks: tuple[str, ...] = option((), "files of questions, one JSON object a line: scores of these instead of the loss")
    lm_eval: tuple[str, ...] = option((), "tasks of lm-evaluation-harness by name: scores of these instead of the loss")
    lm_eval_include_path: Path | None = option(None, "a folder with tasks for the harness, as YAML files")
    num_fewshot: int | None = option(None, "examples before each question (default: none, or the harness task's own)", ge=0)
    fewshot_file: Path | None = option(None, "file of questions that examples are from (default: the task's own)")
    limit: int | None = option(None, "the first so many questions of each task (default: all)", gt=0)
    max_tokens: int = option(64, "tokens of a written answer, at most", gt=0)
    stop: tuple[str, ...] = option(("\n",), "texts that end a written answer")
    answers: Path | None = option(None, "new file for what was answered to each question of the tasks, as JSON lines")
    device: Device = option("auto", "auto is cuda where there is one")
    dtype: DType = option("fp32", "compute dtype")
    processes: int = option(1, "ranks to start on this machine, which share the work; under torchrun leave it alone", gt=0)
    output: Literal["text", "json"] = option("text", "how to print the result")

    @model_validator(mode="after")
    def _one_kind(self) -> "EvaluateOptions":
        asked = bool(self.tasks or self.lm_eval)
        belongs = {
            "data split sequences sequence_length": (
                not asked,
                "of the loss on documents, which --tasks and --lm_eval take the place of",
            ),
            "num_fewshot limit": (asked, "only with --tasks or --lm_eval"),
            "fewshot_file max_tokens stop": (bool(self.tasks), "only with --tasks"),
            "answers": (bool(self.tasks) and not self.lm_eval, "only with --tasks, and not with --lm_eval"),
            "lm_eval_include_path": (bool(self.lm_eval), "only with --lm_eval"),
        }
        for names, (fits, why) in belongs.items():
            for name in () if fits else names.split():
                if getattr(self, name) != type(self).model_fields[name].default:
                    raise ValueError(f"--{name}: {why}; leave it out")
        return self


class GenerateOptions(Options):
    """lmforge generate MODEL PROMPT...: text from a run, a checkpoint or a Hugging Face folder."""

    model: Path = argument(..., "a run, a checkpoint, a Hugging Face folder or a name on the hub")
    prompts: tuple[str, ...] = argument((), "one or more prompts; none reads one from standard input")
    max_tokens: int = option(128, "tokens to write after each prompt", gt=0)
    temperature: float = option(0.8, "0 is greedy", ge=0)
    top_k: int = option(0, "sample from the k likeliest tokens; 0 for all", ge=0)
    top_p: float = option(1.0, "sample from the likeliest tokens that hold this probability", gt=0, le=1)
    seed: int | None = option(None, "seed of the sampling (default: a fresh one, printed)", ge=0, le=LARGEST_SEED)
    stop: tuple[str, ...] = option((), "texts that end a completion")
    device: Device = option("auto", "auto is cuda where there is one")
    dtype: DType = option("auto", "compute dtype")


class ChatOptions(Options):
    """lmforge chat MODEL: a conversation in the terminal, or over pipes, a line a turn."""

    model: Path = argument(..., "a run, a checkpoint, a Hugging Face folder or a name on the hub")
    system: str | None = option(None, "what the model is told before the conversation")
    max_tokens: int | None = option(None, "tokens of an answer at most (default: what there is room for)", gt=0)
    temperature: float = option(0.8, "0 is greedy", ge=0)
    top_k: int = option(0, "sample from the k likeliest tokens; 0 for all", ge=0)
    top_p: float = option(1.0, "sample from the likeliest tokens that hold this probability", gt=0, le=1)
    seed: int | None = option(None, "seed of the sampling (default: a fresh one)", ge=0, le=LARGEST_SEED)
    max_length: int | None = option(
        None, "tokens of the whole conversation at most (default: what the model was made for, up to 4096)", gt=0
    )
    device: Device = option("auto", "auto is cuda where there is one")
    dtype: DType = option("auto", "compute dtype")


class ServeOptions(Options):
    """lmforge serve MODEL...: an OpenAI-compatible API, and a page to chat on."""

    models: tuple[Path, ...] = argument(..., "runs (with all their checkpoints), checkpoints, Hugging Face folders or names")
    host: str = option("127.0.0.1", "address to listen on; 0.0.0.0 and :: are all of this machine's")
    port: int = option(8000, "port to listen on; 0 takes a free one", ge=0, le=65535)
    api_key: str | None = option(None, "key that requests must show (default: LMFORGE_API_KEY of the environment, where set)")
    without_key: bool = option(False, "let everyone in who reaches an address that is not only this machine's")
    max_batch_size: int = option(16, "requests that a model writes at once", gt=0)
    max_queue: int = option(64, "requests that wait for a model beyond these; others are refused with 429", ge=0)
    max_length: int | None = option(
        None, "tokens of a prompt and its answer at most (default: what the model was made for, up to 4096)", gt=0
    )
    max_body_bytes: int = option(4 * 2**20, "bytes of a request at most", gt=0)
    max_models: int = option(2, "models that are open at once; beyond, the one that was asked longest ago is given up", gt=0)
    device: Device = option("auto", "auto is cuda where there is one")
    dtype: DType = option("auto", "compute dtype")


class ExportOptions(Options):
    """lmforge export MODEL OUT: a checkpoint as a Hugging Face folder."""

    model: Path = argument(..., "a run or a checkpoint")
    out: Path = argument(..., "folder to write")
    adapters: bool = option(False, "the low-rank adapters alone, in PEFT's layout, instead of the model with them merged")
    dtype: Literal["fp32", "bf16", "fp16"] = option("fp32", "dtype of the weights; bf16 and fp16 halve them, and round")
    overwrite: bool = option(False, "replace OUT if it is a model's folder, or one of adapters")


class ImportOptions(Options):
    """lmforge import SOURCE OUT: another trainer's checkpoint as a Hugging Face folder."""

    source: Path = argument(..., "nanoGPT's ckpt.pt, a DCP folder of torchtitan, a DCP folder or a .pth of fms-fsdp")
    out: Path = argument(..., "folder to write")
    layout: Literal["auto", "nanogpt", "torchtitan", "fms"] = option("auto", "whose names it has; auto goes by these")
    config_from: str | None = option(
        None, "a preset, a Hugging Face folder or a name on the hub that has what the next four name"
    )
    num_attention_heads: int | None = option(None, "query heads (nanogpt tells them itself)", gt=0)
    rope_theta: float | None = option(None, "base of the rotary frequencies (torchtitan and fms)", gt=0)
    rms_norm_eps: float | None = option(None, "epsilon of the norms (default: 1e-5)", gt=0)
    max_position_embeddings: int | None = option(None, "longest row it was trained for (default: 4096)", gt=0)
    activation: Literal["gelu", "gelu_new"] | None = option(
        None, "nanogpt: gelu, or gelu_new where it was trained before June 2023 (default: gelu)"
    )
    tokenizer: Path | None = option(None, "its tokenizer.json, a folder with one, or a name on the hub (default: none)")
    dtype: Literal["fp32", "bf16", "fp16"] | None = option(None, "dtype of the weights (default: as they are stored)")
    overwrite: bool = option(False, "replace OUT if it is a model's folder")


class DownloadOptions(Options):
    """lmforge download NAME [FOLDER]: a model of the Hugging Face hub, for hosts that have no network."""

    name: str = argument(..., "a model on the hub: organisation/model, or organisation/model@revision")
    folder: Path | None = argument(None, "folder to fetch it into (default: the hub's own cache, where its name finds it)")
    revision: str | None = option(None, "branch, tag or commit (default: main)")


class ShowOptions(Options):
    """lmforge show THING: what it is, in a few lines; lmforge show data OF: the text of samples, as training reads them."""

    thing: str = argument(
        ..., "recipe.toml, preset name, Hugging Face folder or name, shard folder, run, checkpoint, `presets` or `data`"
    )
    of: Path | None = argument(None, "with `data`: a run, the file of a bad step, or a file of conversations, pairs or prompts")
    tokenizer: Path | None = option(None, "with `data` and such a file: the model whose tokenizer and chat template are used")
    mask: Literal["assistant", "last", "all"] = option("assistant", "with such a file: what is learnt, as data.mask")
    format: ExampleFormat = option("auto", "with such a file: what a record is, as data.format; or prompts, to be answered")
    fields: tuple[str, ...] = option((), "with such a file: names of its fields that are others, OURS=THEIRS, as data.fields")
    apply_chat_template: bool = option(False, "with such a file: strings become turns, as data.apply_chat_template")
    samples: str | None = option(
        None, "with `data`: numbers of samples or records, FIRST:AFTER_LAST (default: the first 3, or those of a bad step)"
    )


class QuickstartOptions(Options):
    """lmforge quickstart: the whole way on the standard library's source, at most 10 minutes on 2 cores."""

    folder: Path = option(Path("."), "where data and runs are made")
    steps: int | None = option(None, "train so many steps in each stage, instead of the recipes'", gt=0)
    processes: int = option(2, "ranks to start", gt=0)
    prompt: str = option("def ", "what the model continues at the end")
    overwrite: bool = option(False, "begin again instead of continuing")


class DoctorOptions(Options):
    """lmforge doctor --parity: does every strategy compute the same here?"""

    parity: bool = option(False, "train a small model under every strategy that fits the ranks, and compare")
    processes: int = option(1, "ranks to start on this machine; under torchrun leave it alone", gt=0)
    steps: int = option(10, "steps of each strategy", gt=1)
    compile: bool = option(False, "compiled blocks too")
    seed: int = option(0, "seed of weights and data", ge=0, le=LARGEST_SEED)
    device: Device = option("auto", "auto is cuda where there is one")
    output: Literal["text", "json"] = option("text", "how to print the result")
