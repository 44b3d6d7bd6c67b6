"""Tasks from JSON lines: multiple choice by likelihood, and answers that are written and compared.

A line is an object, and all of a file are of one kind:

    {"question": "…", "choices": ["…", "…"], "answer": 1}     the number of a choice, from 0; or its text; or its letter
    {"prompt": "…", "answer": "…"}                            or "answers": ["…", "…"], or "pattern": a regular expression

A `prompt` is taken as it stands, a `question` is put as `Question: …`, `Answer:`. Other keys are passed over.
"""

import json
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lmforge.cluster.ranks import Ranks
from lmforge.data.tokenizer import Tokenizer
from lmforge.errors import Mistake
from lmforge.infer.engine import generate
from lmforge.infer.likelihood import Pair, Readable, encode_pair, in_batches, likelihoods, longest_row
from lmforge.infer.sampling import Sampling
from lmforge.model.shapes import ModelConfig

GREEDY = Sampling(temperature=0.0)
# Of an answer that is written, where nobody says how many.
MAX_TOKENS = 64
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


@dataclass(frozen=True)
class Item:
    """One question. line: where it is in its file. right: the number of the right choice; answers, pattern: of a text."""

    line: int
    prompt: str
    choices: tuple[str, ...] = ()
    right: int = 0
    answers: tuple[str, ...] = ()
    pattern: str | None = None

    @property
    def shown(self) -> str | None:
        """The answer that it is shown with as an example; None where it has a pattern alone."""
        if self.choices:
            return self.choices[self.right]
        return self.answers[0] if self.answers else None


@dataclass(frozen=True)
class Task:
    """The questions of a file, of one kind: all with choices, or none."""

    path: Path
    items: tuple[Item, ...]

    @property
    def name(self) -> str:
        return self.path.stem

    @property
    def has_choices(self) -> bool:
        return bool(self.items[0].choices)


def load_tasks(path: str | Path) -> Task:
    """The task of a file. Raises Mistake, with file and line, for what is not as above."""
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as problem:
        raise Mistake(f"{path}: cannot be read ({getattr(problem, 'strerror', None) or problem}); name a .jsonl file") from None
    items = []
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            items.append(_read_item(line, number, f"{path}: line {number}"))
    if not items:
        raise Mistake(f"{path}: holds no questions; give one JSON object a line")
    for item in items:
        if bool(item.choices) != bool(items[0].choices):
            one, other = ("choices", "none") if items[0].choices else ("no choices", "some")
            raise Mistake(f"{path}: line {items[0].line} has {one} and line {item.line} has {other}; put them in two files")
    return Task(path, tuple(items))


def _read_item(line: str, number: int, where: str) -> Item:
    try:
        content = json.loads(line)
    except ValueError as problem:
        raise Mistake(f"{where}: not valid JSON ({problem})") from None
    if not isinstance(content, dict):
        raise Mistake(f"{where}: expected an object, got {type(content).__name__}")
    if ("question" in content) == ("prompt" in content):
        raise Mistake(f'{where}: expected either a "question" or a "prompt"')
    asked = content.get("question", content.get("prompt"))
    if not isinstance(asked, str):
        raise Mistake(f"{where}: its question or prompt is no text")
    prompt = f"Question: {asked}\nAnswer:" if "question" in content else asked
    if "choices" in content:
        choices = _texts(content["choices"], "choices", where)
        if len(choices) < 2 or not all(choices):
            raise Mistake(f'{where}: "choices" needs two or more texts, none of them empty')
        return Item(number, prompt, choices, right=_right(content.get("answer"), choices, where))
    pattern = content.get("pattern")
    if pattern is not None:
        try:
            re.compile(pattern)
        except (re.error, TypeError) as problem:
            raise Mistake(f'{where}: "pattern" is no regular expression ({problem})') from None
    if "answers" not in content and not isinstance(content.get("answer", ""), str):
        raise Mistake(f'{where}: "answer" is no text: {json.dumps(content["answer"])}')
    answers = _texts(content.get("answers", [content["answer"]] if "answer" in content else []), "answers", where)
    if not answers and pattern is None:
        raise Mistake(f'{where}: has nothing to compare with; give "answer", "answers", "pattern" or "choices"')
    return Item(number, prompt, answers=answers, pattern=pattern)


def _texts(value: Any, name: str, where: str) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
        raise Mistake(f'{where}: "{name}" is not texts: {json.dumps(value)}')
    return tuple(value)


def _right(answer: Any, choices: tuple[str, ...], where: str) -> int:
    if isinstance(answer, str) and answer in choices:
        return choices.index(answer)
    letters = LETTERS[: len(choices)]
    if isinstance(answer, str) and len(answer) == 1 and answer in letters:
        return letters.index(answer)
    if isinstance(answer, int) and not isinstance(answer, bool) and 0 <= answer < len(choices):
        return answer
    raise Mistake(f'{where}: "answer" is {json.dumps(answer)}, which is none of its {len(choices)} choices')


def run_task(
    task: Task,
    opened: Readable,
    ranks: Ranks,
    *,
    few_shot: int = 0,
    examples: Task | None = None,
    limit: int | None = None,
    batch_rows: int = 16,
    max_tokens: int = MAX_TOKENS,
    stop: Sequence[str] = ("\n",),
    on_batch: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """Ask a model, which every rank has whole, the questions of a task; the result is the same for any number of ranks.

    Args:
        few_shot: examples before each question: the first of `examples`, or of the task itself, less the one asked.
        limit: the first so many questions only.
        max_tokens, stop: where an answer that is written ends, at the latest. It is the likeliest, token by token.
        on_batch: called before each batch of this rank's.

    Returns `task`, `questions`, `few_shot`, `metrics` and their `standard_errors`, each 0 … 1, and `answered`: what was
    answered to each. With choices, `accuracy` goes by log-probability and `accuracy_normalised` by that over the number of
    a choice's characters. Else `exact_match` and `contains` compare with the answers, less blanks around them, and `regex`
    tells whether the pattern is found. Raises Mistake where there are too few examples, or one has no answer to show.
    """
    asked = task.items[:limit]
    prompts = [_examples(task, item, few_shot, examples) + item.prompt for item in asked]
    if task.has_choices:
        answered = _choose(asked, prompts, opened, ranks, batch_rows, on_batch)
    else:
        answered = _write(asked, prompts, opened, ranks, batch_rows, max_tokens, stop, on_batch)
    metrics, errors = {}, {}
    for name in dict.fromkeys(name for told in answered for name in told["scores"]):
        scores = [float(told["scores"][name]) for told in answered if name in told["scores"]]
        mean = metrics[name] = sum(scores) / len(scores)
        errors[name] = math.sqrt(mean * (1 - mean) / max(1, len(scores) - 1))
    about = {"task": task.name, "questions": len(asked), "few_shot": few_shot}
    return {**about, "metrics": metrics, "standard_errors": errors, "answered": answered}


def check_task(
    task: Task,
    tokenizer: Tokenizer,
    config: ModelConfig,
    opening: list[int],
    *,
    few_shot: int = 0,
    limit: int | None = None,
    max_tokens: int = MAX_TOKENS,
) -> int:
    """How many tokens the longest prompt of a task has with its answer.

    Raises Mistake, with file and line, where that is more than a model reads, and where `run_task` would: before there is one.
    """
    longest, most = longest_row(config), 0
    for item in task.items[:limit]:
        prompt = _examples(task, item, few_shot, None) + item.prompt
        if item.choices:
            # The last token is not read: nothing follows it.
            tokens = max(sum(map(len, pair)) - 1 for pair in _pairs(tokenizer, opening, item, prompt))
        else:
            tokens = len(opening) + len(tokenizer.encode(prompt)) + max_tokens
        if tokens > longest:
            raise Mistake(
                f"{task.path}: line {item.line}: prompt and answer take {tokens} tokens, and the model reads at most {longest};"
                " shorten it, or show fewer examples"
            )
        most = max(most, tokens)
    return most


def _examples(task: Task, item: Item, count: int, examples: Task | None) -> str:
    """The first `count` examples with their answers, none of them `item`, each followed by an empty line."""
    source = task if examples is None else examples
    chosen = [each for each in source.items if examples is not None or each is not item][:count]
    if len(chosen) < count:
        raise Mistake(f"{source.path}: has {len(chosen)} questions to show as examples, and {count} were asked for")
    for each in chosen:
        if each.shown is None:
            raise Mistake(f"{source.path}: line {each.line}: an example needs an answer to show, and this has a pattern alone")
    return "".join(f"{each.prompt}{_gap(each.prompt, each.shown)}{each.shown}\n\n" for each in chosen if each.shown is not None)


def _gap(prompt: str, answer: str) -> str:
    """What stands between a prompt and its answer: a blank, unless one of them brings it."""
    return "" if not prompt or prompt[-1].isspace() or answer[:1].isspace() else " "


def _pairs(tokenizer: Tokenizer, opening: list[int], item: Item, prompt: str) -> list[Pair]:
    """A prompt with each choice of its item."""
    return [encode_pair(tokenizer, opening, prompt, _gap(prompt, choice) + choice) for choice in item.choices]


def _choose(
    items: Sequence[Item],
    prompts: list[str],
    opened: Readable,
    ranks: Ranks,
    batch_rows: int,
    on_batch: Callable[[], None],
) -> list[dict[str, Any]]:
    pairs = [
        pair
        for item, prompt in zip(items, prompts, strict=True)
        for pair in _pairs(opened.tokenizer, opened.opening, item, prompt)
    ]
    found = iter(likelihoods(opened, pairs, ranks, batch_rows=batch_rows, on_batch=on_batch))
    answered = []
    for item in items:
        logs = [next(found).log_probability for _ in item.choices]
        plain = _best(logs)
        normalised = _best([log / len(choice) for log, choice in zip(logs, item.choices, strict=True)])
        scores = {"accuracy": plain == item.right, "accuracy_normalised": normalised == item.right}
        told = {"choice": plain, "choice_normalised": normalised, "right": item.right, "log_probabilities": logs}
        answered.append({"line": item.line, **told, "scores": scores})
    return answered


def _best(values: list[float]) -> int:
    return max(range(len(values)), key=values.__getitem__)


def _write(
    items: Sequence[Item],
    prompts: list[str],
    opened: Readable,
    ranks: Ranks,
    batch_rows: int,
    max_tokens: int,
    stop: Sequence[str],
    on_batch: Callable[[], None],
) -> list[dict[str, Any]]:
    about: dict[str, Any] = {"batch_rows": batch_rows, "max_tokens": max_tokens, "stop": stop, "on_batch": on_batch}
    texts = write_after(opened, prompts, ranks, sampling=GREEDY, **about)
    answered = []
    for item, text in zip(items, texts, strict=True):
        scores = {}
        if item.answers:
            expected = [answer.strip() for answer in item.answers]
            scores = {"exact_match": text.strip() in expected, "contains": any(answer in text for answer in expected)}
        if item.pattern is not None:
            scores["regex"] = re.search(item.pattern, text) is not None
        answered.append({"line": item.line, "text": text, "answers": list(item.answers), "scores": scores})
    return answered


def write_after(
    opened: Readable,
    prompts: Sequence[str],
    ranks: Ranks,
    *,
    batch_rows: int,
    max_tokens: int,
    stop: Sequence[str],
    sampling: Sampling,
    seed: int = 0,
    on_batch: Callable[[], None] = lambda: None,
) -> list[str]:
    """What the model writes after each prompt. Of one too long to leave room for `max_tokens` the beginning is cut off.

    `on_batch` is called before each batch of this rank's.
    """
    room = longest_row(opened.config) - len(opened.opening) - max_tokens
    if room < 1:
        raise Mistake(
            f"{max_tokens} tokens to write leave no room for a prompt in the {room + max_tokens} that the model reads"
        )
    encoded = [opened.tokenizer.encode(prompt) for prompt in prompts]

    def write(numbers: list[int]) -> list[str]:
        completions = generate(
            opened.model,
            opened.tokenizer,
            [encoded[number][-room:] for number in numbers],
            max_tokens=max_tokens,
            sampling=sampling,
            seed=seed + numbers[0],
            stop=stop,
            opening=opened.opening,
            ends=opened.ends,
        )
        return [completion.text for completion in completions]

    return in_batches([len(tokens) for tokens in encoded], batch_rows, ranks, write, on_batch)
