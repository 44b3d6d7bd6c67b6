HEADER
# --- texts -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Reading:
    """A unit, and where its document is cut if the corpus has no other."""

    unit: Unit
    tail: float | None

    def texts(self) -> Iterator[tuple[str, int]]:
        """(text, hash of it) of each document; the smaller the hash, the sooner it is held out."""
        for document in self.unit.read():
            text = document.text
            if self.tail is None or not text.strip():
                yield text, xxhash.xxh3_64_intdigest(text.encode())
            else:
                at = _line_before(text, int(len(text) * (1 - self.tail)))
                yield text[:at], 2**64 - 1
                yield text[at:], 0


def _line_before(text: str, at: int) -> int:
    """A place near `at` where a text may be cut, with something on either side."""
    at = min(max(at, 1), len(text) - 1)
    newline = text.rfind("\n", 0, at) + 1
    return newline if newline > at // 2 else at


def stored_dtype(tokenizer: Tokenizer) -> np.dtype:
    return np.dtype("<u2" if tokenizer.vocab_size <= 65_536 else "<u4")


# --- parts -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Documents:
    """Every document of every part, in the order of the source: arrays of one length."""

    parts: np.ndarray
    starts: np.ndarray  # in tokens of the part
    lengths: np.ndarray  # tokens, separator included
    hashes: np.ndarray
    text_bytes: np.ndarray
    empty: int

    @classmethod
    def load(cls, out: Path, count: int) -> "Documents":
        parts = [np.load(part_path(out, number, ".npz")) for number in range(count)]
        lengths = [part["lengths"] for part in parts]
        return cls(
            parts=np.repeat(np.arange(count), [len(of_part) for of_part in lengths]),
            starts=np.concatenate([np.cumsum(of_part) - of_part for of_part in lengths]),
            lengths=np.concatenate(lengths),
            hashes=np.concatenate([part["hashes"] for part in parts]),
            text_bytes=np.concatenate([part["text_bytes"] for part in parts]),
            empty=sum(int(part["empty"]) for part in parts),
        )


def part_path(out: Path, number: int, suffix: str) -> Path:
    return out / UNFINISHED / f"part-{number:06d}{suffix}"


@lru_cache(maxsize=1)
def _opened(folder: Path) -> Tokenizer:
    return Tokenizer.open(folder)


def sealpart_path(job: tuple[Path, int, Reading]) -> None:
    """Tokenise one unit. The list of its documents is sealed last and says that the part is there."""
    out, number, reading = job
    tokenizer = _opened(out / "tokenizer")
    dtype = stored_dtype(tokenizer)
    lengths: list[int] = []
    hashes: list[int] = []
    sizes: list[int] = []
    empty = 0
    with sealing(part_path(out, number, ".tokens")) as file:
        for texts, digests in _at_once(reading.texts()):
            kept = [(text, digest) for text, digest in zip(texts, digests, strict=True) if text.strip()]
            empty += len(texts) - len(kept)
            for (text, digest), ids in zip(kept, tokenizer.encode_batch([text for text, _ in kept]), strict=True):
                file.write(np.array([*ids, tokenizer.separator_id], dtype).data)
                lengths.append(len(ids) + 1)
                hashes.append(digest)
                sizes.append(len(text.encode()))
    with sealing(part_path(out, number, ".npz")) as file:
        np.savez(
            file,
            lengths=np.array(lengths, np.int64),
            hashes=np.array(hashes, np.uint64),
            text_bytes=np.array(sizes, np.int64),
            empty=np.array(empty),
        )


def _at_once(texts: Iterator[tuple[str, int]]) -> Iterator[tuple[list[str], list[int]]]:
    """Documents in handfuls of about a megabyte, so that memory does not grow with the unit."""
    handful: list[str] = []
    digests: list[int] = []
    size = 0
    for text, digest in texts:
        handful.append(text)
        digests.append(digest)
        size += len(text)
        if size >= ENCODED_AT_ONCE:
            yield handful, digests
            handful, digests, size = [], [], 0
    yield handful, digests


# --- shards ----------------------------------------------------------------------------------------------------------


def shards_of(documents: np.ndarray, lengths: np.ndarray, shard_tokens: int) -> Iterator[np.ndarray]:
    """Documents in order, cut after each that brings a shard to `shard_tokens`."""
    stops = np.cumsum(lengths[documents])
    first, tokens = 0, 0
    while first < len(documents):
        last = min(int(np.searchsorted(stops, tokens + shard_tokens)), len(documents) - 1)
        yield documents[first : last + 1]
        first, tokens = last + 1, int(stops[last])


def seal_shard(job: tuple[Path, str, tuple[np.ndarray, np.ndarray, np.ndarray], np.dtype, str]) -> Json:
    """Gather the documents of one shard from the parts."""
    out, name, (starts, lengths, parts), dtype, tokenizer_hash = job
    sealed = open_shard_line(out, name)
    if sealed is not None:
        return sealed
    stops = np.cumsum(lengths)
    tokens = np.empty(int(stops[-1]), dtype)
    # Part by part rather than document by document: each is opened once, and read in the order it lies on the disk.
    by_part = np.lexsort((starts, parts))
    for of_part in np.split(by_part, np.flatnonzero(np.diff(parts[by_part])) + 1):
        with open(part_path(out, int(parts[of_part[0]]), ".tokens"), "rb") as file:
            for document in of_part:
                file.seek(int(starts[document]) * dtype.itemsize)
                into = tokens[stops[document] - lengths[document] : stops[document]]
                if file.readinto(into.data) != into.nbytes:
                    raise Mistake(f"{out}: a part of its preparation is truncated: prepare anew with overwrite")
    return write_shard(out, name, tokens, lengths, tokenizer_hash)
