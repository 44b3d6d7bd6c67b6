"""OpenAI's wire format: the fields of a request, the errors, and the objects of a response.

Names and structure are those of the completions and chat-completions endpoints. A parameter that is not supported is refused
by name, never ignored. Nothing here knows of models, threads or sockets.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar, cast

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from lmforge.untrusted import cut, quoted

# Parameters of OpenAI's API and of other servers that are not supported and would change the output, and the values with which
# they have no effect.
UNSUPPORTED_UNLESS: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("frequency_penalty", "min_tokens", "mirostat", "presence_penalty"), (0,)),
    **dict.fromkeys(("dry_multiplier", "dynatemp_range", "n_probs", "top_a", "xtc_probability"), (0,)),
    **dict.fromkeys(("best_of", "length_penalty", "repeat_penalty", "tfs_z", "typical_p"), (1,)),
    **dict.fromkeys(("echo", "ignore_eos", "include_stop_str_in_output", "return_token_ids", "use_beam_search"), (False,)),
    **dict.fromkeys(("documents", "functions", "stop_token_ids", "tools"), ([],)),
    **dict.fromkeys(("function_call", "tool_choice"), ("none", "auto")),
    **dict.fromkeys(("audio", "web_search_options"), ()),
    "logit_bias": ({},),
    "modalities": (["text"],),
    "parallel_tool_calls": (True, False),
    "reasoning_effort": ("none",),
    "response_format": ({"type": "text"},),
    **dict.fromkeys(("skip_special_tokens", "spaces_between_special_tokens"), (True,)),
    "suffix": ("",),
    "verbosity": ("medium",),
}
# Parameters that do not change the output.
IGNORED_PARAMETERS = {"metadata", "safety_identifier", "service_tier", "store", "user"}
IGNORED_PARAMETERS |= {"cache_prompt", "prompt_cache_key", "prompt_cache_retention"}
MAX_TOP_LOGPROBS = 20
EXPECTED_VALUES = {
    "prompt": "a text, a list of texts, a list of token ids, or a list of such lists",
    "stop": "a text, or a list of at most 16 texts, none of them empty",
}

TokenIds = list[Annotated[int, Field(ge=0)]]
StopString = Annotated[str, Field(min_length=1, max_length=1000)]


class ApiError(Exception):
    """An error response: HTTP status, a message of one line, and OpenAI's `type`, `param` and `code`."""

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


class QueueFull(ApiError):
    """The batch and the queue of a model are full."""

    def __init__(self) -> None:
        message = "too many requests: the batch and the queue are full; try again later"
        super().__init__(429, message, error_type="rate_limit_error", code="too_many_requests")


class EngineStopped(ApiError):
    """The model was unloaded, or the server is stopping: no more tokens come."""

    def __init__(self) -> None:
        message = "the server is stopping, or unloaded this model; try again"
        super().__init__(503, message, error_type="server_error", code="stopping")


def no_such_model(name: str) -> ApiError:
    return ApiError(404, f"{cut(name)}: no such model; GET /v1/models lists them", param="model", code="model_not_found")


class _StrictModel(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class StreamOptions(_StrictModel):
    """`include_usage` adds token counts at the end of a stream. `include_obfuscation` is accepted and has no effect."""

    include_usage: bool = False
    include_obfuscation: bool = False


class BaseCompletionRequest(_StrictModel):
    """The fields of both endpoints. `top_k` (-1 is 0), `min_p` and `repetition_penalty` are extensions; others are OpenAI's.
    How to sample is the model's own where it is None."""

    model: str
    max_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1)
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, gt=0, le=100)
    n: int = Field(1, ge=1, le=128)
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stop: StopString | Annotated[list[StopString], Field(max_length=16)] = []
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()

    @property
    def stop_strings(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop


class CompletionRequest(BaseCompletionRequest):
    """The body of /v1/completions: one prompt or several, each as text or as token ids. `echo`: they are in the answer too."""

    prompt: str | list[str] | TokenIds | list[TokenIds] = ""
    max_tokens: int | None = Field(16, ge=0)
    logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    echo: bool = False

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
        """How many of the likeliest tokens are reported with each token; None for no log-probabilities at all."""
        return self.logprobs


class ChatCompletionRequest(BaseCompletionRequest):
    """The body of /v1/chat/completions. The model's chat template checks the messages.

    `continue_final_message`, `chat_template_kwargs` and `enable_thinking`, one of these, are vLLM's.
    """

    messages: list[dict[str, Any]] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=MAX_TOP_LOGPROBS)
    chat_template_kwargs: dict[str, Any] = {}
    enable_thinking: bool | None = None
    continue_final_message: bool = False
    add_generation_prompt: bool = True

    @property
    def template_variables(self) -> dict[str, Any]:
        thinking = {} if self.enable_thinking is None else {"enable_thinking": self.enable_thinking}
        return thinking | self.chat_template_kwargs

    @property
    def num_top_logprobs(self) -> int | None:
        return self.top_logprobs if self.logprobs else None


RequestType = TypeVar("RequestType", bound=BaseCompletionRequest)


def parse_request(request_type: type[RequestType], body: dict[str, Any]) -> RequestType:
    """The JSON object of a request as a `request_type`. Raises ApiError naming the parameter and what was expected."""
    fields = {name: value for name, value in body.items() if value is not None and name not in IGNORED_PARAMETERS}
    for name in UNSUPPORTED_UNLESS.keys() & fields.keys() - request_type.model_fields.keys():
        if (value := fields.pop(name)) not in UNSUPPORTED_UNLESS[name]:
            raise ApiError(400, f"{name}: not supported, got {quoted(value)}", param=name, code="unsupported_parameter")
    try:
        return request_type.model_validate(fields)
    except ValidationError as problem:
        raise _validation_error(request_type, problem) from None


def _validation_error(request_type: type[BaseCompletionRequest], problem: ValidationError) -> ApiError:
    error = problem.errors(include_url=False, include_input=False)[0]
    name, path = cut(str(error["loc"][0])), ".".join(cut(str(part)) for part in error["loc"])
    if error["type"] == "extra_forbidden":
        return ApiError(400, f"{path}: no such parameter", param=name, code="unknown_parameter")
    if error["type"] == "missing":
        return ApiError(400, f"{name}: missing", param=name, code="missing_required_parameter")
    if name in EXPECTED_VALUES:  # a union: pydantic reports one error for each of its types
        return ApiError(400, f"{name}: expected {EXPECTED_VALUES[name]}", param=name, code="invalid_value")
    return ApiError(400, f"{path}: {error['msg'][0].lower()}{error['msg'][1:]}", param=name, code="invalid_value")


@dataclass(frozen=True)
class TokenLogprob:
    """A token, its log-probability in nats, the likeliest tokens at its position, and where its text begins. The first of a
    prompt has no log-probability."""

    token_bytes: bytes
    logprob: float | None
    top_logprobs: Sequence[tuple[bytes, float]] | None
    text_offset: int


def choice_object(
    chat: bool,
    index: int,
    text: str,
    token_logprobs: Sequence[TokenLogprob] | None,
    finish_reason: str | None,
    *,
    delta: bool = False,
    first: bool = False,
) -> dict[str, Any]:
    """One choice of a response, or with `delta` a part of it. In a chat's stream, the `first` part has the role."""
    choice: dict[str, Any] = {"index": index, "finish_reason": finish_reason, "logprobs": None}
    if token_logprobs is not None:
        logprobs = {"content": [_chat_logprob(token) for token in token_logprobs], "refusal": None}
        choice["logprobs"] = logprobs if chat else _completion_logprobs(token_logprobs)
    if not chat:
        return choice | {"text": text}
    if not delta:
        return choice | {"message": {"role": "assistant", "content": text, "refusal": None}}
    return choice | {"delta": ({"role": "assistant"} if first else {}) | ({"content": text} if text or first else {})}


def _completion_logprobs(token_logprobs: Sequence[TokenLogprob]) -> dict[str, Any]:
    return {
        "tokens": [_token_text(token.token_bytes) for token in token_logprobs],
        "token_logprobs": [token.logprob for token in token_logprobs],
        "top_logprobs": [
            None if token.top_logprobs is None else {_token_text(piece): logprob for piece, logprob in token.top_logprobs}
            for token in token_logprobs
        ],
        "text_offset": [token.text_offset for token in token_logprobs],
    }


def _chat_logprob(token: TokenLogprob) -> dict[str, Any]:
    top = [_token_object(piece, logprob) for piece, logprob in token.top_logprobs or ()]
    return _token_object(token.token_bytes, token.logprob) | {"top_logprobs": top}


def _token_object(token_bytes: bytes, logprob: float | None) -> dict[str, Any]:
    return {"token": token_bytes.decode("utf-8", "replace"), "logprob": logprob, "bytes": list(token_bytes)}


def _token_text(token_bytes: bytes) -> str:
    """A token's text where its bytes are not listed: an incomplete character is written as OpenAI writes it."""
    try:
        return token_bytes.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token_bytes)
