"""What rungs and the big run cost, in FLOPs, hours and money: by `lmforge plan` for the GPUs of the
options or of this machine; on a CPU that was not measured (`lmforge bench --calibrate`), by its
fastest matrix products.
"""

from dataclasses import dataclass, replace
from functools import cached_property

import torch

from lmforge.core.distributed.rank_info import threads_per_rank
from lmforge.core.errors import UserError, format_duration
from lmforge.core.parallel.cpu_flops import cpu_peak_flops
from lmforge.core.parallel.precision import choose_dtype
from lmforge.lab.ladder.rungs import Trial
from lmforge.lab.options.ladder import Budget
from lmforge.lab.options.plan import MachineOptions
from lmforge.lab.plan.hardware import data_sheets
from lmforge.lab.plan.planning import (
    Machine,
    find_machine,
    make_step_config,
    predict_phases,
    predict_step,
)
from lmforge.lab.plan.prediction.predict import run_cost

# What small models reach of the fastest products of a CPU, with validation and the start of
# processes.
CPU_EFFICIENCY = 0.25


@dataclass(frozen=True)
class Cost:
    """FLOPs, hours of a GPU or of this machine's CPU, and their price, of one run or several."""

    flops: float = 0.0
    hours: float = 0.0
    price: float = 0.0

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(self.flops + other.flops, self.hours + other.hours, self.price + other.price)


class Costs:
    """The costs of runs on one kind of machine."""

    def __init__(self, options: MachineOptions, device: str) -> None:
        """device: train.device. Raises UserError for hardware that is not known."""
        self._options, self._machine = options, None
        self.unit, self.source = (
            "hours",
            f"at {CPU_EFFICIENCY:.0%} of this CPU's fastest matrix products",
        )
        given = {"gpu_type", "gpus", "calibration"} & options.model_fields_set
        if not given and device != "cpu" and torch.cuda.is_available():
            known = data_sheets().find(torch.cuda.get_device_name())
            self._options = (
                options.model_copy(update={"gpu_type": known.name}) if known else options
            )
            given = {"gpu_type"} if known else given
        if given:
            self._machine = find_machine(self._options)
            self.unit, self.source = "GPU-hours", self._options.gpu_type

    @cached_property
    def _cpu_flops(self) -> float:
        dtype, _ = choose_dtype("auto", torch.device("cpu"))
        return CPU_EFFICIENCY * cpu_peak_flops(dtype, threads_per_rank(1))

    def of(self, trial: Trial, ranks: int) -> Cost:
        """The cost of a run on so many ranks. Raises UserError where it does not fit them."""
        if self._machine is None:
            hours = trial.flops / self._cpu_flops / 3600
        else:
            hours = self._planned_hours(trial, ranks, self._machine)
        return Cost(trial.flops, hours, hours * self._options.price)

    def _planned_hours(self, trial: Trial, ranks: int, machine: Machine) -> float:
        per_host = min(machine.gpus_per_host, ranks)
        machine = replace(
            machine, gpus_per_host=per_host, network=machine.network if ranks > per_host else None
        )
        prediction = predict_step(
            make_step_config(trial.config, trial.model, ranks, machine), machine
        )
        phases = predict_phases(trial.config, prediction, machine)
        return run_cost(
            phases, self._options.price, machine.gpu, async_save=trial.config.checkpoint.async_save
        ).gpu_hours

    def amount(self, cost: Cost, budget: Budget, big: Cost) -> float:
        """A cost in what a budget is measured in. Raises UserError where a price is not known."""
        if budget.unit == "price" and not self._options.price:
            raise UserError(f"ladder: {budget.amount:g}$ without a price of hours; add --price")
        amounts = {
            "share": cost.flops / big.flops,
            "FLOPs": cost.flops,
            "GPU-hours": cost.hours,
            "price": cost.price,
        }
        return amounts[budget.unit]

    def flops_for(self, budget: Budget, big: Cost) -> float:
        """The FLOPs that a budget pays, at the big run's speed."""
        return budget.amount * big.flops / self.amount(big, budget, big)

    def describe(self, cost: Cost) -> str:
        words = (
            f"{cost.flops:.3g} FLOPs, some {format_duration(3600 * cost.hours)} of"
            f" {self.unit.removesuffix('-hours')}"
        )
        if self.unit == "hours":
            words = f"{cost.flops:.3g} FLOPs, some {format_duration(3600 * cost.hours)}"
        elif cost.hours >= 1:
            words = f"{cost.flops:.3g} FLOPs, {cost.hours:,.1f} GPU-hours"
        return words + (f", {cost.price:,.2f}$" if cost.price else "")
