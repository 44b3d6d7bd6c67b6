"""First values of a wrapped model, as its family draws them in transformers.

A family's initialization is recorded on the meta device, where it costs nothing. If it finally
draws or fills the full tensor, as nearly all do, each rank draws its part as for our own models.
Otherwise every rank draws the full tensor.
"""

from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lmforge.core.data.order import derive_key
from lmforge.core.errors import UserError
from lmforge.core.model.init_weights import InitialValue
from lmforge.core.model.rng.weight_rng import standard_normal, standard_uniform
from lmforge.hf.transformers_causal_lm import initial_buffers

# torch's default arguments, which it leaves out.
_VALUES: dict[Any, Callable[..., InitialValue]] = {
    torch.ops.aten.normal_.default: lambda mean=0.0, std=1.0: InitialValue(
        standard_normal, mean, std
    ),
    torch.ops.aten.uniform_.default: lambda low=0.0, high=1.0: InitialValue(
        standard_uniform, (low + high) / 2, (high - low) / 2
    ),
    torch.ops.aten.fill_.Scalar: lambda value: InitialValue(loc=value),
    torch.ops.aten.zero_.default: lambda: InitialValue(),
}


class _InPlaceCalls(TorchDispatchMode):
    """Records which operators write into which memory.

    calls: (operator, shape written, other arguments) by storage.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[int, list[tuple[Any, torch.Size, tuple[Any, ...]]]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.is_mutable:
            storage = args[0].untyped_storage()._cdata
            self.calls.setdefault(storage, []).append((func, args[0].shape, args[1:]))
        return func(*args, **(kwargs or {}))


@torch.no_grad()
def family_initial_values(
    causal: Any, names: Collection[str], seed: int
) -> Iterator[tuple[str, InitialValue | Tensor]]:
    """(name, first value) of the parameters and buffers called `names` of a model of transformers.

    The model is on the meta device. A full tensor is fp32 on the CPU, drawn by a generator that is
    seeded with the seed and its module's name. Raises UserError where transformers leaves a tensor
    without a value.
    """
    for name, module in causal.named_modules():
        for short, buffer in initial_buffers(causal, module).items():
            if f"{name}.{short}" in names:
                if buffer is None:
                    raise _not_initialized(f"{name}.{short}")
                yield f"{name}.{short}", buffer
        own = {
            short: each
            for short, each in module.named_parameters(recurse=False)
            if f"{name}.{short}" in names
        }
        if not own:
            continue
        with _InPlaceCalls() as recorded:
            causal._init_weights(module)
        drawn: dict[str, Tensor] = {}
        for short, parameter in own.items():
            calls = recorded.calls.get(parameter.untyped_storage()._cdata, [])
            value: InitialValue | Tensor | None = None
            if calls:
                operator, written, arguments = calls[-1]
                # Only a call that overwrites all of it says what it becomes.
                if operator in _VALUES and written == parameter.shape:
                    value = _VALUES[operator](*arguments)
            if value is None:
                if not drawn:
                    drawn = _drawn_in_full(causal, name, module, seed)
                value = drawn[short]
            yield f"{name}.{short}", value


def _not_initialized(name: str) -> UserError:
    return UserError(
        f"model: transformers does not initialize {name}; start from a folder's weights"
    )


def _drawn_in_full(causal: Any, name: str, module: nn.Module, seed: int) -> dict[str, Tensor]:
    """The first values of all parameters of a module, which stays on the meta device."""
    own = dict(module.named_parameters(recurse=False))
    with torch.device("cpu"), torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive_key(seed, "weights", name))
        for short, parameter in own.items():
            module.register_parameter(short, nn.Parameter(torch.full(parameter.shape, torch.nan)))
        causal._init_weights(module)
    drawn = {short: module.get_parameter(short).detach() for short in own}
    for short, parameter in own.items():
        if drawn[short].isnan().any():
            raise _not_initialized(f"{name}.{short}")
        module.register_parameter(short, parameter)
    return drawn
