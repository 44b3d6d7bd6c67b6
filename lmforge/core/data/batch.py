"""A batch: the tokens that a model is given, with their labels, positions and documents."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Self

import torch

from lmforge.core.data.packing import PackedSequences

# The minimum size of a sequence's document starts, so that most batches have the same size.
MIN_DOCUMENT_STARTS = 8
# The metrics of a batch by name, as (sum, count), so that any reduction over batches and ranks is
# exact; those whose names end with MAXIMUM as (largest, count), of numbers that are not negative.
MAXIMUM = "/max"
Metrics = dict[str, tuple[torch.Tensor, torch.Tensor]]


class Extras:
    """Per-token tensors that some objectives need and models do not: fp32 [sequences,
    sequence_length, …] by name.

    reference_logprobs  the label's log-probability under the reference model
    old_logprobs        the label's log-probability when it was sampled
    proximal_logprobs   the label's log-probability under the policy when the set was first used
    reused              1: the set was used before
    routed_experts      int32 [sequences, sequence_length, layers, experts of a token]: the experts
                        that sampled, −1 for others
    advantages          the advantage of the completion that the token belongs to
    kto_labels          1 in a desirable completion, 0 in an undesirable one
    margins             by how much the chosen completion is better, in both completions of a pair
    teacher_ids, teacher_logprobs, teacher_hidden, sampled   of a distillation
                                                             (post/objectives/distillation.py)
    truncated           1 in a completion that was truncated at the longest allowed, else 0

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
                     included as one, then the
        sequence's length as often as it takes; None on a CPU, where no kernel takes them
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
    def from_sequences(cls, sequences: PackedSequences) -> Self:
        """Packed sequences as tensors, without a copy."""
        arrays = {field.name: getattr(sequences, field.name) for field in fields(PackedSequences) if field.name != "extras"}
        tensors = {name: torch.from_numpy(array) for name, array in arrays.items() if array is not None}
        extras = {name: torch.from_numpy(array) for name, array in sequences.extras.items()}
        return cls(**tensors, extras=Extras(**extras) if extras else None)

    @classmethod
    def from_token_lists(cls, token_lists: Sequence[Sequence[int]]) -> Self:
        """One document per sequence, padded at the end to the longest; no label is scored."""
        sequences = PackedSequences.empty(len(token_lists), max(map(len, token_lists)))
        for sequence, tokens in zip(sequences, token_lists, strict=True):
            sequence.put_document(tokens)
        return cls.from_sequences(sequences)

    @classmethod
    def cat(cls, batches: Sequence["Batch"]) -> Self:
        """The sequences of several batches of one length, in order."""
        tensors: dict[str, Any] = {name: torch.cat([each.tensors[name] for each in batches]) for name in batches[0].tensors}
        names = batches[0].extras.tensors if batches[0].extras else ()
        extras = {name: torch.cat([each.extra(name) for each in batches]) for name in names}
        return cls(**tensors, extras=Extras(**extras) if extras else None)

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> "Batch":
        """The batch with `function` applied to each tensor."""
        tensors: dict[str, Any] = {name: function(tensor) for name, tensor in self.tensors.items()}
        return Batch(**tensors, extras=self.extras and self.extras.map(function))

    def extra(self, name: str) -> torch.Tensor:
        """One of the extras, [sequences, sequence_length].

        Raises ValueError if the batch does not have it.
        """
        if self.extras is None or name not in self.extras.tensors:
            raise ValueError(f"this objective needs {name!r} of each token, which the batch does not have")
        return self.extras.tensors[name]

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """The tensors that are not None, by name, without extras."""
        present = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "extras"}
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
        starts = torch.full((self.batch_size, 1 << (most - 1).bit_length()), self.sequence_length, dtype=torch.int32)
        sequences, slots = begins.nonzero(as_tuple=True)
        starts[sequences, begins.cumsum(1)[sequences, slots] - 1] = slots.int()
        return replace(self, document_starts=starts)

    def to(self, device: torch.device | str, non_blocking: bool = False) -> "Batch":
        """The batch on a device; on a GPU with `document_starts`, which are computed on the host
        first.
        """
        if self.document_starts is None and self.tokens.device.type == "cpu" and torch.device(device).type == "cuda":
            return self.with_document_starts().to(device, non_blocking)
        return self.map(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> "Batch":
        """A copy in page-locked memory, from which copies to a GPU are asynchronous."""
        return self.map(torch.Tensor.pin_memory)
