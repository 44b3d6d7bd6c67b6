"""OpenAI's wire format: the fields of a request, the errors, and the objects of a response.

Names and structure are those of the completions and chat-completions endpoints. A parameter that is
not supported is refused by name, never ignored. Nothing here knows of models, threads or sockets.
"""

import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Annotated, Any, Literal, TypeVar, cast

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from lmforge.core.files.untrusted import cut, quoted
from lmforge.core.options.ranges import REPETITION_PENALTY
from lmforge.text.chat.messages import NO_TEMPLATE_VARIABLES, REASONING_FIELDS
from lmforge.text.chat.tool_calls import ToolCall

_LAST_SAMPLERS = ["top_k", "typ_p", "top_p", "min_p", "xtc", "temperature"]
# Values with which parameters of OpenAI's API and of other servers (vLLM, SGLang, TGI, llama.cpp,
# Ollama) have no effect or are as if they were not given, and the names of these parameters; they
# are not supported with other values. None: all values.
_NEUTRAL_VALUES: list[tuple[tuple[Any, ...] | None, str]] = [
    # Some change something only beside others that are not supported.
    (
        None,
        """
        cache_prompt cache_salt id_slot keep_alive metadata n_keep prompt_cache_key
        prompt_cache_retention num_keep safety_identifier service_tier store user
        dry_allowed_length dry_base dry_penalty_last_n dry_sequence_breakers dynatemp_exponent
        mirostat_eta mirostat_tau penalize_nl repeat_last_n smoothing_curve tool_prompt
        xtc_threshold
        """,
    ),
    (
        (0,),
        """
        dry_multiplier dynatemp_range frequency_penalty min_keep min_new_tokens min_tokens
        mirostat mirostat_mode n_probs no_repeat_ngram_size presence_penalty priority
        smoothing_factor top_a top_n_tokens xtc_probability
        """,
    ),
    ((1,), "best_of guidance_scale length_penalty repeat_penalty tfs tfs_z typical typical_p"),
    ((0, -1), "t_max_predict_ms t_max_prompt_ms top_n_sigma"),
    (
        (False,),
        """
        add_special_tokens decoder_input_details details early_stopping echo ignore_eos
        include_stop_str_in_output no_stop_trim post_sampling_probs raw return_full_text
        return_hidden_states return_progress return_token_ids return_tokens
        return_tokens_as_token_ids timings_per_token use_beam_search watermark
        """,
    ),
    (
        (True,),
        """
        detokenize include_reasoning skip_special_tokens spaces_between_special_tokens
        stream_reasoning
        """,
    ),
    ((True, False), "parse_tool_calls separate_reasoning"),
    (
        ([],),
        """
        bad_words documents functions image_data logits_processors lora response_fields
        stop_token_ids
        """,
    ),
    (({}, []), "logit_bias mm_processor_kwargs options"),
    (("",), "format grammar negative_prompt suffix"),
    (("none", "auto"), "function_call reasoning_format"),
    (("none",), "reasoning_effort"),
    (("medium",), "verbosity"),
    ((["text"],), "modalities"),
    (({"type": "text"},), "response_format"),
    ((["dry", *_LAST_SAMPLERS], ["penalties", "dry", "top_n_sigma", *_LAST_SAMPLERS]), "samplers"),
    (
        (),
        """
        allowed_token_ids audio chat_template ebnf guided_choice guided_grammar guided_json
        guided_regex json_schema prediction prompt_logprobs regex structured_outputs
        truncate_prompt_tokens web_search_options
        """,
    ),
]
UNSUPPORTED_UNLESS = {name: values for values, names in _NEUTRAL_VALUES for name in names.split()}
# Keys of a message that are read.
MESSAGE_KEYS = {
    "role",
    "content",
    "name",
    "tool_calls",
    "tool_call_id",
    "function_call",
    *REASONING_FIELDS,
}
PART_KEYS = {"type", "text", "cache_control"}
PART_TYPES = ["text", "input_text", "output_text"]
MAX_TOP_LOGPROBS = 20
# Bounds of what is read of a request: an error for each of a million items or keys would hold all
# threads.
MAX_ITEMS = 1 << 14
MAX_KEYS = 1000
EXPECTED_VALUES = {
    "prompt": (
        "a text, a list of texts, a list of token ids, or a list of such lists; at most"
        f" {MAX_ITEMS:,} prompts"
    ),
    "stop": "a text, or a list of at most 16 texts, none of them empty",
}

Items = Field(max_length=MAX_ITEMS, fail_fast=True)
TokenIds = Annotated[list[Annotated[int, Field(ge=0)]], Field(fail_fast=True)]
StopString = Annotated[str, Field(min_length=1, max_length=1000)]


class ApiError(Exception):
    """An error response: HTTP status, one line, and OpenAI's `type`, `param` and `code`."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        error_type = "server_error" if status >= 500 else "invalid_request_error"
        if status == 429:
            error_type = "rate_limit_error"
        self.body = {
            "error": {"message": message, "type": error_type, "param": param, "code": code}
        }


class QueueFull(ApiError):
    """The batch and the queue of a model are full."""

    def __init__(self) -> None:
        message = "too many requests: the batch and the queue are full; try again later"
        super().__init__(429, message, code="too_many_requests")


class EngineStopped(ApiError):
    """The model was unloaded, or the server is stopping: no more tokens come."""

    def __init__(self) -> None:
        message = "the server is stopping, or unloaded this model; try again"
        super().__init__(503, message, code="stopping")


def no_such_model(name: str) -> ApiError:
    return ApiError(
        404,
        f"{cut(name)}: no such model; GET /v1/models lists them",
        param="model",
        code="model_not_found",
    )


class StrictModel(BaseModel):
    """A part of a request. Names that it does not have are refused."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _first_keys(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        return dict(islice(value.items(), MAX_KEYS))


class StreamOptions(StrictModel):
    """`include_usage` adds token counts at the end of a stream.

    `include_obfuscation` is accepted and has no effect, and so is vLLM's `continuous_usage_stats`
    where it is false.
    """

    include_usage: bool = False
    include_obfuscation: bool = False
    continuous_usage_stats: Literal[False] = False


class BaseCompletionRequest(StrictModel):
    """The fields of both endpoints.

    `top_k` (-1 is 0), `min_p` and `repetition_penalty` are extensions; others are OpenAI's. How to
    sample is the model's own where it is None.
    """

    model: str
    max_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1)
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, **REPETITION_PENALTY)
    n: int = Field(1, ge=1, le=128)
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stop: StopString | Annotated[list[StopString], Field(max_length=16)] = []
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()

    @property
    def stop_strings(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop


class CompletionRequest(BaseCompletionRequest):
    """The body of /v1/completions: one prompt or several, each as text or as token ids.

    `echo`: they are in the answer too.
    `add_special_tokens`: what texts begin with is put before them, as in vLLM.
    """

    prompt: str | Annotated[list[str], Items] | TokenIds | Annotated[list[TokenIds], Items] = ""
    max_tokens: int | None = Field(16, ge=0)
    logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    echo: bool = False
    add_special_tokens: bool = True

    @property
    def prompts(self) -> list[str | list[int]]:
        is_one = isinstance(self.prompt, str) or isinstance(next(iter(self.prompt), None), int)
        return cast(list[str | list[int]], [self.prompt] if is_one else self.prompt)

    @property
    def num_top_logprobs(self) -> int | None:
        """The number of likeliest tokens that are reported with each token.

        None for no log-probabilities at all.
        """
        return self.logprobs


class Function(StrictModel):
    """A function that a model may call; parameters: a JSON schema."""

    name: str = Field(min_length=1, max_length=256)
    description: str = ""
    parameters: dict[str, Any] = {}
    strict: Literal[False] | None = None  # true promises arguments that fit the schema


class Tool(StrictModel):
    type: Literal["function"] = "function"
    function: Function


class ChatCompletionRequest(BaseCompletionRequest):
    """The body of /v1/chat/completions. The model's chat template checks the messages.

    `continue_final_message`, `chat_template_kwargs` and `enable_thinking`, one of these, are
    vLLM's.
    """

    messages: Annotated[list[dict[str, Any]], Items] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=MAX_TOP_LOGPROBS)
    chat_template_kwargs: dict[str, Any] = {}
    enable_thinking: bool | None = None
    continue_final_message: bool = False
    add_generation_prompt: bool = True
    tools: Annotated[list[Tool], Items] = []
    tool_choice: Any = "auto"
    parallel_tool_calls: bool = True

    @property
    def template_variables(self) -> dict[str, Any]:
        if self.enable_thinking is None:
            return self.chat_template_kwargs
        return {"enable_thinking": self.enable_thinking} | self.chat_template_kwargs

    @property
    def num_top_logprobs(self) -> int | None:
        return self.top_logprobs if self.logprobs else None


RequestType = TypeVar("RequestType", bound=BaseCompletionRequest)


def parse_request(request_type: type[RequestType], body: dict[str, Any]) -> RequestType:
    """The JSON object of a request as a `request_type`.

    Raises ApiError naming the parameter and what was expected.
    """
    fields = {name: value for name, value in body.items() if value is not None}
    for name in UNSUPPORTED_UNLESS.keys() & fields.keys() - request_type.model_fields.keys():
        value = fields.pop(name)
        neutral = UNSUPPORTED_UNLESS[name]
        if neutral is not None and value not in neutral:
            raise ApiError(
                400,
                f"{name}: not supported, got {quoted(value)}",
                param=name,
                code="unsupported_parameter",
            )
    try:
        request = request_type.model_validate(fields)
    except ValidationError as problem:
        raise validation_error(problem) from None
    for name, reason in _parts_without_effect(request):
        raise ApiError(400, f"{name}: {reason}", param=name, code="invalid_value")
    return request


def _parts_without_effect(request: BaseCompletionRequest) -> Iterator[tuple[str, str]]:
    """(parameter, reason) of each part of a request that would be left out."""
    if "stream_options" in request.model_fields_set and not request.stream:
        yield "stream_options", "only with stream: true"
    if not isinstance(request, ChatCompletionRequest):
        return
    if request.tool_choice not in ("none", "auto"):
        yield "tool_choice", f"not supported, got {quoted(request.tool_choice)}; none and auto are"
    if request.top_logprobs and not request.logprobs:
        yield "top_logprobs", "only with logprobs: true"
    other_limit = request.max_completion_tokens
    if other_limit and request.max_tokens not in (None, other_limit):
        yield "max_completion_tokens", "another value than max_tokens; give one of them"
    for name in NO_TEMPLATE_VARIABLES & request.chat_template_kwargs.keys():
        yield "chat_template_kwargs", f"{name} is not a variable of a template; leave it out"
    if request.enable_thinking not in (None, request.template_variables.get("enable_thinking")):
        yield "enable_thinking", "another value than in chat_template_kwargs; give one of them"
    for number, message in enumerate(request.messages, start=1):
        content = message.get("content")
        parts = []
        if isinstance(content, list):
            parts = [part for part in content if isinstance(part, dict)]
        where = f"message {number}"
        for known, each in [(MESSAGE_KEYS, message), *((PART_KEYS, part) for part in parts)]:
            for name, value in each.items():
                if value and name not in known:
                    yield "messages", f"{where}: {cut(name)}: not supported, got {quoted(value)}"
        for name in ("name", "tool_call_id", *REASONING_FIELDS):
            value = message.get(name)
            if not isinstance(value, str | None):
                yield "messages", f"{where}: {name}: expected a text, got {quoted(value)}"
        for part in parts:
            kind = part.get("type", "text")
            if kind not in PART_TYPES:
                yield "messages", f"{where}: type: not supported, got {quoted(kind)}"


def validation_error(problem: ValidationError) -> ApiError:
    """The error that names the parameter and what was expected."""
    error = problem.errors(include_url=False, include_input=False)[0]
    name = cut(str(error["loc"][0]))
    path = ".".join(cut(str(part)) for part in error["loc"])
    if error["type"] == "extra_forbidden":
        return ApiError(400, f"{path}: no such parameter", param=name, code="unknown_parameter")
    if error["type"] == "missing":
        return ApiError(400, f"{path}: missing", param=name, code="missing_required_parameter")
    message = f"{path}: {error['msg'][0].lower()}{error['msg'][1:]}"
    if name in EXPECTED_VALUES:  # a union: pydantic reports one error for each of its types
        message = f"{name}: expected {EXPECTED_VALUES[name]}"
    return ApiError(400, message, param=name, code="invalid_value")


@dataclass(frozen=True)
class TokenLogprob:
    """A token with its log-probability in nats, which the first of a prompt does not have.

    top_logprobs: the likeliest tokens at its position. text_offset: where its text begins.
    """

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
    calls: Sequence[ToolCall] = (),
    *,
    delta: bool = False,
    first: bool = False,
) -> dict[str, Any]:
    """One choice of a response, or with `delta` a part of it.

    In a chat's stream, the `first` part has the role.
    """
    if calls and finish_reason == "stop":
        finish_reason = "tool_calls"
    choice: dict[str, Any] = {"index": index, "finish_reason": finish_reason, "logprobs": None}
    if token_logprobs is not None:
        logprobs = {"content": [_chat_logprob(token) for token in token_logprobs], "refusal": None}
        choice["logprobs"] = logprobs if chat else _completion_logprobs(token_logprobs)
    if not chat:
        return choice | {"text": text}
    message: dict[str, Any] = {}
    if first or not delta:
        message["role"] = "assistant"
    if text or first or not delta:
        message["content"] = text
    if not delta:
        message["refusal"] = None
        if calls and not text:
            message["content"] = None
    if calls:
        message["tool_calls"] = [_call_object(call, at, delta) for at, call in enumerate(calls)]
    return choice | {"delta" if delta else "message": message}


def _call_object(call: ToolCall, index: int, delta: bool) -> dict[str, Any]:
    # Mistral's templates take ids of nine letters and digits only.
    named = {"id": secrets.token_hex(5)[:9], "type": "function", "function": call._asdict()}
    return {"index": index, **named} if delta else named


def _completion_logprobs(token_logprobs: Sequence[TokenLogprob]) -> dict[str, Any]:

    def likeliest(token: TokenLogprob) -> dict[str, float] | None:
        if token.top_logprobs is None:
            return None
        return {_token_text(piece): logprob for piece, logprob in token.top_logprobs}

    return {
        "tokens": [_token_text(token.token_bytes) for token in token_logprobs],
        "token_logprobs": [token.logprob for token in token_logprobs],
        "top_logprobs": [likeliest(token) for token in token_logprobs],
        "text_offset": [token.text_offset for token in token_logprobs],
    }


def _chat_logprob(token: TokenLogprob) -> dict[str, Any]:
    top = [_token_object(piece, logprob) for piece, logprob in token.top_logprobs or ()]
    return _token_object(token.token_bytes, token.logprob) | {"top_logprobs": top}


def _token_object(token_bytes: bytes, logprob: float | None) -> dict[str, Any]:
    return {
        "token": token_bytes.decode("utf-8", "replace"),
        "logprob": logprob,
        "bytes": list(token_bytes),
    }


def _token_text(token_bytes: bytes) -> str:
    """A token's text where its bytes are not listed.

    An incomplete character is written as OpenAI writes it.
    """
    try:
        return token_bytes.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token_bytes)
