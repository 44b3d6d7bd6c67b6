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
from lmforge.infer.engine import Engine, Request, Token
from lmforge.infer.protocol import Scored
from lmforge.infer.writing import Writer

# What is told of a token that could not have been drawn: JSON has no minus infinity.
LOWEST_LOGPROB = -9999.0


class Full(Exception):
    """As many requests are being written and wait as may."""


class Ended(Exception):
    """The model was given up, or the server stops: nothing more is written."""


@dataclass(eq=False)
class Ticket:
    """One request in a batcher: where its tokens go, and under which number the engine has it while it runs."""

    request: Request
    index: int
    inbox: "asyncio.Queue[tuple[int, Token | Exception]]"
    id: int | None = None


class Batcher:
    """The thread of one engine, and the requests that wait for a row of it, first come, first served."""

    def __init__(self, engine: Engine, *, waiting: int, loop: asyncio.AbstractEventLoop) -> None:
        """`waiting` is how many requests may wait beyond those that run; `loop` is the one that answers are read on."""
        self._engine = engine
        self._rows = engine.free
        self._most = self._rows + waiting
        self._loop = loop
        self._changed = threading.Condition()
        self._waiting: deque[Ticket] = deque()
        self._running: dict[int, Ticket] = {}
        self._leaving: list[Ticket] = []
        self._ended = False
        self._thread = threading.Thread(target=self._drive, name="batcher")
        self._thread.start()

    @property
    def rows(self) -> int:
        """Requests that are written at once."""
        return self._rows

    @property
    def counts(self) -> tuple[int, int]:
        """Requests that run, and that wait."""
        with self._changed:
            return len(self._running), len(self._waiting)

    @property
    def ended(self) -> bool:
        """Whether it takes no more requests: it was told to end, or its engine failed."""
        with self._changed:
            return self._ended

    def submit(self, tickets: Sequence[Ticket]) -> None:
        """Take requests in, all or none. Raises Full, and Ended."""
        with self._changed:
            if self._ended:
                raise Ended
            if len(self._running) + len(self._waiting) + len(tickets) > self._most:
                raise Full
            self._waiting.extend(tickets)
            self._changed.notify()

    def cancel(self, ticket: Ticket) -> None:
        """Write no more for a request, and free its row. What has ended already is left alone."""
        with self._changed:
            if ticket in self._waiting:
                self._waiting.remove(ticket)
            else:
                self._leaving.append(ticket)
            self._changed.notify()

    def end(self) -> None:
        """Tell all who wait for tokens that none will come, and take no more requests. The step under way is finished."""
        with self._changed:
            self._ended = True
            self._changed.notify()

    def join(self) -> None:
        """Wait until the thread has ended."""
        self._thread.join()

    def _drive(self) -> None:
        why: Exception = Ended()
        try:
            while self._exchange():
                news = [(self._running[token.request], token) for token in self._engine.step()]
                with self._changed:
                    for _, token in news:
                        if token.last:
                            del self._running[token.request]
                self._tell(news)
        except Exception as problem:
            # Out of memory, most often. What a step leaves half-way is not gone on with: who comes next opens the model anew.
            traceback.print_exc(file=sys.stderr)
            why = problem
        with self._changed:
            self._ended = True
            self._tell([(ticket, why) for ticket in self._running.values()] + [(ticket, Ended()) for ticket in self._waiting])
            self._running.clear()
            self._waiting.clear()

    def _exchange(self) -> bool:
        """Wait for something to do; let go who left and let in who waits. False once there is an end."""
        with self._changed:
            self._changed.wait_for(lambda: self._running or self._waiting or self._ended)
            for ticket in self._leaving:
                if ticket.id is not None and self._running.get(ticket.id) is ticket:
                    self._engine.cancel(ticket.id)
                    del self._running[ticket.id]
            self._leaving.clear()
            if self._ended:
                return False
            refused: list[tuple[Ticket, Exception]] = []
            while self._waiting and self._engine.free:
                ticket = self._waiting.popleft()
                try:
                    ticket.id = self._engine.add(ticket.request)
                    self._running[ticket.id] = ticket
                except Exception as problem:
                    refused.append((ticket, problem))
            self._tell(refused)
            return True

    def _tell(self, news: Sequence[tuple[Ticket, Token] | tuple[Ticket, Exception]]) -> None:
        if news:
            with suppress(RuntimeError):  # the loop is closed: nobody reads any more
                self._loop.call_soon_threadsafe(_hand_out, news)


def _hand_out(news: Sequence[tuple[Ticket, Token] | tuple[Ticket, Exception]]) -> None:
    for ticket, what in news:
        ticket.inbox.put_nowait((ticket.index, what))


@dataclass(frozen=True)
class Piece:
    """What became certain of one of several texts: its words, its tokens, and with the last piece why it ended."""

    index: int
    text: str
    scored: list[Scored]
    reason: str | None


class Answer:
    """Texts that are being written together: the choices of one request. Close it, however reading it ends."""

    def __init__(self, batcher: Batcher, tokenizer: Tokenizer, requests: Sequence[Request], stop: Sequence[str]) -> None:
        """Begin. Raises Full, and Ended."""
        self._batcher = batcher
        self._inbox: asyncio.Queue[tuple[int, Token | Exception]] = asyncio.Queue()
        self._tickets = [Ticket(request, index, self._inbox) for index, request in enumerate(requests)]
        self._open = set(range(len(requests)))
        self._texts = [_Text(tokenizer, stop) for _ in requests]
        batcher.submit(self._tickets)

    @property
    def written(self) -> int:
        """Tokens that were written, those included that ended a text."""
        return sum(len(text.writer.tokens) for text in self._texts)

    async def pieces(self) -> AsyncIterator[Piece]:
        """The texts as they come. Raises Ended, and whatever went wrong with the engine."""
        while self._open:
            await asyncio.sleep(0)  # a full inbox is no reason to keep the loop from others, such as news of who left
            index, token = await self._inbox.get()
            if isinstance(token, Exception):
                raise token
            if index not in self._open:
                continue  # came when a stop text had ended it already
            piece = self._texts[index].add(index, token)
            if piece.reason:
                self._open.discard(index)
                if token.last is None:
                    self._batcher.cancel(self._tickets[index])
            if piece.text or piece.reason:
                yield piece

    def close(self) -> None:
        """Give up what is not finished."""
        for index in self._open:
            self._batcher.cancel(self._tickets[index])
        self._open.clear()


class _Text:
    """One text, and those of its tokens whose words are not certain yet."""

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str]) -> None:
        self.writer = Writer(tokenizer, stop)
        self._tokenizer = tokenizer
        self._held: list[Scored] = []
        self._told = 0

    def add(self, index: int, token: Token) -> Piece:
        offset = len(self.writer.text)
        text = self.writer.add(token.id, ends=token.last == "stop")
        if token.last != "stop":
            top = [(self._tokenizer.piece(id), max(logprob, LOWEST_LOGPROB)) for id, logprob in token.top]
            logprob = max(token.logprob, LOWEST_LOGPROB)
            self._held.append(Scored(self._tokenizer.piece(token.id), logprob, top, offset))
        reason = self.writer.reason
        if reason is None and token.last:
            text, reason = text + self.writer.finish(), "length"
        self._told += len(text)
        # Of tokens that a stop text cut off nothing is told; of others, at the end, all is, such as have no text of their own.
        whole = token.last == "stop" or reason == "length"
        sure = [scored for scored in self._held if whole or scored.offset < self._told]
        self._held = self._held[len(sure) :]
        return Piece(index, text, sure, reason)
