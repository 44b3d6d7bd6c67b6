"""`lmforge export`: a checkpoint as a Hugging Face folder, read and written a tensor at a time, without a GPU."""

import sys
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from lmforge import checkpoint
from lmforge.checkpoint import Manifest
from lmforge.config_verbs import ExportOptions, ImportOptions
from lmforge.data.templates import ChatTemplate
from lmforge.data.tokenizer import Tokenizer
from lmforge.errors import Mistake
from lmforge.infer.opening import chat_template, stage_of
from lmforge.model.export import export_folder
from lmforge.model.peft_folder import is_peft, save_peft
from lmforge.model.shapes import ModelConfig

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def run_export(options: ExportOptions) -> int:
    """Write the folder and say where. Raises Mistake."""
    manifest, passed_over = checkpoint.using(options.model, partial(_export, options))
    for line in passed_over:
        print(line, file=sys.stderr)
    what, whose = (
        (f"adapters of step {manifest.step}", "PEFT") if options.adapters else (f"step {manifest.step}", "Hugging Face")
    )
    print(f"{options.out}: {what} of {options.model}, {options.dtype}, as {whose} has it")
    return 0


def _export(options: ExportOptions, origin: Path, manifest: Manifest) -> Manifest:
    stored = checkpoint.StoredModel(origin, manifest)
    if options.adapters:
        _write_adapters(options, stored, manifest)
    else:
        write(options, stored, manifest.model_config, origin, chat_template(Tokenizer.open(origin), stage_of(manifest)))
    return manifest


def _write_adapters(options: ExportOptions, stored: checkpoint.StoredModel, manifest: Manifest) -> None:
    base = manifest.recipe["model"].get("source")
    if manifest.model_config.reward:
        raise Mistake(f"{options.model}: a reward model, whose head is new and no adapter; export it without --adapters")
    if stored.lora is None or base is None:
        raise Mistake(f"{options.model}: was not trained with adapters beside another model; export it without --adapters")
    if is_peft(Path(base)):
        raise Mistake(
            f"{options.model}: began from {base}, which is adapters too, and adapters cannot belong to adapters; export it"
            " without --adapters, as a whole model with both merged"
        )
    tensors = {name: _in_dtype(name, tensor, options.dtype) for name, tensor in stored.adapters.items()}
    save_peft(options.out, tensors, stored.lora, base, options.overwrite)


def _in_dtype(name: str, value: Tensor, dtype: str | None) -> Tensor:
    """A tensor as it is written. Raises Mistake where it holds numbers that fp16 does not."""
    if dtype == "fp16" and not torch.isfinite(value.half()).all():
        raise Mistake(f"{name}: holds numbers that fp16 does not; use --dtype bf16 or fp32")
    return value.to(DTYPES[dtype]) if dtype else value


class Tensors(Protocol):
    """Tensors by name: their shapes and dtypes, and each of them when it is asked for."""

    @property
    def tensors(self) -> dict[str, Tensor]: ...

    def read(self, name: str) -> Tensor: ...


def write(
    options: ExportOptions | ImportOptions,
    stored: Tensors,
    config: ModelConfig,
    tokenizer_at: Path | None,
    template: ChatTemplate | None = None,
) -> None:
    """Write a model's tensors, one at a time, and its tokenizer, if there is one, as Hugging Face has them.

    `tokenizer_at` is a folder or a tokenizer.json, `template` what a model that chats was taught by.
    Raises Mistake where fp16 is asked for and a tensor does not fit into it.
    """

    def read(name: str) -> Tensor:
        return _in_dtype(name, stored.read(name), options.dtype)

    export_folder(
        stored.tensors,
        config,
        options.out,
        tokenizer_folder=tokenizer_at.parent if tokenizer_at and tokenizer_at.is_file() else tokenizer_at,
        dtype=DTYPES[options.dtype] if options.dtype else None,
        overwrite=options.overwrite,
        read=read,
        more=_companions(Tokenizer.open(tokenizer_at), config, template) if tokenizer_at else None,
    )


def _companions(tokenizer: Tokenizer, config: ModelConfig, template: ChatTemplate | None) -> dict[str, dict[str, Any] | str]:
    """What generation and transformers' tokenizer want to know, where the run's own tokenizer came without it."""
    end, begin = tokenizer.separator_id, tokenizer.bos_id
    # A model that came with several ends, as chat models do, keeps them.
    ends: int | list[int] = list(config.eos_token_id) if isinstance(config.eos_token_id, tuple) else end
    if template is not None:
        ends = sorted({end, *template.ends, *(ends if isinstance(ends, list) else ())})
    ids = {"eos_token_id": ends, "pad_token_id": end} | ({} if begin is None else {"bos_token_id": begin})
    if config.reward:
        del ids["pad_token_id"]  # see shapes.py
    names = {"eos_token": tokenizer.token_of(end), "clean_up_tokenization_spaces": False}
    return {
        "config.json": ids,
        "generation_config.json": {**ids, "do_sample": True},
        "tokenizer_config.json": {"tokenizer_class": "PreTrainedTokenizerFast", **names},
        **({} if template is None else {"chat_template.jinja": template.jinja}),
    }
