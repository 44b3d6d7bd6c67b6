"""Saving in the background: tensors are copied, training goes on, and a thread writes, commits and
deletes old checkpoints.

The threads of all ranks communicate over a process group of their own, so that their collectives
can never pair with the training's (docs/barriers.md). One save is in flight at a time. What each
rank writes is planned once.
"""

import math
import os
import shutil
import time
from collections import deque
from collections.abc import Callable
from concurrent import futures
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.tensor import DTensor

from lmforge.core.checkpoint.storage import (
    CheckpointWriter,
    HashingFileSystem,
    make_folder,
    translate_storage_errors,
)
from lmforge.core.data.tokenizer import Tokenizer
from lmforge.core.distributed.distributed import DistributedContext, use_device_in_thread
from lmforge.core.distributed.waiting import start_in_thread
from lmforge.core.errors import LockLost, RunFailed, UserError, format_bytes
from lmforge.core.files.atomic_files import (
    DELETED_SUFFIX,
    PARTIAL_SUFFIX,
    atomic_write_text,
    fsync_path,
)
from lmforge.core.records.manifests import CorruptCheckpoint, FileDigests, Manifest, read_manifest
from lmforge.core.records.runs import MANIFEST, STEP_PREFIX, Run, is_local, remove_checkpoint

StateDict = dict[str, dict[str, Any]]
DRAIN_SECONDS = 60.0


@dataclass(frozen=True)
class RetentionPolicy:
    """Which checkpoints are kept: the newest `keep_last`, the `keep_best` by `metric` at their
    step, and all that are marked as kept.
    """

    keep_last: int
    keep_best: int = 0
    metric: str = "val/loss"
    maximize: bool = False

    def steps_to_delete(self, manifests: dict[int, Manifest]) -> list[int]:
        """The steps in `manifests` that are to be deleted."""
        values = {step: manifest.metrics.get(self.metric) for step, manifest in manifests.items()}
        finite = {
            step: value
            for step, value in values.items()
            if value is not None and math.isfinite(value)
        }
        sign = -1 if self.maximize else 1
        best = sorted(finite, key=lambda step: (sign * finite[step], step))  # ties: the older first
        temporary = [step for step in sorted(manifests) if not manifests[step].kept]
        staying = {*temporary[-self.keep_last :], *best[: self.keep_best]}
        return [step for step in temporary if step not in staying]


@dataclass(eq=False)
class AsyncCheckpointer:
    """Writes the checkpoints of a run. Every rank has one, and calls each method at the same step.

    `metadata` has the fields of the manifest that are the same in every checkpoint of this run.
    `log` is called with log lines, on rank 0. `expected_bytes` is the size of the last checkpoint,
    or an estimate before the first.

    blocking_seconds      how long callers have waited, in total
    consecutive_failures  saves that have failed in a row; the last at `failed_at` (time.monotonic)
                          with `last_error`
    """

    run: Run
    dist_ctx: DistributedContext
    retention: RetentionPolicy
    _: KW_ONLY
    metadata: dict[str, Any]
    tokenizer: Tokenizer
    log: Callable[[str], None]
    async_save: bool = True
    expected_bytes: int = 0

    def __post_init__(self) -> None:
        self.blocking_seconds = 0.0
        self.consecutive_failures = 0
        self.failed_at: float | None = None
        self.last_error = ""
        self._saved_steps: deque[int] = deque()
        self._save_ctx = replace(self.dist_ctx, control_group=self.dist_ctx.checkpoint_group)
        self._planners: dict[tuple[str, ...], _SavePlanner] = {}
        self._staging = _HostStaging(self.dist_ctx.device)
        self._in_flight: futures.Future[None] | None = None

    def prepare(self, state: StateDict) -> None:
        """Plan how checkpoints of these tensors are written, and allocate host memory for them, in
        the background.

        With a thousand ranks this takes a minute, which would delay training at the first save.
        """
        self._start_thread(self._prepare, state)

    def _prepare(self, state: StateDict) -> None:
        planner = self._plan_save(state)
        if self.async_save:
            self._staging.allocate(planner.local_tensors())

    def _start_thread(self, function: Callable[..., None], *arguments: Any) -> None:
        def run() -> None:
            use_device_in_thread(self.dist_ctx.device)
            function(*arguments)

        # A process can end without waiting for this thread, since another rank may be lost.
        self._in_flight = start_in_thread(run, "checkpoint")

    def save(self, step: int, state: StateDict, **metadata: Any) -> None:
        """Begin to write the checkpoint of `step`; returns when `state` may change again.

        `state` has tensors by name under "model", and by name and key under "optimizer"; sharded
        ones as DTensors. A save that fails leaves earlier checkpoints untouched, is logged, and
        counted in `consecutive_failures`.
        """
        self.wait()
        began = time.perf_counter()
        planner = self._plan_save(state)
        metadata = {**self.metadata, **metadata, "step": step, "contents": sorted(state)}
        if self.async_save:
            planner.staged = self._staging.start_copy(planner.local_tensors())
            self._start_thread(self._run_save, planner, metadata)
        else:
            self._run_save(planner, metadata)
        self.blocking_seconds += time.perf_counter() - began

    def wait_for_staging(self) -> None:
        """Call before tensors change: the device waits until they are copied; the host does not
        wait.
        """
        self._staging.wait_on_device()

    def wait(self) -> None:
        """Return when no save is in flight."""
        if self._in_flight is None:
            return
        began = time.perf_counter()
        error = self._in_flight.exception()  # a bug, or a lost rank
        self.blocking_seconds += time.perf_counter() - began
        self._in_flight = None
        if error is not None:
            raise error

    def close(self, drain: bool = True) -> None:
        """Wait at most DRAIN_SECONDS for the save in flight, and ignore its result, since other
        ranks may be lost; not at all without `drain`. Page-locked memory is freed, unless that save
        still reads it.
        """
        if (
            self._in_flight is None
            or not futures.wait([self._in_flight], DRAIN_SECONDS * drain).not_done
        ):
            self._staging.close()

    def take_saved_steps(self) -> list[int]:
        """The steps whose checkpoints have been completed since the last call, on this rank."""
        return [self._saved_steps.popleft() for _ in range(len(self._saved_steps))]

    def describe_failures(self) -> str:
        """How many saves have failed in a row, and why the last one did."""
        count = self.consecutive_failures
        return (
            f"{'a save has' if count == 1 else f'{count} saves in a row have'} failed:"
            f" {self.last_error}"
        )

    def _plan_save(self, state: StateDict) -> "_SavePlanner":
        """The planner of this rank's part of `state`.

        Ranks plan together once for each set of tensors.
        """
        names = tuple(sorted(name for part in state.values() for name in part)) + tuple(
            sorted(state)
        )
        planner = self._planners.get(names) or _SavePlanner()
        planner.set_up_planner(state, is_coordinator=self._save_ctx.is_rank0)
        if names not in self._planners:
            plans = self._save_ctx.gather(planner.create_local_plan())
            if plans is not None:
                plans, _ = planner.create_global_plan(plans)
                plans = dcp.FileSystemWriter(self.run.path).prepare_global_plan(plans)
            planner.finish_plan(self._save_ctx.scatter(plans))
            self._planners[names] = planner
        nbytes = sum(tensor.nbytes for tensor in planner.local_tensors().values())
        self.expected_bytes = sum(self._save_ctx.all_gather(nbytes))
        return planner

    def _run_save(self, planner: "_SavePlanner", metadata: dict[str, Any]) -> None:
        final = self.run.checkpoint_path(metadata["step"])
        # An object store cannot rename a folder. There a checkpoint is complete when its manifest
        # exists, which is written last.
        folder = final.with_name(f"{final.name}{PARTIAL_SUFFIX}") if is_local(final) else final
        try:
            self._staging.wait()
            self._write_files(folder, final, planner, metadata)
            self.consecutive_failures = 0
            self.failed_at = None
            self._saved_steps.append(metadata["step"])
        except LockLost:
            raise
        except (RunFailed, UserError) as problem:
            self.consecutive_failures += 1
            self.failed_at = time.monotonic()
            self.last_error = str(problem)
            if self._save_ctx.is_rank0:
                self.log(f"{problem}; saves failed in a row: {self.consecutive_failures}")
                with suppress(Exception):  # the next save deletes it
                    self.run.check_lock()
                    remove_checkpoint(folder)

    def _write_files(
        self, folder: Path, final: Path, planner: "_SavePlanner", metadata: dict[str, Any]
    ) -> None:
        save_ctx = self._save_ctx
        where = f"{self.run.checkpoints_folder}: the checkpoint {final.name}"
        files = HashingFileSystem()
        with save_ctx.raise_on_all(), translate_storage_errors(where, files):
            if save_ctx.is_rank0:
                self.run.check_lock()
                remove_checkpoint(folder)
                self.check_free_space()
                make_folder(folder)
                for name, text in self.tokenizer.files.items():
                    with files.create_stream(folder / name, "wb") as file:
                        file.write(text.encode())
                        if is_local(folder):
                            os.fsync(file.fileno())
        writer = CheckpointWriter(folder, files)
        with save_ctx.raise_on_all(), translate_storage_errors(where, files):
            self.run.check_lock()
            results = writer.write_data(planner.plan, planner).value()
        gathered = save_ctx.gather((results, files.files))
        with save_ctx.raise_on_all(), translate_storage_errors(where, files):
            if gathered is not None:
                writer.finish(planner.metadata, [results for results, _ in gathered])
                digests = {name: each for _, of_rank in gathered for name, each in of_rank.items()}
                self._commit(folder, final, metadata, digests | files.files)
        if save_ctx.is_rank0:
            try:
                delete_old_checkpoints(self.run, self.retention, newest_step=metadata["step"])
            except LockLost:
                pass  # the new checkpoint is complete; all ranks end at the next step
            except Exception as problem:  # the next save deletes again
                self.log(
                    f"{self.run.checkpoints_folder}: old checkpoints could not be deleted:"
                    f" {problem}"
                )

    def check_free_space(self) -> None:
        """Raise RunFailed where the disk has no space for one more checkpoint.

        For an object store the free space is unknown.
        """
        folder = self.run.checkpoints_folder
        if not is_local(folder):
            return
        try:
            make_folder(folder)
        except OSError:
            return  # the save itself will report the error
        needed = self.expected_bytes
        free = shutil.disk_usage(folder).free
        if free < needed:
            needs = f"it takes {format_bytes(needed)}, and {format_bytes(free)} are free"
            old = self.run.checkpoint_steps()[:-1]
            way = f"; delete {self.run.checkpoint_path(old[0])}, the oldest" if old else ""
            raise RunFailed(f"{folder}: no room for a checkpoint: {needs}{way}")

    def describe_missing_room(self, kept_by_steps: int, num_saves: int) -> list[str]:
        """A line where the disk has no space for all checkpoints that will be kept of `num_saves`,
        `kept_by_steps` of them for their step.
        """
        folder = self.run.checkpoints_folder
        existing = len(self.run.checkpoint_steps())
        kept = min(
            self.retention.keep_last + self.retention.keep_best + kept_by_steps,
            existing + num_saves,
        )
        if not is_local(folder) or not folder.is_dir():
            return []
        # One more while it is written; those that are there already take no more space.
        needed = self.expected_bytes * max(1, kept + 1 - existing)
        free = shutil.disk_usage(folder).free
        if needed <= free:
            return []
        takes = (
            f"{kept} checkpoints of {format_bytes(self.expected_bytes)} are kept, and one more"
            " while it is written"
        )
        return [
            (
                f"{folder}: {takes}: {format_bytes(free)} are free; keep fewer (checkpoint.keep_last),"
                " or make room"
            )
        ]

    def _commit(
        self, folder: Path, final: Path, metadata: dict[str, Any], files: dict[str, FileDigests]
    ) -> None:
        text = Manifest(files=dict(sorted(files.items())), **metadata).json_text
        self.run.check_lock()
        if is_local(folder):
            atomic_write_text(folder / MANIFEST, text)
            fsync_path(folder)
            self.run.check_lock()
            # A run that resumed from an older checkpoint saves this step again.
            remove_checkpoint(final)
            os.rename(folder, final)
            fsync_path(final.parent)
        else:
            (folder / MANIFEST).write_text(text, encoding="utf-8")


class _SavePlanner(dcp.DefaultSavePlanner):
    """PyTorch's planner of this rank's part, which writes the copies of tensors, by name, where
    there are copies.
    """

    staged: dict[str, Tensor] | None = None

    def lookup_object(self, index: Any) -> Any:
        return super().lookup_object(index) if self.staged is None else self.staged[index.fqn]

    def local_tensors(self) -> dict[str, Tensor]:
        """The tensors that this rank writes, by name."""
        written = {item.index.fqn: self.state_dict[item.index.fqn] for item in self.plan.items}
        return {
            name: tensor.to_local() if isinstance(tensor, DTensor) else tensor
            for name, tensor in written.items()
        }


class _HostStaging:
    """Copies of tensors in host memory, in the same buffers each time; page-locked where they come
    from a GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if self._on_gpu else None
        self._copy_done: torch.cuda.Event | None = None
        self._copy_sources: dict[str, Tensor] = {}
        self._copies: dict[str, Tensor] = {}

    def allocate(self, tensors: dict[str, Tensor]) -> None:
        """Allocate a copy for each tensor that has none yet."""
        for name, tensor in tensors.items():
            if name not in self._copies:
                self._copies[name] = _host_tensor(tensor, page_locked=self._on_gpu)

    @torch.no_grad()
    def start_copy(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Begin to copy, on a GPU in a stream of its own: until `wait_on_device` the tensors must
        not change.
        """
        self.allocate(tensors)
        if self._stream is None:
            for name, tensor in tensors.items():
                self._copies[name].copy_(tensor)
        else:
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                for name, tensor in tensors.items():
                    self._copies[name].copy_(tensor, non_blocking=True)
                self._copy_done = self._stream.record_event()
            self._copy_sources = tensors  # keeps tensors alive that were created only for this save
        return {name: self._copies[name] for name in tensors}

    def wait_on_device(self) -> None:
        if self._copy_done is not None and self._copy_sources:
            torch.cuda.current_stream().wait_event(self._copy_done)

    def wait(self) -> None:
        """Wait until the copies are complete."""
        if self._copy_done is not None:
            self._copy_done.synchronize()
            self._copy_sources = {}

    def close(self) -> None:
        """Free the copies and unlock their memory.

        A process that trains again would lock memory a second time.
        """
        self.wait()
        for copy in self._copies.values():
            if self._on_gpu and copy.is_pinned():
                torch.cuda.cudart().cudaHostUnregister(copy.data_ptr())
        self._copies = {}


def _host_tensor(like: Tensor, page_locked: bool) -> Tensor:
    tensor = torch.empty(like.shape, dtype=like.dtype)
    if page_locked and tensor.nbytes:
        # torch's own page-locked memory has sizes of powers of two, up to twice as much. Where the
        # system refuses to lock more memory, the copy is slower but correct.
        portable = 1
        torch.cuda.cudart().cudaHostRegister(tensor.data_ptr(), tensor.nbytes, portable)
    return tensor


def delete_old_checkpoints(run: Run, retention: RetentionPolicy, newest_step: int) -> None:
    """Delete checkpoints that the policy does not keep, and leftovers of interrupted saves.

    Corrupt and later ones stay.
    """
    if is_local(run.checkpoints_folder):
        for pattern in (f"*{PARTIAL_SUFFIX}", f".*{DELETED_SUFFIX}"):
            for leftover in run.checkpoints_folder.glob(pattern):
                run.check_lock()
                shutil.rmtree(leftover, ignore_errors=True)
    elif run.checkpoints_folder.is_dir():
        for folder in run.checkpoints_folder.iterdir():
            if folder.name.startswith(STEP_PREFIX) and not (folder / MANIFEST).exists():
                run.check_lock()
                remove_checkpoint(folder)
    manifests = {}
    for step in run.checkpoint_steps():
        with suppress(CorruptCheckpoint):
            if step <= newest_step:
                manifests[step] = read_manifest(run.checkpoint_path(step))
    for step in retention.steps_to_delete(manifests):
        run.check_lock()
        remove_checkpoint(run.checkpoint_path(step))
