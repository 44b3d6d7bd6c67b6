"""Alignment: the batches of each method, rollouts with their scores, and the reference model.

Begin with `align.py`, then `rollouts.py`. The losses are in objectives/, reward functions in
rewards/. For others: the functions that `stages/run.py` puts into a `StageSpec`.
"""
