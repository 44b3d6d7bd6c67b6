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
NEUTRAL: dict[str, tuple[Any, ...]] = {
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
UNREAD = {"metadata", "prompt_cache_key", "safety_identifier", "service_tier", "store", "user"}
MOST_TOP_LOGPROBS = 20
EXPECTED = {
    "prompt": "a text, a list of texts, a list of token ids, or a list of such lists",
    "stop": "a text, or a list of at most 16 texts, none of them empty",
}

Ids = list[Annotated[int, Field(ge=0)]]
Stop = Annotated[str, Field(min_length=1, max_length=1000)]


class Refusal(Exception):
    """A request that is not answered: HTTP status, one line for its sender, and OpenAI's names for the kind of it."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": code}}


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class StreamOptions(_Body):
    """What a stream tells besides its text. `include_obfuscation` is a padding against eavesdroppers, and unread."""

    include_usage: bool = False
    include_obfuscation: bool = False


class Asked(_Body):
    """What both endpoints take. `top_k` is ours; the rest is OpenAI's."""

    model: str
    max_tokens: int | None = Field(None, ge=1)
    temperature: float = Field(1.0, ge=0, le=2)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=0)
    n: int = Field(1, ge=1, le=128)
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stop: Stop | Annotated[list[Stop], Field(max_length=16)] = []
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop


class CompletionAsked(Asked):
    """A body of /v1/completions: one prompt or several, each as text or as token ids."""

    prompt: str | list[str] | Ids | list[Ids] = ""
    max_tokens: int | None = Field(16, ge=1)
    logprobs: int | None = Field(None, ge=0, le=MOST_TOP_LOGPROBS)

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
    def top_logprobs_asked(self) -> int | None:
        """How many of the likeliest tokens are told beside each that was written; None where no log-probability is."""
        return self.logprobs


class ChatAsked(Asked):
    """A body of /v1/chat/completions. Messages are checked by the model's own template."""

    messages: list[dict[str, Any]] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=MOST_TOP_LOGPROBS)

    @property
    def top_logprobs_asked(self) -> int | None:
        return self.top_logprobs if self.logprobs else None


Body = TypeVar("Body", bound=Asked)


def read_body(kind: type[Body], content: bytes) -> Body:
    """A request's JSON as a `kind`. Raises Refusal that names the parameter and what was expected of it."""
    try:
        table = from_json(content, allow_inf_nan=False)
    except ValueError as problem:
        raise Refusal(400, f"the body is not JSON: {problem}") from None
    if not isinstance(table, dict):
        raise Refusal(400, "the body is JSON, but not an object")
    given = {name: value for name, value in table.items() if value is not None and name not in UNREAD}
    for name in NEUTRAL.keys() & given.keys():
        if (value := given.pop(name)) not in NEUTRAL[name]:
            shown = json.dumps(value)
            message = f"{name}: not supported here, and was asked for ({shown if len(shown) < 100 else 'see the request'})"
            raise Refusal(400, message, param=name, code="unsupported_parameter")
    try:
        return kind.model_validate(given)
    except ValidationError as problem:
        raise _refusal(kind, problem) from None


def _refusal(kind: type[Asked], problem: ValidationError) -> Refusal:
    error = problem.errors(include_url=False, include_input=False)[0]
    name = str(error["loc"][0])
    if error["type"] == "extra_forbidden":
        return Refusal(400, f"{'.'.join(map(str, error['loc']))}: no such parameter", param=name, code="unknown_parameter")
    if error["type"] == "missing":
        return Refusal(400, f"{name}: missing", param=name, code="missing_required_parameter")
    if name in EXPECTED:  # pydantic tells what each of several kinds would have wanted
        return Refusal(400, f"{name}: expected {EXPECTED[name]}", param=name, code="invalid_value")
    place = ".".join(map(str, error["loc"]))
    return Refusal(400, f"{place}: {error['msg'][0].lower()}{error['msg'][1:]}", param=name, code="invalid_value")


@dataclass(frozen=True)
class Scored:
    """A token that was written, its log-probability, the likeliest ones in its place, and where its text begins."""

    piece: bytes
    logprob: float
    top: Sequence[tuple[bytes, float]]
    offset: int


@dataclass
class Heading:
    """What every object of one answer begins with."""

    chat: bool
    model: str
    id: str
    created: int = field(default_factory=lambda: int(time.time()))

    def whole(self, choices: list[dict[str, Any]], usage: dict[str, int]) -> dict[str, Any]:
        """An answer in one piece."""
        return self._object("chat.completion" if self.chat else "text_completion", choices) | {"usage": usage}

    def chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        """A piece of a stream."""
        return self._object("chat.completion.chunk" if self.chat else "text_completion", choices)

    def _object(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model, "choices": choices}

    def choice(
        self,
        index: int,
        text: str,
        scored: Sequence[Scored] | None,
        reason: str | None,
        *,
        delta: bool = False,
        first: bool = False,
    ) -> dict[str, Any]:
        """One choice, or with `delta` a piece of it. Of a chat's stream, the `first` piece names the role."""
        common = {"index": index, "finish_reason": reason}
        if not self.chat:
            return common | {"text": text, "logprobs": None if scored is None else _completion_logprobs(scored)}
        logprobs = None if scored is None else {"content": [_chat_logprob(token) for token in scored], "refusal": None}
        if not delta:
            return common | {"message": {"role": "assistant", "content": text, "refusal": None}, "logprobs": logprobs}
        said = ({"role": "assistant"} if first else {}) | ({"content": text} if text or first else {})
        return common | {"delta": said, "logprobs": logprobs}


def usage(prompt_tokens: int, completion_tokens: int) -> dict[str, int]:
    """The token counts of a request: the prompts, each counted once, and all that was written, its ends included."""
    total = prompt_tokens + completion_tokens
    return {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens, "total_tokens": total}


def _completion_logprobs(scored: Sequence[Scored]) -> dict[str, Any]:
    return {
        "tokens": [_spelled(token.piece) for token in scored],
        "token_logprobs": [token.logprob for token in scored],
        "top_logprobs": [{_spelled(piece): logprob for piece, logprob in token.top} for token in scored],
        "text_offset": [token.offset for token in scored],
    }


def _chat_logprob(token: Scored) -> dict[str, Any]:
    top = [_one(piece, logprob) for piece, logprob in token.top]
    return _one(token.piece, token.logprob) | {"top_logprobs": top}


def _one(piece: bytes, logprob: float) -> dict[str, Any]:
    return {"token": piece.decode("utf-8", "replace"), "logprob": logprob, "bytes": list(piece)}


def _spelled(piece: bytes) -> str:
    """A token in a place that has no list of bytes beside it: a part of a character is told as OpenAI does."""
    try:
        return piece.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)
