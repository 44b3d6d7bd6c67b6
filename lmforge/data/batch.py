"""A batch: rows of tokens with what each predicts, where it stands and whose it is. The one thing a model is fed."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Self

import numpy as np
import torch

from lmforge.data.packing import Row

# What an objective tells of a batch, by name: (sum, count), so that any reduction over batches and ranks is exact.
Metrics = dict[str, tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True)
class Batch:
    """Tensors of shape [rows, length].

    tokens     int64
    targets    int64, the next token of the same document, −100 where nothing is scored
    positions  int64, from 0 at each document's start, or at the row's where the document began in an earlier row
    documents  int32, equal within a document, numbered from 0 in each row, −1 on padding
    keys       int64, what randomness is drawn from for each token (noise.py); None where nothing is random, as in evaluation
    """

    tokens: torch.Tensor
    targets: torch.Tensor
    positions: torch.Tensor
    documents: torch.Tensor
    keys: torch.Tensor | None = None

    @classmethod
    def of(cls, rows: Sequence[Row]) -> Self:
        """Stack rows of one length."""
        return cls(*(torch.from_numpy(np.stack([getattr(row, field.name) for row in rows])) for field in fields(Row)))

    @classmethod
    def cat(cls, batches: Sequence["Batch"]) -> Self:
        """All rows of several batches of one length, in order."""
        return cls(**{name: torch.cat([batch.tensors[name] for batch in batches]) for name in batches[0].tensors})

    def map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> "Batch":
        """The batch of what `change` makes of each of the tensors."""
        return Batch(**{name: change(tensor) for name, tensor in self.tensors.items()})

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """Those that are there, by name."""
        present = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: tensor for name, tensor in present.items() if tensor is not None}

    @property
    def rows(self) -> int:
        return self.tokens.shape[0]

    @property
    def length(self) -> int:
        return self.tokens.shape[1]

    def __getitem__(self, rows: slice) -> "Batch":
        """Some of the rows, as views."""
        return self.map(lambda tensor: tensor[rows])

    def to(self, device: torch.device | str, non_blocking: bool = False) -> "Batch":
        return self.map(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> "Batch":
        """The same in page-locked memory, from which a copy to a GPU need not be waited for."""
        return self.map(torch.Tensor.pin_memory)
