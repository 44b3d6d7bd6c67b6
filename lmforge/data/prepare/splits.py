"""Which documents are for training and which for validation, by their content alone."""

import numpy as np

from lmforge.data.prepare.shard_jobs import validation_threshold
from lmforge.data.shards.format import TRAIN_SPLIT, VALIDATION_SPLIT
from lmforge.errors import UserError


def split_documents(hashes: np.ndarray, sizes: np.ndarray, ratio: float, one_document: bool) -> dict[str, np.ndarray]:
    """The documents of each split, by the hashes and sizes of all.

    Documents with hashes below a threshold are for validation. If there are none, or they are more than half of the text though
    less was requested, it is the document with the smallest hash among those that leave half of the text to train on. The tail
    of a single document is for validation, whatever its size. (Examples are fewer, and are chosen by rank:
    `select_validation`.)
    """
    validation = hashes < np.uint64(validation_threshold(ratio))
    too_much = not one_document and ratio < 0.5 and sizes[validation].sum() > sizes.sum() / 2
    if ratio and (not validation.any() or too_much):
        _, texts = np.unique(hashes, return_inverse=True)  # copies of a text stay together
        small = np.bincount(texts, weights=sizes)[texts] <= sizes.sum() / 2
        validation = hashes == (hashes[small] if small.any() else hashes).min()
    if validation.all():
        validation = hashes != hashes.max()
    if not ratio:
        return {TRAIN_SPLIT: np.flatnonzero(~validation)}
    if not validation.any():
        raise UserError("too few different texts to set any aside for validation; give more text")
    return {TRAIN_SPLIT: np.flatnonzero(~validation), VALIDATION_SPLIT: np.flatnonzero(validation)}
