"""A folder of weights for a server that replaces its own.

It has config.json, safetensors, and the checksum of each file. It is written tensor by tensor from
a model that may be sharded. Who asks a server to load it is not known here.
"""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import xxhash
from torch import Tensor

from lmforge.core.errors import UserError
from lmforge.core.files.atomic_files import atomic_write_json
from lmforge.core.files.untrusted import read_json
from lmforge.core.model.config import ModelConfig
from lmforge.hf.export import export_folder

CHECKSUMS_NAME = "checksums.json"


def write_weights(
    folder: Path,
    tensors: Mapping[str, Tensor],
    config: ModelConfig,
    read_tensor: Callable[[str], Tensor],
) -> None:
    """Write a folder, which appears complete or not at all.

    Raises UserError where the disk is full.

    `tensors` have full shapes and the dtypes to be written. `read_tensor` returns the value of one,
    which is written before the next is read.
    """
    partial_folder = folder.with_name(f".{folder.name}")
    export_folder(tensors, config, partial_folder, overwrite=True, read_tensor=read_tensor)
    checksums = {path.name: _checksum(path) for path in sorted(partial_folder.iterdir())}
    atomic_write_json(partial_folder / CHECKSUMS_NAME, checksums)
    partial_folder.rename(folder)


def verify_weights(folder: Path) -> None:
    """Raise UserError where files of a folder with checksums are not what was written."""
    if not folder.is_dir():
        raise UserError(
            f"{folder}: no such folder on this host; name one that trainer and servers share"
        )
    if not (folder / CHECKSUMS_NAME).exists():
        return
    for name, expected in read_json(folder / CHECKSUMS_NAME, dict[str, str]).items():
        if not (folder / name).is_file() or _checksum(folder / name) != expected:
            raise UserError(f"{folder / name}: not what was written (checksum); write it again")


def _checksum(path: Path) -> str:
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        for block in iter(partial(file.read, 1 << 22), b""):
            digest.update(block)
    return digest.hexdigest()
