"""REINFORCE with the other completions of a group as the baseline."""

from lmforge.post.objectives.policy import PolicyLossConfig


def rloo() -> PolicyLossConfig:
    """RLOO (arXiv 2402.14740): a reward is compared with the mean of the others in its group, the
    ratio is of the whole completion, and the KL divergence is taken off the reward.
    """
    return PolicyLossConfig(
        importance_sampling_level="product",
        loss_aggregation="sequence",
        baseline="leave-one-out",
        scale_rewards="none",
        kl_estimator="k1",
        beta=0.05,
    )
