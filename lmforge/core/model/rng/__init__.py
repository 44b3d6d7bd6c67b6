"""Random numbers that are functions of keys, independent of how model and data are distributed.

Begin with `splitmix.py`; `weight_rng.py` is for initial weights, `token_rng.py` for dropout and
NEFTune.

For others: `token_rng_keys`, and what `model/` draws with. Their numbers must never change: runs
would not resume with the same bits. Not here: the order of the data (core/data/order.py), and
sampling (serve/decoding/sampling.py).
"""
