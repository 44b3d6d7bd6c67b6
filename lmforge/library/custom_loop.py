"""The parts of a stage for programs with a loop of their own: data, batches, a distributed model,
an optimizer.
"""

from pathlib import Path
from typing import Any

import torch

from lmforge.core.data.dataset import PackedDataset, TokenDataset
from lmforge.core.data.loader import BatchLoader
from lmforge.core.data.shards.folder import TokenFolder
from lmforge.core.distributed.distributed import DistributedContext
from lmforge.core.losses.objective import Objective
from lmforge.core.model.init_weights import init_weights
from lmforge.core.model.layers import LanguageModel
from lmforge.core.optim.optimizer import build_optimizer as build_torch_optimizer
from lmforge.core.options.extend import extended_section
from lmforge.core.options.options import validate_options
from lmforge.core.options.sections import ParallelOptions
from lmforge.core.options.stage import PretrainConfig
from lmforge.core.parallel.dims import data_parallel_rank_and_size
from lmforge.core.parallel.parallel_model import ParallelModel
from lmforge.core.parallel.parallelize import parallelize as parallelize_module
from lmforge.core.parallel.precision import decide_dtype


def open_data(
    folder: str | Path, *, sequence_length: int, split: str = "train", seed: int = 0, shuffle: bool = True
) -> PackedDataset:
    """The packed sequences of a folder that `prepare_data` or `lmforge prepare` wrote, in an order
    that `seed` decides.

    Sample n is a function of the data, the length, the seed and n. Raises UserError for a folder
    that cannot be used.
    """
    opened = TokenFolder.open(str(folder))
    return TokenDataset(opened, split=split, sequence_length=sequence_length, seed=seed, shuffle=shuffle)


def open_batches(
    dataset: PackedDataset, *, batch_size: int, micro_batch_size: int | None = None, model: ParallelModel
) -> BatchLoader:
    """This rank's part of global batches of `batch_size` sequences: `batches(step)` gives its
    micro-batches, on the device.

    `micro_batch_size` sequences go through `model` at once, by default all of this rank's. Close
    it, or use it in a `with`.
    """
    dist_ctx = model.dist_ctx
    rank, size = data_parallel_rank_and_size(model.options, dist_ctx.rank_info.rank, dist_ctx.world_size)
    return BatchLoader(
        dataset,
        global_batch_size=batch_size,
        micro_batch_size=micro_batch_size or -(-batch_size // size),
        data_parallel_rank=rank,
        data_parallel_size=size,
        device=dist_ctx.device,
    )


def parallelize(
    model: LanguageModel,
    objective: Objective,
    dist_ctx: DistributedContext,
    *,
    dtype: str = "auto",
    compile: bool = False,
    seed: int = 0,
    **options: Any,
) -> ParallelModel:
    """Distribute a model over the ranks of `lmforge.init_distributed`, in place.

    Every rank calls it.

    model    in fp32 on the ranks' device, the same on all; or on the meta device: each rank draws
             its part by `seed`
    dtype    compute dtype: "auto", "fp32" or "bf16"; the weights stay fp32
    compile  torch.compile each block
    options  those of `[parallel]` in a recipe, such as engine="fsdp2", sharding="grad-shard"

    Raises UserError, on all ranks, where the options do not fit them or the model.
    """
    on_meta = next(model.parameters()).device.type == "meta"
    return parallelize_module(
        model,
        objective.loss,
        dist_ctx=dist_ctx,
        dtype=decide_dtype(dtype, dist_ctx)[0],
        options=validate_options(ParallelOptions, options),
        compile_model=compile,
        init_weights=(lambda given: init_weights(given, seed)) if on_meta else None,
    )


def build_optimizer(model: ParallelModel, name: str = "adamw", **options: Any) -> torch.optim.Optimizer:
    """The optimizer of a parallelized model's trainable parameters.

    Matrices decay, norms and biases do not.

    options  those of `[optimizer]` in a recipe, such as lr=1e-3. `train_step` takes the learning
             rate of each step.

    Raises UserError for an optimizer that the engine does not take.
    """
    chosen = validate_options(extended_section(PretrainConfig, "optimizer"), {"name": name, **options})
    return build_torch_optimizer(model.model, chosen, model.parameter_shapes)  # type: ignore[arg-type]
