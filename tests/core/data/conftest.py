import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest

from lmforge.core.data.shards.folder import TokenFolder
from lmforge.core.data.shards.format import SHARDS_MANIFEST, write_shard
from lmforge.core.data.tokenizer import Tokenizer, train_tokenizer
from lmforge.core.records.manifests import FORMAT_VERSION, TokenFolderManifest

# By shard, the length of each document in it, separator included.
Shards = Sequence[Sequence[int]]


@pytest.fixture(scope="session")
def byte_tokenizer() -> Tokenizer:
    """No merges: a token a byte, so that a test chooses lengths to the token."""
    return train_tokenizer([""], 261)


@pytest.fixture
def folder_of(byte_tokenizer: Tokenizer) -> Callable[..., TokenFolder]:
    """Write documents of chosen lengths straight into shards, their tokens drawn from a
    generator.
    """

    def write(path: Path, shards: Shards, seed: int = 0, split: str = "train") -> TokenFolder:
        generator = np.random.default_rng(seed)
        path.mkdir(parents=True)
        entries = []
        for number, lengths in enumerate(shards):
            tokens = generator.integers(5, 261, sum(lengths)).astype("<u2")
            tokens[np.cumsum(lengths) - 1] = byte_tokenizer.eos_token_id
            name = f"{split}-{number:05d}"
            entries.append(write_shard(path, name, tokens, np.array(lengths), byte_tokenizer.hash))
        byte_tokenizer.save(path / "tokenizer")
        manifest = TokenFolderManifest(
            FORMAT_VERSION,
            "test",
            {},
            byte_tokenizer.hash,
            byte_tokenizer.vocab_size,
            "uint16",
            0,
            0,
            {},
            {split: entries},
        )
        (path / SHARDS_MANIFEST).write_text(json.dumps(asdict(manifest)))
        return TokenFolder.open(path)

    return write


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Retries as many as always, without the waiting."""
    monkeypatch.setattr("lmforge.core.data.shards.storage.RETRY_DELAYS_SECONDS", (0.01, 0.02, 0.05))
