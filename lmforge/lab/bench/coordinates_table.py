"""`lmforge doctor --coordinates`: the verdict of the coordinate check, as a table or JSON.

coordinates.py checks a recipe over widths, and with completep over depths, beside the standard
parametrization.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

from rich.console import Console
from rich.table import Table

from lmforge.core.files.atomic_files import without_non_finite
from lmforge.core.model.config import ModelConfig
from lmforge.core.options.sections import BASE_OPTIONS
from lmforge.core.options.stage import StageConfig
from lmforge.lab.bench.coordinates import Coordinates, compare, small
from lmforge.ops.terminal.cells import page_console

WIDTHS = (64, 128, 256, 512)
DEPTHS = (2, 4, 8, 16)
# The largest over the smallest size that counts as flat.
FLAT = 1.6
# Modules that have one size at any depth: a block's part of the residual stream has to shrink.
AT_ANY_DEPTH = ("embedding", "residual stream", "logits")


@dataclass(frozen=True)
class Comparison:
    """The check over some sizes of a model, with the smallest as the base.

    standard: the same in the standard parametrization.
    """

    parametrization: str
    over: str
    sizes: tuple[int, ...]
    results: list[Coordinates]
    standard: list[Coordinates]

    @property
    def uneven(self) -> list[str]:
        return [each.module for each in self.results if each.spread > FLAT]

    def as_json(self) -> dict[str, object]:
        pairs = zip(self.results, self.standard, strict=True)
        rows = [
            asdict(each) | {"spread": each.spread, "standard": other.spread}
            for each, other in pairs
        ]
        return {self.over: self.sizes, "parametrization": self.parametrization, "modules": rows}

    def print(self, console: Console, steps: int) -> None:
        title = (
            f"change of a module's output after {steps} steps, at {self.over} {self.sizes[0]} to"
            f" {self.sizes[-1]}"
        )
        table = Table(title=title, title_justify="left")
        table.add_column("module")
        for name in (*map(str, self.sizes), self.parametrization, "spread", "standard", "spread"):
            table.add_column(name, justify="right")
        for each, other in zip(self.results, self.standard, strict=True):
            row = [
                each.module,
                *(f"{change:.3g}" for change in each.changes),
                bars(each.changes),
                f"{each.spread:.2f}",
            ]
            style = "bold red" if each.spread > FLAT else None
            table.add_row(*row, bars(other.changes), f"{other.spread:.2f}", style=style)
        console.print(table)
        verdict = f"flat: every spread is at most {FLAT}"
        style = None
        if self.uneven:
            verdict = f"NOT FLAT, spread above {FLAT}: {', '.join(self.uneven)}"
            style = "bold red"
        console.print(f"{self.parametrization}: {verdict}", style=style, soft_wrap=True)


def check_coordinates(config: StageConfig, model: ModelConfig, steps: int, output: str) -> int:
    """Compare small models like this one over widths under mup, and print the results.

    Where the recipe has completep, models are compared over depths under that too. Returns 1 where
    the results are not flat.
    """
    standard = config.model.model_copy(
        update=dict.fromkeys(BASE_OPTIONS) | {"parametrization": "standard"}
    )

    def comparison(
        over: str, sizes: tuple[int, ...], configs: list[ModelConfig], options: dict[str, object]
    ) -> Comparison:
        scaled = standard.model_copy(update={"base_width": WIDTHS[0], **options})
        results = compare(configs, scaled, config.optimizer, steps)
        plain = compare(configs, standard, config.optimizer, steps)
        if over == "depths":
            results = _at_any_depth(results)
            plain = _at_any_depth(plain)
        return Comparison(scaled.parametrization, over, sizes, results, plain)

    wider = [small(model, each) for each in WIDTHS]
    comparisons = [comparison("widths", WIDTHS, wider, {"parametrization": "mup"})]
    if config.model.parametrization == "completep":
        deeper = [small(model, WIDTHS[0], each) for each in DEPTHS]
        completep = {"parametrization": "completep", "base_depth": DEPTHS[0]}
        comparisons.append(comparison("depths", DEPTHS, deeper, completep))
    if output == "json":
        content = {"flat": FLAT, "comparisons": [each.as_json() for each in comparisons]}
        print(json.dumps(without_non_finite(content), indent=1))
    else:
        console = page_console(120)
        for each in comparisons:
            each.print(console, steps)
        console.print(
            "spread: largest ÷ smallest size or change, whichever is more (of logits, and over"
            " depths: change)"
        )
    return int(any(each.uneven for each in comparisons))


def _at_any_depth(results: list[Coordinates]) -> list[Coordinates]:
    return [replace(each, changes_alone=True) for each in results if each.module in AT_ANY_DEPTH]


def bars(values: Sequence[float]) -> str:
    """A character for each value.

    It is an eighth lower for each factor of the root of 2 below the largest value.
    """
    known = [value for value in values if math.isfinite(value) and value > 0]

    def bar(value: float) -> str:
        if value not in known:
            return "?"
        return "▁▂▃▄▅▆▇█"[max(0, 7 - round(2 * math.log2(max(known) / value)))]

    return "".join(map(bar, values))
