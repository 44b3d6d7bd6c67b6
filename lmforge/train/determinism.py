"""`train.deterministic`: the same bits from run to run, on the same number of ranks, hardware and versions.

On a CPU they are the same without it, and so are rows, dropout and samples anywhere: functions of seeds and numbers. What is
left is how a GPU adds up, and which of several kernels a library or a compiler picks.
"""

import os
import re
import sys

import torch

from lmforge.errors import UserError

# What has to be in the environment before CUDA, cuBLAS and NCCL start: the values under which they give the same bits, ours
# first. NVLink's switches add up in the order of arrival (github.com/NVIDIA/nccl, issue 1497), and the compiler would time
# kernels on the spot and take the fastest.
REQUIRED_ENVIRONMENT = {
    "CUBLAS_WORKSPACE_CONFIG": (":4096:8", ":16:8"),
    "NCCL_NVLS_ENABLE": ("0",),
    "TORCHINDUCTOR_DETERMINISTIC": ("1",),
}
_NONDETERMINISTIC_PATTERN = re.compile(r"(\S+) does not have a deterministic implementation")


def set_determinism(enabled: bool) -> None:
    """From now on, in this process: before CUDA is used and before ranks are joined.

    An operator that has no deterministic form then raises; `refusal` tells which. Raises UserError where the environment says
    otherwise.
    """
    if enabled:
        for name, values in REQUIRED_ENVIRONMENT.items():
            if os.environ.setdefault(name, values[0]) not in values:
                raise UserError(
                    f"train.deterministic: {name}={os.environ[name]} is set, under which bits differ from run to run; unset it"
                    f" or set it to {values[0]}"
                )
    # torch also fills memory that nobody has written yet: what reads it ends in NaN instead of in other bits each time.
    torch.use_deterministic_algorithms(enabled)
    torch.backends.cudnn.deterministic = enabled
    torch.backends.cudnn.benchmark = False
    if compiler := sys.modules.get("torch._inductor.config"):  # it may have read the environment already
        compiler.deterministic = enabled  # type: ignore[attr-defined]


def explain_nondeterministic_op(problem: BaseException) -> str | None:
    """What torch could not do deterministically, in one line, if that is the `problem`."""
    found = _NONDETERMINISTIC_PATTERN.search(str(problem)) if isinstance(problem, RuntimeError) else None
    return found and (
        f"train.deterministic: {found[1]} cannot be computed so that it gives the same bits each time on this device;"
        " use another device, or leave the option out"
    )
