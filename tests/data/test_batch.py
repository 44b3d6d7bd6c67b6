"""What travels with a batch goes wherever its tokens go."""

import torch

from lmforge.data.batch import Batch, Extras


def batch(rows: int, first: float) -> Batch:
    tokens = torch.arange(rows * 4).view(rows, 4)
    extras = Extras(reference_logprobs=first + tokens.float(), kto_labels=torch.ones(rows, 4))
    return Batch(tokens, tokens, tokens, tokens.int(), extras=extras)


def test_extras_are_cut_joined_and_changed_with_the_rows_they_belong_to() -> None:
    whole = batch(3, 0.5)
    assert torch.equal(whole[1:].extra("reference_logprobs"), whole.extra("reference_logprobs")[1:])
    joined = Batch.cat([whole[:1], whole[1:]])
    assert all(torch.equal(joined.extra(name), whole.extra(name)) for name in ("reference_logprobs", "kto_labels"))
    turned = whole.map(lambda tensor: tensor.flip(1))
    assert torch.equal(turned.extra("reference_logprobs"), whole.extra("reference_logprobs").flip(1))
    assert whole.to("meta").extra("kto_labels").is_meta
    # A model is not fed with them.
    assert whole.tensors.keys() == {"tokens", "labels", "positions", "document_ids"}


def test_a_batch_without_extras_stays_without() -> None:
    tokens = torch.zeros(2, 3, dtype=torch.int64)
    plain = Batch(tokens, tokens, tokens, tokens.int())
    assert Batch.cat([plain, plain])[1:].to("cpu").extras is None
