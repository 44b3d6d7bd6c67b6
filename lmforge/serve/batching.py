"""Continuous batching: requests join and leave an engine's batch between two steps.

One thread drives an engine. Callers are on an asyncio event loop and read tokens as they are
generated.
"""

import asyncio
import sys
import threading
import traceback
from codecs import getincrementaldecoder
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import TypeVar

from lmforge.core.data.tokenizer import Tokenizer
from lmforge.serve.decoding.engine import Engine, GeneratedToken, GenerationRequest
from lmforge.serve.decoding.text_streamer import TextStreamer
from lmforge.serve.protocol import EngineStopped, QueueFull, TokenLogprob

# Reported for a token with probability 0, since JSON has no minus infinity.
MIN_LOGPROB = -9999.0
T = TypeVar("T")


@dataclass(eq=False)
class QueuedRequest:
    """One request in a batcher.

    token_queue: where its tokens go. request_id: in the engine, 0 before it runs. token_ids: its
    tokens. version_starts: the versions of the weights that sampled them, each with its first
    token.
    """

    request: GenerationRequest
    choice_index: int
    token_queue: "asyncio.Queue[tuple[int, GeneratedToken | Exception]]"
    request_id: int = 0
    token_ids: list[int] = field(default_factory=list)
    version_starts: list[tuple[str, int]] = field(default_factory=list)

    def add_token(self, token_id: int, version: str) -> None:
        if not self.version_starts or self.version_starts[-1][0] != version:
            self.version_starts.append((version, len(self.token_ids)))
        self.token_ids.append(token_id)

    def remaining(self) -> GenerationRequest:
        """The request for the tokens that are still to be generated."""
        count = len(self.token_ids)
        if not count:
            return self.request
        prompt_ids = [*self.request.prompt_ids, *self.token_ids]
        max_tokens = self.request.max_tokens - count
        return replace(
            self.request,
            prompt_ids=prompt_ids,
            max_tokens=max_tokens,
            score_prompt=False,
            num_resumed=count,
        )


class ContinuousBatcher:
    """The thread of one engine, and the queue of requests that wait for a slot in its batch.

    The queue is first in, first out. The batcher is `stopped`, and takes no more requests, after
    `stop` or when its engine has failed.
    """

    def __init__(self, engine: Engine, *, max_queue: int, loop: asyncio.AbstractEventLoop) -> None:
        """Start the thread.

        max_queue: requests that may wait besides those that run. loop: the event loop on which
        tokens are read.
        """
        self._engine = engine
        self.max_batch_size = engine.num_free_slots
        self._max_running = self.max_batch_size
        self._max_requests = self.max_batch_size + max_queue
        self._loop = loop
        self._changed = threading.Condition()
        self._waiting: OrderedDict[QueuedRequest, None] = OrderedDict()
        self._running: dict[int, QueuedRequest] = {}
        self._cancelled: list[QueuedRequest] = []
        self.stopped = False
        # The name of the weights: vLLM's of those that a server begins with.
        self.weight_version = "default"
        self._paused = False
        self._step_lock = threading.Lock()
        # Its thread waits for the lock: in the event loop's own threads, many that wait would keep
        # requests from being read.
        self._between_steps = ThreadPoolExecutor(1, "between steps")
        self._thread = threading.Thread(target=self._run, name="batcher")
        self._thread.start()

    @property
    def request_counts(self) -> tuple[int, int]:
        """The numbers of requests that run, and that wait."""
        with self._changed:
            return len(self._running), len(self._waiting)

    def submit(self, requests: Sequence[QueuedRequest], *, is_bounded: bool = True) -> None:
        """Queue requests, all or none. Raises EngineStopped, or QueueFull if `is_bounded`."""
        with self._changed:
            if self.stopped:
                raise EngineStopped
            total = len(self._running) + len(self._waiting) + len(requests)
            if is_bounded and total > self._max_requests:
                raise QueueFull
            self._waiting.update(dict.fromkeys(requests))
            self._changed.notify()

    def cancel(self, request: QueuedRequest) -> None:
        """Stop a request and free its slot. Does nothing for one that has finished."""
        with self._changed:
            if request in self._waiting:
                del self._waiting[request]
            else:
                self._cancelled.append(request)
            self._changed.notify()

    def pause(self) -> None:
        """Begin no further step. Requests are kept, and new ones wait."""
        with self._changed:
            self._paused = True

    def resume(self) -> None:
        with self._changed:
            self._paused = False
            self._changed.notify()

    async def between_steps(self, function: Callable[[], T]) -> T:
        """Call `function`, which may change the weights, while no step runs.

        No other such function runs either. Returns its result.
        """

        def call() -> T:
            with self._step_lock:
                return function()

        return await self._loop.run_in_executor(self._between_steps, call)

    def stop(self) -> None:
        """Accept no more requests, and end the current ones with EngineStopped.

        The current step is finished first.
        """
        with self._changed:
            self.stopped = True
            self._changed.notify()

    def join(self) -> None:
        """Wait until the thread has ended."""
        self._thread.join()

    def _run(self) -> None:
        try:
            while self._admit_and_cancel():
                with self._step_lock:
                    # Meanwhile: the weights may be new, and their name that of the earlier ones.
                    if self._paused:
                        continue
                    version = self.weight_version
                    events = self._step()
                with self._changed:
                    for queued, event in events:
                        if isinstance(event, GeneratedToken):
                            queued.add_token(event.token_id, version)
                        if isinstance(event, Exception) or event.finish_reason:
                            del self._running[queued.request_id]
                            self._max_running = self.max_batch_size
                self._post(events)
        finally:  # after an error that is not of a step the next request loads the model again
            with self._changed:
                self.stopped = True
                self._post(
                    [(each, EngineStopped()) for each in (*self._running.values(), *self._waiting)]
                )
                self._running.clear()
                self._waiting.clear()

    def _step(self) -> list[tuple[QueuedRequest, GeneratedToken | Exception]]:
        """The next token of each running request, or the error that it causes.

        After an error each is decoded alone, and gets its token or its own error: no request ends
        another. Where none fails alone, they were too many, and half of them wait until one has
        ended. The engine is left empty.
        """
        running = [*self._running.values()]
        try:
            return [(self._running[token.request_id], token) for token in self._engine.step()]
        except Exception:
            problem = traceback.format_exc()  # the error itself holds the tensors of the step
        events: list[tuple[QueuedRequest, GeneratedToken | Exception]] = []
        for queued in running:
            self._engine.clear()
            try:
                self._engine.add_request(queued.remaining())
                events += [(queued, token) for token in self._engine.step()]
            except Exception as error:
                problem = traceback.format_exc()
                events.append((queued, error.with_traceback(None)))
        self._engine.clear()
        if all(isinstance(event, GeneratedToken) for _, event in events):
            self._max_running = len(running) // 2 or self.max_batch_size
        print(problem, file=sys.stderr)
        return events

    def _admit_and_cancel(self) -> bool:
        """Wait for work, remove cancelled requests and admit waiting ones.

        Returns False once stopped.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: self.stopped or (not self._paused and (self._running or self._waiting))
            )
            for each in self._cancelled:
                if self._running.pop(each.request_id, None):
                    self._max_running = self.max_batch_size
                    try:
                        self._engine.cancel(each.request_id)
                    except Exception:  # out of memory
                        self._engine.clear()
            self._cancelled.clear()
            if self.stopped:
                return False
            # It was cleared: those that ran begin again, before the others.
            if not self._engine.num_unfinished:
                self._waiting = OrderedDict.fromkeys([*self._running.values(), *self._waiting])
                self._running.clear()
            while self._waiting and len(self._running) < self._max_running:
                queued, _ = self._waiting.popitem(last=False)
                try:
                    queued.request_id = self._engine.add_request(queued.remaining())
                    self._running[queued.request_id] = queued
                except Exception as problem:
                    self._post([(queued, problem)])
            return True

    def _post(self, events: Sequence[tuple[QueuedRequest, GeneratedToken | Exception]]) -> None:
        def deliver() -> None:
            for queued, event in events:
                queued.token_queue.put_nowait((queued.choice_index, event))

        if events:
            with suppress(RuntimeError):  # the loop is closed: there are no readers left
                self._loop.call_soon_threadsafe(deliver)


@dataclass(frozen=True)
class TextDelta:
    """A part of a choice that will not change any more: its text and its tokens.

    finish_reason: in the last part, why the choice ended.
    """

    choice_index: int
    text: str
    logprobs: list[TokenLogprob]
    finish_reason: str | None


class GenerationStream:
    """The choices of one API request, which are generated together.

    It must be closed, even if reading it fails.
    """

    def __init__(self, batcher: ContinuousBatcher, choices: "Sequence[ChoiceStream]") -> None:
        """Submit the requests. Raises QueueFull or EngineStopped."""
        self._batcher = batcher
        self._choices = choices
        self._token_queue: asyncio.Queue[tuple[int, GeneratedToken | Exception]] = asyncio.Queue()
        self._queued_requests = [
            QueuedRequest(each.request, index, self._token_queue)
            for index, each in enumerate(choices)
        ]
        self._unfinished = set(range(len(choices)))
        batcher.submit(self._queued_requests)

    @property
    def num_generated_tokens(self) -> int:
        """Tokens generated so far, stop tokens included."""
        return sum(len(choice.streamer.token_ids) for choice in self._choices)

    async def deltas(self) -> AsyncIterator[TextDelta]:
        """The text of all choices as it comes.

        Raises EngineStopped, or the exception that the engine raised.
        """
        while self._unfinished:
            # Even if tokens are queued, let the event loop see other events, such as a disconnect.
            await asyncio.sleep(0)
            index, token = await self._token_queue.get()
            if isinstance(token, Exception):
                raise token
            if index not in self._unfinished:
                continue  # generated before a stop string cancelled the request
            add = self._choices[index].add
            # What a prompt's tokens become takes long.
            if token.prompt:
                delta = await asyncio.to_thread(add, index, token)
            else:
                delta = add(index, token)
            if delta.finish_reason:
                self._unfinished.discard(index)
                if token.finish_reason is None:
                    self._batcher.cancel(self._queued_requests[index])
            if delta.text or delta.finish_reason:
                yield delta

    def close(self) -> None:
        """Cancel what is not finished."""
        for index in self._unfinished:
            self._batcher.cancel(self._queued_requests[index])
        self._unfinished.clear()


@dataclass
class ChoiceStream:
    """One choice, and its tokens whose text may still change.

    `echo`: the text of the prompt, with which it begins, or which it is with `only_echo`.
    """

    streamer: TextStreamer
    tokenizer: Tokenizer
    request: GenerationRequest
    echo: str | None
    only_echo: bool
    pending_logprobs: list[TokenLogprob] = field(default_factory=list)
    num_emitted: int = 0

    def add(self, choice_index: int, token: GeneratedToken) -> TextDelta:
        echoed = ""
        if not self.streamer.token_ids:
            echoed = self.echo or ""
            if self.request.score_prompt:
                self.pending_logprobs += self._prompt_logprobs(token.prompt)
        if self.only_echo:
            return TextDelta(choice_index, echoed, self.pending_logprobs, "length")
        offset = len(self.streamer.text) + len(self.echo or "")
        text = echoed + self.streamer.add(token.token_id, is_stop=token.finish_reason == "stop")
        # Clients that echo the prompt count on an entry for each token.
        if token.finish_reason != "stop" or self.echo is not None:
            self.pending_logprobs.append(self._logprob(token, offset))
        reason = self.streamer.finish_reason
        if reason is None and token.finish_reason:
            text += self.streamer.finish()
            reason = "length"
        self.num_emitted += len(text)
        # Tokens after a stop string are not reported. Otherwise the last part reports all remaining
        # tokens, also those without text.
        complete = token.finish_reason == "stop" or reason == "length"
        certain = [
            each
            for each in self.pending_logprobs
            if complete or each.text_offset < self.num_emitted
        ]
        self.pending_logprobs = self.pending_logprobs[len(certain) :]
        return TextDelta(choice_index, text, certain, reason)

    def _logprob(self, token: GeneratedToken, offset: int) -> TokenLogprob:
        (token_bytes, logprob), *top = (
            (self.tokenizer.id_to_bytes(id), max(logprob, MIN_LOGPROB))
            for id, logprob in [(token.token_id, token.logprob), *token.top_logprobs]
        )
        return TokenLogprob(token_bytes, logprob, top, offset)

    def _prompt_logprobs(self, scored: Sequence[GeneratedToken]) -> list[TokenLogprob]:
        """The log-probabilities of the prompt's tokens.

        The last tokens are its text, and others before it have none.
        """
        assert self.echo is not None
        pieces = [*map(self.tokenizer.id_to_bytes, self.request.prompt_ids)]
        decoder = getincrementaldecoder("utf-8")("replace")
        ends = list(accumulate(len(decoder.decode(piece)) for piece in pieces))
        shift = len(self.echo) - ends[-1]
        entries = [TokenLogprob(pieces[0], None, None, 0)]
        for token, at in zip(scored, ends[:-1], strict=True):
            entries.append(self._logprob(token, max(0, at + shift)))
        return entries
