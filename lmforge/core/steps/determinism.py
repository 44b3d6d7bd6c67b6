"""`train.deterministic`: the same bits from run to run, on the same number of ranks, hardware and
versions.

On a CPU results are deterministic without it. The order of the data, dropout and samples are
deterministic on any device, as functions of seeds and indices. The option fixes the rest: the order
in which a GPU adds, and the kernels that a library or a compiler picks.
"""

import os
import re
import sys

import torch

from lmforge.core.errors import UserError

# Environment variables that must be set before CUDA, cuBLAS and NCCL start: the values that give
# deterministic results; the first is the one we set. NVLink switches add in the order of arrival
# (github.com/NVIDIA/nccl, issue 1497), and the compiler would time kernels and take the fastest.
REQUIRED_ENVIRONMENT = {
    "CUBLAS_WORKSPACE_CONFIG": (":4096:8", ":16:8"),
    "NCCL_NVLS_ENABLE": ("0",),
    "TORCHINDUCTOR_DETERMINISTIC": ("1",),
}
_NONDETERMINISTIC_PATTERN = re.compile(r"(\S+) does not have a deterministic implementation")


def set_determinism(enabled: bool) -> None:
    """Turn determinism on for this process, before CUDA is used and ranks are joined.

    An operator without a deterministic form then raises (see `explain_nondeterministic_op`). Raises
    UserError where an environment variable has a contradicting value.
    """
    if enabled:
        for name, values in REQUIRED_ENVIRONMENT.items():
            if os.environ.setdefault(name, values[0]) not in values:
                raise UserError(
                    f"train.deterministic: {name}={os.environ[name]} is set, so results can differ from run to run; unset it"
                    f" or set it to {values[0]}"
                )
    # torch also fills uninitialized memory with NaN, so that reading it gives the same bits each
    # time.
    torch.use_deterministic_algorithms(enabled)
    torch.backends.cudnn.deterministic = enabled
    torch.backends.cudnn.benchmark = False
    # The library may have read the environment already.
    if compiler := sys.modules.get("torch._inductor.config"):
        compiler.deterministic = enabled  # type: ignore[attr-defined]


def explain_nondeterministic_op(problem: BaseException) -> str | None:
    """One line naming the operator that has no deterministic form, if this is the cause of
    `problem`.
    """
    match = _NONDETERMINISTIC_PATTERN.search(str(problem)) if isinstance(problem, RuntimeError) else None
    return match and (
        f"train.deterministic: {match[1]} has no deterministic implementation on this device;"
        " use another device, or leave the option out"
    )
