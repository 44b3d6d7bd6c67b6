"""Tasks from JSON lines: scored as arithmetic on the model's own logits has it, on any number of ranks."""

import json
import math
import re
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lmforge.cluster.distributed import DistributedContext
from lmforge.cluster.rank_info import RankInfo
from lmforge.config.options import parse_options
from lmforge.config.verbs import EvaluateOptions
from lmforge.errors import UserError
from lmforge.evaluate.likelihood import ModelWithTokenizer
from lmforge.evaluate.tasks import check_task, load_task, run_task
from lmforge.generate.engine import generate
from lmforge.generate.model_loading import LoadedModel, load_model
from lmforge.generate.sampling import SamplingParams
from tests.conftest import Command

CPU = torch.device("cpu")
ALONE = DistributedContext(RankInfo(), CPU, None)
CHOICES = [
    {"question": "Who speaks?", "choices": ["the king", "a very long answer that nobody would give", "x"], "answer": 0},
    {"prompt": "First Citizen:\n", "choices": ["Before we proceed", "zzzz qqqq"], "answer": "Before we proceed"},
    {"prompt": "What is", "choices": ["it", "the matter", "7"], "answer": "B"},
    {"prompt": "", "choices": ["The", "zq"], "answer": 1, "more": "is passed over"},
]
WRITTEN = [
    {"prompt": "The king", "answer": "nobody says this"},
    {"prompt": "My lord,", "answers": ["neither", "nor"], "pattern": "[a-z]"},
    {"question": "Who are you?", "pattern": r"\d{9}"},
]


@pytest.fixture(scope="module")
def opened(tiny_run: Path) -> ModelWithTokenizer:
    return load_model(tiny_run, CPU, torch.float32)


def task_file(folder: Path, lines: list[dict[str, Any]], name: str = "task") -> Path:
    path = folder / f"{name}.jsonl"
    path.write_text("\n".join(json.dumps(line) for line in lines) + "\n\n")
    return path


def log_probability(opened: ModelWithTokenizer, before: list[int], after: list[int]) -> float:
    """Of tokens after others, from the logits of one row without padding."""
    tokens = torch.tensor([[*before, *after]])
    positions = torch.arange(tokens.shape[1])[None]
    with torch.no_grad():
        logits = opened.model.lm_head(opened.model(tokens, positions, torch.zeros_like(tokens).int()))
    logs = logits.double().log_softmax(-1)[0]
    return sum(float(logs[len(before) + place - 1, token]) for place, token in enumerate(after))


def test_a_choice_is_the_likeliest_continuation_by_the_models_own_logits(opened: ModelWithTokenizer, tmp_path: Path) -> None:
    result = run_task(load_task(task_file(tmp_path, CHOICES)), opened, ALONE, batch_size=3)
    encode, right = opened.tokenizer.encode, [0, 0, 1, 1]
    prompts = ["Question: Who speaks?\nAnswer:", "First Citizen:\n", "What is", ""]
    plain, normalised = [], []
    for number, (prompt, line) in enumerate(zip(prompts, CHOICES, strict=True)):
        kept = prompt.rstrip()
        logs = []
        for choice in line["choices"]:
            joined = f"{prompt}{choice}" if prompt in ("", "First Citizen:\n") else f"{prompt} {choice}"
            before = encode(kept) or [opened.tokenizer.eos_token_id]
            logs.append(log_probability(opened, before, encode(joined)[len(encode(kept)) :]))
        # fp32, and rows padded to the longest of a batch.
        assert result["answered"][number]["log_probabilities"] == pytest.approx(logs, rel=1e-5)
        plain.append(logs.index(max(logs)) == right[number])
        by_length = [log / len(choice) for log, choice in zip(logs, line["choices"], strict=True)]
        normalised.append(by_length.index(max(by_length)) == right[number])
    mean = sum(plain) / 4
    assert result["metrics"] == {"accuracy": mean, "accuracy_normalised": sum(normalised) / 4}
    assert result["standard_errors"]["accuracy"] == pytest.approx(math.sqrt(mean * (1 - mean) / 3))
    assert [told["right"] for told in result["answered"]] == right


def test_written_answers_are_compared_as_texts_and_by_pattern(opened: ModelWithTokenizer, tmp_path: Path) -> None:
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
    result = run_task(load_task(task_file(tmp_path, lines)), opened, ALONE, max_tokens=9)
    told = result["answered"]
    assert told[0]["text"] == told[1]["text"] == first.text
    assert told[0]["scores"] == {"exact_match": True, "contains": True}
    assert told[1]["scores"] == {"exact_match": False, "contains": False}
    assert told[2]["scores"]["regex"] is (re.search("[a-z]", told[2]["text"]) is not None)
    assert told[3]["scores"] == {"regex": False}
    # Each metric is over the questions that it is for.
    assert result["metrics"]["exact_match"] == pytest.approx(1 / 3)
    assert result["metrics"]["regex"] == 0.5 * told[2]["scores"]["regex"]
    assert result["questions"] == 4


def test_examples_are_the_first_others_with_their_answers(opened: ModelWithTokenizer, tmp_path: Path) -> None:
    task = load_task(task_file(tmp_path, CHOICES))
    shown = ["Question: Who speaks?\nAnswer: the king\n\n", "First Citizen:\nBefore we proceed\n\n", "What is the matter\n\n"]
    by_hand = [
        {"prompt": "".join(shown[1:]) + "Question: Who speaks?\nAnswer:", "choices": CHOICES[0]["choices"], "answer": 0},
        {"prompt": shown[0] + shown[1] + "", "choices": CHOICES[3]["choices"], "answer": 1},
    ]
    expected = run_task(load_task(task_file(tmp_path, by_hand, "by_hand")), opened, ALONE)["answered"]
    found = run_task(task, opened, ALONE, num_fewshot=2)["answered"]
    for mine, theirs in ((found[0], expected[0]), (found[3], expected[1])):
        assert mine["log_probabilities"] == pytest.approx(theirs["log_probabilities"], rel=1e-5)
    # From another file, whose questions are none of these: all from the first.
    other = load_task(task_file(tmp_path, CHOICES, "other"))
    [last] = run_task(task, opened, ALONE, num_fewshot=2, fewshot_task=other, limit=4)["answered"][3:]
    assert last["log_probabilities"] == pytest.approx(expected[1]["log_probabilities"], rel=1e-5)
    assert len(run_task(task, opened, ALONE, limit=2)["answered"]) == 2


def on_ranks(count: int, work: Any) -> list[Any]:
    """What `work(ranks)` gives on each of `count` ranks: real ones would take a process each."""
    gate, brought, results = threading.Barrier(count), [None] * count, [None] * count

    class Thread(DistributedContext):
        def gather(self, value: Any) -> list[Any]:
            brought[self.rank_info.rank] = value
            gate.wait()
            everyone = list(brought)
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
    opened: ModelWithTokenizer, tmp_path: Path, lines: list[dict[str, Any]]
) -> None:
    task = load_task(task_file(tmp_path, lines))
    alone = run_task(task, opened, ALONE, batch_size=2, max_tokens=6)
    for count in (2, 5):
        for result in on_ranks(count, lambda ranks: run_task(task, opened, ranks, batch_size=2, max_tokens=6)):
            assert result == alone


@pytest.mark.parametrize("lines", [CHOICES, WRITTEN], ids=["choices", "written"])
def test_each_batch_of_a_rank_is_heard_of(opened: ModelWithTokenizer, tmp_path: Path, lines: list[dict[str, Any]]) -> None:
    task = load_task(task_file(tmp_path, lines))
    rows = sum(len(line.get("choices", [0])) for line in lines)

    def batches(ranks: DistributedContext) -> int:
        heard: list[int] = []
        run_task(task, opened, ranks, batch_size=1, max_tokens=6, on_batch=lambda: heard.append(0))
        return len(heard)

    assert on_ranks(2, batches) == [-(-rows // 2), rows // 2]


@pytest.mark.parametrize("lines", [CHOICES, WRITTEN[:2]], ids=["choices", "written"])
def test_what_fits_is_found_before_there_is_a_model(
    opened: ModelWithTokenizer, tmp_path: Path, lines: list[dict[str, Any]]
) -> None:
    """As many tokens as the longest prompt and answer take are enough, and give the scores of more; one less is refused."""
    task = load_task(task_file(tmp_path, lines))
    config, about = opened.config, {"few_shot": 1, "max_tokens": 6}
    longest = check_task(task, opened.tokenizer, config, opened.prefix_ids, **about)
    enough = replace(config, max_position_embeddings=longest)
    assert check_task(task, opened.tokenizer, enough, opened.prefix_ids, **about) == longest
    scores = run_task(task, opened, ALONE, **about)
    assert isinstance(opened, LoadedModel)
    assert run_task(task, replace(opened, config=enough), ALONE, **about) == scores
    fewer = replace(config, max_position_embeddings=longest - 1)
    with pytest.raises(UserError, match=rf"line \d: prompt and answer take {longest} tokens, .* reads at most {longest - 1};"):
        check_task(task, opened.tokenizer, fewer, opened.prefix_ids, **about)


def test_a_context_longer_than_the_model_reads_loses_its_beginning(opened: ModelWithTokenizer, tmp_path: Path) -> None:
    longest = opened.config.max_position_embeddings
    line = {"prompt": "word " * longest, "choices": ["a", "b b b"], "answer": 0}
    [told] = run_task(load_task(task_file(tmp_path, [line])), opened, ALONE)["answered"]
    assert all(log < 0 for log in told["log_probabilities"])
    [told] = run_task(
        load_task(task_file(tmp_path, [{"prompt": "word " * longest, "answer": "b"}])), opened, ALONE, max_tokens=3
    )["answered"]
    assert told["text"]


def test_a_context_that_is_cut_is_not_cut_into_tokens_anew(opened: ModelWithTokenizer, tmp_path: Path) -> None:
    """Half of a character, at which the cut may fall, is three when it is decoded and encoded again."""
    longest, character = opened.config.max_position_embeddings, "\N{CJK UNIFIED IDEOGRAPH-6F22}"
    assert len(opened.tokenizer.encode(character)) == 3
    lines = [{"prompt": "a" * shift + character * longest, "answer": "b"} for shift in range(3)]
    answered = run_task(load_task(task_file(tmp_path, lines)), opened, ALONE, max_tokens=3)["answered"]
    for told, line in zip(answered, lines, strict=True):
        ids = opened.tokenizer.encode(line["prompt"])[-(longest - 3) :]
        about: dict[str, Any] = {"sampling": SamplingParams(0.0), "seed": 0, "stop": ["\n"], "ends": opened.stop_token_ids}
        [alone] = generate(opened.model, opened.tokenizer, [ids], max_tokens=3, prefix_ids=opened.prefix_ids, **about)
        assert told["text"] == alone.text


def test_a_choice_longer_than_the_model_reads_is_a_mistake(opened: ModelWithTokenizer, tmp_path: Path) -> None:
    line = {"prompt": "a", "choices": ["b", "word " * opened.config.max_position_embeddings], "answer": 0}
    with pytest.raises(UserError, match=r"a choice has \d+ tokens, and the model reads at most \d+ in a row"):
        run_task(load_task(task_file(tmp_path, [line])), opened, ALONE)


def test_a_line_ends_where_json_lines_end(tmp_path: Path) -> None:
    text = "one\u2028two\x85three"
    (tmp_path / "a.jsonl").write_text(json.dumps({"prompt": text, "answer": "b"}, ensure_ascii=False) + "\r\n")
    assert [item.prompt for item in load_task(tmp_path / "a.jsonl").questions] == [text]


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--tasks", "a.jsonl", "--rows", "3"], "--rows: of the loss on documents"),
        (["--lm_eval", "a", "--data", "b"], "--data: of the loss on documents"),
        (["--limit", "3"], "--limit: only with --tasks or --lm_eval"),
        (["--lm_eval", "a", "--stop", "b"], "--stop: only with --tasks"),
        (["--answers", "a.jsonl"], "--answers: only with --tasks, and not with --lm_eval"),
        (["--tasks", "a", "--lm_eval", "b", "--answers", "c"], "--answers: only with --tasks, and not with --lm_eval"),
        (["--tasks", "a", "--lm_eval_include_path", "b"], "--lm_eval_include_path: only with --lm_eval"),
    ],
)
def test_options_that_do_not_go_together_are_refused(words: list[str], complaint: str) -> None:
    with pytest.raises(UserError, match=complaint):
        parse_options(EvaluateOptions, ["runs/none", *words])


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("{", "line 2: not valid JSON"),
        ("[1]", "line 2: expected an object, got list"),
        ('{"answer": "a"}', 'line 2: expected either a "question" or a "prompt"'),
        ('{"prompt": "a", "question": "b", "answer": "c"}', "line 2: expected either"),
        ('{"prompt": 3, "answer": "c"}', "line 2: its question or prompt is no text"),
        ('{"prompt": "a"}', "line 2: has nothing to compare with"),
        ('{"prompt": "a", "answer": 3}', 'line 2: "answer" is no text: 3'),
        ('{"prompt": "a", "answers": [3]}', 'line 2: "answers" is not texts'),
        ('{"prompt": "a", "pattern": "("}', 'line 2: "pattern" is no regular expression'),
        ('{"prompt": "a", "choices": ["b"], "answer": 0}', 'line 2: "choices" needs two or more'),
        ('{"prompt": "a", "choices": ["b", "c"], "answer": 2}', 'line 2: "answer" is 2, which is none of its 2 choices'),
        ('{"prompt": "a", "choices": ["b", "c"]}', 'line 2: "answer" is null'),
        ('{"prompt": "a", "choices": ["b", "c"], "answer": 0}', "line 1 has no choices and line 2 has some"),
    ],
)
def test_a_bad_line_is_told_with_its_number(line: str, told: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(f'{{"prompt": "a", "answer": "b"}}\n{line}\n')
    with pytest.raises(UserError, match=rf"bad\.jsonl: .*{re.escape(told)}"):
        load_task(path)


def test_files_without_questions_and_examples_that_cannot_be_shown_are_told(opened: ModelWithTokenizer, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be read"):
        load_task(tmp_path / "none.jsonl")
    with pytest.raises(UserError, match="holds no questions"):
        load_task(task_file(tmp_path, []))
    task = load_task(task_file(tmp_path, WRITTEN))
    with pytest.raises(UserError, match="has 2 questions to show as examples, and 3 were asked for"):
        run_task(task, opened, ALONE, num_fewshot=3)
    with pytest.raises(UserError, match="line 3: an example needs an answer"):
        run_task(task, opened, ALONE, num_fewshot=2)


def test_several_processes_print_once_what_one_finds(lmforge: Command, tiny_run: Path, tmp_path: Path) -> None:
    files = [task_file(tmp_path, CHOICES, "chosen"), task_file(tmp_path, WRITTEN, "written")]
    words = ["evaluate", tiny_run, "--tasks", *files, "--max_tokens", 5, "--device", "cpu", "--output", "json"]
    alone = lmforge(*words, "--answers", tmp_path / "a.jsonl", "--batch_size", 2)
    shared = lmforge(*words, "--answers", tmp_path / "b.jsonl", "--batch_size", 2, "--processes", 2)
    assert (alone.returncode, shared.returncode) == (0, 0), shared.stderr
    assert json.loads(shared.stdout) == json.loads(alone.stdout)
    # Other thread counts, other sums.
    told, again = ([json.loads(line) for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()] for name in "ab")
    for one, other in zip(told, again, strict=True):
        assert other.pop("log_probabilities", []) == pytest.approx(one.pop("log_probabilities", []), rel=1e-5)
        assert one == other
    refused = lmforge(*words, "--answers", tmp_path / "b.jsonl", "--processes", 2)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "b.jsonl: is there already" in refused.stderr


def test_the_verb_prints_scores_of_several_files_and_writes_what_was_answered(
    lmforge: Command, tiny_run: Path, tmp_path: Path
) -> None:
    files = [task_file(tmp_path, CHOICES, "chosen"), task_file(tmp_path, WRITTEN, "written")]
    common = ["--answers", tmp_path / "answers.jsonl", "--max_tokens", 5, "--device", "cpu"]
    done = lmforge("evaluate", tiny_run, "--tasks", *files, "--output", "json", *common)
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout)
    assert [(result["task"], result["questions"]) for result in results] == [("chosen", 4), ("written", 3)]
    assert results[0]["metrics"].keys() == {"accuracy", "accuracy_normalised"}
    told = [json.loads(line) for line in (tmp_path / "answers.jsonl").read_text().splitlines()]
    assert [(each["task"], each["line"]) for each in told] == [
        *[("chosen", line) for line in range(1, 5)],
        *[("written", line) for line in range(1, 4)],
    ]
    table = lmforge("evaluate", tiny_run, "--tasks", files[0], "--device", "cpu")
    assert "accuracy_normalised" in table.stdout
    again = lmforge("evaluate", tmp_path / "no model", "--tasks", *files, *common)
    assert (again.returncode, again.stderr) == (2, f"lmforge: {tmp_path}/answers.jsonl: is there already; name another file\n")
    assert len((tmp_path / "answers.jsonl").read_text().splitlines()) == 7
    failed = lmforge("evaluate", tmp_path / "no model", "--tasks", *files, "--answers", tmp_path / "more.jsonl")
    assert failed.returncode == 2
    assert not (tmp_path / "more.jsonl").exists()
    refused = lmforge("evaluate", tiny_run, "--tasks", tmp_path / "none.jsonl")
    assert refused.returncode == 2
    assert "none.jsonl: cannot be read" in refused.stderr
