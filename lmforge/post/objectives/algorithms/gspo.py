"""Group sequence policy optimization."""

from lmforge.post.objectives.policy import PolicyLossConfig


def gspo() -> PolicyLossConfig:
    """GSPO (arXiv 2507.18071): the importance ratio is the geometric mean over a completion, which
    varies little, and so its bounds are narrow.
    """
    return PolicyLossConfig(
        importance_sampling_level="sequence",
        epsilon=3e-4,
        epsilon_high=4e-4,
        loss_aggregation="sequence",
    )
