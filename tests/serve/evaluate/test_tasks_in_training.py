"""Tasks scored while a run trains: the same scores as for its checkpoints, in any stage; unusable
tasks are refused before.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from lmforge.core.records.runs import Run
from lmforge.serve.decoding.engine import generate
from lmforge.serve.decoding.model_loading import load_model
from lmforge.serve.decoding.sampling import SamplingParams
from tests.conftest import Command, Refusal
from tests.support.rounding import OTHER_ROUNDING, assert_rounding_apart, each_apart

CHOICES = [
    {
        "question": "Who speaks?",
        "choices": ["the king", "a very long answer that nobody would give", "x"],
        "answer": 0,
    },
    {"prompt": "First Citizen:\n", "choices": ["Before we proceed", "zzzz qqqq"], "answer": 0},
    {"prompt": "What is", "choices": ["it", "the matter", "7"], "answer": "B"},
]
TURNS = [{"role": "user", "content": "Well?"}, {"role": "assistant", "content": "Yes."}]
NO = [{"role": "assistant", "content": "No."}]


def write_lines(path: Path, records: Sequence[Any]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


@pytest.fixture(scope="module")
def files(tiny_run: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Questions of either kind; one of those to be answered in writing is so by the model that
    `tiny_run` ends with alone.
    """
    folder = tmp_path_factory.mktemp("questions")
    opened = load_model(tiny_run, torch.device("cpu"), torch.float32)
    how: dict[str, Any] = {
        "max_tokens": 64,
        "sampling": SamplingParams(0.0),
        "seed": 0,
        "stop_strings": ["\n"],
    }
    [answer] = generate(opened.model, opened.tokenizer, ["The king"], **how)
    written = [
        {"prompt": "The king", "answer": answer.text},
        {"prompt": "My lord,", "answer": "nobody says this", "pattern": "[a-z]"},
    ]
    return [
        write_lines(folder / "chosen.jsonl", CHOICES),
        write_lines(folder / "written.jsonl", written),
    ]


def assert_scores(
    scores: dict[str, float], lmforge: Command, model: Path, files: Sequence[Path], *words: object
) -> None:
    """Scores of a run are those that `lmforge evaluate MODEL --tasks` prints.

    Its batches are of another size.
    """

    def of_the_verb(**variables: str) -> dict[str, float]:
        done = lmforge(
            "evaluate",
            model,
            "--tasks",
            *files,
            "--device",
            "cpu",
            "--output",
            "json",
            *words,
            **variables,
        )
        assert done.returncode == 0, done.stderr
        results = json.loads(done.stdout)
        return {
            f"val/{each['task']}/{name}": score
            for each in results
            for name, score in each["metrics"].items()
        }

    printed = of_the_verb()
    assert_rounding_apart(
        each_apart(scores, printed), each_apart(of_the_verb(**OTHER_ROUNDING), printed)
    )


def scores_by_step(run: Run) -> dict[int, dict[str, float]]:
    """What a run's metrics have of tasks."""
    results = {}
    for record in run.read_metrics():
        if scores := {
            name: score
            for name, score in record.items()
            if name.startswith("val/") and name.count("/") == 2
        }:
            results[record["step"]] = scores
    return results


def test_scores_while_training_are_those_of_the_checkpoints_and_the_best_can_be_kept(
    tiny_options: list[str], files: list[Path], tmp_path: Path, lmforge: Command
) -> None:
    words = [
        *tiny_options,
        "--run.folder",
        tmp_path,
        "--run.name",
        "run",
        "--validation.tasks",
        *files,
    ]
    words += ["--validation.at_start", "--validation.num_fewshot", 1]
    words += [
        "--checkpoint.keep_best",
        1,
        "--checkpoint.keep_last",
        1,
        "--checkpoint.best_metric",
        "val/chosen/acc",
    ]
    done = lmforge("pretrain", *words)
    assert done.returncode == 0, done.stderr
    run = Run(tmp_path / "run")
    scores = scores_by_step(run)
    assert scores.keys() == {0, 2, 3, 4, 6}  # every 3 steps, and with each checkpoint
    best = max((2, 4, 6), key=lambda step: (scores[step]["val/chosen/acc"], -step))
    assert run.checkpoint_steps() == sorted({best, 6})
    for step in run.checkpoint_steps():
        assert_scores(
            scores[step],
            lmforge,
            run.checkpoint_path(step),
            files,
            "--num_fewshot",
            1,
        )
    assert f"  chosen: acc {scores[6]['val/chosen/acc']:.4f}, acc_norm " in done.stdout


def test_questions_change_nothing_of_the_training_and_tell_models_apart(
    tiny_options: list[str], tiny_run: Path, files: list[Path], tmp_path: Path, lmforge: Command
) -> None:
    words = [
        *tiny_options,
        "--run.folder",
        tmp_path,
        "--run.name",
        "run",
        "--validation.tasks",
        *files,
    ]
    done = lmforge("pretrain", *words, "--validation.at_start")
    assert done.returncode == 0, done.stderr
    run = Run(tmp_path / "run")
    losses = {record["step"]: record["loss"] for record in run.read_metrics() if "loss" in record}
    assert losses == {record["step"]: record["loss"] for record in Run(tiny_run).read_metrics()}
    scores = scores_by_step(run)
    assert [scores[step]["val/written/exact_match"] for step in (0, 6)] == [0.0, 0.5]
    assert_scores(scores[6], lmforge, run.path, files)


@pytest.mark.parametrize(
    ("verb", "words"),
    [
        ("sft", ["--data.files", "chats.jsonl"]),
        ("align", ["--data.files", "pairs.jsonl"]),
        (
            "align",
            [
                "--method",
                "grpo",
                "--data.files",
                "prompts.jsonl",
                "--rollout.reward_functions",
                "rewards.py:long",
            ],
        ),
    ],
    ids=["sft", "dpo", "grpo"],
)
def test_every_stage_asks_as_its_checkpoints_are_asked(
    verb: str, words: list[str], tiny_run: Path, files: list[Path], tmp_path: Path, lmforge: Command
) -> None:
    write_lines(tmp_path / "chats.jsonl", [{"messages": TURNS}] * 8)
    write_lines(
        tmp_path / "pairs.jsonl", [{"prompt": TURNS[:1], "chosen": TURNS[1:], "rejected": NO}] * 8
    )
    write_lines(tmp_path / "prompts.jsonl", [{"prompt": TURNS[:1]}] * 8)
    (tmp_path / "rewards.py").write_text(
        "def long(prompts, completions, **columns):\n    return [len(c) for c in completions]\n"
    )
    few: dict[str, object] = {
        "model.source": tiny_run,
        "run.name": "run",
        "data.sequence_length": 64,
        "train.steps": 2,
        "train.global_batch_size": 8,
        "train.dtype": "fp32",
        "train.device": "cpu",
        "train.compile": "off",
        "train.threads": 1,
        "optimizer.lr": 1e-2,
        **(
            {"rollout.num_generations": 4, "rollout.max_completion_length": 8}
            if "grpo" in words
            else {}
        ),
    }
    line = [word for name, value in few.items() for word in (f"--{name}", value)]
    done = lmforge(verb, *line, *words, "--validation.tasks", *files, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    run = Run(tmp_path / "runs" / "run")
    [(step, scores)] = scores_by_step(run).items()
    assert step == 2
    assert_scores(scores, lmforge, run.path, files)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["gone.jsonl"], "gone.jsonl: no such file or folder"),
        (["broken.jsonl"], "broken.jsonl:2: not valid JSON: "),
        (
            ["fine.jsonl", "--validation.num_fewshot", "2"],
            "fine.jsonl: 1 questions to show as examples, and 2 were requested",
        ),
        (
            ["patterns.jsonl", "--validation.num_fewshot", "1"],
            "patterns.jsonl, record 2: an example needs an answer, and this has only a pattern",
        ),
        (["long.jsonl"], "long.jsonl, record 2: prompt and answer take "),
        (["choices.jsonl"], "choices.jsonl, record 1: prompt and answer take "),
        (
            ["fine.jsonl", "other/fine.jsonl"],
            "fine.jsonl and other/fine.jsonl would both be logged as val/fine/…; rename one",
        ),
        (
            ["rewards.jsonl"],
            "rewards.jsonl: val/rewards/… are metrics of alignment; give the file another name",
        ),
        (
            ["fine.jsonl", "--parallel.tensor_parallel_degree", "2", "--launch.processes", "2"],
            (
                "validation.tasks: with tensor_parallel_degree or pipeline_parallel_degree no rank"
                " has the full model; leave it out, and evaluate"
            ),
        ),
        (
            ["--validation.num_fewshot", "1"],
            "validation.num_fewshot: only with validation.tasks; leave it out",
        ),
    ],
)
def test_unusable_tasks_are_refused_in_one_line_and_no_file_is_written(
    words: list[str],
    said: str,
    tiny_options: list[str],
    tmp_path: Path,
    refused: Refusal,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    fine = [{"prompt": "a", "answer": "b"}, {"prompt": "c", "answer": "d"}]
    long = "word " * 3000
    (tmp_path / "other").mkdir()
    for name in ("fine", "other/fine", "rewards"):
        write_lines(tmp_path / f"{name}.jsonl", fine)
    (tmp_path / "broken.jsonl").write_text('{"prompt": "a", "answer": "b"}\n{\n')
    write_lines(tmp_path / "patterns.jsonl", [fine[0], {"prompt": "c", "pattern": "d"}])
    write_lines(tmp_path / "long.jsonl", [fine[0], {"prompt": long, "answer": "d"}])
    write_lines(tmp_path / "choices.jsonl", [{"prompt": "a", "choices": ["b", long], "answer": 0}])
    requested = words if words[0].startswith("-") else ["--validation.tasks", *words]
    assert said in refused(
        "pretrain",
        *tiny_options,
        "--run.folder",
        tmp_path / "runs",
        "--run.name",
        "run",
        *requested,
    )
    assert not any(path.name != ".lock" for path in tmp_path.glob("runs/*/*"))
