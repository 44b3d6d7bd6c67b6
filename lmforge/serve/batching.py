"""Continuous batching: one thread drives an engine, and requests join and leave its batch between two steps.

Callers are on an asyncio event loop and read tokens as they are generated.
"""

import asyncio
import sys
import threading
import traceback
from codecs import getincrementaldecoder
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import accumulate, repeat

from lmforge.data.tokenizer import Tokenizer
from lmforge.generate.engine import Engine, GeneratedToken, GenerationRequest
from lmforge.generate.text_streamer import TextStreamer
from lmforge.serve.protocol import EngineStopped, QueueFull, TokenLogprob

# Reported for a token with probability 0, since JSON has no minus infinity.
MIN_LOGPROB = -9999.0


@dataclass(eq=False)
class QueuedRequest:
    """One request in a batcher: where its tokens go, and its id in the engine, 0 before it runs; how many tokens it has, and
    the versions of the weights that sampled them, each with its first token."""

    request: GenerationRequest
    choice_index: int
    token_queue: "asyncio.Queue[tuple[int, GeneratedToken | Exception]]"
    request_id: int = 0
    num_tokens: int = 0
    version_starts: list[tuple[str, int]] = field(default_factory=list)

    def count_token(self, version: str) -> None:
        if not self.version_starts or self.version_starts[-1][0] != version:
            self.version_starts.append((version, self.num_tokens))
        self.num_tokens += 1


class ContinuousBatcher:
    """The thread of one engine, and the queue of requests that wait for a slot in its batch, first in, first out.

    It is `stopped`, and takes no more requests, after `stop` or when its engine has failed.
    """

    def __init__(self, engine: Engine, *, max_queue: int, loop: asyncio.AbstractEventLoop) -> None:
        """`max_queue` requests may wait besides those that run; `loop` is the event loop on which tokens are read."""
        self._engine = engine
        self.max_batch_size = engine.num_free_slots
        self._max_requests = self.max_batch_size + max_queue
        self._loop = loop
        self._changed = threading.Condition()
        self._waiting: deque[QueuedRequest] = deque()
        self._running: dict[int, QueuedRequest] = {}
        self._cancelled: list[QueuedRequest] = []
        self.stopped = False
        # What the weights are called: vLLM's name of those that a server begins with.
        self.weight_version = "default"
        self._paused = False
        self._step_lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="batcher")
        self._thread.start()

    @property
    def request_counts(self) -> tuple[int, int]:
        """How many requests run, and how many wait."""
        with self._changed:
            return len(self._running), len(self._waiting)

    def submit(self, requests: Sequence[QueuedRequest], *, is_bounded: bool = True) -> None:
        """Queue requests, all or none. Raises EngineStopped, or QueueFull if `is_bounded`."""
        with self._changed:
            if self.stopped:
                raise EngineStopped
            if is_bounded and len(self._running) + len(self._waiting) + len(requests) > self._max_requests:
                raise QueueFull
            self._waiting.extend(requests)
            self._changed.notify()

    def cancel(self, request: QueuedRequest) -> None:
        """Stop a request and free its slot. Does nothing for one that has finished."""
        with self._changed:
            if request in self._waiting:
                self._waiting.remove(request)
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

    def between_steps(self, function: Callable[[], None]) -> None:
        """Call `function`, which may change the weights, while no step runs."""
        with self._step_lock:
            function()

    def stop(self) -> None:
        """Accept no more requests, and end the current ones with EngineStopped. The current step is finished first."""
        with self._changed:
            self.stopped = True
            self._changed.notify()

    def join(self) -> None:
        """Wait until the thread has ended."""
        self._thread.join()

    def _run(self) -> None:
        reason: Exception = EngineStopped()
        try:
            while self._admit_and_cancel():
                with self._step_lock:
                    if self._paused:  # meanwhile: the weights may be new, and their name that of the earlier ones
                        continue
                    version, tokens = self.weight_version, self._engine.step()
                events = [(self._running[token.request_id], token) for token in tokens]
                for queued, _ in events:
                    queued.count_token(version)
                with self._changed:
                    for _, token in events:
                        if token.finish_reason:
                            del self._running[token.request_id]
                self._post(events)
        except Exception as problem:
            # Most often out of memory. The engine's state is incomplete: the next request loads the model again.
            traceback.print_exc(file=sys.stderr)
            reason = problem
        with self._changed:
            self.stopped = True
            self._post([(each, reason) for each in self._running.values()])
            self._post([(each, EngineStopped()) for each in self._waiting])
            self._running.clear()
            self._waiting.clear()

    def _admit_and_cancel(self) -> bool:
        """Wait for work, remove cancelled requests and admit waiting ones. Returns False once stopped."""
        with self._changed:
            self._changed.wait_for(lambda: self.stopped or (not self._paused and (self._running or self._waiting)))
            for each in self._cancelled:
                if self._running.pop(each.request_id, None):
                    self._engine.cancel(each.request_id)
            self._cancelled.clear()
            if self.stopped:
                return False
            while self._waiting and self._engine.num_free_slots:
                queued = self._waiting.popleft()
                try:
                    queued.request_id = self._engine.add_request(queued.request)
                    self._running[queued.request_id] = queued
                except Exception as problem:
                    self._post([(queued, problem)])
            return True

    def _post(self, events: Sequence[tuple[QueuedRequest, GeneratedToken | Exception]]) -> None:
        if events:
            with suppress(RuntimeError):  # the loop is closed: there are no readers left
                self._loop.call_soon_threadsafe(_deliver, events)


def _deliver(events: Sequence[tuple[QueuedRequest, GeneratedToken | Exception]]) -> None:
    for queued, event in events:
        queued.token_queue.put_nowait((queued.choice_index, event))


@dataclass(frozen=True)
class TextDelta:
    """A part of a choice that will not change any more: its text, its tokens, and in the last part why it ended."""

    choice_index: int
    text: str
    logprobs: list[TokenLogprob]
    finish_reason: str | None


class GenerationStream:
    """The choices of one API request, which are generated together. It must be closed, even if reading it fails."""

    def __init__(
        self,
        batcher: ContinuousBatcher,
        tokenizer: Tokenizer,
        requests: Sequence[GenerationRequest],
        stop_strings: Sequence[str],
        continued: Sequence[bool] = (),
        echoes: Sequence[str | None] = (),
        only_echo: bool = False,
        shown: frozenset[int] = frozenset(),
    ) -> None:
        """Submit the requests. `continued`: which prompts are texts to be continued. `echoes`: texts of the prompts, with
        which the choices begin, or which they are with `only_echo`. `shown`: special tokens that have a text. Raises QueueFull
        or EngineStopped."""
        self._batcher = batcher
        self._token_queue: asyncio.Queue[tuple[int, GeneratedToken | Exception]] = asyncio.Queue()
        self._queued_requests = [QueuedRequest(request, index, self._token_queue) for index, request in enumerate(requests)]
        self._unfinished = set(range(len(requests)))
        self._choices = [
            _ChoiceStream(TextStreamer(tokenizer, stop_strings, is_continuation, shown), tokenizer, request, echo, only_echo)
            for request, is_continuation, echo in zip(
                requests, continued or repeat(False), echoes or repeat(None), strict=False
            )
        ]
        batcher.submit(self._queued_requests)

    @property
    def num_generated_tokens(self) -> int:
        """Tokens generated so far, stop tokens included."""
        return sum(len(choice.streamer.token_ids) for choice in self._choices)

    async def deltas(self) -> AsyncIterator[TextDelta]:
        """The text of all choices as it comes. Raises EngineStopped, or the exception that the engine raised."""
        while self._unfinished:
            await asyncio.sleep(0)  # even if tokens are queued, let the event loop see other events, such as a disconnect
            index, token = await self._token_queue.get()
            if isinstance(token, Exception):
                raise token
            if index not in self._unfinished:
                continue  # generated before a stop string cancelled the request
            delta = self._choices[index].add(index, token)
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
class _ChoiceStream:
    """One choice, and its tokens whose text may still change."""

    streamer: TextStreamer
    tokenizer: Tokenizer
    request: GenerationRequest
    echo: str | None
    only_echo: bool
    pending_logprobs: list[TokenLogprob] = field(default_factory=list)
    num_emitted: int = 0

    def add(self, choice_index: int, token: GeneratedToken) -> TextDelta:
        is_first = not self.streamer.token_ids
        echoed = self.echo or "" if is_first else ""
        if is_first and self.request.score_prompt:
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
            text, reason = text + self.streamer.finish(), "length"
        self.num_emitted += len(text)
        # Tokens after a stop string are not reported. Otherwise the last part reports all remaining tokens, also those without
        # text.
        complete = token.finish_reason == "stop" or reason == "length"
        certain = [each for each in self.pending_logprobs if complete or each.text_offset < self.num_emitted]
        self.pending_logprobs = self.pending_logprobs[len(certain) :]
        return TextDelta(choice_index, text, certain, reason)

    def _logprob(self, token: GeneratedToken, offset: int) -> TokenLogprob:
        (token_bytes, logprob), *top = (
            (self.tokenizer.id_to_bytes(id), max(logprob, MIN_LOGPROB))
            for id, logprob in [(token.token_id, token.logprob), *token.top_logprobs]
        )
        return TokenLogprob(token_bytes, logprob, top, offset)

    def _prompt_logprobs(self, scored: Sequence[GeneratedToken]) -> list[TokenLogprob]:
        """Those of the prompt's tokens, of which the last ones are its text, and others before it have none."""
        assert self.echo is not None
        first, *rest = map(self.tokenizer.id_to_bytes, self.request.prompt_ids)
        decoder = getincrementaldecoder("utf-8")("replace")
        offsets = list(accumulate((len(decoder.decode(piece)) for piece in (first, *rest)), initial=0))
        shift = len(self.echo) - offsets[-1]
        entries = [TokenLogprob(first, None, None, 0)]
        return entries + [
            self._logprob(*each) for each in zip(scored, (max(0, at + shift) for at in offsets[1:-1]), strict=True)
        ]
