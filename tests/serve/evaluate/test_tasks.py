"""Tasks from JSON lines: scores agree with a computation from the model's logits, on any number of
ranks.
"""

import json
import math
import re
import statistics
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lmforge.cli import run as command
from lmforge.core.distributed.distributed import DistributedContext
from lmforge.core.distributed.rank_info import RankInfo
from lmforge.core.errors import UserError
from lmforge.core.options.options import parse_options
from lmforge.serve.decoding.engine import generate
from lmforge.serve.decoding.model_loading import LoadedModel, load_model
from lmforge.serve.decoding.sampling import SamplingParams
from lmforge.serve.evaluate.tasks import TaskSettings, check_task, run_task
from lmforge.serve.options.models import EvaluateOptions
from lmforge.text.questions import load_task
from tests.conftest import Refusal
from tests.support.preloaded import preloaded

CPU = torch.device("cpu")
ALONE = DistributedContext(RankInfo(), CPU, None)
CHOICES = [
    {
        "question": "Who speaks?",
        "choices": ["the king", "a very long answer that nobody would give", "x"],
        "answer": 0,
    },
    {
        "prompt": "First Citizen:\n",
        "choices": ["Before we proceed", "zzzz qqqq"],
        "answer": "Before we proceed",
    },
    {"prompt": "What is", "choices": ["it", "the matter", "7"], "answer": "B"},
    {"prompt": "", "choices": ["The", "zq"], "answer": 1, "more": "is passed over"},
]
WRITTEN = [
    {"prompt": "The king", "answer": "nobody says this"},
    {"prompt": "My lord,", "answers": ["neither", "nor"], "pattern": "[a-z]"},
    {"question": "Who are you?", "pattern": r"\d{9}"},
]


@pytest.fixture(scope="module")
def opened(tiny_run: Path) -> LoadedModel:
    return load_model(tiny_run, CPU, torch.float32)


def task_file(folder: Path, lines: list[dict[str, Any]], name: str = "task") -> Path:
    path = folder / f"{name}.jsonl"
    path.write_text("\n".join(json.dumps(line) for line in lines) + "\n\n")
    return path


def log_probability(opened: LoadedModel, before: list[int], after: list[int]) -> float:
    """Of tokens after others, from the logits of one row without padding."""
    tokens = torch.tensor([[*before, *after]])
    positions = torch.arange(tokens.shape[1])[None]
    with torch.no_grad():
        logits = opened.model.lm_head(
            opened.model(tokens, positions, torch.zeros_like(tokens).int())
        )
    logs = logits.double().log_softmax(-1)[0]
    return sum(float(logs[len(before) + place - 1, token]) for place, token in enumerate(after))


def test_the_choice_is_the_likeliest_continuation_by_the_logits(
    opened: LoadedModel, tmp_path: Path
) -> None:
    result = run_task(
        load_task(task_file(tmp_path, CHOICES)), opened, ALONE, TaskSettings(batch_size=3)
    )
    encode, right = opened.tokenizer.encode, [0, 0, 1, 1]
    prompts = ["Question: Who speaks?\nAnswer:", "First Citizen:\n", "What is", ""]
    plain, normalised, bits = [], [], []
    for number, (prompt, line) in enumerate(zip(prompts, CHOICES, strict=True)):
        kept = prompt.rstrip()
        logs = []
        for choice in line["choices"]:
            joined = (
                f"{prompt}{choice}" if prompt in ("", "First Citizen:\n") else f"{prompt} {choice}"
            )
            before = encode(kept) or [opened.tokenizer.eos_token_id]
            logs.append(log_probability(opened, before, encode(joined)[len(encode(kept)) :]))
        # fp32, and rows padded to the longest of a batch.
        assert result["answers"][number]["logprobs"] == pytest.approx(logs, rel=1e-5)
        plain.append(logs.index(max(logs)) == right[number])
        by_length = [log / len(choice) for log, choice in zip(logs, line["choices"], strict=True)]
        normalised.append(by_length.index(max(by_length)) == right[number])
        bits.append(
            -logs[right[number]] / math.log(2) / len(line["choices"][right[number]].encode())
        )
    mean = sum(plain) / 4
    bits_per_byte = pytest.approx(sum(bits) / 4, rel=1e-5)
    assert result["metrics"] == {
        "acc": mean,
        "acc_norm": sum(normalised) / 4,
        "bits_per_byte": bits_per_byte,
    }
    assert result["standard_errors"]["acc"] == pytest.approx(math.sqrt(mean * (1 - mean) / 3))
    assert result["standard_errors"]["bits_per_byte"] == pytest.approx(
        statistics.stdev(bits) / 2, rel=1e-4
    )
    assert [answer["correct_choice"] for answer in result["answers"]] == right


def test_written_answers_are_compared_with_texts_and_patterns(
    opened: LoadedModel, tmp_path: Path
) -> None:
    [first] = generate(
        opened.model,
        opened.tokenizer,
        ["The king"],
        max_tokens=9,
        sampling=SamplingParams(0.0),
        seed=0,
        stop_strings=["\n"],
        prefix_ids=opened.prefix_ids,
        stop_token_ids=opened.stop_token_ids,
    )
    lines = [{"prompt": "The king", "answers": ["never", f"  {first.text} "]}, *WRITTEN]
    result = run_task(
        load_task(task_file(tmp_path, lines)), opened, ALONE, TaskSettings(max_tokens=9)
    )
    answers = result["answers"]
    assert answers[0]["text"] == answers[1]["text"] == first.text
    assert answers[0]["scores"] == {"exact_match": True, "contains": True}
    assert answers[1]["scores"] == {"exact_match": False, "contains": False}
    assert answers[2]["scores"]["regex"] is (re.search("[a-z]", answers[2]["text"]) is not None)
    assert answers[3]["scores"] == {"regex": False}
    # Each metric is over the questions that it is for.
    assert result["metrics"]["exact_match"] == pytest.approx(1 / 3)
    assert result["metrics"]["regex"] == 0.5 * answers[2]["scores"]["regex"]
    assert result["questions"] == 4


def test_fewshot_examples_are_the_first_other_questions_with_their_answers(
    opened: LoadedModel, tmp_path: Path
) -> None:
    task = load_task(task_file(tmp_path, CHOICES))
    shown = [
        "Question: Who speaks?\nAnswer: the king\n\n",
        "First Citizen:\nBefore we proceed\n\n",
        "What is the matter\n\n",
    ]
    by_hand = [
        {
            "prompt": "".join(shown[1:]) + "Question: Who speaks?\nAnswer:",
            "choices": CHOICES[0]["choices"],
            "answer": 0,
        },
        {"prompt": shown[0] + shown[1] + "", "choices": CHOICES[3]["choices"], "answer": 1},
    ]
    expected = run_task(
        load_task(task_file(tmp_path, by_hand, "by_hand")), opened, ALONE, TaskSettings()
    )["answers"]
    result = run_task(task, opened, ALONE, TaskSettings(num_fewshot=2))["answers"]
    for mine, theirs in ((result[0], expected[0]), (result[3], expected[1])):
        assert mine["logprobs"] == pytest.approx(theirs["logprobs"], rel=1e-5)
    # From another file, whose questions are none of these: all from the first.
    other = load_task(task_file(tmp_path, CHOICES, "other"))
    [last] = run_task(
        task, opened, ALONE, TaskSettings(num_fewshot=2, fewshot_task=other, limit=4)
    )["answers"][3:]
    assert last["logprobs"] == pytest.approx(expected[1]["logprobs"], rel=1e-5)
    assert len(run_task(task, opened, ALONE, TaskSettings(limit=2))["answers"]) == 2


def on_ranks(count: int, work: Any) -> list[Any]:
    """The results of `work(dist_ctx)` on `count` ranks, each a thread: real ones would take a
    process each.
    """
    gate, values, results = threading.Barrier(count), [None] * count, [None] * count

    class Thread(DistributedContext):
        def all_gather(self, value: Any) -> list[Any]:
            values[self.rank_info.rank] = value
            gate.wait()
            everyone = list(values)
            gate.wait()  # or the next value may come before a slow one has looked
            return everyone

    def one(rank: int) -> None:
        results[rank] = work(Thread(RankInfo(rank, count, rank, count), CPU, None))

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


@pytest.mark.parametrize("lines", [CHOICES, WRITTEN], ids=["choices", "written"])
def test_any_number_of_ranks_gives_the_same_to_the_last_bit(
    opened: LoadedModel, tmp_path: Path, lines: list[dict[str, Any]]
) -> None:
    task = load_task(task_file(tmp_path, lines))
    settings = TaskSettings(batch_size=2, max_tokens=6)
    alone = run_task(task, opened, ALONE, settings)
    for count in (2, 5):
        for result in on_ranks(count, lambda dist_ctx: run_task(task, opened, dist_ctx, settings)):
            assert result == alone


@pytest.mark.parametrize("lines", [CHOICES, WRITTEN], ids=["choices", "written"])
def test_on_batch_is_called_for_each_batch_of_a_rank(
    opened: LoadedModel, tmp_path: Path, lines: list[dict[str, Any]]
) -> None:
    task = load_task(task_file(tmp_path, lines))
    sequences = sum(len(line.get("choices", [0])) for line in lines)

    def batches(dist_ctx: DistributedContext) -> int:
        calls: list[int] = []
        run_task(
            task,
            opened,
            dist_ctx,
            TaskSettings(batch_size=1, max_tokens=6, on_batch=lambda: calls.append(0)),
        )
        return len(calls)

    assert on_ranks(2, batches) == [-(-sequences // 2), sequences // 2]


@pytest.mark.parametrize("lines", [CHOICES, WRITTEN[:2]], ids=["choices", "written"])
def test_check_task_finds_the_longest_prompt_without_a_model(
    opened: LoadedModel, tmp_path: Path, lines: list[dict[str, Any]]
) -> None:
    """As many tokens as the longest prompt and answer take are enough, and give the scores of more;
    one less is refused.
    """
    task = load_task(task_file(tmp_path, lines))
    config, settings = opened.config, TaskSettings(num_fewshot=1, max_tokens=6)
    longest = check_task(task, opened.tokenizer, config, opened.prefix_ids, settings)
    enough = replace(config, max_position_embeddings=longest)
    assert check_task(task, opened.tokenizer, enough, opened.prefix_ids, settings) == longest
    scores = run_task(task, opened, ALONE, settings)
    assert isinstance(opened, LoadedModel)
    assert run_task(task, replace(opened, config=enough), ALONE, settings) == scores
    fewer = replace(config, max_position_embeddings=longest - 1)
    with pytest.raises(
        UserError, match=rf"record \d: .* take {longest} tokens, .* reads at most {longest - 1};"
    ):
        check_task(task, opened.tokenizer, fewer, opened.prefix_ids, settings)


def test_a_context_longer_than_the_model_reads_loses_its_beginning_and_is_counted(
    opened: LoadedModel, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    longest = opened.config.max_position_embeddings
    line = {"prompt": "word " * longest, "choices": ["a", "b b b"], "answer": 0}
    short = line | {"prompt": "word"}
    answer, _ = run_task(
        load_task(task_file(tmp_path, [line, short])), opened, ALONE, TaskSettings()
    )["answers"]
    assert all(logprob < 0 for logprob in answer["logprobs"])
    reason = (
        f"prompts with an answer are longer than the {longest:,} tokens that the model reads: the"
        " beginning was cut off"
    )
    assert capsys.readouterr().err == f"lmforge: 2 of 4 {reason}\n"
    fitting = opened.tokenizer.decode(opened.tokenizer.encode("a" * longest)[: longest - 3])
    lines = [{"prompt": prompt, "answer": "b"} for prompt in ("word " * longest, "word", fitting)]
    answer, _, _ = run_task(
        load_task(task_file(tmp_path, lines)), opened, ALONE, TaskSettings(max_tokens=3)
    )["answers"]
    assert answer["text"]
    assert capsys.readouterr().err == f"lmforge: 1 of 3 {reason}\n"


def test_a_truncated_context_is_not_tokenized_again(opened: LoadedModel, tmp_path: Path) -> None:
    """Half of a character, at which the cut may fall, is three when it is decoded and encoded
    again.
    """
    longest, character = opened.config.max_position_embeddings, "\N{CJK UNIFIED IDEOGRAPH-6F22}"
    assert len(opened.tokenizer.encode(character)) == 3
    lines = [{"prompt": "a" * shift + character * longest, "answer": "b"} for shift in range(3)]
    answers = run_task(
        load_task(task_file(tmp_path, lines)), opened, ALONE, TaskSettings(max_tokens=3)
    )["answers"]
    options: dict[str, Any] = {
        "max_tokens": 3,
        "sampling": SamplingParams(0.0),
        "seed": 0,
        "stop_strings": ["\n"],
    }
    options |= {"prefix_ids": opened.prefix_ids, "stop_token_ids": opened.stop_token_ids}
    for answer, line in zip(answers, lines, strict=True):
        ids = opened.tokenizer.encode(line["prompt"])[-(longest - 3) :]
        [alone] = generate(opened.model, opened.tokenizer, [ids], **options)
        assert answer["text"] == alone.text


def test_a_choice_longer_than_the_model_reads_is_a_user_error(
    opened: LoadedModel, tmp_path: Path
) -> None:
    line = {
        "prompt": "a",
        "choices": ["b", "word " * opened.config.max_position_embeddings],
        "answer": 0,
    }
    with pytest.raises(
        UserError, match=r"a choice has \d+ tokens, and the model reads at most \d+"
    ):
        run_task(load_task(task_file(tmp_path, [line])), opened, ALONE, TaskSettings())


def test_only_a_newline_ends_a_line_of_json(tmp_path: Path) -> None:
    text = "one\u2028two\x85three"
    (tmp_path / "a.jsonl").write_text(
        json.dumps({"prompt": text, "answer": "b"}, ensure_ascii=False) + "\r\n"
    )
    assert [item.prompt for item in load_task(tmp_path / "a.jsonl").questions] == [text]


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (
            ["--tasks", "a.jsonl", "--sequences", "3"],
            "--sequences: only with the loss on documents",
        ),
        (["--lm_eval", "a", "--data", "b"], "--data: only with the loss on documents"),
        (["--limit", "3"], "--limit: only with --tasks or --lm_eval"),
        (["--lm_eval", "a", "--stop", "b"], "--stop: only with --tasks"),
        (["--answers", "a.jsonl"], "--answers: only with --tasks, and not with --lm_eval"),
        (
            ["--tasks", "a", "--lm_eval", "b", "--answers", "c"],
            "--answers: only with --tasks, and not with --lm_eval",
        ),
        (
            ["--tasks", "a", "--lm_eval_include_path", "b"],
            "--lm_eval_include_path: only with --lm_eval",
        ),
    ],
)
def test_options_that_do_not_go_together_are_refused(words: list[str], complaint: str) -> None:
    with pytest.raises(UserError, match=complaint):
        parse_options(EvaluateOptions, ["runs/none", *words])


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", ":2: not valid JSON: "),
        ("[1]", ":2: expected an object, got [1]"),
        ('{"answer": "a"}', 'record 2: expected either a "question" or a "prompt"'),
        ('{"prompt": "a", "question": "b", "answer": "c"}', "record 2: expected either"),
        ('{"prompt": 3, "answer": "c"}', "record 2: prompt: expected text, got 3"),
        ('{"prompt": "a"}', "record 2: nothing to compare with"),
        ('{"prompt": "a", "answer": 3}', 'record 2: "answer" is not text: 3'),
        ('{"prompt": "a", "answers": [3]}', "record 2: answers[0]: expected text, got 3"),
        ('{"prompt": "a", "pattern": "("}', "record 2: pattern: not a regular expression: ("),
        (
            '{"prompt": "a", "pattern": "x{99999999999}"}',
            "record 2: pattern: not a regular expression: x{99999999999} (",
        ),
        ('{"prompt": "a", "pattern": ["a"]}', 'record 2: pattern: expected text, got ["a"]'),
        (
            '{"prompt": "a", "choices": ["b"], "answer": 0}',
            "record 2: choices: Tuple should have at least 2 items",
        ),
        (
            '{"prompt": "a", "choices": ["b", "c"], "answer": 2}',
            'record 2: "answer" is 2, which is none of its 2 choices',
        ),
        ('{"prompt": "a", "choices": ["b", "c"]}', 'record 2: "answer" is null'),
        (
            '{"prompt": "a", "choices": ["b", "c"], "answer": 0}',
            "record 1 has no choices and record 2 has some",
        ),
    ],
)
def test_the_error_of_a_bad_record_has_its_number(line: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(f'{{"prompt": "a", "answer": "b"}}\n{line}\n')
    with pytest.raises(UserError, match=rf"bad\.jsonl.*{re.escape(message)}"):
        load_task(path)


def test_files_without_questions_and_unusable_examples_are_refused(
    opened: LoadedModel, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match="no such file or folder"):
        load_task(tmp_path / "none.jsonl")
    with pytest.raises(UserError, match="no questions"):
        load_task(task_file(tmp_path, []))
    task = load_task(task_file(tmp_path, WRITTEN))
    with pytest.raises(UserError, match="2 questions to show as examples, and 3 were requested"):
        run_task(task, opened, ALONE, TaskSettings(num_fewshot=3))
    with pytest.raises(UserError, match="record 3: an example needs an answer"):
        run_task(task, opened, ALONE, TaskSettings(num_fewshot=2))


def test_several_processes_print_the_scores_of_one_process_once(
    tiny_run: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    files = [task_file(tmp_path, CHOICES, "chosen"), task_file(tmp_path, WRITTEN, "written")]
    words = [
        "evaluate",
        str(tiny_run),
        "--tasks",
        *map(str, files),
        "--max_tokens",
        "5",
        "--device",
        "cpu",
        "--output",
        "json",
    ]
    words += ["--batch_size", "2", "--answers"]
    assert command([*words, str(tmp_path / "a.jsonl")]) == 0
    one_process = json.loads(capfd.readouterr().out)
    several = preloaded().run([*words, str(tmp_path / "b.jsonl")], tmp_path, ranks=2)
    assert several.returncode == 0, several.stderr
    # Other thread counts, other sums.
    for one, other in zip(one_process, json.loads(several.stdout), strict=True):
        for numbers in ("metrics", "standard_errors"):
            assert other.pop(numbers) == pytest.approx(one.pop(numbers), rel=1e-5)
        assert one == other
    first, again = (
        [json.loads(line) for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()]
        for name in "ab"
    )
    for one, other in zip(first, again, strict=True):
        assert other.pop("logprobs", []) == pytest.approx(one.pop("logprobs", []), rel=1e-5)
        assert other.pop("scores", {}) == pytest.approx(one.pop("scores", {}), rel=1e-5)
        assert one == other
    refused = preloaded().run([*words, str(tmp_path / "b.jsonl")], tmp_path, ranks=2)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert refused.stderr.count("b.jsonl: exists already") == 1


def test_evaluate_prints_the_scores_of_several_files_and_writes_the_answers(
    tiny_run: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], refused: Refusal
) -> None:
    def evaluate(*words: object) -> str:
        assert command(["evaluate", *map(str, words)]) == 0
        return capfd.readouterr().out

    files = [task_file(tmp_path, CHOICES, "chosen"), task_file(tmp_path, WRITTEN, "written")]
    common = ["--answers", tmp_path / "answers.jsonl", "--max_tokens", 5, "--device", "cpu"]
    results = json.loads(evaluate(tiny_run, "--tasks", *files, "--output", "json", *common))
    assert [(result["task"], result["questions"]) for result in results] == [
        ("chosen", 4),
        ("written", 3),
    ]
    assert results[0]["metrics"].keys() == {"acc", "acc_norm", "bits_per_byte"}
    answers = [json.loads(line) for line in (tmp_path / "answers.jsonl").read_text().splitlines()]
    assert [(each["task"], each["record"]) for each in answers] == [
        *[("chosen", record) for record in range(1, 5)],
        *[("written", record) for record in range(1, 4)],
    ]
    assert "acc_norm" in evaluate(tiny_run, "--tasks", files[0], "--device", "cpu")
    again = refused("evaluate", tmp_path / "no model", "--tasks", *files, *common)
    assert again == f"{tmp_path}/answers.jsonl: exists already; name another file"
    assert len((tmp_path / "answers.jsonl").read_text().splitlines()) == 7
    refused(
        "evaluate", tmp_path / "no model", "--tasks", *files, "--answers", tmp_path / "more.jsonl"
    )
    assert not (tmp_path / "more.jsonl").exists()
    assert "none.jsonl: no such file or folder" in refused(
        "evaluate", tiny_run, "--tasks", tmp_path / "none.jsonl"
    )
