"""OpenAI's wire format: what a request may say, what is refused and how, and the objects that answers are made of.

Names and shapes are those of the completions and chat-completions endpoints. What is asked for and cannot be done is
refused by name, never passed over. Nothing here knows of models, threads or sockets.
"""

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, TypeVar, cast

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import from_json

# Parameters that change what is written, and the values of them that ask for nothing.
UNSUPPORTED_UNLESS: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "best_of": (1,),
    "echo": (False,),
    "frequency_penalty": (0,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "logit_bias": ({},),
    "modalities": (["text"],),
    "parallel_tool_calls": (True, False),
    "presence_penalty": (0,),
    "reasoning_effort": ("none",),
    "response_format": ({"type": "text"},),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "web_search_options": (),
}
# Parameters that change nothing of what is written.
IGNORED_PARAMETERS = {"metadata", "prompt_cache_key", "safety_identifier", "service_tier", "store", "user"}
MAX_TOP_LOGPROBS = 20
EXPECTED_VALUES = {
    "prompt": "a text, a list of texts, a list of token ids, or a list of such lists",
    "stop": "a text, or a list of at most 16 texts, none of them empty",
}

TokenIds = list[Annotated[int, Field(ge=0)]]
StopString = Annotated[str, Field(min_length=1, max_length=1000)]


class ApiError(Exception):
    """A request that is not answered: HTTP status, one line for its sender, and OpenAI's names for the kind of it."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        error_type: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.body = {"error": {"message": message, "type": error_type, "param": param, "code": code}}


class _StrictModel(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class StreamOptions(_StrictModel):
    """What a stream tells besides its text. `include_obfuscation` is a padding against eavesdroppers, and unread."""

    include_usage: bool = False
    include_obfuscation: bool = False


class BaseCompletionRequest(_StrictModel):
    """What both endpoints take. `top_k` is ours; the rest is OpenAI's."""

    model: str
    max_tokens: int | None = Field(None, ge=1)
    temperature: float = Field(1.0, ge=0, le=2)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=0)
    n: int = Field(1, ge=1, le=128)
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stop: StopString | Annotated[list[StopString], Field(max_length=16)] = []
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()

    @property
    def stop_strings(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop


class CompletionRequest(BaseCompletionRequest):
    """A body of /v1/completions: one prompt or several, each as text or as token ids."""

    prompt: str | list[str] | TokenIds | list[TokenIds] = ""
    max_tokens: int | None = Field(16, ge=1)
    logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)

    @property
    def prompts(self) -> list[str | list[int]]:
        match self.prompt:
            case str():
                return [self.prompt]
            case [int(), *_]:
                return [cast(list[int], self.prompt)]
            case _:
                return cast(list[str | list[int]], self.prompt)

    @property
    def num_top_logprobs(self) -> int | None:
        """How many of the likeliest tokens are told beside each that was written; None where no log-probability is."""
        return self.logprobs


class ChatCompletionRequest(BaseCompletionRequest):
    """A body of /v1/chat/completions. Messages are checked by the model's own template."""

    messages: list[dict[str, Any]] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=MAX_TOP_LOGPROBS)

    @property
    def num_top_logprobs(self) -> int | None:
        return self.top_logprobs if self.logprobs else None


RequestType = TypeVar("RequestType", bound=BaseCompletionRequest)


def parse_request(request_type: type[RequestType], content: bytes) -> RequestType:
    """A request's JSON as a `kind`. Raises Refusal that names the parameter and what was expected of it."""
    try:
        table = from_json(content, allow_inf_nan=False)
    except ValueError as problem:
        raise ApiError(400, f"the body is not JSON: {problem}") from None
    if not isinstance(table, dict):
        raise ApiError(400, "the body is JSON, but not an object")
    given = {name: value for name, value in table.items() if value is not None and name not in IGNORED_PARAMETERS}
    for name in UNSUPPORTED_UNLESS.keys() & given.keys():
        if (value := given.pop(name)) not in UNSUPPORTED_UNLESS[name]:
            shown = json.dumps(value)
            message = f"{name}: not supported here, and was asked for ({shown if len(shown) < 100 else 'see the request'})"
            raise ApiError(400, message, param=name, code="unsupported_parameter")
    try:
        return request_type.model_validate(given)
    except ValidationError as problem:
        raise _validation_error(request_type, problem) from None


def _validation_error(request_type: type[BaseCompletionRequest], problem: ValidationError) -> ApiError:
    error = problem.errors(include_url=False, include_input=False)[0]
    name = str(error["loc"][0])
    if error["type"] == "extra_forbidden":
        return ApiError(400, f"{'.'.join(map(str, error['loc']))}: no such parameter", param=name, code="unknown_parameter")
    if error["type"] == "missing":
        return ApiError(400, f"{name}: missing", param=name, code="missing_required_parameter")
    if name in EXPECTED_VALUES:  # pydantic tells what each of several kinds would have wanted
        return ApiError(400, f"{name}: expected {EXPECTED_VALUES[name]}", param=name, code="invalid_value")
    place = ".".join(map(str, error["loc"]))
    return ApiError(400, f"{place}: {error['msg'][0].lower()}{error['msg'][1:]}", param=name, code="invalid_value")


@dataclass(frozen=True)
class TokenLogprob:
    """A token that was written, its log-probability, the likeliest ones in its place, and where its text begins."""

    token_bytes: bytes
    logprob: float
    top_logprobs: Sequence[tuple[bytes, float]]
    text_offset: int


@dataclass
class ResponseBuilder:
    """What every object of one answer begins with."""

    chat: bool
    model: str
    id: str
    created: int = field(default_factory=lambda: int(time.time()))

    def response(self, choices: list[dict[str, Any]], usage: dict[str, int]) -> dict[str, Any]:
        """An answer in one piece."""
        return self._object("chat.completion" if self.chat else "text_completion", choices) | {"usage": usage}

    def chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        """A piece of a stream."""
        return self._object("chat.completion.chunk" if self.chat else "text_completion", choices)

    def _object(self, object_type: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {"id": self.id, "object": object_type, "created": self.created, "model": self.model, "choices": choices}

    def choice(
        self,
        index: int,
        text: str,
        token_logprobs: Sequence[TokenLogprob] | None,
        finish_reason: str | None,
        *,
        delta: bool = False,
        first: bool = False,
    ) -> dict[str, Any]:
        """One choice, or with `delta` a piece of it. Of a chat's stream, the `first` piece names the role."""
        common = {"index": index, "finish_reason": finish_reason}
        if not self.chat:
            return common | {"text": text, "logprobs": None if token_logprobs is None else _completion_logprobs(token_logprobs)}
        logprobs = (
            None if token_logprobs is None else {"content": [_chat_logprob(token) for token in token_logprobs], "refusal": None}
        )
        if not delta:
            return common | {"message": {"role": "assistant", "content": text, "refusal": None}, "logprobs": logprobs}
        said = ({"role": "assistant"} if first else {}) | ({"content": text} if text or first else {})
        return common | {"delta": said, "logprobs": logprobs}


def token_usage(prompt_tokens: int, completion_tokens: int) -> dict[str, int]:
    """The token counts of a request: the prompts, each counted once, and all that was written, its ends included."""
    total = prompt_tokens + completion_tokens
    return {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens, "total_tokens": total}


def _completion_logprobs(token_logprobs: Sequence[TokenLogprob]) -> dict[str, Any]:
    return {
        "tokens": [_token_text(token.token_bytes) for token in token_logprobs],
        "token_logprobs": [token.logprob for token in token_logprobs],
        "top_logprobs": [{_token_text(piece): logprob for piece, logprob in token.top_logprobs} for token in token_logprobs],
        "text_offset": [token.text_offset for token in token_logprobs],
    }


def _chat_logprob(token: TokenLogprob) -> dict[str, Any]:
    top = [_token_object(piece, logprob) for piece, logprob in token.top_logprobs]
    return _token_object(token.token_bytes, token.logprob) | {"top_logprobs": top}


def _token_object(token_bytes: bytes, logprob: float) -> dict[str, Any]:
    return {"token": token_bytes.decode("utf-8", "replace"), "logprob": logprob, "bytes": list(token_bytes)}


def _token_text(token_bytes: bytes) -> str:
    """A token in a place that has no list of bytes beside it: a part of a character is told as OpenAI does."""
    try:
        return token_bytes.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token_bytes)
