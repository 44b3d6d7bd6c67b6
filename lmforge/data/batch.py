"""A batch: rows of tokens with what each predicts, where it stands and whose it is. The one thing a model is fed."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, Self

import numpy as np
import torch

from lmforge.data.packing import PackedSequence

# What an objective tells of a batch, by name: (sum, count), so that any reduction over batches and ranks is exact.
Metrics = dict[str, tuple[torch.Tensor, torch.Tensor]]


class Extras:
    """What some objectives know of each token beyond what a model is fed: tensors [rows, length] by name.

    reference  fp32, the log-probability of the target under the reference model
    old        fp32, that of the target as it was sampled
    advantage  fp32, of the completion that the token is in
    label      fp32, 1 in a completion that is desirable, 0 in one that is not
    overlong   fp32, 1 in a completion that was cut at the longest allowed, else 0

    A plain object, because mixed precision of FSDP casts the tensors of its arguments to bf16, those inside of tuples,
    dictionaries and dataclasses too, and sums of log-probabilities in bf16 are off by whole nats.
    """

    def __init__(self, **tensors: torch.Tensor) -> None:
        self.tensors = tensors

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> "Extras":
        """The extras of what `change` makes of each of the tensors."""
        return Extras(**{name: function(tensor) for name, tensor in self.tensors.items()})


@dataclass(frozen=True)
class Batch:
    """Tensors of shape [rows, length].

    tokens     int64
    targets    int64, the next token of the same document, −100 where nothing is scored
    positions  int64, from 0 at each document's start, or at the row's where the document began in an earlier row
    documents  int32, equal within a document, numbered from 0 in each row, −1 on padding
    keys       int64, what randomness is drawn from for each token (noise.py); None where nothing is random, as in evaluation
    extras     what else an objective asks for; None where it asks for nothing
    """

    tokens: torch.Tensor
    labels: torch.Tensor
    positions: torch.Tensor
    document_ids: torch.Tensor
    rng_keys: torch.Tensor | None = None
    extras: Extras | None = None

    @classmethod
    def from_sequences(cls, sequences: Sequence[PackedSequence]) -> Self:
        """Stack rows of one length."""
        tokens, targets, positions, documents = (
            _stack([getattr(row, field.name) for row in sequences])
            for field in fields(PackedSequence)
            if field.name != "extras"
        )
        names = sequences[0].extras
        extras = Extras(**{name: _stack([row.extras[name] for row in sequences]) for name in names}) if names else None
        return cls(tokens, targets, positions, documents, extras=extras)

    @classmethod
    def from_token_lists(cls, token_lists: Sequence[Sequence[int]]) -> Self:
        """One document a sequence, padded at its end to the longest; nothing is scored."""
        sequences = []
        for tokens in token_lists:
            sequence = PackedSequence.all_padding(max(map(len, token_lists)))
            sequence.tokens[: len(tokens)] = tokens
            sequence.positions[: len(tokens)] = range(len(tokens))
            sequence.document_ids[: len(tokens)] = 0
            sequences.append(sequence)
        return cls.from_sequences(sequences)

    @classmethod
    def cat(cls, batches: Sequence["Batch"]) -> Self:
        """All rows of several batches of one length, in order."""
        together: dict[str, Any] = {name: torch.cat([batch.tensors[name] for batch in batches]) for name in batches[0].tensors}
        extras = batches[0].extras and Extras(
            **{name: torch.cat([batch.extra(name) for batch in batches]) for name in batches[0].extras.tensors}
        )
        return cls(**together, extras=extras)

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> "Batch":
        """The batch of what `change` makes of each of the tensors."""
        changed: dict[str, Any] = {name: function(tensor) for name, tensor in self.tensors.items()}
        return Batch(**changed, extras=self.extras and self.extras.map(function))

    def extra(self, name: str) -> torch.Tensor:
        """One of the extras, [rows, length]. ValueError where the batch has come without it."""
        if self.extras is None or name not in self.extras.tensors:
            raise ValueError(f"this objective needs {name!r} of each token, which the batch does not have")
        return self.extras.tensors[name]

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """What a model is fed, by name: those that are there."""
        present = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "extras"}
        return {name: tensor for name, tensor in present.items() if tensor is not None}

    @property
    def batch_size(self) -> int:
        return self.tokens.shape[0]

    @property
    def sequence_length(self) -> int:
        return self.tokens.shape[1]

    def __getitem__(self, index: slice) -> "Batch":
        """Some of the rows, as views."""
        return self.map(lambda tensor: tensor[index])

    def to(self, device: torch.device | str, non_blocking: bool = False) -> "Batch":
        return self.map(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> "Batch":
        """The same in page-locked memory, from which a copy to a GPU need not be waited for."""
        return self.map(torch.Tensor.pin_memory)


def _stack(arrays: Sequence[np.ndarray]) -> torch.Tensor:
    return torch.from_numpy(np.stack(arrays))
