"""An objective with options: the focal loss (Lin et al., arXiv 1708.02002), by which tokens that
are easy already count less.

    plugins = ["focal.py"]
    [objective]
    name = "focal"
    focal.gamma = 1.0

Options are declared without torch, so that --help stays fast; the loss itself is in focal_loss.py,
imported when it is used.
"""

import lmforge


class FocalOptions(lmforge.Options):
    """Options of the focal loss."""

    gamma: float = lmforge.option(2.0, "a token of probability p counts (1 - p) ** gamma; 0 is cross-entropy", ge=0, le=10)


lmforge.register("objective", "focal", "focal_loss:build", options=FocalOptions)
