"""Decoupled clip and dynamic sampling policy optimization."""

from lmforge.post.objectives.policy import PolicyLossConfig


def dapo() -> PolicyLossConfig:
    """DAPO (arXiv 2503.14476): each token weighs the same, ratios may rise further than they may
    fall, and truncated completions do not count. `rollout.dynamic_sampling_rounds` is its other
    half.
    """
    return PolicyLossConfig(epsilon_high=0.28, mask_truncated_completions=True)
