"""Activation checkpointing: what is recomputed is compiled too, and gives the same gradients."""

from functools import partialmethod

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from lmforge.bench.parity import SMALL_MODEL, ParityData
from lmforge.cluster import distributed as cluster
from lmforge.cluster.distributed import DistributedContext
from lmforge.cluster.rank_info import RankInfo
from lmforge.config.sections import ParallelOptions
from lmforge.model import build_model
from lmforge.model.init_weights import init_weights
from lmforge.objectives.language import NextTokenObjective
from lmforge.parallel.parallelize import parallelize

MODES = ("none", "full", "selective-blocks", "selective-ops")


@pytest.fixture
def quick_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks are traced, forward and backward, as they are for inductor, but no code is generated."""
    monkeypatch.setattr(nn.Module, "compile", partialmethod(nn.Module.compile, backend="aot_eager"))


@pytest.mark.usefixtures("quick_compiler")
@pytest.mark.parametrize("engine", ["single", "fsdp2"])
@pytest.mark.parametrize("mode", MODES)
def test_checkpointed_blocks_are_compiled_into_one_graph_for_all_blocks_and_steps(engine: str, mode: str) -> None:
    gradients, graphs = {}, {}
    for each, compiled in (("none", False), (mode, True)):
        torch._dynamo.reset()
        counters.clear()
        model = parallelize(
            init_weights(build_model(SMALL_MODEL), 0),
            NextTokenObjective().loss,
            dist_ctx=DistributedContext(RankInfo(), torch.device("cpu"), None),
            dtype=torch.float32,
            options=ParallelOptions(engine=engine, activation_checkpointing=each),
            compile_model=compiled,
        )
        try:
            for step in range(2):
                model.forward_backward([ParityData(sequences=2).batch(step, SMALL_MODEL.vocab_size)], torch.tensor(9.0), print)
            gradients[compiled] = [gradient.clone() for gradient in model._local_grads()]
        finally:
            cluster.destroy_distributed()
        graphs[compiled] = counters["stats"]["unique_graphs"]
    # With selective-blocks, every second block is another function.
    assert graphs == {False: 0, True: 2 if mode == "selective-blocks" else 1}
    assert not counters["graph_break"]
    torch.testing.assert_close(gradients[True], gradients[False], rtol=1e-4, atol=1e-6)
