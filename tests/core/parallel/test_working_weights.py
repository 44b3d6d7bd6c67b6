"""bf16 weights of one process: cast once per step, with the values and gradients of autocast, and
with fp32 masters.
"""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lmforge.core.distributed.distributed import DistributedContext
from lmforge.core.distributed.rank_info import RankInfo
from lmforge.core.losses.language import NextTokenObjective
from lmforge.core.model.build import build_model
from lmforge.core.model.init_weights import init_weights
from lmforge.core.model.lora import add_lora
from lmforge.core.model.lora_config import LoraConfig
from lmforge.core.options.sections import ParallelOptions
from lmforge.core.parallel.parallel_model import ParallelModel
from lmforge.core.parallel.parallelize import parallelize
from lmforge.lab.bench.parity import ParityData
from tests.distributed.shapes import SHAPES

KINDS = ("llama", "tied", "gpt2", "llama with adapters")


class WeightCasts(TorchDispatchMode):
    """Counts casts of these tensors, and of gradients of their shapes to fp32."""

    def __init__(self, weights: list[torch.Tensor]) -> None:
        super().__init__()
        self._weights, self._shapes = (
            {weight.data_ptr() for weight in weights},
            {weight.shape for weight in weights},
        )
        self.narrowed = self.widened = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        if function is torch.ops.aten._to_copy.default:
            self.narrowed += result.dtype == torch.bfloat16 and args[0].data_ptr() in self._weights
            self.widened += result.dtype == torch.float32 and args[0].shape in self._shapes
        return result


def small_model(kind: str, checkpointing: Any = "none") -> ParallelModel:
    model = build_model(SHAPES[kind.split()[0]], "meta")
    if "adapters" in kind:
        add_lora(model, LoraConfig(3, 6.0))
    return parallelize(
        model,
        NextTokenObjective().loss,
        dist_ctx=DistributedContext(RankInfo(), torch.device("cpu"), None),
        dtype=torch.bfloat16,
        options=ParallelOptions(engine="single", activation_checkpointing=checkpointing),
        init_weights=lambda model: init_weights(model, 0),
    )


def micro_batches(model: ParallelModel, count: int) -> list[Any]:
    batch, size = ParityData(sequences=4).batch(0, model.model.config.vocab_size), 4 // count
    return [batch[number * size : (number + 1) * size] for number in range(count)]


@pytest.mark.parametrize("checkpointing", ["none", "full"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_matrices_of_the_blocks_are_cast_once_a_step_whatever_the_accumulation(
    kind: str, checkpointing: str
) -> None:
    model = small_model(kind, checkpointing)
    matrices = [parameter for parameter in model.model.blocks.parameters() if parameter.ndim == 2]
    trained = [matrix for matrix in matrices if matrix.requires_grad]
    for count in (1, 4):
        with WeightCasts(matrices) as casts:
            model.forward_backward(micro_batches(model, count), torch.tensor(9.0), print)
        assert casts.narrowed == len(matrices)
        # Only the first gradients are: later ones are added to them as they are. The second step
        # still has those of the first.
        assert casts.widened == (len(trained) if count == 1 else 0)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_have_the_bits_of_autocast_and_the_parameters_stay_the_masters(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = small_model(kind)
    before = {
        name: (id(parameter), parameter.detach().clone())
        for name, parameter in model.model.named_parameters()
    }
    gradients = []
    for _ in range(2):
        model.forward_backward(micro_batches(model, 4), torch.tensor(9.0), print)
        gradients.append([parameter.grad for parameter in model.parameters()])
        for parameter in model.parameters():
            parameter.grad = None
        monkeypatch.setattr(
            "lmforge.core.parallel.parallel_model.working_weights",
            lambda model, dtype: nullcontext(),
        )
    for ours, theirs in zip(*gradients, strict=True):
        assert ours is not None
        assert theirs is not None
        assert ours.dtype == torch.float32
        assert torch.equal(ours, theirs)
    for name, parameter in model.model.named_parameters():
        same, value = before[name]
        assert id(parameter) == same
        assert torch.equal(parameter, value)


# In `make test` one of them is compiled.
ORDERS = [
    pytest.param(
        kind,
        checkpointing,
        compiled,
        marks=[pytest.mark.slow] * (compiled and (kind, checkpointing) != ("gpt2", "none")),
    )
    for kind in KINDS
    for checkpointing in ("none", "full")
    for compiled in (False, True)
]


@pytest.mark.parametrize(("kind", "checkpointing", "compiled"), ORDERS)
def test_gradients_reach_the_masters_of_a_block_before_the_block_before_it_goes_backward(
    kind: str, checkpointing: str, compiled: bool
) -> None:
    """So that DDP reduces them beside the backward pass.

    Norms have no copies: theirs show when a block goes backward.
    """
    model = small_model(kind, checkpointing)
    order: list[int] = []
    expected: list[int] = []
    for number, block in reversed(list(enumerate(model.model.blocks))):
        if compiled:
            block.compile(dynamic=False, backend="aot_eager")
        for parameter in block.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(
                    lambda _, number=number: order.append(number)
                )
                expected.append(number)
    assert len(set(expected)) > 1
    model.forward_backward(micro_batches(model, 1), torch.tensor(9.0), print)
    assert order == expected


def test_after_a_step_that_fails_the_parameters_are_the_masters() -> None:
    model = small_model("llama")
    names = [name for name, _ in model.model.named_parameters()]
    with pytest.raises(AttributeError):
        model.forward_backward([object()], torch.tensor(9.0), print)  # type: ignore[list-item]
    assert [name for name, _ in model.model.named_parameters()] == names
    assert {parameter.dtype for parameter in model.model.parameters()} == {torch.float32}
