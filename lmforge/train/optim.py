"""The optimizer, its parameter groups, its state under the model's names, and the learning rate of every step."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lmforge.config import OptimizerOptions, ScheduleOptions
from lmforge.model.layers import LanguageModel


def build_optimizer(
    model: LanguageModel, options: OptimizerOptions, shapes: Mapping[str, torch.Size] | None = None
) -> torch.optim.AdamW:
    """Fused AdamW over `model`'s trainable parameters.

    Matrices decay; vectors (norms, biases) do not. Input embeddings and head are a group of their own, whose learning
    rate is `embedding_lr_ratio` times that of the rest. `shapes` has the whole shape of each parameter by name, where
    parameters do not show it (FSDP1's are flat).
    """
    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    vectors = {id(parameter) for name, parameter in named if len((shapes or {}).get(name, parameter.shape)) < 2}
    trainable = [parameter for _, parameter in named]
    tables = {id(parameter) for module in (*model.embeddings, model.lm_head) for parameter in module.parameters()}
    groups: list[dict[str, Any]] = [
        {
            "params": [parameter for parameter in trainable if id(parameter) not in vectors | tables],
            "weight_decay": options.weight_decay,
        },
        {
            "params": [parameter for parameter in trainable if id(parameter) in tables - vectors],
            "weight_decay": options.weight_decay,
            "lr_ratio": options.embedding_lr_ratio,
        },
        {"params": [parameter for parameter in trainable if id(parameter) in vectors], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=options.lr,
        betas=(options.beta1, options.beta2),
        eps=options.eps,
        fused=True,
    )


def state_by_name(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, Tensor]]:
    """The optimizer's state tensors under the names of their parameters, as a checkpoint keeps them.

    State that does not exist yet (before the first step, or before loading) is made, filled with zeros. The tensors are
    the optimizer's own, so that filling them in place is loading.
    """
    named = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        state = optimizer.state[parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
        named[name] = dict(state)
    return named


def learning_rate(step: int, steps: int, options: ScheduleOptions, peak: float) -> float:
    """Learning rate of 0-based `step` in a run of `steps`: linear warm-up, then the schedule's shape down to its final ratio.

    The peak is reached at step `warmup_steps`, and the final learning rate at the last step. warmup-stable-decay stays
    at the peak until `decay_steps` steps are left.
    """
    if step < options.warmup_steps:
        return peak * (step + 1) / (options.warmup_steps + 1)
    if options.name == "constant":
        return peak
    last_at_peak = options.warmup_steps
    if options.name == "warmup-stable-decay":
        last_at_peak = max(last_at_peak, steps - 1 - (options.decay_steps or max(1, steps // 5)))
        if step <= last_at_peak:
            return peak
    progress = min(1.0, (step - last_at_peak) / max(1, steps - 1 - last_at_peak))
    shape = 0.5 * (1 + math.cos(math.pi * progress)) if options.name == "cosine" else 1 - progress
    return peak * (options.final_ratio + (1 - options.final_ratio) * shape)


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get("lr_ratio", 1.0)
