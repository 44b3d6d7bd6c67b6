"""Algorithms of policy optimization: each is a file with the loss that it has.

One is chosen by `rollout.loss_type`, and each switch of it can be overridden in `[rollout]`.
"""
