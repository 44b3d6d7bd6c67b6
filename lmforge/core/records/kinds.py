"""What a path or a name stands for: a run, a checkpoint, a model, data.

And the one line for what it is not.

The files of a folder tell by their names. Nothing is read but the beginning of a manifest; whether
the thing is intact, its own reader says. No torch here.
"""

import re
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path

from lmforge.core.errors import UserError
from lmforge.core.files.untrusted import CHUNK_BYTES, MAX_LISTED, cut, open_file
from lmforge.core.records.manifests import EXAMPLES_MANIFEST, UNFINISHED, is_of_checkpoint
from lmforge.core.records.runs import MANIFEST, Run, checkpoint_step

HF_CONFIG = "config.json"
ADAPTER_CONFIG = "adapter_config.json"
MODEL_NAME_PATTERN = re.compile(
    r"(?P<name>[A-Za-z0-9][\w.-]*/[A-Za-z0-9_][\w.-]*)(@(?P<revision>[\w.][\w./-]*))?"
)
# Folder names of lmforge's defaults and documentation: runs/x is never a model of an organization
# "runs".
LOCAL_FOLDERS = frozenset({"runs", "data", "models", "checkpoints"})


class Kind(StrEnum):
    """What a name stands for, in the words of messages."""

    RECIPE = "a recipe"
    RUN = "a run"
    CHECKPOINT = "a checkpoint"
    HF_FOLDER = "a Hugging Face folder"
    ADAPTERS = "a folder of adapters"
    HUB_NAME = "a name on the hub"
    TOKENS = "a token folder"
    EXAMPLES = "a folder of examples"
    FOREIGN = "a checkpoint of another trainer"
    FILE = "a file of no known kind"
    FOLDER = "a folder of no known kind"
    MISSING = "no such file or folder"


MODELS = (Kind.RUN, Kind.CHECKPOINT, Kind.HF_FOLDER, Kind.ADAPTERS, Kind.HUB_NAME)


def kind_of(name: str | Path) -> Kind:
    """What `name` stands for. OSError passes, such as for a name that is too long."""
    path = Path(name) if isinstance(name, str) else name
    if path.suffix == ".toml" and not path.is_dir():
        return Kind.RECIPE
    if not path.exists():
        return Kind.HUB_NAME if is_hub_name(name) else Kind.MISSING
    if not path.is_dir():
        return Kind.FOREIGN if path.suffix in (".pt", ".pth", ".ckpt") else Kind.FILE
    if (path / HF_CONFIG).exists():
        return Kind.HF_FOLDER
    if (path / ADAPTER_CONFIG).is_file():
        return Kind.ADAPTERS
    if Run(path).exists():
        return Kind.RUN
    if checkpoint_step(path) is not None:
        return Kind.CHECKPOINT
    if (path / MANIFEST).exists():
        with open_file(path / MANIFEST) as file:
            return Kind.CHECKPOINT if is_of_checkpoint(file.read(CHUNK_BYTES)) else Kind.TOKENS
    if (path / EXAMPLES_MANIFEST).exists():
        return Kind.EXAMPLES
    if (path / UNFINISHED).is_dir():
        return Kind.TOKENS
    if Run(path).checkpoints_folder.is_dir():
        return Kind.RUN
    return Kind.FOREIGN if (path / ".metadata").exists() else Kind.FOLDER


def is_hub_name(source: str | Path) -> bool:
    """Whether `source` must be a model on the hub: it has the form of such a name, and is not a
    local path.

    In a folder that exists, or in one of LOCAL_FOLDERS, it is a path, if a misspelt one
    (runs/quikstart), unless a revision follows.
    """
    # of an address, too
    parts = MODEL_NAME_PATTERN.fullmatch(str(source))
    path = Path(str(source))
    if parts is None or path.exists():
        return False
    return parts["revision"] is not None or not (
        path.parent.exists() or str(path.parent) in LOCAL_FOLDERS
    )


def unexpected(name: str | Path, expected: Sequence[Kind | str], hint: str = "") -> UserError:
    """The error for a name that stands for nothing that is `expected`."""
    kind = kind_of(name)
    if kind == Kind.FOREIGN:
        hint = f"{hint}; `lmforge import` makes a Hugging Face folder of it"
    *most, last = expected
    words = f"{', '.join(most)} or {last}" if most else last
    return UserError(f"{cut(str(name), MAX_LISTED)}: {kind}; give {words}{hint}")
