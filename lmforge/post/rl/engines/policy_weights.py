"""The policy's weights as folders that servers load: one for each version, in a folder of the run's
own. Which server loads which is in post/rl/servers.py.
"""

import os
import platform
import shutil
from collections.abc import Collection
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lmforge.core.errors import UserError
from lmforge.core.files.atomic_files import atomic_write_json
from lmforge.core.files.own_folders import (
    TOKEN_NAME,
    is_trusted_folder,
    make_own_folder,
    remove_own_folder,
)
from lmforge.core.files.untrusted import read_json
from lmforge.core.model.config import ModelConfig
from lmforge.core.model.init_weights import LORA_SUFFIXES, named_tensors
from lmforge.core.model.lora import lora_delta
from lmforge.core.model.lora_config import adapted_name
from lmforge.core.parallel.parallel_model import ParallelModel, full_tensor
from lmforge.core.records.runs import Run, storage_errors
from lmforge.post.options.align import RolloutOptions, split_server
from lmforge.post.rl.engines.started_servers import RESTART_FOLDER
from lmforge.serve.decoding.weights_folder import write_weights

LORA_A = LORA_SUFFIXES[0]
# Where a folder is in memory.
MEMORY_FOLDER = Path("/dev/shm")
# In the run's folder: the host, path and token of folders of weights that may be left, the newest
# last.
FOLDERS_NAME = ".weights-folders.json"
MAX_FOLDERS = 64  # in that file: hosts whose names change leave entries that nobody removes


class PolicyWeights:
    """Writes the policy's weights for servers, with adapters merged. Every rank has one."""

    def __init__(
        self, parallel_model: ParallelModel, config: ModelConfig, options: RolloutOptions, run: Run
    ) -> None:
        """Every rank calls it. Raises UserError where weights cannot be written."""
        self._parallel_model = parallel_model
        self._dist_ctx = parallel_model.dist_ctx
        self._config = config
        self._ensure_lock = run.ensure_lock
        self._folder, self._token = self._dist_ctx.decide_on_rank0(
            partial(_make_weights_folder, options, run)
        )

    def write(self, name: str) -> Path:
        """Write the weights as they are under a name. Returns their folder. Every rank calls it.
        Servers may still load those of other names.

        One tensor at a time: rank 0 says which one is next, and the ranks that hold parts of it
        gather it.
        """
        folder = self._folder / name
        model = self._parallel_model.model
        is_rank0 = self._dist_ctx.is_rank0
        tensors = dict(named_tensors(model))
        layers = [name.removesuffix(LORA_A) for name in tensors if name.endswith(LORA_A)]
        layer_of = {adapted_name(layer): layer for layer in layers}
        # Of the tensors of each stage of a pipeline: the shape, and the rank from which rank 0 gets
        # them.
        own = _full_shapes(tensors) if is_rank0 or self._parallel_model.pipeline_rank else {}
        shapes = dict[str, Tensor]()
        senders = dict[str, int]()
        for rank, stage in enumerate(self._dist_ctx.gather(own) or []):
            senders = dict.fromkeys(stage, rank) | senders
            shapes |= stage

        def gather(name: str) -> Tensor:
            value = full_tensor(tensors[name].detach())
            if (layer := layer_of.get(name)) is None:
                return value
            a, b = (full_tensor(tensors[layer + suffix].detach()) for suffix in LORA_SUFFIXES)
            module: Any = model.get_submodule(layer)
            return value + lora_delta(module.scaling, a, b, getattr(module, "transposed", False))

        def get(name: str) -> Tensor:
            self._dist_ctx.broadcast((name, senders[name]))
            if name in tensors:
                return gather(name)
            value = torch.empty_like(shapes[name], device=self._dist_ctx.device)
            dist.recv(value, src=senders[name])
            return value

        with torch.no_grad(), self._dist_ctx.raise_on_all():
            if is_rank0:
                try:
                    self._ensure_lock()  # the folder may be in that of the run
                    write_weights(folder, shapes, self._config, get)
                finally:
                    self._dist_ctx.broadcast(None)
                return folder
            while (asked := self._dist_ctx.broadcast(None)) is not None:
                name, sender = asked
                if name not in tensors:
                    continue
                value = gather(name)
                if sender == self._dist_ctx.rank_info.rank:
                    dist.send(
                        value.to(self._dist_ctx.device, tensors[name].dtype).contiguous(), dst=0
                    )
        return folder

    def remove_others(self, keep: Collection[Path]) -> None:
        """Delete the folders of weights but some."""
        if not self._dist_ctx.is_rank0:
            return
        for path in self._folder.iterdir():
            belongs_to_server = path.name.startswith(RESTART_FOLDER)
            if path.name != TOKEN_NAME and path not in keep and not belongs_to_server:
                shutil.rmtree(path, ignore_errors=True)

    def close(self) -> None:
        """Delete all of them."""
        if self._dist_ctx.is_rank0:
            remove_own_folder(self._folder, self._token)


def _full_shapes(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a model without adapters, with their full shapes, on the meta device."""
    return {
        name: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        for name, tensor in tensors.items()
        if not name.endswith(LORA_SUFFIXES)
    }


def _make_weights_folder(options: RolloutOptions, run: Run) -> tuple[Path, str]:
    """A new folder for a run's weights, with its token: in the folder that was given, in memory, or
    in the run's own folder, which other hosts may see. Those of attempts that were killed are
    deleted; one that cannot be, or is another host's, stays in the record for a later attempt. On
    rank 0. Raises UserError and LockLost.
    """
    given = options.weights_folder
    elsewhere = any(split_server(name)[0] for name in options.engine_start)
    in_memory = given is None and not elsewhere and os.access(MEMORY_FOLDER, os.W_OK)
    parent = MEMORY_FOLDER if in_memory else (given or run.path).resolve()
    record = run.path / FOLDERS_NAME
    host = platform.node()
    run.check_lock()
    left: list[tuple[str, str, str]] = []
    with suppress(UserError, FileNotFoundError):
        left = read_json(record, list[tuple[str, str, str]])
    with storage_errors(parent, "weights cannot be written", "name another rollout.weights_folder"):
        kept = [each for each in left if not remove_own_folder(Path(each[1]), each[2])]
        # One of this host that is not trusted is gone, or was never ours.
        kept = [each for each in kept if each[0] != host or is_trusted_folder(Path(each[1]))]
        folder, token = make_own_folder(parent, "lmforge-weights-")
        atomic_write_json(record, [*kept, (host, str(folder), token)][-MAX_FOLDERS:])
    return folder, token
