"""The token file format, and how it is written.

    manifest.json           written last: without it the folder is unfinished
    tokenizer/              the tokenizer of these tokens
    train-00000.tokens      raw little-endian uint16 or uint32
    train-00000.documents   raw little-endian uint64: where each document ends, in tokens from the
                            start of the shard
    train-00000.checksums   raw little-endian uint64: the xxh3 of every 64 KiB block of the tokens
    train-00000.json        sizes, tokenizer hash, and the xxh3 of every block of the other two

Shards hold whole documents, each with its end-of-text token, so a split is their concatenation.
Where documents end is stored, because text may contain the end-of-text id. What grows with a shard
is outside its .json, which is read whole: 15T tokens in 30,000 shards have 4 GB of checksums.
Reading is in folder.py.
"""

from pathlib import Path

import numpy as np

from lmforge.core.data.tokenizer import COMPANION_FILES, Tokenizer
from lmforge.core.files.atomic_files import atomic_write
from lmforge.core.files.checksums import block_checksums, parse_checksums
from lmforge.core.files.untrusted import MAX_MANIFEST_BYTES, parse_json, read_bounded
from lmforge.core.records.manifests import (
    BLOCK_BYTES,
    CHECKSUM_BLOCK_BYTES,
    FORMAT_VERSION,
    ShardEntry,
    ShardManifest,
    TokenFolderManifest,
    hash_manifest,
    write_manifest,
)

SHARDS_MANIFEST = "manifest.json"
TRAIN_SPLIT = "train"
VALIDATION_SPLIT = "validation"
SHARD_SUFFIXES = (".tokens", ".documents", ".checksums", ".json")
RESTORE_HINT = "restore it, or prepare again with overwrite"


def write_shard(
    folder: Path, name: str, tokens: np.ndarray, lengths: np.ndarray, tokenizer_hash: str
) -> ShardEntry:
    """Write one shard, its manifest last, and return its entry in the folder's manifest.

    `tokens` has the dtype to store; `lengths` int64 [documents] are the tokens of each document and
    add up to len(tokens).
    """
    tokens = tokens.astype(tokens.dtype.newbyteorder("<"), copy=False)
    ends = np.cumsum(lengths).astype("<u8")
    checksums = parse_checksums(block_checksums(tokens.view(np.uint8).data, BLOCK_BYTES)).astype(
        "<u8", copy=False
    )
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
    return ShardEntry(
        name, len(tokens), len(ends), write_manifest(folder / (name + ".json"), manifest)
    )


def hash_tokenizer_files(tokenizer: Tokenizer) -> dict[str, str]:
    """The `tokenizer_files` of a folder with this tokenizer."""
    return {
        name: hash_manifest(text.encode())
        for name, text in tokenizer.files.items()
        if name in COMPANION_FILES
    }


def finished_shard_entry(folder: Path, name: str) -> ShardEntry | None:
    """The entry of a shard that an earlier run wrote, or None.

    Raises UserError if its manifest is damaged.
    """
    path = folder / (name + ".json")
    try:
        content = read_bounded(path, MAX_MANIFEST_BYTES)
    except FileNotFoundError:
        return None
    manifest = parse_json(
        content, ShardManifest, str(path), max_bytes=MAX_MANIFEST_BYTES, hint=RESTORE_HINT
    )
    return ShardEntry(name, manifest.tokens, manifest.documents, hash_manifest(content))


def describes(manifest: ShardManifest, entry: ShardEntry, folder: TokenFolderManifest) -> bool:
    """Whether the manifest of a shard is that of `entry` in a folder."""
    size = np.dtype(folder.dtype).itemsize * entry.tokens
    firsts = manifest.document_block_firsts
    return (
        (manifest.dtype, manifest.tokenizer, manifest.tokens)
        == (folder.dtype, folder.tokenizer, entry.tokens)
        and (manifest.documents, manifest.bytes) == (entry.documents, size)
        and len(firsts) == len(manifest.document_blocks)
        and firsts == sorted(set(firsts))
    )
