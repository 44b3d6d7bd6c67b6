"""The routes of the OpenAI-compatible API: a request is parsed, its prompts go to a batcher, and the text goes back.

Responses are sent as one JSON object or as a stream of server-sent events. The wire format is in protocol.py, generation in
batching.py, loading in model_registry.py; server.py checks keys and hosts before requests come here.
"""

import asyncio
import base64
import hashlib
import json
import re
import secrets
import time
from collections.abc import AsyncIterator, Coroutine
from functools import partial
from importlib.resources import files
from typing import Any

import torch
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from lmforge import __version__
from lmforge.config.ranges import SEED
from lmforge.data.chat.messages import unread_variable
from lmforge.data.chat.tool_calls import AnswerReader, ToolCallFormat, marker_ids, tool_call_format
from lmforge.data.order import derive_key
from lmforge.errors import UserError
from lmforge.generate.engine import GenerationRequest
from lmforge.generate.prompts import PromptTooLong, check_room, encode_prompt, stop_string_ids
from lmforge.serve.batching import GenerationStream, TextDelta
from lmforge.serve.model_registry import ModelInfo, ModelRegistry, ServedModel
from lmforge.serve.protocol import (
    ApiError,
    ChatCompletionRequest,
    CompletionRequest,
    TokenLogprob,
    choice_object,
    no_such_model,
    parse_request,
)
from lmforge.serve.token_api import token_routes
from lmforge.untrusted import cut, parse_json

# How long a body may take to arrive; and how much of a body that is too large is read, in multiples of the limit, so that
# the client reads the refusal instead of a closed connection.
BODY_TIMEOUT_SECONDS = 30
MAX_DISCARDED_BODIES = 16


def create_app(registry: ModelRegistry, max_body_bytes: int, weight_updates: bool = False) -> Starlette:
    """The routes, for the models of a registry; `weight_updates`: also those of token_api.py that change weights."""

    async def health(request: Request) -> Response:
        running, waiting = registry.request_counts()
        return JSONResponse({"status": "ok", "version": __version__, "running": running, "waiting": waiting})

    async def models(request: Request) -> Response:
        infos = await asyncio.to_thread(registry.list_models)
        return JSONResponse({"object": "list", "data": [_model_object(info) for info in infos]})

    async def model(request: Request) -> Response:
        name = request.path_params["name"]
        for info in await asyncio.to_thread(registry.list_models):
            if info.name == name:
                return JSONResponse(_model_object(info))
        raise no_such_model(name)

    async def completions(request: Request) -> Response:
        body = parse_request(CompletionRequest, await read_json_body(request, max_body_bytes))
        served = await registry.get(body.model)
        return await _respond(request, body, served, await asyncio.to_thread(_encode_prompts, served, body))

    async def chat(request: Request) -> Response:
        body = parse_request(ChatCompletionRequest, await read_json_body(request, max_body_bytes))
        served = await registry.get(body.model)
        try:
            template = served.loaded.chat_template
        except UserError as problem:
            raise ApiError(400, f"{body.model}: {problem}; use /v1/completions to continue a text", param="model") from None
        if not (body.add_generation_prompt or body.continue_final_message):
            raise ApiError(400, "add_generation_prompt: false only with continue_final_message", param="add_generation_prompt")
        if name := unread_variable(body.template_variables, template.jinja_source):
            raise ApiError(400, f"{cut(name)}: the model's chat template reads no such variable", param="chat_template_kwargs")
        tools = [tool.model_dump(exclude_unset=True) | {"type": tool.type} for tool in body.tools] or None
        encode = partial(template.encode_prompt, tools=tools, variables=body.template_variables, is_request=True)
        prompt = await asyncio.to_thread(encode, body.messages, continue_final_message=body.continue_final_message)
        may_call = body.tools and body.tool_choice == "auto"
        call_format = await asyncio.to_thread(tool_call_format, template) if may_call else None
        return await _respond(request, body, served, [prompt], call_format)

    return Starlette(
        routes=[
            Route("/", chat_page(), methods=["GET"]),
            Route("/health", health),
            Route("/v1/models", models),
            Route("/v1/models/{name:path}", model),
            Route("/v1/completions", completions, methods=["POST"]),
            Route("/v1/chat/completions", chat, methods=["POST"]),
            *token_routes(registry, partial(read_json_body, max_bytes=max_body_bytes), weight_updates),
        ],
        exception_handlers=dict.fromkeys([ApiError, UserError, ClientDisconnect, 404, 405, Exception], _on_error),
    )


async def read_json_body(request: Request, max_bytes: int) -> dict[str, Any]:
    """The JSON object in the body of a request. Raises ApiError where it is too large, too late, or not a JSON object."""
    # Browsers let web pages elsewhere send other content types without asking the server first.
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise ApiError(415, "expected a body with the header Content-Type: application/json")
    content, seen = bytearray(), 0
    try:
        async with asyncio.timeout(BODY_TIMEOUT_SECONDS):
            async for chunk in request.stream():
                seen += len(chunk)
                if seen <= max_bytes:
                    content += chunk
                elif seen > MAX_DISCARDED_BODIES * max_bytes:
                    break
    except TimeoutError:
        raise ApiError(408, f"the body did not arrive within {BODY_TIMEOUT_SECONDS} seconds") from None
    if seen > max_bytes:
        raise ApiError(413, f"the body is larger than {max_bytes:,} bytes", code="body_too_large")
    return parse_json(bytes(content), dict[str, Any], "the body", max_bytes=max_bytes, error=partial(ApiError, 400))


def _model_object(info: ModelInfo) -> dict[str, Any]:
    return {"id": info.name, "object": "model", "created": info.created, "owned_by": "lmforge"}


def _encode_prompts(served: ServedModel, body: CompletionRequest) -> list[list[int]]:
    """Token ids of each prompt. Texts are put after the model's prefix ids, unless it is asked not to."""
    tokenizer = served.loaded.tokenizer
    prefix_ids = served.loaded.prefix_ids if body.add_special_tokens else []
    prompts = []
    for prompt in body.prompts:
        if isinstance(prompt, str):
            prompt = encode_prompt(tokenizer, prompt, prefix_ids, served.max_length)
        elif any(id >= tokenizer.vocab_size for id in prompt):
            raise ApiError(400, f"prompt: expected token ids below {tokenizer.vocab_size}", param="prompt")
        prompts.append(prompt)
    if not prompts or not all(prompts):
        raise ApiError(400, "prompt: expected at least one prompt, and at least one token in each list of ids", param="prompt")
    return prompts


async def _respond(
    request: Request,
    body: ChatCompletionRequest | CompletionRequest,
    served: ServedModel,
    prompts: list[list[int]],
    call_format: ToolCallFormat | None = None,
) -> Response:
    """`call_format`: of the tool calls that answers may have."""
    requests = _generation_requests(body, served, prompts)
    if len(requests) > served.batcher.max_batch_size:
        field = "n" if body.n > 1 else "prompt"
        message = f"{len(requests)} texts in one request, and this server generates at most {served.batcher.max_batch_size}"
        raise ApiError(400, f"{field}: {message}", param=field)
    tokenizer, echoes = served.loaded.tokenizer, list[str | None]()
    if isinstance(body, CompletionRequest):
        continued = [prompt != "" for prompt in body.prompts for _ in range(body.n)]
        if body.echo:
            decode = partial(tokenizer.decode, include_special_tokens=True)
            texts = [prompt if isinstance(prompt, str) else decode(prompt) for prompt in body.prompts]
            echoes = [text for text in texts for _ in range(body.n)]
    else:
        continued = [body.continue_final_message] * body.n
    stops = [*body.stop_strings, *served.loaded.stop_strings]
    shown = marker_ids(tokenizer) if call_format else frozenset[int]()
    stream = GenerationStream(served.batcher, tokenizer, requests, stops, continued, echoes, body.max_tokens == 0, shown)
    reply = _Reply(body, stream, sum(map(len, prompts)), [AnswerReader(call_format) for _ in requests])
    if body.stream:
        return _EventStreamResponse(reply.events(), stream)
    try:
        choices = await _unless_disconnected(request, reply.collect_choices())
    except ClientDisconnect:
        raise
    except Exception as problem:
        raise _engine_error(problem) from problem
    finally:
        stream.close()
    return JSONResponse(reply.object(choices) | {"usage": reply.usage})


def _generation_requests(
    body: ChatCompletionRequest | CompletionRequest, served: ServedModel, prompts: list[list[int]]
) -> list[GenerationRequest]:
    """`n` requests for each prompt, each with its own seed. Raises PromptTooLong."""
    chat = isinstance(body, ChatCompletionRequest)
    top, echo = body.num_top_logprobs, isinstance(body, CompletionRequest) and body.echo
    max_tokens = getattr(body, "max_completion_tokens", None) or body.max_tokens
    if max_tokens == 0 and not echo:
        raise ApiError(400, "max_tokens: 0 only with echo, for the log-probabilities of a prompt", param="max_tokens")
    seed = secrets.randbelow(SEED["le"]) if body.seed is None else body.seed
    top_k = None if body.top_k is None else max(0, body.top_k)
    try:
        given = {name: getattr(body, name) for name in ("temperature", "top_p", "min_p", "repetition_penalty")}
        sampling = served.loaded.sampling(1.0, top_k=top_k, **given)
    except UserError as problem:
        raise ApiError(400, str(problem), param="model") from None
    stop_ids = served.loaded.chat_stop_ids if chat else served.loaded.text_stop_ids
    stop_ids |= stop_string_ids(served.loaded.tokenizer, [*body.stop_strings, *served.loaded.stop_strings])
    requests: list[GenerationRequest] = []
    for prompt in prompts:
        room = check_room(len(prompt), served.max_length, max_tokens)
        if max_tokens is None:
            room = min(room, served.loaded.answer_length(len(prompt), room))
        for _ in range(body.n):
            own_seed = derive_key(seed, "choice", len(requests))
            scored = echo and top is not None
            requests.append(GenerationRequest(prompt, room, sampling, own_seed, stop_ids, top or 0, scored))
    return requests


class _Reply:
    """The response to a request: one JSON object, or a stream of events."""

    def __init__(
        self,
        body: ChatCompletionRequest | CompletionRequest,
        stream: GenerationStream,
        prompt_tokens: int,
        readers: list[AnswerReader],
    ) -> None:
        """`readers`: one for each choice."""
        self._body, self._stream, self._prompt_tokens, self._readers = body, stream, prompt_tokens, readers
        self._chat = isinstance(body, ChatCompletionRequest)
        prefix = "chatcmpl" if self._chat else "cmpl"
        self._head = {"id": f"{prefix}-{secrets.token_hex(12)}", "created": int(time.time()), "model": body.model}

    def object(self, choices: list[dict[str, Any]], chunk: bool = False) -> dict[str, Any]:
        """The whole response without its usage, or one event of a stream."""
        chat_type = "chat.completion.chunk" if chunk else "chat.completion"
        return {"object": chat_type if self._chat else "text_completion", **self._head, "choices": choices}

    @property
    def usage(self) -> dict[str, int]:
        """Token counts: each prompt once, and all generated tokens, stop tokens included."""
        prompt, completion = self._prompt_tokens, self._stream.num_generated_tokens
        return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}

    def _choice(self, deltas: list[TextDelta], delta: bool = False) -> dict[str, Any]:
        """A choice, or with `delta` a part of it, from what came of it."""
        index, ends = deltas[-1].choice_index, deltas[-1].finish_reason
        text, calls = self._readers[index].add("".join(each.text for each in deltas), ended=ends is not None)
        if not getattr(self._body, "parallel_tool_calls", True):
            calls = calls[:1]
        return choice_object(self._chat, index, text, self._logprobs(deltas), ends, calls, delta=delta)

    def _logprobs(self, deltas: list[TextDelta]) -> list[TokenLogprob] | None:
        return None if self._body.num_top_logprobs is None else [each for delta in deltas for each in delta.logprobs]

    async def collect_choices(self) -> list[dict[str, Any]]:
        deltas: list[list[TextDelta]] = [[] for _ in self._readers]
        async for delta in self._stream.deltas():
            deltas[delta.choice_index].append(delta)
        return [self._choice(each) for each in deltas]

    async def events(self) -> AsyncIterator[str]:
        """The lines of a stream. An error after its beginning is an error object in it."""
        include_usage = self._body.stream_options.include_usage
        no_usage = {"usage": None} if include_usage else {}
        if self._chat:
            for index in range(len(self._readers)):
                choice = choice_object(True, index, "", None, None, delta=True, first=True)
                yield _format_event(self.object([choice], chunk=True) | no_usage)
        try:
            async for delta in self._stream.deltas():
                yield _format_event(self.object([self._choice([delta], delta=True)], chunk=True) | no_usage)
        except Exception as problem:
            yield _format_event(_engine_error(problem).body)
            return
        if include_usage:
            yield _format_event(self.object([], chunk=True) | {"usage": self.usage})
        yield "data: [DONE]\n\n"


async def _unless_disconnected(request: Request, coroutine: Coroutine[Any, Any, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """The result of `coroutine`. Raises ClientDisconnect as soon as the client closes the connection."""
    work = asyncio.ensure_future(coroutine)
    disconnect = asyncio.ensure_future(request.receive())  # the body has been read: only a disconnect can come
    try:
        await asyncio.wait((work, disconnect), return_when=asyncio.FIRST_COMPLETED)
        if work.done():
            return await work
        raise ClientDisconnect
    finally:
        work.cancel()
        disconnect.cancel()


def _format_event(content: dict[str, Any]) -> str:
    return f"data: {json.dumps(content, ensure_ascii=False)}\n\n"


class _EventStreamResponse(StreamingResponse):
    """Server-sent events. Generation is cancelled when the response ends, whoever ended it."""

    def __init__(self, events: AsyncIterator[str], stream: GenerationStream) -> None:
        super().__init__(events, media_type="text/event-stream", headers={"cache-control": "no-store"})
        self._generation_stream = stream

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._generation_stream.close()


def _engine_error(error: Exception) -> ApiError:
    """The error of an engine in one line. Its traceback is on the server's stderr."""
    if isinstance(error, ApiError):  # the engine was stopped
        return error
    if isinstance(error, torch.OutOfMemoryError):
        message = "out of memory; serve with a smaller --max_batch_size or --max_length"
        return ApiError(503, message, error_type="server_error", code="memory")
    return ApiError(500, "generation failed; the server's stderr says why", error_type="server_error")


async def _on_error(request: Request, error: Exception) -> Response:
    """The response to what a route raised. The traceback of an internal error is on the server's stderr."""
    match error:
        case ClientDisconnect():
            return Response(status_code=499)
        case ApiError():
            refusal = error
        case PromptTooLong():
            param = "messages" if "/chat/" in request.url.path else "prompt"
            refusal = ApiError(400, str(error), param=param, code="context_length_exceeded")
        case UserError():
            refusal = ApiError(400, str(error))
        case HTTPException(status_code=status):
            message = "no such route" if status == 404 else "method not allowed"
            refusal = ApiError(status, f"{cut(request.method)} {cut(request.url.path)}: {message}")
        case _:
            refusal = ApiError(500, "internal error; the server's stderr says why", error_type="server_error")
    headers = {"retry-after": "1"} if refusal.status in (429, 503) else {}
    return JSONResponse(refusal.body, refusal.status, headers)


def chat_page() -> HTMLResponse:
    """The page: only its own style and script, identified by their hashes, may run."""
    text = (files("lmforge.serve") / "web" / "index.html").read_text("utf-8")
    hashes = {}
    for tag in ("style", "script"):
        [inline] = re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.S)
        hashes[tag] = base64.b64encode(hashlib.sha256(inline.encode()).digest()).decode()
    policy = (
        f"default-src 'none'; style-src 'sha256-{hashes['style']}'; script-src 'sha256-{hashes['script']}'; "
        "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    headers = {
        "content-security-policy": policy,
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
        "cache-control": "no-cache",
    }
    return HTMLResponse(text, headers=headers)
