"""The routes of the OpenAI-compatible API.

A request is parsed, its prompts go to a batcher, and the text goes back. Responses are sent as one
JSON object or as a stream of server-sent events. The wire format is in protocol.py, generation in
batching.py, loading in model_registry.py; server.py checks keys and hosts before requests come
here.
"""

import asyncio
import base64
import hashlib
import json
import re
import secrets
import time
from collections.abc import AsyncIterator, Callable
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
from lmforge.core.data.order import derive_key
from lmforge.core.errors import UserError
from lmforge.core.files.untrusted import cut, parse_json
from lmforge.core.options.ranges import SEED
from lmforge.serve.batching import ChoiceStream, GenerationStream, TextDelta
from lmforge.serve.decoding.engine import GenerationRequest
from lmforge.serve.decoding.prompts import PromptTooLong, check_room, encode_prompt, stop_string_ids
from lmforge.serve.decoding.text_streamer import TextStreamer
from lmforge.serve.model_registry import ModelInfo, ModelRegistry, ServedModel
from lmforge.serve.protocol import (
    ApiError,
    ChatCompletionRequest,
    CompletionRequest,
    choice_object,
    no_such_model,
    parse_request,
)
from lmforge.serve.token_api import T, token_routes, unless_disconnected
from lmforge.text.chat.messages import unread_variable
from lmforge.text.chat.tool_calls import AnswerReader, ToolCallFormat, marker_ids, tool_call_format

# The time that a body may take to arrive; and the part of a body that is too large which is read,
# in multiples of the limit, so that the client reads the refusal instead of a closed connection.
BODY_TIMEOUT_SECONDS = 30
MAX_DISCARDED_BODIES = 16
# More of them at once, as of a prompt, are made into JSON in a thread.
MANY_LOGPROBS = 100

AnyRequest = ChatCompletionRequest | CompletionRequest
# The ids of each prompt, and the format of the tool calls that answers may have.
Encode = Callable[[ServedModel, Any], tuple[list[list[int]], ToolCallFormat | None]]


def create_app(
    registry: ModelRegistry, max_body_bytes: int, weight_updates: bool = False
) -> Starlette:
    """The routes, for the models of a registry.

    weight_updates: also those of token_api.py that change weights.
    """

    async def health(request: Request) -> Response:
        running, waiting = registry.request_counts()
        return JSONResponse(
            {"status": "ok", "version": __version__, "running": running, "waiting": waiting}
        )

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
        return await answer(request, CompletionRequest, _encode_prompts)

    async def chat(request: Request) -> Response:
        return await answer(request, ChatCompletionRequest, _encode_messages)

    async def answer(request: Request, request_type: type[AnyRequest], encode: Encode) -> Response:
        body = await read_json_body(request, partial(parse_request, request_type), max_body_bytes)
        return await _respond(request, body, await registry.get(body.model), encode)

    return Starlette(
        routes=[
            Route("/", chat_page(), methods=["GET"]),
            Route("/health", health),
            Route("/v1/models", models),
            Route("/v1/models/{name:path}", model),
            Route("/v1/completions", completions, methods=["POST"]),
            Route("/v1/chat/completions", chat, methods=["POST"]),
            *token_routes(
                registry, partial(read_json_body, max_bytes=max_body_bytes), weight_updates
            ),
        ],
        exception_handlers=dict.fromkeys(
            [ApiError, UserError, ClientDisconnect, 404, 405, Exception], _on_error
        ),
    )


async def read_json_body(
    request: Request, parse: Callable[[dict[str, Any]], T], max_bytes: int
) -> T:
    """The JSON object in the body of a request, as `parse` reads it.

    It is read in a thread, since a large one takes long. Raises ApiError where the body is too
    large, too late, or not a JSON object, and what `parse` raises.
    """
    # Browsers let web pages elsewhere send other content types without asking the server first.
    content_type, _, _ = request.headers.get("content-type", "").partition(";")
    if content_type.strip().lower() != "application/json":
        raise ApiError(415, "expected a body with the header Content-Type: application/json")
    content = bytearray()
    seen = 0
    try:
        async with asyncio.timeout(BODY_TIMEOUT_SECONDS):
            async for chunk in request.stream():
                seen += len(chunk)
                if seen <= max_bytes:
                    content += chunk
                elif seen > MAX_DISCARDED_BODIES * max_bytes:
                    break
    except TimeoutError:
        raise ApiError(
            408, f"the body did not arrive within {BODY_TIMEOUT_SECONDS} seconds"
        ) from None
    if seen > max_bytes:
        raise ApiError(413, f"the body is larger than {max_bytes:,} bytes", code="body_too_large")
    read = partial(parse_json, max_bytes=max_bytes, error=partial(ApiError, 400))
    return await asyncio.to_thread(lambda: parse(read(bytes(content), dict[str, Any], "the body")))


def _model_object(info: ModelInfo) -> dict[str, Any]:
    return {"id": info.name, "object": "model", "created": info.created, "owned_by": "lmforge"}


def _encode_prompts(served: ServedModel, body: CompletionRequest) -> tuple[list[list[int]], None]:
    """Token ids of each prompt.

    Texts are put after the model's prefix ids, unless it is asked not to.
    """
    prefix_ids = served.loaded.prefix_ids if body.add_special_tokens else []
    encode = partial(
        encode_prompt, served.loaded.tokenizer, prefix_ids=prefix_ids, max_length=served.max_length
    )
    prompts = [encode(prompt) if isinstance(prompt, str) else prompt for prompt in body.prompts]
    if not prompts or not all(prompts):
        raise ApiError(
            400,
            "prompt: expected at least one prompt, and at least one token in each list of ids",
            param="prompt",
        )
    return prompts, None


def _encode_messages(
    served: ServedModel, body: ChatCompletionRequest
) -> tuple[list[list[int]], ToolCallFormat | None]:
    """Token ids of the one prompt, and the format of the tool calls that answers may have."""
    try:
        template = served.loaded.chat_template
    except UserError as problem:
        raise ApiError(
            400, f"{body.model}: {problem}; use /v1/completions to continue a text", param="model"
        ) from None
    if not (body.add_generation_prompt or body.continue_final_message):
        raise ApiError(
            400,
            "add_generation_prompt: false only with continue_final_message",
            param="add_generation_prompt",
        )
    unread = unread_variable(body.template_variables, template.jinja_source)
    if unread:
        raise ApiError(
            400,
            f"{cut(unread)}: the model's chat template reads no such variable",
            param="chat_template_kwargs",
        )
    tools = [tool.model_dump(exclude_unset=True) | {"type": tool.type} for tool in body.tools]
    prompt = template.encode_prompt(
        body.messages,
        tools or None,
        continue_final_message=body.continue_final_message,
        variables=body.template_variables,
        is_request=True,
    )
    if not tools or body.tool_choice != "auto":
        return [prompt], None
    return [prompt], tool_call_format(template)


async def _respond(
    request: Request, body: AnyRequest, served: ServedModel, encode: Encode
) -> Response:
    count = body.n
    if isinstance(body, CompletionRequest):
        count *= len(body.prompts)
    if count > served.batcher.max_batch_size:
        field = "n" if body.n > 1 else "prompt"
        message = (
            f"{field}: {count} texts in one request, and this server generates at most"
            f" {served.batcher.max_batch_size}"
        )
        raise ApiError(400, message, param=field)
    choices, call_format = await asyncio.to_thread(_prepare, served, body, encode)
    stream = GenerationStream(served.batcher, choices)
    prompt_tokens = sum(len(choice.request.prompt_ids) for choice in choices[:: body.n])
    reply = _Reply(body, stream, prompt_tokens, [AnswerReader(call_format) for _ in choices])
    if body.stream:
        return _EventStreamResponse(reply.events(), stream)
    try:
        deltas = await unless_disconnected(request, reply.collect_deltas())
    except ClientDisconnect:
        raise
    except Exception as problem:
        raise _engine_error(problem) from problem
    finally:
        stream.close()
    return await asyncio.to_thread(reply.whole, deltas)


def _prepare(
    served: ServedModel, body: AnyRequest, encode: Encode
) -> tuple[list[ChoiceStream], ToolCallFormat | None]:
    """`n` choices for each prompt, each with its own seed, and the format of their calls.

    Raises ApiError and UserError.
    """
    loaded = served.loaded
    tokenizer = served.loaded.tokenizer
    completion = body if isinstance(body, CompletionRequest) else None
    top = body.num_top_logprobs
    echo = completion is not None and completion.echo
    max_tokens = getattr(body, "max_completion_tokens", None) or body.max_tokens
    if max_tokens == 0 and not echo:
        raise ApiError(
            400,
            "max_tokens: 0 only with echo, for the log-probabilities of a prompt",
            param="max_tokens",
        )
    seed = secrets.randbelow(SEED["le"]) if body.seed is None else body.seed
    try:
        sampling = loaded.sampling(
            1.0,
            temperature=body.temperature,
            top_k=None if body.top_k is None else max(0, body.top_k),
            top_p=body.top_p,
            min_p=body.min_p,
            repetition_penalty=body.repetition_penalty,
        )
    except UserError as problem:
        raise ApiError(400, str(problem), param="model") from None
    prompts, call_format = encode(served, body)
    shown = marker_ids(tokenizer) if call_format else frozenset[int]()
    stops = [*body.stop_strings, *loaded.stop_strings]
    stop_ids = loaded.text_stop_ids if completion else loaded.chat_stop_ids
    stop_ids |= stop_string_ids(tokenizer, stops)
    choices: list[ChoiceStream] = []
    for number, prompt in enumerate(prompts):
        served.check_ids(prompt, "prompt" if completion else "messages")
        room = check_room(len(prompt), served.max_length, max_tokens)
        if max_tokens is None:
            room = min(room, loaded.answer_length(len(prompt), room))
        text: Any = completion.prompts[number] if completion else ""
        continues = getattr(body, "continue_final_message", text != "")
        if echo and not isinstance(text, str):
            text = tokenizer.decode(prompt, include_special_tokens=True)
        for _ in range(body.n):
            own_seed = derive_key(seed, "choice", len(choices))
            scored = echo and top is not None
            generation = GenerationRequest(
                prompt, room, sampling, own_seed, stop_ids, top or 0, scored
            )
            streamer = TextStreamer(tokenizer, stops, continues, shown)
            echoed = text if echo else None
            choices.append(ChoiceStream(streamer, tokenizer, generation, echoed, max_tokens == 0))
    return choices, call_format


class _Reply:
    """The response to a request: one JSON object, or a stream of events."""

    def __init__(
        self,
        body: AnyRequest,
        stream: GenerationStream,
        prompt_tokens: int,
        readers: list[AnswerReader],
    ) -> None:
        """`readers`: one for each choice."""
        self._body = body
        self._stream = stream
        self._prompt_tokens = prompt_tokens
        self._readers = readers
        self._chat = isinstance(body, ChatCompletionRequest)
        prefix = "chatcmpl" if self._chat else "cmpl"
        self._head = {
            "id": f"{prefix}-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": body.model,
        }

    def object(self, choices: list[dict[str, Any]], chunk: bool = False) -> dict[str, Any]:
        """The whole response without its usage, or one event of a stream."""
        name = "text_completion"
        if self._chat:
            name = "chat.completion.chunk" if chunk else "chat.completion"
        return {"object": name, **self._head, "choices": choices}

    @property
    def usage(self) -> dict[str, int]:
        """Token counts: each prompt once, and all generated tokens, stop tokens included."""
        prompt = self._prompt_tokens
        completion = self._stream.num_generated_tokens
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
        }

    def _choice(self, deltas: list[TextDelta], delta: bool = False) -> dict[str, Any]:
        """A choice, or with `delta` a part of it, from what came of it."""
        index = deltas[-1].choice_index
        ends = deltas[-1].finish_reason
        text, calls = self._readers[index].add(
            "".join(each.text for each in deltas), ended=ends is not None
        )
        if not getattr(self._body, "parallel_tool_calls", True):
            calls = calls[:1]
        logprobs = None
        if self._body.num_top_logprobs is not None:
            logprobs = [each for part in deltas for each in part.logprobs]
        return choice_object(self._chat, index, text, logprobs, ends, calls, delta=delta)

    async def collect_deltas(self) -> list[list[TextDelta]]:
        """The parts of each choice."""
        deltas: list[list[TextDelta]] = [[] for _ in self._readers]
        async for delta in self._stream.deltas():
            deltas[delta.choice_index].append(delta)
        return deltas

    def whole(self, deltas: list[list[TextDelta]]) -> Response:
        choices = [self._choice(each) for each in deltas]
        return JSONResponse(self.object(choices) | {"usage": self.usage})

    async def events(self) -> AsyncIterator[str]:
        """The lines of a stream. An error after its beginning is an error object in it."""
        include_usage = self._body.stream_options.include_usage
        no_usage = {"usage": None} if include_usage else {}
        if self._chat:
            for index in range(len(self._readers)):
                choice = choice_object(True, index, "", None, None, delta=True, first=True)
                yield _format_event(self.object([choice], chunk=True) | no_usage)

        def event(delta: TextDelta) -> str:
            choice = self._choice([delta], delta=True)
            return _format_event(self.object([choice], chunk=True) | no_usage)

        try:
            async for delta in self._stream.deltas():
                if len(delta.logprobs) > MANY_LOGPROBS:
                    yield await asyncio.to_thread(event, delta)
                else:
                    yield event(delta)
        except Exception as problem:
            yield _format_event(_engine_error(problem).body)
            return
        if include_usage:
            yield _format_event(self.object([], chunk=True) | {"usage": self.usage})
        yield "data: [DONE]\n\n"


def _format_event(content: dict[str, Any]) -> str:
    return f"data: {json.dumps(content, ensure_ascii=False)}\n\n"


class _EventStreamResponse(StreamingResponse):
    """Server-sent events. Generation is cancelled when the response ends, whoever ended it."""

    def __init__(self, events: AsyncIterator[str], stream: GenerationStream) -> None:
        super().__init__(
            events, media_type="text/event-stream", headers={"cache-control": "no-store"}
        )
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
        return ApiError(503, message, code="memory")
    return ApiError(500, "generation failed; the server's stderr says why")


async def _on_error(request: Request, error: Exception) -> Response:
    """The response to what a route raised.

    The traceback of an internal error is on the server's stderr.
    """
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
            refusal = ApiError(500, "internal error; the server's stderr says why")
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
        f"default-src 'none'; style-src 'sha256-{hashes['style']}'; script-src"
        f" 'sha256-{hashes['script']}'; connect-src 'self'; img-src data:; base-uri 'none';"
        " form-action 'none'; frame-ancestors 'none'"
    )
    headers = {
        "content-security-policy": policy,
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
        "cache-control": "no-cache",
    }
    return HTMLResponse(text, headers=headers)
