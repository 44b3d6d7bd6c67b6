"""The models that a server offers.

They are listed at the start, loaded on first use, and unloaded when others need the memory.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from lmforge.core.errors import UserError
from lmforge.core.records.kinds import MODELS, Kind, kind_of, unexpected
from lmforge.core.records.runs import STEP_PREFIX, Run
from lmforge.hf.hub import resolve_model_folder
from lmforge.serve.batching import ContinuousBatcher
from lmforge.serve.decoding.engine import Engine
from lmforge.serve.decoding.model_loading import LoadedModel, load_model, resolve_max_length
from lmforge.serve.protocol import ApiError, no_such_model


@dataclass(frozen=True)
class ModelInfo:
    """A model's name in requests, its path, and its modification time in seconds since 1970."""

    name: str
    path: Path
    created: int


@dataclass(frozen=True)
class ServedModel:
    """A loaded model, the thread that generates with it, and the maximum length of its texts.

    The length is that of prompt and answer.
    """

    loaded: LoadedModel
    batcher: ContinuousBatcher
    max_length: int

    @property
    def vocab_size(self) -> int:
        """The number of ids that both the tokenizer and the model have: either may have more."""
        return _vocab_size(self.loaded)

    def check_ids(self, ids: Sequence[int], param: str) -> None:
        """Raise ApiError for ids of a prompt that the model does not read."""
        highest = max(ids)
        if highest >= self.vocab_size:
            raise ApiError(
                400,
                f"{param}: token id {highest}, and this model reads ids below {self.vocab_size}",
                param=param,
            )


@dataclass(frozen=True)
class ServingLimits:
    """The limits on what a server does at once.

    `max_batch_size`, `max_queue` and `max_length` (None: the model's own) are of each model,
    `max_models` is the number of models that are loaded.
    """

    max_batch_size: int
    max_queue: int
    max_length: int | None
    max_models: int
    return_routed_experts: bool = False


class ModelRegistry:
    """Models by name.

    The checkpoints of a run are offered as NAME/step-…; NAME itself is the newest of them.
    """

    def __init__(
        self,
        models: Sequence[Path],
        limits: ServingLimits,
        device: torch.device,
        dtype: torch.dtype,
        warn: Callable[[str], None],
    ) -> None:
        """Check that all `models` exist, and load none. Raises UserError."""
        self._limits = limits
        self._device = device
        self._dtype = dtype
        self._warn = warn
        self._served: OrderedDict[str, ServedModel] = OrderedDict()
        self._load_lock = asyncio.Lock()
        self._stopped = False
        self._paths: dict[str, Path] = {}
        for path in models:
            folder = resolve_model_folder(path)
            if kind_of(folder) not in MODELS:
                raise unexpected(path, MODELS)
            name = _model_name(path, folder)
            self._paths[name if name not in self._paths else str(path)] = folder

    @property
    def default_model(self) -> str:
        """The name of the first model."""
        return next(iter(self._paths))

    def list_models(self) -> list[ModelInfo]:
        """All models that are on disk now.

        Each run is followed by its checkpoints, the newest first.
        """
        paths: list[tuple[str, Path]] = []
        for name, path in self._paths.items():
            paths.append((name, path))
            if path.exists() and kind_of(path) == Kind.RUN:
                run = Run.open(path)
                checkpoints = [
                    run.checkpoint_path(step) for step in reversed(run.checkpoint_steps())
                ]
                paths += [(f"{name}/{checkpoint.name}", checkpoint) for checkpoint in checkpoints]
        infos = []
        for name, path in paths:
            # A run that trains deletes checkpoints while they are listed.
            with suppress(FileNotFoundError):
                infos.append(ModelInfo(name, path, int(path.stat().st_mtime)))
        return infos

    async def get(self, name: str) -> ServedModel:
        """A loaded model.

        Raises ApiError where there is none or no other can be unloaded, UserError where loading
        fails.
        """
        if not self._is_ready(name):
            async with self._load_lock:
                if not self._is_ready(name):
                    await self._load(name)
        self._served.move_to_end(name)
        return self._served[name]

    def _is_ready(self, name: str) -> bool:
        """Return True where a model is loaded. One whose engine has failed is loaded again."""
        return name in self._served and (self._stopped or not self._served[name].batcher.stopped)

    async def _load(self, name: str) -> None:
        paths = {info.name: info.path for info in await asyncio.to_thread(self.list_models)}
        if name not in paths:
            raise no_such_model(name)
        self._served.pop(name, None)
        if len(self._served) >= self._limits.max_models:
            idle = [
                other
                for other, served in self._served.items()
                if served.batcher.request_counts == (0, 0)
            ]
            if not idle:
                message = (
                    f"{name}: not loaded, and all {len(self._served)} loaded models are busy; try"
                    " again later"
                )
                raise ApiError(503, message, code="models_busy")
            unloaded = self._served.pop(idle[0])
            unloaded.batcher.stop()
            await asyncio.to_thread(unloaded.batcher.join)
            del unloaded  # before the next one takes memory
        loaded, engine, max_length = await asyncio.to_thread(self._load_model, paths[name])
        # The thread starts here, on the event loop: if waiting for the model is cancelled, no
        # thread is left running.
        batcher = ContinuousBatcher(
            engine, max_queue=self._limits.max_queue, loop=asyncio.get_running_loop()
        )
        self._served[name] = ServedModel(loaded, batcher, max_length)
        if self._stopped:
            batcher.stop()

    def _load_model(self, path: Path) -> tuple[LoadedModel, Engine, int]:
        loaded = load_model(path, self._device, self._dtype, self._warn)
        max_length = resolve_max_length(loaded, self._limits.max_length)
        returns_experts = self._limits.return_routed_experts
        if returns_experts and not loaded.config.num_experts:
            raise UserError(
                f"--return_routed_experts: {path} is no mixture of experts; leave it out"
            )
        engine = Engine(
            loaded.model,
            vocab_size=_vocab_size(loaded),
            max_batch_size=self._limits.max_batch_size,
            max_length=max_length,
            return_routed_experts=returns_experts,
        )
        return loaded, engine, max_length

    def request_counts(self) -> tuple[int, int]:
        """The numbers of requests that run, and that wait, over all models."""
        counts = [served.batcher.request_counts for served in self._served.values()]
        return sum(running for running, _ in counts), sum(waiting for _, waiting in counts)

    def stop(self) -> None:
        """End all requests and take no more."""
        self._stopped = True
        for served in self._served.values():
            served.batcher.stop()

    def join(self) -> None:
        """Wait until the threads that `stop` ends have ended."""
        for served in self._served.values():
            served.batcher.join()


def _vocab_size(loaded: LoadedModel) -> int:
    return min(loaded.tokenizer.vocab_size, loaded.config.vocab_size)


def _model_name(path: Path, folder: Path) -> str:
    """The name of a model in requests.

    It is its hub name, RUN/step-… for a checkpoint, otherwise its folder's name.
    """
    if path != folder:
        return str(path)
    resolved = folder.resolve()
    if resolved.name.startswith(STEP_PREFIX):
        return f"{resolved.parents[1].name}/{resolved.name}"
    return resolved.name
