"""What the loop is given by a stage: where its batches come from, and whom it tells what happens."""

from typing import Any, Protocol

from torch import Tensor

from lmforge.core.data.batch import Batch
from lmforge.core.data.mixture import TrainingDataset
from lmforge.core.steps.bad_steps import BadStep


class BatchSource(Protocol):
    """Where batches come from. Every rank has one, and calls each method for the same steps."""

    @property
    def dataset(self) -> TrainingDataset:
        """The order of what is read: a checkpoint names how far it was read, and by which plan."""

    @property
    def global_batch_size(self) -> int:
        """The sequences of a batch of all ranks."""

    @property
    def data_wait_seconds(self) -> float:
        """Seconds that callers of `batches` have waited, in total."""

    def batches(self, batch_index: int) -> list[Batch]:
        """This rank's micro-batches of a global batch, on the device."""

    def validate(self, step: int) -> dict[str, float]:
        """Metrics on validation data, by the names they have in metrics.jsonl; empty where there is
        none.
        """

    def warning(self, step: int, record: dict[str, Any]) -> str | None:
        """One line about what the metrics of a log step say is wrong with the batches; None if
        nothing is.
        """

    def describe(self, batch_index: int) -> tuple[dict[str, Any], str | None]:
        """What a batch was made of: fields for the file of a bad step, and text for the message
        where the file is not enough.
        """

    def state_dict(self) -> dict[str, Tensor]:
        """Tensors that a checkpoint has to keep, the same on all ranks; empty where batches depend
        only on their index.
        """

    def close(self) -> None:
        """Called when training ends."""


def is_due(every_steps: int | None, step: int) -> bool:
    """Whether what is done every so many steps is done at this one."""
    return every_steps is not None and step % every_steps == 0


class LoopCallbacks:
    """What the loop calls on every rank at the same steps, in this order.

    Here nothing happens; what is attached to a run is in core/stages/observers.py. `step` counts
    the steps that are done.
    """

    def on_start(self, step: int) -> None:
        """Before the first step of an attempt."""

    def set_phase(self, phase: str, step: int) -> None:
        """What this rank does from now on."""

    def on_step_begin(self, step: int) -> None:
        """Before the batch of `step` (from 1) is read."""

    def on_weights_updated(self, step: int, seconds: float, has_compiled: bool) -> None:
        """After the optimizer step, which took `seconds` of the host, and for which torch may have
        compiled something.
        """

    def on_bad_step(self, bad_step: BadStep) -> None:
        """A step was not used. Called once the host knows it, one or more steps later."""

    def on_rollback(self, step: int, to: int, reason: str) -> None:
        """The run goes on from step `to`. None of the calls below follow for `step`."""

    def on_log(self, step: int, record: dict[str, Any]) -> None:
        """At a log step, after something has waited for the device.

        What is added to `record` is logged with it.
        """

    def validate(self, step: int, required: bool) -> dict[str, float]:
        """Metrics of a validation, by their names in metrics.jsonl, where one is due or `required`;
        else nothing.
        """
        return {}

    def on_record(self, step: int, record: dict[str, Any]) -> None:
        """What is logged at this step is complete."""

    def on_save(self, step: int, kept: bool) -> None:
        """A checkpoint of this step is about to be saved."""

    def on_step_end(self, step: int, record: dict[str, Any], is_stopping: bool) -> None:
        """After everything else at this step.

        `record` is empty between log steps. A signal may be `stopping` the run.
        """

    def close(self) -> None:
        """Training has ended, also where it has failed."""
