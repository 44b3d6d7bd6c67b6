"""What is compiled: blocks under activation checkpointing, scoring, and not the blocks that
decode.
"""

from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

from lmforge.core.distributed import distributed as cluster
from lmforge.core.distributed.distributed import DistributedContext
from lmforge.core.distributed.rank_info import RankInfo
from lmforge.core.losses.language import NextTokenObjective
from lmforge.core.model.build import build_model
from lmforge.core.model.init_weights import init_weights
from lmforge.core.options.activation_checkpointing import CHECKPOINTING_MODES
from lmforge.core.options.sections import ParallelOptions
from lmforge.core.parallel.parallel_model import LossFn, ParallelModel, unsharded_for_decoding
from lmforge.core.parallel.parallelize import parallelize
from lmforge.lab.bench.parity import SMALL_MODEL, ParityData
from lmforge.post.reference import ReferenceModel, reference_logprobs
from tests.support.grids import grid

MODES = tuple(CHECKPOINTING_MODES)
LOSS = NextTokenObjective().loss


def small_model(compiled: bool = True, loss_fn: LossFn = LOSS, **options: Any) -> ParallelModel:
    torch._dynamo.reset()
    counters.clear()
    model = parallelize(
        init_weights(build_model(SMALL_MODEL), 0),
        loss_fn,
        dist_ctx=DistributedContext(RankInfo(), torch.device("cpu"), None),
        dtype=torch.float32,
        options=ParallelOptions(**options),
        compile_model=compiled,
    )
    model.model.lm_head.passes = "operators"  # graphs are counted of blocks
    return model


def num_graphs() -> int:
    return counters["stats"]["unique_graphs"]


@pytest.mark.usefixtures("quick_compiler")
@pytest.mark.parametrize(("mode", "engine"), grid(MODES, ["single", "fsdp2"]))
def test_checkpointed_blocks_are_compiled_into_one_graph_for_all_blocks_and_steps(
    engine: str, mode: str
) -> None:
    gradients, graphs = {}, {}
    for each, compiled in (("none", False), (mode, True)):
        model = small_model(compiled, engine=engine, activation_checkpointing=each)
        try:
            for step in range(2):
                model.forward_backward(
                    [ParityData(sequences=2).batch(step, SMALL_MODEL.vocab_size)],
                    torch.tensor(9.0),
                    print,
                )
            gradients[compiled] = [gradient.clone() for gradient in model._local_grads()]
        finally:
            cluster.destroy_distributed()
        graphs[compiled] = num_graphs()
    # With selective-blocks, every second block is another function.
    assert graphs == {False: 0, True: 2 if mode == "selective-blocks" else 1}
    assert not counters["graph_break"]
    torch.testing.assert_close(gradients[True], gradients[False], rtol=1e-4, atol=1e-6)


@pytest.mark.usefixtures("quick_compiler")
def test_a_reference_scores_with_compiled_blocks_and_the_policy_does_so_without_its_gradient() -> (
    None
):
    batch = ParityData(sequences=2).batch(0, SMALL_MODEL.vocab_size)
    policy, frozen = small_model(), small_model(loss_fn=reference_logprobs)
    expected = ReferenceModel(small_model(compiled=False)).logprobs(batch)
    assert num_graphs() == 0
    for model in (frozen, policy):
        torch.testing.assert_close(
            ReferenceModel(model).logprobs(batch), expected, rtol=1e-4, atol=1e-5
        )
    assert num_graphs() == 1  # one for both: they have the same blocks
    policy.forward_backward([batch], torch.tensor(9.0), print)
    assert num_graphs() == 2


@pytest.mark.usefixtures("quick_compiler")
def test_while_decoding_blocks_are_not_compiled_but_what_they_call_may_be() -> None:
    policy, sizes = small_model(), range(2, 6)
    batches = [ParityData(sequences=size).batch(0, SMALL_MODEL.vocab_size) for size in sizes]
    policy.forward_backward(batches[:1], torch.tensor(9.0), print)
    assert num_graphs() == 1
    with torch.no_grad(), unsharded_for_decoding(policy) as model:
        for batch in batches:
            model(batch.tokens, batch.positions, batch.document_ids)
        assert num_graphs() == 1
        torch.compile(lambda x: x + 1, backend="eager")(torch.ones(3))
        assert num_graphs() == 2
    policy.forward_backward(batches[:1], torch.tensor(9.0), print)
    assert num_graphs() == 2
