"""The extras of a batch are cut, joined and moved with its tokens."""

import torch

from lmforge.data.batch import Batch, Extras


def batch(sequences: int, first: float) -> Batch:
    tokens = torch.arange(sequences * 4).view(sequences, 4)
    extras = Extras(reference_logprobs=first + tokens.float(), kto_labels=torch.ones(sequences, 4))
    return Batch(tokens, tokens, tokens, tokens.int(), extras=extras)


def test_extras_are_cut_joined_and_changed_with_the_sequences_they_belong_to() -> None:
    full = batch(3, 0.5)
    assert torch.equal(full[1:].extra("reference_logprobs"), full.extra("reference_logprobs")[1:])
    joined = Batch.cat([full[:1], full[1:]])
    assert all(torch.equal(joined.extra(name), full.extra(name)) for name in ("reference_logprobs", "kto_labels"))
    turned = full.map(lambda tensor: tensor.flip(1))
    assert torch.equal(turned.extra("reference_logprobs"), full.extra("reference_logprobs").flip(1))
    assert full.to("meta").extra("kto_labels").is_meta
    # A model is not fed with them.
    assert full.tensors.keys() == {"tokens", "labels", "positions", "document_ids"}


def test_a_batch_without_extras_stays_without() -> None:
    tokens = torch.zeros(2, 3, dtype=torch.int64)
    plain = Batch(tokens, tokens, tokens, tokens.int())
    assert Batch.cat([plain, plain])[1:].to("cpu").extras is None
