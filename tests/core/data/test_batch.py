"""The extras of a batch are cut, joined and moved with its tokens."""

import numpy as np
import torch

from lmforge.core.data.batch import Batch, Extras
from lmforge.core.data.packing import PackedSequences


def batch(sequences: int, first: float) -> Batch:
    tokens = torch.arange(sequences * 4).view(sequences, 4)
    extras = Extras(reference_logprobs=first + tokens.float(), kto_labels=torch.ones(sequences, 4))
    return Batch(tokens, tokens, tokens, tokens.int(), extras=extras)


def test_extras_are_cut_joined_and_changed_with_the_sequences_they_belong_to() -> None:
    full = batch(3, 0.5)
    assert torch.equal(full[1:].extra("reference_logprobs"), full.extra("reference_logprobs")[1:])
    joined = Batch.cat([full[:1], full[1:]])
    assert all(
        torch.equal(joined.extra(name), full.extra(name))
        for name in ("reference_logprobs", "kto_labels")
    )
    turned = full.map(lambda tensor: tensor.flip(1))
    assert torch.equal(turned.extra("reference_logprobs"), full.extra("reference_logprobs").flip(1))
    assert full.to("meta").extra("kto_labels").is_meta
    # A model is not fed with them.
    assert full.tensors.keys() == {"tokens", "labels", "positions", "document_ids"}


def test_a_batch_without_extras_stays_without() -> None:
    tokens = torch.zeros(2, 3, dtype=torch.int64)
    plain = Batch(tokens, tokens, tokens, tokens.int())
    assert Batch.cat([plain, plain])[1:].to("cpu").extras is None


def test_the_arrays_of_a_batch_are_one_piece_of_memory_and_its_tensors_are_no_copies() -> None:
    """In several pieces the memory of each batch would come from the system page by page."""
    sequences = PackedSequences.empty(3, 5, ["a", "b"], with_sources=True)
    assert sequences.source_ids is not None
    arrays = [
        sequences.tokens,
        sequences.labels,
        sequences.positions,
        sequences.document_ids,
        sequences.source_ids,
    ]
    arrays += sequences.extras.values()
    assert [array.dtype for array in arrays] == [np.int64] * 3 + [np.int32] * 2 + [np.float32] * 2
    assert sum(array.nbytes for array in arrays) == arrays[0].base.nbytes
    assert all(array.base is arrays[0].base for array in arrays)
    for number, array in enumerate(arrays):
        array[:] = number  # none lies over another
    batch = Batch.from_sequences(sequences)
    assert batch.source_ids is not None
    tensors = [batch.tokens, batch.labels, batch.positions, batch.document_ids, batch.source_ids]
    for number, tensor in enumerate([*tensors, batch.extra("a"), batch.extra("b")]):
        assert tensor.tolist() == [[number] * 5] * 3
        assert 0 <= tensor.data_ptr() - arrays[0].base.ctypes.data < arrays[0].base.nbytes
