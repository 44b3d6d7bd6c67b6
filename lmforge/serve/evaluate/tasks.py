"""Questions put to a model: multiple choice by likelihood, and written answers.

Their files are read in text/questions.py.
"""

import math
import re
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from lmforge.core.data.tokenizer import Tokenizer
from lmforge.core.distributed.distributed import DistributedContext
from lmforge.core.errors import UserError
from lmforge.core.model.config import ModelConfig
from lmforge.serve.decoding.engine import generate
from lmforge.serve.decoding.model_loading import LoadedModel
from lmforge.serve.decoding.prompts import encode_prompt, max_input_length
from lmforge.serve.decoding.sampling import SamplingParams
from lmforge.serve.evaluate.likelihood import (
    TokenPair,
    encode_pair,
    loglikelihoods,
    report_truncation,
    run_in_batches,
)
from lmforge.text.questions import Question, QuestionTask

GREEDY = SamplingParams(temperature=0.0)


@dataclass(frozen=True)
class TaskSettings:
    """Settings of a task: the examples before each question, and the limits of answers.

    num_fewshot: examples before each question: the first of `fewshot_task`, or of the task itself
    without the question.
    limit: only the first so many questions; None for all.
    max_tokens, stop_strings: where a written answer ends.
    on_batch: called before each batch of this rank.
    """

    num_fewshot: int = 0
    fewshot_task: QuestionTask | None = None
    limit: int | None = None
    batch_size: int = 16
    max_tokens: int = 64
    stop_strings: Sequence[str] = ("\n",)
    on_batch: Callable[[], None] = lambda: None


def run_task(
    task: QuestionTask, loaded: LoadedModel, dist_ctx: DistributedContext, settings: TaskSettings
) -> dict[str, Any]:
    """Put the questions of a task to a model, which every rank has in full.

    The result is the same for any number of ranks.

    Returns `task`, `questions` (their number), `num_fewshot`, `metrics` and their
    `standard_errors`, and `answers`, one object for each question. With choices, `acc` (0 … 1)
    chooses by log-probability and `acc_norm` by that over the number of characters of a choice;
    `bits_per_byte` is of the correct choice alone. Otherwise the greedy answer is compared (0 … 1):
    `exact_match` and `contains` with the expected answers, surrounding space ignored, and `regex`
    is whether the pattern matches somewhere in it.

    Raises UserError where there are too few few-shot examples, or one has no answer to show.
    """
    questions = [
        (question, _build_prompt(task, question, settings))
        for question in task.questions[: settings.limit]
    ]
    score = _score_choices if task.questions[0].choices else _score_generations
    answers = score(questions, loaded, dist_ctx, settings)
    metrics = {}
    errors = {}
    for name in dict.fromkeys(name for answer in answers for name in answer["scores"]):
        scores = [float(answer["scores"][name]) for answer in answers if name in answer["scores"]]
        mean = sum(scores) / len(scores)
        metrics[name] = mean
        errors[name] = math.sqrt(statistics.pvariance(scores, mean) / max(1, len(scores) - 1))
    return {
        "task": task.name,
        "questions": len(questions),
        "num_fewshot": settings.num_fewshot,
        "metrics": metrics,
        "standard_errors": errors,
        "answers": answers,
    }


def check_task(
    task: QuestionTask,
    tokenizer: Tokenizer,
    config: ModelConfig,
    prefix_ids: list[int],
    settings: TaskSettings,
) -> int:
    """The number of tokens of the longest prompt of a task with its answer.

    Raises UserError, with file and record, where that is more than the model reads, and where
    `run_task` would. It needs no model.
    """
    limit = max_input_length(config)
    longest = 0
    for question in task.questions[: settings.limit]:
        prompt = _build_prompt(task, question, settings)
        if question.choices:
            pairs = _choice_pairs(tokenizer, prefix_ids, question, prompt)
            # The last token is not an input.
            tokens = max(len(context) + len(choice) - 1 for context, choice in pairs)
        else:
            tokens = len(encode_prompt(tokenizer, prompt, prefix_ids)) + settings.max_tokens
        if tokens > limit:
            raise UserError(
                f"{task.path}, record {question.record}: prompt and answer take {tokens} tokens,"
                f" and the model reads at most {limit}; shorten it, or show fewer examples"
            )
        longest = max(longest, tokens)
    return longest


def _build_prompt(task: QuestionTask, question: Question, settings: TaskSettings) -> str:
    """The prompt of a question after its few-shot examples, each followed by an empty line."""
    source = settings.fewshot_task or task
    count = settings.num_fewshot
    others = [each for each in source.questions if each is not question]
    examples = others[:count]
    if len(examples) < count:
        raise UserError(
            f"{source.path}: {len(examples)} questions to show as examples, and {count} were"
            " requested"
        )
    shown = []
    for each in examples:
        if each.example_answer is None:
            raise UserError(
                f"{source.path}, record {each.record}: an example needs an answer, and this has"
                " only a pattern"
            )
        separator = _separator(each.prompt, each.example_answer)
        shown.append(f"{each.prompt}{separator}{each.example_answer}\n\n")
    return "".join(shown) + question.prompt


def _separator(prompt: str, answer: str) -> str:
    """The separator between a prompt and its answer: a space, unless one of them has it."""
    if not prompt or prompt[-1].isspace() or answer[:1].isspace():
        return ""
    return " "


def _choice_pairs(
    tokenizer: Tokenizer, prefix_ids: list[int], question: Question, prompt: str
) -> list[TokenPair]:
    """A prompt with each choice of its question."""
    return [
        encode_pair(tokenizer, prefix_ids, prompt, _separator(prompt, choice) + choice)
        for choice in question.choices
    ]


def _score_choices(
    questions: list[tuple[Question, str]],
    loaded: LoadedModel,
    dist_ctx: DistributedContext,
    settings: TaskSettings,
) -> list[dict[str, Any]]:
    pairs = []
    for question, prompt in questions:
        pairs += _choice_pairs(loaded.tokenizer, loaded.prefix_ids, question, prompt)
    scored = iter(
        loglikelihoods(
            loaded, pairs, dist_ctx, batch_size=settings.batch_size, on_batch=settings.on_batch
        )
    )
    answers = []
    for question, _ in questions:
        correct = question.correct_choice
        logprobs = [next(scored).logprob for _ in question.choices]
        choice = _argmax(logprobs)
        choice_norm = _argmax(
            [logprob / len(text) for logprob, text in zip(logprobs, question.choices, strict=True)]
        )
        num_bytes = len(question.choices[correct].encode())
        answers.append(
            {
                "record": question.record,
                "choice": choice,
                "choice_norm": choice_norm,
                "correct_choice": correct,
                "logprobs": logprobs,
                "scores": {
                    "acc": choice == correct,
                    "acc_norm": choice_norm == correct,
                    "bits_per_byte": -logprobs[correct] / math.log(2) / num_bytes,
                },
            }
        )
    return answers


def _argmax(values: list[float]) -> int:
    return max(range(len(values)), key=values.__getitem__)


def _score_generations(
    questions: list[tuple[Question, str]],
    loaded: LoadedModel,
    dist_ctx: DistributedContext,
    settings: TaskSettings,
) -> list[dict[str, Any]]:
    texts = generate_in_batches(
        [prompt for _, prompt in questions], loaded, dist_ctx, settings, GREEDY
    )
    answers = []
    for (question, _), text in zip(questions, texts, strict=True):
        scores = {}
        if question.answers:
            expected = [answer.strip() for answer in question.answers]
            scores = {
                "exact_match": text.strip() in expected,
                "contains": any(answer in text for answer in expected),
            }
        if question.pattern is not None:
            scores["regex"] = re.search(question.pattern, text) is not None
        answers.append(
            {
                "record": question.record,
                "text": text,
                "answers": list(question.answers),
                "scores": scores,
            }
        )
    return answers


def generate_in_batches(
    prompts: Sequence[str],
    loaded: LoadedModel,
    dist_ctx: DistributedContext,
    settings: TaskSettings,
    sampling: SamplingParams,
) -> list[str]:
    """The text that the model generates after each prompt, on every rank.

    A prompt that leaves no room for `max_tokens` loses its beginning, and rank 0 says so. Raises
    UserError where `max_tokens` alone leave no room for a prompt.
    """
    prefix_ids = loaded.prefix_ids
    limit = max_input_length(loaded.config)
    max_prompt_tokens = limit - len(prefix_ids) - settings.max_tokens
    if max_prompt_tokens < 1:
        raise UserError(
            f"{settings.max_tokens} tokens to generate leave no room for a prompt in the {limit}"
            " the model reads"
        )
    encoded = [
        encode_prompt(loaded.tokenizer, prompt, prefix_ids)[len(prefix_ids) :] for prompt in prompts
    ]
    report_truncation([limit - max_prompt_tokens + len(ids) for ids in encoded], limit, dist_ctx)

    def complete(numbers: list[int]) -> list[str]:
        completions = generate(
            loaded.model,
            loaded.tokenizer,
            [encoded[number][-max_prompt_tokens:] for number in numbers],
            max_tokens=settings.max_tokens,
            sampling=sampling,
            seed=numbers[0],
            stop_strings=settings.stop_strings,
            prefix_ids=prefix_ids,
            stop_token_ids=loaded.stop_token_ids,
        )
        return [completion.text for completion in completions]

    lengths = [len(ids) for ids in encoded]
    return run_in_batches(lengths, settings.batch_size, dist_ctx, complete, settings.on_batch)
