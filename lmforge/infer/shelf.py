"""The models that a server offers: named at once, opened when first asked for, and given up when others need the room."""

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from lmforge.data.hub import local_folder
from lmforge.data.templates import ChatTemplate
from lmforge.errors import Mistake
from lmforge.infer.batching import Batcher
from lmforge.infer.engine import Engine
from lmforge.infer.opening import Opened, longest, open_model
from lmforge.infer.protocol import Refusal
from lmforge.runs import STEP_PREFIX, Run


@dataclass(frozen=True)
class Offer:
    """A model by the name that requests call it by, where it is, and when it was made (seconds since 1970)."""

    name: str
    path: Path
    created: int


@dataclass(frozen=True)
class OnShelf:
    """An opened model, the thread that writes with it, and how it is talked to, or why it cannot be."""

    opened: Opened
    batcher: Batcher
    max_length: int
    template: ChatTemplate | Mistake

    @property
    def ends(self) -> frozenset[int]:
        """Ids that end a text."""
        return self.opened.ends | {self.opened.tokenizer.separator_id}

    @property
    def ends_of_answers(self) -> frozenset[int]:
        """Ids that end what a model says in a conversation."""
        return self.ends if isinstance(self.template, Mistake) else self.ends | self.template.ends


class Shelf:
    """Models by name. Of a run, its checkpoints are offered too, as NAME/step-…; its own name is the newest of them."""

    def __init__(
        self,
        models: Sequence[Path],
        *,
        device: torch.device,
        dtype: torch.dtype,
        rows: int,
        waiting: int,
        max_length: int | None,
        most_open: int,
        say: Callable[[str], None],
    ) -> None:
        """Looks whether each of `models` is there, and opens none. Raises Mistake."""
        self._device, self._dtype, self._rows, self._waiting = device, dtype, rows, waiting
        self._max_length, self._most_open, self._say = max_length, most_open, say
        self._open: OrderedDict[str, OnShelf] = OrderedDict()
        self._opening = asyncio.Lock()
        self._ended = False
        self._models: dict[str, Path] = {}
        for path in models:
            folder = local_folder(path)
            if not folder.exists():
                raise Mistake(f"{path}: no such run, checkpoint or model folder")
            name = _name(path, folder)
            self._models[name if name not in self._models else str(path)] = folder

    @property
    def first(self) -> str:
        """The name of the model that was named first."""
        return next(iter(self._models))

    def offers(self) -> list[Offer]:
        """All there is at this moment, each run followed by its checkpoints, the newest first. Looks at the disk."""
        places: list[tuple[str, Path]] = []
        for name, path in self._models.items():
            places.append((name, path))
            if _is_run(path):
                run = Run.open(path)
                each = [run.checkpoint(step) for step in reversed(run.steps())]
                places += [(f"{name}/{place.name}", place) for place in each]
        return [Offer(name, place, made) for name, place in places if (made := _made(place)) is not None]

    async def get(self, name: str) -> OnShelf:
        """An opened model. Raises Refusal where there is none of this name, it cannot be opened, or none can be given up."""
        if not self._has(name):
            async with self._opening:
                if not self._has(name):
                    await self._take(name)
        self._open.move_to_end(name)
        return self._open[name]

    def _has(self, name: str) -> bool:
        """Whether a model is open; one whose engine has failed is opened anew."""
        return name in self._open and (self._ended or not self._open[name].batcher.ended)

    async def _take(self, name: str) -> None:
        offers = {offer.name: offer for offer in await asyncio.to_thread(self.offers)}
        if name not in offers:
            raise Refusal(404, f"{name}: no such model; GET /v1/models lists them", param="model", code="model_not_found")
        self._open.pop(name, None)
        if len(self._open) >= self._most_open:
            idle = next((name for name, held in self._open.items() if held.batcher.counts == (0, 0)), None)
            if idle is None:
                message = f"{name}: not open, and the {len(self._open)} models that are open are all writing; try again later"
                raise Refusal(503, message, kind="server_error", code="models_busy")
            held = self._open.pop(idle)
            held.batcher.end()
            await asyncio.to_thread(held.batcher.join)
            del held  # before the next one takes memory
        opened, engine, max_length, template = await asyncio.to_thread(self._open_model, offers[name].path)
        # Its thread begins here, on the loop: where the wait for the model is given up, none is left that nobody ends.
        batcher = Batcher(engine, waiting=self._waiting, loop=asyncio.get_running_loop())
        self._open[name] = OnShelf(opened, batcher, max_length, template)
        if self._ended:
            batcher.end()

    def _open_model(self, path: Path) -> tuple[Opened, Engine, int, ChatTemplate | Mistake]:
        opened = open_model(path, self._device, self._dtype, self._say)
        max_length = longest(opened, self._max_length)
        engine = Engine(opened.model, vocab_size=opened.tokenizer.vocab_size, rows=self._rows, max_length=max_length)
        template: ChatTemplate | Mistake
        try:
            template = ChatTemplate.of(opened.tokenizer)
        except Mistake as problem:
            template = problem
        return opened, engine, max_length, template

    def counts(self) -> tuple[int, int]:
        """Requests that are being written, and that wait, over all models."""
        each = [held.batcher.counts for held in self._open.values()]
        return sum(running for running, _ in each), sum(waiting for _, waiting in each)

    def end(self) -> None:
        """End all that is being written, and begin nothing more."""
        self._ended = True
        for held in self._open.values():
            held.batcher.end()

    def join(self) -> None:
        """Wait for the threads of `end`."""
        for held in self._open.values():
            held.batcher.join()


def _is_run(folder: Path) -> bool:
    return Run(folder).exists() and not (folder / "config.json").exists()


def _made(folder: Path) -> int | None:
    """When a folder was made; None where it is gone, as checkpoints of a run that trains are while one looks at them."""
    try:
        return int(folder.stat().st_mtime)
    except FileNotFoundError:
        return None


def _name(path: Path, folder: Path) -> str:
    """What requests call a model: its folder's name, of a checkpoint with its run's, of one from the hub the hub's."""
    if path != folder:
        return str(path)
    place = folder.resolve()
    return f"{place.parents[1].name}/{place.name}" if place.name.startswith(STEP_PREFIX) else place.name
