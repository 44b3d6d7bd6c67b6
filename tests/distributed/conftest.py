"""Real ranks: processes that communicate through gloo. A few tests use torch's launcher."""

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from _pytest.mark import ParameterSet

from lmforge.core import checkpoint
from lmforge.core.checkpoint import Manifest
from lmforge.core.model.build import build_model
from lmforge.core.model.init_weights import named_tensors
from lmforge.core.model.resolve import stored_model_config
from lmforge.core.records.runs import Run
from lmforge.lab.bench.bounds import FP32
from tests.distributed.shapes import SAMPLES, SHAPES
from tests.seeds import fresh_seed
from tests.support.preloaded import on_ranks
from tests.support.rounding import assert_rounding_apart, each_apart, weights_apart

HERE = Path(__file__).parent
Case = tuple[str, list[str]]


def run_cases(ranks: int, cases: list[list[str]], folder: Path, **variables: str) -> None:
    """Run pretraining command lines on `ranks` ranks that are started once, with these variables of
    the environment.
    """
    file = folder / f"cases-{ranks}-{len(list(folder.glob('cases-*')))}.json"
    file.write_text(json.dumps(cases))
    on_ranks(ranks, HERE / "several_runs.py", folder, file, variables=variables)


class Trials(dict[int, Path]):
    """Folders with results of strategies.py, by the number of ranks; the cases of a number run when
    it is first used. If they fail, every test that uses them does, with the same cause.
    """

    def __init__(self, folder: Path, kind: str = "plain", which: str = "all") -> None:
        super().__init__()
        self._folder, self._args = folder, [kind, which]
        self._failures: dict[int, BaseException] = {}

    def __missing__(self, ranks: int) -> Path:
        if ranks in self._failures:
            raise self._failures[ranks]
        folder, seed = (
            self._folder / f"ranks-{ranks}",
            fresh_seed(13, of=f"strategies {self._args} on {ranks} ranks"),
        )
        folder.mkdir(parents=True)
        try:
            on_ranks(ranks, HERE / "strategies.py", folder, folder, seed, *self._args)
        except BaseException as problem:
            self._failures[ranks] = problem
            raise
        return self.setdefault(ranks, folder)


class SampledTrials:
    """Results of strategies.py for the cases of `make test`, and, when a slow test uses them, for
    the others of its model config: all at once would take longer than a test may.
    """

    def __init__(self, folder: Path, kind: str) -> None:
        self._kind = kind
        self._trials = {
            which: Trials(folder / which, kind, which)
            for which in ("sample", *(f"rest of {shape}" for shape in SHAPES))
        }

    def read(self, world_size: int, name: str, rank: int | None = None) -> Any:
        """The result of a case; with `rank`, the memory of that rank."""
        which = "sample"
        if not is_sampled(self._kind, world_size, name):
            shape = max((each for each in SHAPES if name.startswith(f"{each} ")), key=len)
            which = f"rest of {shape}"
        file = f"{name}.json" if rank is None else f"{name}-{rank}.json"
        return json.loads((self._trials[which][world_size] / file).read_text())


def is_sampled(kind: str, world_size: int, name: str) -> bool:
    """Whether a case, named with its model config, is in `make test`."""
    cases = SAMPLES[kind].get(world_size, {})
    return name in {f"{shape} {case}" for shape, names in cases.items() for case in names}


def assert_is_one_process(result: dict[str, Any]) -> None:
    """The result of a case is that of one process: the loss to 1e-6, gradient norms and weights to
    rounding.
    """
    assert result["loss"] <= FP32.loss
    assert_rounding_apart(
        *(
            {name: each[name] for name in ("gradient_norm", "weights")}
            for each in (result, result["rounding"])
        )
    )


def sampled(kind: str, cases: Iterable[tuple[Any, ...]], shape: str = "") -> list[ParameterSet]:
    """Cases (world size, name, …) to parametrize a test with: those that are not in the sample are
    slow.
    """
    needs = with_needs(cases, name_at=1)
    prefix = f"{shape} " if shape else ""
    return [
        case
        if is_sampled(kind, case.values[0], f"{prefix}{case.values[1]}")
        else pytest.param(*case.values, marks=[*case.marks, pytest.mark.slow])
        for case in needs
    ]


def with_needs(cases: Iterable[tuple[Any, ...]], name_at: int = -1) -> list[ParameterSet]:
    """Cases to parametrize a test with, each with its name at `name_at`; compiled cases need a C++
    compiler.
    """
    compiler = pytest.mark.needs("a C++ compiler")
    return [
        pytest.param(*case, marks=[compiler] if "compiled" in case[name_at] else [])
        for case in cases
    ]


def losses(run: Run, name: str = "loss") -> dict[int, float]:
    """Loss by step, from the metrics of the run."""
    return {record["step"]: record[name] for record in run.read_metrics() if name in record}


def newest_checkpoint(path: Path) -> tuple[Path, Manifest]:
    """The checkpoint in a folder, or the newest intact one of a run; every file is read and
    verified.
    """
    opened, _ = checkpoint.open_checkpoint(
        path, lambda folder, _: (folder, checkpoint.verify(folder))
    )
    return opened


def weights(run: Run, step: int | None = None) -> dict[str, torch.Tensor]:
    """The tensors of a checkpoint (default: the newest), by name, opened in this single process."""
    folder, manifest = newest_checkpoint(run.path if step is None else run.checkpoint_path(step))
    model = build_model(stored_model_config(manifest))
    tensors = {name: tensor.detach() for name, tensor in named_tensors(model)}
    checkpoint.load(folder, {"model": tensors})
    return tensors


def rounded(reference: Run) -> Run:
    """The reference with other rounding, which was trained beside it."""
    return Run(reference.path.with_name(f"{reference.path.name} rounded"))


def assert_agree(run: Run, reference: Run, *, validated: bool = True) -> None:
    """Losses, gradient norms and the last weights are those of another split in fp32."""
    assert_rounding_apart(apart(run, reference), apart(rounded(reference), reference))
    bounds = {"loss": FP32.loss} | ({"val/loss": FP32.loss} if validated else {})
    for name, largest in bounds.items():
        expected = losses(reference, name)
        assert expected, name
        assert losses(run, name) == pytest.approx(expected, rel=largest, abs=0), name


def apart(run: Run, reference: Run) -> dict[str, float]:
    """How far gradient norms and the last weights of two runs are apart."""
    ours, theirs = (
        {str(step): norm for step, norm in losses(each, "grad_norm").items()}
        for each in (run, reference)
    )
    return {
        "gradient_norm": max(each_apart(ours, theirs).values()),
        **weights_apart(weights(run), weights(reference)),
    }


@pytest.fixture(scope="session")
def small_shape() -> list[str]:
    """Options of a model small enough for many runs, with odd sizes and grouped heads."""
    sizes = {
        "hidden_size": 36,
        "intermediate_size": 52,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
    }
    return [word for name, value in sizes.items() for word in (f"--model.{name}", str(value))]


Recipe = Callable[..., list[str]]
RECIPE_STEPS = 6  # a checkpoint is saved after the first half


@pytest.fixture(scope="session")
def recipe(
    tiny_tokens: Path, small_shape: list[str], tmp_path_factory: pytest.TempPathFactory
) -> Recipe:
    """`recipe(run_folder, name, *more)`: a command line of 6 steps of 12 sequences of 48 tokens in
    fp32.

    Epsilon is larger than in real training, so that AdamW's step depends on the size of a gradient.
    With the usual one, a gradient that is zero up to rounding becomes a full step, in a direction
    that the order of a sum decides.
    """

    def line(folder: Path, name: str, *more: str) -> list[str]:
        args = [
            "--data.folder",
            str(tiny_tokens),
            "--data.sequence_length",
            "48",
            "--run.folder",
            str(folder),
            "--run.name",
            name,
        ]
        args += [
            "--train.steps",
            str(RECIPE_STEPS),
            "--train.global_batch_size",
            "12",
            "--train.dtype",
            "fp32",
            "--train.compile",
            "off",
            "--train.seed",
            "3",
        ]
        # With so little work, more threads would only wait for each other.
        args += [
            "--train.device",
            "cpu",
            "--train.threads",
            "1",
            "--schedule.warmup_steps",
            "3",
            "--optimizer.lr",
            "3e-3",
            "--optimizer.eps",
            "1e-3",
            "--log.every_steps",
            "1",
        ]
        args += ["--checkpoint.every_steps", str(RECIPE_STEPS // 2), "--validation.sequences", "5"]
        return [*args, *small_shape, *more]

    return line
