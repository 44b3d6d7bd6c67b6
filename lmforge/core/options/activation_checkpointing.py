"""The modes of `parallel.activation_checkpointing`: what each keeps of a block for its backward
pass, which computes the rest again. Their names are in builtin_names.py; a plugin may add one.

Without torch. core/parallel/activation_checkpointing.py carries a mode out, and plan/ traces what
it saves and what it costs.
"""

from collections.abc import Iterator, Mapping
from typing import ClassVar

from lmforge.core import registry


class NoCheckpointing:
    """Blocks keep all that their backward pass needs.

    summary: the mode in the help of the option. keeps_operators: whether blocks that are recomputed
    keep the output of attention and of the products of `keeps_product`; if not, they keep their
    input only. host_margin: so many times the activations may be needed on a CPU, whose C library
    fragments memory between saved and recomputed tensors (up to 1.35, 1.9 and 2.9 were measured).
    """

    name: ClassVar[str] = "none"
    summary: ClassVar[str] = "keep all"
    keeps_operators: ClassVar[bool] = False
    host_margin: ClassVar[float] = 1.4

    def recomputes_block(self, number: int, every: int) -> bool:
        """Whether block `number`, counted from 1, is recomputed; `every` is
        `activation_checkpointing_every`.
        """
        return False

    def keeps_product(self, number: int) -> bool:
        """Whether the output of a block's matrix product `number`, counted from 1, is kept in
        blocks that are recomputed.
        """
        return False


class SelectiveOperators(NoCheckpointing):
    """Attention and every second matrix product are kept (torchtitan's choice): expensive to
    recompute, cheap to keep.
    """

    name = "selective-ops"
    summary = "of all but expensive operators"
    keeps_operators = True
    host_margin = 2.0

    def recomputes_block(self, number: int, every: int) -> bool:
        return True

    def keeps_product(self, number: int) -> bool:
        return number % 2 == 1


class FullCheckpointing(NoCheckpointing):
    """Every block keeps its input only, and computes its forward pass again: a third more work."""

    name = "full"
    summary = "of every block"
    host_margin = 3.0

    def recomputes_block(self, number: int, every: int) -> bool:
        return True


class SelectiveBlocks(FullCheckpointing):
    """`full` for every k-th block, and nothing for the others."""

    name = "selective-blocks"
    summary = "of every k-th block"
    host_margin = 2.0

    def recomputes_block(self, number: int, every: int) -> bool:
        return number % every == 0


class _Modes(Mapping[str, NoCheckpointing]):
    """The modes by their names, those of plugins last."""

    def __getitem__(self, name: str) -> NoCheckpointing:
        entry = registry.find("checkpointing_mode", name)
        if entry is None:
            raise KeyError(name)
        mode: NoCheckpointing = entry.build()
        return mode

    def __iter__(self) -> Iterator[str]:
        return iter(registry.names("checkpointing_mode"))

    def __len__(self) -> int:
        return len(registry.names("checkpointing_mode"))


CHECKPOINTING_MODES = _Modes()
