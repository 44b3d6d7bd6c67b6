"""Whether a host reads the same data and models as the others, and can write checkpoints: space and
speed.
"""

import os
import shutil
import statistics
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any
from uuid import uuid4

import xxhash

from lmforge.core import checkpoint
from lmforge.core.data.shards.folder import TokenFolder
from lmforge.core.data.shards.format import SHARDS_MANIFEST
from lmforge.core.errors import UserError, format_bytes
from lmforge.core.model.state_bytes import checkpoint_bytes
from lmforge.core.options.stage import PretrainConfig, StageConfig
from lmforge.core.records.kinds import Kind, kind_of
from lmforge.core.records.runs import Run, is_local
from lmforge.core.stages.inputs import open_pretrain_inputs
from lmforge.core.stages.parameter_counts import count_parameters, get_lora_config
from lmforge.core.stages.training_data import open_source
from lmforge.hf.hub import find_cached, parse_model_name
from lmforge.ops.doctor import Finding, Status
from lmforge.post.options.align import AlignConfig
from lmforge.post.options.tuning import TunedConfig
from lmforge.post.tuned_model import find_required_pretrained
from lmforge.text.chat.examples import hash_files

BLOCK_BYTES = 16 * 2**20
WRITE_BYTES = 256 * 2**20
WRITE_SECONDS = 1.0
SLOW_BYTES_PER_SECOND = 50e6
LOW_DISK_BYTES = 10 * 2**30
# The number of parts of each split that are read, evenly spaced, and verified against their
# checksums.
READS = 8
READ_TOKENS = 32_768


def check_storage(config: StageConfig | None, world_size: int) -> dict[str, Any]:
    """{"findings": of this host, "contents": digests by what they are of, which must be the same on
    all hosts}.
    """
    findings: list[Finding] = []
    contents: dict[str, str] = {}
    if config is not None:
        for name, read in (("data", _read_data), ("model", _read_models)):
            with _problems_as_findings(name, findings):
                contents |= read(config, findings)
    needed = 0
    if config is not None and not any(finding.status == "fail" for finding in findings):
        with _problems_as_findings("recipe", findings):
            needed = _checkpoint_bytes(config, world_size)
            findings.append(
                Finding(
                    "recipe",
                    "pass",
                    f"fits {world_size} ranks; a checkpoint takes {format_bytes(needed)}",
                )
            )
    with _problems_as_findings("checkpoints", findings):
        findings.append(_check_checkpoint_folder(config, needed))
    return {"findings": [asdict(finding) for finding in findings], "contents": contents}


@contextmanager
def _problems_as_findings(name: str, findings: list[Finding]) -> Iterator[None]:
    try:
        yield
    except (UserError, OSError) as problem:
        description, _, todo = str(problem).partition("; ")
        findings.append(Finding(name, "fail", description, todo))


def _read_data(config: StageConfig, findings: list[Finding]) -> dict[str, str]:
    """Digests of what the recipe is trained on, as this host reads it."""
    contents = {}
    if isinstance(config, PretrainConfig):
        for source in config.data.all_sources:
            # The original folder, not the copy that a run makes on this host, since doctor runs
            # before and compares the hosts.
            folder = open_source(config.data, source, staged=False)
            contents[source.folder], text = _read_tokens(folder)
            findings.append(Finding("data", "pass", text))
    elif isinstance(config, TunedConfig):
        config.require_inputs()
        for each in config.data.file_sources:
            for path in each.files:
                contents[str(path)] = hash_files([path])
            for path in each.validation_files:
                contents[f"{path}, validation"] = hash_files([path], "validation")
            for path in (*each.files, *each.validation_files):
                findings.append(Finding("data", "pass", f"{path}: can be read"))
    return contents


def _read_tokens(folder: TokenFolder) -> tuple[str, str]:
    """A digest of a folder's manifest and some of its tokens, and a line about them.

    Raises UserError for damaged ones.
    """
    digest = xxhash.xxh3_64(folder.storage.read_file(SHARDS_MANIFEST))
    began = time.perf_counter()
    read = 0
    for name in (
        name
        for name, shards in folder.manifest.splits.items()
        if any(shard.tokens for shard in shards)
    ):
        split = folder.split(name)
        size = min(READ_TOKENS, split.num_tokens)
        spare = split.num_tokens - size
        for start in sorted({spare * number // max(1, READS - 1) for number in range(READS)}):
            if not split.quarantined.overlap(start, start + size):
                tokens = split.read(start, start + size)
                digest.update(tokens.tobytes())
                read += tokens.nbytes
    seconds = time.perf_counter() - began
    return (
        digest.hexdigest(),
        f"{folder.path}: {format_bytes(read)} read and verified in {seconds:.2f} s",
    )


def _read_models(config: StageConfig, findings: list[Finding]) -> dict[str, str]:
    """Digests of the models that the recipe names: the names and sizes of their files.

    Nothing is downloaded.
    """
    sources = []
    if config.model.source is not None:
        sources = [config.model.source]
    if isinstance(config, AlignConfig):
        sources += [Path(spec) for spec in config.rollout.reward_functions if Path(spec).is_dir()]
    contents = {}
    for source in sources:
        kind = kind_of(source)
        folder = source
        if kind == Kind.HUB_NAME:
            needed = "config.json"
            if config.model.load_weights:
                needed = "weights"
            if (cached := find_cached(*parse_model_name(str(source)), needed)) is None:
                raise UserError(
                    f"{source}: not in the cache of this host; lmforge download {source}, where"
                    " there is a network"
                )
            folder = cached
        elif kind == Kind.MISSING:
            raise UserError(f"{source}: no such folder on this host")
        files = sorted(
            (str(path.relative_to(folder)), path.stat().st_size)
            for path in folder.rglob("*")
            if path.is_file()
        )
        described = [
            each for each in files if not any(part.startswith(".") for part in Path(each[0]).parts)
        ]
        contents[str(source)] = xxhash.xxh3_64_hexdigest(repr(described).encode())
        size = sum(size for _, size in files)
        findings.append(Finding("model", "pass", f"{source}: {format_bytes(size)} at {folder}"))
    return contents


def _checkpoint_bytes(config: StageConfig, world_size: int) -> int:
    """The size of a checkpoint of the recipe.

    Raises UserError where the recipe does not fit this number of ranks.
    """
    if isinstance(config, PretrainConfig):
        model_config = open_pretrain_inputs(config, world_size).model_config
    else:
        assert isinstance(config, TunedConfig)
        model_config = find_required_pretrained(config).resolve_model_config(config.model)
    return checkpoint_bytes(
        config.optimizer,
        config.train.master_dtype,
        count_parameters(model_config, get_lora_config(config)),
    )


def _check_checkpoint_folder(config: StageConfig | None, needed: int) -> Finding:
    """Whether checkpoints can be written where the recipe puts them (`runs` without one): space and
    speed. Raises UserError where they cannot.
    """
    folder = checkpoint_folder(config)
    if config is not None and not is_local(folder):
        checkpoint.check_writable(Run.from_config(config))
        return Finding("checkpoints", "pass", f"{folder}: an object store that can be written")
    free, written, read = time_disk(folder)
    kept = (config.checkpoint.keep_last + 1 if config else 1) * needed
    text = (
        f"{folder}: {format_bytes(free)} free, {written / 1e6:,.0f} MB/s written, {read / 1e6:,.0f}"
        " read"
    )
    values = {
        "free_bytes": free,
        "write_bytes_per_second": round(written),
        "read_bytes_per_second": round(read),
    }
    status: Status = "warn"
    if free < kept:
        status = "fail"
        todo = "free some space, lower checkpoint.keep_last, or give --run.folder"
        text += f"; checkpoints take {format_bytes(kept)}"
    elif free < LOW_DISK_BYTES:
        todo = "checkpoints of larger models will not fit; free some space, or give --run.folder"
    elif written < SLOW_BYTES_PER_SECOND:
        todo = (
            "each checkpoint takes long; give --run.folder or --checkpoint.folder on a faster disk"
        )
    else:
        status = "pass"
        todo = ""
    return Finding("checkpoints", status, text, todo, values=values)


def checkpoint_folder(config: StageConfig | None) -> Path:
    """Where checkpoints of a recipe go; without one, of runs in this folder."""
    if config is None:
        return Path("runs")
    return Run.from_config(config).checkpoints_folder


def time_disk(folder: Path) -> tuple[int, float, float]:
    """Free bytes of a folder, or of its nearest existing parent, and bytes per second written, with
    fsync, and read again; at most a quarter of what is free is written. Raises UserError where
    nothing can be.
    """
    block = os.urandom(BLOCK_BYTES)
    path = None
    try:
        existing = next(
            each for each in (folder.absolute(), *folder.absolute().parents) if each.is_dir()
        )
        free = shutil.disk_usage(existing).free
        path = existing / f".lmforge-doctor-{uuid4().hex}"
        began = time.perf_counter()
        with path.open("wb") as file:
            size = 0
            while not size or (
                size < min(WRITE_BYTES, free / 4) and time.perf_counter() - began < WRITE_SECONDS
            ):
                size += file.write(block)
            file.flush()
            os.fsync(file.fileno())
        written = size / (time.perf_counter() - began)
        with path.open("rb") as file:
            with suppress(OSError, AttributeError):
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            began = time.perf_counter()
            while file.read(BLOCK_BYTES):
                pass
        return free, written, size / (time.perf_counter() - began)
    except OSError as problem:
        words = f"checkpoints cannot be written ({problem.strerror}); give another --run.folder"
        raise UserError(f"{folder}: {words}") from None
    finally:
        if path is not None:
            path.unlink(missing_ok=True)


def compare_contents(contents: Mapping[str, Mapping[str, str]]) -> Iterator[Finding]:
    """Findings about data and models that hosts read differently. `contents` by host."""
    names = list(dict.fromkeys(name for each in contents.values() for name in each))
    differ = False
    for name in names:
        digests = {host: each.get(name) for host, each in contents.items() if name in each}
        usual = statistics.mode(digests.values())
        others = tuple(host for host, digest in digests.items() if digest != usual)
        if others:
            differ = True
            text = (
                f"{name}: not the same files as on"
                f" {next(host for host in digests if host not in others)}"
            )
            yield Finding(
                "equal data",
                "fail",
                text,
                "copy it again to the hosts that differ, or share one folder",
                others,
            )
    if len(contents) > 1 and names and not differ:
        yield Finding(
            "equal data", "pass", f"the same on {len(contents)} hosts: {', '.join(names)}"
        )
