"""Bytes of weights and optimizer states, from the options and the numbers of parameters.

Without torch.
"""

from dataclasses import dataclass

from lmforge.core import registry
from lmforge.core.model.config import ModelConfig
from lmforge.core.model.flops import parameter_count
from lmforge.core.options.sections import OptimizerOptions

DTYPE_BYTES = {"fp32": 4, "bf16": 2}
STATE_8BIT_BYTES = 1 + 4 / 256  # of a number in 8 bits, with its part of a scale; rows of no full blocks have more scales


@dataclass(frozen=True)
class ParameterCounts:
    """Numbers of parameters: all, adapters included; those that are trained; and of these the
    matrices of the blocks.

    The last are the two-dimensional ones, which Muon treats differently. quantized,
    quantized_bytes: those stored in 4 or 8 bits (lora.base_dtype), which are among all, and the
    bytes they take.
    """

    total: int
    trained: int
    trained_block_matrices: int
    quantized: int = 0
    quantized_bytes: int = 0

    def weight_bytes(self, dtype: str) -> int:
        """Bytes of all weights; those that are not quantized are in `dtype`."""
        return (self.total - self.quantized) * DTYPE_BYTES[dtype] + self.quantized_bytes


def count_all(model: ModelConfig) -> ParameterCounts:
    """The counts of a model whose weights are all trained."""
    count = parameter_count(model)
    return ParameterCounts(count.total, count.total, count.block_matrices)


def optimizer_state_bytes(optimizer: OptimizerOptions, master_dtype: str, counts: ParameterCounts) -> int:
    """Bytes of the optimizer's states, over all ranks that share them; without its step counters, 4
    bytes a tensor.

    AdamW has two moments; Muon has a momentum of each matrix of the blocks, and AdamW's moments of
    the other parameters. `OptimizerOptions.uses_state_dtype` says which dtype they have.
    """
    entry = registry.find("optimizer", optimizer.name)
    facts = entry.facts if entry else {}
    per_parameter = facts.get("states_per_parameter", 2)
    per_matrix = facts.get("states_per_matrix", per_parameter)
    of_matrices = per_matrix * counts.trained_block_matrices
    states = of_matrices + per_parameter * (counts.trained - counts.trained_block_matrices)
    if optimizer.state_dtype == "8bit":
        return (states - of_matrices) * DTYPE_BYTES["fp32"] + round(of_matrices * STATE_8BIT_BYTES)
    return states * DTYPE_BYTES[optimizer.state_dtype if optimizer.uses_state_dtype else master_dtype]


def checkpoint_bytes(optimizer: OptimizerOptions, master_dtype: str, counts: ParameterCounts) -> int:
    """Bytes of a checkpoint, which holds what training keeps between steps: master weights and
    optimizer states.
    """
    return counts.weight_bytes(master_dtype) + optimizer_state_bytes(optimizer, master_dtype, counts)
