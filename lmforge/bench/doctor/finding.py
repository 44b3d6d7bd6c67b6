"""A line of `lmforge doctor`: what was examined, the result, and what to do about it."""

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
