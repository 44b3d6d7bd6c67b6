"""The schema of a tool, which chat templates show to a model, from a Python function's type hints
and docstring.

It is that of transformers' `get_json_schema`: https://huggingface.co/docs/transformers/chat_extras.
Types that are neither JSON's nor made of these are refused, as there.
"""

import inspect
import json
import re
from collections.abc import Callable, Sequence
from enum import Enum
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from lmforge.core.errors import UserError

SCALARS = {int: "integer", float: "number", str: "string", bool: "boolean", NoneType: "null"}
CONTAINERS = {list: "array", tuple: "array", dict: "object"}

# Google's style: a summary, then "Args:", "Returns:" and "Raises:".
_SECTION = re.compile(r"^(Args|Returns|Raises):[ \t]*$", re.MULTILINE)
_CHOICES = re.compile(r"\(choices:\s*(.*?)\)\s*$", re.IGNORECASE)


def tool_schema(function: Callable[..., Any]) -> dict[str, Any]:
    """The schema of a function or method, {"type": "function", "function": {…}}.

    Raises UserError where a parameter has no type hint, one that JSON has nothing for, or no
    description in the docstring.
    """
    name = getattr(function, "__name__", type(function).__name__)
    summary, described, returns = _parse_docstring(name, inspect.getdoc(function))
    try:
        hints = get_type_hints(function)
    except Exception as problem:  # a hint in quotes is code
        raise UserError(f"tool {name}: its type hints cannot be read: {problem}") from None
    properties: dict[str, Any] = {}
    required = []
    for parameter in _parameters(function):
        where = f"tool {name}: parameter {parameter.name!r}"
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise UserError(
                f"{where}: a model cannot be told what *{parameter.name} takes; name each parameter"
            )
        if parameter.name not in hints:
            raise UserError(f"{where} has no type hint, such as {parameter.name}: str")
        schema = _type_schema(hints[parameter.name], where)
        if parameter.name not in described:
            raise UserError(
                f'{where} has no description in the docstring: write "{parameter.name}: …" under'
                " Args:"
            )
        properties[parameter.name] = _described(schema, described[parameter.name], where)
        if parameter.default is parameter.empty:
            required.append(parameter.name)
    parameters = {"type": "object", "properties": properties}
    if required:
        parameters["required"] = required
    written = {"name": name, "description": summary, "parameters": parameters}
    try:
        result = _type_schema(hints["return"], "")
        written["return"] = result | ({} if returns is None else {"description": returns})
    except (KeyError, UserError):  # a model never writes what is returned
        pass
    return {"type": "function", "function": written}


def _parameters(function: Callable[..., Any]) -> list[inspect.Parameter]:
    """The parameters that a call gives: without the receiver of a method that is not bound."""
    parameters = list(inspect.signature(function).parameters.values())
    if (
        parameters
        and parameters[0].name in ("self", "cls")
        and parameters[0].annotation is inspect.Parameter.empty
    ):
        return parameters[1:]
    return parameters


def _type_schema(hint: Any, where: str) -> dict[str, Any]:
    origin = get_origin(hint)
    arguments = get_args(hint)
    known = SCALARS | CONTAINERS
    if hint is Any:
        return {}
    if isinstance(hint, type) and hint in known:
        return {"type": known[hint]}
    if origin is Literal or (isinstance(hint, type) and issubclass(hint, Enum) and len(hint)):
        values = list(arguments) if origin is Literal else [member.value for member in hint]
        if all(type(value) in SCALARS for value in values):
            return {"type": _one_or_all([SCALARS[type(value)] for value in values]), "enum": values}
    elif origin in (Union, UnionType):
        choices = [_type_schema(each, where) for each in arguments if each is not NoneType]
        if len(choices) == 1:
            [union] = choices
        elif all(each.keys() == {"type"} and isinstance(each["type"], str) for each in choices):
            union = {"type": _one_or_all(sorted(each["type"] for each in choices))}
        else:
            union = {"anyOf": choices}
        return union | ({"nullable": True} if NoneType in arguments else {})
    elif origin is list:
        return {"type": "array", "items": _type_schema(arguments[0], where)}
    elif origin is tuple and len(arguments) > 1 and ... not in arguments:
        return {"type": "array", "prefixItems": [_type_schema(each, where) for each in arguments]}
    elif origin is dict:
        return {"type": "object", "additionalProperties": _type_schema(arguments[1], where)}
    raise UserError(
        f"{where} has a type hint that JSON has nothing for: {inspect.formatannotation(hint)}; take"
        " str, int, float, bool, Literal, or list and dict of these"
    )


def _one_or_all(types: Sequence[str]) -> str | list[str]:
    different = list(dict.fromkeys(types))
    return different[0] if len(different) == 1 else different


def _described(schema: dict[str, Any], description: str, where: str) -> dict[str, Any]:
    """A parameter's schema with its description, which may end with (choices: ["a", "b"])."""
    if choices := _CHOICES.search(description):
        try:
            values = json.loads(choices[1])
        except ValueError:
            raise UserError(f"{where}: its choices are not a list of JSON: {choices[1]}") from None
        schema = schema | {
            "enum": [each.strip() if isinstance(each, str) else each for each in values]
        }
        description = description[: choices.start()].strip()
    return schema | {"description": description}


def _parse_docstring(name: str, docstring: str | None) -> tuple[str, dict[str, str], str | None]:
    """The summary, the description of each parameter, and of what is returned, if there is one."""
    if not docstring or not docstring.strip():
        raise UserError(f"tool {name}: has no docstring, which says to the model what it does")
    summary, *rest = _SECTION.split(docstring.strip())
    sections = dict(zip(rest[::2], rest[1::2], strict=True))
    described: dict[str, str] = {}
    lines = [line for line in sections.get("Args", "").splitlines() if line.strip()]
    outer = min((len(line) - len(line.lstrip()) for line in lines), default=0)
    last = ""
    for line in lines:
        begun = re.match(r"(\w+):\s*(.*)", line[outer:])
        if begun:
            last, described[last] = begun[1], begun[2].strip()
        elif last:
            described[last] = f"{described[last]} {line.strip()}".strip()
    return (
        summary.strip(),
        described,
        sections["Returns"].strip() if "Returns" in sections else None,
    )
