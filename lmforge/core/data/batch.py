"""A batch: the tokens that a model is given, with their labels, positions and documents."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Self

import torch

# The minimum size of a sequence's document starts, so that most batches have the same size.
MIN_DOCUMENT_STARTS = 8
# The metrics of a batch by name, as (sum, count), so that any reduction over batches and ranks is
# exact; those whose names end with MAXIMUM as (largest, count), of numbers that are not negative.
MAXIMUM = "/max"
Metrics = dict[str, tuple[torch.Tensor, torch.Tensor]]


class Extras:
    """Tensors by name that some objectives need of each token and models do not: [sequences,
    sequence_length, …]. An objective says what its own are (BatchView).

    A plain object, because FSDP's mixed precision casts the tensors of its arguments to bf16, also
    those in tuples, dicts and dataclasses; sums of log-probabilities in bf16 are wrong by whole
    nats.
    """

    def __init__(self, **tensors: torch.Tensor) -> None:
        self.tensors = tensors

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> "Extras":
        """The extras with `function` applied to each tensor."""
        return Extras(**{name: function(tensor) for name, tensor in self.tensors.items()})


# The bytes of a token in a batch: tokens, labels, positions and rng keys in int64, document ids in
# int32.
BATCH_BYTES_PER_TOKEN = 4 * 8 + 4


@dataclass(frozen=True)
class Batch:
    """Tensors of shape [sequences, sequence_length].

    tokens        int64
    labels        int64, the next token of the same document (already shifted by one), −100 where
                  not scored
    positions     int64, from 0 at the start of each document, and at the start of a sequence that
                  continues one
    document_ids  int32, equal within a document, numbered from 0 in each sequence, −1 on padding
    rng_keys      int64, keys for randomness per token (`order.py`); None if nothing is random, as
                  in evaluation
    document_starts  int32 [sequences, documents]: where each document of a sequence begins, padding
                     included as one, then the sequence's length as often as it takes; None on a
                     CPU, where no kernel takes them
    source_ids    int32, the number of the source in a mixture of several; None where there is one
    extras        what else an objective needs, or None
    """

    tokens: torch.Tensor
    labels: torch.Tensor
    positions: torch.Tensor
    document_ids: torch.Tensor
    rng_keys: torch.Tensor | None = None
    document_starts: torch.Tensor | None = None
    source_ids: torch.Tensor | None = None
    extras: Extras | None = None

    @classmethod
    def from_sequences(cls, sequences: Any) -> Self:
        """Packed sequences (packing.PackedSequences) as tensors, without a copy."""
        arrays = {
            field.name: getattr(sequences, field.name)
            for field in fields(sequences)
            if field.name != "extras"
        }
        tensors = {
            name: torch.from_numpy(array) for name, array in arrays.items() if array is not None
        }
        extras = {name: torch.from_numpy(array) for name, array in sequences.extras.items()}
        return cls(**tensors, extras=Extras(**extras) if extras else None)

    @classmethod
    def cat(cls, batches: Sequence["Batch"]) -> Self:
        """The sequences of several batches of one length, in order."""
        tensors: dict[str, Any] = {
            name: torch.cat([each.tensors[name] for each in batches]) for name in batches[0].tensors
        }
        extras = {
            name: torch.cat([each.extra(name) for each in batches])
            for name in batches[0].extra_tensors
        }
        return cls(**tensors, extras=Extras(**extras) if extras else None)

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> "Batch":
        """The batch with `function` applied to each tensor."""
        tensors: dict[str, Any] = {name: function(tensor) for name, tensor in self.tensors.items()}
        return Batch(**tensors, extras=self.extras and self.extras.map(function))

    def extra(self, name: str) -> torch.Tensor:
        """One of the extras, [sequences, sequence_length].

        Raises ValueError if the batch does not have it.
        """
        if name not in self.extra_tensors:
            raise ValueError(
                f"this objective needs {name!r} of each token, which the batch does not have"
            )
        return self.extra_tensors[name]

    def with_extras(self, **extras: torch.Tensor) -> "Batch":
        """The batch with more extras."""
        return replace(self, extras=Extras(**self.extra_tensors, **extras))

    @property
    def extra_tensors(self) -> dict[str, torch.Tensor]:
        """The extras by name; none where the batch has none."""
        return {} if self.extras is None else self.extras.tensors

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """The tensors that are not None, by name, without extras."""
        present = {
            field.name: getattr(self, field.name)
            for field in fields(self)
            if field.name != "extras"
        }
        return {name: tensor for name, tensor in present.items() if tensor is not None}

    @property
    def batch_size(self) -> int:
        return self.tokens.shape[0]

    @property
    def sequence_length(self) -> int:
        return self.tokens.shape[1]

    def __getitem__(self, index: slice) -> "Batch":
        """Some of the sequences, as views."""
        return self.map(lambda tensor: tensor[index])

    def with_document_starts(self) -> "Batch":
        """The batch with `document_starts`, padded to a power of two per sequence, so that batches
        have few different shapes.
        """
        begins = torch.ones_like(self.document_ids, dtype=torch.bool)
        begins[:, 1:] = self.document_ids[:, 1:] != self.document_ids[:, :-1]
        most = max(MIN_DOCUMENT_STARTS, int(begins.sum(1).max()))
        starts = torch.full(
            (self.batch_size, 1 << (most - 1).bit_length()), self.sequence_length, dtype=torch.int32
        )
        sequences, slots = begins.nonzero(as_tuple=True)
        starts[sequences, begins.cumsum(1)[sequences, slots] - 1] = slots.int()
        return replace(self, document_starts=starts)

    def to(self, device: torch.device | str, non_blocking: bool = False) -> "Batch":
        """The batch on a device; on a GPU with `document_starts`, which are computed on the host
        first.
        """
        if (
            self.document_starts is None
            and self.tokens.device.type == "cpu"
            and torch.device(device).type == "cuda"
        ):
            return self.with_document_starts().to(device, non_blocking)
        return self.map(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> "Batch":
        """A copy in page-locked memory, from which copies to a GPU are asynchronous."""
        return self.map(torch.Tensor.pin_memory)


class _Named:
    """An attribute that knows its name."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name


class Extra(_Named):
    """One of a batch's extras, as an attribute of a BatchView.

    Reading it raises ValueError where the batch does not have it.
    """

    def __get__(self, view: "BatchView", owner: type) -> torch.Tensor:
        return view.batch.extra(self._name)


class OptionalExtra(_Named):
    """One of a batch's extras, as an attribute of a BatchView; None where the batch lacks it."""

    def __get__(self, view: "BatchView", owner: type) -> torch.Tensor | None:
        return view.batch.extra_tensors.get(self._name)


@dataclass(frozen=True)
class BatchView:
    """A batch as an objective sees it: a subclass has an attribute for each of its extras."""

    batch: Batch
