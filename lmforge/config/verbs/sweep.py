"""`--sweep`: every combination of values of several options."""

import itertools
import math

from lmforge.config.options import Options, iter_options
from lmforge.errors import UserError, did_you_mean
from lmforge.untrusted import cut

MAX_COMBINATIONS = 1000


def sweep_combinations(
    sweep: tuple[str, ...], options_class: type[Options], others: tuple[str, ...] = ()
) -> list[dict[str, str]]:
    """Every combination of `section.option=value,value…`, in which names of `others` count as options too.

    Raises UserError where one has another form, or is no option.
    """
    known = {".".join(path) for path, _ in iter_options(options_class)} - {"bench.sweep", "bench.output", "bench.trace"}
    known.update(others)
    axes = list[list[tuple[str, str]]]()
    for axis in sweep:
        name, equals, values = axis.partition("=")
        if not equals or not all(values.split(",")):
            forms = " or ".join(["section.option=value,value…", *(f"{other}=value,value…" for other in others)])
            raise UserError(f"--sweep {cut(axis)}: expected {forms}")
        if name.replace("-", "_") not in known:
            raise UserError(f"--sweep {cut(name)}: no such option{did_you_mean(name, known)}")
        if any(name.replace("-", "_") == other[0][0].replace("-", "_") for other in axes):
            raise UserError(f"--sweep {cut(name)}: given twice; write all of its values after one {cut(name)}=")
        axes.append([(name, value) for value in values.split(",")])
    if (count := math.prod(map(len, axes))) > MAX_COMBINATIONS:
        raise UserError(f"--sweep: {count:,} combinations, each of which takes seconds at least; at most {MAX_COMBINATIONS:,}")
    return [dict(combination) for combination in itertools.product(*axes)]
