"""Random numbers that are functions of keys: the same on every split of the model and the data.

Begin with `splitmix.py`; `weight_rng.py` is for initial weights, `token_rng.py` for dropout and NEFTune.
"""
