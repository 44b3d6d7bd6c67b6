"""The costs of rungs and of the big run, in FLOPs, hours and money.

They are by `lmforge plan` for the GPUs of the options or of this machine; on a CPU that was not
measured (`lmforge bench --calibrate`), by its fastest matrix products.
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

# The fraction of the fastest products of a CPU that small models reach, with validation and the
# start of processes.
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
        self._options = options
        self._machine = None
        self.unit = "hours"
        self.source = f"at {CPU_EFFICIENCY:.0%} of this CPU's fastest matrix products"
        given = {"gpu_type", "gpus", "calibration"} & options.model_fields_set
        if not given and device != "cpu" and torch.cuda.is_available():
            known = data_sheets().find(torch.cuda.get_device_name())
            if known:
                self._options = options.model_copy(update={"gpu_type": known.name})
                given = {"gpu_type"}
        if given:
            self._machine = find_machine(self._options)
            self.unit = "GPU-hours"
            self.source = self._options.gpu_type

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
        network = machine.network if ranks > per_host else None
        machine = replace(machine, gpus_per_host=per_host, network=network)
        step_config = make_step_config(trial.config, trial.model, ranks, machine)
        phases = predict_phases(trial.config, predict_step(step_config, machine), machine)
        async_save = trial.config.checkpoint.async_save
        return run_cost(phases, self._options.price, machine.gpu, async_save=async_save).gpu_hours

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
        hours = f"some {format_duration(3600 * cost.hours)}"
        if self.unit == "GPU-hours":
            hours = f"{cost.hours:,.1f} GPU-hours" if cost.hours >= 1 else f"{hours} of GPU"
        price = f", {cost.price:,.2f}$" if cost.price else ""
        return f"{cost.flops:.3g} FLOPs, {hours}{price}"
