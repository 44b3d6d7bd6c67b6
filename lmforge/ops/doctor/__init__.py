"""The checks of `lmforge doctor`: this machine, then all ranks of a launcher.

Begin with `machine_checks.py` (this machine alone), then `examine_ranks.py` (phase after phase,
with `rank_checks.py` and `storage_checks.py`). A check returns lines, `Finding`.

For others: `Finding`, `examine_machine` and `Examination`. Not here: what is printed, and jobs that
examine other hosts (ops/verbs/doctor.py); whether strategies compute the same
(lab/bench/parity_table.py).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Status = Literal["pass", "warn", "fail"]


@dataclass(frozen=True)
class Finding:
    """What was examined, the result, and what to do about it. Only `fail` prevents training.

    where: the hosts or ranks that it is about; empty where that is all of them.
    values: what was measured, for JSON.
    """

    name: str
    status: Status
    description: str
    todo: str = ""
    where: tuple[str, ...] = ()
    values: Mapping[str, Any] = field(default_factory=dict)
