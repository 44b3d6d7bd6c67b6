"""Alignment: rollouts with their scores, and the reference model.

Begin with `rollouts.py`. The losses are in objectives/, reward functions in rewards/, what each method calls of this in
`core/stages/specs.py`.
"""
