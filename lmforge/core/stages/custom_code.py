"""User code that a run executes: its objective and its callbacks.

A callback is an object whose methods are called at named points of a run, on every rank. It has one
or more of the methods of `CallbackPoints`. Each is called at the same step on all ranks, and must
not communicate between them. An exception in one ends the run on all ranks.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lmforge.core import registry
from lmforge.core.errors import RunFailed, UserError
from lmforge.core.foreign_code import describe_exception
from lmforge.core.losses.objective import Objective
from lmforge.core.model.layers import LanguageModel
from lmforge.core.options.extend import entry_options
from lmforge.core.options.stage import StageConfig
from lmforge.core.stages.objectives import build_objective, check_objective

if TYPE_CHECKING:
    from lmforge.core.stages.attempt import RunContext


class CallbackPoints:
    """The points of a run, in order.

    `run` has the config, the run directory (`run.run.path`), the ranks (`run.dist_ctx`) and the
    console (`run.console.info`); `step` counts the steps that are done.
    """

    def on_run_start(self, run: "RunContext", step: int, model: LanguageModel) -> None:
        """Before the first step of an attempt.

        `model` is this rank's, as it is trained: sharded, its blocks wrapped.
        """

    def on_step_end(self, run: "RunContext", step: int, metrics: dict[str, Any]) -> None:
        """After each step, unless it ends in a rollback.

        At log steps `metrics` has the values of metrics.jsonl, at other steps those of a
        validation, if there was one: the host does not wait for the device.
        """

    def on_validation_end(self, run: "RunContext", step: int, metrics: dict[str, float]) -> None:
        """After a validation, except that of `validation.at_start`, with its metrics, such as
        val/loss.
        """

    def on_checkpoint_saved(self, run: "RunContext", step: int, folder: Path) -> None:
        """Once the checkpoint of `step` is complete on the disk, which can be some steps later."""

    def on_run_end(self, run: "RunContext", step: int | None, state: str) -> None:
        """At the end: `state` is done, interrupted (a signal; the step is saved) or failed.

        For a failed run, `step` is None, and an exception in this method is only logged.
        """


POINTS = tuple(name for name in vars(CallbackPoints) if name.startswith("on_"))


class PluginCallbacks:
    """The callbacks of a run, in the order of `train.callbacks`."""

    def __init__(self, callbacks: dict[str, Any] | None = None) -> None:
        self._callbacks = callbacks or {}

    @classmethod
    def of_run(cls, config: StageConfig, own: Sequence[Any]) -> "PluginCallbacks":
        """Build those that a recipe names; `own` come after them.

        Raises UserError for an object that is not a callback.
        """
        callbacks = {}
        for name in config.train.callbacks:
            entry = registry.get("callback", name)
            callbacks[name] = entry.build(entry_options(config.train, entry))
            _check_methods(callbacks[name], f"{entry.origin}: callback {name}")
        for number, callback in enumerate(own, start=1):
            name = f"{type(callback).__name__} ({number})"
            _check_methods(callback, f"callback {name}")
            callbacks[name] = callback
        return cls(callbacks)

    def has(self, point: str) -> bool:
        return any(hasattr(callback, point) for callback in self._callbacks.values())

    def call(self, point: str, run: "RunContext", step: int, value: Any) -> None:
        """Call the method `point` of each callback that has it.

        Every rank calls it. Raises RunFailed on all ranks where one raises.
        """
        if self.has(point):
            with run.dist_ctx.raise_on_all():
                self._call(point, run, step, value)

    def run_failed(self, run: "RunContext") -> None:
        """Call on_run_end for a failed run.

        Other ranks may be lost, so it does not communicate, and raises nothing.
        """
        try:
            self._call("on_run_end", run, None, "failed")
        except RunFailed as problem:
            run.console.warn(str(problem))

    def _call(self, point: str, run: "RunContext", step: int | None, value: Any) -> None:
        for name, callback in self._callbacks.items():
            method = getattr(callback, point, None)
            if method is None:
                continue
            try:
                method(run, step, value)
            except (Exception, SystemExit) as error:
                raise RunFailed(f"callback {name}: {point} raised {describe_exception(error)}") from error


def _check_methods(callback: Any, what: str) -> None:
    methods = [method for method in dir(callback) if method.startswith("on_")]
    unknown = [method for method in methods if method not in POINTS]
    if unknown or not methods:
        wrong = f"{unknown[0]} is no point of a run" if unknown else f"{type(callback).__name__} has no method that is one"
        raise UserError(f"{what}: {wrong}; there are {', '.join(POINTS)}")


@dataclass(frozen=True)
class CustomCode:
    """Code that a program passes to a stage: an objective instead of the recipe's, and callbacks
    besides the recipe's.
    """

    objective: Objective | None = None
    callbacks: Sequence[Any] = ()

    def build(self, config: StageConfig) -> tuple[Objective, PluginCallbacks]:
        """The objective and the callbacks of a run.

        Raises UserError for something that is neither.
        """
        objective = build_objective(config) if self.objective is None else check_objective(self.objective)
        return objective, PluginCallbacks.of_run(config, self.callbacks)


NO_CUSTOM_CODE = CustomCode()
