"""Whether the blocks of a model are compiled, and forward passes without their compiled code."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from lmforge.core.model.layers import LanguageModel


def compiled_graph_count() -> int:
    """How many graphs this process has compiled so far."""
    # Importing it takes a second, and compiled code has imported it already.
    dynamo = sys.modules.get("torch._dynamo.utils")
    return int(dynamo.counters["stats"]["unique_graphs"]) if dynamo else 0


@contextmanager
def uncompiled_blocks(model: LanguageModel) -> Iterator[None]:
    """The blocks of `model` run as they are, compiled or not.

    Private to torch; checked with 2.13.0.
    """
    compiled = [block._compiled_call_impl for block in model.blocks]
    for block in model.blocks:
        block._compiled_call_impl = None
    try:
        yield
    finally:
        for block, call in zip(model.blocks, compiled, strict=True):
            block._compiled_call_impl = call


def has_compiled_blocks(model: LanguageModel) -> bool:
    """Whether there is compiled code for a block of `model`.

    Private to torch; checked with 2.13.0.
    """
    from torch._C._dynamo.eval_frame import _debug_get_cache_entry_list

    # FSDP1 puts each into a wrapper.
    blocks = [getattr(block, "module", block) for block in model.blocks]
    forwards = [getattr(block.forward, "__func__", block.forward) for block in blocks]
    return any(
        _debug_get_cache_entry_list(each.__code__) for each in forwards if hasattr(each, "__code__")
    )
