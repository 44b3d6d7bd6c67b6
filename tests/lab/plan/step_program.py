"""The program that a prediction simulates, and the bytes that its forward pass saves, for
comparison with measurements.
"""

from lmforge.lab.plan.hardware import data_sheets
from lmforge.lab.plan.prediction.program import StepProgram
from lmforge.lab.plan.prediction.rates import Rates
from lmforge.lab.plan.prediction.step_config import StepConfig
from lmforge.lab.plan.prediction.units import Stage


def step_program(step_config: StepConfig) -> StepProgram:
    """Of the whole model; its bytes depend on no speed."""
    rates = Rates.of_data_sheets(
        data_sheets().gpu("cpu"), data_sheets().network("ethernet-100"), 8, "fp32"
    )
    return StepProgram(step_config, rates, Stage(step_config.model.num_hidden_layers))


def predicted_activation_bytes(step_config: StepConfig) -> float:
    """Bytes of one micro-batch's activations between its forward and its backward pass, with the
    gradients of the loss.
    """
    forward = [
        each for each in step_program(step_config).build(1) if each.name.startswith("forward")
    ]
    return sum(
        each.allocate.get(kind, 0) - each.free.get(kind, 0)
        for each in forward
        for kind in ("activations", "loss")
    )
