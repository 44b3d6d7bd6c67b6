"""Bad steps change nothing and are reported; after several in a row the run rolls back and
continues with later batches.
"""

import itertools
import json
import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from lmforge.cli import run as command
from lmforge.core.data.dataset import TokenDataset
from lmforge.core.data.shards.folder import TokenFolder
from lmforge.core.distributed.distributed import DistributedContext
from lmforge.core.distributed.rank_info import RankInfo
from lmforge.core.losses.language import NextTokenObjective
from lmforge.core.model.build import build_model
from lmforge.core.model.config import ModelConfig
from lmforge.core.model.init_weights import init_weights
from lmforge.core.optim.optimizer import build_optimizer, named_optimizer_state
from lmforge.core.options.builtin_names import BUILT_IN_NAMES
from lmforge.core.options.options import validate_options
from lmforge.core.options.sections import OptimizerOptions, ParallelOptions
from lmforge.core.parallel.parallel_model import step_unless, train_step
from lmforge.core.parallel.parallelize import parallelize
from lmforge.core.records.runs import Run
from lmforge.core.steps.bad_steps import BadStepDetector
from lmforge.hf.export import export_folder
from lmforge.hf.resolve import resolve_model_config
from lmforge.lab.bench.parity import SMALL_MODEL, ParityData
from tests.conftest import Command, without_shape
from tests.distributed.conftest import losses
from tests.seeds import fresh_random
from tests.support.grids import grid

ALONE = DistributedContext(RankInfo(), torch.device("cpu"), None)


def metrics_of(loss: float, count: int = 3) -> list[dict[str, tuple[torch.Tensor, torch.Tensor]]]:
    return [{"loss": (torch.tensor(loss * count), torch.tensor(count))}]


def judged(guard: BadStepDetector, step: int, loss: float, norm: float = 1.0) -> bool:
    return bool(guard.check(step, metrics_of(loss), torch.tensor(norm)))


def test_a_loss_or_gradient_that_is_not_finite_is_bad_and_counted_in_a_row() -> None:
    guard = BadStepDetector(ALONE, spike_sigmas=None, window_steps=8)
    series = [
        (1.0, 1.0),
        (math.nan, 1.0),
        (1.0, math.inf),
        (-math.inf, 1.0),
        (2.0, 1.0),
        (1e30, 1e30),
    ]
    assert [judged(guard, step, *values) for step, values in enumerate(series, 1)] == [
        False,
        True,
        True,
        True,
        False,
        False,
    ]
    heard = guard.take_bad_steps(wait=False, max_consecutive=99)
    assert [(bad.step, bad.reason) for bad in heard] == [
        (2, "loss is nan"),
        (3, "grad_norm is inf"),
        (4, "loss is -inf"),
    ]
    assert (guard.skipped_steps, guard.consecutive_bad_steps) == (3, 0)
    judged(guard, 7, math.nan)
    # The last one is not waited for.
    assert guard.take_bad_steps(wait=False, max_consecutive=99) == []
    assert [bad.step for bad in guard.take_bad_steps(wait=True, max_consecutive=99)] == [7]
    assert (guard.skipped_steps, guard.consecutive_bad_steps) == (4, 1)


def test_a_spike_is_bad_and_noise_is_not_and_a_resumed_guard_judges_alike() -> None:
    chance = fresh_random()
    guard = BadStepDetector(ALONE, spike_sigmas=6.0, window_steps=32)
    for step in range(1, 200):
        assert not judged(guard, step, 3 + 2 / step + chance.uniform(-0.1, 0.1)), step
    again = BadStepDetector(ALONE, spike_sigmas=6.0, window_steps=32)
    again.load_state_dict(json.loads(json.dumps(guard.state_dict())), batch_offset=0)
    for each in (guard, again):
        assert judged(each, 200, 5.0)
        assert not judged(each, 201, 3.05)
        assert not judged(each, 202, 0.5)  # to fall is no spike
    assert again.take_bad_steps(wait=True, max_consecutive=99)[-1].reason == "loss is 5, a spike"
    assert guard.state_dict()["losses"] == again.state_dict()["losses"]
    fresh = BadStepDetector(ALONE, spike_sigmas=6.0, window_steps=32)
    # Too few to tell.
    assert not any(judged(fresh, step, loss) for step, loss in enumerate([3.0, 3.0, 3.0, 9.0], 1))


EVERY_OPTIMIZER = pytest.mark.parametrize(
    "options",
    [
        *({"name": name} for name in BUILT_IN_NAMES["optimizer"]),
        {"state_dtype": "bf16"},
        {"name": "muon", "state_dtype": "bf16"},
        {"state_dtype": "8bit"},
        {"name": "muon", "state_dtype": "8bit"},
    ],
    ids=lambda options: " ".join(map(str, options.values())),
)


@EVERY_OPTIMIZER
def test_a_bad_step_leaves_weights_and_state_as_they_are_and_a_good_one_is_the_usual_step(
    options: dict[str, Any],
) -> None:
    shape = ModelConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
    )

    def stepped(bad: list[bool] | None) -> tuple[nn.Module, dict[str, dict[str, torch.Tensor]]]:
        model = init_weights(build_model(shape), 0)
        for parameter in model.parameters():  # a sign that adding zero loses
            parameter.data.view(-1)[:2] = torch.tensor([-0.0, 0.0])
        optimizer = build_optimizer(model, validate_options(OptimizerOptions, options))
        generator = torch.Generator().manual_seed(1)
        for verdict in bad if bad is not None else [False] * 3:
            for parameter in model.parameters():
                poison = math.nan if verdict else 0.0
                parameter.grad = (
                    torch.randn(parameter.shape, generator=None if verdict else generator) + poison
                )
            if bad is None:
                optimizer.step()
            else:
                step_unless(optimizer, torch.tensor(verdict))
        return model, named_optimizer_state(model, optimizer)

    usual, usual_state = stepped(None)
    guarded, guarded_state = stepped([False, True, False, True, True, False, True])
    for (name, theirs), ours in zip(usual.named_parameters(), guarded.parameters(), strict=True):
        assert same_bits(ours, theirs), name
        for kind, tensor in usual_state.get(name, {}).items():
            assert same_bits(guarded_state[name][kind], tensor), (name, kind)


def same_bits(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    return torch.equal(ours, theirs) and torch.equal(ours.signbit(), theirs.signbit())


class HostReads(TorchDispatchMode):
    """Counts values that the host reads from tensors, for which it would wait for a GPU."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@EVERY_OPTIMIZER
def test_the_host_reads_no_value_in_a_step_whatever_the_optimizer(options: dict[str, Any]) -> None:
    objective, data, guard = (
        NextTokenObjective(),
        ParityData(sequences=4),
        BadStepDetector(ALONE, spike_sigmas=6.0, window_steps=32),
    )
    model = parallelize(
        init_weights(build_model(SMALL_MODEL), 0),
        objective.loss,
        dist_ctx=ALONE,
        dtype=torch.float32,
        options=ParallelOptions(engine="single"),
    )
    optimizer = build_optimizer(model.model, validate_options(OptimizerOptions, options))
    with HostReads() as reads:
        for step in range(2):
            batch = data.batch(step, SMALL_MODEL.vocab_size)
            judge = partial(guard.check, step + 1)
            train_step(
                model,
                optimizer,
                [batch[:2], batch[2:]],
                objective.num_items,
                lr=0.1,
                max_grad_norm=1.0,
                is_bad_step=judge,
            )
        assert reads.count == 0
        assert torch.ones(1).item() == reads.count  # it does count


@pytest.fixture(scope="module")
def poisoned(tiny_tokens: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[int]]:
    """A model whose embedding of one token is infinite, and which of the first 40 batches of 4 rows
    have the token.
    """
    folder = TokenFolder.open(tiny_tokens)
    rows = TokenDataset(folder, sequence_length=48).sequences(0, 160)
    batches = [
        {token for row in rows[first : first + 4] for token in row.tokens.tolist()}
        for first in range(0, 160, 4)
    ]
    counts = {
        token: [number for number, has in enumerate(batches) if token in has]
        for token in range(folder.tokenizer.vocab_size)
    }
    # Four batches or a few more, the first of them after a checkpoint, no two in a row, and the
    # third a while after the second: a run that has gone back from two is a few batches ahead.
    token, hit = next(
        (token, hit)
        for token, hit in counts.items()
        if 4 <= len(hit) <= 6
        and hit[0] > 3
        and hit[2] - hit[1] > 8
        and all(b - a > 2 for a, b in itertools.pairwise(hit))
    )
    shape = resolve_model_config(
        "nano",
        {
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
        },
        len(counts),
    )
    model = init_weights(build_model(shape), 0)
    with torch.no_grad():
        model.get_parameter("model.embed_tokens.weight")[token] = math.inf
    source = tmp_path_factory.mktemp("poisoned") / "model"
    export_folder(model, shape, source, tokenizer_folder=tiny_tokens / "tokenizer")
    return source, hit


def test_batches_that_give_no_number_are_left_out_named_and_shown_on_any_ranks(
    poisoned: tuple[Path, list[int]], tiny_options: list[str], tmp_path: Path, lmforge: Command
) -> None:
    source, hit = poisoned
    words = [
        *without_shape(tiny_options),
        "--model.source",
        source,
        "--run.folder",
        tmp_path,
        "--train.steps",
        40,
    ]
    words += [
        "--validation.every_steps",
        "none",
        "--validation.sequences",
        1,
        "--optimizer.lr",
        1e-3,
    ]
    alone = lmforge("pretrain", *words, "--run.name", "single")
    ranks = lmforge("pretrain", *words, "--run.name", "ranks", ranks=2)
    for done, name in ((alone, "single"), (ranks, "ranks")):
        assert done.returncode == 0, done.stderr
        run = Run(tmp_path / name)
        files = sorted((run.path / "bad").iterdir())
        assert [json.loads(file.read_text())["samples"] for file in files] == [
            [4 * at, 4 * at + 4] for at in hit
        ]
        assert run.read_metrics()[-1]["skipped_steps"] == len(hit)
        lines = [line for line in done.stderr.splitlines() if line.startswith("lmforge: step ")]
        assert [int(line.split()[2].rstrip(":")) for line in lines] == [at + 1 for at in hit], (
            done.stderr
        )
        assert set(range(1, 41)) - losses(run).keys() == {at + 1 for at in hit}
    theirs = losses(Run(tmp_path / "single"))
    assert losses(Run(tmp_path / "ranks")) == pytest.approx(theirs, rel=1e-4)
    shown = lmforge("show", "data", sorted((tmp_path / "single" / "bad").iterdir())[0])
    assert shown.returncode == 0, shown.stderr
    assert f"samples {4 * hit[0]} to {4 * hit[0] + 3} of " in shown.stdout
    assert shown.stdout.count("\nsample ") == 4


@pytest.fixture(scope="module")
def broken(tiny_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model every step of which is bad."""
    folder = tmp_path_factory.mktemp("broken") / "model"
    assert command(["export", str(tiny_run), str(folder), "--dtype", "fp32"]) == 0
    tensors = load_file(folder / "model.safetensors")
    save_file(
        {name: torch.full_like(tensor, math.nan) for name, tensor in tensors.items()},
        folder / "model.safetensors",
    )
    return folder


FEW = [
    "--data.sequence_length",
    64,
    "--train.global_batch_size",
    4,
    "--train.dtype",
    "fp32",
    "--train.device",
    "cpu",
]
FEW += [
    "--train.compile",
    "off",
    "--train.threads",
    1,
    "--log.every_steps",
    1,
    "--faults.max_bad_steps",
    9,
]


@pytest.mark.slow
def test_a_resumed_run_all_of_whose_steps_are_bad_does_not_finish(
    poisoned: tuple[Path, list[int]],
    tiny_options: list[str],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    source, hit = poisoned
    words = [
        "pretrain",
        *without_shape(tiny_options),
        "--model.source",
        source,
        "--run.folder",
        tmp_path,
        "--run.name",
        "a",
    ]
    words += [
        "--validation.every_steps",
        "none",
        "--validation.sequences",
        1,
        "--schedule.name",
        "constant",
        "--train.steps",
    ]
    assert command([str(word) for word in [*words, hit[0]]]) == 0
    assert command([str(word) for word in [*words, hit[0] + 1]]) == 1
    assert (
        f"all steps from step {hit[0] + 1} on were bad, and nothing was"
        in capfd.readouterr().err.splitlines()[-1]
    )


@pytest.mark.parametrize(("method", "packing"), grid(["sft", "orpo"], ["best-fit", "none"]))
def test_the_samples_of_a_bad_step_of_examples_are_shown(
    method: str, packing: str, broken: Path, tmp_path: Path, lmforge: Command
) -> None:
    answer = {"completion": " 2"} if method == "sft" else {"chosen": " 2", "rejected": " 3"}
    lines = [json.dumps({"prompt": f"{n} =", **answer}) + "\n" for n in range(40)]
    (tmp_path / "examples.jsonl").write_text("".join(lines))
    words = ["sft"] if method == "sft" else ["align", "--method", method]
    words += ["--model.source", broken, "--data.files", "examples.jsonl", "--data.packing", packing]
    done = lmforge(*words, *FEW, "--train.steps", 2, "--run.name", "bad", cwd=tmp_path, ranks=2)
    assert done.returncode == 1, done.stderr
    assert (
        "all steps from step 1 on were bad, and nothing was learned; the last one: loss is nan; "
        in done.stderr.splitlines()[-1]
    )
    first, second = sorted((tmp_path / "runs" / "bad" / "bad").iterdir())
    assert f"not used, and its samples are named in {first.relative_to(tmp_path)}" in done.stderr
    shown = lmforge("show", "data", second, cwd=tmp_path)
    assert shown.returncode == 0, shown.stderr
    assert shown.stdout.startswith("step 2: loss is nan; samples 4 to 7 of ")
    assert shown.stdout.count("[") == shown.stdout.count("<|endoftext|>]") >= 4


@pytest.mark.slow
@pytest.mark.parametrize("every", [1, 2])
def test_the_answers_of_a_bad_step_of_rollouts_are_shown_where_they_were_written(
    every: int, tiny_run: Path, tmp_path: Path, lmforge: Command
) -> None:
    """Rewards so far apart that an advantage is infinite in fp32.

    Two steps on each set, the answers of two ranks.
    """
    (tmp_path / "prompts.jsonl").write_text(
        "".join(json.dumps({"prompt": f"{n} ="}) + "\n" for n in range(20))
    )
    reward = (
        "def reward(prompts, completions):\n    return [1e300 * (n % 2) for n in"
        " range(len(prompts))]\n"
    )
    (tmp_path / "rewards.py").write_text(reward)
    words = [
        "--method",
        "grpo",
        "--model.source",
        tiny_run,
        "--data.files",
        "prompts.jsonl",
        "--rollout.scale_rewards",
        "none",
    ]
    words += [
        "--rollout.reward_functions",
        "rewards.py:reward",
        "--rollout.num_generations",
        2,
        "--rollout.max_completion_length",
        4,
    ]
    words += ["--rollout.num_iterations", 2, "--rollout.log_completions_every", every]
    done = lmforge(
        "align", *words, *FEW, "--train.steps", 4, "--run.name", "bad", cwd=tmp_path, ranks=2
    )
    assert done.returncode == 1, done.stderr
    bad = sorted((tmp_path / "runs" / "bad" / "bad").iterdir())
    assert len(bad) == 4
    tables = [
        tmp_path / "runs" / "bad" / "completions" / f"set-000000-rank-{rank}.jsonl"
        for rank in range(2)
    ]
    answers = [
        json.loads(line)["completion"]
        for table in tables
        for line in table.read_text().splitlines()[2:]
    ]
    shown = lmforge("show", "data", bad[1], cwd=tmp_path)
    assert shown.returncode == 0, shown.stderr
    assert "its completions are in runs/bad/completions/set-000000-rank-*.jsonl" in done.stderr
    assert shown.stdout.startswith("step 2: loss is ")
    texts = [
        line for line in shown.stdout.splitlines() if line.startswith(("'", '"'))
    ]  # prompts and answers by turns
    assert texts[1::2] == [repr(answer) for answer in answers]
    later = lmforge("show", "data", bad[2], cwd=tmp_path)
    assert (later.returncode == 0) == (every == 1)
    assert (
        "the completions of this step were not written; --rollout.log_completions_every 1"
        in later.stderr
    ) == (every == 2)
    assert ("its completions were not written (rollout.log_completions_every)" in done.stderr) == (
        every == 2
    )


def test_after_bad_steps_in_a_row_the_run_goes_back_and_on_with_the_batches_after_them(
    poisoned: tuple[Path, list[int]],
    tiny_options: list[str],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """One bad step is already a row here.

    The checkpoint it goes back to is of two steps before or less.
    """
    source, hit = poisoned
    options = without_shape(tiny_options)
    at = options.index("--data.folder")
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(f'[[data.sources]]\nfolder = "{options[at + 1]}"\n')
    words = ["pretrain", recipe, *options[:at], *options[at + 2 :], "--model.source", source]
    words += ["--run.folder", tmp_path, "--run.name", "a"]
    words += [
        "--validation.every_steps",
        "none",
        "--validation.sequences",
        1,
        "--faults.max_bad_steps",
        1,
    ]
    assert (
        command(
            [
                str(word)
                for word in [*words, "--train.steps", hit[1] + 4, "--schedule.name", "constant"]
            ]
        )
        == 0
    )
    errors = capfd.readouterr().err
    back = [
        int(line.partition("back to step ")[2].split(",")[0])
        for line in errors.splitlines()
        if "back to step" in line
    ]
    assert len(back) == 2, errors
    assert back[0] == hit[0] // 2 * 2
    # The batch of a step is now so many later.
    assert [
        json.loads(file.read_text())["samples"][0] // 4
        for file in sorted((tmp_path / "a" / "bad").iterdir())
    ] == hit[:2]
    run = Run(tmp_path / "a")
    assert sorted(losses(run)) == list(range(1, hit[1] + 5))
    manifest = json.loads(
        (run.checkpoint_path(run.checkpoint_steps()[-1]) / "manifest.json").read_text()
    )
    left_out = manifest["consumed_sequences"] // 4 - manifest["step"]
    assert left_out == (hit[0] + 1 - back[0]) + (hit[1] + 1 - (hit[0] + 1 - back[0]) - back[1])
    # What was left out has been read, and the rest of the run lies after it.
    last, steps = run.read_metrics()[-1], hit[1] + 4
    assert (last["batch_offset"], last["tokens"]) == (left_out, (steps + left_out) * 4 * 48)
    assert command(["show", str(run.path)]) == 0
    (row,) = [
        line.split()
        for line in capfd.readouterr().out.splitlines()
        if line.split()[:1] == ["tokens"] and "%" in line
    ]
    assert row[1] == row[4] == f"{last['tokens']:,.0f}"
    # Continued, it goes on with the same batches as it would have.
    assert (
        command(
            [
                str(word)
                for word in [*words, "--train.steps", hit[2] + 2, "--schedule.name", "constant"]
            ]
        )
        == 0
    )
    named = {
        json.loads(file.read_text())["samples"][0] // 4 for file in (run.path / "bad").iterdir()
    }
    assert named in (set(hit[:3]), set(hit))
