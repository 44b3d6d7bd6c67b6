"""The optimizer, its parameter groups, its state under the model's names, and the learning rate of every step."""

import difflib
import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lmforge.config.sections import GroupOptions, OptimizerOptions, ScheduleOptions
from lmforge.errors import UserError
from lmforge.model.layers import LanguageModel
from lmforge.train.adamw import AdamW
from lmforge.train.muon import Muon


def build_optimizer(
    model: LanguageModel, options: OptimizerOptions, full_shapes: Mapping[str, torch.Size] | None = None
) -> torch.optim.Optimizer:
    """The optimizer of `model`'s trainable parameters. Raises UserError for a group that has none.

    Matrices decay; vectors (norms, biases) do not. The learning rate of input embeddings and head is `embedding_lr_ratio`
    times that of the rest. Where a group of the options says otherwise for a parameter, that counts. `full_shapes` has the
    full shape of each parameter by name, where parameters do not show it (FSDP1's are flat).
    """
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()} | dict(full_shapes or {})
    flat = any(len(shapes[name]) != parameter.ndim for name, parameter in model.named_parameters())
    if flat and (options.name == "muon" or options.state_dtype != "fp32"):
        option = "name = muon" if options.name == "muon" else f"state_dtype = {options.state_dtype}"
        reason = "fsdp1 keeps parameters flat, and what they were is lost on it"
        raise UserError(f"optimizer.{option}: {reason}; use engine = fsdp2")
    groups = _parameter_groups(model, options, shapes)
    if options.name == "sgd":
        momentum = 0.9 if options.momentum is None else options.momentum
        # torch's fused SGD takes no DTensors.
        return torch.optim.SGD(groups, lr=options.lr, momentum=momentum, foreach=True)
    common: dict[str, Any] = {"lr": options.lr, "betas": (options.beta1, options.beta2), "eps": options.eps}
    state_dtype = torch.bfloat16 if options.state_dtype == "bf16" else torch.float32
    if options.name == "muon":
        momentum = 0.95 if options.momentum is None else options.momentum
        return Muon(groups, momentum=momentum, state_dtype=state_dtype, **common)
    if state_dtype != torch.float32:
        return AdamW(groups, state_dtype=state_dtype, **common)
    fused = options.implementation == "fused"
    return torch.optim.AdamW(groups, fused=fused, foreach=not fused, **common)


def _parameter_groups(
    model: LanguageModel, options: OptimizerOptions, shapes: Mapping[str, torch.Size]
) -> list[dict[str, Any]]:
    """Trainable parameters, those together to which the same numbers apply."""
    trainable = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    tables = {id(parameter) for module in (*model.embeddings, model.lm_head) for parameter in module.parameters()}
    hidden = {id(parameter) for parameter in model.blocks.parameters() if parameter.ndim == 2}
    # A pipeline's rank has some of the tensors only; a pattern may be for others. None is for a tensor that is frozen.
    frozen = {name for name, _ in model.named_parameters()} - trainable.keys()
    chosen = assign_groups([name for name in shapes if name not in frozen], options.groups)
    groups: dict[tuple[Any, ...], dict[str, Any]] = {}
    for name, parameter in trainable.items():
        numbers: dict[str, Any] = {
            "weight_decay": 0.0 if len(shapes[name]) < 2 else options.weight_decay,
            "lr_ratio": options.embedding_lr_ratio if id(parameter) in tables else 1.0,
        }
        if name in chosen:
            numbers |= chosen[name].model_dump(exclude={"pattern"}, exclude_none=True)
        if options.name == "muon":
            numbers["orthogonal"] = id(parameter) in hidden
        groups.setdefault(tuple(numbers.values()), {"params": [], **numbers})["params"].append(parameter)
    return list(groups.values())


def assign_groups(names: Iterable[str], groups: Iterable[GroupOptions]) -> dict[str, GroupOptions]:
    """The group of each tensor name in which a pattern is found: the first, where there are several.

    Raises UserError for a group that gets none.
    """
    names = list(names)
    chosen: dict[str, GroupOptions] = {}
    for group in groups:
        matching = [name for name in names if re.search(group.pattern, name)]
        if not matching:
            raise UserError(
                f"optimizer.groups: no tensor has {group.pattern} in its name; nearest: {_closest_names(group, names)}"
            )
        left = [name for name in matching if name not in chosen]
        if not left:
            raise UserError(f"optimizer.groups: all that has {group.pattern} in its name is in an earlier group; put it before")
        chosen |= dict.fromkeys(left, group)
    return chosen


def _closest_names(group: GroupOptions, names: list[str]) -> str:
    """The three names most like a group's pattern, as a whole or in a part. Names that differ only in digits count once."""
    kinds = {re.sub(r"\d+", "", name): name for name in reversed(names)}

    def likeness(name: str) -> float:
        return max(difflib.SequenceMatcher(None, group.pattern, part).ratio() for part in (name, *name.split(".")))

    return ", ".join(sorted(kinds.values(), key=likeness, reverse=True)[:3])


def named_optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, Tensor]]:
    """The optimizer's state tensors under the names of their parameters, as a checkpoint keeps them.

    State that does not exist yet (before the first step, or before loading) is made, filled with zeros. The tensors are
    the optimizer's own, so that filling them in place is loading.
    """
    groups = {parameter: group for group in optimizer.param_groups for parameter in group["params"]}
    present = {parameter: bool(optimizer.state.get(parameter)) for parameter in groups}
    named = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and (parameter not in groups or present[parameter] < max(present.values())):
            # Made up here, it would be saved as if it had been trained.
            raise RuntimeError(f"{name}: the optimizer has state for others but not for this tensor")
        if parameter in groups and (state := _get_or_init_state(optimizer, parameter, groups[parameter])):
            named[name] = dict(state)
    return named


def _get_or_init_state(optimizer: torch.optim.Optimizer, parameter: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
    if isinstance(optimizer, AdamW):
        return optimizer.get_or_init_state(parameter, group)
    state = optimizer.state[parameter]
    if not state and isinstance(optimizer, torch.optim.AdamW):
        # torch's fused step counts on the device, the other one on the host.
        state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device if group["fused"] else None)
        state |= {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
    elif not state and group["momentum"]:
        state["momentum_buffer"] = torch.zeros_like(parameter)
    return state


def learning_rate(step: int, steps: int, options: ScheduleOptions, peak_lr: float) -> float:
    """Learning rate of 0-based `step` in a run of `steps`: linear warm-up, then the schedule's shape down to its final ratio.

    The peak is reached after the warm-up, and the final learning rate at the last step. warmup-stable-decay stays
    at the peak until `decay_steps` steps are left.
    """
    warmup = options.warmup(steps)
    if step < warmup:
        return peak_lr * (step + 1) / (warmup + 1)
    if options.name == "constant":
        return peak_lr
    last_at_peak = warmup
    if options.name == "warmup-stable-decay":
        last_at_peak = max(last_at_peak, steps - 1 - (options.decay_steps or max(1, steps // 5)))
        if step <= last_at_peak:
            return peak_lr
    progress = min(1.0, (step - last_at_peak) / max(1, steps - 1 - last_at_peak))
    shape = 0.5 * (1 + math.cos(math.pi * progress)) if options.name == "cosine" else 1 - progress
    return peak_lr * (options.min_lr_ratio + (1 - options.min_lr_ratio) * shape)


def step_unless(optimizer: torch.optim.Optimizer, skip: Tensor) -> None:
    """One step, or where `skip` (bool, on the device, the same on all ranks) is true none at all: state stays as it is.

    torch's fused AdamW reads `skip` on the device. For the others the host waits for its value.
    """
    if isinstance(optimizer, torch.optim.AdamW) and optimizer.defaults["fused"]:
        # With cpu_offload the step reads it on the host, so the host waits for it.
        optimizer.found_inf = skip.to(optimizer.param_groups[0]["params"][0].device).float()  # type: ignore[attr-defined]
        optimizer.step()
        del optimizer.found_inf  # type: ignore[attr-defined]
    elif not bool(skip):
        optimizer.step()


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get("lr_ratio", 1.0)
