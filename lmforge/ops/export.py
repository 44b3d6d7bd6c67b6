"""A checkpoint, ours or another trainer's, written as a Hugging Face folder or as PEFT adapters.

Tensors are read and written one at a time, without a GPU.
"""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lmforge.core import checkpoint
from lmforge.core.checkpoint import Manifest
from lmforge.core.data.tokenizer import Tokenizer
from lmforge.core.errors import UserError
from lmforge.core.model.build import build_model
from lmforge.core.model.config import ModelConfig
from lmforge.core.model.init_weights import stored_buffers
from lmforge.core.model.resolve import stored_model_config
from lmforge.core.parallel.precision import DTYPES
from lmforge.core.records.kinds import Kind, kind_of
from lmforge.hf.export import export_folder
from lmforge.hf.merge_adapters import LM_HEAD_WEIGHT
from lmforge.hf.multimodal import MultimodalFolder, open_source
from lmforge.hf.peft_folder import base_model_of, load_peft_folder, save_peft_folder
from lmforge.hf.resolve import resolve_model_config
from lmforge.hf.stored_model import StoredModel
from lmforge.hf.turned_experts import adapters_beside_folder
from lmforge.hf.weights import LM_HEAD_BIAS
from lmforge.serve.decoding.model_loading import chat_template, training_stage
from lmforge.serve.options.models import ExportOptions, ImportOptions
from lmforge.text.chat.templates import ChatTemplate


def export_checkpoint(
    options: ExportOptions,
) -> tuple[Manifest, MultimodalFolder | None, list[str]]:
    """Write the folder.

    Returns the manifest of the checkpoint, the folder whose other tensors were written too, and a
    line for each corrupt checkpoint that was skipped.
    """
    (manifest, multimodal), skipped = checkpoint.open_checkpoint(
        options.model, partial(_export, options)
    )
    return manifest, multimodal, skipped


def _export(
    options: ExportOptions, checkpoint_path: Path, manifest: Manifest
) -> tuple[Manifest, MultimodalFolder | None]:
    stored = StoredModel(checkpoint_path, manifest)
    config = stored_model_config(manifest)
    source = manifest.written_by.get("multimodal")
    if options.source is not None and source is None:
        raise UserError(
            f"--source: {options.model} did not begin from the language model of a multimodal"
            " folder; leave it out"
        )
    multimodal = None
    if options.adapters:
        _write_adapters(options, stored, checkpoint_path, manifest)
    else:
        # A reward model has no head for text, so it is none of the full model.
        if source is not None and not options.text_only and not config.reward:
            multimodal = open_source(source, options.source, options.model)
        template = chat_template(Tokenizer.open(checkpoint_path), training_stage(manifest))
        write_model_folder(
            options, stored.tensors, stored.read, config, checkpoint_path, template, multimodal
        )
    return manifest, multimodal


def _write_adapters(
    options: ExportOptions,
    stored: StoredModel,
    checkpoint_path: Path,
    manifest: Manifest,
) -> None:
    base = manifest.recipe["model"].get("source")
    if stored_model_config(manifest).reward:
        raise UserError(
            f"{options.model}: a reward model: its head is new and is not part of the adapters;"
            " export it without --adapters"
        )
    if stored.lora is None or base is None:
        raise UserError(
            f"{options.model}: was not trained with adapters; export it without --adapters"
        )
    if (
        kind_of(base) == Kind.ADAPTERS
        and stored.lora.stored
        and load_peft_folder(base)[1].keys() <= stored.adapters.keys()
    ):
        base = str(base_model_of(Path(base)))  # the run went on with those
    if kind_of(base) == Kind.ADAPTERS:
        raise UserError(
            f"{options.model}: began from {base}, which is adapters too, and adapters cannot belong"
            " to adapters; export it without --adapters, as a whole model with both merged"
        )
    config = stored_model_config(manifest)
    feed_forwards = [
        f".{linear.name}."
        for block in config.block_kinds
        for mixer in block.mixers
        for linear in mixer.linears
        if linear.experts == 1 and not mixer.mixes_tokens
    ]
    if config.num_experts and any(
        each in name and ".adapters." not in name
        for name in stored.adapters
        for each in feed_forwards
    ):
        raise UserError(
            f"{options.model}: has adapters in dense feed-forwards beside experts, and PEFT takes"
            " those for the experts'; export it without --adapters"
        )
    grown, files = _grown_rows(stored, manifest, checkpoint_path, base)
    tensors = {
        name: _cast(name, tensor, options.dtype)
        for name, tensor in (stored.adapters | grown).items()
    }
    tensors = adapters_beside_folder(tensors, stored_model_config(manifest))
    save_peft_folder(
        options.out,
        tensors,
        stored.lora,
        base,
        options.overwrite,
        files,
        in_full_model=bool(manifest.written_by.get("multimodal")) and not options.text_only,
    )


def _grown_rows(
    stored: StoredModel, manifest: Manifest, checkpoint_path: Path, base: str
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Embedding and head, and the tokenizer's files, where a run has added rows for tokens that its
    base lacks.

    PEFT saves such matrices whole, a tied pair as two. It opens the base with as many rows as the
    tokenizer beside the adapters has tokens, so rows of padding are left out.
    """
    config = stored_model_config(manifest)
    tokenizer = Tokenizer.open(checkpoint_path)
    rows = tokenizer.vocab_size
    if (
        not manifest.recipe["model"].get("resize_vocab")
        or rows <= resolve_model_config(base, {}, implementation="auto").vocab_size
    ):
        return {}, {}
    embedding = f"{build_model(config, 'meta').embedding_names[0]}.weight"
    ends = {
        name: stored.read(name)[:rows]
        for name in (embedding, LM_HEAD_WEIGHT, LM_HEAD_BIAS)
        if name in stored.tensors
    }
    written = companion_files(tokenizer, config, None)["tokenizer_config.json"]
    files = {"tokenizer_config.json": json.dumps(written, indent=2), **tokenizer.files}
    return {LM_HEAD_WEIGHT: ends[embedding], **ends}, files


def _cast(name: str, value: Tensor, dtype: str | None) -> Tensor:
    """A tensor in the dtype of the folder. Raises UserError where fp16 overflows."""
    if dtype == "fp16" and not torch.isfinite(value.half()).all():
        raise UserError(
            f"{name}: holds values that fp16 cannot represent; use --dtype bf16 or fp32"
        )
    if dtype:
        return value.to(DTYPES[dtype])
    return value


def write_model_folder(
    options: ExportOptions | ImportOptions,
    tensors: dict[str, Tensor],
    read: Callable[[str], Tensor],
    config: ModelConfig,
    tokenizer_path: Path | None,
    template: ChatTemplate | None = None,
    multimodal: MultimodalFolder | None = None,
) -> None:
    """Write a model's tensors, one at a time, and its tokenizer, if there is one, as a Hugging Face
    folder; with what the folder of the full model has besides.

    `tensors` have shapes and dtypes, `read` gives the data of one. `tokenizer_path` is a folder or
    a tokenizer.json, `template` the chat template that the model was trained with. Raises UserError
    where fp16 overflows.
    """
    untrained = {name for name, _ in stored_buffers(build_model(config, "meta"))}
    export_folder(
        tensors,
        config,
        options.out,
        tokenizer_folder=(
            tokenizer_path.parent if tokenizer_path and tokenizer_path.is_file() else tokenizer_path
        ),
        dtype=DTYPES[options.dtype] if options.dtype else None,
        overwrite=options.overwrite,
        read_tensor=lambda name: _cast(
            name, read(name), None if name in untrained else options.dtype
        ),
        extra_files=(
            companion_files(Tokenizer.open(tokenizer_path), config, template)
            if tokenizer_path
            else None
        ),
        multimodal=multimodal,
    )


def companion_files(
    tokenizer: Tokenizer, config: ModelConfig, template: ChatTemplate | None
) -> dict[str, dict[str, Any] | str]:
    """Files that transformers needs for generation and tokenizer, where the run's tokenizer came
    without them.
    """
    end = tokenizer.eos_token_id
    begin = tokenizer.bos_token_id
    ends = {end}
    if len(config.end_token_ids) > 1:  # as chat models come with, which keep them
        ends.update(config.end_token_ids)
    if template is not None:
        ends.update(template.stop_ids)
    stops: dict[str, Any] = {"eos_token_id": sorted(ends) if len(ends) > 1 else end}
    ids = dict(stops)
    if not config.reward:  # see core/model/config.py
        ids["pad_token_id"] = end if config.pad_token_id is None else config.pad_token_id
    if begin is not None:
        ids["bos_token_id"] = begin
    names = {"eos_token": tokenizer.id_to_token(end), "clean_up_tokenization_spaces": False}
    return {
        "config.json": ids,
        "generation_config.json": {
            "do_sample": True,
            **ids,
            **(config.generation_config or {}),
            **stops,
        },
        "tokenizer_config.json": {"tokenizer_class": "PreTrainedTokenizerFast", **names},
        **({} if template is None else template.files),
    }
