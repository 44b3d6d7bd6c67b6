"""The cost of a hostile chat template is known before it runs, and ordinary templates work as in transformers."""

import itertools
import json
import random
import subprocess
import sys
import threading
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jinja2
import pytest
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from lmforge.data.chat import template_trial
from lmforge.data.chat.jinja_sandbox import JinjaTemplate
from lmforge.data.chat.template_trial import try_template
from lmforge.data.chat.templates import ChatTemplate
from lmforge.data.tokenizer import train_tokenizer
from lmforge.errors import UserError
from tests.conftest import Refusal
from tests.seeds import fresh_random

SHORT = [{"role": "user", "content": "Well?"}, {"role": "assistant", "content": "Yes."}]
LONG = SHORT * 3
DOUBLING = "{% set ns = namespace(a=@, b=@) %}{% for i in range(99) %}{% set ns.a = # %}{% endfor %}"
LISTS = DOUBLING.replace("@", "[1]").replace("#", "[ns.a, ns.a]")
TWINS = LISTS.replace("{% endfor %}", "{% set ns.b = [ns.b, ns.b] %}{% endfor %}")
TUPLES = DOUBLING.replace("@", "(1,)").replace("#", "(ns.a, ns.a)")
CHAIN = TUPLES.replace("(ns.a, ns.a)", "(ns.a,)").replace("99", "9999")
LARGE = "{% set s = 'ab' * 9999999 %}{% set t = 'ab' * 9999999 %}{% for i in range(99999) %}{{ # }}{% endfor %}"
CALLS = "{% macro f(n) %}{{ f(n - 1) ~ f(n - 1) if n }}{% endmacro %}"

# Each would take all memory or years; none is begun.
EXPRESSIONS = r"""
"%0999999999d" % 3 ;; "%*d" % (999999999, 3) ;; "%.999999999f"|format(3) ;; "%-9999999999s" % "" ;; "%s%s" % ("a" * 99999999, 1)
"%(a)999999999s" % {"a": 1} ;; "%((a)b)999999999d" % {"(a)b": 1} ;; ("%s" * 999999) % ((1,) * 999999)
"{:999999999}".format(1) ;; "{:٩٩٩٩٩٩٩٩٩}".format(1) ;; "{:{}}".format(1, 999999999) ;; "{a:999999999}".format_map({"a": 1})
"{!r:>999999999}".format(1) ;; lipsum(n=99999) ;; lipsum(5, true, 99999999, 100000000) ;; range(10)|slice(999999999)
range(10)|slice(999999999)|list ;; range(10)|batch(999999999, 0)|list ;; "x"|center(10**9) ;; "x"|center(1000000000)
"x".center(1000000000) ;; "x".zfill(1000000000) ;; "x".rjust(2**40) ;; "a\nb"|indent(999999999) ;; "a\nb"|indent("x" * 99999999)
[1]|tojson(indent=999999999) ;; [1, 2]|tojson(separators=("x" * 99999999, ":")) ;; "x" * 9999 * 9999 * 9999
[1] * 9999 * 99999999
("x",) * 999999999 ;; 999999999 * "x" ;; 9**999999999 ;; (2**999)**9999 ;; 5|round(-999999999) ;; 5.5|round(999999999, "floor")
("a" * 99999).replace("a", "b" * 99999) ;; ("a" * 99999)|join("b" * 99999) ;; ("b" * 99999).join("a" * 99999)
("a" * 99999)|replace("", "b" * 99999) ;; ("a b" * 9999999).split() ;; ("a" * 9999999)|wordwrap(1, true, "x" * 9999)
"x".encode("utf-32") ;; "\t".expandtabs(999999999) ;; (1).to_bytes(999999999, "big") ;; "a".translate({97: "b" * 99999999})
("f" * 9999999)|int(0, 16) ** 9 ;; strftime_now("%Y" * 99999999) ;; ("http://a.b " * 9999)|urlize(target="x" * 99999)
lipsum(n=10**9, min=-9, max=-5) ;; lipsum(n=10**9, min=-1, max=0) ;; ("ab" * 2000000).rfind("ab" ~ "b" * 1000000)
("a" * 2000000).rindex("ab" ~ "a" * 1000000) ;; ("a" * 2000000).rsplit("ab" ~ "a" * 1000000)
("a" * 2000000).rpartition("ab" ~ "a" * 1000000) ;; ("a" * 5000000).strip("b" * 5000000) ;; ("a" * 5000000)|trim("b" * 5000000)
("f" * 10000000)|int(0, 16) is divisibleby(("f" * 5000000)|int(0, 16)) ;; (["x"] * 9999)|sort(attribute="0" ~ ",0" * 999999)
(["x"] * 9999)|join("", "0" ~ ".0" * 999999) ;; ["x"]|map(attribute="0" ~ ".0" * 999999)|list
("a" ~ "(" * 999999 ~ ")" * 999999)|urlize ;; ("x" * 450000)|wordwrap(1)
range(9999)|map("string")|map("list")|sum(start=[]) ;; raise_exception("x" * 9999999) ;; raise_exception("a\n\nb")
""".strip()
HOSTILE = [f"{{{{ {each} }}}}" for each in EXPRESSIONS.replace("\n", " ;; ").split(" ;; ")]
FAMILIES = {
    DOUBLING.replace("@", "'x'"): ["ns.a + ns.a", "ns.a ~ ns.a", "'%s%s' % (ns.a, ns.a)"],
    DOUBLING.replace("@", "3"): ["ns.a * ns.a"],
    LARGE: ["s == t", "s[::-1]|length", "s.upper()|length", "'c' in s", "s is lower", "s|trim|length"],
    LISTS: ["ns.a", "ns.a|tojson", "'%s' % ns.a", "'{}'.format(ns.a)", "'' ~ ns.a", "ns.a|string", "{1: ns.a}.values()"],
    TWINS: ["ns.a == ns.b", "[ns.a] == [ns.b]", "ns.a in [ns.b]", "ns.a is in [ns.b]", "[ns.a]|select('eq', ns.b)|list"],
    LISTS + " ": ["ns.a is lower", "ns.a is upper", "([{}]|map(attribute=ns.a)|list)[0].x"],
    TWINS + " ": ["[ns.a, ns.b]|sort", "[ns.a].index(ns.b)", "cycler(ns.a, ns.b).next() == ns.b"],
    TUPLES: ["{ns.a: 1}", "{}[ns.a]", "[ns.a]|unique|list", "{}.get(ns.a)", "dict([(ns.a, 1)])"],
    TUPLES + " ": ["[1]|map(ns.a)|list", "[{}]|selectattr(ns.a)|list"],
    CHAIN: ["{ns.a: 1}", "ns.a"],
}
for family, expressions in FAMILIES.items():
    HOSTILE += [family.replace("#", each) if "#" in family else f"{family}{{{{ {each} }}}}" for each in expressions]
HOSTILE += [
    DOUBLING.replace("@", "'x'").replace("{% set ns.a = # %}", "{% set ns.a %}{{ ns.a }}{{ ns.a }}{% endset %}"),
    "{% for i in range(99999) %}{{ range(99999)|list|length }}{% endfor %}",
    "{% filter center(999999999) %}x{% endfilter %}",
    "{{ (-99999999999)|_statements }}{{ 'x' * 999999999 }}",
    "{% set a = [0] * 99999 %}{% set b = [0] * 99999 %}{{ ([a] * 999999).count(b) }}",
    "{% set a = [0] * 4000000 %}{% for i in range(999) %}{{ a.copy()|length }}{% endfor %}",
    "{% for i in range(99999) if [" + "i, " * 2000 + "] and false %}{% endfor %}",
]


# What is no number is not multiplied by one: each would be a list of gigabytes.
@pytest.mark.parametrize(
    "expression",
    [
        "lipsum(max=[0] * 99999)",
        "('x' * 9999999)|indent([0] * 99)",
        "[1]|slice([0] * 3999999)|list",
        "[1]|batch([0] * 99999, 0)|list",
        "[1]|tojson(indent=[0] * 99999)",
        "'x'|center([0] * 99999)",
    ],
)
def test_a_list_in_the_place_of_a_number_costs_nothing(expression: str) -> None:
    template = JinjaTemplate(f"{{{{ {expression} }}}}", {}, "T")
    tracemalloc.start()
    try:
        refusal(template, SHORT)
        assert tracemalloc.get_traced_memory()[1] < 2**28
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("expression", ["{1: 2}.keys().mapping", "dict.update", "dict.setdefault", "dict.clear"])
def test_attributes_that_hide_a_size_or_change_a_value_are_not_there(expression: str) -> None:
    messages = [{"role": "user", "content": "Well?"}]
    source = f"{{{{ {expression} is defined }}}}{{{{ {expression}(messages[0], {{'role': 'x'}}) }}}}"
    template = JinjaTemplate(source, {}, "T")
    refusal(template, messages)
    assert JinjaTemplate(source.partition("}}")[0] + "}}", {}, "T").render(messages, None, False) == "False"
    assert messages == [{"role": "user", "content": "Well?"}]


def test_conversations_rendered_at_once_have_a_budget_each() -> None:
    """Each takes a half of it; all begin before one is finished."""
    template = JinjaTemplate("{{ messages[0].content }}{% set s = 'x' * 150000000 %}{{ messages[0].content }}", {}, "T")
    together = threading.Barrier(3)

    class Waiting(str):
        def __str__(self) -> str:
            together.wait(60)
            return "x"

    def render(_: int) -> str:
        return template.render([{"role": "user", "content": Waiting("x")}], None, False)

    with ThreadPoolExecutor(3) as threads:
        assert list(threads.map(render, range(3))) == ["xx"] * 3


def refusal(template: JinjaTemplate, messages: list[Any]) -> str:
    with pytest.raises(UserError) as caught:
        template.render(messages, None, False)
    return str(caught.value)


@pytest.mark.parametrize("source", HOSTILE)
def test_a_hostile_operation_is_refused_in_one_line_also_where_a_trial_did_not_meet_it(source: str) -> None:
    template = JinjaTemplate(f"{{% if messages|length == {len(LONG)} %}}{source}{{% endif %}}", {}, "T")
    assert template.render(SHORT, None, False) == ""
    message = refusal(template, LONG)
    assert message.startswith("T: refuses the conversation: ")
    assert "\n" not in message
    assert len(message) < 300


@pytest.mark.slow
@pytest.mark.parametrize(
    "source",
    [
        "{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}",
        "{% for a in range(9999) %}{% for b in range(9999) if false %}{% endfor %}{% endfor %}",
        "{% for i in range(9999) %}{% for j in range(9999) %}{{ (-999999999)|_statements }}{% endfor %}{% endfor %}",
        CALLS + "{{ f(99) }}",
        CALLS.replace("f(n - 1) ~ f(n - 1)", "caller() ~ caller()")
        + "{% for i in range(9999) %}{% call f(1) %}{% for j in range(9999) %}x{% endfor %}{% endcall %}{% endfor %}",
        "{% for i in range(99999) %}{{ lipsum(n=999) }}{% endfor %}",
    ],
)
def test_loops_and_calls_end(source: str) -> None:
    assert "beyond what a template needs" in refusal(JinjaTemplate(source, {}, "T"), SHORT)


def test_drawn_widths_and_counts_are_refused_before_they_are_used() -> None:
    draw: random.Random = fresh_random()
    texts = ["'x'", "messages[0].content", "('a' ~ 'b')", "(messages|map(attribute='role')|join)"]
    operations = ["{}|center({})", "{}.ljust({})", "{}.zfill({})", "{}|indent({}, true)", "{} * {}", "({1}) * {0}", "[{}] * {}"]
    operations += [
        "'%{1}s' % {0}",
        "'%-{1}s'|format({0})",
        "'%.{1}f' % 1.5",
        "'{{:{1}}}'.format({0})",
        "'{{:>{1}}}'.format({0})",
    ]
    operations += [
        "{}|batch({}, 0)|list",
        "{}|slice({})|list",
        "[{}]|tojson(indent={})",
        "lipsum(n={1})",
        "[{}]|tojson(indent=' ' * {})",
    ]
    for _ in range(100):
        number = draw.choice([10 ** draw.randint(9, 30), draw.randint(10**9, 10**18), 2 ** draw.randint(31, 70)])
        operation = draw.choice(operations).format(draw.choice(texts), number)
        statement = draw.choice(
            ["{{{{ {} }}}}", "{{% set x = {} %}}{{{{ x }}}}", "{{% for m in messages %}}{{{{ {} }}}}{{% endfor %}}"]
        )
        message = refusal(JinjaTemplate(statement.format(operation), {}, "T"), SHORT)
        assert "beyond what a template needs" in message, operation


NESTED = [
    *(
        "{{ " + opening * count + "1" + closing * count + " }}"
        for opening, closing in ("()", "[]")
        for count in (100, 3000, 100_000)
    ),
    *("{{ " + part * count + "1 }}" for part in ("not ", "-", "1 + ", "1 and ", "1 if 1 else ") for count in (200, 3000)),
    *("{{ a" + part * count + " }}" for part in (".b", "|upper", "(1)", "[0]") for count in (300, 3000)),
    *("{% if 1 %}" * count + "{% endif %}" * count for count in (120, 3000)),
    *("{% for a in b %}" * count + "{% endfor %}" * count for count in (30, 3000)),
    *("{{ " + "{1:" * 3000 + "1" + "}" * 3000 + " }}", "{{ " + "9" * 6000 + " }}", "{{ 0x" + "f" * 99999 + " }}"),
    *("{# " * 3000, "{% raw %}" * 3000, "{% xyz" + "x" * 3000 + " %}", "{{ 'a" * 3000, "{%- " * 3000),
]


def test_nesting_and_size_end_in_one_line_or_work() -> None:
    for source in NESTED:
        message = ""
        try:
            JinjaTemplate(source, {}, "T").render(SHORT, None, False)
        except UserError as error:
            message = str(error)
        assert "\n" not in message
        assert len(message) < 400
    with pytest.raises(UserError, match=r"^T: the chat template is nested too deeply$"):
        try_template("{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}", {}, "T")


@pytest.mark.parametrize(
    "source",
    [
        '{{ "%0999999999d" % 3 }}',
        "{{ range(10)|slice(999999999) }}",
        "{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}",
        "{{ raise_exception('a\n' * 9999) }}",
    ],
)
def test_a_command_ends_with_one_line_that_names_the_template(refused: Refusal, tmp_path: Path, source: str) -> None:
    train_tokenizer([""], 261).save(tmp_path / "tokenizer")
    (tmp_path / "tokenizer" / "chat_template.jinja").write_text(source)
    (tmp_path / "chats.jsonl").write_text(json.dumps({"messages": SHORT}) + "\n")
    line = refused("show", "data", tmp_path / "chats.jsonl", "--tokenizer", tmp_path / "tokenizer")
    assert "chat_template.jinja: " in line
    assert len(line) < 500


def test_a_generation_tag_that_is_left_is_refused() -> None:
    source = "{% for m in messages %}{% generation %}{{ m.content }}{% break %}{% endgeneration %}{% endfor %}"
    with pytest.raises(UserError, match="leaves a generation tag without ending it"):
        ChatTemplate(train_tokenizer([""], 261), source)


def test_more_private_use_characters_than_there_are_placeholders_are_refused() -> None:
    template = ChatTemplate.from_tokenizer(train_tokenizer([""], 261))
    every = "".join(map(chr, range(0xF0000, 0x10FFFF))) + "<|end|>"
    with pytest.raises(UserError, match="different private-use characters"):
        template.encode_prompt([{"role": "user", "content": every}])


# --- ordinary templates --------------------------------------------------------------------------------------------------

ORDINARY = (
    r"""
'%5d|%-4s|%.2f' % (3, 'a', 1.5) ;; '%s, %s' | format('a', 2) ;; '{:>5}|{:.1f}|{a}'.format('x', 2.25, a=1) ;; 'x'|center(20)
'a\nb'|indent(2, true) ;; 'a b c d'|wordwrap(3) ;; range(7)|slice(3)|list ;; range(7)|batch(3, 0)|list ;; 'ab' * 3 ;; [1] * 2
2 ** 10 ;; 7 // 2 + 7 % 4 - 3 * 2 / 4 ;; messages[0]|tojson ;; messages|tojson(indent=2) ;; messages[1:]|length
messages[::-1]
messages|map(attribute='content')|join(', ') ;; messages|selectattr('role', 'equalto', 'user')|list|length ;; messages|last
messages|map(attribute='role')|unique|list ;; messages|groupby('role')|map('first')|list ;; [3, 1, 2]|sort ;; {'b': 1}|dictsort
'A,B'.split(',')[0].lower() ;; 'a b'.strip().replace('a', 'c').startswith('c') ;; messages[0].content ~ 1 ~ [2] ~ none
messages[0].role == 'user' and 'ell' in messages[0].content ;; 1 < 2 <= 2 ;; (1, 2) == (1, 2) ;; [1, [2]] in [[1, [2]]]
'a' is string and 3 is odd and x is not defined ;; 3 is divisibleby(3) ;; 'A'|lower is eq('a') ;; x|default('y') ;; [1, 2]|sum
'é<b>'|e ;; 'x y'|urlencode ;; 'hello world'|title ;; 'hello'|truncate(4) ;; 3.7|round|int ;; '12'|int + 1
dict(a=1).items()|list
cycler('a', 'b').next() ;; namespace(a=1).a ;; 'a\tb'.splitlines() ;; '%d%%' % 5 ;; {'a': {'b': 1}}['a']['b'] ;; -(3)
'x'.join(['a', 'b']) ;; ','.join(messages|map(attribute='role')) ;; {('a', 1): 2}[('a', 1)] ;; messages|length > 1 ;; 'x'[0:1]
[1, 2, 3]|reverse|list ;; 'user' in messages|map(attribute='role') ;; messages|first == messages[0] ;; 'A' 'b'|upper ;; 1 + 2.5
""".strip()
    .replace("\n", " ;; ")
    .split(" ;; ")
)
STATEMENTS = """
{%- macro show(message, last=false) %}
    {{- message.role }}: {{ message.content|trim }}{{ caller() if caller }}{{ '!' if last }}
{%- endmacro %}
{%- set ns = namespace(seen=[], text='') %}
{%- for message in messages if message.role != 'system' %}
    {%- if loop.first %}{{ loop.length }}{% elif loop.index0 is even %}{% continue %}{% endif %}
    {%- set ns.seen = ns.seen + [message.role] %}{% set ns.text %}{{ ns.text }}-{{ loop.revindex }}{% endset %}
    {{- show(message, loop.last) }}{% call show(message) %}+{% endcall %}{{ loop.cycle('a', 'b') }}
    {{- loop.nextitem.role if not loop.last }}
{%- else %}none{% endfor %}
{%- for item in [[1, [2, 3]], [4]] recursive %}{{ loop(item) if item is iterable else item }};{% endfor %}
{%- filter upper %}{{ ns.text }}{{ ns.seen }}{% endfilter %}{% with a = 1 %}{{ a }}{% endwith %}
{%- block b %}{{ messages|length }}{% endblock %}{{ self.b() }}{% for k, v in {'a': 1}.items() %}{{ k }}={{ v }}{% endfor %}
{%- for a, b in [(1, 2)] %}{{ a + b }}{% break %}{% endfor %}{% if add_generation_prompt %}{{ 'x' }}{% endif %}"""


def test_what_ordinary_templates_do_is_what_jinja_does() -> None:
    theirs = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    theirs.filters["tojson"] = lambda value, indent=None: json.dumps(value, ensure_ascii=False, indent=indent)
    for source in [*("{{ " + each + " }}" for each in ORDINARY), STATEMENTS]:
        for prompt, messages in itertools.product([False, True], [SHORT, LONG]):
            expected = theirs.from_string(source).render(messages=messages, tools=None, add_generation_prompt=prompt)
            assert JinjaTemplate(source, {}, "T").render(messages, None, prompt) == expected, source
    with pytest.raises(jinja2.TemplateError):
        theirs.from_string("{{ messages.append(1) }}").render(messages=SHORT)


def test_a_long_conversation_is_within_the_bounds() -> None:
    messages = [{"role": role, "content": f"{role} " * 200} for role in ("user", "assistant")] * 500
    source = (
        "{% for m in messages %}{{ '<' + m.role + '>' + m.content|trim }}{{ messages[loop.index0 + 1:]|length }}{% endfor %}"
    )
    text = JinjaTemplate(source + STATEMENTS, {}, "T").render(messages, None, True)
    assert len(text) > sum(len(message["content"]) for message in messages)


# --- the trial -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limit", "value", "source", "message"),
    [
        ("CPU_SECONDS", 1, "{{ " + "1 < " * 100_000 + "1 }}", "needs more than 1 seconds for a short conversation"),
        ("WALL_SECONDS", 0.01, "{{ 1 }}", "needs more than 0.01 seconds for a short conversation"),
        ("MEMORY_BYTES", 192 << 20, "{{ '\U0001f600' * 60000000 }}", "refuses the conversation: MemoryError"),
    ],
)
def test_a_trial_ends_at_its_limits(
    limit: str, value: float, source: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(template_trial, limit, value)
    with pytest.raises(UserError, match=message):
        try_template(source, {"limit": limit}, "T")


@pytest.mark.parametrize(("program", "message"), [("kill -SEGV $$", "crashes the interpreter"), ("exit 3", "status 3")])
def test_a_trial_that_crashes_is_a_refusal(program: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "python").write_text(f"#!/bin/sh\n{program}\n")
    (tmp_path / "python").chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    with pytest.raises(UserError, match=message):
        try_template(f"{{{{ {program!r} }}}}", {}, "T")


def test_a_template_is_tried_once_by_an_interpreter_that_imports_little(monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[list[str]] = []
    run = subprocess.run

    def counted(command: list[str], **options: Any) -> Any:
        commands.append(command)
        return run(command, **options)

    monkeypatch.setattr(subprocess, "run", counted)
    for _ in range(2):
        try_template("{{ messages[0].content }} once", {"bos_token": "<s>"}, "T")
    [command] = commands
    listed = command[-1].replace("main()", "print(*sys.modules)")
    modules = run([*command[:-1], listed], capture_output=True, text=True, check=True).stdout.split()
    assert "jinja2.sandbox" in modules
    assert {"torch", "numpy", "pydantic", "tokenizers"}.isdisjoint(modules)


def test_a_template_that_refuses_some_conversations_passes_its_trial() -> None:
    try_template("{% if messages|length > 3 or tools %}{{ raise_exception('no tools') }}{% endif %}{{ messages }}", {}, "T")
