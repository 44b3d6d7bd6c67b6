"""Plugins: Python files of the user's own and installed packages that register names (registry.py)
when they are imported.

A file is named by `plugins` at the top of a recipe or by --plugins; a package by an entry point of
the group `lmforge.plugins`. What a plugin registers is documented in docs/extending.md.
"""

from collections.abc import Sequence
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any

import xxhash

from lmforge.core import registry
from lmforge.core.errors import UserError
from lmforge.core.files.atomic_files import atomic_write
from lmforge.core.files.untrusted import cut, describe_os_error, expand_home, read_bounded
from lmforge.core.foreign_code import describe_exception, import_file
from lmforge.core.registry import Entry

GROUP = "lmforge.plugins"
COPIES = "plugins"  # folder of a run's directory
MAX_PLUGIN_BYTES = 2**24

# The plugins of this process: the digest of a file, or the name and version of an entry point's
# package.
_files: dict[Path, str] = {}
_packages: dict[str, str] = {}


def resolve_plugins(table: dict[str, Any], recipe: Path | None) -> None:
    """Make the paths of `plugins` in a recipe absolute: they are relative to it.

    Other values are left to validation.
    """
    given = table.get("plugins")
    if recipe is not None and isinstance(given, list) and all(isinstance(path, str) for path in given):
        table["plugins"] = [str((recipe.parent / expand_home(path)).absolute()) for path in given]


def load_plugins(paths: Sequence[str | Path]) -> None:
    """Import installed plugins, then these files, unless this process has.

    A file that has changed is imported again.

    Raises UserError, in one line, for a file that is missing, cannot be imported, or registers a
    name that is taken; it has registered nothing then.
    """
    for entry_point in entry_points(group=GROUP):
        _load_package(entry_point)
    for path in paths:
        _load_file(expand_home(path).absolute())


def _load_package(entry_point: EntryPoint) -> None:
    if entry_point.value in _packages:
        return
    package = f"{entry_point.dist.name} {entry_point.dist.version}" if entry_point.dist else "unknown"
    origin = f"plugin {entry_point.name} of {package}"
    with registry.registering(origin):
        try:
            entry_point.load()
        except (Exception, SystemExit) as error:
            raise UserError(f"{origin}: {_describe(error)}") from error
    _packages[entry_point.value] = package


def _load_file(path: Path) -> None:
    origin = f"plugin {path}"
    if not path.is_file():
        raise UserError(f"{origin}: no such file; name a Python file (installed packages are found by themselves)")
    try:
        digest = xxhash.xxh3_128_hexdigest(read_bounded(path, MAX_PLUGIN_BYTES))
    except OSError as problem:
        raise UserError(f"plugin {describe_os_error(problem, path)}") from None
    if _files.get(path) == digest:
        return
    registry.remove(origin)
    with registry.registering(origin):
        try:
            # The file's own name could be that of a library. New content becomes a new module with
            # new classes.
            import_file(path, f"lmforge_plugin_{path.stem}_{digest[:8]}", "plugin")
        except UserError as error:
            raise UserError(f"{origin}: {_describe(error.__cause__)}" if error.__cause__ else str(error)) from error
    _files[path] = digest


def _describe(error: BaseException) -> str:
    """The error of a plugin: the message of a UserError, or any other exception with its location."""
    return str(error) if isinstance(error, UserError) else f"cannot be imported: {describe_exception(error)}"


def files_of(chosen: Sequence[Entry]) -> list[str]:
    """The plugin files that have registered these entries, for another process to load."""
    origins = {entry.origin for entry in chosen}
    return [str(path) for path in _files if f"plugin {path}" in origins]


def describe_plugins(paths: Sequence[str]) -> dict[str, str]:
    """The identity of plugins, for a manifest: the digest of each file, and name and version of
    each installed package.
    """
    by_name = {Path(path).name: _files[expand_home(path).absolute()] for path in paths}
    return by_name | {f"package {package}": package.rpartition(" ")[2] for package in _packages.values()}


def describe_changes(then: dict[str, str], now: dict[str, str]) -> list[str]:
    """A description of the plugins whose code differs between a checkpoint's run and this one."""
    words = [f"{name} has changed" for name in now if name in then and then[name] != now[name]]
    words += [f"{name} is new" for name in now if name not in then]
    return words + [f"{name} is no longer used" for name in then if name not in now]


def freeze_plugins(paths: Sequence[str], folder: Path) -> None:
    """Copy the plugin files of a run into its directory, for reference; they are not loaded from
    there.
    """
    for path in map(Path, paths):
        (folder / COPIES).mkdir(exist_ok=True)
        with atomic_write(folder / COPIES / cut(path.name)) as file:
            file.write(path.read_bytes())
