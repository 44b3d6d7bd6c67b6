"""Whether a wrapped model computes packed documents as it does each alone, measured.

Attention does: it is given masks (transformers_model.py). Layers with a state, recurrences and
convolutions, must begin anew with each document, and what does not is silent: the loss falls all
the same. So a small model of the same config computes two documents packed and alone. Its code
path is that of the device that trains.
"""

import json
import re
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from lmforge.core.errors import UserError
from lmforge.core.model.init_weights import stored_buffers
from lmforge.hf.transformers_causal_lm import read_pretrained_config

# fp32 sums in another order, as a document begins elsewhere in a chunk: relative to the largest.
TOLERANCE = 1e-4
LENGTHS = (5, 9)  # of two documents
VOCAB_SIZE = 256
MAX_PARAMETERS = 50_000_000
# Fields of a config.json that say how wide something is. All are divided by the same number, so
# that those which must fit each other still do.
_WIDTHS = re.compile(r"size|dim|rank$|^d_|_d_|width|inner|ffn|channels|embd|embed")
_FACTORS = (16, 8, 4, 2, 1)


@cache
def packing_error(config_json: str, build: Callable[[dict[str, Any]], Any]) -> float | None:
    """How far the second of two packed documents is from that document alone, relative to its
    largest hidden state; None where no small model of this config runs. `build` makes a wrapped
    model of a config.json.
    """
    theirs = read_pretrained_config(json.loads(config_json), "model")
    content = json.loads(theirs.to_json_string(use_diff=False))  # with what config.json leaves out
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for factor in _FACTORS:
        try:
            with torch.device("meta"):
                model = build(_narrowed(content, factor))
            _cut(model.blocks)
            if sum(each.numel() for each in model.parameters()) <= MAX_PARAMETERS:
                return _measure(model.to_empty(device=device))
        # Whatever a family's code raises for numbers that do not fit each other.
        except (
            UserError,
            ArithmeticError,
            AssertionError,
            AttributeError,
            LookupError,
            RuntimeError,
            TypeError,
            ValueError,
        ):
            continue
    return None


def _narrowed(content: dict[str, Any], factor: int) -> dict[str, Any]:
    result = dict(content)
    for name, value in content.items():
        if not isinstance(value, int) or isinstance(value, bool):
            continue
        if name.startswith("vocab_size"):
            result[name] = min(value, VOCAB_SIZE)
        elif name.endswith("token_id"):
            result[name] = None
        elif _WIDTHS.search(name) and value >= 2 * factor and value % factor == 0:
            result[name] = value // factor
    return result


def _cut(blocks: nn.ModuleList) -> None:
    """Leave the first blocks, up to one of each kind."""
    kinds = [
        (type(block), *((name, each.shape) for name, each in block.named_parameters()))
        for block in blocks
    ]
    del blocks[1 + max(kinds.index(kind) for kind in kinds) :]


@torch.no_grad()
def _measure(model: Any) -> float:
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        drawn = torch.randn(parameter.shape, generator=generator)
        if parameter.ndim > 1:
            drawn /= parameter.shape[-1] ** 0.5
        elif name.endswith("weight"):  # of a norm
            drawn = torch.ones(parameter.shape)
        parameter.copy_(drawn)
    for _, buffer in stored_buffers(model):
        buffer.fill_(1)
    vocab_size = model.config.vocab_size
    tokens = torch.randint(vocab_size, (1, sum(LENGTHS)), generator=generator).to(device)
    positions = torch.cat([torch.arange(length) for length in LENGTHS])[None].to(device)
    ids = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))
    document_ids = ids.int()[None].to(device)
    first = LENGTHS[0]
    packed = model(tokens, positions, document_ids)[:, first:]
    alone = model(tokens[:, first:], positions[:, first:], document_ids[:, first:])
    error: Tensor = (packed - alone).abs().max() / alone.abs().max()
    return float(error.nan_to_num(torch.inf))
