"""A checkpoint exists or it does not: written beside, synced, sealed by a manifest, then renamed.

Tensors are PyTorch Distributed Checkpoint files under their Hugging Face names, so that any number of ranks, any
strategy, or a single process without ranks opens them. `manifest.json`, written last, carries all else that is needed:
model shape, recipe, step, position in the data, and the size and checksums of every file. Nothing here unpickles code.
"""

from lmforge.checkpoint.loading import load
from lmforge.checkpoint.manifest import (
    Manifest,
    Unsound,
    candidates,
    find,
    read_manifest,
    rng_state,
    set_rng_state,
    using,
    verify,
)
from lmforge.checkpoint.retention import Keep
from lmforge.checkpoint.saving import Saver
from lmforge.checkpoint.weights import StoredModel, adapters_of, load_weights

__all__ = [
    "Keep",
    "Manifest",
    "Saver",
    "StoredModel",
    "Unsound",
    "adapters_of",
    "candidates",
    "find",
    "load",
    "load_weights",
    "read_manifest",
    "rng_state",
    "set_rng_state",
    "using",
    "verify",
]
