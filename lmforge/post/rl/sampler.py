"""Sampling: prompts and seeds become completions, ids with log-probabilities and versions.

A sampler opens a session; requests are added to it and answered in any order. The sampler here is
the trainer itself, that by servers is in servers.py. Texts, rewards and batches are not here.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from lmforge.core.model.config import ModelConfig
from lmforge.core.parallel.parallel_model import ParallelModel, unsharded_for_decoding
from lmforge.serve.decoding.engine import Engine, GenerationRequest
from lmforge.serve.decoding.sampling import SamplingParams

# The version of a token that the policy did not sample, such as one of a tool's answer. It is never
# trained on.
NOT_SAMPLED = -1


@dataclass
class SampledCompletion:
    """The tokens after a prompt: spans that were sampled, and spans that were given between them.

    tokens    ids, with the stop token that ended a span if one did
    logprobs  the log-probability of each token in nats when it was sampled, 0 for given tokens
    versions  the version of the weights that sampled each token (the index of the batch that they
              were first used for), NOT_SAMPLED for given tokens
    stopped   whether the last span ended with a stop token
    routed_experts  int32 [tokens, layers, experts of a token] that sampled prompt and completion
                    but the last token; None where it is not asked for
    """

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    stopped: bool = False
    routed_experts: np.ndarray | None = None

    @property
    def num_sampled(self) -> int:
        return len(self.versions) - self.versions.count(NOT_SAMPLED)

    def add_sampled(self, token: int, logprob: float, version: int) -> None:
        """Append a token that the policy sampled."""
        self.tokens.append(token)
        self.logprobs.append(logprob)
        self.versions.append(version)

    def add_given(self, tokens: Sequence[int]) -> None:
        """Append tokens that the policy reads and did not sample."""
        self.tokens += tokens
        self.logprobs += [0.0] * len(tokens)
        self.versions += [NOT_SAMPLED] * len(tokens)

    def extend(self, span: "SampledCompletion") -> None:
        """Append another span."""
        self.tokens += span.tokens
        self.logprobs += span.logprobs
        self.versions += span.versions
        self.stopped = span.stopped
        if span.routed_experts is not None:  # of all before the span too, which was read once more
            known = span.routed_experts[:0] if self.routed_experts is None else self.routed_experts
            self.routed_experts = np.concatenate([known, span.routed_experts[len(known) :]])


class SampleRequest(NamedTuple):
    """Sample at most `max_tokens` ids after `prompt_ids` with a seed; `key` says which request it
    was.
    """

    key: int
    prompt_ids: Sequence[int]
    max_tokens: int
    seed: int


class SamplingSession(Protocol):
    """Requests that are sampled with the same settings."""

    @property
    def in_order(self) -> bool:
        """Whether the bits of what is sampled depend on which requests are there together."""

    @property
    def num_unfinished(self) -> int:
        """How many requests have no completion yet."""

    def add(self, request: SampleRequest) -> None:
        """Take a request, which may wait for others."""

    def step(self) -> list[tuple[SampleRequest, SampledCompletion]]:
        """Go on for a moment.

        Returns what is finished since the last call, each once; empty where nothing is.
        """

    def wake(self) -> None:
        """From another thread: end a `step` that waits."""


@dataclass(frozen=True)
class SamplingSettings:
    """How every completion of a run is sampled.

    `max_length`: of prompt and completion together, in tokens;
    `replayed`: the model whose experts are returned with each token, None where no experts are.
    """

    temperature: float
    top_p: float
    vocab_size: int
    max_length: int
    stop_token_ids: frozenset[int]
    decode_batch_size: int
    replayed: ModelConfig | None = None

    def params(self, greedy: bool) -> SamplingParams:
        return SamplingParams(0.0 if greedy else self.temperature, top_p=self.top_p)


class InProcessSampler:
    """Samples from the policy in this process."""

    def __init__(self, parallel_model: ParallelModel, settings: SamplingSettings) -> None:
        self._parallel_model = parallel_model
        self._settings = settings

    @contextmanager
    def session(
        self, num_requests: int, version: int, *, greedy: bool = False
    ) -> Iterator[SamplingSession]:
        """A session for at most `num_requests` at once, on the weights as they are, which are
        called `version`.

        Every rank calls it, also with no requests, since it is collective.
        """
        settings = self._settings
        with unsharded_for_decoding(self._parallel_model) as model:
            engine = None
            if num_requests:
                size = min(settings.decode_batch_size, num_requests)
                engine = Engine(
                    model,
                    vocab_size=settings.vocab_size,
                    max_batch_size=size,
                    max_length=settings.max_length,
                    return_routed_experts=settings.replayed is not None,
                )
            yield _EngineSession(engine, settings, version, greedy)

    def close(self) -> None:
        """Does nothing, since there are no servers."""


class _EngineSession:
    in_order = True  # they are batches of one model

    def __init__(
        self, engine: Engine | None, settings: SamplingSettings, version: int, greedy: bool
    ) -> None:
        self._engine = engine
        self._version = version
        self._params = settings.params(greedy)
        self._stop_token_ids = settings.stop_token_ids
        self._waiting: list[SampleRequest] = []
        self._running: dict[int, tuple[SampleRequest, SampledCompletion]] = {}
        self._experts: dict[int, list[Tensor]] = {}

    @property
    def num_unfinished(self) -> int:
        return len(self._waiting) + len(self._running)

    def add(self, request: SampleRequest) -> None:
        self._waiting.append(request)

    def step(self) -> list[tuple[SampleRequest, SampledCompletion]]:
        if self._engine is None:
            return []
        while self._waiting and self._engine.num_free_slots:
            each = self._waiting.pop(0)
            request = GenerationRequest(
                each.prompt_ids, each.max_tokens, self._params, each.seed, self._stop_token_ids
            )
            self._running[self._engine.add_request(request)] = each, SampledCompletion()
        finished = []
        for token in self._engine.step():
            completion = self._running[token.request_id][1]
            completion.add_sampled(token.token_id, token.logprob, self._version)
            completion.stopped = token.finish_reason == "stop"
            if token.routed_experts is not None:
                self._experts.setdefault(token.request_id, []).append(token.routed_experts)
            if token.finish_reason:
                if experts := self._experts.pop(token.request_id, None):
                    completion.routed_experts = torch.cat(experts).numpy()
                finished.append(self._running.pop(token.request_id))
        return finished

    def wake(self) -> None:
        """A step never waits."""


def sample_all(
    session: SamplingSession, requests: Sequence[SampleRequest], on_step: Callable[[], None]
) -> list[SampledCompletion]:
    """The completion of each request, in their order.

    `on_step` is called after each step of the session.
    """
    completions = {}
    for request in requests:
        session.add(request)
    while session.num_unfinished:
        completions.update({request.key: completion for request, completion in session.step()})
        on_step()
    return [completions[request.key] for request in requests]
