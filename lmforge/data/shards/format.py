"""The token file format, and how it is written.

    manifest.json           written last: without it the folder is unfinished
    tokenizer/              the tokenizer of these tokens
    train-00000.tokens      raw little-endian uint16 or uint32
    train-00000.documents   raw little-endian uint64: where each document ends, in tokens from the start of the shard
    train-00000.checksums   raw little-endian uint64: the xxh3 of every 64 KiB block of the tokens
    train-00000.json        sizes, tokenizer hash, and the xxh3 of every block of the other two

Shards hold whole documents, each with its end-of-text token, so a split is their concatenation. Where documents end is stored,
because text may contain the end-of-text id. What grows with a shard is outside its .json, which is read whole: 15T tokens in
30,000 shards have 4 GB of checksums. Reading is in folder.py.
"""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import xxhash
from pydantic import Field

from lmforge.atomic_files import atomic_write, atomic_write_text
from lmforge.checksums import block_checksums, parse_checksums
from lmforge.data.tokenizer import COMPANION_FILES, Tokenizer
from lmforge.untrusted import MAX_MANIFEST_BYTES, parse_json, read_bounded

FORMAT_VERSION = 2
BLOCK_BYTES = 65_536
# The block size of .checksums: one block has the checksums of 32 MiB of tokens.
CHECKSUM_BLOCK_BYTES = 4096
SHARDS_MANIFEST = "manifest.json"
TRAIN_SPLIT, VALIDATION_SPLIT = "train", "validation"
SHARD_SUFFIXES = (".tokens", ".documents", ".checksums", ".json")
RESTORE_HINT = "restore it, or prepare again with overwrite"

Count = Annotated[int, Field(ge=0, lt=2**63)]
TokenDtype = Literal["uint16", "uint32"]


@dataclass(frozen=True, slots=True)
class ShardEntry:
    """The entry of a shard in the folder's manifest. `xxh3` is that of the shard's manifest, so that swapped shards are
    detected."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,100}$")]
    tokens: Count
    documents: Count
    xxh3: str

    def file_sizes(self, token_bytes: int) -> dict[str, int]:
        """The size in bytes of each file of known size, by its suffix; a token has `token_bytes`."""
        size = token_bytes * self.tokens
        return {".tokens": size, ".documents": 8 * self.documents, ".checksums": 8 * -(-size // BLOCK_BYTES)}


@dataclass(frozen=True)
class ShardManifest:
    """The manifest of one shard; checksums are xxh3 in hexadecimal, one for each block."""

    format: Annotated[int, Field(ge=FORMAT_VERSION, le=FORMAT_VERSION)]
    bytes: Count
    tokens: Count
    documents: Count
    dtype: TokenDtype
    tokenizer: str
    block_bytes: Annotated[int, Field(ge=BLOCK_BYTES, le=BLOCK_BYTES)]
    checksum_block_bytes: Annotated[int, Field(ge=CHECKSUM_BLOCK_BYTES, le=CHECKSUM_BLOCK_BYTES)]
    checksum_blocks: list[str]
    document_blocks: list[str]
    document_block_firsts: list[Count]  # the first document end in each block: finds a document with one read


@dataclass(frozen=True)
class TokenFolderManifest:
    """The manifest of a folder. `plan` is the options of the preparation; `text_bytes` and `splits` go by split.

    `tokenizer_files` has the xxh3 of the files beside tokenizer.json, by name; `removed_documents` the number of removed ones
    by reason, besides empty ones; `best_fit` the xxh3 of best-fit-LENGTH.json (best_fit_index.py) by LENGTH.
    """

    format: int
    source: str
    plan: dict[str, Any]
    tokenizer: str
    vocab_size: Count
    dtype: TokenDtype
    skipped_files: Count
    empty_documents: Count
    text_bytes: dict[str, Count]
    splits: dict[str, list[ShardEntry]]
    tokenizer_files: dict[str, str] = field(default_factory=dict)
    removed_documents: dict[str, Count] = field(default_factory=dict)
    best_fit: dict[Annotated[str, Field(pattern=r"^[1-9][0-9]{0,9}$")], str] = field(default_factory=dict)


def write_shard(folder: Path, name: str, tokens: np.ndarray, lengths: np.ndarray, tokenizer_hash: str) -> ShardEntry:
    """Write one shard, its manifest last, and return its entry in the folder's manifest.

    `tokens` has the dtype to store; `lengths` int64 [documents] are the tokens of each document and add up to len(tokens).
    """
    tokens = tokens.astype(tokens.dtype.newbyteorder("<"), copy=False)
    ends = np.cumsum(lengths).astype("<u8")
    checksums = parse_checksums(block_checksums(tokens.view(np.uint8).data, BLOCK_BYTES)).astype("<u8", copy=False)
    for suffix, array in ((".tokens", tokens), (".documents", ends), (".checksums", checksums)):
        with atomic_write(folder / (name + suffix)) as file:
            file.write(array.data)
    manifest = ShardManifest(
        FORMAT_VERSION,
        tokens.nbytes,
        len(tokens),
        len(ends),
        "uint16" if tokens.itemsize == 2 else "uint32",
        tokenizer_hash,
        BLOCK_BYTES,
        CHECKSUM_BLOCK_BYTES,
        block_checksums(checksums.view(np.uint8).data, CHECKSUM_BLOCK_BYTES),
        block_checksums(ends.view(np.uint8).data, BLOCK_BYTES),
        ends[:: BLOCK_BYTES // ends.itemsize].tolist(),
    )
    text = json.dumps(asdict(manifest))
    atomic_write_text(folder / (name + ".json"), text)
    return _shard_entry(name, manifest, text.encode())


def hash_tokenizer_files(tokenizer: Tokenizer) -> dict[str, str]:
    """The `tokenizer_files` of a folder with this tokenizer."""
    return {name: hash_text(text) for name, text in tokenizer.files.items() if name in COMPANION_FILES}


def hash_text(text: str) -> str:
    """The xxh3 of a file of text, in hexadecimal."""
    return xxhash.xxh3_128_hexdigest(text.encode())


def finished_shard_entry(folder: Path, name: str) -> ShardEntry | None:
    """The entry of a shard that an earlier run wrote, or None. Raises UserError if its manifest is damaged."""
    path = folder / (name + ".json")
    try:
        content = read_bounded(path, MAX_MANIFEST_BYTES)
    except FileNotFoundError:
        return None
    return _shard_entry(name, parse_shard_manifest(content, str(path)), content)


def _shard_entry(name: str, manifest: ShardManifest, content: bytes) -> ShardEntry:
    return ShardEntry(name, manifest.tokens, manifest.documents, xxhash.xxh3_128_hexdigest(content))


def parse_shard_manifest(content: bytes, source: str) -> ShardManifest:
    """The content of a shard's .json; `source` names it. Raises UserError if it is damaged."""
    return parse_json(content, ShardManifest, source, max_bytes=MAX_MANIFEST_BYTES, hint=RESTORE_HINT)


def describes(manifest: ShardManifest, entry: ShardEntry, folder: TokenFolderManifest) -> bool:
    """Whether the manifest of a shard is that of `entry` in a folder."""
    size = np.dtype(folder.dtype).itemsize * entry.tokens
    firsts = manifest.document_block_firsts
    return (
        (manifest.dtype, manifest.tokenizer, manifest.tokens) == (folder.dtype, folder.tokenizer, entry.tokens)
        and (manifest.documents, manifest.bytes) == (entry.documents, size)
        and len(firsts) == len(manifest.document_blocks)
        and firsts == sorted(set(firsts))
    )
