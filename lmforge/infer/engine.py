"""Writing text: prompts of unlike lengths decoded together with a KV cache, each with its own seed and its own end."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from lmforge.data.tokenizer import Tokenizer
from lmforge.infer.sampling import Sampling, choose
from lmforge.model.layers import LanguageModel

SEED_STRIDE = 1_000_003


@dataclass(frozen=True)
class Completion:
    """What was written after a prompt: its tokens (with the one that ended it), its text, and why it ended."""

    tokens: list[int]
    text: str
    reason: str  # "stop" or "length"


@torch.no_grad()
def decode(
    model: LanguageModel,
    prompts: Sequence[Sequence[int]],
    *,
    vocab_size: int,
    max_tokens: int,
    sampling: Sampling,
    seed: int,
    stop_ids: frozenset[int],
) -> Iterator[list[int | None]]:
    """Tokens as they come: each item has the next token of every prompt, None for one that has ended.

    A token of `stop_ids` is given out, and ends its row. Prompts are lists of at least one token id; only ids below
    `vocab_size` are chosen. Row r depends on (seed, r) and its own prompt only. Raises Mistake where prompt and new
    tokens exceed what the model reads.
    """
    if not all(prompts):
        raise ValueError("an empty prompt")
    # In mixed precision sharded weights are fp32 at rest and bf16 when gathered: the embedding in use tells.
    weight = model.embeddings[0].weight
    device, dtype = weight.device, weight.dtype
    if torch.is_autocast_enabled(device.type):
        dtype = torch.get_autocast_dtype(device.type)
    rows, longest = len(prompts), max(map(len, prompts))
    cache = model.cache(rows, longest + max_tokens, device=device, dtype=dtype)
    tokens, positions, documents = (tensor.to(device) for tensor in _padded_at_left(prompts, longest))
    generators = [torch.Generator().manual_seed(seed + SEED_STRIDE * row) for row in range(rows)]
    ended = [False] * rows
    for _ in range(max_tokens):
        hidden = model(tokens, positions, documents, cache=cache)
        chosen = choose(model.lm_head(hidden[:, -1])[:, :vocab_size], sampling, generators)
        new = [None if over else token for over, token in zip(ended, chosen.tolist(), strict=True)]
        yield new
        ended = [token is None or token in stop_ids for token in new]
        if all(ended):
            return
        tokens, positions, documents = chosen[:, None], positions[:, -1:] + 1, documents[:, -1:]


def _padded_at_left(prompts: Sequence[Sequence[int]], length: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens, positions and documents [rows, length], so that every prompt ends in the last column."""
    tokens, positions = torch.zeros(2, len(prompts), length, dtype=torch.long)
    documents = torch.full((len(prompts), length), -1, dtype=torch.int32)
    for row, prompt in enumerate(prompts):
        tokens[row, -len(prompt) :] = torch.tensor(prompt)
        positions[row, -len(prompt) :] = torch.arange(len(prompt))
        documents[row, -len(prompt) :] = 0
    return tokens, positions, documents


def generate(
    model: LanguageModel,
    tokenizer: Tokenizer,
    prompts: Sequence[str],
    *,
    max_tokens: int,
    sampling: Sampling,
    seed: int,
    stop: Sequence[str] = (),
    opening: Sequence[int] = (),
    ends: frozenset[int] = frozenset(),
    on_text: Callable[[int, str], None] = lambda row, piece: None,
) -> list[Completion]:
    """Complete each prompt. `on_text(row, piece)` is called with text as soon as it is certain.

    Each prompt is put after the ids of `opening`. A completion ends at the tokenizer's end-of-text or an id of `ends`,
    before the first of the `stop` texts, or after `max_tokens`. An empty prompt without opening begins with the token
    that begins a text or, where the tokenizer has none, the one that ends it.
    """
    ends |= {tokenizer.separator_id}
    begin = tokenizer.separator_id if tokenizer.bos_id is None else tokenizer.bos_id
    writers = [_Writer(tokenizer, stop) for _ in prompts]
    steps = decode(
        model,
        [[*opening, *tokenizer.encode(prompt)] or [begin] for prompt in prompts],
        vocab_size=tokenizer.vocab_size,
        max_tokens=max_tokens,
        sampling=sampling,
        seed=seed,
        stop_ids=ends,
    )
    for new in steps:
        for row, (writer, token) in enumerate(zip(writers, new, strict=True)):
            if token is not None and writer.reason is None:
                _tell(on_text, row, writer.add(token, ends=token in ends))
        if all(writer.reason for writer in writers):
            break
    for row, writer in enumerate(writers):
        _tell(on_text, row, writer.finish())
    return [Completion(writer.tokens, writer.text, writer.reason or "length") for writer in writers]


def _tell(on_text: Callable[[int, str], None], row: int, piece: str) -> None:
    if piece:
        on_text(row, piece)


class _Writer:
    """The text of one row: whole characters only, and never a piece that may turn out to begin a stop text."""

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str]) -> None:
        self._decoder = tokenizer.stream_decoder()
        self._stop = stop
        self._certain = 0  # characters of `text` that were given out
        self.tokens: list[int] = []
        self.text = ""
        self.reason: str | None = None

    def add(self, token: int, ends: bool) -> str:
        """Take the next token; with `ends` it is the last and stands for no text. Returns the text that became certain."""
        self.tokens.append(token)
        self.text += self._decoder.finish() if ends else self._decoder.feed(token)
        found = [place for place in map(self.text.find, self._stop) if place >= 0]
        if found:
            self.text = self.text[: min(found)]
        if ends or found:
            self.reason = "stop"
            return self._upto(len(self.text))
        return self._upto(len(self.text) - self._held_back())

    def finish(self) -> str:
        """No more tokens come. Returns the text that was held back."""
        if self.reason is None:
            self.text += self._decoder.finish()
        return self._upto(len(self.text))

    def _held_back(self) -> int:
        """Length of the longest tail that begins a stop text."""
        sizes = (size for stop in self._stop for size in range(1, len(stop)) if self.text.endswith(stop[:size]))
        return max(sizes, default=0)

    def _upto(self, place: int) -> str:
        piece = self.text[self._certain : place]
        self._certain += len(piece)
        return piece
