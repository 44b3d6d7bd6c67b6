"""Sums for a small model with a calculator: texts, conversations, prompts, and a tokenizer.

    python recipes/calculator/problems.py data/calculator

Files: texts.jsonl, {"text": …}, for pretraining: calls and results, so that a model learns to copy
both; chats.jsonl, {"messages": …}, for fine-tuning, of which one in `--calls` calls the calculator
and the others answer at once; prompts.jsonl and validation.jsonl, {"prompt": …, "answer": …}, for
rewards. All answers are right. No problem is in two of the files.
"""

import argparse
import json
import random
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from lmforge.core.data.tokenizer import train_tokenizer
from lmforge.post.environments.builtin import Calculator
from lmforge.post.environments.tool_schema import tool_schema

NUM_TEXTS, NUM_CHATS, NUM_PROMPTS, NUM_VALIDATION = 4000, 5000, 2000, 200
TOOL = tool_schema(Calculator().calculate)
# The tokenizer reads no number: each digit is a token. The words of a call, a result and the tool's
# schema are tokens.
WORDS = """<tools>
{}
</tools>What is ?It is .<tool_call>
{{"name": "calculate", "arguments": {{"expression": "+-"}}}}
</tool_call><tool_response>
</tool_response>"""
MAX_VOCABULARY = 512
# What the chat template makes of a call, and of a result with its answer.
CALL = """<|user|>What is {0}?<|end|><|assistant|><tool_call>
{{"name": "calculate", "arguments": {{"expression": "{0}"}}}}
</tool_call><|end|>"""
ANSWER = """<|user|><tool_response>
{0}
</tool_response><|end|><|assistant|>It is {0}.<|end|>"""


def problems(rng: random.Random) -> Iterator[tuple[str, str]]:
    """Different sums and differences of numbers of three digits, each with its value, which has
    three digits too.
    """
    seen = set[str]()
    while True:
        expression = f"{rng.randint(100, 999)}{rng.choice('+-')}{rng.randint(100, 999)}"
        value = str(eval(expression))
        if expression not in seen and len(value) == 3 and value.isdigit():
            seen.add(expression)
            yield expression, value


def question(expression: str) -> dict[str, Any]:
    return {"role": "user", "content": f"What is {expression}?"}


def chat(expression: str, value: str, calls: bool) -> dict[str, Any]:
    """A conversation for fine-tuning."""
    turns = [question(expression)]
    if calls:
        call = {"type": "function", "function": {"name": "calculate", "arguments": {"expression": expression}}}
        turns += [{"role": "assistant", "content": "", "tool_calls": [call]}, {"role": "tool", "content": value}]
    return {"messages": [*turns, {"role": "assistant", "content": f"It is {value}."}], "tools": [TOOL]}


def text(expression: str, value: str, rng: random.Random) -> dict[str, Any]:
    """A text for pretraining.

    More results are read out than asked for: to copy them is what takes longest to learn.
    """
    results = [value, *(str(rng.randint(100, 999)) for _ in range(4))]
    return {"text": CALL.format(expression) + "".join(map(ANSWER.format, results))}


def write(path: Path, records: Sequence[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description="Problems, conversations and a tokenizer for the calculator recipe.")
    parser.add_argument("out", type=Path)
    parser.add_argument("--calls", type=int, default=3, help="one in so many conversations calls the calculator")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    rng = random.Random(options.seed)
    found = problems(rng)

    def take(count: int) -> list[tuple[str, str]]:
        return list(islice(found, count))

    options.out.mkdir(parents=True, exist_ok=True)
    train_tokenizer([WORDS.format(json.dumps(TOOL))] * 2, MAX_VOCABULARY).save(options.out / "tokenizer")
    chats = [chat(*each, calls=number % options.calls == 0) for number, each in enumerate(take(NUM_CHATS))]
    write(options.out / "chats.jsonl", chats)
    for name, count in (("prompts", NUM_PROMPTS), ("validation", NUM_VALIDATION)):
        rows = [{"prompt": [question(expression)], "answer": value} for expression, value in take(count)]
        write(options.out / f"{name}.jsonl", rows)
    write(options.out / "texts.jsonl", [text(*each, rng) for each in take(NUM_TEXTS)])
    print(f"{options.out}: {len(chats):,} conversations, {NUM_PROMPTS:,} prompts, {NUM_VALIDATION:,} for validation")


if __name__ == "__main__":
    main()
