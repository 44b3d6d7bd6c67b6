"""The work of operators, and the memory that they leave.

Work is matrix products, attention, and the bytes that all others move. `WorkCounter` counts
operators as they run, one kernel each. `graph_work` counts those of a compiled graph, whose cheap
operators are fused: what a kernel reads and writes is what enters and leaves a group of them.
`ActivationTracker` measures what a forward pass saves for its backward pass.
"""

import gc
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from lmforge.core.model.mixture import grouped_mm  # noqa: F401  (its operators)
from lmforge.core.model.quantization import matrices  # noqa: F401  (its operators)

aten: Any = torch.ops.aten
# Products of their last two tensors.
PRODUCTS = {aten.mm.default, aten.addmm.default}
BATCHED_PRODUCTS = {aten.bmm.default, aten.baddbmm.default}
GROUPED_PRODUCTS = {
    torch.ops.lmforge.multiply_groups.default,
    torch.ops.lmforge.sum_outer_products.default,
}
QUANTIZED_PRODUCTS = {
    torch.ops.lmforge.quantized_product.default,
    torch.ops.lmforge.quantized_product_backward.default,
}
# Kernels keep rows of up to so many numbers while they reduce them (inductor's persistent
# reductions).
LONGEST_ROW = 1024
# They move nothing; the first argument has the memory.
VIEWS = (
    "view",
    "t",
    "transpose",
    "permute",
    "expand",
    "unsqueeze",
    "squeeze",
    "detach",
    "split",
    "alias",
    "_unsafe_view",
    "select",
    "slice",
    "unbind",
    "reshape",
    "split_with_sizes",
    "as_strided",
)


class Product(NamedTuple):
    """A product [rows, inner] x [inner, columns] of numbers of `number_bytes`.

    Each of several experts has its own rows and matrix.
    """

    rows: int
    inner: int
    columns: int
    number_bytes: int
    experts: int = 1


@dataclass
class Work:
    """The work of a graph of operators.

    products: in order. attention_flops: of the forward pass of attention, also where a backward
    pass computes that again.
    moved_bytes: read and written by all operators but products and attention.
    """

    products: list[Product] = field(default_factory=list)
    attention_flops: float = 0.0
    moved_bytes: float = 0.0

    @property
    def product_flops(self) -> float:
        return sum(2.0 * each.rows * each.inner * each.columns for each in self.products)

    def add_expensive(self, operator: Any, arguments: Any, named: Any) -> bool:
        """Count an operator if it is a product or attention. Returns True for collectives too.

        The masked half of causal attention is not computed.
        """
        tensors = _tensors(arguments)
        name = str(operator)
        if operator in PRODUCTS | BATCHED_PRODUCTS:
            left, right = tensors[-2:]
            rows = left.shape[-2]
            inner = left.shape[-1]
            columns = right.shape[-1]
            if operator in PRODUCTS:
                self.products.append(Product(rows, inner, columns, left.itemsize))
            else:
                self.attention_flops += 2.0 * right.shape[0] * rows * inner * columns
        elif operator in GROUPED_PRODUCTS:
            left, right, ends = tensors
            # Of rows with a stack of matrices, or the sums of outer products of rows, which are
            # such a stack.
            columns = right.shape[-1] if right.dim() == 2 or arguments[3] else right.shape[1]
            self.products.append(
                Product(left.shape[0], left.shape[1], columns, left.itemsize, ends.shape[0])
            )
        elif operator in QUANTIZED_PRODUCTS:
            left = tensors[0]
            last = tensors[-1]
            shape = arguments[-3]
            columns = shape[-2 if operator is torch.ops.lmforge.quantized_product.default else -1]
            rows = left.numel() // left.shape[-1]
            experts = last.shape[0] if last.dtype == torch.int32 else 1
            self.products.append(Product(rows, left.shape[-1], columns, left.itemsize, experts))
        elif "scaled_dot_product" not in name:
            return "c10d" in getattr(operator, "namespace", "")
        elif "backward" not in name:
            names = [argument.name for argument in operator._schema.arguments]
            is_causal = (dict(zip(names, arguments, strict=False)) | named).get("is_causal", False)
            queries, keys = tensors[:2]
            flops = 4.0 * queries.numel() * keys.shape[-2]
            self.attention_flops += flops / 2 if is_causal else flops
        return True

    def beyond(self, other: "Work") -> "Work":
        """The work that this does and `other` does not."""
        products = Counter(self.products) - Counter(other.products)
        flops = self.attention_flops - other.attention_flops
        moved = self.moved_bytes - other.moved_bytes
        return Work([*products.elements()], flops, max(0.0, moved))

    def scaled(self, sequences: float, span: float) -> "Work":
        """The work of so many sequences.

        Their attention reaches over the fraction `span` of what was traced.
        """
        products = [each._replace(rows=round(each.rows * sequences)) for each in self.products]
        return Work(products, self.attention_flops * sequences * span, self.moved_bytes * sequences)


class WorkCounter(TorchDispatchMode):
    """Counts the operators that run in this context."""

    def __init__(self) -> None:
        super().__init__()
        self.work = Work()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        if not (
            function.namespace == "prim"
            or is_view(function)
            or self.work.add_expensive(function, args, kwargs or {})
        ):
            self.work.moved_bytes += sum(each.nbytes for each in _tensors((args, kwargs, result)))
        return result


def is_view(operator: Any) -> bool:
    return getattr(operator, "namespace", "") == "aten" and operator._schema.name[6:] in VIEWS


def _tensors(values: Any) -> list[Tensor]:
    return [value for value in tree_leaves(values) if isinstance(value, Tensor)]


def graph_work(graph: torch.fx.Graph) -> Work:
    """The work of a compiled graph."""
    work = Work()
    cheap = list[torch.fx.Node]()
    level: dict[torch.fx.Node, int] = {}
    for node in graph.nodes:
        level[node] = max((level[source_node(each)] for each in node.all_input_nodes), default=0)
        if node.op != "call_function" or is_passed_through(node):
            continue
        operator = node.target
        arguments, named = torch.fx.node.map_arg(
            (node.args, node.kwargs), lambda each: each.meta.get("val")
        )
        # A wrapper of an operator that may draw random numbers, such as attention on a CPU.
        if "rng_state" in str(operator):
            at = next(
                number
                for number, each in enumerate(arguments)
                if isinstance(each, torch._ops.OpOverload)
            )
            operator = arguments[at]
            arguments = arguments[at + 1 :]
        if work.add_expensive(operator, arguments, named):
            level[node] += 1
        elif _is_tensor(node):
            cheap.append(node)
    work.moved_bytes = _fused_bytes(cheap, level)
    return work


def is_passed_through(node: torch.fx.Node) -> bool:
    """Return True where a node only shows memory of its input."""
    return "getitem" in str(node.target) or is_view(node.target)


def source_node(node: torch.fx.Node) -> torch.fx.Node:
    """The node whose memory this one shows."""
    while node.op == "call_function" and is_view(node.target):
        node = node.all_input_nodes[0]
    return node


@dataclass
class _Kernel:
    """Operators of one level that are fused.

    read, again, written: what is read, what is read once more, and what is written.
    """

    level: int
    read: set[torch.fx.Node]
    again: set[torch.fx.Node]
    written: set[torch.fx.Node]


def _fused_bytes(cheap: list[torch.fx.Node], level: dict[torch.fx.Node, int]) -> float:
    """Bytes that fused kernels read and write.

    Written is what products, attention or the other pass need, and what is reduced. All else is
    computed where it is used. Operators with the same products and attention before them are one
    kernel where they read the same; sums over all tokens, such as the gradients of norms, are
    kernels of their own. A kernel that reduces long rows reads them twice.
    """
    members = set(cheap)
    reads = dict[torch.fx.Node, frozenset[torch.fx.Node]]()
    kernels = list[_Kernel]()
    for node in cheap:
        sources = [source_node(each) for each in node.all_input_nodes]
        written_before = {
            each
            for each in sources
            if each in members and _is_written(each, members) and level[each] < level[node]
        }
        inside = {each for each in sources if each in members} - written_before
        reads[node] = frozenset(each for each in sources if each not in inside).union(
            *(reads[each] for each in inside)
        )
        if not _is_written(node, members):
            continue
        kernel = _Kernel(
            level[node], {each for each in reads[node] if _is_tensor(each)}, set(), {node}
        )
        shape = node.meta["val"].shape
        if shape and node.meta["val"].numel() == shape[-1]:  # a sum over tokens
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
    moved = (
        each.meta["val"]
        for kernel in kernels
        for each in (*kernel.read, *kernel.again, *kernel.written)
    )
    return float(sum(each.nbytes for each in moved))


def _reduces_long_rows(node: torch.fx.Node) -> bool:
    inputs = [each.meta["val"] for each in node.all_input_nodes if _is_tensor(each)]
    return any(
        each.shape[-1:] > (LONGEST_ROW,)
        and node.meta["val"].numel() * each.shape[-1] == each.numel()
        for each in inputs
    )


def _is_written(node: torch.fx.Node, members: set[torch.fx.Node]) -> bool:
    largest = max(
        (each.meta["val"].numel() for each in node.all_input_nodes if _is_tensor(each)), default=0
    )
    return node.meta["val"].numel() * 8 <= largest or any(
        user not in members for user in _users(node)
    )


def _is_tensor(node: torch.fx.Node) -> bool:
    return isinstance(node.meta.get("val"), Tensor)


def _users(node: torch.fx.Node) -> Iterator[torch.fx.Node]:
    for user in node.users:
        if user.op == "call_function" and is_passed_through(user):
            yield from _users(user)
        else:
            yield user


# Operators of these hold gathered parameters, and gradients that are being reduced.
_COLLECTIVE_NAMESPACES = ("c10d", "fsdp")


class ActivationTracker(TorchDispatchMode):
    """Tracks the memory that operators allocate inside this context, without keeping it alive.

    It tracks storages, since activation checkpointing keeps some where autograd's hooks do not
    look.

    Parameters, batches and everything else that existed before do not count, nor do gathered
    parameters. Operators in compiled code are not seen: of FlexAttention, which is always compiled,
    the output counts, but not the log-sum-exp.
    """

    # FlexAttention is one.
    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        # FlexAttention is compiled where blocks are not, and under another mode torch refuses to
        # compile it.
        return True

    def __init__(self) -> None:
        super().__init__()
        # By address, which is not reused as long as there is a reference to the storage, even a
        # weak one.
        self._created: dict[int, StorageWeakRef] = {}
        self._ignored: dict[int, StorageWeakRef] = {}
        self._of_parameters: set[int] = set()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        for tensor in _tensors((args, kwargs)):
            # What has a gradient function and was not seen before is an output of compiled code.
            self._track(tensor, self._created if tensor.grad_fn is not None else self._ignored)
        result = function(*args, **kwargs)
        inputs = _tensors((args, kwargs))
        of_parameters = bool(inputs) and all(map(self._is_of_parameters, inputs))
        into = self._ignored if function.namespace in _COLLECTIVE_NAMESPACES else self._created
        for tensor in _tensors(result):
            self._track(tensor, into)
            if of_parameters and not is_traceable_wrapper_subclass(tensor):
                self._of_parameters.add(tensor.untyped_storage()._cdata)
        return result

    def _is_of_parameters(self, tensor: Tensor) -> bool:
        if is_traceable_wrapper_subclass(tensor):
            return False
        return (
            isinstance(tensor, nn.Parameter)
            or tensor.untyped_storage()._cdata in self._of_parameters
        )

    def _track(self, tensor: Tensor, into: dict[int, StorageWeakRef]) -> None:
        # A DTensor, or one that is being gathered: it has no memory but its parts'.
        if is_traceable_wrapper_subclass(tensor):
            for part in _tensors(
                [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]
            ):
                self._track(part, into)
            return
        storage = tensor.untyped_storage()
        if storage._cdata not in self._created and storage._cdata not in self._ignored:
            into[storage._cdata] = StorageWeakRef(storage)

    def live_bytes(self, *, only_of_parameters: bool = False) -> int:
        """Bytes of the tracked storages that are still referenced.

        only_of_parameters: of those alone that are computed from parameters alone.
        """
        gc.collect()  # reference cycles do not count
        counted = (
            weak
            for key, weak in self._created.items()
            if key in self._of_parameters or not only_of_parameters
        )
        alive = (torch.UntypedStorage._new_with_weak_ptr(weak.cdata) for weak in counted)
        return sum(storage.nbytes() for storage in alive if storage is not None)
