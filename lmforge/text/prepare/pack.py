"""Best-fit packing of a finished folder: an index beside each training shard, then the manifests.

All processes and ranks pack. Packing needs no tokens, only where documents end. It writes the same
bytes again, whatever an interrupted packing left.
"""

from contextlib import ExitStack, suppress
from dataclasses import asdict, replace
from functools import lru_cache, partial
from itertools import chain
from pathlib import Path

from lmforge.core.data.best_fit_index import BestFitIndex, write_index, write_index_manifest
from lmforge.core.data.shards.folder import ShardReader, TokenFolder
from lmforge.core.data.shards.format import SHARDS_MANIFEST, TRAIN_SPLIT
from lmforge.core.distributed.rank_info import threads_per_rank
from lmforge.core.errors import UserError
from lmforge.core.files.atomic_files import atomic_write_json
from lmforge.core.records.manifests import IndexEntry, ShardEntry
from lmforge.core.records.runs import is_local, parse_location
from lmforge.text.prepare.dist_context import DistContext
from lmforge.text.prepare.output_folder import lock_folder
from lmforge.text.prepare.steps import ProgressCallback
from lmforge.text.prepare.worker_pool import WorkerPool

# The work for a process: some seconds of packing, since a process takes a second to start.
MIN_DOCUMENTS_PER_WORKER = 1 << 20


def pack_folder(
    location: str,
    sequence_length: int,
    *,
    workers: int | None,
    progress: ProgressCallback,
    dist_ctx: DistContext,
) -> BestFitIndex:
    """Pack a token folder for sequences of `sequence_length` tokens, and return its index.

    See `prepare` for the other arguments. Raises UserError where it is no finished folder of this
    machine, one of its shards is damaged, or the disk is full.
    """
    path = parse_location(location)
    with dist_ctx.raise_on_all():
        if not is_local(path):
            raise UserError(
                f"{location}: packing writes files: pack the folder that was uploaded, and upload"
                " what it adds"
            )
        TokenFolder.open(path)
    with ExitStack() as stack:
        dist_ctx.decide_on_rank0(lambda: stack.enter_context(lock_folder(path)))
        return write_best_fit_index(
            path, sequence_length, workers=workers, progress=progress, dist_ctx=dist_ctx
        )


def is_packed(path: Path, sequence_length: int) -> bool:
    """Return True where a folder is packed for this length, and its index is complete."""
    folder = TokenFolder.open(path)
    with suppress(UserError):
        BestFitIndex.open(folder, sequence_length)
        return True
    return False


def write_best_fit_index(
    path: Path,
    sequence_length: int,
    *,
    workers: int | None,
    progress: ProgressCallback,
    dist_ctx: DistContext,
) -> BestFitIndex:
    """Pack a locked folder, as `pack_folder` does."""
    with dist_ctx.raise_on_all():
        folder = TokenFolder.open(path)
        info = dist_ctx.rank_info
        split = folder.split(TRAIN_SPLIT)
        shards = folder.manifest.splits[TRAIN_SPLIT]
        mine = shards[info.rank :: info.world_size]
        useful = 1 + split.num_documents // MIN_DOCUMENTS_PER_WORKER
        _open_cached.cache_clear()  # the file may have been restored since
        pack = partial(_pack_shard, path, split.digest, sequence_length)
        num_workers = workers or min(threads_per_rank(info.local_world_size), useful)
        entries = []
        show = progress if info.is_rank0 else lambda *step: None
        show("packing", 0, len(mine), 0, 0)
        with WorkerPool(num_workers) as pool:
            for _, entry in pool.map_unordered(pack, mine):
                entries.append(entry)
                show("packing", len(entries), len(mine), 0, 0)
    gathered = dist_ctx.gather(entries)

    def write_manifests() -> None:
        order = {shard.name: number for number, shard in enumerate(shards)}
        written = sorted(chain.from_iterable(gathered or ()), key=lambda each: order[each.name])
        digest = write_index_manifest(folder, sequence_length, written)
        best_fit = folder.manifest.best_fit | {str(sequence_length): digest}
        manifest = replace(folder.manifest, best_fit=best_fit)
        atomic_write_json(folder.path / SHARDS_MANIFEST, asdict(manifest))

    dist_ctx.decide_on_rank0(write_manifests)
    with dist_ctx.raise_on_all():
        return BestFitIndex.open(TokenFolder.open(path), sequence_length)


@lru_cache(maxsize=1)
def _open_cached(path: Path, digest: str) -> TokenFolder:
    """The folder, opened once in a process, and again if other tokens replaced those in it."""
    folder = TokenFolder.open(path, check_sizes=False)
    assert folder.split(TRAIN_SPLIT).digest == digest
    return folder


def _pack_shard(path: Path, digest: str, sequence_length: int, shard: ShardEntry) -> IndexEntry:
    reader = ShardReader(_open_cached(path, digest), shard)
    ends = reader.read_ends(0, len(reader.block_first_ends))
    return write_index(path, shard.name, ends, sequence_length)
