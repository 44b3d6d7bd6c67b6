"""Text generation: requests of different lengths are decoded together with a KV cache.

Each has its own seed and end. `Engine` takes requests one by one: a request joins the batch at any
step and leaves when it has finished. Its tokens are a function of its prompt, sampling and seed;
other requests in the batch change the last bits of a sum at most. `generate` completes a list of
prompts.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lmforge.core.data.order import derive_key
from lmforge.core.data.tokenizer import Tokenizer
from lmforge.core.errors import RunFailed, UserError
from lmforge.core.model.layers import LanguageModel
from lmforge.serve.decoding.incremental import incremental_decoder
from lmforge.serve.decoding.prompts import (
    check_room,
    check_token_ids,
    encode_prompt,
    scored_logits,
    stop_string_ids,
)
from lmforge.serve.decoding.sampling import (
    SamplingParams,
    draw_uniforms,
    penalize_repetition,
    sample_tokens,
)
from lmforge.serve.decoding.text_streamer import TextStreamer


@dataclass(frozen=True)
class GenerationRequest:
    """A request for at most `max_tokens` tokens after `prompt_ids`.

    They are sampled with `seed`, and end with one of `stop_token_ids`. top_logprobs: the number of
    likeliest tokens that are reported with each. score_prompt: those of the prompt are reported
    too. num_resumed: the number of last `prompt_ids` that were generated for it before.
    """

    prompt_ids: Sequence[int]
    max_tokens: int
    sampling: SamplingParams
    seed: int
    stop_token_ids: frozenset[int]
    top_logprobs: int = 0
    score_prompt: bool = False
    num_resumed: int = 0


@dataclass(frozen=True, slots=True)
class GeneratedToken:
    """The next token of a request.

    logprob: log-probability in nats under the distribution it was drawn from, after temperature,
        top-k and top-p. For greedy decoding that is the model's own distribution.
    top_logprobs: (id, logprob) of the likeliest tokens of that distribution, as many as were
    requested or can be drawn.
    finish_reason: "stop" (a stop token of the request) or "length" with the last token, None
    before.
    prompt: with the first token, those of a prompt that is scored, all but its first, under the
    model's own distribution.
    routed_experts: of an engine that returns them, int32 [tokens, layers, experts of a token] of
        the tokens that were read for it: the prompt, or the token before.
    """

    request_id: int
    token_id: int
    logprob: float
    top_logprobs: list[tuple[int, float]] = field(default_factory=list)
    finish_reason: str | None = None
    prompt: list["GeneratedToken"] = field(default_factory=list)
    routed_experts: Tensor | None = None


@dataclass
class _RunningRequest:
    request_id: int
    request: GenerationRequest
    num_generated: int = 0
    prompt: list[GeneratedToken] = field(default_factory=list)
    # Bool [vocab]: the tokens of prompt and answer, where repetition is penalized.
    seen: Tensor | None = None


class Engine:
    """Decodes at most `max_batch_size` requests at a time.

    Each has at most `max_length` tokens, prompt included. Only ids below `vocab_size` that the
    model has are chosen. The weights are read when the engine is built: build another after a
    training step. Raises UserError where the model cannot read `max_length` tokens.
    """

    def __init__(
        self,
        model: LanguageModel,
        *,
        vocab_size: int,
        max_batch_size: int,
        max_length: int,
        return_routed_experts: bool = False,
    ) -> None:
        # In mixed precision sharded weights are stored in fp32 and gathered in bf16, so the dtype
        # is that of the gathered embedding.
        weight = model.embeddings[0].weight
        self._device = weight.device
        dtype = weight.dtype
        if torch.is_autocast_enabled(self._device.type):
            dtype = torch.get_autocast_dtype(self._device.type)
        self._model = model
        self._vocab_size = min(vocab_size, model.config.vocab_size)
        self._max_batch_size = max_batch_size
        self._max_length = max_length
        records = {"records_experts": True} if return_routed_experts else {}
        self._decoder = incremental_decoder(
            model, max_batch_size, max_length, device=self._device, dtype=dtype, **records
        )
        self._returns_experts = return_routed_experts
        self._last_request_id = 0
        self._pending: list[_RunningRequest] = []
        # In the decoder's order, like the tensors of last tokens and of uniform numbers for
        # sampling the next ones.
        self._running: list[_RunningRequest] = []
        self._last_tokens = torch.zeros(0, dtype=torch.long, device=self._device)
        self._uniforms = torch.zeros(0, max_length, dtype=torch.float64, device=self._device)
        self._num_generated = torch.zeros(0, 1, dtype=torch.long, device=self._device)

    @property
    def num_unfinished(self) -> int:
        """The number of unfinished requests, including those that wait for the next step."""
        return len(self._running) + len(self._pending)

    @property
    def num_free_slots(self) -> int:
        """The number of requests that can be added now."""
        return self._max_batch_size - self.num_unfinished

    def add_request(self, request: GenerationRequest) -> int:
        """Add a request to the next step. Returns the id that its tokens carry.

        Raises ValueError for an empty prompt, UserError where the model lacks one of its ids, where
        the request is too long, or where no slot is free.
        """
        if not request.prompt_ids:
            raise ValueError("an empty prompt")
        check_token_ids(request.prompt_ids, self._model.config.vocab_size)
        total = len(request.prompt_ids) + request.max_tokens
        if total > self._max_length:
            raise UserError(
                f"{len(request.prompt_ids)} prompt tokens and {request.max_tokens} new ones are"
                f" {total}, more than the {self._max_length} allowed; shorten the prompt or"
                " generate fewer"
            )
        if not self.num_free_slots:
            raise UserError(
                f"all {self._max_batch_size} slots are taken; wait for a request to finish"
            )
        self._last_request_id += 1
        self._pending.append(_RunningRequest(self._last_request_id, request))
        return self._last_request_id

    def cancel(self, request_id: int) -> None:
        """Stop a request: it yields no more tokens. Does nothing for one that has finished."""
        self._pending = [each for each in self._pending if each.request_id != request_id]
        self._compact([each.request_id != request_id for each in self._running])

    def clear(self) -> None:
        """Stop all requests, also after a step that has failed."""
        self._pending = []
        self._select([])
        if self._returns_experts:
            self._decoder.take_experts()

    @torch.no_grad()
    def step(self) -> list[GeneratedToken]:
        """The next token of every unfinished request.

        Prefills the requests that were added since the last step.

        Raises RunFailed where the logits are NaN or all infinite. After an error only `clear` may
        be called.
        """
        if not self.num_unfinished:
            return []
        hidden = [self._decoder.decode_step(self._last_tokens)] if self._running else []
        if self._pending:
            hidden.append(self._prefill())
        logits = self._model.lm_head(torch.cat(hidden))[:, : self._vocab_size]
        # The only point at which the host waits for the device.
        sampled = self._sample(logits).tolist()
        experts = self._decoder.take_experts() if self._returns_experts else [None] * len(sampled)
        tokens = [
            self._to_token(*each) for each in zip(self._running, sampled, experts, strict=True)
        ]
        self._compact([token.finish_reason is None for token in tokens])
        return tokens

    def _prefill(self) -> Tensor:
        """Read the pending prompts. Returns the hidden states of their last tokens."""
        added = sorted(self._pending, key=lambda each: len(each.request.prompt_ids))
        for each in added:
            if each.request.score_prompt and len(each.request.prompt_ids) > 1:
                each.prompt = self._score_prompt(each.request_id, each.request)
        hidden: Tensor = self._decoder.prefill([each.request.prompt_ids for each in added])
        uniforms = torch.zeros(len(added), self._max_length, dtype=torch.float64)
        for row, each in zip(uniforms, added, strict=True):
            request = each.request
            if not request.sampling.is_greedy:
                drawn = draw_uniforms(request.seed, request.num_resumed + request.max_tokens)
                row[: request.max_tokens] = drawn[request.num_resumed :]
            if request.sampling.repetition_penalty != 1:
                each.seen = torch.zeros(self._vocab_size, dtype=torch.bool, device=self._device)
                each.seen[torch.tensor(request.prompt_ids, device=self._device)] = True
        zeros = self._num_generated.new_zeros(len(added), 1)
        self._uniforms = torch.cat([self._uniforms, uniforms.to(self._device)])
        self._num_generated = torch.cat([self._num_generated, zeros])
        self._running += added
        self._pending = []
        return hidden

    def _score_prompt(self, request_id: int, request: GenerationRequest) -> list[GeneratedToken]:
        scored = []
        top = min(request.top_logprobs, self._vocab_size)
        sequence = (request.prompt_ids, len(request.prompt_ids) - 1)
        for logits, ids in scored_logits(self._model, [sequence]):
            logprobs = logits.log_softmax(-1)
            values = logprobs.gather(1, ids[:, None])[:, 0].tolist()
            likeliest = logprobs[:, : self._vocab_size].topk(top, dim=1)
            columns = ids.tolist(), values, likeliest.indices.tolist(), likeliest.values.tolist()
            for id, logprob, top_ids, top_logprobs in zip(*columns, strict=True):
                pairs = list(zip(top_ids, top_logprobs, strict=True))
                scored.append(GeneratedToken(request_id, id, logprob, pairs))
        return scored

    def _sample(self, logits: Tensor) -> Tensor:
        """Sample the next tokens, fp64 [batch, 2 + 2 * top].

        A row is the sampled token and its logprob, then the likeliest tokens and theirs.
        """
        uniforms = self._uniforms.gather(1, self._num_generated)[:, 0]
        self._num_generated += 1
        top = min(self._vocab_size, max(each.request.top_logprobs for each in self._running))
        params = [each.request.sampling for each in self._running]
        sampled = torch.zeros(len(params), 2 + 2 * top, dtype=torch.float64, device=self._device)
        for sampling in dict.fromkeys(params):
            rows = [row for row, each in enumerate(params) if each == sampling]
            index: slice | Tensor = slice(None)
            if len(rows) < len(params):
                index = torch.tensor(rows, device=self._device)
            seen = [
                each.seen
                for each in self._running
                if each.request.sampling == sampling and each.seen is not None
            ]
            scores = logits[index]
            if seen:
                scores = penalize_repetition(scores, torch.stack(seen), sampling.repetition_penalty)
            tokens, probs = sample_tokens(scores, sampling, uniforms[index])
            for marks, token in zip(seen, tokens, strict=False):
                marks[token] = True
            columns = [tokens[:, None], probs.gather(1, tokens[:, None]).log()]
            if top:
                likeliest = probs.topk(top, dim=1)
                columns += [likeliest.indices, likeliest.values.log()]
            sampled[index] = torch.cat([column.double() for column in columns], dim=1)
        self._last_tokens = sampled[:, 0].long()
        return sampled

    def _to_token(
        self, running: _RunningRequest, sampled: list[float], experts: Tensor | None
    ) -> GeneratedToken:
        request = running.request
        running.num_generated += 1
        id, logprob, *likeliest = sampled
        if math.isnan(logprob):
            raise RunFailed(
                "the model's logits are NaN or infinite after"
                f" {len(request.prompt_ids) + running.num_generated - 1} tokens: its weights are"
                " damaged, or its activations overflow the dtype"
            )
        half = len(likeliest) // 2
        pairs = list(zip(map(int, likeliest[:half]), likeliest[half:], strict=True))
        reason = "length" if running.num_generated >= request.max_tokens else None
        if id in request.stop_token_ids:
            reason = "stop"
        top = pairs[: request.top_logprobs]
        likely = [pair for pair in top if pair[1] > -torch.inf]
        prompt = running.prompt if running.num_generated == 1 else []
        if request.num_resumed and experts is not None:
            experts = experts[-1:]  # those before were reported with earlier tokens
        return GeneratedToken(running.request_id, int(id), logprob, likely, reason, prompt, experts)

    def _compact(self, unfinished: list[bool]) -> None:
        """Keep the unfinished requests.

        The last ones move into the slots that became free, so that few are moved.
        """
        if all(unfinished):
            return
        rows = [row for row, stays in enumerate(unfinished) if stays]
        self._select([row if unfinished[row] else rows.pop() for row in range(len(rows))])

    def _select(self, kept: list[int]) -> None:
        self._decoder.select_sequences(kept)
        self._running = [self._running[row] for row in kept]
        index = torch.tensor(kept, dtype=torch.long, device=self._device)
        state = self._last_tokens, self._uniforms, self._num_generated
        self._last_tokens, self._uniforms, self._num_generated = (tensor[index] for tensor in state)


@dataclass(frozen=True)
class Completion:
    """The continuation of a prompt.

    `token_ids` include the stop token, `text` does not; `logprobs` as in GeneratedToken.
    """

    token_ids: list[int]
    text: str
    finish_reason: str  # "stop" or "length"
    logprobs: list[float]


def generate(
    model: LanguageModel,
    tokenizer: Tokenizer,
    prompts: Sequence[str | Sequence[int]],
    *,
    max_tokens: int | Sequence[int],
    sampling: SamplingParams,
    seed: int,
    stop_strings: Sequence[str] = (),
    prefix_ids: Sequence[int] = (),
    stop_token_ids: frozenset[int] = frozenset(),
    max_length: int | None = None,
    on_text: Callable[[int, str], None] = lambda index, text: None,
) -> list[Completion]:
    """Complete each prompt, a text or token ids.

    Each prompt is put after `prefix_ids`. A completion ends at the tokenizer's end-of-text token or
    one of `stop_token_ids`, before the first of `stop_strings`, which may spell a special token, or
    after `max_tokens` (one number, or one for each prompt); with `max_length` also where it and its
    prompt have so many. `on_text(index, text)` is called with text as soon as it will not change;
    `index` counts completions. Raises UserError where prompt and new tokens exceed what the model
    reads, or a prompt `max_length`.
    """
    if not prompts:
        return []
    stop_token_ids |= {tokenizer.eos_token_id, *stop_string_ids(tokenizer, stop_strings)}
    encoded = [encode_prompt(tokenizer, prompt, prefix_ids, max_length) for prompt in prompts]
    rooms = [max_tokens] * len(prompts) if isinstance(max_tokens, int) else max_tokens
    if max_length is not None:
        rooms = [
            min(room, check_room(len(each), max_length))
            for each, room in zip(encoded, rooms, strict=True)
        ]
    engine = Engine(
        model,
        vocab_size=tokenizer.vocab_size,
        max_batch_size=len(prompts),
        max_length=max(len(each) + room for each, room in zip(encoded, rooms, strict=True)),
    )
    indices: dict[int, int] = {}
    for number, (prompt_ids, room) in enumerate(zip(encoded, rooms, strict=True)):
        own_seed = derive_key(seed, "completion", number, 0)
        request = GenerationRequest(prompt_ids, room, sampling, own_seed, stop_token_ids)
        indices[engine.add_request(request)] = number
    continued = [isinstance(prompt, str) and prompt != "" for prompt in prompts]
    streamers = [
        TextStreamer(tokenizer, stop_strings, is_continuation) for is_continuation in continued
    ]
    logprobs: list[list[float]] = [[] for _ in indices]
    while engine.num_unfinished:
        for token in engine.step():
            index = indices[token.request_id]
            logprobs[index].append(token.logprob)
            text = streamers[index].add(token.token_id, is_stop=token.finish_reason == "stop")
            if text:
                on_text(index, text)
            # A stop string, unknown to the engine.
            if streamers[index].finish_reason and token.finish_reason is None:
                engine.cancel(token.request_id)
    for index, streamer in enumerate(streamers):
        text = streamer.finish()
        if text:
            on_text(index, text)
    return [
        Completion(streamer.token_ids, streamer.text, streamer.finish_reason or "length", each)
        for streamer, each in zip(streamers, logprobs, strict=True)
    ]
