"""Group relative policy optimization."""

from lmforge.post.objectives.policy import PolicyLossConfig


def grpo() -> PolicyLossConfig:
    """GRPO (arXiv 2402.03300): rewards are compared within the group, each completion weighs the
    same, and the KL divergence from the reference is in the loss. With the sample standard
    deviation (÷ n − 1), as TRL has it.
    """
    return PolicyLossConfig(loss_aggregation="sequence", kl_estimator="k3", beta=0.04)
