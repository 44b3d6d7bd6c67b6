"""The journal of a run that samples ahead: each rank's part of a set of completions, written before
it is learned from.

With it a batch is a function of the journal: a run that resumes learns from the sets that are
complete here, and samples only others. A set can be read on another number of ranks.
"""

import re
from collections.abc import Iterable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from uuid import uuid4

import torch
import xxhash
from pydantic import BaseModel
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from lmforge.core.data.batch import Batch, Extras
from lmforge.core.errors import UserError
from lmforge.core.files.atomic_files import atomic_write
from lmforge.core.files.checksums import hash_json
from lmforge.core.files.untrusted import parse_json
from lmforge.core.parallel.dims import data_parallel_rank_and_size
from lmforge.core.plugins import describe_plugins
from lmforge.core.stages.context import RunContext
from lmforge.core.stages.inputs import RunInputs
from lmforge.post.environments.process import identify
from lmforge.post.options.align import AlignConfig, is_model_folder

JOURNAL_FOLDER = "rollouts"  # in the run
SEQUENCE_TENSORS = {
    "tokens": torch.int64,
    "labels": torch.int64,
    "positions": torch.int64,
    "document_ids": torch.int32,
}
FILE_PATTERN = re.compile(r"set-(\d{6,12})-rank-(\d{1,7})-of-(\d{1,7})\.safetensors")
FORMAT = 1  # of the tensors in a file: another where a set has others

# Options with which a journal may be read that was written with others: how the run is operated,
# and what other facts cover.
OPERATION = {
    "plugins",
    "run",
    "data",
    "parallel",
    "validation",
    "sample",
    "checkpoint",
    "log",
    "watch",
    "launch",
}
OF_THE_LOOP = {
    "steps",
    "epochs",
    "global_batch_size",
    "global_batch_tokens",
    "micro_batch_size",
    "device",
    "compile",
    "deterministic",
    "threads",
    "callbacks",
}
DO_NOT_CHANGE_COMPLETIONS = {
    "engine",
    "engine_urls",
    "engine_start",
    "engine_timeout_seconds",
    "weights_folder",
    "decode_batch_size",
    "log_completions_every",
    "reward_timeout_seconds",
    "environment_timeout_seconds",
    "environment_processes",
}


class _Header(BaseModel):
    """What a file says of itself.

    Files of one set belong together if they say the same, but the checksum.
    """

    key: str
    attempt: str
    checksum: str


class _Part(NamedTuple):
    rank: int
    ranks: int
    path: Path


class RolloutJournal:
    """The sets of a run that have been sampled, as far as they are still needed.

    Every rank has one.
    """

    def __init__(self, ctx: RunContext, inputs: RunInputs, first_batch: int) -> None:
        """The journal of a run that goes on with a batch. Every rank calls it."""
        config = ctx.config
        assert isinstance(config, AlignConfig)
        dist_ctx = ctx.dist_ctx
        self._folder = ctx.run.path / JOURNAL_FOLDER
        self._ensure_lock = ctx.run.ensure_lock
        self._warn = ctx.console.warn
        self._num_iterations = config.rollout.num_iterations
        self._sequence_length = inputs.batch_plan.sequence_length
        self._rank_and_size = data_parallel_rank_and_size(
            config.parallel, dist_ctx.rank_info.rank, dist_ctx.world_size
        )
        # Sets with another key, of other options or data, do not count.
        self._key = dist_ctx.decide_on_rank0(partial(_key, config, inputs))
        self._attempt = dist_ctx.broadcast(uuid4().hex)
        # The parts of each set that was complete when the run was started, in the order of their
        # ranks.
        self._known: dict[int, list[Path]] = dist_ctx.decide_on_rank0(
            partial(self._find, first_batch // self._num_iterations)
        )

    def __contains__(self, set_index: object) -> bool:
        return set_index in self._known

    def write(self, set_index: int, batch: Batch) -> None:
        """Write this rank's part of a set, on one rank of those that share it.

        Raises OSError and LockLost.
        """
        assert batch.extras is not None
        used = min(int((batch.document_ids >= 0).sum(1).max()) + 1, batch.sequence_length)
        tensors = {
            name: _compact(each, used)
            for name, each in (batch.tensors | batch.extra_tensors).items()
        }
        header = _Header(key=self._key, attempt=self._attempt, checksum=_checksum(tensors))
        rank, size = self._rank_and_size
        path = self._folder / f"set-{set_index:06d}-rank-{rank}-of-{size}.safetensors"
        self._ensure_lock()
        path.parent.mkdir(exist_ok=True)
        with atomic_write(path) as file:
            file.write(save(tensors, {"lmforge": header.model_dump_json()}))

    def read(self, set_index: int, first: int, count: int) -> Batch:
        """A set that is here: of each of its steps, `count` sequences from the `first` on."""
        parts = [_read(path)[1] for path in self._known[set_index]]
        by_step = [
            {name: each.unflatten(0, (self._num_iterations, -1)) for name, each in part.items()}
            for part in parts
        ]
        lengths = {name: max(part[name].shape[2] for part in by_step) for name in by_step[0]}
        whole = {
            name: torch.cat([_widen(part[name], length) for part in by_step], 1)[
                :, first : first + count
            ].flatten(0, 1)
            for name, length in lengths.items()
        }
        full = {name: _widen(each[None], self._sequence_length)[0] for name, each in whole.items()}
        tensors = {name: full.pop(name).to(dtype) for name, dtype in SEQUENCE_TENSORS.items()}
        return Batch(**tensors, extras=Extras(**full))

    def prune(self, first_set: int) -> None:
        """Delete the sets before the first that a checkpoint may need.

        One rank calls it. Raises OSError and LockLost.
        """
        for set_index, part in self._parts():
            if set_index < first_set:
                self._ensure_lock()
                part.path.unlink(missing_ok=True)

    def _parts(self) -> Iterable[tuple[int, _Part]]:
        for path in sorted(self._folder.glob("set-*.safetensors")):
            if match := FILE_PATTERN.fullmatch(path.name):
                set_index, rank, ranks = map(int, match.groups())
                yield set_index, _Part(rank, ranks, path)

    def _find(self, first_set: int) -> dict[int, list[Path]]:
        """The complete sets, on rank 0, before any rank writes."""
        for left in self._folder.glob(".set-*.partial"):  # by a rank that was killed
            self._ensure_lock()
            with suppress(OSError):
                left.unlink()
        by_set: dict[tuple[int, int, str], dict[int, Path]] = {}
        problems: list[str] = []
        for set_index, part in self._parts():
            if set_index < first_set:
                continue
            try:
                header, _ = _read(part.path)
            except (OSError, UserError) as problem:
                problems.append(str(problem))
                continue
            if header.key != self._key:
                problems.append(f"{part.path}: of another run, or of other options or data")
                continue
            by_set.setdefault((set_index, part.ranks, header.attempt), {})[part.rank] = part.path
        if problems:
            others = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
            self._warn(f"{problems[0]}{others}; what is missing is sampled again")
        return {
            set_index: [paths[rank] for rank in range(ranks)]
            for (set_index, ranks, _), paths in by_set.items()
            if set(paths) == set(range(ranks))
        }


def _key(config: AlignConfig, inputs: RunInputs) -> str:
    """What the sets of a run depend on.

    Raises UserError where a file of reward functions cannot be read.
    """
    excluded: Any = {
        **dict.fromkeys(OPERATION, True),
        "rollout": DO_NOT_CHANGE_COMPLETIONS,
        "train": OF_THE_LOOP,
    }
    try:
        rewards = [
            [spec] if is_model_folder(spec) else identify(spec)
            for spec in config.rollout.reward_functions
        ]
    except OSError as problem:
        raise UserError(f"rollout.reward_functions: {problem}") from None
    facts = {
        "format": FORMAT,
        "options": config.model_dump(mode="json", exclude=excluded),
        "code": [rewards, describe_plugins(config.plugins)],
        "run": [config.run.name, inputs.batch_plan.global_batch_size],
        "data": [inputs.packed_dataset.plan_hash_at(0), inputs.batch_plan.sequence_length],
    }
    return hash_json(facts, sort_keys=True)


def _compact(tensor: Tensor, used: int) -> Tensor:
    """A tensor [sequences, length] without what `_widen` repeats: all columns but one where they
    are equal bit for bit, and else those that are padding in all sequences, but one.
    """
    bits = tensor.view(torch.int32) if tensor.dtype == torch.float32 else tensor
    small = tensor.int() if tensor.dtype == torch.int64 else tensor
    return small[:, : 1 if bool((bits == bits[:, :1]).all()) else used].contiguous()


def _widen(tensor: Tensor, length: int) -> Tensor:
    """[steps, sequences, length] by repeating the last column."""
    last = tensor[:, :, -1:]
    return torch.cat(
        [tensor, last.expand(*tensor.shape[:2], length - tensor.shape[2], *tensor.shape[3:])], 2
    )


def _checksum(tensors: dict[str, Tensor]) -> str:
    digest = xxhash.xxh3_128()
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {[*tensor.shape]}".encode())
        digest.update(tensor.numpy().tobytes())
    return digest.hexdigest()


def _read(path: Path) -> tuple[_Header, dict[str, Tensor]]:
    """Raises UserError where a file is damaged."""
    try:
        with safe_open(path, "pt") as file:
            text = (file.metadata() or {}).get("lmforge", "")
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no dict
    except (SafetensorError, ValueError) as problem:
        raise UserError(f"{path}: damaged ({problem})") from None
    header = parse_json(text.encode(), _Header, str(path))
    if _checksum(tensors) != header.checksum:
        raise UserError(f"{path}: damaged (checksum)")
    return header, tensors
