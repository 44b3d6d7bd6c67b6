"""The loss curve of a run, of training and validation, as a picture: drawn while the run goes on, and at its end."""

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from lmforge.atomic_files import atomic_write
from lmforge.errors import UserError
from lmforge.runs import Run

LARGEST_DRAWN = 1e30  # matplotlib computes no ticks beyond this
# The time until the first picture, so that importing matplotlib, which takes a second, does not slow the first steps.
FIRST_AFTER_SECONDS = 60.0
# The maximum fraction of a run's time for drawing: a long run has more records to read and to draw.
MAX_FRACTION = 0.01
CLOSE_SECONDS = 30.0  # a file server that does not answer must not hang the end


class LossCurveThread:
    """Draws the curve of a run from time to time in a thread, and calls `then`, which may draw more. Errors are ignored here,
    and reported at the end of the run.
    """

    def __init__(self, run: Run, then: Callable[[Run], object] = lambda run: None) -> None:
        self._run, self._then, self._next_at = run, then, time.monotonic() + FIRST_AFTER_SECONDS
        self._thread: threading.Thread | None = None

    def draw_if_due(self) -> None:
        """Start to draw, unless the last picture is recent or not finished. Returns at once."""
        if time.monotonic() < self._next_at or (self._thread is not None and self._thread.is_alive()):
            return
        self._thread = threading.Thread(target=self._draw, name="loss curve", daemon=True)
        self._thread.start()

    def _draw(self) -> None:
        began = time.monotonic()
        for draw in (draw_loss_curve, self._then):
            with suppress(Exception):
                draw(self._run)
        ended = time.monotonic()
        self._next_at = ended + max(FIRST_AFTER_SECONDS, (ended - began) / MAX_FRACTION)

    def close(self) -> None:
        """Wait for the picture that is being drawn: it must not replace the last one."""
        if self._thread is not None:
            self._thread.join(timeout=CLOSE_SECONDS)


def draw_loss_curve(run: Run) -> Path:
    """Draw training and validation loss over tokens as `loss.png` in the run. Returns its path.

    Raises UserError where the run has no metrics yet. Records that cannot be drawn are left out.
    """
    records = run.read_metrics()

    def points(name: str) -> list[tuple[float, float]]:
        pairs = [(record.get("tokens"), record.get(name)) for record in records]
        return [(x, y) for x, y in pairs if x is not None and y is not None and max(x, abs(y)) < LARGEST_DRAWN]

    train, validation, bits = points("loss"), points("val/loss"), points("val/bits_per_byte")
    if not train:
        raise UserError(f"{run.metrics_path}: no losses to draw yet")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), dpi=120, layout="constrained")
    axes = figure.subplots()
    axes.plot(*zip(*train, strict=True), color="#2a6f97", linewidth=1.2, label="training")
    if validation:
        in_bits = f" ({bits[-1][1]:.3f} bits per byte)" if bits else ""
        label = f"validation, at last {validation[-1][1]:.3f}{in_bits}"
        axes.plot(*zip(*validation, strict=True), color="#c1121f", marker="o", markersize=4, linewidth=1.2, label=label)
    axes.set_title(run.path.name, loc="left")
    axes.set_xlabel("tokens")
    axes.set_ylabel("loss (nats per token)" if not validation or bits else "loss")
    axes.xaxis.set_major_formatter(lambda value, _: _format_token_count(value))
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", alpha=0.25)
    axes.legend(frameon=False)
    path = run.path / "loss.png"
    with atomic_write(path, sync=False) as file:
        figure.savefig(file, format="png")
    return path


def _format_token_count(tokens: float) -> str:
    for unit, name in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(tokens) >= unit:
            return f"{tokens / unit:g}{name}"
    return f"{tokens:g}"
