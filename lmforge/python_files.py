"""Python files of the user, such as hooks and reward functions: imported by path, with their errors described. Also how modules
of lmforge are started in a process of their own."""

import importlib.util
import sys
import traceback
from pathlib import Path
from types import ModuleType

from lmforge.errors import UserError

PACKAGE_PARENT = str(Path(__file__).resolve().parents[1])


def import_file(path: Path, module_name: str, what: str) -> ModuleType:
    """Import a file, which may import its neighbours as a script can.

    `module_name` is not the file's own, which may be that of a library. Raises UserError, which begins with `what` and the
    path, where there is no such file or it cannot be imported.
    """
    if not path.is_file():
        raise UserError(f"{what} {path}: no such file")
    if path.suffix != ".py":
        raise UserError(f"{what} {path}: not a Python file, whose name ends in .py")
    sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location(module_name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise UserError(f"{what} {path}: cannot be imported: {describe_exception(error)}") from error
    return module


def describe_exception(error: BaseException) -> str:
    """The traceback's last line, and where it was raised."""
    line = " ".join(traceback.format_exception_only(error)[-1].split())
    if isinstance(error, SyntaxError):  # it was raised by Python, not by a line of the file
        return f"{line} ({error.filename}:{error.lineno})"
    return line + error_location(error)


def error_location(error: BaseException) -> str:
    """File and line at which it was raised, in brackets after a blank; empty where that is not known."""
    frames = traceback.extract_tb(error.__traceback__)
    return f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""


def python_command(module: str, argument: str, *flags: str) -> list[str]:
    """The command that runs `main()` of one of our modules, whatever the working directory and sys.path."""
    code = f"import sys; sys.path.insert(0, {PACKAGE_PARENT!r}); from {module} import main; main()"
    # -P: do not import a file in the working directory that has the name of a module.
    return [sys.executable, "-P", *flags, "-c", code, argument]
