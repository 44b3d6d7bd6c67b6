"""Run in every rank: log-probabilities of references under each engine, by a model that has dropout
and noise in training.

reference_ranks.py SEED     fails where they differ from those of a model without either in one
                            process
"""

import sys
from dataclasses import replace

import torch

from lmforge.core.data.order import token_rng_keys
from lmforge.core.distributed import distributed as cluster
from lmforge.core.losses.language import NextTokenObjective
from lmforge.core.model.build import build_model
from lmforge.core.model.init_weights import init_weights
from lmforge.core.model.layers import LanguageModel
from lmforge.core.model.setup import ModelSetup
from lmforge.core.parallel.parallelize import parallelize
from lmforge.post.reference import ReferenceModel
from tests.core.losses.oracle import logprobs_under
from tests.distributed.objective_ranks import SHAPES, STRATEGIES, whole_batch


def noisy(seed: int, is_context: bool) -> LanguageModel:
    model = init_weights(build_model(SHAPES[64]), seed)
    # Ranks of a context do not see how long a document is, so there is no noise.
    model.setup = ModelSetup(dropout=0.3, neftune_noise_alpha=0.0 if is_context else 5.0)
    return model


if __name__ == "__main__":
    seed, ranks = int(sys.argv[1]), cluster.init_distributed("cpu", threads=1)
    torch.compiler.set_stance("force_eager")
    quiet, objective = init_weights(build_model(SHAPES[64]), seed), NextTokenObjective()
    batch = replace(whole_batch(quiet, seed), extras=None)
    keys = torch.from_numpy(token_rng_keys(seed, 0, batch.batch_size, batch.sequence_length))
    expected = logprobs_under(quiet, batch)
    for engine, strategy in STRATEGIES.items():
        model = noisy(seed, is_context=strategy.context_parallel_degree > 1)
        made = parallelize(
            model, objective.loss, dist_ctx=ranks, dtype=torch.float32, options=strategy
        )
        found = ReferenceModel(made).add_logprobs(replace(batch, rng_keys=keys))
        assert found.rng_keys is keys  # the policy still draws from them
        assert (found.extra("reference_logprobs") - expected).abs().max() <= 1e-5, engine
        if ranks.is_rank0:
            print(f"{engine}: the same")
    cluster.destroy_distributed()
