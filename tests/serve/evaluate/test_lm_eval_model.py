"""lm-evaluation-harness on a checkpoint gives the same scores as its own Hugging Face model gives
the exported checkpoint.
"""

import json
import os
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path
from textwrap import dedent
from typing import Any

# Read when its libraries are imported: nothing is looked up.
os.environ["HF_DATASETS_OFFLINE"] = "1"

import lm_eval
import pytest
import torch
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

from lmforge.cli import run as command
from lmforge.core.distributed.distributed import DistributedContext
from lmforge.core.errors import UserError
from lmforge.serve.decoding.model_loading import LoadedModel, load_model
from lmforge.serve.decoding.prompts import max_input_length
from lmforge.serve.evaluate import lm_eval_model
from lmforge.serve.evaluate.lm_eval_model import LMEvalModel, run_lm_eval
from tests.serve.conftest import Server
from tests.serve.evaluate.test_tasks import ALONE, on_ranks
from tests.support.preloaded import preloaded

HI = [{"role": "user", "content": "Hi"}]
CHOICES = [
    {
        "text": "Who speaks?",
        "options": ["the king", "a long answer that nobody would give", "x"],
        "gold": 0,
    },
    {"text": "What is", "options": ["it", "the matter with you", "7"], "gold": 1},
    {"text": "First Citizen:", "options": ["Before we proceed", "zzzz qqqq", "you"], "gold": 0},
    {"text": "All: ", "options": ["Speak", "speak, speak.", "no"], "gold": 1},
    {"text": "The", "options": ["king", "queen", "lords"], "gold": 2},
]
TEXTS = [
    {"text": "First Citizen:\nBefore we proceed any further, hear me speak.\n" * 8},
    {"text": "The king is not here"},
    {"text": "O"},
]
WRITTEN = [
    {"text": "The king", "gold": "is"},
    {"text": "My lord, I", "gold": "e"},
    {"text": "O", "gold": "s"},
]
TASKS = {
    "choosing": (
        """
        output_type: multiple_choice
        doc_to_text: "Question: {{text}}\\nAnswer:"
        doc_to_choice: "{{options}}"
        doc_to_target: gold
        metric_list: [{metric: acc}, {metric: acc_norm}]"""
    ),
    "reading": (
        """
        output_type: loglikelihood_rolling
        doc_to_text: ""
        doc_to_target: "{{text}}"
        metric_list: [{metric: word_perplexity}, {metric: byte_perplexity}, {metric: bits_per_byte}]"""
    ),
    "writing": (
        """
        output_type: generate_until
        doc_to_text: "{{text}}"
        doc_to_target: gold
        generation_kwargs: {until: ["\\n", "."], max_gen_toks: 9, do_sample: false}
        metric_list: [{metric: exact_match}, {metric: bleu}]"""
    ),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of tasks for the harness, each a YAML file and its questions."""
    folder = tmp_path_factory.mktemp("harness")
    os.environ["HF_DATASETS_CACHE"] = str(folder / "cache")
    for (name, yaml), lines in zip(TASKS.items(), (CHOICES, TEXTS, WRITTEN), strict=True):
        data = folder / f"{name}.jsonl"
        data.write_text("".join(json.dumps(line) + "\n" for line in lines))
        header = f"""
        task: {name}
        dataset_path: json
        dataset_kwargs: {{data_files: {{test: "{data}"}}}}
        test_split: test
        fewshot_split: test"""
        text = header + yaml
        (folder / f"{name}.yaml").write_text(
            "\n".join(line.strip() for line in text.strip().splitlines()) + "\n"
        )
    return folder


def numbers(metrics: dict[str, Any]) -> dict[str, float]:
    """The scores by the names that users read: the harness writes `acc,none` where no filter is
    applied.
    """
    floats = {
        name: value
        for name, value in metrics.items()
        if isinstance(value, float) and "stderr" not in name
    }
    return {name.partition(",none")[0]: value for name, value in floats.items()}


@pytest.fixture(scope="module")
def opened(tiny_run: Path) -> LoadedModel:
    return load_model(tiny_run, torch.device("cpu"), torch.float32)


@pytest.fixture(scope="module")
def exported(tiny_run: Path, tmp_path_factory: pytest.TempPathFactory) -> HFLM:
    """The same model, exported, as the harness opens it."""
    folder = tmp_path_factory.mktemp("exported") / "model"
    assert command(["export", str(tiny_run), str(folder)]) == 0
    return HFLM(pretrained=str(folder), dtype="float32", device="cpu", batch_size=2)


@pytest.mark.parametrize("num_fewshot", [pytest.param(0, marks=pytest.mark.slow), 2])
def test_scores_are_those_of_the_exported_model(
    folder: Path, opened: LoadedModel, exported: HFLM, num_fewshot: int
) -> None:
    names = list(TASKS)
    theirs = lm_eval.simple_evaluate(
        model=exported,
        tasks=names,
        num_fewshot=num_fewshot,
        bootstrap_iters=0,
        task_manager=TaskManager(include_path=str(folder), include_defaults=False),
    )
    mine = run_lm_eval(
        opened, names, ALONE, include_path=folder, num_fewshot=num_fewshot, limit=None, batch_size=3
    )
    for name in names:
        expected = numbers(theirs["results"][name])
        assert expected
        # fp32 in batches of other lengths.
        assert numbers(mine[name]) == pytest.approx(expected, rel=1e-5)
    # Not all of them the one number that says nothing.
    assert 1 < mine["reading"]["byte_perplexity"] < 256


@pytest.mark.slow
def test_the_harness_gets_the_same_scores_from_the_server(
    folder: Path,
    opened: LoadedModel,
    exported: HFLM,
    tiny_run: Path,
    serving: Callable[..., Server],
) -> None:
    """Its client of completions reads the log-probabilities of prompts from the server."""
    url = serving(tiny_run, "--max_batch_size", 4).url
    client = {
        "model": "tiny",
        "base_url": f"{url}/v1/completions",
        "tokenizer": exported.tokenizer.name_or_path,
        "tokenizer_backend": "huggingface",
        "max_length": max_input_length(opened.config),
        "batch_size": 2,
    }
    theirs = lm_eval.simple_evaluate(
        model="local-completions",
        model_args=client,
        tasks=list(TASKS),
        bootstrap_iters=0,
        task_manager=TaskManager(include_path=str(folder), include_defaults=False),
    )
    mine = run_lm_eval(
        opened, list(TASKS), ALONE, include_path=folder, num_fewshot=None, limit=None, batch_size=3
    )
    for name in TASKS:
        expected = numbers(mine[name])
        assert expected
        assert numbers(theirs["results"][name]) == pytest.approx(expected, rel=1e-5)


def test_with_the_chat_template_scores_are_those_of_the_exported_model(
    folder: Path, models: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    own, theirs = (
        load_model(models / "noise", torch.device("cpu"), torch.float32),
        HFLM(pretrained=str(models / "noise"), dtype="float32", device="cpu", batch_size=2),
    )
    options = {"tasks": ["choosing", "writing"], "num_fewshot": 1}
    expected = lm_eval.simple_evaluate(
        model=theirs,
        apply_chat_template=True,
        bootstrap_iters=0,
        task_manager=TaskManager(include_path=str(folder), include_defaults=False),
        **options,
    )
    settings = {"include_path": folder, "limit": None, "batch_size": 3}
    mine = run_lm_eval(own, dist_ctx=ALONE, apply_chat_template=True, **options, **settings)

    for name in ("choosing", "writing"):
        assert numbers(mine[name]) == pytest.approx(numbers(expected["results"][name]), rel=1e-5)
    questions = [Instance("loglikelihood", {}, (theirs.apply_chat_template(HI), "Hey"), 0)]
    [[ours, _]], [[reference, _]] = (
        LMEvalModel(own, ALONE, batch_size=1).loglikelihood(questions),
        theirs.loglikelihood(questions),
    )
    assert ours == pytest.approx(reference, rel=1e-5)
    assert LMEvalModel(own, ALONE, batch_size=1).apply_chat_template(
        HI
    ) == theirs.apply_chat_template(HI)
    begun = [*HI, {"role": "assistant", "content": "Hey"}]
    assert LMEvalModel(own, ALONE, 1).apply_chat_template(
        begun, False
    ) == theirs.apply_chat_template(begun, False)
    words = [
        "evaluate",
        str(models / "plain"),
        "--lm_eval",
        "choosing",
        "--lm_eval_include_path",
        str(folder),
    ]
    assert command([*words, "--apply_chat_template", "--device", "cpu"]) == 2
    assert "has no chat template" in capfd.readouterr().err


def test_single_requests_give_the_results_of_the_exported_model(
    opened: LoadedModel, exported: HFLM
) -> None:
    theirs, mine = exported, LMEvalModel(opened, ALONE, batch_size=2)
    assert (mine.max_length, mine.eot_token_id, mine.prefix_token_id) == (
        theirs.max_length,
        theirs.eot_token_id,
        theirs.prefix_token_id,
    )

    def asked(kind: str, *arguments: Any) -> list[Any]:
        return [Instance(kind, {}, each, number) for number, each in enumerate(arguments)]

    pairs = asked(
        "loglikelihood",
        ("", "The king"),
        ("The king ", "is"),
        ("O", " my lord"),
        ("First", " Citizen:\nBefore"),
    )
    for ours, reference in zip(mine.loglikelihood(pairs), theirs.loglikelihood(pairs), strict=True):
        assert ours[0] == pytest.approx(reference[0], rel=1e-5)
        assert ours[1] == reference[1]
    texts = asked("loglikelihood_rolling", ("The king " * 1500,), ("O",))
    assert mine.loglikelihood_rolling(texts) == pytest.approx(
        theirs.loglikelihood_rolling(texts), rel=1e-5
    )
    likeliest = theirs.generate_until(
        asked("generate_until", ("The king", {"until": ["zz"], "max_gen_toks": 1}))
    )[0]
    [(_, greedy)] = mine.loglikelihood(asked("loglikelihood", ("The king", likeliest)))
    assert greedy
    expected = [
        ("The king", {"until": ["\n"], "max_gen_toks": 12}),
        ("The king", {"until": [], "max_gen_toks": 3}),
        ("My lord, what", {"until": ["e", " the"], "max_gen_toks": 12}),
    ]
    requests = asked("generate_until", *expected)
    assert mine.generate_until(requests) == theirs.generate_until(requests)


UNKNOWN = "no_such_task: no such task of lm-evaluation-harness; `lm-eval ls tasks` lists them"


@pytest.mark.slow
def test_evaluate_prints_the_scores_of_the_harness(
    folder: Path, tiny_run: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [
        "evaluate",
        str(tiny_run),
        "--lm_eval_include_path",
        str(folder),
        "--device",
        "cpu",
        "--limit",
        "2",
    ]
    assert command([*words, "--output", "json", "--lm_eval", "choosing"]) == 0
    [result] = json.loads(capfd.readouterr().out)
    assert result["task"] == "choosing"
    assert 0 <= result["metrics"]["acc"] <= 1
    # Without the thousands of tasks that the harness comes with, whose index takes it a quarter of
    # a minute.
    own_tasks_only = partial(lm_eval_model._SyncedTaskManager, include_defaults=False)
    monkeypatch.setattr(lm_eval_model, "_SyncedTaskManager", own_tasks_only)
    assert command([*words, "--lm_eval", "choosing", "no_such_task"]) == 2
    assert UNKNOWN in capfd.readouterr().err


def two_processes(tmp_path: Path, *words: object) -> subprocess.CompletedProcess[str]:
    (tmp_path / "output").mkdir(exist_ok=True)
    return preloaded().run(
        ["evaluate", *map(str, words), "--device", "cpu"], tmp_path / "output", ranks=2
    )


@pytest.mark.slow
def test_several_processes_print_the_scores_of_one_once(
    folder: Path, tiny_run: Path, opened: LoadedModel, tmp_path: Path
) -> None:
    words = [tiny_run, "--lm_eval_include_path", folder, "--batch_size", 2]
    several = two_processes(tmp_path, *words, "--lm_eval", *TASKS, "--output", "json")
    assert several.returncode == 0, several.stderr
    alone = run_lm_eval(
        opened, list(TASKS), ALONE, include_path=folder, num_fewshot=None, limit=None, batch_size=2
    )
    scores = {result["task"]: result["metrics"] for result in json.loads(several.stdout)}
    assert scores.keys() == alone.keys()
    for name, metrics in alone.items():
        # Other thread counts, other sums.
        assert numbers(scores[name]) == pytest.approx(numbers(metrics), rel=1e-5)
    assert (
        several.stderr.count("[Task: writing] metric bleu is defined, but aggregation is not") == 1
    )


@pytest.mark.slow
def test_several_processes_refuse_an_unknown_task_once(
    folder: Path, tiny_run: Path, tmp_path: Path
) -> None:
    words = [tiny_run, "--lm_eval_include_path", folder, "--lm_eval", "choosing", "no_such_task"]
    failed = two_processes(tmp_path, *words)
    assert (failed.returncode, failed.stdout) == (2, "")
    assert failed.stderr.count(UNKNOWN) == 1


def test_results_are_the_same_on_any_number_of_ranks_with_sampling_too(opened: LoadedModel) -> None:
    drawn = {"until": [], "max_gen_toks": 5, "do_sample": True, "temperature": 1.5}
    written = [
        Instance("generate_until", {}, (text, drawn), number)
        for number, text in enumerate(["The", "O", "The", "My"])
    ]
    pairs = [
        Instance("loglikelihood", {}, ("The", after), number)
        for number, after in enumerate([" king", " a", " o"])
    ]
    texts = [
        Instance("loglikelihood_rolling", {}, (text,), number)
        for number, text in enumerate(["The king", "O"])
    ]

    def answers(dist_ctx: DistributedContext) -> list[Any]:
        model = LMEvalModel(opened, dist_ctx, batch_size=1)
        return [
            model.generate_until(written),
            model.loglikelihood(pairs),
            model.loglikelihood_rolling(texts),
        ]

    alone = answers(ALONE)
    assert alone[0][0] != alone[0][2]  # each of two equal prompts draws its own
    for result in (*on_ranks(2, answers), *on_ranks(5, answers)):
        assert result == alone


def test_ranks_with_different_requests_get_the_same_error(opened: LoadedModel) -> None:

    def problem(dist_ctx: DistributedContext) -> str:
        request = Instance("loglikelihood", {}, ("The", f" king {dist_ctx.rank_info.rank}"), 0)
        with pytest.raises(UserError) as raised:
            LMEvalModel(opened, dist_ctx, batch_size=1).loglikelihood([request])
        return str(raised.value)

    [one, other] = on_ranks(2, problem)
    assert one == other
    assert "the ranks' tasks of lm-evaluation-harness differ" in one


def test_a_task_that_cannot_be_loaded_is_reported_in_one_line(
    folder: Path, tmp_path: Path, tiny_run: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    text = (folder / "choosing.yaml").read_text().replace("choosing", "missing")
    (tmp_path / "missing.yaml").write_text(text)
    words = [
        "evaluate",
        str(tiny_run),
        "--lm_eval_include_path",
        str(tmp_path),
        "--device",
        "cpu",
        "--lm_eval",
        "missing",
    ]
    assert command(words) == 2
    assert "lm-evaluation-harness cannot load its task (" in capfd.readouterr().err


@pytest.mark.slow
def test_a_task_that_one_rank_cannot_load_ends_all_ranks_with_its_error(
    folder: Path, tmp_path: Path, tiny_run: Path
) -> None:
    failing = """
        import os

        def docs(dataset):
            if os.environ["RANK"] == "1":
                raise KeyError("not here")
            return dataset
    """
    (tmp_path / "here.py").write_text(dedent(failing))
    (tmp_path / "here.yaml").write_text(
        (folder / "choosing.yaml").read_text().replace("task: choosing", "task: here")
        + "process_docs: !function here.docs\n"
    )
    failed = two_processes(
        tmp_path, tiny_run, "--lm_eval_include_path", tmp_path, "--lm_eval", "here"
    )
    assert (failed.returncode, failed.stdout) == (2, "")
    assert (
        failed.stderr.count("lmforge: lm-evaluation-harness cannot load its task ('not here')") == 1
    )
