"""Every manifest that lies on a disk: its schema, and how it is written, read and checked.

    checkpoints/step-…/manifest.json   Manifest
    a token folder's manifest.json     TokenFolderManifest; SHARD.json: ShardManifest;
                                       best-fit-LENGTH.json: BestFitManifest
    a folder of examples' examples.json   ExampleManifest

A manifest is written last, atomically: without it what it describes is unfinished. A checkpoint's
holds the checksum of its own other fields; the others name each other by their checksums. What
files hold beside them is checked where they are read. No torch here.
"""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, Final, Literal, NotRequired

import numpy as np
import xxhash
from pydantic import ConfigDict, Field, FiniteFloat
from typing_extensions import TypedDict

from lmforge.core.errors import UserError
from lmforge.core.files.atomic_files import atomic_write_text
from lmforge.core.files.untrusted import (
    CHUNK_BYTES,
    MAX_MANIFEST_BYTES,
    check_content,
    describe_os_error,
    open_file,
    parse_json,
    quoted,
    read_stream,
)
from lmforge.core.records.run_records import Count
from lmforge.core.records.runs import MANIFEST, checkpoint_name, checkpoint_step

EXAMPLES_MANIFEST = "examples.json"
UNFINISHED = "unfinished"

AtLeastOne = Annotated[int, Field(ge=1)]


def is_of_checkpoint(manifest: bytes) -> bool:
    """Whether the content of a MANIFEST is that of a checkpoint; a token folder has one of the same
    name.
    """
    return b'"hf_config"' in manifest[:CHUNK_BYTES]


def hash_manifest(content: bytes) -> str:
    """The xxh3-128 of a manifest, in hexadecimal, by which another one names it."""
    return xxhash.xxh3_128_hexdigest(content)


# --- checkpoints ----------------------------------------------------------------------------------

CHECKPOINT_FORMAT = 3


class CorruptCheckpoint(UserError):
    """A folder cannot be used as a checkpoint; the message says why."""


class FileDigests(TypedDict):
    """Size of a file, and the xxh3-64 of each of its blocks (core/checkpoint/storage.py) as hex
    digits.
    """

    bytes: Annotated[int, Field(ge=0)]
    xxh3: list[str]


class PhasePlan(TypedDict):
    """The plan of a phase: proportions are fractions by the digest of their source."""

    samples: Count
    sequence_length: Count
    proportions: dict[str, Annotated[str, Field(pattern=r"^[0-9]+(/[1-9][0-9]*)?$")]]
    packing: list[Any]


class DataPlan(TypedDict, total=False):
    """The data plan of a checkpoint.

    `names` are the names of the sources by their digests; `dataset` is the plan of a dataset that
    is not a mixture.
    """

    version: Count
    seed: Count
    unit: AtLeastOne
    phases: list[PhasePlan]
    names: dict[str, str]
    dataset: list[Any]


class DetectorState(TypedDict):
    """The state of core/steps/bad_steps.py in a checkpoint; losses are the newest last, None where
    there was none yet.
    """

    skipped_steps: Count
    consecutive_bad_steps: Count
    rollbacks: Count
    losses: list[FiniteFloat | None]


class MultimodalSource(TypedDict):
    """The folder whose language model was trained, and a hash of it (hf/multimodal.py)."""

    source: str
    digest: str


class _WrittenBy(TypedDict, total=False):
    """`data` is what the model was trained on; `sources` has the folder of each source of a mixture
    by its name; `plugins` has the digest of each plugin file by its name, and the version of each
    installed one; `multimodal` is there if the run began from the language model of such a folder.
    """

    __pydantic_config__ = ConfigDict(extra="allow")  # type: ignore[misc]
    ranks: AtLeastOne
    engine: str
    dtype: str
    data: str | None
    sources: dict[str, str]
    plugins: dict[str, str]
    multimodal: MultimodalSource | None


@dataclass(frozen=True)
class Manifest:
    """The manifest of a checkpoint.

    plan_hash           of what the sequences before that depend on (MixedDataset.plan_at)
    data_plan           what it is a hash of
    consumed_sequences  the number of the next sequence; more than step × global_batch_size after
                        batches were skipped
    hf_config           the model config, as a config.json
    rng                 torch's CPU random state (`get_rng_state`)
    contents            "model", and "optimizer" unless the run ended with a checkpoint of the model
                        only
    metrics             what was measured at this step
    kept                whether the checkpoint is never deleted for a newer one
    bad_step_detector   the state of what decides which steps are bad, such as recent losses
    """

    step: Count
    consumed_sequences: Count
    global_batch_size: AtLeastOne
    plan_hash: str
    hf_config: dict[str, Any]
    recipe: dict[str, dict[str, Any]]
    tokenizer_hash: str
    rng: str
    written_by: _WrittenBy
    files: dict[str, FileDigests]
    data_plan: DataPlan = field(default_factory=lambda: DataPlan())
    contents: list[str] = field(default_factory=lambda: ["model", "optimizer"])
    metrics: dict[str, FiniteFloat | None] = field(default_factory=dict)
    kept: bool = False
    bad_step_detector: DetectorState = field(
        default_factory=lambda: DetectorState(
            skipped_steps=0, consecutive_bad_steps=0, rollbacks=0, losses=[]
        )
    )
    format: int = CHECKPOINT_FORMAT

    @property
    def json_text(self) -> str:
        """The JSON to write: the fields and their checksum, so that a flipped bit in a number is
        detected.
        """
        table = asdict(self)
        return json.dumps({**table, "xxh3": checkpoint_checksum(table)}, indent=1) + "\n"

    @property
    def batch_offset(self) -> int:
        """Step k trains on batch k + batch_offset: 0, unless the run rolled back and continued with
        later batches.
        """
        return self.consumed_sequences // self.global_batch_size - self.step


def checkpoint_checksum(fields: dict[str, Any]) -> str:
    """The xxh3-64 of the other fields of a checkpoint's manifest."""
    return xxhash.xxh3_64_hexdigest(json.dumps(fields, sort_keys=True).encode())


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint folder.

    Raises CorruptCheckpoint where there is none, or it is damaged, of another format, or of another
    step than the folder's name says.
    """
    try:
        with open_file(folder / MANIFEST) as file:
            content = read_stream(file, MANIFEST, MAX_MANIFEST_BYTES, CorruptCheckpoint)
    except FileNotFoundError:
        raise CorruptCheckpoint("it has no manifest, so it was never finished") from None
    except OSError as problem:
        raise unreadable(problem, folder / MANIFEST) from None
    fields = parse_json(
        content, dict[str, Any], MANIFEST, max_bytes=MAX_MANIFEST_BYTES, error=CorruptCheckpoint
    )
    if fields.get("format") != CHECKPOINT_FORMAT:
        version = quoted(fields.get("format"))
        raise CorruptCheckpoint(
            f"its format is {version}, this version of lmforge reads {CHECKPOINT_FORMAT}"
        )
    if fields.pop("xxh3", None) != checkpoint_checksum(fields):
        raise CorruptCheckpoint(f"{MANIFEST} does not hold what was written (its checksum differs)")
    step = fields.get("step")
    if checkpoint_step(folder) not in (None, step) and isinstance(step, int):
        raise CorruptCheckpoint(
            f"its manifest is of step {step}; rename the folder to {checkpoint_name(step)}"
        )
    return check_content(fields, Manifest, MANIFEST, CorruptCheckpoint)


def check_sizes(folder: Path, manifest: Manifest) -> None:
    """Raise CorruptCheckpoint where a file of a checkpoint is missing or has another size than was
    written.
    """
    for name, written in manifest.files.items():
        try:
            status = (folder / name).stat()
        except FileNotFoundError:
            raise CorruptCheckpoint(f"{name} is missing") from None
        except OSError as problem:
            raise unreadable(problem, folder / name) from None
        if status.st_size != written["bytes"]:
            raise CorruptCheckpoint(
                f"{name} has {status.st_size:,} bytes instead of {written['bytes']:,}"
            )


def unreadable(problem: OSError, path: Path) -> CorruptCheckpoint:
    """The error for a checkpoint file that cannot be read. It names the file without its folder."""
    return CorruptCheckpoint(describe_os_error(problem, path).removeprefix(f"{path.parent}/"))


# --- token folders --------------------------------------------------------------------------------

FORMAT_VERSION: Final = 2
BLOCK_BYTES: Final = 65_536
# The block size of .checksums: one block has the checksums of 32 MiB of tokens.
CHECKSUM_BLOCK_BYTES: Final = 4096
ShardName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,100}$")]
TokenDtype = Literal["uint16", "uint32"]


@dataclass(frozen=True, slots=True)
class ShardEntry:
    """The entry of a shard in the folder's manifest.

    `xxh3` is that of the shard's manifest, so that swapped shards are detected.
    """

    name: ShardName
    tokens: Count
    documents: Count
    xxh3: str

    def file_sizes(self, token_bytes: int) -> dict[str, int]:
        """The size in bytes of each file of known size, by its suffix; a token has
        `token_bytes`.
        """
        size = token_bytes * self.tokens
        return {
            ".tokens": size,
            ".documents": 8 * self.documents,
            ".checksums": 8 * -(-size // BLOCK_BYTES),
        }


@dataclass(frozen=True)
class ShardManifest:
    """The manifest of one shard; checksums are xxh3 in hexadecimal, one for each block."""

    format: Literal[2]
    bytes: Count
    tokens: Count
    documents: Count
    dtype: TokenDtype
    tokenizer: str
    block_bytes: Literal[65_536]
    checksum_block_bytes: Literal[4096]
    checksum_blocks: list[str]
    document_blocks: list[str]
    # The first document end in each block: finds a document with one read.
    document_block_firsts: list[Count]


@dataclass(frozen=True)
class TokenFolderManifest:
    """The manifest of a folder.

    `plan` is the options of the preparation; `text_bytes` and `splits` go by split.

    `tokenizer_files` has the xxh3 of the files beside tokenizer.json, by name; `removed_documents`
    the number of removed ones by reason, besides empty ones; `special_text_documents` that of
    documents with the text of a special token, encoded as text; `best_fit` the xxh3 of
    best-fit-LENGTH.json (best_fit_index.py) by LENGTH.
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
    special_text_documents: Count = 0
    best_fit: dict[Annotated[str, Field(pattern=r"^[1-9][0-9]{0,9}$")], str] = field(
        default_factory=dict
    )


@dataclass(frozen=True, slots=True)
class IndexEntry:
    """The index of one shard for best-fit packing: its numbers of tokens, sequences and spans, and
    the xxh3 of its checksums in hexadecimal.
    """

    name: ShardName
    tokens: Count
    sequences: Annotated[int, Field(ge=0, lt=2**40)]
    spans: Annotated[int, Field(ge=0, lt=2**40)]
    xxh3: Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")]

    @property
    def dtype(self) -> np.dtype:
        return np.dtype("<u4" if self.tokens < 2**32 else "<u8")

    @property
    def body_bytes(self) -> int:
        """The bytes before the checksums."""
        return (self.sequences + 1 + 2 * self.spans) * self.dtype.itemsize

    @property
    def checksum_bytes(self) -> int:
        return 8 * -(-self.body_bytes // BLOCK_BYTES)


@dataclass(frozen=True)
class BestFitManifest:
    """The content of best-fit-LENGTH.json; `tokens` is the digest of its split."""

    version: int
    sequence_length: Count
    tokens: str
    shards: list[IndexEntry]


def write_manifest(path: Path, manifest: ShardManifest | BestFitManifest) -> str:
    """Write the manifest of a shard or of an index, and return the checksum by which the folder's
    manifest names it.
    """
    text = json.dumps(asdict(manifest))
    atomic_write_text(path, text)
    return hash_manifest(text.encode())


# --- examples -------------------------------------------------------------------------------------


class ExampleSplit(TypedDict):
    """A split of a folder of examples: `group` sequences an example, and the xxh3 of each array by
    name.
    """

    examples: Count
    group: AtLeastOne
    tokens: Count
    scored: Count
    xxh3: dict[str, str]


class ExamplePlan(TypedDict):
    """What examples were made of. The rest of it is only compared."""

    __pydantic_config__ = ConfigDict(extra="allow")  # type: ignore[misc]
    kind: str
    tokenizer: str


class ExampleManifest(TypedDict):
    """The manifest of a folder of examples: the request, and how many examples were kept, truncated
    and dropped.
    """

    plan: ExamplePlan
    sequence_length: Count
    vocab_size: NotRequired[Count]
    counts: dict[str, Count]
    splits: dict[str, ExampleSplit]
