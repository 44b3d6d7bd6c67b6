"""For every optimizer, a step does not depend on the strategy, and a resumed run has the same
bits.
"""

import itertools
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from lmforge.core.records.runs import Run
from lmforge.lab.bench import bounds
from tests.distributed.conftest import (
    HERE,
    RECIPE_STEPS,
    Recipe,
    losses,
    newest_checkpoint,
    rounded,
    run_cases,
    weights,
)
from tests.seeds import fresh_seed
from tests.support.grids import parametrize
from tests.support.preloaded import on_ranks
from tests.support.rounding import OTHER_ROUNDING, assert_rounding_apart, weights_apart

MUON = ["--optimizer.name", "muon"]
BF16 = ["--optimizer.state_dtype", "bf16"]
BITS = ["--optimizer.state_dtype", "8bit"]
ROUNDED = [*BITS, "--optimizer.stochastic_rounding", "--train.master_dtype", "bf16"]
DDP = ["--parallel.engine", "ddp"]
STRATEGIES: dict[str, tuple[int, list[str]]] = {
    "muon single": (1, MUON),
    "muon fsdp2 on 2": (2, MUON),
    "muon bf16 weights fsdp2 on 2": (2, [*MUON, "--train.master_dtype", "bf16"]),
    "muon ddp on 2": (2, [*MUON, *DDP]),
    "muon fsdp2 on 3": (3, MUON),
    "adamw bf16 single": (1, BF16),
    "adamw bf16 fsdp2 on 2": (2, BF16),
    "muon bf16 fsdp2 on 2": (2, [*MUON, *BF16]),
    "adamw 8bit single": (1, BITS),
    "adamw 8bit fsdp2 on 2": (2, BITS),
    "muon 8bit rounded fsdp2 on 2": (2, [*MUON, *ROUNDED]),
    "adamw 8bit rounded fsdp2 on 2": (2, ROUNDED),
}
# Resumed from the middle of the first run, on this number of ranks, with these options.
RESUMED: dict[str, tuple[str, int, list[str]]] = {
    "muon resumed": ("muon fsdp2 on 2", 2, MUON),
    "muon resumed single": ("muon fsdp2 on 2", 1, MUON),
    "adamw bf16 resumed": ("adamw bf16 fsdp2 on 2", 2, BF16),
    "muon bf16 resumed": ("muon bf16 fsdp2 on 2", 2, [*MUON, *BF16]),
    "adamw 8bit resumed": ("adamw 8bit fsdp2 on 2", 2, BITS),
    "adamw 8bit resumed single": ("adamw 8bit fsdp2 on 2", 1, BITS),
    "adamw 8bit rounded resumed": ("adamw 8bit rounded fsdp2 on 2", 2, ROUNDED),
    "muon 8bit rounded resumed": ("muon 8bit rounded fsdp2 on 2", 2, [*MUON, *ROUNDED]),
    "adamw bf16 resumed in fp32": ("adamw bf16 fsdp2 on 2", 1, []),
}


# The runs of `make test`.
FAST = ("muon single", "muon fsdp2 on 2", "muon resumed")


@dataclass(frozen=True)
class Runs:
    """The finished runs by name. Those of slow tests are made when the first of them is asked
    for.
    """

    recipe: Recipe
    folder: Path

    def __getitem__(self, name: str) -> Run:
        if not (self.folder / name).exists():
            self._train([each for each in (*STRATEGIES, *RESUMED) if each in FAST])
        if not (self.folder / name).exists():
            self._train([each for each in (*STRATEGIES, *RESUMED) if each not in FAST])
        return Run(self.folder / name)

    def _train(self, names: list[str]) -> None:
        if (self.folder / names[0]).exists():
            return
        begun = {name: STRATEGIES[name] for name in names if name in STRATEGIES}
        self._run(begun)
        resumed = {name: RESUMED[name] for name in names if name in RESUMED}
        for name, (source, _, _) in resumed.items():
            run = Run(self.folder / name)
            left = shutil.ignore_patterns(".lock", "metrics.jsonl")
            shutil.copytree(self.folder / source, run.path, ignore=left)
            shutil.rmtree(run.checkpoint_path(RECIPE_STEPS))
        self._run({name: (ranks, more) for name, (_, ranks, more) in resumed.items()})
        rounded = {
            f"{name} rounded": case
            for name, case in begun.items()
            if re.fullmatch(r"\w+ single", name)
        }
        self._run(rounded, **OTHER_ROUNDING)

    def _run(self, cases: dict[str, tuple[int, list[str]]], **variables: str) -> None:
        for ranks in sorted({ranks for ranks, _ in cases.values()}):
            lines = [
                self.recipe(self.folder, name, *more)
                for name, (count, more) in cases.items()
                if count == ranks
            ]
            run_cases(ranks, lines, self.folder, **variables)


@pytest.fixture(scope="module")
def runs(recipe: Recipe, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(recipe, tmp_path_factory.mktemp("optimizers"))


def states(run: Run) -> dict[str, torch.Tensor]:
    """Every tensor of the newest checkpoint as it is stored, model and optimizer, by name."""
    reader = dcp.FileSystemReader(newest_checkpoint(run.path)[0])
    described = reader.read_metadata().state_dict_metadata
    tensors = {
        name: torch.empty(each.size, dtype=each.properties.dtype)
        for name, each in described.items()
    }
    dcp.load(tensors, storage_reader=reader, no_dist=True)
    return tensors


def assert_close(run: Run, reference: Run, steps: range = range(1, RECIPE_STEPS + 1)) -> None:
    theirs = losses(reference)
    assert losses(run) == pytest.approx(
        {step: theirs[step] for step in steps}, rel=bounds.FP32.loss
    )
    assert_rounding_apart(
        *(weights_apart(weights(each), weights(reference)) for each in (run, rounded(reference)))
    )


@parametrize(
    "name",
    [name for name in STRATEGIES if not {"single", "bf16", "8bit"} & {*name.split()}],
    fast=(0,),
)
def test_losses_and_weights_do_not_depend_on_the_strategy(runs: Runs, name: str) -> None:
    assert_close(runs[name], runs[f"{name.split()[0]} single"])


@parametrize(
    "name",
    [name for name, (begun, *how) in RESUMED.items() if (*how,) == STRATEGIES[begun]],
    fast=(0,),
)
def test_a_resumed_run_has_the_same_bits(runs: Runs, name: str) -> None:
    unbroken = runs[RESUMED[name][0]]
    assert losses(runs[name]) == {
        step: loss for step, loss in losses(unbroken).items() if step > RECIPE_STEPS // 2
    }
    ours, theirs = states(runs[name]), states(unbroken)
    assert ours.keys() == theirs.keys()
    for tensor in theirs:
        assert torch.equal(ours[tensor], theirs[tensor]), tensor


@pytest.mark.slow
def test_a_muon_run_resumes_on_another_number_of_ranks(runs: Runs) -> None:
    assert_close(
        runs["muon resumed single"],
        runs["muon single"],
        range(RECIPE_STEPS // 2 + 1, RECIPE_STEPS + 1),
    )


@pytest.mark.slow
def test_bf16_state_is_stored_in_bf16_and_loads_into_fp32(runs: Runs) -> None:
    stored, widened = (
        states(runs["adamw bf16 fsdp2 on 2"]),
        states(runs["adamw bf16 resumed in fp32"]),
    )
    moments = [name for name in stored if ".exp_avg" in name]
    assert moments
    assert {stored[name].dtype for name in moments} == {torch.bfloat16}
    assert {widened[name].dtype for name in moments} == {torch.float32}
    theirs = losses(runs["adamw bf16 single"])
    for name in ("adamw bf16 fsdp2 on 2", "adamw bf16 resumed in fp32"):
        for step, loss in losses(runs[name]).items():
            assert loss == pytest.approx(theirs[step], rel=bounds.BF16_STATES.loss)


@pytest.mark.slow
def test_states_in_8_bits_are_those_of_one_process_but_for_a_code_now_and_then(
    runs: Runs,
) -> None:
    theirs = losses(runs["adamw 8bit single"])
    for name in ("adamw 8bit fsdp2 on 2", "adamw 8bit resumed single"):
        for step, loss in losses(runs[name]).items():
            assert loss == pytest.approx(theirs[step], rel=bounds.BF16_STATES.loss)
    ours, kept = states(runs["adamw 8bit fsdp2 on 2"]), states(runs["adamw 8bit single"])
    in_bytes = [name for name, each in kept.items() if each.dtype == torch.uint8]
    assert in_bytes
    for name in in_bytes:
        assert float((ours[name] != kept[name]).float().mean()) < 0.2, name


@pytest.mark.slow
def test_every_optimizer_lowers_the_loss_differently(runs: Runs) -> None:
    """The comparisons above would pass if every run were the same."""
    narrow = "muon bf16 weights fsdp2 on 2"
    last = {
        name: losses(runs[name])[RECIPE_STEPS]
        for name in ("muon single", "adamw bf16 single", narrow)
    }
    assert all(loss < losses(runs[name])[1] - 0.01 for name, loss in last.items()), last
    assert last.pop(narrow) != losses(runs["muon fsdp2 on 2"])[RECIPE_STEPS]
    # Far more apart than runs that are to be the same may be.
    assert all(
        abs(one - other) > 1e-5 * one for one, other in itertools.combinations(last.values(), 2)
    ), last


def test_momentum_is_kept_for_hidden_matrices_and_moments_for_the_rest(
    runs: Runs,
) -> None:
    kept = states(runs["muon fsdp2 on 2"])
    assert "optimizer.model.layers.0.mlp.up_proj.weight.momentum_buffer" in kept
    assert "optimizer.model.layers.0.mlp.up_proj.weight.exp_avg" not in kept
    for name in (
        "model.embed_tokens.weight",
        "lm_head.weight",
        "model.layers.0.input_layernorm.weight",
    ):
        assert {f"optimizer.{name}.exp_avg", f"optimizer.{name}.exp_avg_sq"} < kept.keys()
        assert f"optimizer.{name}.momentum_buffer" not in kept


def test_muon_computes_the_weights_of_one_process_on_any_mesh_and_for_any_sizes(
    tmp_path: Path,
) -> None:
    seed = fresh_seed()
    on_ranks(4, HERE / "muon_on_meshes.py", tmp_path, seed)
