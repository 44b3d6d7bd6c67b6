"""The optimizer, its parameter groups, and its state under the model's names."""

import difflib
import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lmforge.core import registry
from lmforge.core.data.order import derive_key
from lmforge.core.errors import UserError
from lmforge.core.model.layers import LanguageModel
from lmforge.core.options.extend import entry_options
from lmforge.core.options.sections import GroupOptions, OptimizerOptions
from lmforge.core.parallel.precision import DTYPES

STATE_DTYPES = DTYPES | {"8bit": torch.uint8}


def build_optimizer(
    model: LanguageModel,
    options: OptimizerOptions,
    full_shapes: Mapping[str, torch.Size] | None = None,
) -> torch.optim.Optimizer:
    """The optimizer of `model`'s trainable parameters.

    Raises UserError for a group without parameters.

    Matrices decay; vectors (norms, biases) do not. The learning rate of input embeddings and head
    is `embedding_lr_ratio` times that of the rest. The groups of the options override this for
    their parameters. `full_shapes` has the full shape of each parameter by name, where parameters
    do not have it (FSDP1's are flat).
    """
    parameters = dict(model.named_parameters())
    shapes = {name: parameter.shape for name, parameter in parameters.items()} | dict(
        full_shapes or {}
    )
    flat = any(len(shapes[name]) != parameter.ndim for name, parameter in parameters.items())
    entry = registry.get("optimizer", options.name)
    needs_matrices = _needs_matrices(options)
    if flat and (needs_matrices or options.state_dtype != "fp32" or options.stochastic_rounding):
        option = (
            f"state_dtype = {options.state_dtype}"
            if options.state_dtype != "fp32"
            else "stochastic_rounding"
        )
        option = f"name = {options.name}" if needs_matrices else option
        reason = "fsdp1 flattens the parameters, and this needs their shapes"
        raise UserError(f"optimizer.{option}: {reason}; use engine = fsdp2")
    groups: dict[tuple[Any, ...], dict[str, Any]] = {}
    for name, numbers in tensor_options(model, options, shapes).items():
        groups.setdefault(tuple(numbers.values()), {"params": [], **numbers})["params"].append(
            parameters[name]
        )
    optimizer: torch.optim.Optimizer = entry.build(
        list(groups.values()), options, entry_options(options, entry)
    )
    if not isinstance(optimizer, torch.optim.Optimizer):
        kind = type(optimizer).__name__
        raise UserError(
            f"{entry.origin}: optimizer {entry.name} returned {kind}, not a torch.optim.Optimizer"
        )
    if not isinstance(optimizer, torch.optim.AdamW) and not hasattr(optimizer, "get_or_init_state"):
        way = (
            "give it get_or_init_state(parameter, group), which returns its tensors for a parameter"
        )
        raise UserError(f"{entry.origin}: optimizer {entry.name}: its state cannot be saved; {way}")
    if options.stochastic_rounding:
        if not hasattr(optimizer, "rounding_keys"):
            raise UserError(
                f"optimizer.stochastic_rounding: not with optimizer.name = {entry.name}; use adamw"
                " or muon"
            )
        trained = {name: each for name, each in parameters.items() if each.requires_grad}
        optimizer.rounding_keys = {
            each: derive_key(0, "rounding", name) for name, each in trained.items()
        }
    # It would always take the step: the host decides (`step_unless`).
    if not entry.facts.get("reads_found_inf"):
        optimizer.ignores_found_inf = True  # type: ignore[attr-defined]
    return optimizer


def build_adamw(
    groups: list[dict[str, Any]], options: OptimizerOptions, own: None = None
) -> torch.optim.Optimizer:
    # So that it does not depend on the name that a plugin gives its optimizer.
    if options.uses_state_dtype:
        own_adamw = registry.import_named("lmforge.core.optim.adamw:AdamW")
        dtype = STATE_DTYPES[options.state_dtype]
        optimizer: torch.optim.Optimizer = own_adamw(
            groups, state_dtype=dtype, **common_numbers(options)
        )
        return optimizer
    return torch.optim.AdamW(groups, fused=True, **common_numbers(options))


def common_numbers(options: OptimizerOptions) -> dict[str, Any]:
    """The arguments that all optimizers of the options take."""
    return {"lr": options.lr, "betas": (options.beta1, options.beta2), "eps": options.eps}


def _needs_matrices(options: OptimizerOptions) -> bool:
    return bool(registry.get("optimizer", options.name).facts.get("needs_matrices"))


def tensor_options(
    model: LanguageModel,
    options: OptimizerOptions,
    full_shapes: Mapping[str, torch.Size] | None = None,
) -> dict[str, dict[str, Any]]:
    """What applies to each trainable parameter, by name: `weight_decay`, `lr_ratio` (of the
    learning rate to the recipe's), and where they are not the same for all `eps`, `orthogonal`
    (Muon's) and `stores_8bit`. For `full_shapes` and errors see `build_optimizer`.
    """
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()} | dict(
        full_shapes or {}
    )
    marks_matrices = _needs_matrices(options)
    result = dict[str, dict[str, Any]]()
    trainable = {
        name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad
    }
    tables = {
        id(parameter)
        for module in (*model.embeddings, model.lm_head)
        for parameter in module.parameters()
    }
    hidden = {
        id(parameter)
        for name, parameter in model.blocks.named_parameters(prefix=model.blocks_name)
        if parameter.ndim >= 2 and not model.config.vector(name)
    }
    # A pipeline rank has only some of the tensors, so a pattern may match none of them. No pattern
    # may be for a frozen tensor.
    frozen = {name for name, _ in model.named_parameters()} - trainable.keys()
    chosen = assign_groups([name for name in shapes if name not in frozen], options.groups)
    for name, parameter in trainable.items():
        numbers: dict[str, Any] = {"weight_decay": options.weight_decay, "lr_ratio": 1.0}
        if len(shapes[name]) < 2 or model.config.vector(name):
            numbers["weight_decay"] = 0.0
        if id(parameter) in tables:
            numbers["lr_ratio"] = options.embedding_lr_ratio
        if name in chosen:
            numbers |= chosen[name].model_dump(exclude={"pattern"}, exclude_none=True)
        scale = model.tensor_scale(name, tuple(shapes[name]))
        orthogonal = marks_matrices and id(parameter) in hidden
        factor = scale.muon_lr if orthogonal else scale.lr
        numbers["lr_ratio"] *= factor
        numbers["weight_decay"] /= factor
        if scale.eps != 1.0:
            numbers["eps"] = scale.eps * options.eps
        if marks_matrices:
            numbers["orthogonal"] = id(parameter) in hidden
        if options.state_dtype == "8bit":
            numbers["stores_8bit"] = id(parameter) in hidden
        result[name] = numbers
    return result


def assign_groups(names: Iterable[str], groups: Iterable[GroupOptions]) -> dict[str, GroupOptions]:
    """The group of each tensor name that matches a pattern; the first, if several do.

    Raises UserError for a group that no tensor matches.
    """
    names = list(names)
    chosen: dict[str, GroupOptions] = {}
    for group in groups:
        matching = [name for name in names if re.search(group.pattern, name)]
        if not matching:
            raise UserError(
                f"optimizer.groups: no tensor has {group.pattern} in its name; nearest:"
                f" {_closest_names(group, names)}"
            )
        left = [name for name in matching if name not in chosen]
        if not left:
            raise UserError(
                f"optimizer.groups: all tensors with {group.pattern} in their name are in an"
                " earlier group; put it before"
            )
        chosen |= dict.fromkeys(left, group)
    return chosen


def _closest_names(group: GroupOptions, names: list[str]) -> str:
    """The three names that are most similar to a group's pattern, in full or in part.

    Names that differ only in digits count once.
    """
    kinds = {re.sub(r"\d+", "", name): name for name in reversed(names)}

    def likeness(name: str) -> float:
        return max(
            difflib.SequenceMatcher(None, group.pattern, part).ratio()
            for part in (name, *name.split("."))
        )

    return ", ".join(sorted(kinds.values(), key=likeness, reverse=True)[:3])


def named_optimizer_state(
    model: nn.Module, optimizer: torch.optim.Optimizer
) -> dict[str, dict[str, Tensor]]:
    """The optimizer's state tensors under the names of their parameters, as a checkpoint keeps
    them.

    State that does not exist yet (before the first step, or before loading) is created as zeros.
    The tensors are the optimizer's own, so loading fills them in place.
    """
    groups = {parameter: group for group in optimizer.param_groups for parameter in group["params"]}
    present = {parameter: bool(optimizer.state.get(parameter)) for parameter in groups}
    named = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and (
            parameter not in groups or present[parameter] < max(present.values())
        ):
            # Zeros created here would be saved as if they had been trained.
            raise RuntimeError(
                f"{name}: the optimizer has state for others but not for this tensor"
            )
        if parameter in groups and (
            state := _get_or_init_state(optimizer, parameter, groups[parameter])
        ):
            named[name] = dict(state)
    return named


def _get_or_init_state(
    optimizer: torch.optim.Optimizer, parameter: Tensor, group: dict[str, Any]
) -> dict[str, Tensor]:
    if hasattr(optimizer, "get_or_init_state"):
        return dict(optimizer.get_or_init_state(parameter, group))
    state = optimizer.state[parameter]
    if not state:
        state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
        state |= {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
    return state
