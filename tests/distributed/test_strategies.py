"""Every strategy computes what one process computes, and holds the share of memory that it promises."""

import json
import secrets
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lmforge.model.activations import saved_bytes
from lmforge.train.parity import Case, cases
from tests.distributed.shapes import CASES_OF_SHAPES, SHAPES, compiled

HERE = Path(__file__).parent
# fp32 sums in another order, over 10 steps: of the loss and of the gradient's norm, and of weights to their tensor's largest.
TOLERANCE = 1e-6


def names(ranks: int) -> Iterator[str]:
    for shape in SHAPES:
        for case in cases(ranks, compiled(shape, ranks)):
            if shape == "llama" or case.name.startswith(CASES_OF_SHAPES):
                yield f"{shape} {case.name}"


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """The folder of the trials' results, by the number of ranks."""
    folders = {}
    for ranks in (1, 2, 3, 4):
        folders[ranks] = tmp_path_factory.mktemp(f"ranks-{ranks}")
        seed = secrets.randbelow(10_000)
        print(f"{ranks} ranks: seed {seed}")
        shapes = list(SHAPES) if ranks != 3 else ["llama", "tied"]
        launcher = ["torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        command = [
            sys.executable,
            "-m",
            *launcher,
            "-m",
            "tests.distributed.strategies",
            str(folders[ranks]),
            str(seed),
            *shapes,
        ]
        done = subprocess.run(command, cwd=HERE.parents[1], capture_output=True, text=True, timeout=500)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    return folders


def result(folder: Path, name: str) -> dict[str, Any]:
    return json.loads((folder / f"{name}.json").read_text())


ALL = [(ranks, name) for ranks in (1, 2, 4) for name in names(ranks)]
ALL += [(3, name) for name in names(3) if name.startswith(("llama", "tied"))]


@pytest.mark.parametrize(("ranks", "name"), ALL)
def test_losses_gradient_norms_and_weights_are_those_of_one_process(measured: dict[int, Path], ranks: int, name: str) -> None:
    found = result(measured[ranks], name)
    assert found["losses"][-1] < found["losses"][0] - 0.05
    differences = {what: found[what] for what in ("loss", "gradient_norm", "weights")}
    if name.startswith("gpt2"):
        del differences["weights"]  # a bias on the keys has no gradient but rounding; losses and norms tell the rest
    assert max(differences.values()) < TOLERANCE, differences


@pytest.mark.parametrize(
    ("name", "shards"),
    [
        ("ddp", 1),
        ("fsdp1 full-shard", 4),
        ("fsdp1 grad-shard", 4),
        ("fsdp1 hybrid-full-shard, groups of 2", 2),
        ("fsdp2 full-shard", 4),
        ("fsdp2 grad-shard", 4),
        ("fsdp2 no-shard", 1),
        ("fsdp2 hybrid-full-shard, groups of 2", 2),
        ("fsdp2 hybrid-grad-shard, groups of 2", 2),
        ("fsdp2, offload", 4),
    ],
)
def test_each_rank_holds_its_share_of_parameters_gradients_and_optimizer_states(
    measured: dict[int, Path], name: str, shards: int
) -> None:
    whole = json.loads((measured[1] / "llama fsdp2 full-shard-0.json").read_text())
    for rank in range(4):
        held = json.loads((measured[4] / f"llama {name}-{rank}.json").read_text())
        for what in ("parameters", "gradients", "optimizer"):
            assert held[what] == pytest.approx(whole[what] / shards, rel=0.02), (rank, what)


@pytest.mark.parametrize("case", cases(4, compiled=False), ids=lambda case: case.name)
def test_each_rank_holds_the_activations_of_its_own_rows_whatever_is_sharded(measured: dict[int, Path], case: Case) -> None:
    shape, recompute = SHAPES["llama"], case.strategy.recompute
    predicted = saved_bytes(shape, 4 // case.accumulation, 48, number_bytes=4, recompute=recompute)
    for rank in range(4):
        held = json.loads((measured[4] / f"llama {case.name}-{rank}.json").read_text())
        assert held["activations"] == pytest.approx(predicted, rel=0.02), rank


# Of a model of 4 blocks: 7 units with embedding, head and root. One all-reduce counts the weight of the batch, and one the
# gradient's norm where it is sharded. The root and the head stay gathered for the backward pass.
GATHERED_TWICE, GATHERED_ONCE = 7 + 5, 7


@pytest.mark.parametrize(
    ("name", "gathers", "scatters", "reduces"),
    [
        ("ddp", 0, 0, 1 + 1),
        ("ddp, recompute full, 2 micro-batches", 0, 0, 1 + 1),
        ("fsdp1 full-shard", 7 + 6, 7, 2),
        ("fsdp1 grad-shard", GATHERED_ONCE, 7, 2),
        ("fsdp1 hybrid-full-shard, groups of 2", 7 + 6, 7, 2 + 7),
        ("fsdp2 full-shard", GATHERED_TWICE, 7, 2),
        ("fsdp2 grad-shard", GATHERED_ONCE, 7, 2),
        ("fsdp2 no-shard", 0, 0, 1 + 7),
        ("fsdp2 hybrid-full-shard, groups of 2", GATHERED_TWICE, 7, 2 + 7),
        ("fsdp2 hybrid-grad-shard, groups of 2", GATHERED_ONCE, 7, 2 + 7),
        ("fsdp2, recompute full", GATHERED_TWICE, 7, 2),
        ("fsdp2, recompute operators", GATHERED_TWICE, 7, 2),
        ("fsdp2, offload", GATHERED_TWICE, 7, 2),
        ("fsdp2, 2 micro-batches", 2 * GATHERED_TWICE, 2 * 7, 2),
        ("fsdp2, 2 micro-batches reduced once", 2 * GATHERED_TWICE, 7, 2),
        ("fsdp2, prefetch 2, no embedding unit", 6 + 4, 6, 2),
        # The all-reduce over copies of the model waits for the last micro-batch.
        ("fsdp2 hybrid-full-shard, groups of 2, 2 micro-batches", 2 * GATHERED_TWICE, 2 * 7, 2 + 7),
    ],
)
def test_a_step_takes_these_collectives_and_no_more(
    measured: dict[int, Path], name: str, gathers: int, scatters: int, reduces: int
) -> None:
    counts = dict(result(measured[4], f"llama {name}")["collectives"])
    assert counts.pop("allgather_base", 0) + counts.pop("allgather", 0) == gathers
    assert counts.pop("reduce_scatter_base", 0) == scatters
    assert counts.pop("allreduce", 0) == reduces
    assert not counts


def test_what_is_compared_can_differ(measured: dict[int, Path]) -> None:
    assert result(measured[2], "llama ddp")["losses"] != result(measured[2], "tied ddp")["losses"]
    assert replace(cases(2, False)[0], accumulation=2) != cases(2, False)[0]
