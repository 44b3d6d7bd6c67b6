"""A step as a list of operations, in the order in which torch's engines issue them.

They gather, compute, reduce and free.

For FSDP2 the order of allocations was read from fully_shard's hooks (torch 2.13) and is compared
with what FSDPMemTracker sees (tests/lab/plan/test_memory_order.py). In the forward pass a unit's
all-gather buffer lives until the next unit is waited for. In the backward pass the unit before is
gathered while this one computes, and a unit's reduce-scatter input lives until the next
reduce-scatter. FSDP1 does the same with one flat tensor.
"""

from functools import cached_property
from itertools import zip_longest
from typing import Any

from lmforge.core.model.quantization.blocks import CHUNK_NUMEL
from lmforge.core.model.state_bytes import DTYPE_BYTES, ParameterCounts, optimizer_state_bytes
from lmforge.core.options.sections import UPDATE_CHUNK_NUMEL
from lmforge.lab.plan.prediction.costs import (
    BlockCost,
    HeadCost,
    Parts,
    count_block,
    count_head,
    embedded_bytes,
    is_checkpointed,
    mask_bytes,
)
from lmforge.lab.plan.prediction.rates import (
    HOST_OPTIMIZER_BYTES,
    LAUNCH_SECONDS,
    UNIT_SECONDS,
    Rates,
    make_group,
)
from lmforge.lab.plan.prediction.simulator import COMPUTE, HOST_COPIES, NETWORK, Operation
from lmforge.lab.plan.prediction.step_config import StepConfig
from lmforge.lab.plan.prediction.units import Stage, Unit, rank_units

FP32 = 4
# Bytes of a number while it is dequantized: its codes, their indices, and fp32.
DEQUANTIZE_BYTES = 6.5
# Kernels that a block launches in its forward pass.
EAGER_KERNELS = 60
COMPILED_KERNELS = 20
# Arrays [tokens, width] and [tokens, intermediate_size] that the backward pass of half a block
# holds besides what was kept.
BACKWARD_WIDE = 2.0
BACKWARD_STREAM = 3.0


class StepProgram:
    """The operations of one step.

    `build` returns them; `held` is what the rank keeps between steps, by kind.
    """

    def __init__(self, step_config: StepConfig, rates: Rates, stage: Stage) -> None:
        self.step_config = step_config
        self.rates = rates
        self.stage = stage
        options = step_config.options
        model = step_config.model
        self.operations: list[Operation] = []
        self.number_bytes = step_config.dtype_bytes
        self.master_bytes = DTYPE_BYTES[step_config.master_dtype]
        self.shard_group = make_group(
            step_config.shards, step_config.tensor, step_config.gpus_per_host
        )
        stride = step_config.tensor * step_config.shards
        self.replica_group = make_group(step_config.replicas, stride, step_config.gpus_per_host)
        self.reshards = step_config.is_fsdp and step_config.dims.reshard_after_forward
        self.reduces_once = not options.reduce_every_micro_batch
        self.residual_bytes = float(
            step_config.tokens * model.hidden_size * self.number_bytes // step_config.tensor
        )
        kernels = COMPILED_KERNELS if step_config.compiled else EAGER_KERNELS
        # The seconds of the host for a unit, and for the forward pass of a block.
        self.unit_seconds = 0.0 if rates.is_cpu else UNIT_SECONDS
        self.launch_seconds = 0.0 if rates.is_cpu else kernels * LAUNCH_SECONDS
        layers = [*zip(model.layer_windows, model.blocks, strict=True)]
        layers = layers[: stage.blocks] if stage.has_embedding else layers[-stage.blocks :]
        kinds = [
            (*layer, is_checkpointed(step_config, number))
            for number, layer in enumerate(layers, start=1)
        ]
        costs = {kind: count_block(step_config, rates, *kind) for kind in set(kinds)}
        self.costs = [costs[kind] for kind in kinds]
        self.units = units = rank_units(step_config, stage, [block for _, block in layers])
        teacher = step_config.teacher
        self.teacher = None
        if teacher is not None:
            self.teacher = StepProgram(teacher, rates, Stage(teacher.model.num_hidden_layers))
        # A product with a quantized matrix has it in full, and what computes it.
        self.dequantized_bytes = float(
            units.widest * self.number_bytes + min(units.widest, CHUNK_NUMEL) * DEQUANTIZE_BYTES
        )
        # Of a rank.
        self.parameters = sum(each.padded / each.group.size for each in units.all)
        self.trained = sum(each.padded_trained / each.group.size for each in units.all)
        self.quantized_bytes = sum(each.quantized / each.group.size for each in units.all)
        self.starts: list[int] = []  # of each micro-batch, in `operations`
        self._gathered: set[str] = set()
        self._gathering: dict[str, tuple[int, ...]] = {}
        self._copied: tuple[int, ...] = ()
        self._buffered: dict[str, float] = {}
        self._reducing: dict[str, float] = {}
        self._reduction: tuple[int, ...] = ()
        self._reduced_units: set[str] = set()
        self._last_compute: tuple[int, ...] = ()
        # Activations that are on their way to the host: when they are there, and their bytes.
        self._leaving: tuple[tuple[int, ...], float] | None = None

    @cached_property
    def head_cost(self) -> HeadCost:
        return count_head(self.step_config, self.rates, self.units.head_parameters)

    # --- between steps ----------------------------------------------------------------------------

    def held(self) -> dict[str, float]:
        """Bytes by kind that a rank keeps between steps."""
        step_config = self.step_config
        matrices = sum(
            each.trained / each.group.size
            for each in (*self.units.blocks, *self.units.experts.values())
        )
        counts = ParameterCounts(round(self.parameters), round(self.trained), round(matrices))
        held = {"weights": self.parameters * self.master_bytes + self.quantized_bytes}
        held["optimizer states"] = float(
            optimizer_state_bytes(step_config.optimizer, step_config.master_dtype, counts)
        )
        if step_config.reference == "copy":
            held["reference"] = held["weights"]
        if self.teacher is not None:
            held["teacher"] = self.teacher.parameters * self.number_bytes
        if step_config.options.cpu_offload and step_config.on_gpu:
            held = {}
        if self.teacher is not None:  # whose head every rank has a copy of
            copied = (
                self.teacher.step_config.model.hidden_size
                * self.teacher.step_config.model.vocab_size
                * self.number_bytes
            )
            held["teacher"] = held.get("teacher", 0.0) + copied
        if step_config.distillation is not None:
            held["what the teacher says"] = step_config.distilled_bytes
        if step_config.options.engine == "ddp":
            # DDP's buckets, of which gradients are views.
            held["gradients"] = self.trained * self.master_bytes
        if self.stage.in_flight > 1 and not step_config.offloads_activations:
            held["activations of other micro-batches"] = (
                self.stage.in_flight - 1
            ) * self.saved_bytes
        return held

    @property
    def saved_bytes(self) -> float:
        """The bytes that the blocks keep of a micro-batch for its backward pass.

        They are on the device or, with activation offload, on the host.
        """
        return sum(cost.saved_bytes for cost in self.costs)

    # --- one step ---------------------------------------------------------------------------------

    def build(self, micro_batches: int) -> list[Operation]:
        step_config = self.step_config
        if not step_config.is_fsdp and self.number_bytes < self.master_bytes:
            matrices = sum(each.parameters for each in self.units.blocks)
            seconds = matrices * (self.number_bytes + self.master_bytes) / self.rates.memory
            copies = {"working weights": matrices * self.number_bytes}
            self._add("working weights", allocate=copies, seconds=seconds, kind="element-wise")
        # All micro-batches before the first, while those of the last step still exist.
        if self.teacher is not None:
            said = {"what the teacher says": step_config.distilled_bytes}
            self._add("teacher, of this step", allocate=said)
            self._score_by("teacher", self.teacher, step_config.accumulation)
            self._add("teacher, of the last step", free=said)
        for number in range(1, micro_batches + 1):
            self.starts.append(len(self.operations))
            if step_config.reference != "none":
                self._score_by("reference", self)
                self._add(
                    "reference, head and loss",
                    seconds=self.head_cost.scoring_seconds,
                    kind="head and loss",
                    transient={"loss": self.head_cost.forward_transient},
                    host_seconds=self.launch_seconds,
                )
            self._forward()
            self._backward(is_first=number == 1, is_last=number == micro_batches)
        self._optimizer()
        return self.operations

    def _add(self, name: str, stream: str = COMPUTE, **fields: object) -> tuple[int, ...]:
        """Issue an operation. Returns its number, for `after` of other operations."""
        number = (len(self.operations),)
        self.operations.append(Operation(name, stream, **fields))  # type: ignore[arg-type]
        if stream == COMPUTE:
            self._last_compute = number
        return number

    def _gather(self, unit: Unit, *, after: tuple[int, ...]) -> None:
        """Issue the all-gather of a unit, unless it is gathered or in flight."""
        if (
            not self.step_config.is_fsdp
            or not unit.parameters
            or unit.name in self._gathered | self._gathering.keys()
        ):
            return
        seconds = self.rates.gather_seconds(self._full_bytes(unit), unit.group)
        if self.step_config.options.cpu_offload:
            seconds += unit.padded * self.master_bytes / unit.group.size / self.rates.host_copy
        self._gathering[unit.name] = self._add(
            f"gather {unit.name}",
            NETWORK,
            seconds=seconds,
            kind="all-gather",
            after=after,
            host_seconds=self.unit_seconds,
            allocate=self._buffer(unit, "gather buffers", self._full_bytes(unit)),
        )

    def _full_bytes(self, unit: Unit) -> float:
        """The bytes of a unit that is gathered."""
        return float(unit.padded * self.number_bytes + unit.quantized)

    def _buffer(self, unit: Unit, kind: str, nbytes: float) -> dict[str, float]:
        """The buffer that FSDP communicates with, where there is another rank."""
        return {kind: float(nbytes)} if unit.group.size > 1 else {}

    def _wait(self, unit: Unit, *, in_forward: bool) -> None:
        """Wait for a unit's all-gather, and copy its parameters out of the buffer.

        The forward pass keeps the buffer for one more unit, so that the next gather need not wait
        for this copy.
        """
        if unit.name not in self._gathering:
            return
        number = self._gathering.pop(unit.name)
        self._gathered.add(unit.name)
        nbytes = self._full_bytes(unit)
        buffer = self._buffer(unit, "gather buffers", nbytes)
        before = self._buffered
        self._buffered = buffer if in_forward else {}
        if before:
            self._add("free a buffer", free=before)
        copied = self._add(
            f"copy out {unit.name}",
            seconds=2 * nbytes / self.rates.memory,
            kind="copies of parameters",
            after=number,
            allocate={"gathered weights": nbytes},
            free={} if in_forward else buffer,
        )
        self._copied = self._copied[-1:] + copied

    def _after_copy(self, *, in_forward: bool) -> tuple[int, ...]:
        """The copy that the next gather waits for.

        In the forward pass it is the last but one, in the backward pass the last.
        """
        return self._copied[:1] if in_forward else self._copied[-1:]

    def _free(self, unit: Unit, *, reshards: bool) -> dict[str, float]:
        """The memory that is freed where a unit `reshards`."""
        if not reshards or unit.name not in self._gathered:
            return {}
        self._gathered.discard(unit.name)
        return {"gathered weights": self._full_bytes(unit)}

    def _forward(self) -> None:
        step_config = self.step_config
        residual = self.residual_bytes
        self._gather(self.units.root, after=())
        self._wait(self.units.root, in_forward=True)
        if self.stage.has_embedding:
            self._gather(self.units.embedding, after=())
            self._wait(self.units.embedding, in_forward=True)
            self._add(
                "forward, embedding",
                kind="element-wise",
                seconds=self.rates.element_wise_seconds(3 * residual, residual),
                allocate={"activations": embedded_bytes(step_config)},
                transient={"temporary": 3.0 * mask_bytes(step_config)},
                free=self._free(self.units.embedding, reshards=self.reshards),
            )
        for unit, cost in zip(self.units.blocks, self.costs, strict=True):
            for each in self.units.with_experts(unit):
                self._gather(each, after=self._after_copy(in_forward=True))
                self._wait(each, in_forward=True)
            self._issue(f"forward, {unit.name}", cost.forward)
            copies = 3.0 if cost.recomputed_bytes else 1.0
            temporary = copies * cost.widest_bytes + cost.dispatch_bytes + self.dequantized_bytes
            freed = [
                self._free(each, reshards=self.reshards) for each in self.units.with_experts(unit)
            ]
            self._add(
                f"forward, {unit.name}",
                allocate={"activations": float(cost.saved_bytes)},
                transient={"temporary": temporary},
                free=freed[0],
            )
            for more in freed[1:]:
                self._add(f"forward, free experts of {unit.name}", free=more)
            if step_config.offloads_activations:
                self._copy_out(unit, cost)
        if self.stage.has_head:
            self._head_forward()

    def _copy_out(self, unit: Unit, cost: BlockCost) -> None:
        """Copy a block's activations to the host beside the next block.

        Those of the block before are freed.
        """
        copied = self._add(
            f"copy activations of {unit.name} out",
            HOST_COPIES,
            after=self._last_compute,
            seconds=cost.saved_bytes / self.rates.host_copy,
            kind="copies of activations",
        )
        if self._leaving is not None:
            copied_before, nbytes = self._leaving
            self._add("free activations", after=copied_before, free={"activations": nbytes})
        self._leaving = copied, float(cost.saved_bytes)

    def _copy_in(self, unit: Unit, cost: BlockCost) -> tuple[int, ...]:
        return self._add(
            f"copy activations of {unit.name} in",
            HOST_COPIES,
            after=self._last_compute,
            seconds=cost.saved_bytes / self.rates.host_copy,
            kind="copies of activations",
            allocate={"activations": float(cost.saved_bytes)},
        )

    def _score_by(self, name: str, scorer: "StepProgram", times: int = 1) -> None:
        """Issue the forward pass of a model that scores `times` micro-batches and keeps nothing.

        It is distributed like the one that is trained.
        """
        for unit, cost in zip(scorer.units.blocks, scorer.costs, strict=True):
            gathered = dict[str, float]()
            after = tuple[int, ...]()
            if self.step_config.is_fsdp:
                gathered = {"gathered weights": float(unit.padded * self.number_bytes)}
                seconds = self.rates.gather_seconds(gathered["gathered weights"], self.shard_group)
                after = self._add(
                    f"{name}, gather {unit.name}",
                    NETWORK,
                    seconds=times * seconds,
                    kind="all-gather",
                    host_seconds=times * self.unit_seconds,
                )
            transient = gathered | {"temporary": 3.0 * cost.widest_bytes}
            self._issue(
                f"{name}, {unit.name}", cost.forward, times, after=after, transient=transient
            )

    def _issue(self, name: str, parts: Parts, times: int = 1, **fields: Any) -> None:
        """Issue the operations of a block, `times` each. The host launches them with the first."""
        for number, (suffix, seconds, kind) in enumerate(parts):
            host_seconds = 0.0 if number else times * self.launch_seconds
            self._add(
                f"{name}{suffix}",
                seconds=times * seconds,
                kind=kind,
                host_seconds=host_seconds,
                **fields,
            )

    def _head_forward(self) -> None:
        cost = self.head_cost
        self._gather(self.units.head, after=self._after_copy(in_forward=True))
        self._wait(self.units.head, in_forward=True)
        self._add(
            "forward, head and loss",
            seconds=cost.product_seconds,
            kind="head and loss",
            allocate={"activations": cost.norm_bytes, "loss": cost.loss_bytes},
            transient={"loss": cost.forward_transient},
            host_seconds=self.launch_seconds,
        )
        self._add("forward, loss", kind="head and loss", seconds=cost.loss_seconds)

    def _backward(self, *, is_first: bool, is_last: bool) -> None:
        if self.stage.has_head:
            self._head_backward(is_first, is_last)
        pairs = list(zip(self.units.blocks, self.costs, strict=True))
        self._leaving = None  # activations of the last block are still on the device
        copied = tuple[int, ...]()
        for number in range(len(pairs) - 1, -1, -1):
            unit, cost = pairs[number]
            for each in self.units.with_experts(unit):
                self._gather(each, after=self._after_copy(in_forward=False))
                self._wait(each, in_forward=False)
            if number:
                for each in self.units.with_experts(pairs[number - 1][0]):
                    self._gather(each, after=self._after_copy(in_forward=False))
            if copied:
                self._add(f"wait for activations of {unit.name}", after=copied)
            if number and self.step_config.offloads_activations:
                copied = self._copy_in(*pairs[number - 1])
            self._block_backward(unit, cost)
            for each in reversed(self.units.with_experts(unit)):
                self._reduce(each, is_first=is_first, is_last=is_last)
        if self.stage.has_embedding:
            seconds = self.rates.element_wise_seconds(4 * self.residual_bytes, self.residual_bytes)
            self._add(
                "backward, embedding",
                kind="element-wise",
                seconds=seconds,
                allocate=self._unreduced(self.units.embedding),
                free={"activations": embedded_bytes(self.step_config)},
            )
            self._reduce(self.units.embedding, is_first=is_first, is_last=is_last)
        self._reduce(self.units.root, is_first=is_first, is_last=is_last)

    def _unreduced(self, unit: Unit) -> dict[str, float]:
        """A unit's gradients before they are reduced: in the compute dtype under FSDP."""
        if self.step_config.is_fsdp:
            return {"gradients before reduction": float(unit.trained * self.number_bytes)}
        return {}

    def _head_backward(self, is_first: bool, is_last: bool) -> None:
        cost = self.head_cost
        self._add(
            "backward, head and loss",
            seconds=cost.backward_seconds,
            kind="head and loss",
            transient={"loss": cost.backward_transient},
            allocate=self._unreduced(self.units.root if self.units.tied else self.units.head),
            free={"loss": cost.loss_bytes, "activations": cost.norm_bytes},
            host_seconds=self.launch_seconds,
        )
        self._reduce(self.units.head, is_first=is_first, is_last=is_last)

    def _block_backward(self, unit: Unit, cost: BlockCost) -> None:
        name = f"backward, {unit.name}"
        if cost.recomputed_bytes:
            self._issue(f"{name}: recompute", cost.recomputed, after=self._reduction)
            self._add(f"{name}: recompute", allocate={"recomputed": float(cost.recomputed_bytes)})
        arrays = 3 if self.step_config.compiled else 4
        feed_forward = arrays * cost.widest_bytes + 2 * cost.input_bytes
        total = cost.saved_bytes + cost.recomputed_bytes
        part = min(0.9, feed_forward / total) if total else 0.5
        parts = [self._unreduced(each) for each in self.units.with_experts(unit)]
        half = {kind: 0.5 * sum(each[kind] for each in parts) for kind in parts[0]}
        stream = BACKWARD_STREAM * cost.input_bytes
        busy = stream + cost.dispatch_bytes + self.dequantized_bytes
        first = {
            "recomputed": cost.recomputed_bytes * part,
            "activations": 0.0 if cost.recomputed_bytes else total * part,
        }
        rest = {
            "recomputed": cost.recomputed_bytes - first["recomputed"],
            "activations": cost.saved_bytes - first["activations"],
        }
        # Of the products, of attention, and of all others.
        memory: list[dict[str, Any]] = [
            {
                "transient": {"temporary": BACKWARD_WIDE * cost.widest_bytes + busy},
                "allocate": half,
                "free": first,
                "after": self._reduction,
                "host_seconds": 2 * self.launch_seconds,
            },
            {"transient": {"temporary": stream}, "allocate": half, "free": rest},
        ]
        for (suffix, seconds, kind), fields in zip_longest(
            cost.backward, memory, fillvalue=dict[str, Any]()
        ):
            self._add(f"{name}{suffix}", seconds=seconds, kind=kind, **fields)

    def _reduce(self, unit: Unit, *, is_first: bool, is_last: bool) -> None:
        """Reduce a unit's gradients and free what is no longer needed of it."""
        step_config = self.step_config
        rates = self.rates
        if not unit.parameters:
            return
        unreduced = self._unreduced(unit)
        if unit is self.units.root and self.units.in_root and not self.units.tied:
            self._add("backward, root", allocate=unreduced)
        elif unit is self.units.root and not self.units.tied:
            unreduced = {}
        freed = unreduced | self._free(unit, reshards=self.reshards or is_last)
        new = {}
        if unit.name not in self._reduced_units and step_config.options.engine != "ddp":
            new = {"gradients": float(unit.padded_trained * self.master_bytes)}
        if not step_config.is_fsdp:
            self._add(f"gradients, {unit.name}", allocate=new)
            self._reduced_units.add(unit.name)
            if is_last and step_config.replicas > 1:
                seconds = rates.all_reduce_seconds(float(unit.trained * FP32), self.replica_group)
                self._add(
                    f"all-reduce {unit.name}",
                    NETWORK,
                    seconds=seconds,
                    kind="all-reduce",
                    after=self._last_compute,
                )
            return
        if self.reduces_once and not is_last:
            fresh = {"accumulated gradients": float(unit.trained * FP32)} if is_first else {}
            self._add(
                f"accumulate {unit.name}",
                seconds=unit.trained * 10 / rates.memory,
                kind="element-wise",
                allocate=fresh,
                free=freed,
            )
            return
        if self.reduces_once and not is_first:
            freed |= {"accumulated gradients": float(unit.trained * FP32)}
        nbytes = float(unit.padded_trained * step_config.reduce_dtype_bytes)
        buffer = self._buffer(unit, "reduce buffers", nbytes)
        # The compute stream waits for the reduction before, and its buffer is given back, before
        # the next is allocated.
        self._add(
            f"copy in {unit.name}",
            kind="copies of parameters",
            free=self._reducing,
            after=self._last_compute + self._reduction,
            seconds=unit.trained
            * (self.number_bytes + step_config.reduce_dtype_bytes)
            / rates.memory,
        )
        self._reducing = buffer
        shard = {kind: count / unit.group.size for kind, count in new.items()}
        self._reduced_units.add(unit.name)
        if step_config.options.cpu_offload and step_config.on_gpu:
            shard = {}
        seconds = rates.gather_seconds(nbytes, unit.group, "reduce-scatter")
        self._reduction = self._add(
            f"reduce {unit.name}",
            NETWORK,
            seconds=seconds,
            kind="reduce-scatter",
            after=self._last_compute,
            allocate=buffer | shard,
            free=freed,
            host_seconds=self.unit_seconds,
        )
        if step_config.replicas > 1 and is_last:
            seconds = rates.all_reduce_seconds(nbytes / unit.group.size, self.replica_group)
            self._reduction = self._add(
                f"all-reduce {unit.name}",
                NETWORK,
                kind="all-reduce",
                after=self._reduction,
                seconds=seconds,
            )

    def _optimizer(self) -> None:
        step_config = self.step_config
        rates = self.rates
        count = self.trained
        network = [number for number, each in enumerate(self.operations) if each.stream == NETWORK]
        # Reads master, gradient and two states, and writes all but the gradient; clipping reads and
        # writes the gradient.
        nbytes = count * self.master_bytes * (7 + 3)
        seconds = nbytes / rates.memory
        if step_config.options.cpu_offload and step_config.on_gpu:
            seconds = nbytes / HOST_OPTIMIZER_BYTES + count * self.master_bytes / rates.host_copy
        optimizer = step_config.optimizer
        transient = 0.0
        # Two states of a part of the numbers.
        if optimizer.uses_state_dtype and optimizer.state_dtype != "fp32":
            transient = 2 * min(count, UPDATE_CHUNK_NUMEL) * FP32
        self._add(
            "optimizer",
            seconds=seconds,
            kind="optimizer",
            after=network[-1:],
            free=self._reducing,
            transient={"temporary": transient},
            host_seconds=self.unit_seconds,
        )
