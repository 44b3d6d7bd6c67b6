"""Collectives are issued where they can overlap with computation: read from a profiler's trace of a
real step on two ranks.

Of the trace, only the order of events counts. On a CPU gloo's calls wait for their collectives, so
that the order shows all that can be shown; that they really run at one time is the last test's
claim, which needs two GPUs.
"""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from lmforge.core.data.labels import loss_chunk_tokens
from tests.support.preloaded import preloaded

pytestmark = pytest.mark.slow
BLOCKS = 3
LENGTH = 640
VOCAB_SIZE = 4096
ROWS_A_RANK = 4
LM_HEAD_WEIGHT = "model.lm_head"
PRODUCTS = ("aten::mm", "aten::addmm", "aten::addmm_")


def block(number: int) -> str:
    return f"model.model.layers.{number}"


@dataclass(frozen=True)
class Trace:
    """Complete events of a step, in the order in which they began."""

    events: list[dict[str, Any]]

    def begun(self, name: str) -> list[float]:
        """When each event of this name began."""
        return [event["ts"] for event in self.events if event["name"] == name]

    def one(self, name: str) -> tuple[float, float]:
        """Begin and end of the only event of this name."""
        [event] = [event for event in self.events if event["name"] == name]
        return event["ts"], event["ts"] + event["dur"]

    def products(self, begin: float, end: float) -> list[float]:
        return [time for name in PRODUCTS for time in self.begun(name) if begin < time < end]

    def forward(self, unit: str) -> tuple[float, float]:
        """When a unit's own forward pass began and ended, between the hooks that gather and free
        it.
        """
        return self.one(f"FSDP::pre_forward ({unit})")[1], self.one(f"FSDP::post_forward ({unit})")[
            0
        ]

    def backward(self, unit: str) -> tuple[float, float]:
        return self.one(f"FSDP::pre_backward ({unit})")[1], self.one(
            f"FSDP::post_backward_accumulate ({unit})"
        )[0]


def traced(file: Path, *words: object) -> Trace:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": BLOCKS}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2}
    shape = [word for name, size in sizes.items() for word in (f"--model.{name}", size)]
    shape += [
        "--data.folder",
        file.parent / "absent",
        "--data.sequence_length",
        LENGTH,
        "--train.global_batch_size",
        2 * ROWS_A_RANK,
    ]
    shape += ["--bench.steps", 1, "--bench.warmup_steps", 1, "--parallel.engine", "fsdp2"]
    done = preloaded().run(
        ["bench", *map(str, [*shape, "--trace", file, *words])], file.parent, ranks=2
    )
    assert done.returncode == 0, done.stderr
    complete = [
        event for event in json.loads(file.read_text())["traceEvents"] if event.get("ph") == "X"
    ]
    return Trace(sorted(complete, key=lambda event: event["ts"]))


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Trace]:
    """By how many blocks are gathered ahead."""
    folder = tmp_path_factory.mktemp("traces")
    cpu = ["--train.device", "cpu", "--train.dtype", "fp32", "--train.compile", "off"]
    return {
        ahead: traced(folder / f"{ahead}.json", *cpu, "--parallel.prefetch_blocks", ahead)
        for ahead in (0, 1)
    }


@pytest.mark.parametrize("number", range(BLOCKS - 1))
def test_with_prefetch_the_next_block_is_gathered_before_this_one_computes(
    traces: dict[int, Trace], number: int
) -> None:
    gathered = {
        ahead: trace.begun(f"FSDP::all_gather ({block(number + 1)})")[0]
        for ahead, trace in traces.items()
    }
    spans = {ahead: trace.forward(block(number)) for ahead, trace in traces.items()}
    assert all(len(traces[ahead].products(*spans[ahead])) >= 7 for ahead in traces)
    assert gathered[1] < min(traces[1].products(*spans[1]))
    # Left to torch, a host that does not run ahead of its device asks only then.
    assert gathered[0] > spans[0][1]


@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize("number", range(1, BLOCKS))
def test_in_the_backward_pass_the_block_before_is_gathered_before_this_one_computes(
    traces: dict[int, Trace], ahead: int, number: int
) -> None:
    trace = traces[ahead]
    begin, end = trace.backward(block(number))
    again = trace.begun(f"FSDP::all_gather ({block(number - 1)})")[1]
    assert again < min(trace.products(begin, end))


@pytest.mark.parametrize("number", range(1, BLOCKS))
def test_gradients_of_a_block_are_on_their_way_while_the_block_before_computes(
    traces: dict[int, Trace], number: int
) -> None:
    for trace in traces.values():
        issued, _ = trace.one(f"FSDP::post_backward_reduce ({block(number)})")
        begin, end = trace.backward(block(number - 1))
        waited, _ = trace.one(f"FSDP::post_backward_rs_wait ({block(number - 1)})")
        assert issued < min(trace.products(begin, end)) < end < waited


def test_the_head_is_gathered_once_a_step_however_many_chunks_its_loss_takes(
    traces: dict[int, Trace],
) -> None:
    chunks = -(-ROWS_A_RANK * LENGTH // loss_chunk_tokens(VOCAB_SIZE, 4, on_gpu=False, fused=False))
    assert chunks > 1
    for trace in traces.values():
        begin, end = trace.forward(LM_HEAD_WEIGHT)
        # Logits, and the gradients of hidden states and weight.
        assert len(trace.products(begin, end)) == 3 * chunks
        assert len(trace.begun(f"FSDP::all_gather ({LM_HEAD_WEIGHT})")) == 1
        assert not [time for time in trace.begun("c10d::_allgather_base_") if begin < time < end]
        assert len(trace.begun(f"FSDP::post_backward_reduce ({LM_HEAD_WEIGHT})")) == 1
        assert all(
            len(trace.begun(f"FSDP::all_gather ({block(number)})")) == 2 for number in range(BLOCKS)
        )


@pytest.mark.slow
def test_ddp_reduces_blocks_in_bf16_while_earlier_ones_go_backward(tmp_path: Path) -> None:
    """Each block is a bucket of its own here.

    A weight's bf16 copy hands its gradient on at once, not at the end.
    """
    trace = traced(
        tmp_path / "step.json",
        "--parallel.engine",
        "ddp",
        "--train.dtype",
        "bf16",
        "--train.device",
        "cpu",
        "--train.compile",
        "off",
        "--model.hidden_size",
        512,
        "--model.intermediate_size",
        4352,
        "--data.sequence_length",
        64,
    )
    last_product = max(time for name in PRODUCTS for time in trace.begun(name))
    issued = [time for time in trace.begun("c10d::allreduce_") if time < last_product]
    # The number of items, the head, and all blocks but the first, whose products are the last.
    assert len(issued) == 2 + BLOCKS - 1


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("kind", ["AllGather", "ReduceScatter"])
def test_on_gpus_collectives_run_while_blocks_compute(tmp_path: Path, kind: str) -> None:
    large = [
        "--model.hidden_size",
        2048,
        "--model.intermediate_size",
        8192,
        "--model.num_attention_heads",
        16,
    ]
    trace = traced(
        tmp_path / "step.json", *large, "--train.device", "cuda", "--parallel.prefetch_blocks", 1
    )
    kernels = [event for event in trace.events if event.get("cat") == "kernel"]
    products = [event for event in kernels if re.search(r"gemm|nvjet|cutlass", event["name"])]
    moving = [event for event in kernels if f"_{kind}" in event["name"]]
    assert products
    beside = [one for one in moving for other in products if _overlap(one, other)]
    assert beside


def _overlap(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one["ts"] < other["ts"] + other["dur"] and other["ts"] < one["ts"] + one["dur"]
