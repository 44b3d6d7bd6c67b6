"""How many tokens each expert gets."""

import random
from pathlib import Path

import pytest
import torch
from torch._dynamo.utils import counters

from lmforge.core.distributed.distributed import DistributedContext
from lmforge.core.distributed.rank_info import RankInfo
from lmforge.core.model.config import ModelConfig
from lmforge.core.options.activation_checkpointing import CHECKPOINTING_MODES
from lmforge.core.parallel.activation_checkpointing import apply_activation_checkpointing
from lmforge.core.records.runs import Run
from lmforge.ops.monitor.expert_load import DEAD_AFTER_STEPS, ExpertLoad
from tests.conftest import Command, without_shape
from tests.core.model.conftest import built, drawn_config, packed
from tests.support.grids import parametrize

ALONE = DistributedContext(RankInfo(), torch.device("cpu"), None)


def expert_metrics(record: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in record.items() if name.startswith("experts/")}


@parametrize(
    ("compiled", "mode"),
    [(compiled, mode) for compiled in (False, True) for mode in CHECKPOINTING_MODES],
    fast=range(len(CHECKPOINTING_MODES) + 1),
)
def test_every_choice_of_a_token_is_counted_once_and_padding_is_not(
    mode: str, compiled: bool, draw: random.Random
) -> None:
    config = drawn_config("olmoe", draw, num_hidden_layers=2, num_experts=5, num_experts_per_tok=3)
    model = built(config)
    apply_activation_checkpointing(model, mode, every=1)
    load = ExpertLoad(model, ALONE)
    torch._dynamo.reset()
    counters.clear()
    if compiled:
        for block in model.blocks:
            block.compile(fullgraph=True, dynamic=False, backend="aot_eager")
    rows = packed([[20, 11], [13, 18]], config.vocab_size, padding=7)
    model(rows.tokens, rows.positions, rows.documents).sum().backward()
    with torch.no_grad():  # as a validation does
        model(rows.tokens, rows.positions, rows.documents)
    mixtures = [block.mlp for block in model.blocks]
    assert [int(each.counts.sum()) for each in mixtures] == [3 * 62] * 2
    assert counters["stats"]["unique_graphs"] <= 2 * compiled  # with gradients, and without
    counts = torch.stack([each.counts.clone() for each in mixtures]).double()
    record, lines = load.take(1)
    assert not lines
    for layer, of_layer in enumerate(counts):
        assert record[f"experts/fullest/{layer}"] == pytest.approx(float(of_layer.max()) / 62)
        assert record[f"experts/emptiest/{layer}"] == pytest.approx(float(of_layer.min()) / 62)
        probabilities = of_layer / of_layer.sum()
        entropy = torch.distributions.Categorical(probabilities).entropy() / torch.tensor(5.0).log()
        assert record[f"experts/entropy/{layer}"] == pytest.approx(float(entropy), abs=1e-6)
    assert not any(int(each.counts.sum()) for each in mixtures)


def test_an_expert_without_tokens_for_100_steps_is_named_once_with_its_layer() -> None:
    config = ModelConfig(
        50,
        16,
        3,
        2,
        24,
        model_type="qwen3_moe",
        num_experts=4,
        num_experts_per_tok=1,
        mlp_only_layers=(1,),
    )
    model = built(config)
    load = ExpertLoad(model, ALONE)

    def step(number: int, *, without: int | None) -> list[str]:
        for block in (model.blocks[0], model.blocks[2]):
            block.mlp.counts += 5
        if without is not None:
            model.blocks[2].mlp.counts[without] = 0
        record, lines = load.take(number)
        assert record["experts/dead"] == (number >= DEAD_AFTER_STEPS + 10 and without is not None)
        return lines

    assert step(10, without=3) == []
    assert step(DEAD_AFTER_STEPS, without=3) == []
    assert step(DEAD_AFTER_STEPS + 10, without=3) == [
        "layer 2: no token went to expert 3 for 100 steps"
    ]
    assert step(DEAD_AFTER_STEPS + 20, without=3) == []
    assert step(DEAD_AFTER_STEPS + 30, without=None) == []


@pytest.mark.slow
def test_a_run_on_two_ranks_records_the_load_of_one_on_one(
    tiny_options: list[str], lmforge: Command, tmp_path: Path
) -> None:
    sizes = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    shape = [word for name, size in sizes.items() for word in (f"--model.{name}", str(size))]
    words = [*without_shape(tiny_options), "--model.preset", "nano-moe", *shape, "--train.steps", 3]
    words += ["--schedule.warmup_steps", 1, "--run.folder", tmp_path]
    records = []
    pipeline = ["--parallel.pipeline_parallel_degree", 2, "--train.micro_batch_size", 2]
    for name, more in (
        ("one", []),
        ("two", ["--launch.processes", 2]),
        ("pipeline", ["--launch.processes", 2, *pipeline]),
    ):
        done = lmforge("pretrain", *words, "--run.name", name, *more)
        assert done.returncode == 0, done.stdout + done.stderr
        records.append([each for each in Run(tmp_path / name).read_metrics() if "lr" in each])
    for one, two in [*zip(*records[:2], strict=True), *zip(records[0], records[2], strict=True)]:
        assert one["loss"] == pytest.approx(two["loss"], rel=1e-5)
        assert len(expert_metrics(one)) == 7
        # Rounding may send a few of the 192 tokens elsewhere.
        assert expert_metrics(one) == pytest.approx(expert_metrics(two), abs=0.03)
