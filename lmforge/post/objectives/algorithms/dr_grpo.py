"""GRPO done right."""

from lmforge.post.objectives.policy import PolicyLossConfig


def dr_grpo() -> PolicyLossConfig:
    """Dr. GRPO (arXiv 2503.20783): neither lengths nor standard deviations weigh, and there is no
    reference.
    """
    return PolicyLossConfig(loss_aggregation="constant", scale_rewards="none")
