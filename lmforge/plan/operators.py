"""The work of traced operators: matrix products, attention, and the bytes that all others move.

`WorkCounter` counts operators as they run, one kernel each. `graph_work` counts those of a compiled graph, whose cheap
operators are fused: what a kernel reads and writes is what enters and leaves a group of them.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

aten: Any = torch.ops.aten
# Whose last two tensors are multiplied.
PRODUCTS = {aten.mm.default, aten.addmm.default}
BATCHED_PRODUCTS = {aten.bmm.default, aten.baddbmm.default}
# Kernels keep rows of up to so many numbers while they reduce them (inductor's persistent reductions).
LONGEST_ROW = 1024
# They move nothing; the first argument has the memory.
VIEWS = ("view", "t", "transpose", "permute", "expand", "unsqueeze", "squeeze", "detach", "split", "alias", "_unsafe_view",
         "select", "slice", "unbind", "reshape", "split_with_sizes", "as_strided")  # fmt: skip


@dataclass(frozen=True)
class Work:
    """products: (rows, inner, columns) of each, in order. attention_flops: of the forward pass of attention, also where a
    backward pass computes that again. moved_bytes: read and written by all operators but products and attention.
    """

    products: tuple[tuple[int, int, int], ...]
    attention_flops: float
    moved_bytes: float

    @property
    def product_flops(self) -> float:
        return sum(2.0 * rows * inner * columns for rows, inner, columns in self.products)

    def beyond(self, other: "Work") -> "Work":
        """What this does that `other` does not."""
        products = Counter(self.products) - Counter(other.products)
        flops, moved = self.attention_flops - other.attention_flops, self.moved_bytes - other.moved_bytes
        return Work(tuple(products.elements()), flops, max(0.0, moved))

    def scaled(self, sequences: float, span: float) -> "Work":
        """That of so many sequences, whose attention reaches over the fraction `span` of what was traced."""
        products = tuple((round(rows * sequences), inner, columns) for rows, inner, columns in self.products)
        return Work(products, self.attention_flops * sequences * span, self.moved_bytes * sequences)


def is_view(operator: Any) -> bool:
    return getattr(operator, "namespace", "") == "aten" and operator._schema.name[6:] in VIEWS


def is_attention(operator: Any) -> bool:
    """Whether it is an operator of attention; `attention_flops` are those of forward passes."""
    return "scaled_dot_product" in str(operator)


def product_size(arguments: Iterable[Any]) -> tuple[int, int, int]:
    left, right = [each for each in arguments if isinstance(each, Tensor)][-2:]
    return left.shape[-2], left.shape[-1], right.shape[-1]


def attention_flops(operator: Any, arguments: Iterable[Any], is_causal: bool) -> float:
    """Of a forward pass or of a batched product; the masked half of causal attention is not computed."""
    tensors = [each for each in arguments if isinstance(each, Tensor)]
    if operator in BATCHED_PRODUCTS:
        rows, inner, columns = product_size(tensors)
        return 2.0 * tensors[-1].shape[0] * rows * inner * columns
    if "backward" in str(operator):
        return 0.0
    queries, keys = tensors[:2]
    return 4.0 * queries.numel() * keys.shape[-2] * (0.5 if is_causal else 1.0)


def _is_causal(operator: Any, arguments: Any, named: Any) -> bool:
    names = [argument.name for argument in operator._schema.arguments]
    given = dict(zip(names, arguments, strict=False)) | named
    return bool(given.get("is_causal", False))


def num_bytes(values: Any) -> int:
    return sum(each.numel() * each.element_size() for each in tree_leaves(values) if isinstance(each, Tensor))


class _WorkSum:
    """Adds up operators."""

    def __init__(self) -> None:
        self.products: list[tuple[int, int, int]] = []
        self.attention_flops = self.moved_bytes = 0.0

    def add_expensive(self, operator: Any, arguments: Any, named: Any) -> bool:
        """Whether the operator is a product, attention or a collective; the first two are counted."""
        if operator in PRODUCTS:
            self.products.append(product_size(arguments))
        elif operator in BATCHED_PRODUCTS or is_attention(operator):
            causal = is_attention(operator) and _is_causal(operator, arguments, named)
            self.attention_flops += attention_flops(operator, arguments, causal)
        else:
            return "c10d" in getattr(operator, "namespace", "")
        return True

    def total(self) -> Work:
        return Work(tuple(self.products), self.attention_flops, self.moved_bytes)


class WorkCounter(TorchDispatchMode):
    """Counts the operators that run in this context."""

    def __init__(self) -> None:
        super().__init__()
        self._sum = _WorkSum()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if function.namespace == "prim" or is_view(function) or self._sum.add_expensive(function, args, kwargs or {}):
            return result
        self._sum.moved_bytes += num_bytes((args, kwargs)) + num_bytes(result)
        return result

    def work(self) -> Work:
        return self._sum.total()


def graph_work(graph: torch.fx.Graph) -> Work:
    """The work of a compiled graph."""
    total, cheap = _WorkSum(), list[torch.fx.Node]()
    level: dict[torch.fx.Node, int] = {}
    for node in graph.nodes:
        inputs = [source_node(each) for each in node.all_input_nodes]
        level[node] = max((level[each] for each in inputs), default=0)
        if node.op != "call_function" or is_passed_through(node):
            continue
        values = torch.fx.node.map_arg((node.args, node.kwargs), lambda each: each.meta.get("val"))
        operator, (arguments, named) = node.target, values
        if "rng_state" in str(operator):  # a wrapper of an operator that may draw random numbers, such as attention on a CPU
            at = next(number for number, each in enumerate(arguments) if isinstance(each, torch._ops.OpOverload))
            operator, arguments = arguments[at], arguments[at + 1 :]
        if total.add_expensive(operator, arguments, named):
            level[node] += 1
        elif isinstance(node.meta.get("val"), Tensor):
            cheap.append(node)
    total.moved_bytes = _fused_bytes(cheap, level)
    return total.total()


def is_passed_through(node: torch.fx.Node) -> bool:
    """Whether a node only shows memory of its input."""
    return "getitem" in str(node.target) or is_view(node.target)


def source_node(node: torch.fx.Node) -> torch.fx.Node:
    """The node whose memory this one shows."""
    while node.op == "call_function" and is_view(node.target):
        node = node.all_input_nodes[0]
    return node


@dataclass
class _Kernel:
    """Operators of one level that are fused: what is read, what is read once more, and what is written."""

    level: int
    read: set[torch.fx.Node]
    again: set[torch.fx.Node]
    written: set[torch.fx.Node]


def _fused_bytes(cheap: list[torch.fx.Node], level: dict[torch.fx.Node, int]) -> float:
    """Bytes that fused kernels read and write.

    Written is what products, attention or the other pass need, and what is reduced. All else is computed where it is used.
    Operators with the same products and attention before them are one kernel where they read the same; sums over all tokens,
    such as the gradients of norms, are kernels of their own. A kernel that reduces long rows reads them twice.
    """
    members, reads, kernels = set(cheap), dict[torch.fx.Node, frozenset[torch.fx.Node]](), list[_Kernel]()
    for node in cheap:
        sources = [source_node(each) for each in node.all_input_nodes]
        written_before = {
            each for each in sources if each in members and _is_written(each, members) and level[each] < level[node]
        }
        inside = {each for each in sources if each in members} - written_before
        reads[node] = frozenset(each for each in sources if each not in inside).union(*(reads[each] for each in inside))
        if not _is_written(node, members):
            continue
        kernel = _Kernel(level[node], {each for each in reads[node] if _is_tensor(each)}, set(), {node})
        if _sums_tokens(node):
            kernel.level = -1
        elif _reduces_long_rows(node):
            kernel.again = set(kernel.read)
        for other in [each for each in kernels if each.level == kernel.level >= 0]:
            if other.read & kernel.read or other.written & inside:
                kernels.remove(other)
                kernel.read |= other.read
                kernel.again |= other.again
                kernel.written |= other.written
        kernels.append(kernel)
    moved = [each.meta["val"] for kernel in kernels for each in (*kernel.read, *kernel.again, *kernel.written)]
    return float(num_bytes(moved))


def _reduces_long_rows(node: torch.fx.Node) -> bool:
    inputs = [each.meta["val"] for each in node.all_input_nodes if _is_tensor(each)]
    return any(
        each.shape[-1:] > (LONGEST_ROW,) and node.meta["val"].numel() * each.shape[-1] == each.numel() for each in inputs
    )


def _is_written(node: torch.fx.Node, members: set[torch.fx.Node]) -> bool:
    largest = max((each.meta["val"].numel() for each in node.all_input_nodes if _is_tensor(each)), default=0)
    return node.meta["val"].numel() * 8 <= largest or any(user not in members for user in _users(node))


def _sums_tokens(node: torch.fx.Node) -> bool:
    shape = node.meta["val"].shape
    return bool(shape) and node.meta["val"].numel() == shape[-1]


def _is_tensor(node: torch.fx.Node) -> bool:
    return isinstance(node.meta.get("val"), Tensor)


def _users(node: torch.fx.Node) -> Iterator[torch.fx.Node]:
    for user in node.users:
        if user.op == "call_function" and is_passed_through(user):
            yield from _users(user)
        else:
            yield user
