"""`train.deterministic`: the same bits from run to run, on the same number of ranks, hardware and versions.

On a CPU they are the same without it, and so are rows, dropout and samples anywhere: functions of seeds and numbers. What is
left is how a GPU adds up, and which of several kernels a library or a compiler picks.
"""

import os
import re
import sys

import torch

from lmforge.errors import Mistake

# What has to be in the environment before CUDA, cuBLAS and NCCL start: the values under which they give the same bits, ours
# first. NVLink's switches add up in the order of arrival (github.com/NVIDIA/nccl, issue 1497), and the compiler would time
# kernels on the spot and take the fastest.
ENVIRONMENT = {
    "CUBLAS_WORKSPACE_CONFIG": (":4096:8", ":16:8"),
    "NCCL_NVLS_ENABLE": ("0",),
    "TORCHINDUCTOR_DETERMINISTIC": ("1",),
}
_REFUSAL = re.compile(r"(\S+) does not have a deterministic implementation")


def be_deterministic(wanted: bool) -> None:
    """From now on, in this process: before CUDA is used and before ranks are joined.

    An operator that has no deterministic form then raises; `refusal` tells which. Raises Mistake where the environment says
    otherwise.
    """
    if wanted:
        for name, values in ENVIRONMENT.items():
            if os.environ.setdefault(name, values[0]) not in values:
                raise Mistake(
                    f"train.deterministic: {name}={os.environ[name]} is set, under which bits differ from run to run; unset it"
                    f" or set it to {values[0]}"
                )
    # torch also fills memory that nobody has written yet: what reads it ends in NaN instead of in other bits each time.
    torch.use_deterministic_algorithms(wanted)
    torch.backends.cudnn.deterministic = wanted
    torch.backends.cudnn.benchmark = False
    if compiler := sys.modules.get("torch._inductor.config"):  # it may have read the environment already
        compiler.deterministic = wanted  # type: ignore[attr-defined]


def refusal(problem: BaseException) -> str | None:
    """What torch could not do deterministically, in one line, if that is the `problem`."""
    found = _REFUSAL.search(str(problem)) if isinstance(problem, RuntimeError) else None
    return found and (
        f"train.deterministic: {found[1]} cannot be computed so that it gives the same bits each time on this device;"
        " use another device, or leave the option out"
    )
