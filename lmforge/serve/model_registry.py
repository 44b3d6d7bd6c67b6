"""The models that a server offers: named at once, opened when first asked for, and given up when others need the room."""

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from lmforge.data.chat.templates import ChatTemplate
from lmforge.errors import UserError
from lmforge.generate.engine import Engine
from lmforge.generate.model_loading import LoadedModel, load_model, resolve_max_length
from lmforge.hub import resolve_model_folder
from lmforge.runs import STEP_PREFIX, Run
from lmforge.serve.batching import ContinuousBatcher
from lmforge.serve.protocol import ApiError


@dataclass(frozen=True)
class ModelInfo:
    """A model by the name that requests call it by, where it is, and when it was made (seconds since 1970)."""

    name: str
    path: Path
    created: int


@dataclass(frozen=True)
class ServedModel:
    """An opened model, the thread that writes with it, and how it is talked to, or why it cannot be."""

    loaded: LoadedModel
    batcher: ContinuousBatcher
    max_length: int
    chat_template: ChatTemplate | UserError

    @property
    def stop_token_ids(self) -> frozenset[int]:
        """Ids that end a text."""
        return self.loaded.stop_token_ids | {self.loaded.tokenizer.eos_token_id}

    @property
    def chat_stop_token_ids(self) -> frozenset[int]:
        """Ids that end what a model says in a conversation."""
        return (
            self.stop_token_ids
            if isinstance(self.chat_template, UserError)
            else self.stop_token_ids | self.chat_template.stop_ids
        )


class ModelRegistry:
    """Models by name. Of a run, its checkpoints are offered too, as NAME/step-…; its own name is the newest of them."""

    def __init__(
        self,
        models: Sequence[Path],
        *,
        device: torch.device,
        dtype: torch.dtype,
        max_batch_size: int,
        max_queue: int,
        max_length: int | None,
        max_models: int,
        warn: Callable[[str], None],
    ) -> None:
        """Looks whether each of `models` is there, and opens none. Raises UserError."""
        self._device, self._dtype, self._max_batch_size, self._max_queue = device, dtype, max_batch_size, max_queue
        self._max_length, self._max_models, self._warn = max_length, max_models, warn
        self._served: OrderedDict[str, ServedModel] = OrderedDict()
        self._load_lock = asyncio.Lock()
        self._stopped = False
        self._paths: dict[str, Path] = {}
        for path in models:
            folder = resolve_model_folder(path)
            if not folder.exists():
                raise UserError(f"{path}: no such run, checkpoint or model folder")
            name = _model_name(path, folder)
            self._paths[name if name not in self._paths else str(path)] = folder

    @property
    def default_model(self) -> str:
        """The name of the model that was named first."""
        return next(iter(self._paths))

    def list_models(self) -> list[ModelInfo]:
        """All there is at this moment, each run followed by its checkpoints, the newest first. Looks at the disk."""
        places: list[tuple[str, Path]] = []
        for name, path in self._paths.items():
            places.append((name, path))
            if _is_run(path):
                run = Run.open(path)
                each = [run.checkpoint_path(step) for step in reversed(run.checkpoint_steps())]
                places += [(f"{name}/{place.name}", place) for place in each]
        return [ModelInfo(name, place, made) for name, place in places if (made := _modified_time(place)) is not None]

    async def get(self, name: str) -> ServedModel:
        """An opened model. Raises Refusal where there is none of this name, it cannot be opened, or none can be given up."""
        if not self._is_ready(name):
            async with self._load_lock:
                if not self._is_ready(name):
                    await self._load(name)
        self._served.move_to_end(name)
        return self._served[name]

    def _is_ready(self, name: str) -> bool:
        """Whether a model is open; one whose engine has failed is opened anew."""
        return name in self._served and (self._stopped or not self._served[name].batcher.stopped)

    async def _load(self, name: str) -> None:
        offers = {offer.name: offer for offer in await asyncio.to_thread(self.list_models)}
        if name not in offers:
            raise ApiError(404, f"{name}: no such model; GET /v1/models lists them", param="model", code="model_not_found")
        self._served.pop(name, None)
        if len(self._served) >= self._max_models:
            idle = next((name for name, held in self._served.items() if held.batcher.request_counts == (0, 0)), None)
            if idle is None:
                message = f"{name}: not open, and the {len(self._served)} models that are open are all writing; try again later"
                raise ApiError(503, message, error_type="server_error", code="models_busy")
            held = self._served.pop(idle)
            held.batcher.stop()
            await asyncio.to_thread(held.batcher.join)
            del held  # before the next one takes memory
        opened, engine, max_length, template = await asyncio.to_thread(self._load_model, offers[name].path)
        # Its thread begins here, on the loop: where the wait for the model is given up, none is left that nobody ends.
        batcher = ContinuousBatcher(engine, max_queue=self._max_queue, loop=asyncio.get_running_loop())
        self._served[name] = ServedModel(opened, batcher, max_length, template)
        if self._stopped:
            batcher.stop()

    def _load_model(self, path: Path) -> tuple[LoadedModel, Engine, int, ChatTemplate | UserError]:
        opened = load_model(path, self._device, self._dtype, self._warn)
        max_length = resolve_max_length(opened, self._max_length)
        engine = Engine(
            opened.model, vocab_size=opened.tokenizer.vocab_size, max_batch_size=self._max_batch_size, max_length=max_length
        )
        template: ChatTemplate | UserError
        try:
            template = ChatTemplate.from_tokenizer(opened.tokenizer)
        except UserError as problem:
            template = problem
        return opened, engine, max_length, template

    def request_counts(self) -> tuple[int, int]:
        """Requests that are being written, and that wait, over all models."""
        each = [held.batcher.request_counts for held in self._served.values()]
        return sum(running for running, _ in each), sum(waiting for _, waiting in each)

    def stop(self) -> None:
        """End all that is being written, and begin nothing more."""
        self._stopped = True
        for held in self._served.values():
            held.batcher.stop()

    def join(self) -> None:
        """Wait for the threads of `end`."""
        for held in self._served.values():
            held.batcher.join()


def _is_run(folder: Path) -> bool:
    return Run(folder).exists() and not (folder / "config.json").exists()


def _modified_time(folder: Path) -> int | None:
    """When a folder was made; None where it is gone, as checkpoints of a run that trains are while one looks at them."""
    try:
        return int(folder.stat().st_mtime)
    except FileNotFoundError:
        return None


def _model_name(path: Path, folder: Path) -> str:
    """What requests call a model: its folder's name, of a checkpoint with its run's, of one from the hub the hub's."""
    if path != folder:
        return str(path)
    place = folder.resolve()
    return f"{place.parents[1].name}/{place.name}" if place.name.startswith(STEP_PREFIX) else place.name
