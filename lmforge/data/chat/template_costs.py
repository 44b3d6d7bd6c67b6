"""What each operation of a chat template costs, estimated before it runs: nothing can stop a single call of C code.

A cost counts characters, items of lists (ITEM each), steps (STEP each), calls (CALL each) and nodes of syntax (NODE each).
`jinja_sandbox.py` adds costs up and refuses the operation that would exceed MAX_WORK. Only jinja2 and the standard library are
imported, because template_trial.py does so in a bare interpreter.
"""

import re
from collections.abc import Callable, Mapping
from itertools import chain
from string import Formatter
from typing import Any

import jinja2

# Far above any template and conversation that a model can read: some seconds, and less than 1 GiB.
MAX_WORK = 1 << 28
STEP, CALL, ITEM, NODE = 64, 512, 8, 32
# Cost of each item that `deep_size` itself visits, which takes longer than most of what is done with it.
VISIT = 512
MAX_DEPTH = 100
# Number of names in an attribute such as "function.name", each of which is looked up in every item.
MAX_ATTRIBUTE_PARTS = 8
# Cost for each character of filters that are written in Python.
SLOW = 64
VIEWS: Any = (type({}.keys()), type({}.values()), type({}.items()))
CONTAINERS: Any = (list, tuple, dict, set, *VIEWS)
SIZED: Any = (*CONTAINERS, range)
# A width or a precision of a % format. Names in parentheses can hold anything.
PERCENT_NUMBERS = re.compile(r"%[-#0 +]*(\d*)(?:\.(\d*))?")


class BoundExceeded(jinja2.TemplateError):
    """A template exceeds one of the bounds here."""


def shallow_size(value: Any) -> int:
    """The characters of a string, ITEM for each item of a container, the bytes of a number."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, int):
        return value.bit_length() // 8 + 1
    return ITEM * len(value) if isinstance(value, SIZED) else 1


def deep_size(value: Any) -> int:
    """`shallow_size` of a value and of everything in it. Raises BoundExceeded above MAX_WORK, and beyond MAX_DEPTH levels. One
    list may be in another many times, so a few assignments can build a value that would take years to compare or to format.
    """
    size, level = shallow_size(value), [value] if isinstance(value, CONTAINERS) else []
    for _ in range(MAX_DEPTH):
        inner: list[Any] = []
        for container in level:
            for item in chain(container, container.values() if isinstance(container, dict) else ()):
                size += VISIT + shallow_size(item)
                if isinstance(item, CONTAINERS):
                    inner.append(item)
                if size > MAX_WORK:
                    raise BoundExceeded(f"has a value of more than {MAX_WORK:,} characters")
        if not inner:
            return size
        level = inner
    raise BoundExceeded(f"nests lists or objects more than {MAX_DEPTH} deep")


def operator_cost(operator: str, left: Any, right: Any) -> int:
    """The cost of `left operator right`."""
    if operator == "%" and isinstance(left, str):
        return percent_format_cost(left, right)
    if operator == "*":
        for times, repeated in ((left, right), (right, left)):
            if isinstance(times, int) and isinstance(repeated, str | list | tuple):
                return max(0, times) * shallow_size(repeated)
    if isinstance(left, int) and isinstance(right, int):
        if operator == "**":  # the size of the result, squared
            return (shallow_size(left) * abs(right)) ** 2
        return shallow_size(left) * shallow_size(right)
    measure = deep_size if operator == "-" else shallow_size  # of sets, whose items are hashed
    return measure(left) + measure(right)


def percent_format_cost(text: str, *values: Any, **named: Any) -> int:
    """The cost of `text % values`: every field may be as wide as the widest, and as all values."""
    text = str(text)
    pattern = r"\d+" if "(" in text else PERCENT_NUMBERS
    numbers = [number for match in re.finditer(pattern, text) for number in (match.groups() or (match.group(),))]
    widths = [_width(number) for number in numbers if number]
    if "*" in text:  # a width that is one of the values
        widths += [abs(value) for value in chain.from_iterable(_items(value) for value in values) if isinstance(value, int)]
    return len(text) + text.count("%") * (max(widths, default=0) + deep_size(values) + deep_size(named))


def str_format_cost(text: str, *values: Any, **named: Any) -> int:
    """The cost of `text.format(values)`. Raises BoundExceeded where a width is one of the values."""
    fields = [(spec or "") for _, field, spec, _ in Formatter().parse(text) if field is not None]
    if any("{" in spec for spec in fields):
        raise BoundExceeded("formats with a width that it computes")
    width = max((_width(number) for spec in fields for number in re.findall(r"\d+", spec)), default=0)
    return len(text) + len(fields) * (width + deep_size(values) + deep_size(named))


def _width(digits: str) -> int:
    return int(digits) if len(digits) < 1000 else MAX_WORK


def _items(value: Any) -> Any:
    return value if isinstance(value, tuple) else (value,)


def _number(value: Any) -> int:
    """The size of a number; 0 for anything else, for which the call itself raises: a list times a number is a longer list."""
    return int(abs(value)) if isinstance(value, int | float) else 0


# --- filters, methods of strings, functions: called with the arguments that these are given ---------------------------------


def _padding(text: Any, width: int = 80, *_: Any, **__: Any) -> int:
    return _number(width)


def _strip(text: Any, characters: Any = None) -> int:
    return deep_size(text) * len(characters or "")  # each is compared with each


def _search_backwards(text: str, part: str | None = None, *_: Any) -> int:
    return len(text) * len(part or "")  # in 3.11 and later only the search from the beginning is linear


def _replace(text: Any, old: Any, new: Any, count: Any = None) -> int:
    return str(text).count(str(old)) * len(str(new))


def _join_filter(items: Any, separator: Any = "", attribute: Any = None) -> int:
    return len(items) * len(str(separator)) + _attribute(items, attribute)


def _attribute(items: Any, *values: Any, **named: Any) -> int:
    for value in (*values, *named.values()):
        if isinstance(value, str) and value.count(".") + value.count(",") >= MAX_ATTRIBUTE_PARTS:
            raise BoundExceeded(f"names an attribute of more than {MAX_ATTRIBUTE_PARTS} parts")
    return 0


def _map(items: Any, *_: Any, attribute: Any = None, **__: Any) -> int:
    return _attribute(items, attribute)


def _indent(text: Any, width: int | str = 4, *_: Any, **__: Any) -> int:
    return (len(text) + 1) * (len(width) if isinstance(width, str) else _number(width))


def _batch(items: Any, linecount: int, fill_with: Any = None) -> int:
    return 0 if fill_with is None else ITEM * _number(linecount)


def _slice(items: Any, slices: int, fill_with: Any = None) -> int:
    return STEP * _number(slices)


def _round(number: Any, precision: int = 0, method: str = "common") -> int:
    return _number(precision) * (_number(precision) + shallow_size(number))


def _sum(items: Any, attribute: Any = None, start: Any = 0) -> int:
    _attribute(items, attribute)
    return 0 if isinstance(start, int | float) else len(items) * deep_size(items)  # adding up lists copies them each time


def _list(items: Any) -> int:
    return SLOW * len(items) if isinstance(items, str) else 0


def _slow(text: Any, *values: Any, **named: Any) -> int:
    return deep_size(text) * (SLOW + deep_size(values) + deep_size(named))


def _quadratic(text: Any, *values: Any, **named: Any) -> int:
    return deep_size(text) * (deep_size(text) + deep_size(values) + deep_size(named))


def _tojson(value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False) -> int:
    items = deep_size(value) // VISIT + 1
    width = 0 if indent is None else SLOW + MAX_DEPTH * (len(indent) if isinstance(indent, str) else _number(indent))
    return items * (width + deep_size(separators))


def _lipsum(n: int = 5, html: bool = True, min: int = 20, max: int = 100) -> int:
    return CALL * _number(n) * (_number(max) + 1)


def _split(text: str, sep: str | None = None, *_: Any, **__: Any) -> int:
    return SLOW * (len(text) if sep is None else text.count(sep) + 1)


def _split_backwards(text: str, sep: str | None = None, *_: Any, **__: Any) -> int:
    return _split(text, sep) + _search_backwards(text, sep)


def _split_lines(text: str, *_: Any, **__: Any) -> int:
    return SLOW * len(text)


def _strftime(text: str) -> int:
    return 4 * 256 * len(text)  # the most that Python reserves for the result


Costs = Mapping[str, Callable[..., int]]
FILTER_COSTS: Costs = {
    "batch": _batch,
    "center": _padding,
    "format": percent_format_cost,
    "groupby": _attribute,
    "indent": _indent,
    "join": _join_filter,
    "list": _list,
    "map": _map,
    "max": _attribute,
    "min": _attribute,
    "pprint": _slow,
    "rejectattr": _attribute,
    "replace": _replace,
    "round": _round,
    "selectattr": _attribute,
    "slice": _slice,
    "sort": _attribute,
    "striptags": _slow,
    "sum": _sum,
    "title": _slow,
    "tojson": _tojson,
    "trim": _strip,
    "unique": _attribute,
    "urlize": _quadratic,
    "wordwrap": _quadratic,
    "xmlattr": _slow,
}
METHOD_COSTS: Costs = {
    "center": _padding,
    "join": lambda separator, items: len(items) * len(separator),
    "ljust": _padding,
    "lstrip": _strip,
    "replace": _replace,
    "rfind": _search_backwards,
    "rindex": _search_backwards,
    "rjust": _padding,
    "rpartition": _search_backwards,
    "rsplit": _split_backwards,
    "rstrip": _strip,
    "split": _split,
    "splitlines": _split_lines,
    "strip": _strip,
    "zfill": _padding,
}
TEST_COSTS: Costs = {"divisibleby": lambda value, number: shallow_size(value) * shallow_size(number)}
FUNCTION_COSTS: Costs = {"generate_lorem_ipsum": _lipsum, "strftime": _strftime}
# Filters that do not read the items of their first argument, which is often all messages, for each message; for `default` also
# the second.
_SHALLOW = """
attr batch count d default first items last length list map random reject rejectattr reverse select selectattr slice
"""
SHALLOW_FILTERS = frozenset(_SHALLOW.split())
# Tests that compare, or write out, their arguments.
_DEEP = "in == eq equalto != ne > gt greaterthan >= ge < lt lessthan <= le lower upper"
DEEP_TESTS = frozenset(_DEEP.split())
# Methods of strings that a template may call, whose cost is known. The others return bytes, or texts of any length.
_METHODS = """
capitalize casefold center count endswith find format format_map index isalnum isalpha isascii isdecimal isdigit isidentifier
islower isnumeric isprintable isspace istitle isupper join ljust lower lstrip partition removeprefix removesuffix replace rfind
rindex rjust rpartition rsplit rstrip split splitlines startswith strip swapcase title upper zfill
"""
STRING_METHODS = frozenset(_METHODS.split())
