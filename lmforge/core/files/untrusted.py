"""The one reader of content from outside: JSON and TOML from a user, a disk or the network.

`read_json`, `parse_json`, `read_toml` and `parse_toml` bound the size of the content; pydantic
parses JSON, bounds its nesting, and checks it against a declared schema. They fail in one line that
names the file and the field. A schema is anything that pydantic can check: a model, a dataclass, a
TypedDict, or a type such as `dict[str, str]`. Binary headers are bounded by their readers and
parsed here. Messages between our own processes are parsed where they arrive. No torch here.
"""

import errno
import json
import math
import os
import re
import shlex
import sys
import tomllib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any, BinaryIO, TypeVar, cast

from pydantic import TypeAdapter, ValidationError
from pydantic_core import from_json

from lmforge.core.errors import UserError

MAX_BYTES = 16 * 2**20  # recipes, configs, indexes
MAX_MANIFEST_BYTES = 2**28  # manifests that list every file or shard: checksums of some 40 TB
MAX_RECORDS_BYTES = 2**29  # a million records of a run
CHUNK_BYTES = 2**20
MAX_INT_BITS = 1024  # of a whole number, which JSON does not bound: no float is larger
# characters in a message: of a value, and of the names of fields
MAX_QUOTED = 80
MAX_LISTED = 400
# Of a run; a file system takes 255 bytes, and other files are called after it.
MAX_NAME = 100
MAX_NAME_BYTES = 200
BYTE_ORDER_MARK = b"\xef\xbb\xbf"  # Windows programs put it before UTF-8
# What a number that no float holds has: an exponent of three digits or more, or many digits.
EXPONENTS = [re.compile(rb"%b\+?+\d{3,}+(?=[\s,\]}]|\Z)" % letter) for letter in (b"e", b"E")]
ZEROS = bytes.maketrans(b"123456789", b"0" * 9)
MANY_ZEROS = b"0" * 200
# What pydantic found wrong → what was expected; filled in with the bounds of the field.
EXPECTED = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "int_parsing": "a whole number",
    "float_parsing": "a number",
    "bool_parsing": "true or false",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "text",
    "tuple_type": "a list",
    "list_type": "a list",
    "dict_type": "an object",
    "model_type": "a section",
    "dataclass_type": "an object",
    "greater_than": "a number above {gt}",
    "greater_than_equal": "a number of at least {ge}",
    "less_than": "a number below {lt}",
    "less_than_equal": "a number of at most {le}",
    "finite_number": "a finite number",
    "literal_error": "{expected}",
}

UNION_TYPE = re.compile(r"\.((constrained-)?(int|float|str)|(list|tuple|dict)\[.*\]|bool)")

T = TypeVar("T")


def read_json(
    path: Path,
    schema: type[T],
    *,
    max_bytes: int = MAX_BYTES,
    hint: str = "",
    allow_nan: bool = False,
) -> T:
    """The content of a JSON file as a `schema`.

    Raises UserError with one line, `PATH: FIELD: expected …, got …; HINT`, where the file is too
    large, nested too deeply, not JSON or not of the schema. OSError passes: only the caller knows
    what a missing file means.
    """
    content = read_bounded(path, max_bytes)
    return parse_json(
        content, schema, str(path), max_bytes=max_bytes, hint=hint, allow_nan=allow_nan
    )


def parse_json(
    content: bytes,
    schema: type[T],
    source: str,
    *,
    max_bytes: int = MAX_BYTES,
    error: Callable[[str], Exception] = UserError,
    hint: str = "",
    allow_nan: bool = False,
) -> T:
    """JSON `content` as a `schema`; `source` names it in messages.

    Raises `error` as `read_json` does.

    `allow_nan`: NaN and Infinity, which JSON lacks and some programs write, are taken as numbers.
    """
    content = content.removeprefix(BYTE_ORDER_MARK)
    if len(content) > max_bytes:
        raise error(f"{source}: {len(content):,} bytes, more than the {max_bytes:,} allowed")
    hint = f"; {hint}" if hint else ""
    try:
        # Perhaps in a text; as numbers pydantic takes them.
        if not allow_nan and (b"NaN" in content or b"Infinity" in content):
            from_json(content, allow_inf_nan=False)
        if MANY_ZEROS in content.translate(ZEROS) or any(
            pattern.search(content) for pattern in EXPONENTS
        ):
            _check_numbers(from_json(content), allow_nan)
        return cast(T, _adapter(cast(Any, schema)).validate_json(content, strict=True))
    except ValidationError as problem:
        raise error(f"{source}: {describe(problem)}{hint}") from None
    except _TooLarge as problem:
        raise error(f"{source}: {problem}{hint}") from None
    except ValueError as problem:
        raise error(f"{source}: not valid JSON: {problem}{hint}") from None


def check_content(
    value: Any, schema: type[T], source: str, error: Callable[[str], Exception] = UserError
) -> T:
    """What `parse_json` has parsed as a narrower `schema`.

    Raises `error` as that does; lenient: "1" is taken as a number.
    """
    try:
        return cast(T, _adapter(cast(Any, schema)).validate_python(value))
    except ValidationError as problem:
        raise error(f"{source}: {describe(problem)}") from None


def read_toml(path: Path) -> dict[str, Any]:
    """The nested table of a TOML file.

    Raises UserError in one line where it is too large, not UTF-8 or not TOML, or an empty pipe;
    OSError passes.
    """
    content = read_bounded(path)
    if not content and path.is_fifo():
        raise UserError(
            f"{path}: nothing came through this pipe; write to it before it is read, or name a file"
        )
    return parse_toml(content, str(path))


def parse_toml(content: bytes, source: str) -> dict[str, Any]:
    """TOML `content` as a nested table. Raises UserError as `read_toml` does."""
    try:
        return tomllib.loads(content.removeprefix(BYTE_ORDER_MARK).decode())
    except UnicodeDecodeError as problem:
        raise UserError(f"{source}: not UTF-8 text (byte {problem.start})") from None
    except RecursionError:
        raise UserError(f"{source}: nested too deeply") from None
    except ValueError as problem:
        # Of tomllib, and Python's own where a number has thousands of digits.
        raise UserError(f"{source}: not valid TOML: {problem}") from None


def describe(problem: ValidationError) -> str:
    """The first thing that pydantic found wrong, as `FIELD: expected …, got …`."""
    error = first_error(problem)
    if error["type"] == "json_invalid":
        return f"not valid JSON: {error['ctx']['error']}"
    field = _field_name(error["loc"])
    return f"{field}: {expectation(error)}" if field else expectation(error)


def _field_name(parts: Iterable[int | str]) -> str:
    """Keys and places in lists, from the outside, as `key[0].key`, without the types of a union,
    which pydantic puts there.
    """
    first, *rest = [
        f"[{part}]" if isinstance(part, int) else f".{cut(part)}" for part in parts
    ] or [""]
    return "".join(
        [first, *(part for part in rest if not UNION_TYPE.fullmatch(part))]
    ).removeprefix(".")


def first_error(problem: ValidationError) -> dict[str, Any]:
    """The error to report.

    If a required key is misspelt, the unknown key is reported rather than the missing one.
    """
    return dict(min(problem.errors(), key=lambda error: error["type"] == "missing"))


def expectation(error: dict[str, Any]) -> str:
    """One of pydantic's errors as `expected …, got …`."""
    kind = error["type"]
    context = error.get("ctx", {})
    if kind == "missing":
        return "missing"
    if kind == "extra_forbidden":
        return "not a known field"
    if kind == "value_error":
        return str(context["error"])
    if kind == "registered":  # options.py has said everything
        return str(error["msg"])
    expected = EXPECTED.get(kind)
    if kind == "model_type" and (not error["loc"] or isinstance(error["loc"][-1], int)):
        # An item of a list of tables, or the content itself.
        expected = "a table" if error["loc"] else "an object"
    reason = error["msg"] if expected is None else f"expected {expected.format(**context)}"
    return f"{reason}, got {quoted(error['input'])}"


def quoted(value: Any) -> str:
    """`value` as JSON, cut where it is long."""
    try:
        return cut(json.dumps(value, default=str, ensure_ascii=False))
    except (ValueError, RecursionError):
        # A number of thousands of digits, or what is nested as deeply.
        return f"a value of type {type(value).__name__} that is too large to print"


def cut(text: str, limit: int = MAX_QUOTED) -> str:
    """`text` with what exceeds `limit` characters left out: for values that came from outside, in
    messages.
    """
    return text if len(text) <= limit else f"{text[:limit]}… ({len(text):,} characters)"


def list_names(names: Iterable[str]) -> str:
    """The names in order, or `none`; cut where they are many or long."""
    return cut(", ".join(sorted(names)) or "none", MAX_LISTED)


def name_problem(name: str) -> str | None:
    """Why a run, whose directory has its name, cannot have this name; None if it can."""
    fits = len(name) <= MAX_NAME and len(name.encode(errors="surrogatepass")) <= MAX_NAME_BYTES
    if fits and re.fullmatch(r"\w[^/\\\x00-\x1f\x7f\ud800-\udfff]*", name):
        return None
    rule = f"at most {MAX_NAME} characters, without slashes, that begins with a letter or a digit"
    return f"expected a name of {rule}, got {quoted(name)}"


def compile_pattern(pattern: Any, field: str) -> re.Pattern[str]:
    """A regular expression from outside; `field` names it in messages.

    Raises UserError where it is none, or is too large.
    """
    if not isinstance(pattern, str):
        raise UserError(f"{field}: not a regular expression: {quoted(pattern)}")
    try:
        return re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as problem:
        raise UserError(f"{field}: not a regular expression: {cut(pattern)} ({problem})") from None


def expand_home(path: str | Path) -> Path:
    """A user's path with its ~ or ~NAME expanded. Raises UserError where there is no such home."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        home = str(path).split("/", 1)[0]
        raise UserError(
            f"{cut(str(path))}: the home directory {cut(home)} is not known; write the path in full"
        ) from None


def describe_os_error(problem: OSError, path: str | Path) -> str:
    """`PATH: REASON` of the file that the problem names, else of `path`; cut where it is too long
    for one.
    """
    name = str(problem.filename or path)
    return (
        f"{quoted(name) if problem.errno == errno.ENAMETOOLONG else name}:"
        f" {problem.strerror or problem}"
    )


def read_bounded(
    path: Path, max_bytes: int = MAX_BYTES, error: Callable[[str], Exception] = UserError
) -> bytes:
    """The bytes of a file. Raises `error` where there are more than `max_bytes`; OSError passes."""
    with open_file(path) as file:
        return read_stream(file, str(path), max_bytes, error)


@contextmanager
def open_file(path: Path) -> Iterator[BinaryIO]:
    """A file to be read. The error of a read names it, too.

    A named pipe that nobody writes to counts as empty, where `open` would wait forever for a
    writer. Devices can be endless or make a reader wait, so only /dev/null is read.
    """
    try:
        if path.is_char_device() and str(path) != os.devnull:
            raise OSError(errno.ENODEV, "expected a file, got a device", str(path))
        pipe = os.open(path, os.O_RDONLY | os.O_NONBLOCK) if path.is_fifo() else None
        if pipe is not None:
            os.set_blocking(pipe, True)
        with path.open("rb") if pipe is None else os.fdopen(pipe, "rb") as file:
            yield cast(BinaryIO, file)
    except OSError as problem:
        problem.filename = problem.filename or str(path)
        raise


def read_stream(
    file: BinaryIO, source: str, max_bytes: int, error: Callable[[str], Exception] = UserError
) -> bytes:
    """The rest of an open file. Raises `error` where there are more than `max_bytes`."""
    # Not in one read of `max_bytes`, for which a buffer of that size would be allocated.
    content = bytearray()
    for chunk in iter(partial(file.read, CHUNK_BYTES), b""):
        content += chunk
        if len(content) > max_bytes:
            raise error(
                f"{source}: larger than {max_bytes:,} bytes, the most that such a file may have"
            )
    return bytes(content)


class _TooLarge(ValueError):
    """A number of JSON content that no float holds."""


def _check_numbers(content: Any, allow_infinity: bool) -> None:
    """Refuse numbers beyond those of floats: 1e999, which is parsed as infinity, and whole numbers
    of hundreds of digits.
    """
    for path, value in _iter_values(content):
        is_infinite = isinstance(value, float) and math.isinf(value) and not allow_infinity
        if is_infinite or (isinstance(value, int) and value.bit_length() > MAX_INT_BITS):
            place = f"{_field_name(path)}: " if path else ""
            raise _TooLarge(
                f"{place}expected a finite number, got one beyond ±{sys.float_info.max:.2g}"
            )


def _iter_values(content: Any) -> Iterator[tuple[tuple[int | str, ...], Any]]:
    """Each value in content that was parsed, with its keys and places in lists from the outside;
    without recursion.
    """
    values: list[tuple[tuple[int | str, ...], Any]] = [((), content)]
    while values:
        path, value = values.pop()
        yield path, value
        if isinstance(value, dict | list):
            items: Iterable[tuple[int | str, Any]] = (
                value.items() if isinstance(value, dict) else enumerate(value)
            )
            values += [((*path, name), each) for name, each in items]


@cache
def _adapter(schema: Any) -> TypeAdapter[Any]:
    return TypeAdapter(schema)


def read_lines(file: BinaryIO, longest: int) -> Iterator[bytes]:
    """The lines of a file that a run appends records to, in pieces of at most `longest` bytes,
    MAX_RECORDS_BYTES in all.

    Where a disk was damaged, the file may be a hole of any size.
    """
    left = MAX_RECORDS_BYTES
    while left > 0 and (line := file.readline(longest)):
        left -= len(line)
        if b"\0" not in line:  # of a hole; JSON has none
            yield line


def words_problem(text: str) -> str | None:
    """Why `text` is not one or more words of a shell; None if it is."""
    try:
        words = [] if "\0" in text else shlex.split(text)
    except ValueError:  # a quotation without end
        words = []
    return (
        None
        if words and words[0]
        else f"expected words of a shell, with quotes in pairs, got {quoted(text)}"
    )


def check_text(arguments: Sequence[str]) -> None:
    """Refuse words of a command line that cannot be written into a file or a message, as names of
    files may be.
    """
    for word in arguments:
        try:
            word.encode()
        except UnicodeEncodeError:
            raise UserError(f"{cut(word)!r}: not UTF-8 text") from None
