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

from lmforge.cluster.distributed import DistributedContext
from lmforge.data.tokenizer import Tokenizer
from lmforge.errors import UserError
from lmforge.evaluate.likelihood import (
    ModelWithTokenizer,
    TokenPair,
    encode_pair,
    loglikelihoods,
    max_sequence_length,
    run_in_batches,
)
from lmforge.generate.engine import generate
from lmforge.generate.sampling import SamplingParams
from lmforge.model.config import ModelConfig

GREEDY = SamplingParams(temperature=0.0)
# Of an answer that is written, where nobody says how many.
DEFAULT_MAX_TOKENS = 64
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


@dataclass(frozen=True)
class Question:
    """One question. line: where it is in its file. right: the number of the right choice; answers, pattern: of a text."""

    line: int
    prompt: str
    choices: tuple[str, ...] = ()
    correct_choice: int = 0
    answers: tuple[str, ...] = ()
    pattern: str | None = None

    @property
    def example_answer(self) -> str | None:
        """The answer that it is shown with as an example; None where it has a pattern alone."""
        if self.choices:
            return self.choices[self.correct_choice]
        return self.answers[0] if self.answers else None


@dataclass(frozen=True)
class QuestionTask:
    """The questions of a file, of one kind: all with choices, or none."""

    path: Path
    questions: tuple[Question, ...]

    @property
    def name(self) -> str:
        return self.path.stem

    @property
    def has_choices(self) -> bool:
        return bool(self.questions[0].choices)


def load_task(path: str | Path) -> QuestionTask:
    """The task of a file. Raises UserError, with file and line, for what is not as above."""
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as problem:
        raise UserError(
            f"{path}: cannot be read ({getattr(problem, 'strerror', None) or problem}); name a .jsonl file"
        ) from None
    items = []
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            items.append(_parse_question(line, number, f"{path}: line {number}"))
    if not items:
        raise UserError(f"{path}: holds no questions; give one JSON object a line")
    for item in items:
        if bool(item.choices) != bool(items[0].choices):
            one, other = ("choices", "none") if items[0].choices else ("no choices", "some")
            raise UserError(f"{path}: line {items[0].line} has {one} and line {item.line} has {other}; put them in two files")
    return QuestionTask(path, tuple(items))


def _parse_question(line: str, number: int, where: str) -> Question:
    try:
        content = json.loads(line)
    except ValueError as problem:
        raise UserError(f"{where}: not valid JSON ({problem})") from None
    if not isinstance(content, dict):
        raise UserError(f"{where}: expected an object, got {type(content).__name__}")
    if ("question" in content) == ("prompt" in content):
        raise UserError(f'{where}: expected either a "question" or a "prompt"')
    asked = content.get("question", content.get("prompt"))
    if not isinstance(asked, str):
        raise UserError(f"{where}: its question or prompt is no text")
    prompt = f"Question: {asked}\nAnswer:" if "question" in content else asked
    if "choices" in content:
        choices = _parse_strings(content["choices"], "choices", where)
        if len(choices) < 2 or not all(choices):
            raise UserError(f'{where}: "choices" needs two or more texts, none of them empty')
        return Question(number, prompt, choices, correct_choice=_parse_correct_choice(content.get("answer"), choices, where))
    pattern = content.get("pattern")
    if pattern is not None:
        try:
            re.compile(pattern)
        except (re.error, TypeError) as problem:
            raise UserError(f'{where}: "pattern" is no regular expression ({problem})') from None
    if "answers" not in content and not isinstance(content.get("answer", ""), str):
        raise UserError(f'{where}: "answer" is no text: {json.dumps(content["answer"])}')
    answers = _parse_strings(content.get("answers", [content["answer"]] if "answer" in content else []), "answers", where)
    if not answers and pattern is None:
        raise UserError(f'{where}: has nothing to compare with; give "answer", "answers", "pattern" or "choices"')
    return Question(number, prompt, answers=answers, pattern=pattern)


def _parse_strings(value: Any, name: str, where: str) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
        raise UserError(f'{where}: "{name}" is not texts: {json.dumps(value)}')
    return tuple(value)


def _parse_correct_choice(answer: Any, choices: tuple[str, ...], where: str) -> int:
    if isinstance(answer, str) and answer in choices:
        return choices.index(answer)
    letters = LETTERS[: len(choices)]
    if isinstance(answer, str) and len(answer) == 1 and answer in letters:
        return letters.index(answer)
    if isinstance(answer, int) and not isinstance(answer, bool) and 0 <= answer < len(choices):
        return answer
    raise UserError(f'{where}: "answer" is {json.dumps(answer)}, which is none of its {len(choices)} choices')


def run_task(
    task: QuestionTask,
    loaded: ModelWithTokenizer,
    dist_ctx: DistributedContext,
    *,
    num_fewshot: int = 0,
    fewshot_task: QuestionTask | None = None,
    limit: int | None = None,
    batch_size: int = 16,
    max_tokens: int = DEFAULT_MAX_TOKENS,
    stop_strings: Sequence[str] = ("\n",),
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
    tells whether the pattern is found. Raises UserError where there are too few examples, or one has no answer to show.
    """
    asked = task.questions[:limit]
    prompts = [_fewshot_prompt(task, item, num_fewshot, fewshot_task) + item.prompt for item in asked]
    if task.has_choices:
        answered = _score_choices(asked, prompts, loaded, dist_ctx, batch_size, on_batch)
    else:
        answered = _score_generations(asked, prompts, loaded, dist_ctx, batch_size, max_tokens, stop_strings, on_batch)
    metrics, errors = {}, {}
    for name in dict.fromkeys(name for told in answered for name in told["scores"]):
        scores = [float(told["scores"][name]) for told in answered if name in told["scores"]]
        mean = metrics[name] = sum(scores) / len(scores)
        errors[name] = math.sqrt(mean * (1 - mean) / max(1, len(scores) - 1))
    about = {"task": task.name, "questions": len(asked), "few_shot": num_fewshot}
    return {**about, "metrics": metrics, "standard_errors": errors, "answered": answered}


def check_task(
    task: QuestionTask,
    tokenizer: Tokenizer,
    config: ModelConfig,
    prefix_ids: list[int],
    *,
    num_fewshot: int = 0,
    limit: int | None = None,
    max_tokens: int = DEFAULT_MAX_TOKENS,
) -> int:
    """How many tokens the longest prompt of a task has with its answer.

    Raises UserError, with file and line, where that is more than a model reads, and where `run_task` would: before there is one.
    """
    longest, most = max_sequence_length(config), 0
    for item in task.questions[:limit]:
        prompt = _fewshot_prompt(task, item, num_fewshot, None) + item.prompt
        if item.choices:
            # The last token is not read: nothing follows it.
            tokens = max(sum(map(len, pair)) - 1 for pair in _choice_pairs(tokenizer, prefix_ids, item, prompt))
        else:
            tokens = len(prefix_ids) + len(tokenizer.encode(prompt)) + max_tokens
        if tokens > longest:
            raise UserError(
                f"{task.path}: line {item.line}: prompt and answer take {tokens} tokens, and the model reads at most {longest};"
                " shorten it, or show fewer examples"
            )
        most = max(most, tokens)
    return most


def _fewshot_prompt(task: QuestionTask, question: Question, num_fewshot: int, fewshot_task: QuestionTask | None) -> str:
    """The first `count` examples with their answers, none of them `item`, each followed by an empty line."""
    source = task if fewshot_task is None else fewshot_task
    chosen = [each for each in source.questions if fewshot_task is not None or each is not question][:num_fewshot]
    if len(chosen) < num_fewshot:
        raise UserError(f"{source.path}: has {len(chosen)} questions to show as examples, and {num_fewshot} were asked for")
    for each in chosen:
        if each.example_answer is None:
            raise UserError(
                f"{source.path}: line {each.line}: an example needs an answer to show, and this has a pattern alone"
            )
    return "".join(
        f"{each.prompt}{_separator(each.prompt, each.example_answer)}{each.example_answer}\n\n"
        for each in chosen
        if each.example_answer is not None
    )


def _separator(prompt: str, answer: str) -> str:
    """What stands between a prompt and its answer: a blank, unless one of them brings it."""
    return "" if not prompt or prompt[-1].isspace() or answer[:1].isspace() else " "


def _choice_pairs(tokenizer: Tokenizer, prefix_ids: list[int], question: Question, prompt: str) -> list[TokenPair]:
    """A prompt with each choice of its item."""
    return [encode_pair(tokenizer, prefix_ids, prompt, _separator(prompt, choice) + choice) for choice in question.choices]


def _score_choices(
    questions: Sequence[Question],
    prompts: list[str],
    loaded: ModelWithTokenizer,
    dist_ctx: DistributedContext,
    batch_size: int,
    on_batch: Callable[[], None],
) -> list[dict[str, Any]]:
    pairs = [
        pair
        for item, prompt in zip(questions, prompts, strict=True)
        for pair in _choice_pairs(loaded.tokenizer, loaded.prefix_ids, item, prompt)
    ]
    found = iter(loglikelihoods(loaded, pairs, dist_ctx, batch_size=batch_size, on_batch=on_batch))
    answered = []
    for item in questions:
        logs = [next(found).logprob for _ in item.choices]
        plain = _argmax(logs)
        normalised = _argmax([log / len(choice) for log, choice in zip(logs, item.choices, strict=True)])
        scores = {"accuracy": plain == item.correct_choice, "accuracy_normalised": normalised == item.correct_choice}
        told = {"choice": plain, "choice_normalised": normalised, "right": item.correct_choice, "log_probabilities": logs}
        answered.append({"line": item.line, **told, "scores": scores})
    return answered


def _argmax(values: list[float]) -> int:
    return max(range(len(values)), key=values.__getitem__)


def _score_generations(
    questions: Sequence[Question],
    prompts: list[str],
    loaded: ModelWithTokenizer,
    dist_ctx: DistributedContext,
    batch_size: int,
    max_tokens: int,
    stop_strings: Sequence[str],
    on_batch: Callable[[], None],
) -> list[dict[str, Any]]:
    about: dict[str, Any] = {"batch_rows": batch_size, "max_tokens": max_tokens, "stop": stop_strings, "on_batch": on_batch}
    texts = generate_in_batches(loaded, prompts, dist_ctx, sampling=GREEDY, **about)
    answered = []
    for item, text in zip(questions, texts, strict=True):
        scores = {}
        if item.answers:
            expected = [answer.strip() for answer in item.answers]
            scores = {"exact_match": text.strip() in expected, "contains": any(answer in text for answer in expected)}
        if item.pattern is not None:
            scores["regex"] = re.search(item.pattern, text) is not None
        answered.append({"line": item.line, "text": text, "answers": list(item.answers), "scores": scores})
    return answered


def generate_in_batches(
    loaded: ModelWithTokenizer,
    prompts: Sequence[str],
    dist_ctx: DistributedContext,
    *,
    batch_size: int,
    max_tokens: int,
    stop_strings: Sequence[str],
    sampling: SamplingParams,
    seed: int = 0,
    on_batch: Callable[[], None] = lambda: None,
) -> list[str]:
    """What the model writes after each prompt. Of one too long to leave room for `max_tokens` the beginning is cut off.

    `on_batch` is called before each batch of this rank's.
    """
    room = max_sequence_length(loaded.config) - len(loaded.prefix_ids) - max_tokens
    if room < 1:
        raise UserError(
            f"{max_tokens} tokens to write leave no room for a prompt in the {room + max_tokens} that the model reads"
        )
    encoded = [loaded.tokenizer.encode(prompt) for prompt in prompts]

    def write(numbers: list[int]) -> list[str]:
        completions = generate(
            loaded.model,
            loaded.tokenizer,
            [encoded[number][-room:] for number in numbers],
            max_tokens=max_tokens,
            sampling=sampling,
            seed=seed + numbers[0],
            stop_strings=stop_strings,
            prefix_ids=loaded.prefix_ids,
            stop_token_ids=loaded.stop_token_ids,
        )
        return [completion.text for completion in completions]

    return run_in_batches([len(tokens) for tokens in encoded], batch_size, dist_ctx, write, on_batch)
