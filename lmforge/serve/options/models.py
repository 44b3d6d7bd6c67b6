"""The options of the verbs that take a model, or get one."""

from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from lmforge.core.options.operation import ENVIRONMENT, EnvironmentName
from lmforge.core.options.options import OUTPUT_FORMAT, PLUGINS, Options, argument, option
from lmforge.core.options.ranges import (
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
)
from lmforge.core.options.sections import DEVICE, Device, DType

ExportDType = Literal["fp32", "bf16", "fp16"]
MODEL = "a run, a checkpoint, a Hugging Face folder or a name on the hub"


class EvaluateOptions(Options):
    """lmforge evaluate MODEL: loss and bits per byte on validation documents, or scores of
    tasks.
    """

    model: Path = argument(..., MODEL)
    data: Path | None = option(
        None,
        "token shards, or files: text, jsonl, parquet, conversations (default: what the run was"
        " trained on)",
    )
    split: Literal["validation", "train"] = option(
        "validation", "split of prepared data or a folder; all of a file is used"
    )
    sequences: int | None = option(
        None, "sequences to measure, evenly spaced over the split (default: all)", **COUNT
    )
    sequence_length: int | None = option(
        None, "tokens in a sequence (default: as in training)", **LENGTH
    )
    batch_size: int = option(16, "sequences in one forward pass", **SEQUENCES)
    split_turns: bool = option(
        False, "of conversations: answers are examples of their own, as data.split_turns"
    )
    ignore_media: bool = option(
        False, "of conversations: read the text of those that hold images, as data.ignore_media"
    )
    skip_invalid: bool = option(
        False, "of conversations: leave out those that cannot be used, as data.skip_invalid"
    )
    tasks: tuple[str, ...] = option(
        (), "files of questions, one JSON object per line: print their scores instead of the loss"
    )
    lm_eval: tuple[str, ...] = option(
        (), "tasks of lm-evaluation-harness by name: print their scores instead of the loss"
    )
    lm_eval_include_path: Path | None = option(
        None, "folder with more tasks for the harness, as YAML files"
    )
    apply_chat_template: bool = option(
        False, "with --lm_eval: put questions as a user's messages, by the chat template"
    )
    num_fewshot: int | None = option(
        None,
        "examples before each question (default: none, or the harness task's own)",
        **COUNT_OR_0,
    )
    fewshot_file: Path | None = option(
        None, "file of questions to take the examples from (default: the task's own)"
    )
    limit: int | None = option(
        None, "use only the first N questions of each task (default: all)", **COUNT
    )
    max_tokens: int = option(64, "longest generated answer, in tokens", **LENGTH)
    stop: tuple[str, ...] = option(("\n",), "strings that end a generated answer")
    answers: Path | None = option(
        None, "new file for the answer to each question of the tasks, as JSON lines"
    )
    device: Device = DEVICE
    dtype: DType = option("fp32", "compute dtype")
    processes: int = option(
        1,
        "ranks to start on this machine, which share the work; leave it out under torchrun",
        **RANKS,
    )
    environment: EnvironmentName = ENVIRONMENT
    output: Literal["text", "json"] = OUTPUT_FORMAT
    plugins: tuple[str, ...] = PLUGINS

    def problems(self) -> Iterator[str]:
        scores = bool(self.tasks or self.lm_eval)
        conditions = {
            "data split sequences sequence_length split_turns ignore_media skip_invalid": (
                not scores,
                "only with the loss on documents, which --tasks and --lm_eval replace",
            ),
            "num_fewshot limit": (scores, "only with --tasks or --lm_eval"),
            "fewshot_file max_tokens stop": (bool(self.tasks), "only with --tasks"),
            "answers": (
                bool(self.tasks) and not self.lm_eval,
                "only with --tasks, and not with --lm_eval",
            ),
            "lm_eval_include_path apply_chat_template": (bool(self.lm_eval), "only with --lm_eval"),
        }
        changed = self.changed()
        for names, (is_read, reason) in conditions.items():
            for name in names.split():
                if name in changed and not is_read:
                    yield f"--{name}: {reason}; leave it out"


class SamplingOptions(Options):
    """Options of sampling."""

    temperature: float | None = option(
        None,
        "sampling temperature; 0 is greedy (default: the model's generation_config.json, else 0.8)",
        **SCALE_OR_0,
    )
    top_k: int | None = option(
        None,
        "sample from the k likeliest tokens; 0 for all (default: the model's, else 0)",
        **COUNT_OR_0,
    )
    top_p: float | None = option(
        None,
        "nucleus sampling: the likeliest tokens whose probabilities add up to this (default: the"
        " model's, else 1)",
        **NONZERO_FRACTION,
    )
    seed: int | None = option(None, "seed of the sampling (default: random)", **SEED)
    device: Device = DEVICE
    dtype: DType = option("auto", "compute dtype")
    plugins: tuple[str, ...] = PLUGINS


class GenerateOptions(SamplingOptions):
    """lmforge generate MODEL [PROMPT …]: text from a run, a checkpoint or a Hugging Face folder."""

    model: Path = argument(..., MODEL)
    prompts: tuple[str, ...] = argument(
        (), "one or more prompts; none reads one from standard input"
    )
    max_tokens: int | None = option(
        None,
        "tokens to generate after each prompt (default: as the model's generation_config.json says,"
        " else 128)",
        **LENGTH,
    )
    stop: tuple[str, ...] = option((), "strings that end a completion")


class ChatOptions(SamplingOptions):
    """lmforge chat MODEL: a conversation with a model, in the terminal or over pipes, a line a
    turn.
    """

    model: Path = argument(..., MODEL)
    system: str | None = option(None, "system message")
    tools: str | None = option(
        None, "tools that it may call: FILE.py:FUNCTION, FILE.py:CLASS, calculator or python"
    )
    max_tokens: int | None = option(
        None, "longest answer, in tokens (default: the model's, else as many as fit)", **LENGTH
    )
    max_length: int | None = option(
        None,
        "longest conversation, in tokens (default: what the model was made for, up to 4096)",
        **LENGTH,
    )


class ServeOptions(Options):
    """lmforge serve MODEL [MODEL …]: an OpenAI-compatible API, and a page to chat on."""

    models: tuple[Path, ...] = argument(
        ..., "runs (with all their checkpoints), checkpoints, Hugging Face folders or names"
    )
    host: str = option(
        "127.0.0.1", "address to listen on; 0.0.0.0 and :: are all addresses of this machine"
    )
    port: int = option(8000, "port to listen on; 0 takes a free one", ge=0, le=65535)
    api_key: str | None = option(
        None, "API key that requests must send (default: LMFORGE_API_KEY of the environment)"
    )
    without_key: bool = option(
        False, "accept requests without a key on an address that other machines reach"
    )
    max_batch_size: int = option(16, "requests that a model decodes at once", **SEQUENCES)
    max_queue: int = option(
        64,
        "requests that may wait for a model; further ones are refused with status 429",
        **COUNT_OR_0,
    )
    max_length: int | None = option(
        None,
        "longest prompt with its answer, in tokens (default: what the model was made for, up to"
        " 4096)",
        **LENGTH,
    )
    max_body_bytes: int = option(4 * 2**20, "largest request, in bytes", **BYTES)
    max_models: int = option(
        2, "models in memory at once; the least recently used one is unloaded for another", **COUNT
    )
    weight_updates: bool = option(
        False,
        "sample for a trainer (rollout.engine): ids in and out as in vLLM, and weights replaced by"
        " a folder's",
    )
    return_routed_experts: bool = option(
        False,
        "mixtures, with weight_updates: answer with the experts of each token too"
        " (rollout.replay_routed_experts)",
    )
    device: Device = DEVICE
    dtype: DType = option("auto", "compute dtype")
    plugins: tuple[str, ...] = PLUGINS

    def problems(self) -> Iterator[str]:
        if self.return_routed_experts and not self.weight_updates:
            yield "--return_routed_experts: only --weight_updates answers with them; give it too"
        if not self.models:
            yield "--models: expected at least one"
        if self.weight_updates and len(self.models) > 1:
            yield "--weight_updates: a trainer replaces the weights of one model; serve that alone"


class ExportOptions(Options):
    """lmforge export MODEL OUT: a checkpoint as a Hugging Face folder, in bounded memory."""

    model: Path = argument(..., "a run or a checkpoint")
    out: Path = argument(..., "folder to write")
    adapters: bool = option(
        False, "write the adapters alone, in PEFT's layout, instead of the model with them merged"
    )
    dtype: ExportDType = option(
        "fp32", "dtype of the weights; bf16 and fp16 halve the size and round the values"
    )
    overwrite: bool = option(False, "replace OUT if it is a folder of a model or of adapters")
    text_only: bool = option(
        False,
        "of a run that began from a multimodal folder, write the language model alone, without the"
        " rest of that folder; with --adapters, adapters of the language model alone",
    )
    source: Path | None = option(
        None, "where that multimodal folder is now (default: where the run found it)"
    )
    plugins: tuple[str, ...] = PLUGINS

    def problems(self) -> Iterator[str]:
        if self.source is not None and (self.text_only or self.adapters):
            reason = "text_only" if self.text_only else "adapters"
            yield f"--source: not read with --{reason}; leave it out"


class ImportOptions(Options):
    """lmforge import SOURCE OUT: another trainer's checkpoint as a Hugging Face folder."""

    source: Path = argument(
        ..., "a DCP folder, or a file of torch.save, whose layout a plugin knows"
    )
    out: Path = argument(..., "folder to write")
    layout: str = option(
        "auto", "layout of its parameter names, which a plugin registers; auto detects it"
    )
    config_from: str | None = option(
        None,
        "a preset, a Hugging Face folder or a name on the hub that says what the checkpoint does"
        " not; it gives the next two options, unless they are given",
    )
    num_attention_heads: int | None = option(
        None,
        "query heads, where the checkpoint does not say",
        **MODEL_RANGES["num_attention_heads"],
    )
    rope_theta: float | None = option(
        None, "base of the rotary position embedding's frequencies", **MODEL_RANGES["rope_theta"]
    )
    tokenizer: Path | None = option(
        None, "its tokenizer.json, a folder with one, or a name on the hub (default: none)"
    )
    dtype: ExportDType | None = option(None, "dtype of the weights (default: as they are stored)")
    overwrite: bool = option(False, "replace OUT if it is a folder of a model")
    plugins: tuple[str, ...] = PLUGINS


class DownloadOptions(Options):
    """lmforge download NAME [FOLDER]: a model or dataset of the Hugging Face hub, or all that a
    recipe names, for later.
    """

    name: str = argument(
        ...,
        "a model or dataset on the hub: organisation/name, or organisation/name@revision; or a"
        " recipe or pipeline, .toml",
    )
    folder: Path | None = argument(
        None, "folder to download to (default: the hub's cache, where its name finds it)"
    )
    dataset: bool = option(False, "NAME is a dataset, for lmforge prepare")
    weights: bool = option(
        True, "download the weights of a model too; false: only its config and tokenizer"
    )

    def problems(self) -> Iterator[str]:
        if self.dataset and not self.weights:
            yield (
                "--weights: applies to models, and --dataset says that NAME is a dataset; leave one"
                " of them out"
            )
        if Path(self.name).suffix == ".toml" and (
            given := [name for name in self.changed() if name != "name"]
        ):
            yield (
                f"--{given[0]}: not with a recipe, which says what to download to the hub's cache;"
                " leave it out"
            )
