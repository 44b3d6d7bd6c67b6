"""`train.deterministic`: the same bits from run to run, on the same number of ranks, hardware and versions.

On a CPU they are the same without it. So are the order of the data, dropout and samples on any device: they are functions of
seeds and numbers. What remains is the order in which a GPU adds, and which kernels a library or a compiler picks.
"""

import os
import re
import sys

import torch

from lmforge.errors import UserError

# Environment variables that must be set before CUDA, cuBLAS and NCCL start: the values that give the same bits, ours first.
# NVLink's switches add in the order of arrival (github.com/NVIDIA/nccl, issue 1497); the compiler would time kernels and
# take the fastest.
REQUIRED_ENVIRONMENT = {
    "CUBLAS_WORKSPACE_CONFIG": (":4096:8", ":16:8"),
    "NCCL_NVLS_ENABLE": ("0",),
    "TORCHINDUCTOR_DETERMINISTIC": ("1",),
}
_NONDETERMINISTIC_PATTERN = re.compile(r"(\S+) does not have a deterministic implementation")


def set_determinism(enabled: bool) -> None:
    """Set it for this process, before CUDA is used and ranks are joined.

    An operator without a deterministic form then raises (see `explain_nondeterministic_op`). Raises UserError where the
    environment contradicts.
    """
    if enabled:
        for name, values in REQUIRED_ENVIRONMENT.items():
            if os.environ.setdefault(name, values[0]) not in values:
                raise UserError(
                    f"train.deterministic: {name}={os.environ[name]} is set, so results can differ from run to run; unset it"
                    f" or set it to {values[0]}"
                )
    # torch also fills uninitialized memory: reading it gives NaN instead of other bits each time.
    torch.use_deterministic_algorithms(enabled)
    torch.backends.cudnn.deterministic = enabled
    torch.backends.cudnn.benchmark = False
    # It may have read the environment already.
    if compiler := sys.modules.get("torch._inductor.config"):
        compiler.deterministic = enabled  # type: ignore[attr-defined]


def explain_nondeterministic_op(problem: BaseException) -> str | None:
    """One line naming the operator that has no deterministic form, if that is the `problem`."""
    match = _NONDETERMINISTIC_PATTERN.search(str(problem)) if isinstance(problem, RuntimeError) else None
    return match and (
        f"train.deterministic: {match[1]} has no deterministic implementation on this device;"
        " use another device, or leave the option out"
    )
