"""The first rendering of a foreign chat template, in a child process with limits of time and memory.

A template that never ends, exhausts memory or crashes the interpreter affects only the child. The child is a bare interpreter
that imports jinja2 and jinja_sandbox.py, whose own bounds hold in both processes.
"""

import json
import resource
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

import jinja2
import markupsafe

from lmforge.data.chat.jinja_sandbox import JinjaTemplate
from lmforge.errors import UserError

CPU_SECONDS = 5
# Longer than the CPU limit, for a busy machine; it also ends a template that waits.
WALL_SECONDS = 30.0
MEMORY_BYTES = 2 << 30
# templates.py looks at its text too, for the special token that ends an answer.
PROBE_CONVERSATION: list[Any] = [{"role": "user", "content": "Well?"}, {"role": "assistant", "content": "Yes."}]
_ARGUMENTS = {"city": "Bonn", "days": 3}
_CALL = {"type": "function", "function": {"name": "weather", "arguments": _ARGUMENTS}}
_PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
_TOOLS = [{"type": "function", "function": {"name": "weather", "description": "Forecast.", "parameters": _PARAMETERS}}]
_LONG_CONVERSATION = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Well?\n\nHow is it?"},
    {"role": "assistant", "content": "", "tool_calls": [_CALL]},
    {"role": "tool", "name": "weather", "content": "12 °C"},
    {"role": "assistant", "content": "Cold.", "reasoning_content": "12 is little."},
    {"role": "user", "content": "And then?"},
]


def try_template(source: str, variables: Mapping[str, str], location: str) -> None:
    """Compile and render a template in a child first. Raises UserError where it exceeds the limits or is not Jinja.

    A template that raises for a conversation, as many do without a system message or with tools, passes.
    """
    if problem := _problem(source, tuple(sorted(variables.items())), location):
        raise UserError(problem)


@lru_cache(maxsize=64)
def _problem(source: str, variables: tuple[tuple[str, str], ...], location: str) -> str:
    """The problem of a template; "" where it has none. Each template is tried once per process."""
    paths = {str(Path(str(module.__file__)).parents[1]) for module in (jinja2, markupsafe)}
    paths.add(str(Path(__file__).resolve().parents[3]))
    code = f"import sys; sys.path += {sorted(paths)!r}; from {__name__} import main; main()"
    request = json.dumps([CPU_SECONDS, MEMORY_BYTES, source, dict(variables), location]).encode()
    try:
        # Without site-packages and environment variables, so that nothing of the user's environment is imported at start.
        done = subprocess.run(
            [sys.executable, "-I", "-S", "-c", code], input=request, capture_output=True, timeout=WALL_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return f"{location}: needs more than {WALL_SECONDS:g} seconds for a short conversation: correct the template"
    except OSError as error:
        return f"{location}: no process can be started to try it: {error.strerror}"
    if done.returncode == -signal.SIGXCPU:
        return f"{location}: needs more than {CPU_SECONDS} seconds for a short conversation: correct the template"
    if done.returncode:
        reason = f"ended with status {done.returncode}" if done.returncode > 0 else f"signal {-done.returncode}"
        return f"{location}: crashes the interpreter that tries it ({reason}): correct the template"
    return str(json.loads(done.stdout))


def main() -> None:
    """In the child: read limits and a template from standard input, and print as JSON what is wrong with the template."""
    cpu_seconds, memory_bytes, source, variables, location = json.load(sys.stdin)
    for limit, amount in ((resource.RLIMIT_CPU, cpu_seconds), (resource.RLIMIT_AS, memory_bytes), (resource.RLIMIT_CORE, 0)):
        hard = resource.getrlimit(limit)[1]
        soft = amount if hard == resource.RLIM_INFINITY else min(amount, hard)
        with suppress(ValueError, OSError):  # not every system limits memory
            resource.setrlimit(limit, (soft, hard))
    print(json.dumps(_try_here(source, variables, location)))


def _try_here(source: str, variables: dict[str, str], location: str) -> str:
    try:
        template = JinjaTemplate(source, variables, location)
        template.render(PROBE_CONVERSATION, None, False)
    except UserError as error:
        return str(error)
    for messages, tools, prompt in (
        (PROBE_CONVERSATION[:1], None, True),
        (_LONG_CONVERSATION, _TOOLS, True),
        (_LONG_CONVERSATION[1:5], None, False),
    ):
        with suppress(UserError):  # the memory that it used is free again
            template.render(messages, tools, prompt)
    return ""
