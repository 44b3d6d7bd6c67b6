"""The routes for a trainer, as vLLM's: ids in and out, and weights replaced in place.

Ids come with log-probabilities and versions. Paths, fields and answers are those of vLLM's
/inference/v1/generate, its /tokenize and, with `lmforge serve --weight_updates`, its development
mode; `starts_with` is an extension. Requests that run while weights are replaced go on, and keep
the keys and values that the earlier weights computed.
"""

import asyncio
import base64
import io
from collections.abc import Callable, Coroutine
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
import torch
from pydantic import Field, ValidationError
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from torch import Tensor

from lmforge.core.data.loader import batch_of_token_lists
from lmforge.core.errors import UserError
from lmforge.core.files.untrusted import cut
from lmforge.core.losses.top_logprobs import top_log_probs
from lmforge.core.model.config_json import to_config_json
from lmforge.hf.weights import load_folder
from lmforge.serve.batching import MIN_LOGPROB, ContinuousBatcher, QueuedRequest
from lmforge.serve.decoding.engine import GeneratedToken, GenerationRequest
from lmforge.serve.decoding.sampling import SamplingParams
from lmforge.serve.decoding.weights_folder import verify_weights
from lmforge.serve.model_registry import ModelRegistry, ServedModel
from lmforge.serve.protocol import ApiError, EngineStopped, StrictModel, TokenIds, validation_error

# The time that the first of requests that start together waits for the others.
GATHER_SECONDS = 30
# The likeliest tokens of each place of a prompt that a request may ask for.
MAX_PROMPT_LOGPROBS = 1024
# Fields of config.json by which a trainer sees that the model is its own.
DESCRIBED = ("model_type", "vocab_size", "hidden_size", "num_hidden_layers", "intermediate_size")
ReadBody = Callable[..., Any]
Body = TypeVar("Body", bound=StrictModel)
T = TypeVar("T")


class TokenSampling(StrictModel):
    """The options of sampling: vLLM's names and defaults.

    The log-probabilities are those of the distribution drawn from.
    """

    temperature: float = Field(1.0, ge=0)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=-1)
    min_p: float = Field(0.0, ge=0, le=1)
    max_tokens: int = Field(16, ge=1)
    seed: int = Field(0, ge=0, lt=2**64)
    stop_token_ids: TokenIds = Field([])
    ignore_eos: bool = False
    logprobs: Literal[0] | None = None
    prompt_logprobs: int | None = Field(None, ge=1, le=MAX_PROMPT_LOGPROBS)
    n: Literal[1] = 1


class StartsWith(StrictModel):
    """The group of a request that starts together with others.

    A request waits until all `count` of this `id` have come; then they are queued in the order of
    their `index`.
    """

    id: str = Field(max_length=100)
    count: int = Field(ge=1, le=1 << 16)
    index: int = Field(ge=0)


class GenerateRequest(StrictModel):
    token_ids: TokenIds = Field(min_length=1)
    sampling_params: TokenSampling
    starts_with: StartsWith | None = None
    stream: Literal[False] = False


class TokenizeRequest(StrictModel):
    prompt: str
    add_special_tokens: Literal[False] = False


class NewVersion(StrictModel):
    new_version: str = Field(max_length=200)


class ReloadArguments(StrictModel):
    weights_path: str


class WorkerCall(StrictModel):
    method: Literal["reload_weights"]
    kwargs: ReloadArguments


def token_routes(registry: ModelRegistry, read_body: ReadBody, weight_updates: bool) -> list[Route]:
    """The routes, for the first model of a registry.

    Those that pause it and change its weights come only with `weight_updates`.
    """
    gathering: dict[tuple[str, int], dict[int, QueuedRequest]] = {}

    async def parse(schema: type[Body], request: Request) -> Body:
        def check(body: dict[str, Any]) -> Body:
            given = {name: value for name, value in body.items() if value is not None}
            try:
                return schema.model_validate(given)
            except ValidationError as problem:
                raise validation_error(problem) from None

        parsed: Body = await read_body(request, check)
        return parsed

    async def get_model() -> ServedModel:
        return await registry.get(registry.default_model)

    def release(
        batcher: ContinuousBatcher, group: tuple[str, int], waiting: dict[int, QueuedRequest]
    ) -> None:
        if gathering.get(group) is waiting:
            del gathering[group]
            requests = [waiting[index] for index in sorted(waiting)]
            try:
                batcher.submit(requests, is_bounded=False)
            except EngineStopped as problem:
                for each in requests:
                    each.token_queue.put_nowait((0, problem))

    async def generate(request: Request) -> Response:
        body = await parse(GenerateRequest, request)
        served = await get_model()
        params = body.sampling_params
        together = body.starts_with
        total = len(body.token_ids) + params.max_tokens
        if total > served.max_length:
            message = (
                f"{total} tokens of prompt and answer, and this server was started with"
                f" --max_length {served.max_length}"
            )
            raise ApiError(400, message, param="token_ids", code="context_length_exceeded")
        served.check_ids(body.token_ids, "token_ids")
        stop_ids = frozenset(params.stop_token_ids)
        if not params.ignore_eos:
            stop_ids |= served.loaded.text_stop_ids
        sampling = SamplingParams(
            params.temperature, max(0, params.top_k), params.top_p, params.min_p
        )
        generation = GenerationRequest(
            body.token_ids, params.max_tokens, sampling, params.seed, stop_ids
        )
        queued = QueuedRequest(generation, 0, asyncio.Queue())
        waiting: dict[int, QueuedRequest] = {}
        if together is None:
            served.batcher.submit([queued], is_bounded=False)
        else:
            group = together.id, together.count
            if together.index in gathering.get(group, ()) or together.index >= together.count:
                message = (
                    f"starts_with: index {together.index}: expected each from 0 to"
                    f" {together.count - 1} once"
                )
                raise ApiError(400, message, param="starts_with")
            waiting = gathering.setdefault(group, waiting)
            waiting[together.index] = queued
            if len(waiting) == together.count:
                release(served.batcher, group, waiting)
            elif len(waiting) == 1:
                asyncio.get_running_loop().call_later(
                    GATHER_SECONDS, release, served.batcher, group, waiting
                )
        try:
            tokens = await unless_disconnected(request, _tokens(queued))
        finally:
            served.batcher.cancel(queued)
            if together is not None:
                # Where it still waits for others, it is not started with them.
                waiting.pop(together.index)
                if not waiting and gathering.get(group) is waiting:
                    del gathering[group]
        scored = None
        if params.prompt_logprobs is not None:
            score = partial(_score_prompt, served, body.token_ids, params.prompt_logprobs)
            scored = await unless_disconnected(request, served.batcher.between_steps(score))

        def answer() -> Response:
            choice = _choice(queued, tokens, params.logprobs is not None)
            content: dict[str, Any] = {"choices": [choice]}
            if scored is not None:
                content["prompt_logprobs"] = _prompt_logprobs(*scored)
            return JSONResponse(content)

        return await asyncio.to_thread(answer)

    async def tokenize(request: Request) -> Response:
        body = await parse(TokenizeRequest, request)
        served = await get_model()

        def answer() -> Response:
            ids = served.loaded.tokenizer.encode(body.prompt)
            content = {"count": len(ids), "max_model_len": served.max_length, "tokens": ids}
            return JSONResponse(content)

        return await asyncio.to_thread(answer)

    async def pause(request: Request) -> Response:
        mode = request.query_params.get("mode") or "abort"
        if mode != "keep":
            raise ApiError(400, f"mode: {cut(mode)} is not supported; use ?mode=keep", param="mode")
        (await get_model()).batcher.pause()
        return JSONResponse({"status": "paused"})

    async def resume(request: Request) -> Response:
        (await get_model()).batcher.resume()
        return JSONResponse({"status": "resumed"})

    async def call_workers(request: Request) -> Response:
        folder = Path((await parse(WorkerCall, request)).kwargs.weights_path)
        served = await get_model()

        def load() -> None:
            try:
                verify_weights(folder)
                # This call may come late, after a name was given.
                served.batcher.weight_version = "being replaced"
                load_folder(folder, served.loaded.model)
            except OSError as problem:
                raise UserError(
                    f"{folder}: {problem.strerror}; is it a folder that this host sees?"
                ) from None

        await served.batcher.between_steps(load)
        return JSONResponse({"results": [None]})

    async def update_version(request: Request) -> Response:
        version = (await parse(NewVersion, request)).new_version
        (await get_model()).batcher.weight_version = version
        return JSONResponse({"success": True, "new_version": version})

    async def weight_info(request: Request) -> Response:
        served = await get_model()
        config = to_config_json(served.loaded.config)
        model = {name: config[name] for name in DESCRIBED if name in config}
        return JSONResponse({"weight_version": served.batcher.weight_version, "model": model})

    async def reset_prefix_cache(request: Request) -> Response:
        """Do nothing: there is no such cache."""
        return JSONResponse({})

    post = partial(Route, methods=["POST"])
    computing = [post("/inference/v1/generate", generate), post("/tokenize", tokenize)]
    if not weight_updates:
        return computing
    return [
        *computing,
        post("/pause", pause),
        post("/resume", resume),
        post("/collective_rpc", call_workers),
        post("/reset_prefix_cache", reset_prefix_cache),
        post("/update_weight_version", update_version),
        Route("/weight_info", weight_info, methods=["GET"]),
    ]


@torch.no_grad()
def _score_prompt(served: ServedModel, token_ids: list[int], k: int) -> tuple[Tensor, Tensor]:
    """The ids of the `k` likeliest tokens after each of a prompt, and their log-probabilities.

    These are at temperature 1.
    """
    model = served.loaded.model
    vocab_size = served.vocab_size
    batch = batch_of_token_lists([token_ids]).to(model.lm_head.weight.device)
    hidden = model(
        batch.tokens, batch.positions, batch.document_ids, document_starts=batch.document_starts
    )
    ids, values = model.lm_head(
        hidden, partial(top_log_probs, k=min(k, vocab_size), vocab_size=vocab_size)
    )
    return ids[0], values[0]


def _prompt_logprobs(ids: Tensor, values: Tensor) -> list[dict[str, Any] | None]:
    """The likeliest tokens at each place of a prompt, by id; None at the first."""
    places = [
        {
            str(id): {"logprob": value, "rank": rank}
            for rank, (id, value) in enumerate(zip(*place, strict=False), start=1)
        }
        for place in zip(ids[:-1].tolist(), values[:-1].tolist(), strict=True)
    ]
    return [None, *places]


async def _tokens(queued: QueuedRequest) -> list[GeneratedToken]:
    """The tokens of a request, once it has ended."""
    tokens: list[GeneratedToken] = []
    while not tokens or tokens[-1].finish_reason is None:
        _, token = await queued.token_queue.get()
        if isinstance(token, Exception):
            raise token
        tokens.append(token)
    return tokens


async def unless_disconnected(request: Request, coroutine: Coroutine[Any, Any, T]) -> T:
    """The result of `coroutine`.

    Raises ClientDisconnect as soon as the client closes the connection.
    """
    work = asyncio.ensure_future(coroutine)
    # The body has been read: only a disconnect can come.
    disconnect = asyncio.ensure_future(request.receive())
    try:
        await asyncio.wait((work, disconnect), return_when=asyncio.FIRST_COMPLETED)
        if work.done():
            return await work
        raise ClientDisconnect
    finally:
        work.cancel()
        disconnect.cancel()


def _choice(
    queued: QueuedRequest, tokens: list[GeneratedToken], with_logprobs: bool
) -> dict[str, Any]:
    """The answer of a request."""
    content = [
        {"token_id": each.token_id, "logprob": max(each.logprob, MIN_LOGPROB)} for each in tokens
    ]
    starts = [*queued.version_starts, ("", len(tokens))]
    return {
        "index": 0,
        "token_ids": [each.token_id for each in tokens],
        "finish_reason": tokens[-1].finish_reason,
        "logprobs": {"content": content} if with_logprobs else None,
        "routed_experts": _encode_experts([each.routed_experts for each in tokens]),
        "weight_versions": [
            {"version": version, "start": start, "end": end}
            for (version, start), (_, end) in pairwise(starts)
        ],
    }


def _encode_experts(parts: list[Tensor | None]) -> str | None:
    """An array int32 [tokens, layers, experts of a token] in numpy's format, as base64.

    None where the engine returns no experts.
    """
    known = [part for part in parts if part is not None]
    if not known:
        return None
    with io.BytesIO() as file:
        np.save(file, torch.cat(known).numpy(), allow_pickle=False)
        return base64.b64encode(file.getvalue()).decode()
