"""Runs a chat template's Jinja source as transformers does, in a sandbox that bounds what it may do in all.

The result is text, with marks around the parts that the template tags as generated. `templates.py` makes tokens of it and
decides whether the template can be trained on. Each operation is charged with its cost, by `template_costs.py`, before it runs.
"""

import json
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime
from functools import partial, update_wrapper
from types import GeneratorType
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes, pass_context
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from lmforge.data.chat import template_costs as costs
from lmforge.data.chat.template_costs import BoundExceeded
from lmforge.errors import UserError

# Markers around what the template tags as generated. Texts that contain one must be escaped first.
GENERATION_START, GENERATION_END = "\U0010fff0", "\U0010fff1"

# Far above any template and conversation that a model can read.
MAX_TEMPLATE_CHARACTERS = 1 << 20
MAX_RENDERED_CHARACTERS = 1 << 26
MAX_MESSAGE_CHARACTERS = 200


class _GenerationTag(Extension):
    """`{% generation %}` surrounds what the model generates (transformers' `return_assistant_tokens_mask`)."""

    tags = {"generation"}  # noqa: RUF012  (the library's own type)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        opens, closes = (nodes.Output([nodes.TemplateData(mark)]) for mark in (GENERATION_START, GENERATION_END))
        return nodes.Scope([opens, *body, closes]).set_lineno(line)


class _BoundedNamespace(Namespace):
    """Does not format its values: nested namespaces could make a text of any length."""

    def __repr__(self) -> str:
        return "<Namespace>"


class _ChargedIterator:
    """Charges each item to a sandbox. (A class, because deep chains of generators overflow the stack when they are freed.)"""

    __slots__ = ("_charge", "_cost", "_iterator")

    def __init__(self, items: Iterable[Any], cost: int = 0, *, charge: Callable[[int], None]):
        self._iterator, self._charge, self._cost = iter(items), charge, costs.STEP + cost

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        self._charge(self._cost)
        return next(self._iterator)


class _Work(threading.local):
    """What a rendering has cost so far: conversations of several requests are rendered by one template at a time."""

    done = 0


class _BoundedSandbox(ImmutableSandboxedEnvironment):
    """A sandbox that bounds the work of a template; the library's own bounds only `range`.

    `charge` is called before every operation whose time or memory depends on its operands: operators, calls, filters, tests,
    slices, comparisons, joining of texts, each iteration of a loop and each call of a macro. The cost of nothing else depends
    on operands.
    """

    intercepted_binops = frozenset(["+", "-", "*", "/", "//", "%", "**"])

    def __init__(self) -> None:
        self.work = _Work()
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_GenerationTag, loopcontrols],
            finalize=self._charge_output,
            optimized=False,  # the optimizer takes a minute for 300 filters in a row
        )
        self.filters["tojson"] = _tojson
        self.filters = {name: self._bounded_filter(name, each) for name, each in self.filters.items()}
        tests: dict[str, Any] = self.tests
        self.tests = {name: self._bounded_test(name, each) for name, each in tests.items()}
        # For the nodes that `_parse` adds. A filter that takes the context is not evaluated when the template is compiled.
        self.filters |= {
            "_iterated": partial(_ChargedIterator, charge=self.charge),
            "_sliced": partial(self._charged, costs.shallow_size),
            "_compared": partial(self._charged, costs.deep_size),
            "_joined": lambda items: self.concat(str(self._charge_output(item)) for item in items),
            "_statements": pass_context(lambda _, count: self.charge(costs.NODE * count)),
        }
        self.globals |= {"raise_exception": _raise_exception, "namespace": _BoundedNamespace}

    def charge(self, cost: float) -> None:
        """Add to the work done. Raises BoundExceeded above the limit."""
        self.work.done += max(0, int(cost))
        if self.work.done > costs.MAX_WORK:
            place = "an operation goes" if cost > costs.MAX_WORK else "its loops ran"
            raise BoundExceeded(f"{place} beyond what a template needs: {costs.MAX_WORK:,} characters and steps")

    def concat(self, pieces: Iterable[str]) -> str:
        pieces = list(pieces)
        self.charge(sum(map(len, pieces)))
        return "".join(pieces)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        are_texts = operator == "+" and isinstance(left, str) and isinstance(right, str)  # nearly always
        self.charge(costs.STEP + (len(left) + len(right) if are_texts else costs.operator_cost(operator, left, right)))
        return self.binop_table[operator](left, right)

    def call(self, context: Any, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        owner, name = getattr(function, "__self__", None), getattr(function, "__name__", "")
        if isinstance(owner, str):
            args = (owner, *map(_listed, args))
            self._charge_call(name, costs.METHOD_COSTS, costs.deep_size, args, kwargs)
            args = args[1:]
        else:
            # Methods of lists: these compare all items with their argument, and others copy the list.
            self.charge(costs.CALL + (costs.deep_size if name in ("count", "index") else costs.shallow_size)(owner))
            # A macro is often given all messages, for each of them.
            measure = costs.shallow_size if isinstance(function, Macro) else costs.deep_size
            self._charge_call(name, costs.FUNCTION_COSTS, measure, args, kwargs)
        return super().call(context, function, *args, **kwargs)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        if isinstance(obj, str | int | float):
            return isinstance(obj, str) and attr in costs.STRING_METHODS
        # The functions of a class change what they are given; the mapping of a view is a container of unknown size.
        if isinstance(obj, (type, *costs.VIEWS)):
            return False
        return super().is_safe_attribute(obj, attr, value)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        function = super().wrap_str_format(value)
        if function is None:
            return None
        text, is_map = value.__self__, value.__name__ == "format_map"

        def bounded(*args: Any, **kwargs: Any) -> str:
            self.charge(costs.STEP + costs.str_format_cost(text, *args, **({} if is_map else kwargs)))
            return function(*args, **kwargs)

        return bounded

    def _charge_output(self, value: Any) -> Any:
        # What a container holds is escaped.
        self.charge(len(value) if isinstance(value, str) else 4 * costs.deep_size(value))
        return value

    def _charged(self, measure: Callable[[Any], int], value: Any) -> Any:
        value = _listed(value)
        self.charge(measure(value))
        return value

    def _charge_call(
        self,
        name: str,
        own_costs: costs.Costs,
        measure: Callable[[Any], int],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        measure_first: Callable[[Any], int] | None = None,
    ) -> None:
        named = {key: value for key, value in kwargs.items() if not key.startswith("_")}  # the library adds its own
        sizes = [*map(measure_first or measure, args[:1]), *map(measure, (*args[1:], *named.values()))]
        self.charge(costs.STEP + 4 * sum(sizes))
        if name in own_costs:
            self.charge(own_costs[name](*args, **named))

    def _bounded_filter(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        first = int(hasattr(function, "jinja_pass_arg"))  # the environment or context comes before the arguments
        deep = name not in costs.SHALLOW_FILTERS
        measure_value = costs.deep_size if deep else costs.shallow_size
        measure = costs.shallow_size if name in ("d", "default") else costs.deep_size

        def bounded(*args: Any, **kwargs: Any) -> Any:
            given = tuple(map(_listed, args[first:])) if deep else args[first:]
            self._charge_call(name, costs.FILTER_COSTS, measure, given, kwargs, measure_value)
            result = function(*args[:first], *given, **kwargs)
            return _ChargedIterator(result, charge=self.charge) if isinstance(result, GeneratorType) else result

        return update_wrapper(bounded, function)

    def _bounded_test(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        measure = costs.deep_size if name in costs.DEEP_TESTS else costs.shallow_size

        def bounded(*args: Any, **kwargs: Any) -> Any:
            self._charge_call(name, costs.TEST_COSTS, measure, args, kwargs)
            return function(*args, **kwargs)

        return update_wrapper(bounded, function)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        self.has_generation_tags = any(GENERATION_START in data.data for data in tree.find_all(nodes.TemplateData))
        changes: list[Callable[[], None]] = []  # made after the search
        for block in tree.find_all((nodes.For, nodes.Macro, nodes.CallBlock, nodes.Block)):
            changes.append(partial(self._charge_body, block, sum(1 for _ in block.find_all(nodes.Node))))
        for operation in tree.find_all((nodes.Compare, nodes.Concat, nodes.Getitem, nodes.Pair)):
            changes.append(partial(self._charge_operands, operation))
        for change in changes:
            change()
        tree.set_environment(self)
        return tree

    def _charge_body(self, node: Any, size: int) -> None:
        """Charge for the statements of a loop or macro each time they are executed, and for each item of a loop."""
        if isinstance(node, nodes.For):
            tested = sum(1 for _ in node.test.find_all(nodes.Node)) if node.test else 0
            node.iter = _filtered(node.iter, "_iterated", nodes.Const(costs.NODE * tested, lineno=node.lineno))
        charge = _filtered(nodes.Const(size, lineno=node.lineno), "_statements")
        node.body.insert(0, nodes.ExprStmt(charge, lineno=node.lineno))

    def _charge_operands(self, node: Any) -> None:
        if isinstance(node, nodes.Concat):
            node.nodes = [_filtered(nodes.List(node.nodes, lineno=node.lineno), "_joined")]
        elif isinstance(node, nodes.Compare):
            operands: list[Any] = [node, *node.ops]  # each has its `expr`
            values = [each for each in operands if not isinstance(each.expr, nodes.Const)]
            # A constant is compared with a list or object, or with its items, but not with what these hold.
            measure = "_sliced" if len(operands) == 2 and len(values) < 2 else "_compared"
            for each in values:
                each.expr = _filtered(each.expr, measure)
        elif isinstance(node, nodes.Pair):
            node.key = _filtered(node.key, "_compared")  # it is hashed
        elif isinstance(node.arg, nodes.Slice):
            node.node = _filtered(node.node, "_sliced")
        elif not isinstance(node.arg, nodes.Const):
            node.arg = _filtered(node.arg, "_compared")


class JinjaTemplate:
    """A compiled chat template. `has_generation_tags`: it marks by `{% generation %}` what the model generates."""

    def __init__(self, source: str, variables: Mapping[str, str], location: str):
        """The template sees `variables`, such as bos_token; messages name its `location`. Raises UserError if not Jinja."""
        if len(source) > MAX_TEMPLATE_CHARACTERS:
            raise UserError(f"{location}: {len(source):,} characters of chat template: more than {MAX_TEMPLATE_CHARACTERS:,}")
        self._location = location
        self._sandbox = _BoundedSandbox()
        # The same function for all calls: a conversation and its beginning are rendered alike.
        self._sandbox.globals |= {**variables, "strftime_now": datetime.now().strftime}
        try:
            self._template = self._sandbox.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            reason = f"line {error.lineno}: {one_line(error.message or '')}"
            raise UserError(f"{location}: the chat template is not Jinja: {reason}") from None
        except RecursionError:
            raise UserError(f"{location}: the chat template is nested too deeply") from None
        except Exception as error:  # Python's compiler has its own limits
            raise UserError(f"{location}: the chat template cannot be compiled: {one_line(error)}") from None
        self.has_generation_tags = self._sandbox.has_generation_tags

    def render(self, messages: list[Any], tools: list[Any] | None, add_generation_prompt: bool) -> str:
        """The text of a conversation, with GENERATION_START and GENERATION_END around what is tagged.

        Raises UserError with the message of whatever the template raises.
        """
        self._sandbox.work.done = 0
        pieces: list[str] = []
        size = 0
        try:
            for piece in self._template.generate(
                messages=messages, tools=tools, documents=None, add_generation_prompt=add_generation_prompt
            ):
                pieces.append(piece)
                size += len(piece)
                if size > MAX_RENDERED_CHARACTERS:
                    raise BoundExceeded(f"wrote more than {MAX_RENDERED_CHARACTERS:,} characters")
        except Exception as error:  # a template is a program that can raise anything
            raise UserError(f"{self._location}: refuses the conversation: {one_line(error)}") from None
        return "".join(pieces)


def one_line(error: object) -> str:
    """The text of an error on one line, cut where it is long: a template can raise any text."""
    text = " ".join(str(error).split()) or repr(error)
    return text if len(text) <= MAX_MESSAGE_CHARACTERS else f"{text[:MAX_MESSAGE_CHARACTERS]}… ({len(text):,} characters)"


def _listed(value: Any) -> Any:
    """A list of what an iterator gives, whose size can be known."""
    return list(value) if isinstance(value, _ChargedIterator) else value


def _filtered(node: Any, name: str, *values: nodes.Expr) -> nodes.Filter:
    return nodes.Filter(node, name, list(values), [], None, None, lineno=node.lineno)


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    # Jinja's own filter escapes HTML.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
