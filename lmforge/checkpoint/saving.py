"""Saving beside the training: tensors are copied, training goes on, and a thread writes, seals and clears up.

The thread speaks to those of other ranks over a process group of its own, so that its collectives can never pair with
the training's (docs/barriers.md). One save is in flight at a time. What each rank writes is planned once.
"""

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.tensor import DTensor

from lmforge.checkpoint.blocks import Described, Writing, describe, make_folder
from lmforge.checkpoint.manifest import Manifest
from lmforge.checkpoint.retention import Keep, drop_old
from lmforge.cluster.ranks import Ranks
from lmforge.data.sealing import NO_ROOM, sync_folder
from lmforge.data.tokenizer import Tokenizer
from lmforge.errors import Mistake, RunFailed
from lmforge.runs import MANIFEST, PARTIAL, Run, is_local, remove, sized, write_sealed

State = dict[str, dict[str, Any]]
LEAVING_SECONDS = 60.0


class Saver:
    """Writes the checkpoints of a run. Every rank has one, and calls each method at the same step.

    `about` holds the manifest's fields that are the same in every checkpoint of this run; `say` gets a line for people,
    on the first rank. `expected_bytes` is the size of a checkpoint as far as is known before the first.

    seconds_held   how long callers have been held up, in total
    failures       saves that have failed in a row; `problem` is why the last did, and failed_at when (time.monotonic)
    """

    def __init__(
        self,
        run: Run,
        ranks: Ranks,
        keep: Keep,
        *,
        about: dict[str, Any],
        tokenizer: Tokenizer,
        say: Callable[[str], None],
        asynchronous: bool = True,
        expected_bytes: int = 0,
    ) -> None:
        self.seconds_held = 0.0
        self.failures = 0
        self.failed_at: float | None = None
        self.problem = ""
        self._run, self._keep, self._about, self._tokenizer, self._say = run, keep, about, tokenizer, say
        self._ranks, self._aside = ranks, replace(ranks, control=ranks.saving)
        self._asynchronous = asynchronous
        self._bytes = expected_bytes
        self._plans: dict[tuple[str, ...], _Plan] = {}
        self._staging = _Staging(ranks.device)
        self._thread: threading.Thread | None = None
        self._defect: BaseException | None = None

    def save(self, step: int, state: State, **about: Any) -> None:
        """Begin to write the checkpoint of `step`; returns when `state` may change again.

        `state` has tensors by name under "model", and under "optimizer" by name and kind; sharded ones as DTensors. A save
        that fails leaves the checkpoints before it untouched, is told, and counted in `failures`.
        """
        self.wait()
        began = time.perf_counter()
        plan = self._plan(state)
        tensors = self._staging.copies(plan.tensors()) if self._asynchronous else None
        about = {**self._about, **about, "step": step, "holds": sorted(state)}
        if self._asynchronous:
            # A daemon: a process that must end does not wait for a peer that is gone.
            self._thread = threading.Thread(
                target=self._carry_out, args=(step, plan, tensors, about), name="checkpoint", daemon=True
            )
            self._thread.start()
        else:
            self._carry_out(step, plan, tensors, about)
        self.seconds_held += time.perf_counter() - began
        self._raise_defect()

    def before_update(self) -> None:
        """Called before tensors change: the device waits until they are copied, the host does not."""
        self._staging.before_update()

    def wait(self) -> None:
        """Return when no save is in flight."""
        if self._thread is None:
            return
        began = time.perf_counter()
        self._thread.join()
        self.seconds_held += time.perf_counter() - began
        self._thread = None
        self._raise_defect()

    def leave(self) -> None:
        """Let the save in flight end, where its ranks are still there; whatever comes of it."""
        if self._thread is not None:
            self._thread.join(LEAVING_SECONDS)

    def _raise_defect(self) -> None:
        if self._defect is not None:
            defect, self._defect = self._defect, None
            raise defect

    def _plan(self, state: State) -> "_Plan":
        """Who writes what, agreed once for each set of tensors, and what of `state` this rank writes."""
        names = tuple(sorted(name for kind in state.values() for name in kind)) + tuple(sorted(state))
        if names not in self._plans:
            planner = _Planner()
            planner.set_up_planner(state, is_coordinator=self._aside.first)
            plans = self._aside.collect(planner.create_local_plan())
            metadata, dealt = None, None
            if plans is not None:
                dealt, metadata = planner.create_global_plan(plans)
                dealt = dcp.FileSystemWriter(self._run.path).prepare_global_plan(dealt)
            mine = planner.finish_plan(self._aside.deal(dealt))
            self._plans[names] = _Plan(planner, mine, metadata)
        plan = self._plans[names]
        plan.planner.set_up_planner(state, is_coordinator=self._aside.first)
        self._bytes = sum(self._aside.gather(plan.bytes))
        return plan

    def _carry_out(self, step: int, plan: "_Plan", tensors: dict[str, Tensor] | None, about: dict[str, Any]) -> None:
        final = self._run.checkpoint(step)
        # An object store has no rename that takes a folder: there the manifest, written last, makes the checkpoint.
        folder = final.with_name(f"{final.name}{PARTIAL}") if is_local(final) else final
        try:
            if tensors is not None:
                self._staging.finish()
            plan.planner.staged = tensors
            self._write(step, folder, final, plan, about)
            self.failures, self.failed_at = 0, None
        except (RunFailed, Mistake) as problem:
            self.failures += 1
            self.failed_at = time.monotonic()
            self.problem = str(problem)
            if self._aside.first:
                self._say(f"{problem}; saves failed in a row: {self.failures}")
                _clear(folder)
        except BaseException as problem:  # a defect, or a peer that is gone: for the training thread to raise
            self._defect = problem
        finally:
            plan.planner.staged = None

    def _write(self, step: int, folder: Path, final: Path, plan: "_Plan", about: dict[str, Any]) -> None:
        aside, where = self._aside, f"{self._run.checkpoints}: the checkpoint {final.name}"
        files = Writing()
        with aside.agreeing(), _telling(where, files):
            if aside.first:
                remove(folder)
                self.check_room()
                make_folder(folder)
                for name, text in self._tokenizer.texts.items():
                    (folder / name).write_text(text, encoding="utf-8")
        writer = _Writer(folder, files)
        with aside.agreeing(), _telling(where, files):
            results = writer.write_data(plan.mine, plan.planner).value()
        gathered = aside.collect((results, files.files))
        with aside.agreeing(), _telling(where, files):
            if gathered is not None:
                assert plan.metadata is not None
                writer.finish(plan.metadata, [results for results, _ in gathered])
                described = {name: described for _, share in gathered for name, described in share.items()}
                self._seal(folder, final, about, described | files.files)
        if aside.first:
            try:
                drop_old(self._run, self._keep, newest=step)
            except Exception as problem:  # the new one is there all the same; the next save tries again
                self._say(f"{self._run.checkpoints}: old checkpoints could not be deleted: {problem}")

    def check_room(self) -> None:
        """Raise RunFailed where one more checkpoint has no room on the disk, or the store cannot be written to."""
        folder = self._run.checkpoints
        if not is_local(folder):
            with _telling(f"{folder}: checkpoints", Writing()):
                make_folder(folder)
                (folder / ".probe").write_text("", encoding="utf-8")
                (folder / ".probe").unlink()
            return
        try:
            make_folder(folder)
        except OSError:
            return  # what saves there will say why it cannot be
        there = os.statvfs(folder)
        free = there.f_bavail * there.f_frsize
        if free < self._bytes:
            raise RunFailed(f"{folder}: no room for a checkpoint: it takes {sized(self._bytes)}, and {sized(free)} are free")

    def _seal(self, folder: Path, final: Path, about: dict[str, Any], files: dict[str, Described]) -> None:
        for name in self._tokenizer.texts:
            files[name] = describe(folder / name, sync=True)
        text = Manifest(files=dict(sorted(files.items())), **about).text
        if is_local(folder):
            write_sealed(folder / MANIFEST, text)
            sync_folder(folder)
            remove(final)  # this step was saved before and is saved again, after a resume from an older one
            os.rename(folder, final)
            sync_folder(final.parent)
        else:
            (folder / MANIFEST).write_text(text, encoding="utf-8")


class _Planner(dcp.DefaultSavePlanner):
    """PyTorch's, but what is written may be copies, by name, of what was planned."""

    staged: dict[str, Tensor] | None = None

    def lookup_object(self, index: Any) -> Any:
        return super().lookup_object(index) if self.staged is None else self.staged[index.fqn]


class _Plan:
    """What this rank writes, and on the first rank the metadata of the whole."""

    def __init__(self, planner: _Planner, mine: SavePlan, metadata: Metadata | None) -> None:
        self.planner, self.mine, self.metadata = planner, mine, metadata
        self.bytes = sum(tensor.nbytes for tensor in self.tensors().values())

    def tensors(self) -> dict[str, Tensor]:
        """This rank's parts of what it writes, by name."""
        everything = self.planner.state_dict
        chosen = {item.index.fqn: everything[item.index.fqn] for item in self.mine.items}
        return {name: tensor.to_local() if isinstance(tensor, DTensor) else tensor for name, tensor in chosen.items()}


class _Staging:
    """Copies of tensors in host memory, in the same place each time; page-locked where they come from a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if self._on_gpu else None
        self._copied: torch.cuda.Event | None = None
        self._held: dict[str, Tensor] = {}
        self._copies: dict[str, Tensor] = {}

    @torch.no_grad()
    def copies(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Begin to copy, on a GPU beside what it computes: until `before_update` the tensors must stay as they are."""
        for name, tensor in tensors.items():
            if name not in self._copies:
                self._copies[name] = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=self._on_gpu)
        if self._stream is None:
            for name, tensor in tensors.items():
                self._copies[name].copy_(tensor)
        else:
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                for name, tensor in tensors.items():
                    self._copies[name].copy_(tensor, non_blocking=True)
                self._copied = self._stream.record_event()
            self._held = tensors  # some were made for this save only
        return {name: self._copies[name] for name in tensors}

    def before_update(self) -> None:
        if self._copied is not None and self._held:
            torch.cuda.current_stream().wait_event(self._copied)

    def finish(self) -> None:
        """Wait until the copies are whole."""
        if self._copied is not None:
            self._copied.synchronize()
            self._held = {}


class _Writer(dcp.FileSystemWriter):
    """PyTorch's, for tensors that are in host memory already, through our file system."""

    def __init__(self, folder: Path, files: Writing) -> None:
        super().__init__(folder.name, sync_files=is_local(folder), per_thread_copy_ahead=0)
        self.fs, self.path = files, folder  # type: ignore[assignment]

    @property
    def checkpoint_id(self) -> str:
        return str(self.path)


@contextmanager
def _telling(where: str, files: Writing) -> Iterator[None]:
    """Whatever goes wrong with the storage as one line. PyTorch's checksums are left out: blocks have better ones."""
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        yield
    except (RunFailed, Mistake):
        raise
    except Exception as raised:
        problem = files.problem or raised
        if isinstance(problem, OSError) and problem.errno in NO_ROOM:
            what = "the disk is full"
        else:
            what = (getattr(problem, "strerror", None) or f"{type(problem).__name__}: {problem}").strip().splitlines()[-1]
        raise RunFailed(f"{where} could not be written: {what}") from raised
    finally:
        torch.serialization.set_crc32_options(before)


def _clear(folder: Path) -> None:
    with suppress(Exception):  # the next save will
        remove(folder)
