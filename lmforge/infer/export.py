"""`lmforge export`: a checkpoint as a Hugging Face folder, read and written a tensor at a time, without a GPU."""

import sys
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from lmforge import checkpoint
from lmforge.checkpoint import Manifest
from lmforge.config import ExportOptions, ImportOptions
from lmforge.data.tokenizer import Tokenizer
from lmforge.errors import Mistake
from lmforge.model.export import export_folder
from lmforge.model.shapes import ModelConfig

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def run_export(options: ExportOptions) -> int:
    """Write the folder and say where. Raises Mistake."""
    manifest, passed_over = checkpoint.using(options.model, partial(_export, options))
    for line in passed_over:
        print(line, file=sys.stderr)
    print(f"{options.out}: step {manifest.step} of {options.model}, {options.dtype}, as Hugging Face has it")
    return 0


def _export(options: ExportOptions, origin: Path, manifest: Manifest) -> Manifest:
    write(options, checkpoint.StoredModel(origin), manifest.model_config, origin)
    return manifest


class Tensors(Protocol):
    """Tensors by name: their shapes and dtypes, and each of them when it is asked for."""

    @property
    def tensors(self) -> dict[str, Tensor]: ...

    def read(self, name: str) -> Tensor: ...


def write(options: ExportOptions | ImportOptions, stored: Tensors, config: ModelConfig, tokenizer_at: Path | None) -> None:
    """Write a model's tensors, one at a time, and its tokenizer, if there is one, as Hugging Face has them.

    `tokenizer_at` is a folder or a tokenizer.json. Raises Mistake where fp16 is asked for and a tensor does not fit into it.
    """

    def read(name: str) -> Tensor:
        value = stored.read(name)
        if options.dtype == "fp16" and not torch.isfinite(value.half()).all():
            raise Mistake(f"{name}: holds numbers that fp16 does not; use --dtype bf16 or fp32")
        return value

    export_folder(
        stored.tensors,
        config,
        options.out,
        tokenizer_folder=tokenizer_at.parent if tokenizer_at and tokenizer_at.is_file() else tokenizer_at,
        dtype=DTYPES[options.dtype] if options.dtype else None,
        overwrite=options.overwrite,
        read=read,
        more=_companions(Tokenizer.open(tokenizer_at), config) if tokenizer_at else None,
    )


def _companions(tokenizer: Tokenizer, config: ModelConfig) -> dict[str, dict[str, Any]]:
    """What generation and transformers' tokenizer want to know, where the run's own tokenizer came without it."""
    end, begin = tokenizer.separator_id, tokenizer.bos_id
    # A model that came with several ends, as chat models do, keeps them.
    ends = list(config.eos_token_id) if isinstance(config.eos_token_id, tuple) else end
    ids = {"eos_token_id": ends, "pad_token_id": end} | ({} if begin is None else {"bos_token_id": begin})
    names = {"eos_token": tokenizer.token_of(end), "clean_up_tokenization_spaces": False}
    return {
        "config.json": ids,
        "generation_config.json": {**ids, "do_sample": True},
        "tokenizer_config.json": {"tokenizer_class": "PreTrainedTokenizerFast", **names},
    }
