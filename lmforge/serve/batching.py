"""Continuous batching: one thread drives an engine, and requests join and leave what it is writing between two steps.

Whoever asks is on an asyncio loop and reads its answer as it is written. Nothing here knows of HTTP.
"""

import asyncio
import sys
import threading
import traceback
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

from lmforge.data.tokenizer import Tokenizer
from lmforge.generate.engine import Engine, GeneratedToken, GenerationRequest
from lmforge.generate.text_streamer import TextStreamer
from lmforge.serve.protocol import TokenLogprob

# What is told of a token that could not have been drawn: JSON has no minus infinity.
MIN_LOGPROB = -9999.0


class QueueFull(Exception):
    """As many requests are being written and wait as may."""


class EngineStopped(Exception):
    """The model was given up, or the server stops: nothing more is written."""


@dataclass(eq=False)
class QueuedRequest:
    """One request in a batcher: where its tokens go, and under which number the engine has it while it runs."""

    request: GenerationRequest
    choice_index: int
    token_queue: "asyncio.Queue[tuple[int, GeneratedToken | Exception]]"
    request_id: int | None = None


class ContinuousBatcher:
    """The thread of one engine, and the requests that wait for a row of it, first come, first served."""

    def __init__(self, engine: Engine, *, max_queue: int, loop: asyncio.AbstractEventLoop) -> None:
        """`waiting` is how many requests may wait beyond those that run; `loop` is the one that answers are read on."""
        self._engine = engine
        self._max_batch_size = engine.num_free_slots
        self._max_requests = self._max_batch_size + max_queue
        self._loop = loop
        self._changed = threading.Condition()
        self._waiting: deque[QueuedRequest] = deque()
        self._running: dict[int, QueuedRequest] = {}
        self._cancelled: list[QueuedRequest] = []
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="batcher")
        self._thread.start()

    @property
    def max_batch_size(self) -> int:
        """Requests that are written at once."""
        return self._max_batch_size

    @property
    def request_counts(self) -> tuple[int, int]:
        """Requests that run, and that wait."""
        with self._changed:
            return len(self._running), len(self._waiting)

    @property
    def stopped(self) -> bool:
        """Whether it takes no more requests: it was told to end, or its engine failed."""
        with self._changed:
            return self._stopped

    def submit(self, requests: Sequence[QueuedRequest]) -> None:
        """Take requests in, all or none. Raises Full, and Ended."""
        with self._changed:
            if self._stopped:
                raise EngineStopped
            if len(self._running) + len(self._waiting) + len(requests) > self._max_requests:
                raise QueueFull
            self._waiting.extend(requests)
            self._changed.notify()

    def cancel(self, request: QueuedRequest) -> None:
        """Write no more for a request, and free its row. What has ended already is left alone."""
        with self._changed:
            if request in self._waiting:
                self._waiting.remove(request)
            else:
                self._cancelled.append(request)
            self._changed.notify()

    def stop(self) -> None:
        """Tell all who wait for tokens that none will come, and take no more requests. The step under way is finished."""
        with self._changed:
            self._stopped = True
            self._changed.notify()

    def join(self) -> None:
        """Wait until the thread has ended."""
        self._thread.join()

    def _run(self) -> None:
        why: Exception = EngineStopped()
        try:
            while self._admit_and_cancel():
                news = [(self._running[token.request_id], token) for token in self._engine.step()]
                with self._changed:
                    for _, token in news:
                        if token.finish_reason:
                            del self._running[token.request_id]
                self._post(news)
        except Exception as problem:
            # Out of memory, most often. What a step leaves half-way is not gone on with: who comes next opens the model anew.
            traceback.print_exc(file=sys.stderr)
            why = problem
        with self._changed:
            self._stopped = True
            self._post(
                [(ticket, why) for ticket in self._running.values()] + [(ticket, EngineStopped()) for ticket in self._waiting]
            )
            self._running.clear()
            self._waiting.clear()

    def _admit_and_cancel(self) -> bool:
        """Wait for something to do; let go who left and let in who waits. False once there is an end."""
        with self._changed:
            self._changed.wait_for(lambda: self._running or self._waiting or self._stopped)
            for ticket in self._cancelled:
                if ticket.request_id is not None and self._running.get(ticket.request_id) is ticket:
                    self._engine.cancel(ticket.request_id)
                    del self._running[ticket.request_id]
            self._cancelled.clear()
            if self._stopped:
                return False
            refused: list[tuple[QueuedRequest, Exception]] = []
            while self._waiting and self._engine.num_free_slots:
                ticket = self._waiting.popleft()
                try:
                    ticket.request_id = self._engine.add_request(ticket.request)
                    self._running[ticket.request_id] = ticket
                except Exception as problem:
                    refused.append((ticket, problem))
            self._post(refused)
            return True

    def _post(self, events: Sequence[tuple[QueuedRequest, GeneratedToken] | tuple[QueuedRequest, Exception]]) -> None:
        if events:
            with suppress(RuntimeError):  # the loop is closed: nobody reads any more
                self._loop.call_soon_threadsafe(_deliver, events)


def _deliver(events: Sequence[tuple[QueuedRequest, GeneratedToken] | tuple[QueuedRequest, Exception]]) -> None:
    for ticket, what in events:
        ticket.token_queue.put_nowait((ticket.choice_index, what))


@dataclass(frozen=True)
class TextDelta:
    """What became certain of one of several texts: its words, its tokens, and with the last piece why it ended."""

    choice_index: int
    text: str
    logprobs: list[TokenLogprob]
    finish_reason: str | None


class GenerationStream:
    """Texts that are being written together: the choices of one request. Close it, however reading it ends."""

    def __init__(
        self,
        batcher: ContinuousBatcher,
        tokenizer: Tokenizer,
        requests: Sequence[GenerationRequest],
        stop_strings: Sequence[str],
    ) -> None:
        """Begin. Raises Full, and Ended."""
        self._batcher = batcher
        self._token_queue: asyncio.Queue[tuple[int, GeneratedToken | Exception]] = asyncio.Queue()
        self._queued_requests = [QueuedRequest(request, index, self._token_queue) for index, request in enumerate(requests)]
        self._unfinished = set(range(len(requests)))
        self._choices = [_ChoiceStream(tokenizer, stop_strings) for _ in requests]
        batcher.submit(self._queued_requests)

    @property
    def num_generated_tokens(self) -> int:
        """Tokens that were written, those included that ended a text."""
        return sum(len(text.streamer.token_ids) for text in self._choices)

    async def deltas(self) -> AsyncIterator[TextDelta]:
        """The texts as they come. Raises Ended, and whatever went wrong with the engine."""
        while self._unfinished:
            await asyncio.sleep(0)  # a full inbox is no reason to keep the loop from others, such as news of who left
            index, token = await self._token_queue.get()
            if isinstance(token, Exception):
                raise token
            if index not in self._unfinished:
                continue  # came when a stop text had ended it already
            piece = self._choices[index].add(index, token)
            if piece.finish_reason:
                self._unfinished.discard(index)
                if token.finish_reason is None:
                    self._batcher.cancel(self._queued_requests[index])
            if piece.text or piece.finish_reason:
                yield piece

    def close(self) -> None:
        """Give up what is not finished."""
        for index in self._unfinished:
            self._batcher.cancel(self._queued_requests[index])
        self._unfinished.clear()


class _ChoiceStream:
    """One text, and those of its tokens whose words are not certain yet."""

    def __init__(self, tokenizer: Tokenizer, stop_strings: Sequence[str]) -> None:
        self.streamer = TextStreamer(tokenizer, stop_strings)
        self._tokenizer = tokenizer
        self._pending_logprobs: list[TokenLogprob] = []
        self._num_emitted = 0

    def add(self, choice_index: int, token: GeneratedToken) -> TextDelta:
        offset = len(self.streamer.text)
        text = self.streamer.add(token.token_id, is_stop=token.finish_reason == "stop")
        if token.finish_reason != "stop":
            top = [(self._tokenizer.id_to_bytes(id), max(logprob, MIN_LOGPROB)) for id, logprob in token.top_logprobs]
            logprob = max(token.logprob, MIN_LOGPROB)
            self._pending_logprobs.append(TokenLogprob(self._tokenizer.id_to_bytes(token.token_id), logprob, top, offset))
        reason = self.streamer.finish_reason
        if reason is None and token.finish_reason:
            text, reason = text + self.streamer.finish(), "length"
        self._num_emitted += len(text)
        # Of tokens that a stop text cut off nothing is told; of others, at the end, all is, such as have no text of their own.
        whole = token.finish_reason == "stop" or reason == "length"
        sure = [scored for scored in self._pending_logprobs if whole or scored.text_offset < self._num_emitted]
        self._pending_logprobs = self._pending_logprobs[len(sure) :]
        return TextDelta(choice_index, text, sure, reason)
