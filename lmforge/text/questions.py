"""Questions from JSON lines: multiple choice, and written answers that are compared.

A record is an object, and all of a file are of one type:

    {"question": "…", "choices": ["…", "…"], "answer": 1}     the number of a choice, from 0; or its
                                                              text; or its letter
    {"prompt": "…", "answer": "…"}                            or "answers": ["…", "…"], or
                                                              "pattern": a regular expression

A `prompt` is used as it is, a `question` becomes `Question: …`, `Answer:`. Other keys are ignored.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, Field

from lmforge.core.errors import UserError
from lmforge.core.files.untrusted import check_content, compile_pattern
from lmforge.text.sources.records import read_records

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


@dataclass(frozen=True)
class Question:
    """One question.

    `record` is its number in the file, from 1. Without choices, a written answer is compared with
    `answers` and `pattern`.
    """

    record: int
    prompt: str
    choices: tuple[str, ...] = ()
    correct_choice: int = 0
    answers: tuple[str, ...] = ()
    pattern: str | None = None

    @property
    def example_answer(self) -> str | None:
        """Its answer as a few-shot example; None where it has only a pattern."""
        if self.choices:
            return self.choices[self.correct_choice]
        return self.answers[0] if self.answers else None


@dataclass(frozen=True)
class QuestionTask:
    """The questions of a file: all with choices, or none."""

    path: Path
    questions: tuple[Question, ...]

    @property
    def name(self) -> str:
        return self.path.stem


def load_task(path: str | Path) -> QuestionTask:
    """The task of a file.

    Raises UserError, with file and record, for one that is not as described above.
    """
    questions = [
        _parse_question(record, number, where)
        for number, (where, record) in enumerate(read_records(path), start=1)
    ]
    if not questions:
        raise UserError(f"{path}: no questions; give one JSON object per line")
    for each in questions:
        if bool(each.choices) != bool(questions[0].choices):
            words = f"record 1 has no choices and record {each.record} has some"
            if questions[0].choices:
                words = f"record 1 has choices and record {each.record} has none"
            raise UserError(f"{path}: {words}; put them in two files")
    return QuestionTask(Path(path), tuple(questions))


def load_texts(path: str | Path) -> list[str]:
    """The questions of a file and their answers, unchanged.

    Raises UserError as `load_task` does.
    """
    texts = []
    for question, (_, record) in zip(load_task(path).questions, read_records(path), strict=True):
        prompt = str(record.get("question", record.get("prompt")))
        texts += [prompt, *question.choices, *question.answers]
    return texts


class _Record(BaseModel, strict=True):
    """A record of a file of questions."""

    question: str | None = None
    prompt: str | None = None
    choices: (
        Annotated[
            tuple[Annotated[str, Field(min_length=1)], ...], Field(min_length=2, strict=False)
        ]
        | None
    ) = None
    answer: str | int | None = None
    answers: Annotated[tuple[str, ...], Field(strict=False)] = ()
    pattern: str | None = None


def _parse_question(content: dict[str, Any], number: int, where: str) -> Question:
    record = check_content(content, _Record, where)
    if (record.question is None) == (record.prompt is None):
        raise UserError(f'{where}: expected either a "question" or a "prompt"')
    prompt = record.prompt if record.prompt is not None else f"Question: {record.question}\nAnswer:"
    if record.choices is not None:
        correct = _parse_correct_choice(record.answer, record.choices, where)
        return Question(number, prompt, record.choices, correct)
    if record.pattern is not None:
        compile_pattern(record.pattern, f"{where}: pattern")
    if isinstance(record.answer, int):
        raise UserError(f'{where}: "answer" is not text: {record.answer}')
    answers = record.answers
    if not answers and record.answer is not None:
        answers = (record.answer,)
    if not answers and record.pattern is None:
        raise UserError(
            f'{where}: nothing to compare with; give "answer", "answers", "pattern" or "choices"'
        )
    return Question(number, prompt, answers=answers, pattern=record.pattern)


def _parse_correct_choice(answer: Any, choices: tuple[str, ...], where: str) -> int:
    if isinstance(answer, str) and answer in choices:
        return choices.index(answer)
    letters = LETTERS[: len(choices)]
    if isinstance(answer, str) and len(answer) == 1 and answer in letters:
        return letters.index(answer)
    if isinstance(answer, int) and 0 <= answer < len(choices):
        return answer
    raise UserError(
        f'{where}: "answer" is {json.dumps(answer)}, which is none of its {len(choices)} choices'
    )
