"""Alignment: rollouts with their scores, and the reference model.

Begin with `rollouts.py`. The losses are in post/objectives/, reward functions in post/rewards/,
what each method calls of this in `core/stages/specs.py`.
"""
