"""Errors in recipes and files of fine-tuning and alignment are reported in one line before anything
is written.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime
from decimal import Decimal
from pathlib import Path
from typing import TypeVar

import pyarrow
import pyarrow.parquet
import pytest
import torch

from lmforge.core.checkpoint import read_manifest
from lmforge.core.distributed.distributed import DistributedContext
from lmforge.core.distributed.rank_info import RankInfo
from lmforge.core.errors import UserError
from lmforge.core.options.options import validate_options
from lmforge.core.records.runs import Run
from lmforge.core.stages.enter_run import check_resumable
from lmforge.core.stages.inputs import RunInputs, describe_long_sequences
from lmforge.core.steps.resume import ResumePoint
from lmforge.post.examples import example_folder_paths, open_example_inputs, prepare_examples
from lmforge.post.options.align import AlignConfig
from lmforge.post.options.tuning import SftConfig
from lmforge.post.prompts import PromptPacking, open_prompt_inputs, prepare_prompts
from lmforge.post.tuned_model import find_required_pretrained
from lmforge.text.chat.examples import ExampleFolder
from tests.conftest import Command, Refusal

ALONE = DistributedContext(RankInfo(), torch.device("cpu"), None)
Tuned = TypeVar("Tuned", SftConfig, AlignConfig)

QUESTION = {"role": "user", "content": "Well?"}
ANSWER = {"role": "assistant", "content": "Yes."}
FEW = [
    "--train.dtype",
    "fp32",
    "--train.device",
    "cpu",
    "--train.compile",
    "off",
    "--train.threads",
    "1",
    "--data.sequence_length",
    "64",
]
REWARDS = """
import os

def right(prompts, completions, **columns):
    return [float(len(text)) for text in completions]

def short(prompts, completions, **columns):
    return [1.0]

def raising(prompts, completions, **columns):
    raise KeyError("nothing")

def endless(prompts, completions, **columns):
    while True:
        pass

def failing_elsewhere(prompts, completions, **columns):
    if os.environ["RANK"] == "1":
        raise KeyError(completions[0])
    return [0.0 for _ in completions]

def column(prompts, completions, answer, **columns):
    return [0.0 for _ in answer]

def answer_alone(prompts, completions, answer):
    return [float(len(text)) for text in answer]
"""


@pytest.fixture
def place(tmp_path: Path) -> Path:
    def write(name: str, *records: object) -> None:
        (tmp_path / name).write_text("".join(json.dumps(record) + "\n" for record in records))

    pair = {
        "prompt": [QUESTION],
        "chosen": [ANSWER],
        "rejected": [{"role": "assistant", "content": "No."}],
    }
    write("chats.jsonl", *[{"messages": [QUESTION, ANSWER]}] * 5)
    write("silent.jsonl", {"messages": [QUESTION, ANSWER]}, {"messages": [QUESTION]})
    write("pairs.jsonl", *[pair] * 5)
    write("equal.jsonl", pair | {"rejected": [ANSWER]})
    write("marked.jsonl", pair | {"margin": 0.5}, pair | {"margin": "much"})
    write("prompts.jsonl", *[{"prompt": [QUESTION]}] * 5)
    write("answered.jsonl", {"prompt": [QUESTION]}, {"prompt": [QUESTION], "answer": "Yes."})
    write("taken.jsonl", {"prompt": [QUESTION]}, {"prompt": [QUESTION], "completions": []})
    write(
        "many.jsonl",
        *[{"prompt": f"{number} + 1 =", "copy": copy} for copy in (1, 2) for number in range(40)],
    )
    write("long.jsonl", *[{"prompt": "Well? " * 100}] * 3)
    (tmp_path / "broken.jsonl").write_text('{"messages": [\n')
    (tmp_path / "rewards.py").write_text(REWARDS)
    (tmp_path / "empty").mkdir()
    dated = [
        {
            "prompt": [QUESTION],
            "answer": "Yes.",
            "when": datetime(2024, 5, 1),
            "price": Decimal("1.5"),
            "raw": b"\xff",
        }
    ] * 8
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(dated), tmp_path / "dated.parquet")
    return tmp_path


def recipe_of(
    kind: type[Tuned], place: Path, source: Path, **tables: Mapping[str, object]
) -> Tuned:
    """A recipe of few short rows from the files of `place`."""
    given: dict[str, Mapping[str, object]] = {
        "model": {"source": str(source)},
        "run": {"folder": str(place / "runs")},
        "data": {"sequence_length": 64, "folder": str(place / "examples")},
        "train": {"steps": 2, "global_batch_size": 4, "device": "cpu"},
    }
    return validate_options(
        kind,
        {**tables, **{name: {**table, **tables.get(name, {})} for name, table in given.items()}},
    )


@pytest.mark.parametrize(
    ("verb", "words", "said"),
    [
        (
            "sft",
            ["--data.files", "chats.jsonl", "--model.source", "none"],
            "model.source: name what to begin from",
        ),
        ("sft", [], "data.files: name the files to learn from, such as --data.files chats.jsonl"),
        ("sft", ["--data.files", "gone.jsonl"], "gone.jsonl: no such file or folder"),
        ("sft", ["--data.files", "empty"], "empty: holds no records: looked for .jsonl"),
        ("sft", ["--data.files", "broken.jsonl"], "broken.jsonl:1: "),
        (
            "sft",
            ["--data.files", "silent.jsonl"],
            "silent.jsonl, record 2: no assistant turn: there is nothing to learn from",
        ),
        (
            "sft",
            ["--data.files", "chats.jsonl", "--data.sequence_length", "4"],
            "no example is left of the train files: 5 are longer than",
        ),
        (
            "sft",
            ["--data.files", "chats.jsonl", "--data.fields", "messages"],
            "data.fields: expected OURS=THEIRS, such as",
        ),
        (
            "sft",
            ["--data.files", "chats.jsonl", "--data.fields", "messages=talk"],
            "chats.jsonl, record 1: no field 'talk'",
        ),
        (
            "sft",
            ["--data.files", "chats.jsonl", "--lora.rank", "2", "--lora.target_modules", "nose"],
            "lora.target_modules: no linear layer",
        ),
        (
            "sft",
            ["--data.files", "chats.jsonl", "--model.hidden_size", "64"],
            "model.hidden_size: a checkpoint's model config cannot be changed",
        ),
        ("align", ["--data.files", "chats.jsonl"], "chats.jsonl, record 1: "),
        (
            "align",
            ["--data.files", "equal.jsonl"],
            (
                "1 left out that cannot be used, such as equal.jsonl, record 1: chosen and rejected"
                " are equal"
            ),
        ),
        (
            "align",
            ["--method", "kto", "--data.packing", "none"],
            "data.packing = none: kto compares the completions of a sequence",
        ),
        (
            "align",
            ["--data.files", "marked.jsonl", "--method", "reward"],
            'marked.jsonl, record 2: the margin is "much"',
        ),
        (
            "align",
            ["--method", "simpo", "--align.reference", "precomputed"],
            "align.reference: simpo does not read it; it is for",
        ),
        (
            "align",
            ["--method", "grpo", "--align.beta", "0.2"],
            "align.beta: grpo does not read it; it is for dpo, kto, orpo",
        ),
        (
            "align",
            ["--align.loss_type", "ipo", "--align.label_smoothing", "0.1"],
            "align.label_smoothing: not with align.loss_type = ipo",
        ),
        (
            "align",
            ["--method", "grpo", "--data.packing", "none"],
            "data.packing = none: grpo has a sequence for each completion",
        ),
        (
            "align",
            ["--rollout.num_generations", "4"],
            "rollout.num_generations: dpo does not read it; it is for grpo: leave it out",
        ),
        (
            "align",
            ["--method", "reward", "--sample.every_steps", "1"],
            "sample.every_steps: a reward model generates nothing",
        ),
        (
            "align",
            ["--method", "reward", "--validation.tasks", "a.jsonl"],
            "validation.tasks: a reward model answers nothing",
        ),
        (
            "align",
            ["--method", "reward", "--model.implementation", "transformers"],
            "not with align.method = reward; leave it",
        ),
        (
            "align",
            ["--align.reference", "adapters-off"],
            "align.reference = adapters-off: there are no adapters",
        ),
        (
            "align",
            ["--method", "reward", "--parallel.context_parallel_degree", "2"],
            (
                "parallel.tensor_parallel_degree, context_parallel_degree,"
                " pipeline_parallel_degree: reward needs whole"
            ),
        ),
        (
            "align",
            ["--method", "grpo", "--parallel.pipeline_parallel_degree", "2"],
            (
                "grpo needs whole completions on one rank; shard with fsdp2 instead, or sample with"
                " servers (rollout.engine)"
            ),
        ),
        (
            "align",
            ["--method", "grpo", "--data.files", "prompts.jsonl"],
            "rollout.reward_functions: name a reward function",
        ),
        (
            "align",
            ["--method", "ppo"],
            (
                "--align.method: expected 'dpo', 'kto', 'orpo', 'simpo', 'reward' or 'grpo', got"
                ' "ppo"'
            ),
        ),
    ],
)
def test_it_is_refused_in_one_line_and_writes_no_file(
    verb: str,
    words: list[str],
    said: str,
    place: Path,
    tiny_run: Path,
    refused: Refusal,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(place)
    assert said in refused(
        verb, "--model.source", tiny_run, "--run.folder", place / "runs", *FEW, *words
    )
    assert not any(path.name != ".lock" for path in place.glob("runs/*/*"))
    assert not any(path.name.startswith(".") for path in place.glob("data/examples/*"))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--rollout.reward_functions", "gone.py:right"], "gone.py"),
        (["--rollout.reward_functions", "rewards.py:left"], "left"),
        (
            ["--rollout.reward_functions", "rewards:right"],
            "reward rewards:right: expected FILE.py:FUNCTION",
        ),
        (["--rollout.reward_functions", "runs/gone"], "reward runs/gone: "),
        (
            ["--rollout.reward_functions", "."],
            "rollout.reward_functions: .: a folder of no known kind",
        ),
        (
            ["--rollout.reward_functions", "rewards.py:right", "rewards.py:column"],
            (
                "prompts.jsonl: reward rewards.py:column: needs the column 'answer', which the data"
                " does not have"
            ),
        ),
        (
            [
                "--data.files",
                "answered.jsonl",
                "--data.validation_files",
                "prompts.jsonl",
                "--rollout.reward_functions",
                "rewards.py:column",
            ],
            "prompts.jsonl: reward rewards.py:column: needs the column 'answer'",
        ),
        (
            ["--data.files", "taken.jsonl", "--rollout.reward_functions", "rewards.py:right"],
            "taken.jsonl: column 'completions': reward functions get",
        ),
        (
            ["--data.files", "dated.parquet", "--rollout.reward_functions", "rewards.py:right"],
            (
                "dated.parquet, record 1: column 'raw' is not plain data (Object of type bytes is"
                " not JSON serializable)"
            ),
        ),
        (
            ["--rollout.reward_functions", "rewards.py:right", "--rollout.num_generations", "3"],
            "need a multiple of 3; nearest: 30 or 33",
        ),
        (
            [
                "--rollout.reward_functions",
                "rewards.py:right",
                "--rollout.max_completion_length",
                "64",
            ],
            "leaves no room for a prompt in data.sequence_length",
        ),
        (
            [
                "--rollout.reward_functions",
                "rewards.py:right",
                "--rollout.max_completion_length",
                "63",
            ],
            "no prompt is left (0 of 5 records",
        ),
        (
            [
                "--rollout.reward_functions",
                "rewards.py:right",
                "--data.validation_files",
                "long.jsonl",
            ],
            (
                "data.validation_files: no prompt is left (0 of 3 records, 3 left out as too long);"
                " make data.sequence_length longer"
            ),
        ),
        (
            [
                "--rollout.reward_functions",
                "rewards.py:right",
                "--rollout.reward_weights",
                "1",
                "2",
            ],
            "give as many as rollout.reward_functions",
        ),
    ],
)
def test_so_are_rewards_and_prompts_that_cannot_be_used(
    words: list[str],
    said: str,
    place: Path,
    tiny_run: Path,
    refused: Refusal,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(place)
    options = [
        "--method",
        "grpo",
        "--data.files",
        "prompts.jsonl",
        "--run.folder",
        place / "runs",
        *FEW,
    ]
    assert said in refused(
        "align",
        "--model.source",
        tiny_run,
        *options,
        "--rollout.max_completion_length",
        "8",
        *words,
    )
    assert not any(path.name != ".lock" for path in place.glob("runs/*/*"))


@pytest.mark.parametrize(
    ("reward", "status", "said"),
    [
        ("raising", 1, "lmforge: reward rewards.py:raising: KeyError: 'nothing' ("),
        pytest.param("endless", 1, "lmforge: reward rewards.py:endless: ", marks=pytest.mark.slow),
        ("short", 1, "returned 1"),
    ],
)
def test_a_reward_that_always_fails_ends_the_run_as_one_that_is_wrong_does(
    reward: str, status: int, said: str, place: Path, tiny_run: Path, lmforge: Command
) -> None:
    options = [
        "--method",
        "grpo",
        "--data.files",
        "prompts.jsonl",
        "--rollout.num_generations",
        "4",
        "--rollout.max_completion_length",
        "8",
        *FEW,
    ]
    options += [
        "--rollout.reward_functions",
        f"rewards.py:{reward}",
        "--rollout.reward_timeout_seconds",
        "1",
        "--train.global_batch_size",
        "16",
    ]
    done = lmforge("align", "--model.source", tiny_run, *options, "--train.steps", "2", cwd=place)
    assert said in done.stderr, done.stderr
    assert done.returncode == status, done.stderr


GRPO = [
    "--method",
    "grpo",
    "--rollout.num_generations",
    "4",
    "--rollout.max_completion_length",
    "8",
    "--train.steps",
    "2",
    *FEW,
]


def test_a_column_that_some_prompts_have_is_none_for_the_others(
    place: Path, tiny_run: Path, lmforge: Command
) -> None:
    """A set of answers is to one prompt here: of two sets one is to a prompt without it."""
    options = [*GRPO, "--data.files", "answered.jsonl", "--train.global_batch_size", "4"]
    options += ["--rollout.reward_functions", "rewards.py:column"]
    done = lmforge("align", "--model.source", tiny_run, *options, "--run.name", "run", cwd=place)
    assert done.returncode == 0, done.stderr
    assert [record["reward"] for record in steps_of(place / "runs" / "run")] == [0.0, 0.0]
    assert [record["reward_failures"] for record in steps_of(place / "runs" / "run")] == [0.0, 0.0]


def test_columns_of_any_kind_do_no_harm_where_no_reward_takes_them(
    place: Path, tiny_run: Path, lmforge: Command
) -> None:
    options = [*GRPO, "--data.files", "dated.parquet", "--train.global_batch_size", "4"]
    options += ["--rollout.reward_functions", "rewards.py:answer_alone"]
    done = lmforge("align", "--model.source", tiny_run, *options, "--run.name", "run", cwd=place)
    assert done.returncode == 0, done.stderr
    assert [record["reward"] for record in steps_of(place / "runs" / "run")] == [4.0, 4.0]


def test_a_function_that_fails_on_another_rank_is_named_and_counted(
    place: Path, tiny_run: Path, lmforge: Command
) -> None:
    options = [*GRPO, "--data.files", "prompts.jsonl", "--train.global_batch_size", "8"]
    options += ["--rollout.reward_functions", "rewards.py:failing_elsewhere", "rewards.py:right"]
    done = lmforge(
        "align", "--model.source", tiny_run, *options, "--run.name", "run", cwd=place, ranks=2
    )
    assert done.returncode == 0, done.stderr
    # Once for each text of the error.
    assert (
        re.findall(r"reward rewards.py:failing_elsewhere: KeyError: .*rank (\d)", done.stderr)
        == ["1"] * 2
    )
    for record in steps_of(place / "runs" / "run"):
        # One function of two, on one rank of two; the other function judged every answer.
        assert (record["reward_failures"], record["no_reward"]) == (0.25, 0.0)


def steps_of(run: Path) -> list[dict[str, float]]:
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [record for record in records if "reward" in record]


def test_sequences_beyond_the_rotary_positions_are_warned_of(
    place: Path, tiny_options: list[str], lmforge: Command
) -> None:
    line = (
        "data.sequence_length = {}: this model's rotary positions are made for {} tokens"
        " (max_position_embeddings); "
    )
    words = [
        *tiny_options,
        "--train.steps",
        1,
        "--schedule.warmup_steps",
        0,
        "--model.max_position_embeddings",
    ]
    done = lmforge("pretrain", *words, 47, "--run.name", "short", cwd=place)
    assert done.stdout.count(line.format(48, 47)) == 1, done.stderr
    short = [
        "--model.source",
        "runs/short",
        "--data.files",
        "chats.jsonl",
        "--train.steps",
        1,
        "--train.global_batch_size",
        1,
    ]
    done = lmforge("sft", *short, *FEW, cwd=place)
    assert done.stdout.count(line.format(64, 47)) == 1, done.stderr


@pytest.mark.parametrize(("of_teacher", "whose"), [(64, []), (63, ["the teacher's"]), (None, [])])
def test_so_are_those_beyond_a_teachers(
    place: Path, tiny_run: Path, of_teacher: int | None, whose: list[str]
) -> None:
    config = recipe_of(SftConfig, place, tiny_run, data={"files": [str(place / "chats.jsonl")]})
    prepare_examples(config, ALONE)
    inputs = open_example_inputs(config, 1)
    teacher = of_teacher and replace(inputs.model_config, max_position_embeddings=of_teacher)
    lines = describe_long_sequences(config, replace(inputs, teacher=teacher or None))
    assert [line.partition(": ")[2].partition(" rotary")[0] for line in lines] == whose


def test_a_recipe_of_another_stage_is_refused(
    place: Path, tiny_run: Path, refused: Refusal
) -> None:
    recipe = tiny_run / "recipe.toml"
    said = refused("sft", recipe, "--data.files", place / "chats.jsonl")
    assert said.startswith(f"{recipe}: ")
    assert "this recipe is for `lmforge pretrain`, not for `lmforge sft`" in said
    of_alignment = Path(__file__).parents[3] / "recipes" / "quickstart-align.toml"
    assert "this recipe is for `lmforge align`, not for `lmforge bench`" in refused(
        "bench", of_alignment
    )
    assert "align.method = grpo is not predicted" in refused("plan", of_alignment)


def folder_of_chats(place: Path) -> Path:
    """Two files of conversations, and one that is none of records."""
    folder = place / "chats"
    folder.mkdir()
    for name, words in {"b.jsonl": ("one", "two"), "a.jsonl": ("three", "four")}.items():
        records = [{"messages": [{"role": "user", "content": each}, ANSWER]} for each in words]
        (folder / name).write_text("".join(json.dumps(record) + "\n" for record in records))
    (folder / "README.md").write_text("Chats.")
    return folder


def test_a_folder_is_its_files_by_name_and_a_tilde_is_home(
    place: Path, tiny_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = folder_of_chats(place)
    monkeypatch.setenv("HOME", str(place))
    ways = [[str(folder)], [str(folder / "a.jsonl"), str(folder / "b.jsonl")], ["~/chats"]]
    recipes = [
        recipe_of(SftConfig, place, tiny_run, data={"files": files, "validation_files": files})
        for files in ways
    ]
    [only] = {
        path
        for recipe in recipes
        for path in example_folder_paths(recipe, find_required_pretrained(recipe).tokenizer())
    }
    for recipe in recipes:
        prepare_examples(recipe, ALONE)
        summary = open_example_inputs(recipe, 1).data_summary
        assert (
            f"; trains and validates on the same 2 files, such as {(folder / 'a.jsonl').resolve()}"
            in summary
        )
    splits = ExampleFolder.open(only).manifest["splits"]
    assert (splits["train"]["examples"], splits["validation"]["examples"]) == (4, 4)


def test_so_it_is_of_prompts(place: Path, tiny_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = folder_of_chats(place)
    monkeypatch.setenv("HOME", str(place))
    requested = []
    for files in ([str(folder)], ["~/chats/a.jsonl", "~/chats/b.jsonl"]):
        rollout = {
            "reward_functions": [f"{place / 'rewards.py'}:right"],
            "num_generations": 4,
            "max_completion_length": 8,
        }
        data = {"files": files, "validation_files": files}
        recipe = recipe_of(
            AlignConfig, place, tiny_run, align={"method": "grpo"}, rollout=rollout, data=data
        )
        prepare_prompts(recipe, ALONE)
        inputs = open_prompt_inputs(recipe, 1)
        rows = inputs.train_dataset
        assert "; trains and validates on the same 2 files" in inputs.data_summary
        assert isinstance(rows.packing, PromptPacking)
        assert len(rows.packing.validation_prompts) == 4
        requested.append(
            (rows.plan_hash, [prompt.tokens.tolist() for prompt in rows.packing.prompts])
        )
    assert requested[0] == requested[1]


ENDLESS = """\
{% for m in messages %}{{ m.role + ': ' + m.content + '\\n' }}{% endfor %}
{%- if add_generation_prompt %}assistant: {% endif %}"""
THINKING = """\
{% for m in messages %}{{ '<|user|>' + m.content + '<|end|>' }}{% endfor %}
{%- if add_generation_prompt %}<think>{% endif %}"""


def test_a_template_that_ends_no_turn_is_refused_where_prompts_are_turns(
    place: Path, tiny_run: Path, refused: Refusal, lmforge: Command
) -> None:
    model = place / "model"
    assert lmforge("export", tiny_run, model).returncode == 0
    (model / "chat_template.jinja").write_text(ENDLESS)
    (place / "plain.jsonl").write_text('{"prompt": "1 + 1 ="}\n' * 4)
    options = [
        "--method",
        "grpo",
        *FEW,
        "--rollout.reward_functions",
        place / "rewards.py:right",
        "--rollout.max_completion_length",
        "8",
    ]
    options += ["--model.source", model, "--run.folder", place / "runs"]
    said = refused("align", *options, "--data.files", place / "prompts.jsonl")
    assert (
        "chat_template.jinja: never scores the end of turn: no special token ends the assistant's"
        " answer" in said
    )
    assert not any(path.name != ".lock" for path in place.glob("runs/*/*"))
    # Texts are ended by the separator, and an answer that is begun for the model needs no place in
    # a conversation.
    rollout = {
        "reward_functions": [f"{place / 'rewards.py'}:right"],
        "num_generations": 4,
        "max_completion_length": 8,
    }
    for template, file in ((ENDLESS, "plain.jsonl"), (THINKING, "prompts.jsonl")):
        (model / "chat_template.jinja").write_text(template)
        data = {"files": [str(place / file)]}
        open_prompt_inputs(
            recipe_of(
                AlignConfig, place, model, align={"method": "grpo"}, rollout=rollout, data=data
            ),
            1,
        )


def prompts_of(place: Path, source: Path, **data: object) -> RunInputs:
    rollout = {
        "reward_functions": [f"{place / 'rewards.py'}:right"],
        "num_generations": 4,
        "max_completion_length": 8,
    }
    data = {"files": [str(place / "many.jsonl")], **data}
    return open_prompt_inputs(
        recipe_of(AlignConfig, place, source, align={"method": "grpo"}, rollout=rollout, data=data),
        1,
    )


def sides_of(material: RunInputs) -> tuple[list[str], list[str]]:
    packing = material.train_dataset.packing
    assert isinstance(packing, PromptPacking)
    return [str(each.prompt) for each in packing.prompts], [
        str(each.prompt) for each in packing.validation_prompts
    ]


def test_a_share_of_the_prompts_is_held_out_and_equal_ones_are_on_one_side(
    place: Path, tiny_run: Path
) -> None:
    requested = [f"{number} + 1 =" for number in range(40)] * 2
    materials = {
        share: prompts_of(place, tiny_run, validation_ratio=share)
        for share in (0.0, 0.1, 0.25, 0.99)
    }
    for share, material in materials.items():
        prompts, held_out = sides_of(material)
        assert len(held_out) == {0.0: 0, 0.1: 8, 0.25: 20, 0.99: 78}[share]
        assert not set(prompts) & set(held_out)
        assert prompts == [each for each in requested if each in set(prompts)]
        assert held_out == [each for each in requested if each in set(held_out)]
        assert (
            f"80 of 80 records; {len(held_out)} for validation; 4 completions each"
            in material.data_summary
        )
    assert set(sides_of(materials[0.1])[1]) < set(sides_of(materials[0.25])[1])
    assert len({material.train_dataset.plan_hash for material in materials.values()}) == len(
        materials
    )


def test_files_that_are_held_out_leave_the_others_whole_and_are_told_of(
    place: Path, tiny_run: Path
) -> None:
    (place / "both.jsonl").write_text(
        (place / "long.jsonl").read_text() + '{"prompt": "1 + 2 ="}\n'
    )
    materials = [
        prompts_of(
            place, tiny_run, validation_files=[str(place / "both.jsonl")], validation_ratio=share
        )
        for share in (0.1, 0.2)
    ]
    prompts, held_out = sides_of(materials[0])
    assert (len(prompts), held_out) == (80, ["1 + 2 ="])
    assert (
        "80 of 80 records; validation: 1 of 4 records, 3 left out as too long; 4 completions"
        in materials[0].data_summary
    )
    assert materials[0].train_dataset.plan_hash == materials[1].train_dataset.plan_hash


def test_special_tokens_in_prompts_are_counted_or_parsed(place: Path, tiny_run: Path) -> None:
    (place / "spelled.jsonl").write_text('{"prompt": "<|user|>1 + 2 =<|end|>"}\n')
    (place / "plain.jsonl").write_text('{"prompt": "1 + 2 ="}\n')
    files = {name: [str(place / f"{name}.jsonl")] for name in ("spelled", "plain")}
    as_text, parsed = (
        prompts_of(
            place, tiny_run, files=files["spelled"], validation_ratio=0, parse_special_tokens=parse
        )
        for parse in (False, True)
    )
    said = "; 1 spell special tokens in plain text"
    assert (said in as_text.data_summary, said in parsed.data_summary) == (True, False)
    tokenizer = parsed.tokenizer
    assert isinstance(parsed.packed_dataset.packing, PromptPacking)
    [prompt] = parsed.packed_dataset.packing.prompts
    assert prompt.tokens.tolist() == tokenizer.encode(prompt.prompt, parse_special_tokens=True)  # type: ignore[arg-type]
    assert as_text.packed_dataset.plan_hash != parsed.packed_dataset.plan_hash
    plain = prompts_of(place, tiny_run, files=files["plain"], validation_ratio=0)
    assert "spell special" not in plain.data_summary


@pytest.mark.parametrize(
    ("tables", "said"),
    [
        (
            {"rollout": {"num_generations": 2}},
            "with other data options (rollout.num_generations 4 → 2); ",
        ),
        (
            {"rollout": {"max_completion_length": 6}},
            "with other data options (rollout.max_completion_length 8 → 6); ",
        ),
        (
            {"rollout": {"num_iterations": 2}},
            "with other data options (rollout.num_iterations 1 → 2); ",
        ),
        (
            {"data": {"fields": ["prompt=answer"]}},
            "with other data options (data.fields [] → ['prompt=answer']); ",
        ),
        (
            {"train": {"seed": 3}, "rollout": {"temperature": 0.5}},
            "with other data options (train.seed 0 → 3); ",
        ),
        ({}, "on other data; "),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_where_batches_of_a_resumed_run_would_be_others_the_message_names_what_differs(
    place: Path, tiny_run: Path, tables: dict[str, dict[str, object]], said: str
) -> None:
    rows = place / "rows.jsonl"
    rows.write_text(
        "".join(
            json.dumps({"prompt": f"{n} + 1 =", "answer": f"{n} + 2 ="}) + "\n" for n in range(20)
        )
    )

    def recipe(**changed: dict[str, object]) -> AlignConfig:
        rollout: dict[str, object] = {"reward_functions": [f"{place / 'rewards.py'}:right"]}
        rollout |= {"num_generations": 4, "max_completion_length": 8, **changed.get("rollout", {})}
        tables = {"rollout": rollout, "data": {"files": [str(rows)], **changed.get("data", {})}}
        return recipe_of(
            AlignConfig,
            place,
            tiny_run,
            align={"method": "grpo"},
            **tables,
            train=changed.get("train", {}),
        )

    begun = recipe()
    inputs = open_prompt_inputs(begun, 1)
    manifest = replace(
        read_manifest(Run(tiny_run).checkpoint_path(6)),
        recipe=begun.model_dump(mode="json"),
        plan_hash=inputs.train_dataset.plan_hash,
        global_batch_size=inputs.batch_plan.global_batch_size,
    )
    point = ResumePoint(place / "step-00000006", manifest)
    check_resumable(point, begun, inputs)
    if not tables:
        rows.write_text('{"prompt": "something else"}\n')
    changed = recipe(**tables)
    with pytest.raises(UserError) as refused:
        check_resumable(point, changed, open_prompt_inputs(changed, 1))
    assert str(refused.value).startswith(
        f"{place / 'step-00000006'}: trained {said}use the recipe it was begun with"
    )


def test_what_answers_to_a_share_of_the_prompts_earn_is_measured(
    place: Path, tiny_run: Path, lmforge: Command
) -> None:
    options = [
        *GRPO,
        "--data.files",
        "many.jsonl",
        "--train.global_batch_size",
        "4",
        "--rollout.reward_functions",
        "rewards.py:right",
    ]
    done = lmforge("align", "--model.source", tiny_run, *options, "--run.name", "run", cwd=place)
    assert done.returncode == 0, done.stderr
    assert "80 of 80 records; 2 for validation; 4 completions each" in done.stdout
    assert "val/reward" in steps_of(place / "runs" / "run")[-1]


@pytest.mark.parametrize("skip", [True, False])
def test_a_folder_is_trained_on_without_other_splits_and_what_cannot_be_used(
    skip: bool, place: Path, tiny_run: Path, lmforge: Command
) -> None:
    """One equal pair ends no run; a broken line does, unless it is to be left out."""
    pairs = (place / "pairs.jsonl").read_text()
    (place / "mixed").mkdir()
    (place / "mixed" / "train.jsonl").write_text(
        pairs + (place / "equal.jsonl").read_text() + "{\n" * skip
    )
    (place / "mixed" / "test.jsonl").write_text(pairs)
    words = [
        "--data.files",
        "mixed",
        "--data.folder",
        "examples",
        "--data.sequence_length",
        "64",
        *FEW,
    ]
    words += ["--data.skip_invalid", "true"] if skip else []
    done = lmforge("align", "--model.source", tiny_run, *words, "--run.name", "run", cwd=place)
    assert done.returncode == 0, done.stderr
    count = 2 if skip else 1
    assert f"; {count} left out that cannot be used, listed in its left-out.txt" in done.stdout
    assert "; mixed leaves out 1 file (split test 1)" in done.stdout
    [listed] = place.glob("examples/*/left-out.txt")
    assert listed.read_text().count("\n") == count
    assert (
        "mixed/train.jsonl, record 6: chosen and rejected are equal: there is nothing to prefer\n"
        in listed.read_text()
    )
