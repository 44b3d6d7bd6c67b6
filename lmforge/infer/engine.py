"""Writing text: requests of unlike lengths decoded together with a KV cache, each with its own seed and its own end.

A request joins the others at any step and leaves when it has ended. What it writes is a function of its prompt, sampling
and seed; its neighbours change the last bits of a sum at most. `decode` and `generate` are for a list that is known at once.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from lmforge.data.order import key
from lmforge.data.tokenizer import Tokenizer
from lmforge.errors import Mistake, RunFailed
from lmforge.infer.sampling import Sampling, choose, uniforms
from lmforge.infer.writing import Writer, prompt_ids
from lmforge.model.layers import LanguageModel


@dataclass(frozen=True)
class Request:
    """What is to be written: at most `max_tokens` after `prompt`, up to one of `stop_ids`, drawn from `seed` alone.

    `top_logprobs` is how many of the likeliest tokens are told with each.
    """

    prompt: Sequence[int]
    max_tokens: int
    sampling: Sampling
    seed: int
    stop_ids: frozenset[int]
    top_logprobs: int = 0


@dataclass(frozen=True, slots=True)
class Token:
    """The next token of a request.

    logprob: natural logarithm of its probability in the distribution that it was drawn from: after temperature, top-k
        and top-p. Greedy tokens are told by the model's own distribution.
    top: (id, logprob) of the likeliest tokens of that distribution, as many as were asked for or can be drawn.
    last: why nothing follows: "stop" (it is one of the request's stop_ids) or "length"; None where more will come.
    """

    request: int
    id: int
    logprob: float
    top: list[tuple[int, float]] = field(default_factory=list)
    last: str | None = None


@dataclass
class _Text:
    """A request that is being written."""

    id: int
    request: Request
    written: int = 0


class Engine:
    """At most `rows` requests at a time, of at most `max_length` tokens each, prompt included.

    Only ids below `vocab_size` are chosen. Weights are taken as they are when this is made: make another
    after a step of training. Raises Mistake where the model cannot read `max_length` tokens.
    """

    def __init__(self, model: LanguageModel, *, vocab_size: int, rows: int, max_length: int) -> None:
        # In mixed precision sharded weights are fp32 at rest and bf16 when gathered: the embedding in use tells.
        weight = model.embeddings[0].weight
        self._device, dtype = weight.device, weight.dtype
        if torch.is_autocast_enabled(self._device.type):
            dtype = torch.get_autocast_dtype(self._device.type)
        self._model = model
        self._vocab_size = vocab_size
        self._rows = rows
        self._max_length = max_length
        self._reader = model.reader(rows, max_length, device=self._device, dtype=dtype)
        self._given = 0
        self._waiting: list[_Text] = []
        # Row by row, as the reader has them; so are the tensors: last tokens, and the numbers that draw the next ones.
        self._running: list[_Text] = []
        self._last = torch.zeros(0, dtype=torch.long, device=self._device)
        self._uniforms = torch.zeros(0, max_length, dtype=torch.float64, device=self._device)
        self._written = torch.zeros(0, 1, dtype=torch.long, device=self._device)

    @property
    def running(self) -> int:
        """Requests that have not ended, those that wait for the next step included."""
        return len(self._running) + len(self._waiting)

    @property
    def free(self) -> int:
        """How many more can be added now."""
        return self._rows - self.running

    def add(self, request: Request) -> int:
        """Take a request into the next step; returns the number that its tokens carry.

        Raises ValueError for an empty prompt, Mistake for one that is too long or where no slot is free.
        """
        if not request.prompt:
            raise ValueError("an empty prompt")
        wanted = len(request.prompt) + request.max_tokens
        if wanted > self._max_length:
            raise Mistake(
                f"{len(request.prompt)} tokens of prompt and {request.max_tokens} new ones are {wanted}, and there is room for "
                f"{self._max_length}: shorten the prompt or ask for fewer"
            )
        if not self.free:
            raise Mistake(f"all {self._rows} slots are taken: wait for a request to end, or make room for more")
        self._given += 1
        self._waiting.append(_Text(self._given, request))
        return self._given

    def cancel(self, request: int) -> None:
        """End a request: no more tokens of it come. One that has ended already stays so."""
        self._waiting = [text for text in self._waiting if text.id != request]
        self._keep([text.id != request for text in self._running])

    @torch.no_grad()
    def step(self) -> list[Token]:
        """The next token of every running request; reads the prompts of those that were added since the last step.

        Raises RunFailed where the model's numbers are no distribution.
        """
        if not self.running:
            return []
        hidden = [self._reader.go_on(self._last)] if self._running else []
        if self._waiting:
            hidden.append(self._begin())
        logits = self._model.lm_head(torch.cat(hidden))[:, : self._vocab_size]
        told = self._draw(logits).tolist()  # the one moment at which the host waits for the device
        tokens = [self._token(text, row) for text, row in zip(self._running, told, strict=True)]
        self._keep([token.last is None for token in tokens])
        return tokens

    def _begin(self) -> Tensor:
        """Read the prompts that wait; hidden states of their last tokens."""
        new = sorted(self._waiting, key=lambda text: len(text.request.prompt))
        hidden: Tensor = self._reader.begin([text.request.prompt for text in new])
        drawing = torch.zeros(len(new), self._max_length, dtype=torch.float64)
        for row, text in zip(drawing, new, strict=True):
            if not text.request.sampling.greedy:
                row[: text.request.max_tokens] = uniforms(text.request.seed, text.request.max_tokens)
        self._uniforms = torch.cat([self._uniforms, drawing.to(self._device)])
        self._written = torch.cat([self._written, self._written.new_zeros(len(new), 1)])
        self._running += new
        self._waiting = []
        return hidden

    def _draw(self, logits: Tensor) -> Tensor:
        """fp64 [rows, 2 + 2 * top]: the token drawn and its logprob, then the likeliest tokens and theirs."""
        drawing = self._uniforms.gather(1, self._written)[:, 0]
        self._written += 1
        top = min(self._vocab_size, max(text.request.top_logprobs for text in self._running))
        samplings = [text.request.sampling for text in self._running]
        told = torch.zeros(len(samplings), 2 + 2 * top, dtype=torch.float64, device=self._device)
        for sampling in dict.fromkeys(samplings):
            rows = [row for row, each in enumerate(samplings) if each == sampling]
            chosen = slice(None) if len(rows) == len(samplings) else torch.tensor(rows, device=self._device)
            tokens, probabilities = choose(logits[chosen], sampling, drawing[chosen])
            columns = [tokens[:, None], probabilities.gather(1, tokens[:, None]).log()]
            if top:
                likeliest = probabilities.topk(top, dim=1)
                columns += [likeliest.indices, likeliest.values.log()]
            found = torch.cat([column.double() for column in columns], dim=1)
            told[chosen, : found.shape[1]] = found
        self._last = told[:, 0].long()
        return told

    def _token(self, text: _Text, told: list[float]) -> Token:
        request = text.request
        text.written += 1
        id, logprob, *likeliest = told
        if math.isnan(logprob):
            raise RunFailed(
                f"the model's logits are NaN or infinite after {len(request.prompt) + text.written - 1} tokens: "
                "its weights are damaged, or its numbers leave what the dtype holds"
            )
        half = len(likeliest) // 2
        pairs = list(zip(map(int, likeliest[:half]), likeliest[half:], strict=True))[: request.top_logprobs]
        last = "stop" if id in request.stop_ids else "length" if text.written == request.max_tokens else None
        return Token(text.id, int(id), logprob, [pair for pair in pairs if pair[1] > -torch.inf], last)

    def _keep(self, going_on: list[bool]) -> None:
        """Only these rows stay; the last ones take the places that became free, so that few are moved."""
        if all(going_on):
            return
        rows = [row for row, stays in enumerate(going_on) if stays]
        count = len(rows)
        kept = [row if going_on[row] else rows.pop() for row in range(count)]
        self._reader.keep(kept)
        self._running = [self._running[row] for row in kept]
        chosen = torch.tensor(kept, dtype=torch.long, device=self._device)
        self._last, self._uniforms, self._written = (part[chosen] for part in (self._last, self._uniforms, self._written))


def decode(
    model: LanguageModel,
    prompts: Sequence[Sequence[int]],
    *,
    vocab_size: int,
    max_tokens: int,
    sampling: Sampling,
    seed: int,
    stop_ids: frozenset[int],
    n: int = 1,
) -> Iterator[list[Token]]:
    """Tokens as they come: each item has the next one of every completion that has not ended.

    There are `n` completions of each prompt; `request` of a token is `n * prompt + sample`, and seeds that one's draws
    together with `seed`. A token of `stop_ids` is given out, and ends its completion. Prompts are lists of at least one
    token id. Raises Mistake where prompt and new tokens exceed what the model reads.
    """
    engine, places = _begin(model, prompts, n, Request((), max_tokens, sampling, seed, stop_ids), vocab_size)
    while engine.running:
        yield [Token(places[token.request], token.id, token.logprob, token.top, token.last) for token in engine.step()]


def _begin(
    model: LanguageModel, prompts: Sequence[Sequence[int]], n: int, like: Request, vocab_size: int
) -> tuple[Engine, dict[int, int]]:
    """An engine with `n` requests for each prompt, else like `like`, and the place of each among all by its number there."""
    if not all(prompts):
        raise ValueError("an empty prompt")
    longest = max(map(len, prompts))
    engine = Engine(model, vocab_size=vocab_size, rows=n * len(prompts), max_length=longest + like.max_tokens)
    places = {}
    for place in range(n * len(prompts)):
        number, sample = divmod(place, n)
        own = key(like.seed, "completion", number, sample)
        places[engine.add(replace(like, prompt=prompts[number], seed=own))] = place
    return engine, places


@dataclass(frozen=True)
class Completion:
    """What was written after a prompt: its tokens (with the one that ended it), its text, and why it ended.

    logprobs: of each token, as it was drawn (see Token).
    """

    tokens: list[int]
    text: str
    reason: str  # "stop" or "length"
    logprobs: list[float]


def generate(
    model: LanguageModel,
    tokenizer: Tokenizer,
    prompts: Sequence[str | Sequence[int]],
    *,
    max_tokens: int,
    sampling: Sampling,
    seed: int,
    n: int = 1,
    stop: Sequence[str] = (),
    opening: Sequence[int] = (),
    ends: frozenset[int] = frozenset(),
    on_text: Callable[[int, str], None] = lambda row, piece: None,
) -> list[Completion]:
    """Complete each prompt `n` times: all of the first prompt's, then the second's. `on_text(row, piece)` is called with
    text as soon as it is certain, row counting completions.

    Each prompt, a text or its ids, is put after the ids of `opening`. A completion ends at the tokenizer's end-of-text or an
    id of `ends`, before the first of the `stop` texts, or after `max_tokens`.
    """
    ends |= {tokenizer.separator_id}
    writers = [Writer(tokenizer, stop) for _ in range(n * len(prompts))]
    logprobs: list[list[float]] = [[] for _ in writers]
    beginnings = [prompt_ids(tokenizer, prompt, opening) for prompt in prompts]
    engine, places = _begin(model, beginnings, n, Request((), max_tokens, sampling, seed, ends), tokenizer.vocab_size)
    while engine.running:
        for token in engine.step():
            row = places[token.request]
            logprobs[row].append(token.logprob)
            _tell(on_text, row, writers[row].add(token.id, ends=token.last == "stop"))
            if writers[row].reason and token.last is None:  # by a stop text, of which the engine knows nothing
                engine.cancel(token.request)
    for row, writer in enumerate(writers):
        _tell(on_text, row, writer.finish())
    return [
        Completion(writer.tokens, writer.text, writer.reason or "length", told)
        for writer, told in zip(writers, logprobs, strict=True)
    ]


def _tell(on_text: Callable[[int, str], None], row: int, piece: str) -> None:
    if piece:
        on_text(row, piece)
