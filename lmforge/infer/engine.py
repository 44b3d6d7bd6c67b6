"""Writing text: prompts of unlike lengths decoded together with a KV cache, each with its own seed and its own end."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from lmforge.data.tokenizer import Tokenizer
from lmforge.errors import Mistake
from lmforge.infer.sampling import Sampling, choose
from lmforge.model.cache import Cache

SEED_STRIDE = 1_000_003


@dataclass(frozen=True)
class Completion:
    """What was written after a prompt: its tokens (with the one that ended it), its text, and why it ended."""

    tokens: list[int]
    text: str
    reason: str  # "stop" or "length"


@torch.no_grad()
def decode(
    model: nn.Module, prompts: Sequence[Sequence[int]], max_tokens: int, sampling: Sampling, seed: int, stop_ids: frozenset[int]
) -> Iterator[list[int | None]]:
    """Tokens as they come: each item has the next token of every prompt, None for one that has ended.

    A token of `stop_ids` is given out, and ends its row. Prompts are lists of at least one token id; row r depends on
    (seed, r) and its own prompt only. Raises Mistake where prompt and new tokens exceed what the model reads.
    """
    if not all(prompts):
        raise ValueError("an empty prompt")
    device = next(model.parameters()).device
    rows, longest = len(prompts), max(map(len, prompts))
    tokens = torch.zeros(rows, longest, dtype=torch.long)
    documents = torch.full((rows, longest), -1, dtype=torch.int32)
    positions = torch.zeros(rows, longest, dtype=torch.long)
    for row, prompt in enumerate(prompts):
        tokens[row, longest - len(prompt) :] = torch.tensor(prompt)
        documents[row, longest - len(prompt) :] = 0
        positions[row, longest - len(prompt) :] = torch.arange(len(prompt))
    generators = [torch.Generator().manual_seed(seed + SEED_STRIDE * row) for row in range(rows)]
    dtype = torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None
    cache: Cache | None = None
    tokens, documents, positions = tokens.to(device), documents.to(device), positions.to(device)
    ended = [False] * rows
    for _ in range(max_tokens):
        if cache is None:
            cache = Cache(model.config, rows, longest + max_tokens, device=device, dtype=dtype or _compute_dtype(model))
        hidden = model(tokens, positions, documents, cache=cache)
        chosen = choose(model.lm_head(hidden[:, -1]), sampling, generators)
        new: list[int | None] = [None if over else token for over, token in zip(ended, chosen.tolist(), strict=True)]
        yield new
        ended = [over or token in stop_ids for over, token in zip(ended, new, strict=True)]
        if all(ended):
            return
        tokens, positions, documents = chosen[:, None], positions[:, -1:] + 1, documents[:, -1:]


def _compute_dtype(model: nn.Module) -> torch.dtype:
    # Sharded weights in mixed precision are fp32 at rest and bf16 when gathered: the embedding in use tells.
    return model.embeddings[0].weight.dtype


def generate(
    model: nn.Module,
    tokenizer: Tokenizer,
    prompts: Sequence[str],
    *,
    max_tokens: int,
    sampling: Sampling,
    seed: int,
    stop: Sequence[str] = (),
    on_text: Callable[[int, str], None] = lambda row, text: None,
) -> list[Completion]:
    """Complete each prompt. `on_text(row, piece)` is called with text as soon as it is certain.

    A completion ends at the tokenizer's end-of-text, before the first of the `stop` texts, or after `max_tokens`.
    Raises Mistake for a prompt of no tokens that cannot be begun with anything.
    """
    begin = tokenizer.bos_id if tokenizer.bos_id is not None else tokenizer.separator_id
    encoded = [tokenizer.encode(prompt) for prompt in prompts]
    if begin is None and not all(encoded):
        raise Mistake("an empty prompt, and the tokenizer has no token that begins a text: give the model something to continue")
    encoded = [ids or [begin] for ids in encoded]  # type: ignore[list-item]
    ends = frozenset({tokenizer.separator_id} - {None})
    writers = [_Writer(tokenizer, stop, lambda piece, row=row: on_text(row, piece)) for row in range(len(prompts))]  # type: ignore[misc]
    for new in decode(model, encoded, max_tokens, sampling, seed, ends):
        for writer, token in zip(writers, new, strict=True):
            if token is not None and writer.reason is None:
                writer.add(token, token in ends)
        if all(writer.reason for writer in writers):
            break
    return [writer.finish() for writer in writers]


class _Writer:
    """The text of one row: whole characters only, and never a piece that may turn out to begin a stop text."""

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str], tell: Callable[[str], None]) -> None:
        self._decoder = tokenizer.stream_decoder()
        self._stop = stop
        self._tell = tell
        self._text = ""
        self._told = 0
        self._tokens: list[int] = []
        self.reason: str | None = None

    def add(self, token: int, ends: bool) -> None:
        self._tokens.append(token)
        if ends:
            self.reason = "stop"
            return
        self._text += self._decoder.feed(token)
        found = [place for place in (self._text.find(text) for text in self._stop) if place >= 0]
        if found:
            self._text, self.reason = self._text[: min(found)], "stop"
        self._say(len(self._text) if self.reason else len(self._text) - self._held_back())

    def _held_back(self) -> int:
        """Length of the longest tail that begins a stop text."""
        tails = (size for text in self._stop for size in range(min(len(text) - 1, len(self._text)), 0, -1) if self._text.endswith(text[:size]))
        return max(tails, default=0)

    def _say(self, upto: int) -> None:
        if upto > self._told:
            self._tell(self._text[self._told : upto])
            self._told = upto

    def finish(self) -> Completion:
        if self.reason is None:
            self._text += self._decoder.finish()
        self._say(len(self._text))
        return Completion(self._tokens, self._text, self.reason or "length")
