"""`lmforge import`: another trainer's checkpoint as a Hugging Face folder, a tensor at a time, without a GPU."""

import sys
from typing import Any

from lmforge.config.verbs import ImportOptions
from lmforge.data.tokenizer import Tokenizer
from lmforge.errors import UserError
from lmforge.hub import resolve_model_folder
from lmforge.interop.layouts import LayoutHints, convert_checkpoint
from lmforge.interop.resolve import resolve_model_config
from lmforge.interop.tensor_sources import open_tensor_source
from lmforge.model.flops import parameter_count
from lmforge.verbs.export import write_model_folder


def run_import(options: ImportOptions) -> int:
    """Write the folder and say what it holds. Raises UserError."""
    known = _known_values(options)
    laid = convert_checkpoint(options.source, open_tensor_source(options.source), options.layout, known)
    place = resolve_model_folder(options.tokenizer, "tokenizer.json") if options.tokenizer else None
    tokenizer = Tokenizer.open(place) if place else None
    if tokenizer is not None and tokenizer.vocab_size > laid.config.vocab_size:
        raise UserError(
            f"{options.tokenizer}: has {tokenizer.vocab_size} entries and the model {laid.config.vocab_size}; give its own"
        )
    write_model_folder(options, laid, laid.config, place)
    print(
        f"{options.out}: {parameter_count(laid.config).total:,} parameters ({laid.config.model_type}) of {laid.layout}'s layout"
    )
    if tokenizer is None:
        print(f"{options.out}: no tokenizer; put its tokenizer.json there, or import with --tokenizer", file=sys.stderr)
    return 0


def _known_values(options: ImportOptions) -> LayoutHints:
    told = {
        name: value
        for name in ("num_attention_heads", "rope_theta", "rms_norm_eps", "max_position_embeddings", "activation")
        if (value := getattr(options, name)) is not None
    }
    if options.config_from is None:
        return LayoutHints(**told)
    like = resolve_model_config(options.config_from, {})
    if like.model_type not in ("llama", "gpt2"):
        raise UserError(
            f"{options.config_from}: a {like.model_type} model; --config_from needs one of the same kind, llama or gpt2"
        )
    asked: dict[str, Any] = {"num_attention_heads": like.num_attention_heads}
    if like.model_type == "llama":
        asked |= {name: getattr(like, name) for name in ("rope_theta", "rope_scaling", "rms_norm_eps")}
        asked |= {"max_position_embeddings": like.max_position_embeddings}
    else:
        asked |= {"activation": like.hidden_act}
    return LayoutHints(**asked | told)
