"""Token shards: their format, where their files are, and how they are read: verified, retried, in
pieces, from an object store.

Begin with `folder.py` (`TokenFolder`), then `format.py` and `files.py`. They are written in
`text/prepare`; `core/data/dataset.py` makes sequences of them.

For others: `TokenFolder` and the format of `format.py`. Not here: the order of samples, packing,
and verifying (text/prepare/verify.py).
"""
