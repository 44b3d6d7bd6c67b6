"""The batches of a dataset, and the validation on another: the batch source of every stage but
policy optimization.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lmforge.core.data.batch import Batch
from lmforge.core.data.loader import BatchLoader
from lmforge.core.data.mixture import TrainingDataset
from lmforge.core.distributed.distributed import DistributedContext
from lmforge.core.losses.language import NextTokenObjective
from lmforge.core.losses.logprobs import score_text
from lmforge.core.options.batch_plan import BatchPlan
from lmforge.core.options.stage import StageConfig
from lmforge.core.parallel.dims import data_parallel_rank_and_size
from lmforge.core.stages.build_model import BuiltModel
from lmforge.core.stages.context import RunContext
from lmforge.core.stages.inputs import RunInputs
from lmforge.core.steps.metrics import MetricsAccumulator
from lmforge.core.steps.perplexity import evaluate_loss, local_batches


def build_loader(
    config: StageConfig,
    dataset: TrainingDataset,
    batch_plan: BatchPlan,
    dist_ctx: DistributedContext,
) -> BatchLoader:
    """The loader of this rank's part of every global batch."""
    rank, size = data_parallel_rank_and_size(
        config.parallel, dist_ctx.rank_info.rank, dist_ctx.world_size
    )
    adapters = config.adapter_options
    drops_in_adapters = adapters is not None and adapters.rank is not None and adapters.dropout > 0
    # Whether the model uses random numbers per token.
    is_random = config.model.dropout > 0 or config.neftune_noise_alpha > 0 or drops_in_adapters
    return BatchLoader(
        dataset,
        global_batch_size=batch_plan.global_batch_size,
        micro_batch_size=batch_plan.micro_batch_size,
        data_parallel_rank=rank,
        data_parallel_size=size,
        device=dist_ctx.device,
        rng_seed=config.train.seed if is_random else None,
    )


class DatasetBatches:
    """A BatchSource over the datasets of the inputs.

    `add_extras` adds what the objective needs beside the tokens.
    """

    def __init__(
        self,
        ctx: RunContext,
        inputs: RunInputs,
        built: BuiltModel,
        add_extras: Callable[[Batch], Batch] = lambda batch: batch,
    ) -> None:
        self._ctx = ctx
        self._inputs = inputs
        self._built = built
        self._add_extras = add_extras
        self.dataset = inputs.train_dataset
        self.global_batch_size = inputs.batch_plan.global_batch_size
        self._loader = build_loader(
            ctx.config, inputs.train_dataset, inputs.batch_plan, ctx.dist_ctx
        )

    @property
    def data_wait_seconds(self) -> float:
        return self._loader.data_wait_seconds

    def batches(self, batch_index: int) -> list[Batch]:
        return [self._add_extras(batch) for batch in self._loader.batches(batch_index)]

    def warning(self, step: int, record: dict[str, Any]) -> str | None:
        """None: nothing is checked."""
        return None

    def describe(self, batch_index: int) -> tuple[dict[str, Any], str | None]:
        """The samples of a batch, and a hash of what they depend on, which `lmforge show data`
        compares with its data.
        """
        first, after = (index * self.global_batch_size for index in (batch_index, batch_index + 1))
        return {"samples": [first, after], "plan_hash": self.dataset.plan_hash_at(after)}, None

    @torch.no_grad()
    def validate(self, step: int) -> dict[str, float]:
        """Loss and bits per byte of a language model, also by source; of other objectives the mean
        of each metric.

        Every rank calls it.
        """
        config = self._ctx.config
        dist_ctx = self._ctx.dist_ctx
        objective = self._built.objective
        parallel_model = self._built.parallel_model
        if (dataset := self._inputs.validation_dataset) is None:
            return {}
        rank = dist_ctx.rank_info.rank
        world_size = dist_ctx.world_size
        # Each batch is some, for the watchdog.
        progress = partial(self._ctx.watch.set_phase, "evaluate", step)
        progress()
        plan: dict[str, Any] = {
            "rank_and_size": data_parallel_rank_and_size(config.parallel, rank, world_size),
            "num_sequences": config.validation.sequences,
            "batch_size": self._inputs.batch_plan.micro_batch_size,
            "on_progress": lambda done, total: progress(),
        }
        if isinstance(objective, NextTokenObjective):
            token_bytes = torch.from_numpy(self._inputs.tokenizer.token_byte_lengths()).to(
                dist_ctx.device
            )
            score = partial(
                parallel_model.score, score_fn=partial(score_text, token_bytes=token_bytes)
            )
            measured = evaluate_loss(score, dataset, dist_ctx, **plan)
            return {
                f"val/{name}": value
                for name, value in measured.items()
                if name.startswith(("loss", "bits_per_byte"))
            }
        accumulator = MetricsAccumulator(dist_ctx)
        for batch in local_batches(dataset, **plan):
            accumulator.add(
                parallel_model.score_loss(
                    self._add_extras(batch.to(dist_ctx.device)), objective.loss
                )
            )
        return {f"val/{name}": value for name, value in accumulator.reduce_and_reset().items()}

    def state_dict(self) -> dict[str, Tensor]:
        """Empty: a batch depends only on its index."""
        return {}

    def close(self) -> None:
        self._loader.close()
