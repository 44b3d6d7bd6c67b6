"""`lmforge import`: another trainer's checkpoint as a Hugging Face folder, a tensor at a time, without a GPU."""

import sys
from typing import Any

from lmforge.config_verbs import ImportOptions
from lmforge.data.hub import local_folder
from lmforge.data.tokenizer import Tokenizer
from lmforge.errors import Mistake
from lmforge.infer.export import write
from lmforge.model.flops import parameters
from lmforge.model.layouts import Known, lay_out
from lmforge.model.shapes import resolve
from lmforge.model.stored import open_stored


def run_import(options: ImportOptions) -> int:
    """Write the folder and say what it holds. Raises Mistake."""
    known = _known(options)
    laid = lay_out(options.source, open_stored(options.source), options.layout, known)
    place = local_folder(options.tokenizer, "tokenizer.json") if options.tokenizer else None
    tokenizer = Tokenizer.open(place) if place else None
    if tokenizer is not None and tokenizer.vocab_size > laid.config.vocab_size:
        raise Mistake(
            f"{options.tokenizer}: has {tokenizer.vocab_size} entries and the model {laid.config.vocab_size}; give its own"
        )
    write(options, laid, laid.config, place)
    print(f"{options.out}: {parameters(laid.config).total:,} parameters ({laid.config.model_type}) of {laid.layout}'s layout")
    if tokenizer is None:
        print(f"{options.out}: no tokenizer; put its tokenizer.json there, or import with --tokenizer", file=sys.stderr)
    return 0


def _known(options: ImportOptions) -> Known:
    told = {
        name: value
        for name in ("num_attention_heads", "rope_theta", "rms_norm_eps", "max_position_embeddings", "activation")
        if (value := getattr(options, name)) is not None
    }
    if options.like is None:
        return Known(**told)
    like = resolve(options.like, {})
    if like.model_type not in ("llama", "gpt2"):
        raise Mistake(f"{options.like}: a {like.model_type} model; --like needs one of the same kind, llama or gpt2")
    asked: dict[str, Any] = {"num_attention_heads": like.num_attention_heads}
    if like.model_type == "llama":
        asked |= {name: getattr(like, name) for name in ("rope_theta", "rope_scaling", "rms_norm_eps")}
        asked |= {"max_position_embeddings": like.max_position_embeddings}
    else:
        asked |= {"activation": like.hidden_act}
    return Known(**asked | told)
