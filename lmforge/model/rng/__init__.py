"""Random numbers that are functions of keys, independent of how model and data are distributed.

Begin with `splitmix.py`; `weight_rng.py` is for initial weights, `token_rng.py` for dropout and NEFTune.
"""
