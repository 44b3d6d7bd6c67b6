"""What a policy sampled: ids with their log-probabilities and the version of the weights of each.

Never text.

sampling.py makes completions, scoring.py rewards them, and rollout_batches.py makes batches of
them. These three meet here and in rollouts.py alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

# The version of a token that the policy did not sample, such as one of a tool's answer. It is never
# trained on.
NOT_SAMPLED = -1


@dataclass
class SampledCompletion:
    """What follows a prompt, as three lists of one length: spans of sampled tokens, and between
    them spans of given ones.

    tokens    ids, with the stop token that ended a span if one did
    logprobs  the log-probability of each token in nats when it was sampled, 0 for given tokens
    versions  the version of the weights that sampled each token (the index of the batch that they
              were first used for),
              NOT_SAMPLED for given tokens
    stopped   whether the last span ended with a stop token
    routed_experts  int32 [tokens, layers, experts of a token] that sampled: of prompt and
                    completion but the last token; None
                    where it is not asked for
    """

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    stopped: bool = False
    routed_experts: np.ndarray | None = None

    @property
    def num_sampled(self) -> int:
        return len(self.versions) - self.versions.count(NOT_SAMPLED)

    def add_sampled(self, token: int, logprob: float, version: int) -> None:
        """Append a token that the policy sampled."""
        self.tokens.append(token)
        self.logprobs.append(logprob)
        self.versions.append(version)

    def add_given(self, tokens: Sequence[int]) -> None:
        """Append tokens that the policy reads and did not sample."""
        self.tokens += tokens
        self.logprobs += [0.0] * len(tokens)
        self.versions += [NOT_SAMPLED] * len(tokens)

    def extend(self, span: "SampledCompletion") -> None:
        """Append another span."""
        self.tokens += span.tokens
        self.logprobs += span.logprobs
        self.versions += span.versions
        self.stopped = span.stopped
        if span.routed_experts is not None:  # of all before the span too, which was read once more
            known = span.routed_experts[:0] if self.routed_experts is None else self.routed_experts
            self.routed_experts = np.concatenate([known, span.routed_experts[len(known) :]])
