"""Writing text: requests of unlike lengths decoded together with a KV cache, each with its own seed and its own end.

A request joins the others at any step and leaves when it has ended. What it writes is a function of its prompt, sampling
and seed; its neighbours change the last bits of a sum at most. `decode` and `generate` are for a list that is known at once.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from lmforge.data.order import derive_key
from lmforge.data.tokenizer import Tokenizer
from lmforge.errors import RunFailed, UserError
from lmforge.generate.sampling import SamplingParams, draw_uniforms, sample_tokens
from lmforge.generate.text_streamer import TextStreamer, encode_prompt
from lmforge.model.layers import LanguageModel


@dataclass(frozen=True)
class GenerationRequest:
    """What is to be written: at most `max_tokens` after `prompt`, up to one of `stop_ids`, drawn from `seed` alone.

    `top_logprobs` is how many of the likeliest tokens are told with each.
    """

    prompt_ids: Sequence[int]
    max_tokens: int
    sampling: SamplingParams
    seed: int
    stop_token_ids: frozenset[int]
    top_logprobs: int = 0


@dataclass(frozen=True, slots=True)
class GeneratedToken:
    """The next token of a request.

    logprob: natural logarithm of its probability in the distribution that it was drawn from: after temperature, top-k
        and top-p. Greedy tokens are told by the model's own distribution.
    top: (id, logprob) of the likeliest tokens of that distribution, as many as were asked for or can be drawn.
    last: why nothing follows: "stop" (it is one of the request's stop_ids) or "length"; None where more will come.
    """

    request_id: int
    token_id: int
    logprob: float
    top_logprobs: list[tuple[int, float]] = field(default_factory=list)
    finish_reason: str | None = None


@dataclass
class _RunningRequest:
    """A request that is being written."""

    request_id: int
    request: GenerationRequest
    num_generated: int = 0


class Engine:
    """At most `rows` requests at a time, of at most `max_length` tokens each, prompt included.

    Only ids below `vocab_size` are chosen. Weights are taken as they are when this is made: make another
    after a step of training. Raises UserError where the model cannot read `max_length` tokens.
    """

    def __init__(self, model: LanguageModel, *, vocab_size: int, max_batch_size: int, max_length: int) -> None:
        # In mixed precision sharded weights are fp32 at rest and bf16 when gathered: the embedding in use tells.
        weight = model.embeddings[0].weight
        self._device, dtype = weight.device, weight.dtype
        if torch.is_autocast_enabled(self._device.type):
            dtype = torch.get_autocast_dtype(self._device.type)
        self._model = model
        self._vocab_size = vocab_size
        self._max_batch_size = max_batch_size
        self._max_length = max_length
        self._decoder = model.incremental_decoder(max_batch_size, max_length, device=self._device, dtype=dtype)
        self._last_request_id = 0
        self._pending: list[_RunningRequest] = []
        # Row by row, as the reader has them; so are the tensors: last tokens, and the numbers that draw the next ones.
        self._running: list[_RunningRequest] = []
        self._last_tokens = torch.zeros(0, dtype=torch.long, device=self._device)
        self._uniforms = torch.zeros(0, max_length, dtype=torch.float64, device=self._device)
        self._num_generated = torch.zeros(0, 1, dtype=torch.long, device=self._device)

    @property
    def num_unfinished(self) -> int:
        """Requests that have not ended, those that wait for the next step included."""
        return len(self._running) + len(self._pending)

    @property
    def num_free_slots(self) -> int:
        """How many more can be added now."""
        return self._max_batch_size - self.num_unfinished

    def add_request(self, request: GenerationRequest) -> int:
        """Take a request into the next step; returns the number that its tokens carry.

        Raises ValueError for an empty prompt, UserError for one that is too long or where no slot is free.
        """
        if not request.prompt_ids:
            raise ValueError("an empty prompt")
        wanted = len(request.prompt_ids) + request.max_tokens
        if wanted > self._max_length:
            raise UserError(
                f"{len(request.prompt_ids)} tokens of prompt and {request.max_tokens} new ones are {wanted}, and there is room for "
                f"{self._max_length}: shorten the prompt or ask for fewer"
            )
        if not self.num_free_slots:
            raise UserError(f"all {self._max_batch_size} slots are taken: wait for a request to end, or make room for more")
        self._last_request_id += 1
        self._pending.append(_RunningRequest(self._last_request_id, request))
        return self._last_request_id

    def cancel(self, request_id: int) -> None:
        """End a request: no more tokens of it come. One that has ended already stays so."""
        self._pending = [text for text in self._pending if text.request_id != request_id]
        self._compact([text.request_id != request_id for text in self._running])

    @torch.no_grad()
    def step(self) -> list[GeneratedToken]:
        """The next token of every running request; reads the prompts of those that were added since the last step.

        Raises RunFailed where the model's numbers are no distribution.
        """
        if not self.num_unfinished:
            return []
        hidden = [self._decoder.decode_step(self._last_tokens)] if self._running else []
        if self._pending:
            hidden.append(self._prefill())
        logits = self._model.lm_head(torch.cat(hidden))[:, : self._vocab_size]
        told = self._sample(logits).tolist()  # the one moment at which the host waits for the device
        tokens = [self._to_token(text, row) for text, row in zip(self._running, told, strict=True)]
        self._compact([token.finish_reason is None for token in tokens])
        return tokens

    def _prefill(self) -> Tensor:
        """Read the prompts that wait; hidden states of their last tokens."""
        new = sorted(self._pending, key=lambda text: len(text.request.prompt_ids))
        hidden: Tensor = self._decoder.prefill([text.request.prompt_ids for text in new])
        drawing = torch.zeros(len(new), self._max_length, dtype=torch.float64)
        for row, text in zip(drawing, new, strict=True):
            if not text.request.sampling.is_greedy:
                row[: text.request.max_tokens] = draw_uniforms(text.request.seed, text.request.max_tokens)
        self._uniforms = torch.cat([self._uniforms, drawing.to(self._device)])
        self._num_generated = torch.cat([self._num_generated, self._num_generated.new_zeros(len(new), 1)])
        self._running += new
        self._pending = []
        return hidden

    def _sample(self, logits: Tensor) -> Tensor:
        """fp64 [rows, 2 + 2 * top]: the token drawn and its logprob, then the likeliest tokens and theirs."""
        drawing = self._uniforms.gather(1, self._num_generated)[:, 0]
        self._num_generated += 1
        top = min(self._vocab_size, max(text.request.top_logprobs for text in self._running))
        samplings = [text.request.sampling for text in self._running]
        told = torch.zeros(len(samplings), 2 + 2 * top, dtype=torch.float64, device=self._device)
        for sampling in dict.fromkeys(samplings):
            rows = [row for row, each in enumerate(samplings) if each == sampling]
            chosen = slice(None) if len(rows) == len(samplings) else torch.tensor(rows, device=self._device)
            tokens, probabilities = sample_tokens(logits[chosen], sampling, drawing[chosen])
            columns = [tokens[:, None], probabilities.gather(1, tokens[:, None]).log()]
            if top:
                likeliest = probabilities.topk(top, dim=1)
                columns += [likeliest.indices, likeliest.values.log()]
            found = torch.cat([column.double() for column in columns], dim=1)
            told[chosen, : found.shape[1]] = found
        self._last_tokens = told[:, 0].long()
        return told

    def _to_token(self, running: _RunningRequest, sampled: list[float]) -> GeneratedToken:
        request = running.request
        running.num_generated += 1
        id, logprob, *likeliest = sampled
        if math.isnan(logprob):
            raise RunFailed(
                f"the model's logits are NaN or infinite after {len(request.prompt_ids) + running.num_generated - 1} tokens: "
                "its weights are damaged, or its numbers leave what the dtype holds"
            )
        half = len(likeliest) // 2
        pairs = list(zip(map(int, likeliest[:half]), likeliest[half:], strict=True))[: request.top_logprobs]
        last = "stop" if id in request.stop_token_ids else "length" if running.num_generated == request.max_tokens else None
        return GeneratedToken(running.request_id, int(id), logprob, [pair for pair in pairs if pair[1] > -torch.inf], last)

    def _compact(self, unfinished: list[bool]) -> None:
        """Only these rows stay; the last ones take the places that became free, so that few are moved."""
        if all(unfinished):
            return
        rows = [row for row, stays in enumerate(unfinished) if stays]
        count = len(rows)
        kept = [row if unfinished[row] else rows.pop() for row in range(count)]
        self._decoder.select_sequences(kept)
        self._running = [self._running[row] for row in kept]
        chosen = torch.tensor(kept, dtype=torch.long, device=self._device)
        self._last_tokens, self._uniforms, self._num_generated = (
            part[chosen] for part in (self._last_tokens, self._uniforms, self._num_generated)
        )


def decode(
    model: LanguageModel,
    prompts: Sequence[Sequence[int]],
    *,
    vocab_size: int,
    max_tokens: int,
    sampling: SamplingParams,
    seed: int,
    stop_ids: frozenset[int],
    n: int = 1,
) -> Iterator[list[GeneratedToken]]:
    """Tokens as they come: each item has the next one of every completion that has not ended.

    There are `n` completions of each prompt; `request` of a token is `n * prompt + sample`, and seeds that one's draws
    together with `seed`. A token of `stop_ids` is given out, and ends its completion. Prompts are lists of at least one
    token id. Raises UserError where prompt and new tokens exceed what the model reads.
    """
    engine, places = _start_engine(model, prompts, n, GenerationRequest((), max_tokens, sampling, seed, stop_ids), vocab_size)
    while engine.num_unfinished:
        yield [
            GeneratedToken(places[token.request_id], token.token_id, token.logprob, token.top_logprobs, token.finish_reason)
            for token in engine.step()
        ]


def _start_engine(
    model: LanguageModel, prompts: Sequence[Sequence[int]], num_completions: int, template: GenerationRequest, vocab_size: int
) -> tuple[Engine, dict[int, int]]:
    """An engine with `n` requests for each prompt, else like `like`, and the place of each among all by its number there."""
    if not all(prompts):
        raise ValueError("an empty prompt")
    longest = max(map(len, prompts))
    engine = Engine(
        model, vocab_size=vocab_size, max_batch_size=num_completions * len(prompts), max_length=longest + template.max_tokens
    )
    places = {}
    for place in range(num_completions * len(prompts)):
        number, sample = divmod(place, num_completions)
        own = derive_key(template.seed, "completion", number, sample)
        places[engine.add_request(replace(template, prompt_ids=prompts[number], seed=own))] = place
    return engine, places


@dataclass(frozen=True)
class Completion:
    """What was written after a prompt: its tokens (with the one that ended it), its text, and why it ended.

    logprobs: of each token, as it was drawn (see Token).
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
    max_tokens: int,
    sampling: SamplingParams,
    seed: int,
    num_completions: int = 1,
    stop_strings: Sequence[str] = (),
    prefix_ids: Sequence[int] = (),
    stop_token_ids: frozenset[int] = frozenset(),
    on_text: Callable[[int, str], None] = lambda row, piece: None,
) -> list[Completion]:
    """Complete each prompt `n` times: all of the first prompt's, then the second's. `on_text(row, piece)` is called with
    text as soon as it is certain, row counting completions.

    Each prompt, a text or its ids, is put after the ids of `opening`. A completion ends at the tokenizer's end-of-text or an
    id of `ends`, before the first of the `stop` texts, or after `max_tokens`.
    """
    stop_token_ids |= {tokenizer.eos_token_id}
    writers = [TextStreamer(tokenizer, stop_strings) for _ in range(num_completions * len(prompts))]
    logprobs: list[list[float]] = [[] for _ in writers]
    beginnings = [encode_prompt(tokenizer, prompt, prefix_ids) for prompt in prompts]
    engine, places = _start_engine(
        model,
        beginnings,
        num_completions,
        GenerationRequest((), max_tokens, sampling, seed, stop_token_ids),
        tokenizer.vocab_size,
    )
    while engine.num_unfinished:
        for token in engine.step():
            row = places[token.request_id]
            logprobs[row].append(token.logprob)
            _report_text(on_text, row, writers[row].add(token.token_id, is_stop=token.finish_reason == "stop"))
            if writers[row].finish_reason and token.finish_reason is None:  # by a stop text, of which the engine knows nothing
                engine.cancel(token.request_id)
    for row, writer in enumerate(writers):
        _report_text(on_text, row, writer.finish())
    return [
        Completion(writer.token_ids, writer.text, writer.finish_reason or "length", told)
        for writer, told in zip(writers, logprobs, strict=True)
    ]


def _report_text(on_text: Callable[[int, str], None], row: int, piece: str) -> None:
    if piece:
        on_text(row, piece)
