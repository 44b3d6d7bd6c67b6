"""Prompts before text is generated: their ids and lengths, stops, and log-probabilities."""

from collections.abc import Collection, Iterator, Sequence

import torch
from torch import Tensor

from lmforge.core.data.labels import CHUNK_TOKENS
from lmforge.core.data.loader import batch_of_token_lists
from lmforge.core.data.tokenizer import Tokenizer
from lmforge.core.errors import UserError
from lmforge.core.model.config import ModelConfig
from lmforge.core.model.layers import LanguageModel

# Of a text on standard input, which may have no end: more than any model reads.
MAX_PROMPT_BYTES = 2**24


class PromptTooLong(UserError):
    """A prompt leaves no room for an answer in what a model reads."""


def encode_prompt(
    tokenizer: Tokenizer,
    prompt: str | Sequence[int],
    prefix_ids: Sequence[int],
    max_length: int | None = None,
) -> list[int]:
    """The ids of a prompt, a text or ids, after `prefix_ids`.

    An empty one becomes `default_prefix_id`.

    A text may spell special tokens, as in other programs; one that begins with `prefix_ids` gets no
    second ones. Raises PromptTooLong where it has more than `max_length` tokens; no more of a long
    text is encoded than shows that.
    """
    ids: list[int] = []
    if isinstance(prompt, str):
        for piece in tokenizer.split_long_text(prompt):
            ids += tokenizer.encode(piece, parse_special_tokens=True)
            if max_length is not None and len(ids) > max_length:
                break
    else:
        ids += prompt
    ids = with_prefix(ids, prefix_ids)
    if max_length is not None and len(ids) > max_length:
        check_room(len(ids), max_length)
    return ids or [default_prefix_id(tokenizer)]


def with_prefix(ids: list[int], prefix_ids: Sequence[int]) -> list[int]:
    """`ids` after `prefix_ids`, unless they begin with these already."""
    if ids[: len(prefix_ids)] == [*prefix_ids]:
        return ids
    return [*prefix_ids, *ids]


def check_room(num_prompt_tokens: int, max_length: int, max_tokens: int | None = None) -> int:
    """The number of tokens an answer may have: `max_tokens`, or as many as fit where it is None.

    Every prompt of `generate`, `chat` and `serve` goes through here. Raises PromptTooLong where an
    answer does not fit.
    """
    room = max_length - num_prompt_tokens
    least = 1
    requested = ", which leaves no room for an answer"
    if max_tokens is not None:
        least = max_tokens
        requested = f" and max_tokens = {max_tokens}"
    if room < least:
        raise PromptTooLong(
            f"this model takes at most {max_length} tokens, and got {num_prompt_tokens} in the"
            f" prompt{requested}"
        )
    return room if max_tokens is None else max_tokens


def check_token_ids(token_ids: Collection[int], vocab_size: int, what: str = "the prompt") -> None:
    """Raise UserError where a model has no row for one of `token_ids`.

    vocab_size: the rows in its embedding. A tokenizer may have more ids than that as long as no
    text spells them. Every prompt of `generate`, `chat`, `serve` and `evaluate`, and every text
    that is scored, goes through here.
    """
    for id in (min(token_ids, default=0), max(token_ids, default=0)):
        if not 0 <= id < vocab_size:
            raise UserError(
                f"{what} holds the token id {id}, and the model's embedding has {vocab_size} rows;"
                " use the tokenizer that belongs to this model, or train it to read the new"
                " tokens: lmforge sft --model.resize_vocab true"
            )


def default_prefix_id(tokenizer: Tokenizer) -> int:
    """The id before a text without prefix: the tokenizer's bos, or its eos where it has none."""
    return tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id


def max_input_length(config: ModelConfig) -> int:
    """The maximum number of tokens of a prompt with its answer.

    It is the length that the model was trained for.
    """
    return config.max_sequence_length or config.max_position_embeddings


def stop_string_ids(tokenizer: Tokenizer, stop_strings: Sequence[str]) -> frozenset[int]:
    """The ids of the stop strings that spell a special token.

    A text ends at that token, which has no text itself.
    """
    ids = {tokenizer.token_to_id(stop) for stop in stop_strings}
    return tokenizer.all_special_ids & ids


@torch.no_grad()
def scored_logits(
    model: LanguageModel, sequences: Sequence[tuple[Sequence[int], int]]
) -> Iterator[tuple[Tensor, Tensor]]:
    """The logits before each scored token, fp32 [tokens, vocab], and its id, int64 [tokens].

    They come CHUNK_TOKENS tokens at once. sequences: (tokens, the number of last ones that are
    scored, all but the first at most).
    """
    device = model.embeddings[0].weight.device
    batch = batch_of_token_lists([list(tokens[:-1]) for tokens, _ in sequences]).to(device)
    hidden = model(
        batch.tokens, batch.positions, batch.document_ids, document_starts=batch.document_starts
    )
    scored = []
    labels = []
    for row, (tokens, count) in enumerate(sequences):
        end = len(tokens) - 1
        scored.append(hidden[row, end - count : end])
        labels.append(torch.tensor(tokens[len(tokens) - count :]))
    states = torch.cat(scored).split(CHUNK_TOKENS)
    ids = torch.cat(labels).to(hidden.device).split(CHUNK_TOKENS)
    for part, ids_of_part in zip(states, ids, strict=True):
        yield model.lm_head(part).float(), ids_of_part
