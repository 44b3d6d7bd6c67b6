"""A checkpoint exists or it does not: written beside, synced, sealed by a manifest, then renamed.

Tensors are PyTorch Distributed Checkpoint files under their Hugging Face names, so that any number of ranks, any
strategy, or a single process without ranks opens them. `manifest.json`, written last, carries all else that is needed:
model shape, recipe, step, position in the data, and the size and checksums of every file. Nothing here unpickles code.
"""

from lmforge.checkpoint.async_save import AsyncCheckpointer
from lmforge.checkpoint.load import load
from lmforge.checkpoint.manifest import (
    CorruptCheckpoint,
    Manifest,
    candidates,
    find,
    get_rng_state,
    open_checkpoint,
    read_manifest,
    set_rng_state,
    verify,
)
from lmforge.checkpoint.pretrained_weights import StoredModel, load_weights, stored_lora_config
from lmforge.checkpoint.retention import RetentionPolicy

__all__ = [
    "AsyncCheckpointer",
    "CorruptCheckpoint",
    "Manifest",
    "RetentionPolicy",
    "StoredModel",
    "candidates",
    "find",
    "get_rng_state",
    "load",
    "load_weights",
    "open_checkpoint",
    "read_manifest",
    "set_rng_state",
    "stored_lora_config",
    "verify",
]
