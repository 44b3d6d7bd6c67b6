"""`lmforge import`: another trainer's checkpoint as a Hugging Face folder, a tensor at a time, without a GPU."""

import sys
from typing import Any

from lmforge.config.verbs import ImportOptions
from lmforge.data.tokenizer import Tokenizer
from lmforge.errors import UserError
from lmforge.hub import resolve_model_folder
from lmforge.interop.layouts import LayoutHints, convert_checkpoint
from lmforge.interop.resolve import resolve_model_config
from lmforge.interop.torch_checkpoints import open_tensor_source
from lmforge.model.flops import parameter_count
from lmforge.verbs.export import write_model_folder


def run_import(options: ImportOptions) -> int:
    """Write the folder and print what it holds. Raises UserError."""
    source = open_tensor_source(options.source)
    converted = convert_checkpoint(options.source, source, options.layout, _layout_hints(options))
    folder = resolve_model_folder(options.tokenizer, "tokenizer.json") if options.tokenizer else None
    tokenizer = Tokenizer.open(folder) if folder else None
    config = converted.config
    if tokenizer is not None and tokenizer.vocab_size > config.vocab_size:
        raise UserError(
            f"{options.tokenizer}: has {tokenizer.vocab_size} entries and the model {config.vocab_size}; give its own"
        )
    write_model_folder(options, converted, config, folder)
    print(f"{options.out}: {parameter_count(config).total:,} parameters ({config.model_type}) of {converted.layout}'s layout")
    if tokenizer is None:
        print(f"{options.out}: no tokenizer; put its tokenizer.json there, or import with --tokenizer", file=sys.stderr)
    return 0


def _layout_hints(options: ImportOptions) -> LayoutHints:
    """What the checkpoint may not say of itself: the options that were given, else the values of --config_from."""
    names = ("num_attention_heads", "rope_theta", "rms_norm_eps", "max_position_embeddings", "activation")
    given = {name: value for name in names if (value := getattr(options, name)) is not None}
    if options.config_from is None:
        return LayoutHints(**given)
    model = resolve_model_config(options.config_from, {})
    if model.model_type not in ("llama", "gpt2"):
        raise UserError(
            f"{options.config_from}: a {model.model_type} model; --config_from needs one of the same kind, llama or gpt2"
        )
    hints: dict[str, Any] = {"num_attention_heads": model.num_attention_heads}
    if model.model_type == "llama":
        hints |= {name: getattr(model, name) for name in ("rope_theta", "rope_scaling", "rms_norm_eps")}
        hints |= {"max_position_embeddings": model.max_position_embeddings}
    else:
        hints |= {"activation": model.hidden_act}
    return LayoutHints(**hints | given)
