"""Adapters train the same under every strategy for the frozen model, and resume under another."""

import json
from pathlib import Path

import pytest

from lmforge.core.errors import UserError
from lmforge.core.model.build import build_model
from lmforge.core.model.lora import add_lora
from lmforge.core.model.lora_config import LoraConfig
from lmforge.core.parallel.pipeline_parallel import check_stages_are_trained, split_blocks
from lmforge.lab.bench.bounds import FP32
from tests.distributed.conftest import HERE, SampledTrials, assert_is_one_process, sampled
from tests.distributed.shapes import SHAPES, lora_cases, qlora_cases, shapes_on
from tests.support.preloaded import on_ranks


@pytest.fixture(scope="module")
def trials(tmp_path_factory: pytest.TempPathFactory) -> SampledTrials:
    return SampledTrials(tmp_path_factory.mktemp("lora"), "lora")


@pytest.mark.parametrize(
    ("world_size", "name"),
    sampled(
        "lora",
        ((2, f"{shape} {case.name}") for shape in shapes_on(2) for case in lora_cases(shape, 2)),
    ),
)
def test_losses_gradient_norms_and_adapters_are_those_of_one_process(
    trials: SampledTrials, world_size: int, name: str
) -> None:
    result = trials.read(world_size, name)
    assert len(set(result["losses"])) == len(result["losses"])
    assert_is_one_process(result)


def test_a_stage_of_a_pipeline_without_an_adapter_is_refused() -> None:
    model = build_model(SHAPES["llama"], "meta")
    add_lora(model, LoraConfig(3, 6.0, target_modules=(r"model\.layers\.3\..*",)))
    check_stages_are_trained(model, split_blocks(len(model.blocks), 1))
    with pytest.raises(UserError, match="no layer of stage 1 of 2 has an adapter"):
        check_stages_are_trained(model, split_blocks(len(model.blocks), 2))


@pytest.fixture(scope="module")
def quantized_trials(tmp_path_factory: pytest.TempPathFactory) -> SampledTrials:
    return SampledTrials(tmp_path_factory.mktemp("qlora"), "qlora")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world_size", "name"),
    sampled(
        "qlora",
        (
            (ranks, f"{shape} {case.name}")
            for ranks in (1, 2, 4)
            for shape in shapes_on(ranks)
            for case in qlora_cases(shape, ranks)
        ),
    ),
)
def test_with_a_base_in_few_bits_they_are_those_of_one_process_too(
    quantized_trials: SampledTrials, world_size: int, name: str
) -> None:
    assert_is_one_process(quantized_trials.read(world_size, name))


@pytest.mark.parametrize(
    ("name", "shards"), [("ddp", 1), ("fsdp1 full-shard", 2), ("fsdp2 full-shard", 2)]
)
def test_only_adapters_have_gradients_and_optimizer_state(
    trials: SampledTrials, name: str, shards: int
) -> None:
    # 4 blocks, rank 3, each layer's inputs and outputs: 4 of attention and 3 of the feed-forward.
    width, kept, inner = 64, 32, 100
    sizes = [
        (width, width),
        (width, kept),
        (width, kept),
        (width, width),
        (width, inner),
        (width, inner),
        (inner, width),
    ]
    adapters = 4 * 3 * sum(inputs + outputs for inputs, outputs in sizes) * 4
    for rank in range(2):
        held = trials.read(2, f"llama {name}", rank)
        # Uneven parts: three rows do not divide by two. The optimizer's counts of steps come on
        # top.
        assert held["gradients"] <= 1.25 * adapters / shards
        assert held["optimizer"] <= 2 * held["gradients"] + 1000


def test_what_is_saved_under_one_strategy_continues_under_another(tmp_path: Path) -> None:
    on_ranks(2, HERE / "lora_saved.py", tmp_path, tmp_path)
    result = json.loads((tmp_path / "result.json").read_text())
    assert len(result) == 3
    for saved in result.values():
        assert len(saved["trained"]) == 2 * 4 * 7
        assert all(name.endswith((".lora_A.weight", ".lora_B.weight")) for name in saved["trained"])
        mine, theirs = saved["losses"]
        assert mine == pytest.approx(theirs, rel=FP32.loss)
        seen, bare = saved["whole"]
        assert (seen, bare) == pytest.approx(result["ddp"]["whole"], rel=FP32.loss)
        assert seen != pytest.approx(bare, rel=100 * FP32.loss)
