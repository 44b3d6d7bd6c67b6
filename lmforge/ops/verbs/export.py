"""`lmforge export` and `lmforge import`: a checkpoint, ours or another trainer's, as a Hugging Face
folder.
"""

import sys
from dataclasses import fields

from lmforge.core.data.tokenizer import Tokenizer
from lmforge.core.errors import UserError
from lmforge.core.model.flops import parameter_count
from lmforge.core.records.kinds import Kind, kind_of
from lmforge.hf.hub import resolve_model_folder
from lmforge.hf.layouts import LayoutHints, convert_checkpoint, find_layout
from lmforge.hf.resolve import resolve_model_config
from lmforge.hf.stored_model import stored_lora_config
from lmforge.hf.torch_checkpoints import open_tensor_source
from lmforge.ops.export import export_checkpoint, write_model_folder
from lmforge.serve.options.models import ExportOptions, ImportOptions


def run_export(options: ExportOptions) -> int:
    """Write the folder and print where. Raises UserError."""
    manifest, multimodal, warnings = export_checkpoint(options)
    for line in warnings:
        print(line, file=sys.stderr)
    what, layout = ("adapters of step", "PEFT") if options.adapters else ("step", "Hugging Face")
    lora = stored_lora_config(manifest)
    if lora is not None and lora.stored is not None and not options.adapters:
        rounded = "not rounded" if options.dtype == "fp32" else f"rounded to {options.dtype}"
        print(
            f"{options.out}: adapters are merged into weights dequantized from"
            f" {lora.stored.describe()}; the sums are {rounded}"
        )
    print(
        f"{options.out}: {what} {manifest.step} of {options.model}, {options.dtype}, in the layout"
        f" of {layout}"
    )
    if multimodal is not None:
        print(f"{options.out}: {multimodal.describe()}")
    return 0


def run_import(options: ImportOptions) -> int:
    """Write the folder and print what it holds. Raises UserError."""
    if kind_of(options.source) == Kind.HF_FOLDER and any(options.source.glob("*.safetensors")):
        way = (
            f"use it as it is: lmforge generate {options.source}, or --model.source"
            f" {options.source}"
        )
        raise UserError(f"{options.source}: is a Hugging Face folder already; {way}")
    source = open_tensor_source(options.source)
    layout = find_layout(options.source, source, options.layout)
    converted = convert_checkpoint(
        options.source, source, layout, _layout_hints(options, layout.facts["like"])
    )
    config = converted.config
    if options.tokenizer:
        folder = resolve_model_folder(options.tokenizer, "tokenizer.json")
    else:
        folder = None
    if folder is not None and (entries := Tokenizer.open(folder).vocab_size) > config.vocab_size:
        raise UserError(
            f"{options.tokenizer}: has {entries} entries and the model {config.vocab_size}; give"
            " its own"
        )
    write_model_folder(options, converted.tensors, converted.read, config, folder)
    print(
        f"{options.out}: {parameter_count(config).total:,} parameters ({config.model_type}) of"
        f" {converted.layout}'s layout"
    )
    if folder is None:
        print(
            f"{options.out}: no tokenizer; put its tokenizer.json there, or import with"
            " --tokenizer",
            file=sys.stderr,
        )
    return 0


def _layout_hints(options: ImportOptions, model_type: str) -> LayoutHints:
    """Values that the checkpoint may lack: the options that were given, else those of
    --config_from, a model of that type.
    """
    given = {
        name: value
        for name in ("num_attention_heads", "rope_theta")
        if (value := getattr(options, name)) is not None
    }
    if options.config_from is None:
        return LayoutHints(**given)
    model = resolve_model_config(options.config_from, {})
    if model.model_type != model_type:
        raise UserError(
            f"{options.config_from}: a {model.model_type} model; --config_from needs one of the"
            f" same kind, {model_type}"
        )
    return LayoutHints(
        **{each.name: getattr(model, each.name) for each in fields(LayoutHints)} | given
    )
