"""Float8 in the linear layers of the blocks: emulated on two real ranks, refused where it is
impossible, and on a GPU.
"""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from lmforge.core.errors import UserError
from lmforge.core.model.build import build_model
from lmforge.core.model.presets import get_preset
from lmforge.core.parallel.precision import check_float8, convert_to_float8
from lmforge.lab.bench.parity import SMALL_MODEL
from tests.conftest import Command
from tests.distributed import float8_ranks
from tests.distributed.float8_ranks import SHAPE
from tests.support.preloaded import on_ranks

NEEDS_GPU = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9),
    reason="needs a GPU that multiplies float8",
)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What tests/distributed/float8_ranks.py measured on two ranks under fsdp2."""
    pytest.importorskip("torchao")
    file = tmp_path_factory.mktemp("float8") / "result.json"
    on_ranks(2, Path(float8_ranks.__file__), file.parent, file)
    return json.loads(file.read_text())


@pytest.mark.slow
def test_losses_in_float8_fall_like_those_in_fp32_but_are_not_the_same(
    trained: dict[str, Any],
) -> None:
    exact, rounded = trained["fp32"]["losses"], trained["float8"]["losses"]
    assert exact[-1] < exact[0] - 0.2
    assert rounded != exact
    # e4m3 keeps 3 bits behind the point, 6 % of a number; in sums over 64 and more of them most of
    # that cancels.
    assert rounded == pytest.approx(exact, rel=0.01)


@pytest.mark.slow
def test_recomputing_operators_in_float8_computes_the_same(trained: dict[str, Any]) -> None:
    assert trained["float8, selective-ops"]["losses"] == trained["float8"]["losses"]


def test_a_checkpoint_of_a_float8_run_has_the_tensors_of_any_run(trained: dict[str, Any]) -> None:
    assert trained["float8"]["tensors"] == trained["fp32"]["tensors"]
    assert set(trained["float8"]["tensors"]) == set(build_model(SHAPE, "meta").state_dict())
    rounded, exact = trained["float8"]["bytes"], trained["fp32"]["bytes"]
    # On a loaded machine a collective of FSDP may end late, and the gathered embedding still lives
    # then, or it does not.
    gathered = 2 * math.ceil(SHAPE.vocab_size / 2) * SHAPE.hidden_size * 4
    assert abs(rounded.pop("activations") - exact.pop("activations")) in (0, gathered)
    assert rounded == exact


def test_only_linear_layers_of_blocks_multiply_in_float8() -> None:
    pytest.importorskip("torchao")
    model = build_model(SHAPE, "meta")
    convert_to_float8(model, emulate=True)
    changed = {
        name for name, module in model.named_modules() if type(module).__name__ == "Float8Linear"
    }
    projections = [f"self_attn.{name}_proj" for name in "qkvo"] + [
        f"mlp.{name}_proj" for name in ("gate", "up", "down")
    ]
    assert changed == {f"model.layers.{layer}.{name}" for layer in range(2) for name in projections}


@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_cpu_refuses_float8_in_one_line(
    lmforge: Command, tiny_options: list[str], tmp_path: Path, processes: int
) -> None:
    where = ["--run.folder", tmp_path, "--run.name", "x", "--launch.processes", processes]
    done = lmforge("pretrain", *tiny_options, *where, "--train.float8", "true")
    assert done.returncode == 2
    message = (
        "lmforge: train.float8: needs a GPU of compute capability 8.9 or newer, and this is a cpu;"
        " leave train.float8 out\n"
    )
    assert done.stderr == message


def test_layers_that_float8_cannot_multiply_are_refused_by_name() -> None:
    pytest.importorskip("torchao")
    with pytest.raises(
        UserError, match=r"mlp\.gate_proj is 64 × 100, and float8 needs multiples of 16"
    ):
        convert_to_float8(build_model(SMALL_MODEL, "meta"))
    with pytest.raises(
        UserError, match=r"a gpt2 model has no linear layers in its blocks; leave it out"
    ):
        convert_to_float8(build_model(get_preset("gpt2-124m"), "meta"))


@pytest.mark.gpu
@NEEDS_GPU
def test_float8_needs_bf16_around_it() -> None:
    with pytest.raises(UserError, match=r"use train\.dtype = bf16"):
        check_float8(torch.device("cuda"), torch.float32)


@pytest.mark.gpu
@NEEDS_GPU
@pytest.mark.parametrize(
    ("compiled", "engine"), [("off", "single"), ("on", "single"), ("on", "fsdp2")]
)
def test_a_gpu_trains_in_float8_as_in_bf16(
    lmforge: Command, tiny_tokens: Path, tmp_path: Path, compiled: str, engine: str
) -> None:
    pytest.importorskip("torchao")
    sizes = {
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    words = [word for name, value in sizes.items() for word in (f"--model.{name}", value)]
    words += [
        "--data.folder",
        tiny_tokens,
        "--data.sequence_length",
        256,
        "--train.steps",
        30,
        "--train.global_batch_size",
        8,
    ]
    words += [
        "--train.dtype",
        "bf16",
        "--train.compile",
        compiled,
        "--parallel.engine",
        engine,
        "--log.every_steps",
        1,
    ]
    words += ["--schedule.warmup_steps", 3, "--run.folder", tmp_path]
    losses = {}
    for float8 in ("false", "true"):
        done = lmforge("pretrain", *words, "--run.name", float8, "--train.float8", float8)
        assert done.returncode == 0, done.stdout + done.stderr
        lines = (tmp_path / float8 / "metrics.jsonl").read_text().splitlines()
        losses[float8] = [json.loads(line)["loss"] for line in lines]
    assert losses["true"] != losses["false"]
    assert losses["true"] == pytest.approx(losses["false"], rel=0.02)
