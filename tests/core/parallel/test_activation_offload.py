"""What blocks save for their backward pass goes to the host and comes back in time, with the values
that it had.
"""

import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from lmforge.core.distributed.distributed import DistributedContext
from lmforge.core.distributed.rank_info import RankInfo
from lmforge.core.losses.language import NextTokenObjective
from lmforge.core.model.build import build_model
from lmforge.core.model.init_weights import init_weights
from lmforge.core.model.lora import add_lora
from lmforge.core.model.lora_config import LoraConfig
from lmforge.core.options.sections import ParallelOptions
from lmforge.core.parallel.activation_offload import ActivationOffload, HostCopyStream
from lmforge.core.parallel.parallel_model import ParallelModel
from lmforge.core.parallel.parallelize import parallelize
from lmforge.lab.bench.parity import ParityData
from lmforge.lab.plan.prediction.step_config import StepConfig
from tests.distributed.shapes import SHAPES
from tests.lab.plan.step_program import step_program

CPU = torch.device("cpu")


class LateCopyStream(HostCopyStream):
    """A device whose copies are made only when they are waited for.

    Until then the targets are NaN, and they stay so where the source was freed before.
    """

    def __init__(self) -> None:
        self._queue: list[list[tuple[weakref.ref[Tensor], Tensor]]] = []

    def copy(self, pairs: list[tuple[Tensor, Tensor]]) -> Any:
        for _, target in pairs:
            target.fill_(255)  # all bits: NaN
        self._queue.append([(weakref.ref(source), target) for source, target in pairs])
        return len(self._queue)

    def wait(self, copied: int) -> None:
        for pairs in self._queue[:copied]:
            super().copy(
                [
                    (source, target)
                    for reference, target in pairs
                    if (source := reference()) is not None
                ]
            )
            pairs.clear()


class CountingStream(HostCopyStream):
    """Counts the bytes on the device, of what is copied from and to it."""

    def __init__(self) -> None:
        self._on_device: list[weakref.ref[Tensor]] = []
        self._on_host: set[int] = set()
        self.most_bytes = 0

    def empty_on_host(self, like: Tensor) -> Tensor:
        made = super().empty_on_host(like)
        self._on_host.add(made.data_ptr())
        return made

    def copy(self, pairs: list[tuple[Tensor, Tensor]]) -> None:
        for pair in pairs:
            self._on_device += [
                weakref.ref(each) for each in pair if each.data_ptr() not in self._on_host
            ]
        self.most_bytes = max(self.most_bytes, self.live_bytes())
        super().copy(pairs)

    def live_bytes(self) -> int:
        tensors = {
            id(each): each.nbytes
            for each in (reference() for reference in self._on_device)
            if each is not None
        }
        return sum(tensors.values())


def small_model(
    kind: str,
    dtype: torch.dtype,
    checkpointing: Any,
    *,
    offload: bool,
    compiled: bool = False,
    **changes: Any,
) -> ParallelModel:
    model = build_model(replace(SHAPES[kind.split()[0]], **changes), "meta")
    if "adapters" in kind:
        add_lora(model, LoraConfig(3, 6.0))
    return parallelize(
        model,
        NextTokenObjective().loss,
        dist_ctx=DistributedContext(RankInfo(), CPU, None),
        dtype=dtype,
        options=ParallelOptions(
            engine="single", activation_checkpointing=checkpointing, activation_offload=offload
        ),
        compile_model=compiled,
        init_weights=lambda model: init_weights(model, 0),
    )


def gradients(model: ParallelModel) -> dict[str, Tensor]:
    batch = ParityData(sequences=4).batch(0, model.model.config.vocab_size)
    model.forward_backward([batch[:2], batch[2:]], torch.tensor(9.0), lambda phase: None)
    return {
        name: each.grad for name, each in model.model.named_parameters() if each.grad is not None
    }


@pytest.mark.parametrize("checkpointing", ["none", "full", "selective-blocks"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ["llama", "gpt2", "experts", "llama with adapters"])
def test_gradients_have_the_same_bits_though_copies_are_made_as_late_as_allowed(
    kind: str, dtype: torch.dtype, checkpointing: str
) -> None:
    expected = gradients(small_model(kind, dtype, checkpointing, offload=False))
    model = small_model(kind, dtype, checkpointing, offload=True)
    offload = ActivationOffload(CPU, stream=LateCopyStream())
    model.model.activation_offload = offload
    found = gradients(model)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert offload.num_bytes > 0


@pytest.mark.slow
def test_compiled_blocks_have_the_same_gradients() -> None:
    expected = gradients(small_model("llama", torch.bfloat16, "none", offload=False, compiled=True))
    model = small_model("llama", torch.bfloat16, "none", offload=True, compiled=True)
    model.model.activation_offload = offload = ActivationOffload(CPU, stream=LateCopyStream())
    found = gradients(model)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert offload.num_bytes > 0


def test_the_device_has_the_activations_of_two_blocks_at_most_whatever_the_depth() -> None:
    """Counted by references to what was copied, in the forward and in the backward pass."""
    most = {}
    for layers in (3, 6):
        stream = CountingStream()
        model = small_model("llama", torch.float32, "none", offload=True, num_hidden_layers=layers)
        model.model.activation_offload = offload = ActivationOffload(CPU, stream=stream)
        gradients(model)
        of_a_block = offload.num_bytes / layers / 2  # of one of two micro-batches
        most[layers] = stream.most_bytes / of_a_block
        assert stream.live_bytes() == 0, "all of it was freed"
    assert most[3] == most[6] == pytest.approx(2, abs=0.01)


def test_the_bytes_on_the_host_are_those_that_a_plan_says() -> None:
    for checkpointing in ("none", "full"):
        model = small_model("llama", torch.float32, checkpointing, offload=True)
        gradients(model)
        batch = ParityData(sequences=4).batch(0, 8)
        options = ParallelOptions(
            engine="single", activation_checkpointing=checkpointing, activation_offload=True
        )
        step_config = StepConfig(
            SHAPES["llama"],
            options,
            1,
            1,
            2,
            2,
            batch.sequence_length,
            dtype="fp32",
            compiled=False,
            on_gpu=False,
        )
        program = step_program(step_config)
        assert model.model.activation_offload.num_bytes == pytest.approx(
            2 * program.saved_bytes, rel=0.02
        )
