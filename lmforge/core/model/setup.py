"""What a model is built with besides its config."""

from dataclasses import dataclass

from lmforge.core.model.attention import ContextParallel
from lmforge.core.model.parametrization import STANDARD, Parametrization


@dataclass(frozen=True)
class ModelSetup:
    """How a model is trained, and which part of each sequence this rank computes.

    parametrization: how first values and learning rates follow from those of a base model.
    dropout: the fraction of the numbers that are zeroed where a batch has rng keys: after the
        embedding, and in what attention and feed-forward add to the hidden states. Attention
        probabilities are never dropped.
    neftune_noise_alpha: the strength of the noise that NEFTune adds to embeddings (token_rng.py),
        where a batch has rng keys.
    context_parallel: where a rank has only a part of each sequence: how attention gets the keys of
        the other parts.
    sequence_shard: with tensor parallel, hidden states are a part of the sequence: (which one, of
        how many).
    """

    parametrization: Parametrization = STANDARD
    dropout: float = 0.0
    neftune_noise_alpha: float = 0.0
    context_parallel: ContextParallel | None = None
    sequence_shard: tuple[int, int] = (0, 1)


PLAIN_SETUP = ModelSetup()
