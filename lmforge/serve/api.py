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
from lmforge.config.sections import LARGEST_SEED
from lmforge.data.order import derive_key
from lmforge.errors import UserError
from lmforge.generate import engine
from lmforge.generate.sampling import SamplingParams
from lmforge.generate.text_streamer import encode_prompt
from lmforge.serve.auth import read_json_body
from lmforge.serve.batching import EngineStopped, GenerationStream, QueueFull, TextDelta
from lmforge.serve.model_registry import ModelInfo, ModelRegistry, ServedModel
from lmforge.serve.page import chat_page
from lmforge.serve.protocol import (
    ApiError,
    ChatCompletionRequest,
    CompletionRequest,
    ResponseBuilder,
    parse_request,
    token_usage,
)

STOPPING_ERROR = ApiError(
    503, "the server is stopping, or gave this model up; ask again", error_type="server_error", code="stopping"
)


def create_app(registry: ModelRegistry, max_body_bytes: int) -> Starlette:
    """The routes, over the models of a shelf."""

    async def health(request: Request) -> Response:
        running, waiting = registry.request_counts()
        return JSONResponse({"status": "ok", "version": __version__, "running": running, "waiting": waiting})

    async def models(request: Request) -> Response:
        offers = await asyncio.to_thread(registry.list_models)
        return JSONResponse({"object": "list", "data": [_model_object(offer) for offer in offers]})

    async def model(request: Request) -> Response:
        name = request.path_params["name"]
        for offer in await asyncio.to_thread(registry.list_models):
            if offer.name == name:
                return JSONResponse(_model_object(offer))
        raise ApiError(404, f"{name}: no such model; GET /v1/models lists them", param="model", code="model_not_found")

    async def completions(request: Request) -> Response:
        asked = parse_request(CompletionRequest, await read_json_body(request, max_body_bytes))
        held = await registry.get(asked.model)
        return await _respond(request, asked, held, await asyncio.to_thread(_encode_prompts, held, asked))

    async def chat(request: Request) -> Response:
        asked = parse_request(ChatCompletionRequest, await read_json_body(request, max_body_bytes))
        held = await registry.get(asked.model)
        if isinstance(held.chat_template, UserError):
            raise ApiError(400, f"{asked.model}: {held.chat_template}; /v1/completions continues a text with it", param="model")
        prompt = await asyncio.to_thread(held.chat_template.encode_prompt, asked.messages)
        return await _respond(request, asked, held, [prompt])

    return Starlette(
        routes=[
            Route("/", chat_page),
            Route("/health", health),
            Route("/v1/models", models),
            Route("/v1/models/{name:path}", model),
            Route("/v1/completions", completions, methods=["POST"]),
            Route("/v1/chat/completions", chat, methods=["POST"]),
        ],
        exception_handlers={
            ApiError: _on_api_error,
            UserError: _on_user_error,
            EngineStopped: _on_engine_stopped,
            ClientDisconnect: _on_disconnect,
            404: _on_unknown_route,
            405: _on_unknown_route,
            Exception: _on_unexpected_error,
        },
    )


def _model_object(info: ModelInfo) -> dict[str, Any]:
    return {"id": info.name, "object": "model", "created": info.created, "owned_by": "lmforge"}


def _encode_prompts(served: ServedModel, body: CompletionRequest) -> list[list[int]]:
    """Token ids of each prompt; a text is put after what the model's texts begin with."""
    tokenizer = served.loaded.tokenizer
    prompts = []
    for prompt in body.prompts:
        if isinstance(prompt, str):
            prompts.append(encode_prompt(tokenizer, prompt, served.loaded.prefix_ids))
        else:
            if any(id >= tokenizer.vocab_size for id in prompt):
                raise ApiError(400, f"prompt: token ids of this model are below {tokenizer.vocab_size}", param="prompt")
            prompts.append(prompt)
    if not prompts or not all(prompts):
        raise ApiError(400, "prompt: expected at least one prompt, and at least one token in each list of ids", param="prompt")
    return prompts


async def _respond(
    request: Request, body: ChatCompletionRequest | CompletionRequest, served: ServedModel, prompts: list[list[int]]
) -> Response:
    requests = _generation_requests(body, served, prompts)
    if len(requests) > served.batcher.max_batch_size:
        message = (
            f"n: {len(requests)} texts in one request, and this server writes at most {served.batcher.max_batch_size} at once"
        )
        raise ApiError(400, message, param="n")
    try:
        answer = GenerationStream(served.batcher, served.loaded.tokenizer, requests, body.stop_strings)
    except QueueFull:
        message = "as many requests are being answered, and wait, as this server takes; try again later"
        raise ApiError(429, message, error_type="rate_limit_error", code="too_many_requests") from None
    chat = isinstance(body, ChatCompletionRequest)
    heading = ResponseBuilder(chat, body.model, f"{'chatcmpl' if chat else 'cmpl'}-{secrets.token_hex(12)}")
    prompt_tokens = sum(map(len, prompts))
    scores = body.num_top_logprobs is not None
    if body.stream:
        return _EventStreamResponse(_stream_events(heading, answer, body, scores, prompt_tokens, len(requests)), answer)
    try:
        choices = await _unless_disconnected(request, _collect_choices(heading, answer, scores, len(requests)))
    except (EngineStopped, ApiError, ClientDisconnect):
        raise
    except Exception as problem:
        raise _engine_error(problem) from problem
    finally:
        answer.close()
    return JSONResponse(heading.response(choices, token_usage(prompt_tokens, answer.num_generated_tokens)))


def _generation_requests(
    body: ChatCompletionRequest | CompletionRequest, served: ServedModel, prompts: list[list[int]]
) -> list[engine.GenerationRequest]:
    """`n` requests for each prompt, each with a seed of its own. Raises Refusal where one does not fit."""
    limit = body.max_tokens
    if isinstance(body, ChatCompletionRequest):
        limit = body.max_completion_tokens or body.max_tokens
    seed = secrets.randbelow(LARGEST_SEED) if body.seed is None else body.seed
    sampling = SamplingParams(body.temperature, body.top_k, body.top_p)
    ends = served.chat_stop_token_ids if isinstance(body, ChatCompletionRequest) else served.stop_token_ids
    requests: list[engine.GenerationRequest] = []
    for prompt in prompts:
        room = served.max_length - len(prompt)
        if room < (limit or 1):
            wanted = f" and {limit} to write" if limit else ", which leaves no room for an answer"
            message = f"this model reads at most {served.max_length} tokens, and was given {len(prompt)}{wanted}"
            raise ApiError(
                400,
                message,
                param="messages" if isinstance(body, ChatCompletionRequest) else "prompt",
                code="context_length_exceeded",
            )
        for _ in range(body.n):
            requests.append(
                engine.GenerationRequest(
                    prompt_ids=prompt,
                    max_tokens=limit or room,
                    sampling=sampling,
                    seed=derive_key(seed, "choice", len(requests)),
                    stop_token_ids=ends,
                    top_logprobs=body.num_top_logprobs or 0,
                )
            )
    return requests


async def _collect_choices(
    builder: ResponseBuilder, stream: GenerationStream, with_logprobs: bool, num_choices: int
) -> list[dict[str, Any]]:
    pieces: list[list[TextDelta]] = [[] for _ in range(num_choices)]
    async for piece in stream.deltas():
        pieces[piece.choice_index].append(piece)
    choices = []
    for index, each in enumerate(pieces):
        scored = [token for piece in each for token in piece.logprobs] if with_logprobs else None
        choices.append(builder.choice(index, "".join(piece.text for piece in each), scored, each[-1].finish_reason))
    return choices


async def _unless_disconnected(request: Request, coroutine: Coroutine[Any, Any, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """What `collecting` returns, unless whoever asked goes away meanwhile: then ClientDisconnect."""
    work = asyncio.ensure_future(coroutine)
    leaving = asyncio.ensure_future(request.receive())  # the body has been read: only the end of the connection can come
    try:
        await asyncio.wait((work, leaving), return_when=asyncio.FIRST_COMPLETED)
        if work.done():
            return await work
        raise ClientDisconnect
    finally:
        work.cancel()
        leaving.cancel()


async def _stream_events(
    builder: ResponseBuilder,
    stream: GenerationStream,
    body: ChatCompletionRequest | CompletionRequest,
    with_logprobs: bool,
    prompt_tokens: int,
    num_choices: int,
) -> AsyncIterator[str]:
    """The lines of a stream. What goes wrong once it has begun is told in it, as an error object."""
    counted = body.stream_options.include_usage
    none = {"usage": None} if counted else {}
    if builder.chat:
        for index in range(num_choices):
            yield _format_event(builder.chunk([builder.choice(index, "", None, None, delta=True, first=True)]) | none)
    try:
        async for piece in stream.deltas():
            scored = piece.logprobs if with_logprobs else None
            yield _format_event(
                builder.chunk([builder.choice(piece.choice_index, piece.text, scored, piece.finish_reason, delta=True)]) | none
            )
    except EngineStopped:
        yield _format_event(STOPPING_ERROR.body)
        return
    except Exception as problem:
        yield _format_event(_engine_error(problem).body)
        return
    if counted:
        yield _format_event(builder.chunk([]) | {"usage": token_usage(prompt_tokens, stream.num_generated_tokens)})
    yield "data: [DONE]\n\n"


def _format_event(content: dict[str, Any]) -> str:
    return f"data: {json.dumps(content, ensure_ascii=False)}\n\n"


class _EventStreamResponse(StreamingResponse):
    """Server-sent events of an answer, which is given up when the stream ends, whoever ended it."""

    def __init__(self, events: AsyncIterator[str], stream: GenerationStream) -> None:
        super().__init__(events, media_type="text/event-stream", headers={"cache-control": "no-store"})
        self._generation_stream = stream

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._generation_stream.close()


def _engine_error(error: Exception) -> ApiError:
    """What went wrong with an engine, in one line; its traceback is in the server's own output."""
    if isinstance(error, torch.OutOfMemoryError):
        return ApiError(
            503, "out of memory; serve with fewer --rows or a smaller --max_length", error_type="server_error", code="memory"
        )
    return ApiError(500, "the model failed to write; the server's output says why", error_type="server_error")


async def _on_api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    headers = {"retry-after": "1"} if error.status in (429, 503) else {}
    return JSONResponse(error.body, error.status, headers)


async def _on_user_error(request: Request, error: Exception) -> Response:
    return await _on_api_error(request, ApiError(400, str(error)))


async def _on_engine_stopped(request: Request, error: Exception) -> Response:
    return await _on_api_error(request, STOPPING_ERROR)


async def _on_disconnect(request: Request, error: Exception) -> Response:
    return Response(status_code=499)  # nobody reads it


async def _on_unknown_route(request: Request, error: Exception) -> Response:
    status = getattr(error, "status_code", 404)
    what = "no such address" if status == 404 else f"not by {request.method}"
    return await _on_api_error(request, ApiError(status, f"{request.method} {request.url.path}: {what}"))


async def _on_unexpected_error(request: Request, error: Exception) -> Response:
    return await _on_api_error(request, ApiError(500, "the server failed; its output says why", error_type="server_error"))
