"""NEFTune's noise is uniform, scaled by document length as in the paper, and a function of tokens'
keys.
"""

import math

import pytest
import torch
from torch import Tensor

from lmforge.core.data.batch import Batch
from lmforge.core.data.order import token_rng_keys
from lmforge.core.errors import UserError
from lmforge.core.model.build import build_model
from lmforge.core.model.init_weights import init_weights
from lmforge.core.model.layers import LanguageModel
from lmforge.core.model.setup import ModelSetup
from lmforge.core.options.sections import ParallelOptions
from lmforge.core.parallel.validate import check_neftune
from tests.distributed.shapes import SHAPES
from tests.seeds import fresh_seed

ALPHA = 5.0


def model_with_noise(kind: str) -> LanguageModel:
    model = init_weights(build_model(SHAPES[kind]), 3)
    model.setup = ModelSetup(neftune_noise_alpha=ALPHA)
    return model


def row(lengths: list[int], padding: int, keys: Tensor) -> Batch:
    """One row of documents of these lengths, then padding."""
    sizes = [*lengths, padding]
    documents = torch.cat([torch.full((size,), number) for number, size in enumerate(sizes)]).int()[
        None
    ]
    documents[:, sum(lengths) :] = -1
    positions = torch.cat([torch.arange(size) for size in sizes])[None]
    tokens = torch.arange(sum(sizes))[None] % 100
    return Batch(tokens, tokens, positions, documents, keys)


def embedded(model: LanguageModel, batch: Batch, keys: Tensor | None) -> Tensor:
    with torch.no_grad():
        return model.embed(
            batch.tokens, batch.positions, model.make_token_rng(keys, batch.document_ids)
        )


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_noise_is_uniform_up_to_alpha_over_the_root_of_document_length_times_width(
    kind: str,
) -> None:
    seed = fresh_seed(60)
    model = model_with_noise(kind)
    width, lengths = model.config.hidden_size, [7, 20, 1]
    keys = torch.from_numpy(token_rng_keys(seed, 0, 200, 48))
    batch = Batch.cat([row(lengths, 20, keys[number : number + 1]) for number in range(200)])
    noise = embedded(model, batch, keys) - embedded(model, batch, None)
    start = 0
    for length in lengths:
        loudest = ALPHA / math.sqrt(length * width)
        of_document = noise[:, start : start + length] / loudest
        start += length
        count = of_document.numel()
        assert float(of_document.abs().max()) == pytest.approx(1.0, abs=1e-2)
        # The moments of a uniform number, within six of their own deviations.
        assert abs(float(of_document.mean())) < 6 * math.sqrt(1 / 3 / count)
        assert float(of_document.square().mean()) == pytest.approx(
            1 / 3, abs=6 * math.sqrt(4 / 45 / count)
        )
        neighbours = of_document[..., 1:] * of_document[..., :-1]
        assert abs(float(neighbours.mean())) < 6 / 3 / math.sqrt(neighbours.numel())


def test_a_document_gets_the_same_noise_alone_packed_and_padded() -> None:
    model = model_with_noise("llama")
    keys = torch.from_numpy(token_rng_keys(fresh_seed(60), 0, 1, 48))
    packed = row([9, 20, 5], 14, keys)
    whole = embedded(model, packed, keys)
    for start, length in ((0, 9), (9, 20), (29, 5)):
        part = packed.map(lambda tensor, cut=slice(start, start + length): tensor[:, cut])
        alone = Batch(part.tokens, part.labels, part.positions, torch.zeros_like(part.document_ids))
        # The root of the same number, from sums in the same precision.
        assert torch.allclose(
            embedded(model, alone, part.rng_keys), whole[:, start : start + length], atol=1e-6
        )


def test_there_is_noise_in_training_only_and_none_without_alpha() -> None:
    model = model_with_noise("gpt2")
    keys = torch.from_numpy(token_rng_keys(1, 0, 1, 48))
    batch = row([40], 8, keys)
    quiet = init_weights(build_model(SHAPES["gpt2"]), 3)
    assert torch.equal(embedded(model, batch, None), embedded(quiet, batch, keys))
    assert not torch.equal(embedded(model, batch, keys), embedded(quiet, batch, keys))


def test_it_is_refused_where_ranks_cut_documents() -> None:
    check_neftune(ParallelOptions(tensor_parallel_degree=2, pipeline_parallel_degree=2))
    with pytest.raises(UserError, match="context_parallel_degree"):
        check_neftune(ParallelOptions(context_parallel_degree=2))
