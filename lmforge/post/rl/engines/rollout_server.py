"""One server that samples for a run: the calls of vLLM's interface for ids, versions and weights,
each with a time-out.

vLLM and `lmforge serve --weight_updates` have the same paths and fields. Answers are not believed:
what fits no request is a ServerProblem (the schemas below, and SampledTokens). Which server gets
which request is not here.
"""

import base64
import io
import json
import math
import os
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPException
from pathlib import Path
from typing import Annotated, Any, TypeVar

import numpy as np
from pydantic import BaseModel, Field

from lmforge.core.errors import UserError
from lmforge.core.files.untrusted import MAX_LISTED, cut, parse_json, quoted
from lmforge.core.model.config import ModelConfig
from lmforge.core.model.config_json import to_config_json
from lmforge.post.options.align import RolloutOptions
from lmforge.post.rl.sampler import SampleRequest, SamplingSettings
from lmforge.serve.decoding.sampling import SamplingParams
from lmforge.serve.http_call import HttpAnswer, call

API_KEY_VARIABLE = "LMFORGE_API_KEY"
MAX_ANSWER_BYTES = 2**28
# How long a server may take to say how it is. It answers at once, unless it hangs.
ANSWER_SECONDS = 10.0
# What each server needs, by the path that it lacks without it; "": any other.
Flags = dict[str, str]
FLAGS: dict[str, Flags] = {
    "lmforge": {"": "start it with lmforge serve --weight_updates"},
    "vllm": {
        "/inference/v1/generate": "start it with vllm serve --enable-scale-out",
        "": "start it with VLLM_SERVER_DEV_MODE=1 in its environment",
    },
}
EXPERTS_MISSING = (
    "returns no routed experts; start it with vllm serve --enable-return-routed-experts, or lmforge"
    " serve --return_routed_experts"
)
Content = TypeVar("Content")
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
# 0 may be rounded to a little more; -9999 stands for minus infinity, which JSON lacks.
Logprob = Annotated[float, Field(ge=-1e4, le=1e-3)]
VersionName = Annotated[str, Field(max_length=200)]


class ServerProblem(Exception):
    """A server does not do what it was asked for: one line that names it.

    `status` is that of its answer, if it answered.
    """

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class _Token(BaseModel):
    token_id: TokenId
    logprob: Logprob


class _Logprobs(BaseModel):
    content: list[_Token]


class _VersionSpan(BaseModel):
    version: VersionName
    start: int
    end: int


class _Choice(BaseModel):
    token_ids: list[TokenId] = Field(min_length=1)
    finish_reason: str
    logprobs: _Logprobs
    weight_versions: list[_VersionSpan]
    routed_experts: str | None = None  # base64 of an array in numpy's format, as vLLM sends it


class _Answer(BaseModel):
    choices: list[_Choice] = Field(min_length=1, max_length=1)


class _WeightInfo(BaseModel):
    weight_version: VersionName
    model: dict[str, Any] = {}  # some fields of its config.json; vLLM says none


class SampledTokens:
    """What a server sampled: ids, their log-probabilities and the names of the versions of their
    weights, of one length.
    """

    routed_experts: np.ndarray | None = None

    def __init__(self, choice: _Choice, request: SampleRequest, settings: SamplingSettings) -> None:
        """Raises ValueError where the parts of the answer do not fit together, or are not what was
        requested.
        """
        self.token_ids = choice.token_ids
        self.stopped = choice.finish_reason == "stop"
        self.logprobs = [token.logprob for token in choice.logprobs.content]
        count = len(self.token_ids)
        stop_ids = settings.stop_token_ids
        if choice.finish_reason not in ("stop", "length"):
            raise ValueError(f"the request ended with {cut(choice.finish_reason)!r}")
        if count > request.max_tokens:
            raise ValueError(
                f"answers with {count:,} tokens, and at most {request.max_tokens:,} were requested"
            )
        if max(self.token_ids) >= settings.vocab_size:
            raise ValueError(
                f"answers with the id {max(self.token_ids)}, and the policy has"
                f" {settings.vocab_size:,} ids"
            )
        if not stop_ids.isdisjoint(self.token_ids[:-1]) or (
            self.stopped and self.token_ids[-1] not in stop_ids
        ):
            raise ValueError("its answer does not end with its first stop token")
        if [token.token_id for token in choice.logprobs.content] != self.token_ids:
            raise ValueError("its log-probabilities are of other ids")
        self.versions: list[str] = []
        for span in choice.weight_versions:
            if span.start != len(self.versions) or not span.start <= span.end <= count:
                raise ValueError("its versions are not those of each token, in their order")
            self.versions += [span.version] * (span.end - span.start)
        if len(self.versions) != count:
            raise ValueError("tokens without a version")
        if settings.replayed is not None:
            if choice.routed_experts is None:
                raise ValueError(EXPERTS_MISSING)
            self.routed_experts = _read_experts(
                choice.routed_experts, len(request.prompt_ids) + count - 1, settings.replayed
            )


def _read_experts(encoded: str, num_tokens: int, model: ModelConfig) -> np.ndarray:
    shape = num_tokens, model.num_hidden_layers, model.num_experts_per_tok
    try:
        experts = np.load(io.BytesIO(base64.b64decode(encoded, validate=True)), allow_pickle=False)
        fits = experts.shape == shape and experts.dtype.kind in "iu"
        fits = fits and experts.min() >= 0 and experts.max() < model.num_experts
    except Exception:
        # numpy's reader raises errors of zip files, of Python's parser and of memory too.
        fits = False
    if not fits:
        raise ValueError("its routed experts are not those of each token; serve the policy's model")
    return experts.astype(np.int32)


class TokenServer:
    """A server by its address.

    Every method raises ServerProblem where it does not answer in time, or not as expected.
    """

    def __init__(self, url: str, flags: Flags, timeout_seconds: float, api_key: str | None) -> None:
        """`timeout_seconds`: of an answer that has to be computed."""
        self.url = url.rstrip("/")
        self._flags = flags
        self._timeout_seconds = timeout_seconds
        self._api_key = api_key

    def _call(
        self,
        path: str,
        schema: type[Content] | Any,
        body: dict[str, Any] | None = None,
        timeout: float = ANSWER_SECONDS,
    ) -> Any:
        headers = {"content-type": "application/json"}
        if self._api_key:
            headers["authorization"] = f"Bearer {self._api_key}"
        content = None if body is None else json.dumps(body).encode()
        try:
            answer = call(
                self.url + path, content, headers, seconds=timeout, max_bytes=MAX_ANSWER_BYTES
            )
            if answer.status >= 300:
                raise self._refusal(path, answer)
            if schema is Any:
                return None
            return parse_json(
                answer.content, schema, f"{self.url}{path}", max_bytes=MAX_ANSWER_BYTES
            )
        except TimeoutError:
            raise ServerProblem(f"{self.url}: no whole answer within {timeout:g} s") from None
        except (OSError, HTTPException, ValueError) as problem:
            reason = cut(str(problem) or type(problem).__name__, MAX_LISTED)
            raise ServerProblem(f"{self.url}: nothing answers ({reason})") from None
        except UserError as problem:
            raise ServerProblem(str(problem)) from None

    def _refusal(self, path: str, answer: HttpAnswer) -> ServerProblem:
        route = path.partition("?")[0]
        status = answer.status
        if status < 400:
            where = f"redirects to {cut(answer.location)}"
            return ServerProblem(
                f"{self.url}: {route}: {where}; no redirect is followed: name the server's own"
                " address",
                status,
            )
        if status == 404:
            return ServerProblem(
                f"{self.url}: has no {route}; {self._flags.get(route, self._flags[''])}", status
            )
        if status in (401, 403):
            return ServerProblem(
                f"{self.url}: refuses the key; give the server's in LMFORGE_API_KEY", status
            )
        try:
            error = json.loads(answer.content)["error"]
            message = error["message"] if isinstance(error, dict) else error
        except (ValueError, KeyError, TypeError, RecursionError):
            message = answer.content.decode("utf-8", "replace")
        return ServerProblem(
            f"{self.url}: {route}: {cut(' '.join(str(message).split()), MAX_LISTED)} (status"
            f" {status})",
            status,
        )


class RolloutServer(TokenServer):
    """A server that samples for a run."""

    def __init__(
        self,
        url: str,
        kind: str,
        settings: SamplingSettings,
        timeout_seconds: float,
        api_key: str | None,
    ) -> None:
        """`kind`: lmforge or vllm.

        `timeout_seconds`: of an answer with sampled tokens, and of loading weights.
        """
        super().__init__(url, FLAGS[kind], timeout_seconds, api_key)
        self.kind = kind
        self._settings = settings
        self._may_be_paused = False

    def sample(
        self,
        request: SampleRequest,
        sampling: SamplingParams,
        starts_with: dict[str, Any] | None = None,
    ) -> SampledTokens:
        """The completion of a request. `starts_with`: see serve/token_api.py; for lmforge alone."""
        params = {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "max_tokens": request.max_tokens,
            # vLLM's are signed.
            "seed": request.seed if self.kind == "lmforge" else request.seed % 2**63,
            "stop_token_ids": sorted(self._settings.stop_token_ids),
            "ignore_eos": True,  # it is one of the stop tokens
            "logprobs": 0,  # those of the sampled tokens alone
        }
        body: dict[str, Any] = {"token_ids": [*request.prompt_ids], "sampling_params": params}
        if starts_with:
            body["starts_with"] = starts_with
        answer = self._call("/inference/v1/generate", _Answer, body, self._timeout_seconds)
        try:
            return SampledTokens(answer.choices[0], request, self._settings)
        except ValueError as problem:
            raise ServerProblem(f"{self.url}: {problem}") from None

    def version(self) -> str:
        """What the server calls its weights.

        One that did not answer when it was to resume is asked again.
        """
        if self._may_be_paused:
            self._resume()
        return self._call("/weight_info", _WeightInfo).weight_version

    def load(self, folder: Path, version: str) -> None:
        """Replace the server's weights by those of a folder, and keep requests in flight.

        Raises ServerProblem unless the server then says that it has this version.
        """
        self._may_be_paused = True
        self._call("/pause?mode=keep", Any, {})
        try:
            # Where the rest fails, no token has the name of weights that it may not be of.
            self._call("/update_weight_version", Any, {"new_version": "being replaced"})
            reload = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
            self._call("/collective_rpc", Any, reload, self._timeout_seconds)
            self._call("/reset_prefix_cache", Any, {})
            self._call("/update_weight_version", Any, {"new_version": version})
        finally:
            self._resume()
        if (confirmed := self.version()) != version:
            raise ServerProblem(
                f"{self.url}: says that its weights are {cut(confirmed)}, and was given {version}"
            )

    def _resume(self) -> None:
        self._call("/resume", Any, {})
        self._may_be_paused = False

    def check(self, config: ModelConfig, num_token_ids: int) -> None:
        """Raise ServerProblem where the server cannot serve a policy of this config, or not
        sequences of its length.

        Of the rows of its embedding the tokenizer uses `num_token_ids`; a server may refuse the
        others.
        """
        info = self._call("/weight_info", _WeightInfo)
        expected = to_config_json(config)
        for name, value in info.model.items():
            if value != expected.get(name):
                words = (
                    f"serves another model ({name} {quoted(value)}, the policy's is"
                    f" {quoted(expected.get(name))})"
                )
                raise ServerProblem(f"{self.url}: {words}; serve the one that the run begins from")
        # A trainer that was killed while the server was given weights has left it paused.
        self._resume()
        vocab_size = config.vocab_size
        highest = min(vocab_size, num_token_ids) - 1
        longest = SampleRequest(0, [highest] * (self._settings.max_length - 1), 1, 0)
        # So cold that the likeliest token is certain.
        cold = self.sample(longest, SamplingParams(0.01)).logprobs[0]
        if (
            self.kind == "vllm"
            and self._settings.params(False) != SamplingParams()
            and cold < math.log(0.9)
        ):
            flag = "start it with vllm serve --logprobs-mode processed_logprobs"
            raise ServerProblem(
                f"{self.url}: reports log-probabilities before temperature and top_p; {flag}"
            )
        try:
            self.sample(SampleRequest(0, [vocab_size], 1, 0), SamplingParams())
        except ServerProblem as problem:
            if problem.status is None or problem.status >= 500:
                raise
        else:
            raise ServerProblem(
                f"{self.url}: reads ids from {vocab_size} on, which the policy lacks; serve the"
                " policy's model"
            )


def check_servers(
    options: RolloutOptions, config: ModelConfig, num_token_ids: int, sequence_length: int
) -> None:
    """Raise UserError where a server of a recipe does not answer, or cannot serve the policy, whose
    tokenizer has `num_token_ids`.
    """
    replayed = config if options.replay_routed_experts else None
    settings = SamplingSettings(
        options.temperature,
        options.top_p,
        config.vocab_size,
        sequence_length,
        frozenset(),
        1,
        replayed,
    )
    key = os.environ.get(API_KEY_VARIABLE)
    servers = [build_server(url, options, settings, key) for url in options.engine_urls]
    with ThreadPoolExecutor(max(1, len(servers))) as pool:
        for checked in [pool.submit(server.check, config, num_token_ids) for server in servers]:
            try:
                checked.result()
            except ServerProblem as problem:
                raise UserError(f"rollout.engine_urls: {problem}") from None


def build_server(
    url: str, options: RolloutOptions, settings: SamplingSettings, api_key: str | None
) -> RolloutServer:
    """A server of a recipe, which may ask for a key."""
    return RolloutServer(url, options.engine, settings, options.engine_timeout_seconds, api_key)
