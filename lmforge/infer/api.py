"""The addresses of the OpenAI-compatible API: a request is checked, becomes prompts for a batcher, and is answered.

Answers go out whole or as a stream of server-sent events. The wire format is `protocol.py`'s, the writing `batching.py`'s,
the models `shelf.py`'s; who is let in is `guard.py`'s.
"""

import asyncio
import json
import secrets
from collections.abc import AsyncIterator, Coroutine
from typing import Any

import torch
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from lmforge import __version__
from lmforge.config import LARGEST_SEED
from lmforge.data.order import key
from lmforge.errors import Mistake
from lmforge.infer import engine
from lmforge.infer.batching import Answer, Ended, Full, Piece
from lmforge.infer.guard import read_limited
from lmforge.infer.page import page
from lmforge.infer.protocol import ChatAsked, CompletionAsked, Heading, Refusal, read_body, usage
from lmforge.infer.sampling import Sampling
from lmforge.infer.shelf import Offer, OnShelf, Shelf
from lmforge.infer.writing import prompt_ids

STOPPING = Refusal(503, "the server is stopping, or gave this model up; ask again", kind="server_error", code="stopping")


def application(shelf: Shelf, max_body_bytes: int) -> Starlette:
    """The routes, over the models of a shelf."""

    async def health(request: Request) -> Response:
        running, waiting = shelf.counts()
        return JSONResponse({"status": "ok", "version": __version__, "running": running, "waiting": waiting})

    async def models(request: Request) -> Response:
        offers = await asyncio.to_thread(shelf.offers)
        return JSONResponse({"object": "list", "data": [_described(offer) for offer in offers]})

    async def model(request: Request) -> Response:
        name = request.path_params["name"]
        for offer in await asyncio.to_thread(shelf.offers):
            if offer.name == name:
                return JSONResponse(_described(offer))
        raise Refusal(404, f"{name}: no such model; GET /v1/models lists them", param="model", code="model_not_found")

    async def completions(request: Request) -> Response:
        asked = read_body(CompletionAsked, await read_limited(request, max_body_bytes))
        held = await shelf.get(asked.model)
        return await _answer(request, asked, held, await asyncio.to_thread(_prompts, held, asked))

    async def chat(request: Request) -> Response:
        asked = read_body(ChatAsked, await read_limited(request, max_body_bytes))
        held = await shelf.get(asked.model)
        if isinstance(held.template, Mistake):
            raise Refusal(400, f"{asked.model}: {held.template}; /v1/completions continues a text with it", param="model")
        prompt = await asyncio.to_thread(held.template.prompt, asked.messages)
        return await _answer(request, asked, held, [prompt])

    return Starlette(
        routes=[
            Route("/", page),
            Route("/health", health),
            Route("/v1/models", models),
            Route("/v1/models/{name:path}", model),
            Route("/v1/completions", completions, methods=["POST"]),
            Route("/v1/chat/completions", chat, methods=["POST"]),
        ],
        exception_handlers={
            Refusal: _refused,
            Mistake: _mistaken,
            Ended: _ended,
            ClientDisconnect: _left,
            404: _unknown_place,
            405: _unknown_place,
            Exception: _failed,
        },
    )


def _described(offer: Offer) -> dict[str, Any]:
    return {"id": offer.name, "object": "model", "created": offer.created, "owned_by": "lmforge"}


def _prompts(held: OnShelf, asked: CompletionAsked) -> list[list[int]]:
    """Token ids of each prompt; a text is put after what the model's texts begin with."""
    tokenizer = held.opened.tokenizer
    prompts = []
    for prompt in asked.prompts:
        if isinstance(prompt, str):
            prompts.append(prompt_ids(tokenizer, prompt, held.opened.opening))
        else:
            if any(id >= tokenizer.vocab_size for id in prompt):
                raise Refusal(400, f"prompt: token ids of this model are below {tokenizer.vocab_size}", param="prompt")
            prompts.append(prompt)
    if not prompts or not all(prompts):
        raise Refusal(400, "prompt: expected at least one prompt, and at least one token in each list of ids", param="prompt")
    return prompts


async def _answer(request: Request, asked: ChatAsked | CompletionAsked, held: OnShelf, prompts: list[list[int]]) -> Response:
    requests = _requests(asked, held, prompts)
    if len(requests) > held.batcher.rows:
        message = f"n: {len(requests)} texts in one request, and this server writes at most {held.batcher.rows} at once"
        raise Refusal(400, message, param="n")
    try:
        answer = Answer(held.batcher, held.opened.tokenizer, requests, asked.stops)
    except Full:
        message = "as many requests are being answered, and wait, as this server takes; try again later"
        raise Refusal(429, message, kind="rate_limit_error", code="too_many_requests") from None
    chat = isinstance(asked, ChatAsked)
    heading = Heading(chat, asked.model, f"{'chatcmpl' if chat else 'cmpl'}-{secrets.token_hex(12)}")
    prompt_tokens = sum(map(len, prompts))
    scores = asked.top_logprobs_asked is not None
    if asked.stream:
        return _Stream(_events(heading, answer, asked, scores, prompt_tokens, len(requests)), answer)
    try:
        choices = await _unless_left(request, _collect(heading, answer, scores, len(requests)))
    except (Ended, Refusal, ClientDisconnect):
        raise
    except Exception as problem:
        raise _broken(problem) from problem
    finally:
        answer.close()
    return JSONResponse(heading.whole(choices, usage(prompt_tokens, answer.written)))


def _requests(asked: ChatAsked | CompletionAsked, held: OnShelf, prompts: list[list[int]]) -> list[engine.Request]:
    """`n` requests for each prompt, each with a seed of its own. Raises Refusal where one does not fit."""
    limit = asked.max_tokens
    if isinstance(asked, ChatAsked):
        limit = asked.max_completion_tokens or asked.max_tokens
    seed = secrets.randbelow(LARGEST_SEED) if asked.seed is None else asked.seed
    sampling = Sampling(asked.temperature, asked.top_k, asked.top_p)
    ends = held.ends_of_answers if isinstance(asked, ChatAsked) else held.ends
    requests: list[engine.Request] = []
    for prompt in prompts:
        room = held.max_length - len(prompt)
        if room < (limit or 1):
            wanted = f" and {limit} to write" if limit else ", which leaves no room for an answer"
            message = f"this model reads at most {held.max_length} tokens, and was given {len(prompt)}{wanted}"
            raise Refusal(
                400, message, param="messages" if isinstance(asked, ChatAsked) else "prompt", code="context_length_exceeded"
            )
        for _ in range(asked.n):
            requests.append(
                engine.Request(
                    prompt=prompt,
                    max_tokens=limit or room,
                    sampling=sampling,
                    seed=key(seed, "choice", len(requests)),
                    stop_ids=ends,
                    top_logprobs=asked.top_logprobs_asked or 0,
                )
            )
    return requests


async def _collect(heading: Heading, answer: Answer, scores: bool, count: int) -> list[dict[str, Any]]:
    pieces: list[list[Piece]] = [[] for _ in range(count)]
    async for piece in answer.pieces():
        pieces[piece.index].append(piece)
    choices = []
    for index, each in enumerate(pieces):
        scored = [token for piece in each for token in piece.scored] if scores else None
        choices.append(heading.choice(index, "".join(piece.text for piece in each), scored, each[-1].reason))
    return choices


async def _unless_left(request: Request, collecting: Coroutine[Any, Any, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """What `collecting` returns, unless whoever asked goes away meanwhile: then ClientDisconnect."""
    work = asyncio.ensure_future(collecting)
    leaving = asyncio.ensure_future(request.receive())  # the body has been read: only the end of the connection can come
    try:
        await asyncio.wait((work, leaving), return_when=asyncio.FIRST_COMPLETED)
        if work.done():
            return await work
        raise ClientDisconnect
    finally:
        work.cancel()
        leaving.cancel()


async def _events(
    heading: Heading, answer: Answer, asked: ChatAsked | CompletionAsked, scores: bool, prompt_tokens: int, count: int
) -> AsyncIterator[str]:
    """The lines of a stream. What goes wrong once it has begun is told in it, as an error object."""
    counted = asked.stream_options.include_usage
    none = {"usage": None} if counted else {}
    if heading.chat:
        for index in range(count):
            yield _event(heading.chunk([heading.choice(index, "", None, None, delta=True, first=True)]) | none)
    try:
        async for piece in answer.pieces():
            scored = piece.scored if scores else None
            yield _event(heading.chunk([heading.choice(piece.index, piece.text, scored, piece.reason, delta=True)]) | none)
    except Ended:
        yield _event(STOPPING.body)
        return
    except Exception as problem:
        yield _event(_broken(problem).body)
        return
    if counted:
        yield _event(heading.chunk([]) | {"usage": usage(prompt_tokens, answer.written)})
    yield "data: [DONE]\n\n"


def _event(content: dict[str, Any]) -> str:
    return f"data: {json.dumps(content, ensure_ascii=False)}\n\n"


class _Stream(StreamingResponse):
    """Server-sent events of an answer, which is given up when the stream ends, whoever ended it."""

    def __init__(self, events: AsyncIterator[str], answer: Answer) -> None:
        super().__init__(events, media_type="text/event-stream", headers={"cache-control": "no-store"})
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._answer.close()


def _broken(problem: Exception) -> Refusal:
    """What went wrong with an engine, in one line; its traceback is in the server's own output."""
    if isinstance(problem, torch.OutOfMemoryError):
        return Refusal(
            503, "out of memory; serve with fewer --rows or a smaller --max_length", kind="server_error", code="memory"
        )
    return Refusal(500, "the model failed to write; the server's output says why", kind="server_error")


async def _refused(request: Request, problem: Exception) -> Response:
    assert isinstance(problem, Refusal)
    headers = {"retry-after": "1"} if problem.status in (429, 503) else {}
    return JSONResponse(problem.body, problem.status, headers)


async def _mistaken(request: Request, problem: Exception) -> Response:
    return await _refused(request, Refusal(400, str(problem)))


async def _ended(request: Request, problem: Exception) -> Response:
    return await _refused(request, STOPPING)


async def _left(request: Request, problem: Exception) -> Response:
    return Response(status_code=499)  # nobody reads it


async def _unknown_place(request: Request, problem: Exception) -> Response:
    status = getattr(problem, "status_code", 404)
    what = "no such address" if status == 404 else f"not by {request.method}"
    return await _refused(request, Refusal(status, f"{request.method} {request.url.path}: {what}"))


async def _failed(request: Request, problem: Exception) -> Response:
    return await _refused(request, Refusal(500, "the server failed; its output says why", kind="server_error"))
