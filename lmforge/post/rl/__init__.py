"""Policy optimization from rewards: sets of completions become batches.

Begin with `rollouts.py`. The losses are in post/objectives/, reward functions in post/rewards/.
"""
