"""The loss of focal.py."""

from torch import Tensor

from lmforge import IGNORE_INDEX, Batch, label_logprobs


class FocalObjective:
    """A sum over labels, as every objective gives; lmforge divides it once, by the number of labels
    of the global batch.
    """

    def __init__(self, gamma: float) -> None:
        self.gamma = gamma

    def num_items(self, batch: Batch) -> Tensor:
        return (batch.labels != IGNORE_INDEX).sum().float()

    def loss(self, model, batch):
        logprobs = label_logprobs(model, batch)
        losses = -logprobs * (1 - logprobs.exp()) ** self.gamma
        count = self.num_items(batch)
        # "loss" is the cross-entropy, so that runs with and without it compare.
        return losses.sum(), {"loss": (-logprobs.detach().sum(), count), "focal": (losses.detach().sum(), count)}


def build(config, options):
    """Called with the config of the stage and the options of focal.py."""
    return FocalObjective(options.gamma)
