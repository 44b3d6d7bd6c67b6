"""The reference of a policy: a frozen copy, the policy with its adapters disabled, or precomputed
log-probabilities.

Each gives batches the log-probability of every scored label under it, in the policy's compute
dtype.
"""

import json
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor

from lmforge.core.data.batch import Batch
from lmforge.core.data.dataset import PackedDataset
from lmforge.core.data.order import token_rng_keys
from lmforge.core.data.packing import Extra, PackedSequence, Packing
from lmforge.core.distributed.distributed import DistributedContext
from lmforge.core.distributed.rank_info import RankInfo
from lmforge.core.errors import UserError
from lmforge.core.files.atomic_files import atomic_write
from lmforge.core.losses.logprobs import token_logprobs
from lmforge.core.losses.objective import replayed_experts
from lmforge.core.model.config_json import to_config_json
from lmforge.core.model.layers import LanguageModel
from lmforge.core.model.lora import disable_adapters
from lmforge.core.options.sections import ParallelOptions
from lmforge.core.parallel.dims import data_parallel_rank_and_size
from lmforge.core.parallel.parallel_model import ParallelModel
from lmforge.core.parallel.parallelize import parallelize
from lmforge.core.parallel.validate import choose_engine
from lmforge.core.stages.build_model import BuiltModel, empty_model
from lmforge.core.stages.context import RunContext
from lmforge.core.stages.inputs import RunInputs
from lmforge.hf.pretrained import Pretrained
from lmforge.post.options.align import AlignConfig
from lmforge.post.tuned_model import find_required_pretrained

# The number of sequences that all ranks together compute and write at once, for any number of
# ranks.
CHUNK_SEQUENCES = 64
CHECKSUM_BYTES = 16  # at the end of each file of `write_chunks`


def reference_logprobs(
    model: Any, batch: Batch, temperature: float = 1.0, replays: bool = False
) -> Tensor:
    """log p of each scored label, fp32 [sequences, sequence_length], 0 elsewhere; of full sequences
    on every rank.

    `replays`: with the experts that sampled the batch, where it has them.
    """
    experts = replayed_experts(batch) if replays else {}
    hidden = model(
        batch.tokens,
        batch.positions,
        batch.document_ids,
        document_starts=batch.document_starts,
        **experts,
    )
    logprobs: Tensor = model.lm_head(
        hidden, partial(token_logprobs, labels=batch.labels, temperature=temperature)
    )
    return full_sequences(model, logprobs)


def full_sequences(model: Any, values: Tensor) -> Tensor:
    """Values [sequences, length, …] of full sequences, on every rank, from those of its tokens."""
    if model.context_parallel is None:
        return values
    return model.context_parallel.all_gather_sequence(values, 1)


@dataclass(frozen=True)
class ReferenceModel:
    """Computes the log-probabilities of a reference.

    It runs in the context `adapters_off`, which disables a policy's adapters.
    """

    parallel_model: ParallelModel
    adapters_off: Callable[[], AbstractContextManager[object]] = nullcontext
    temperature: float = 1.0
    replays: bool = False  # the policy itself

    def logprobs(self, batch: Batch) -> Tensor:
        """log p of each scored label: fp32 [sequences, sequence_length].

        Every rank calls it equally often.
        """
        score_fn = partial(reference_logprobs, temperature=self.temperature, replays=self.replays)
        with torch.no_grad(), self.adapters_off():
            # Without keys: a pipeline's stages would draw the policy's dropout and noise from them.
            return self.parallel_model.score_tokens(replace(batch, rng_keys=None), score_fn)

    def add_logprobs(self, batch: Batch) -> Batch:
        """The batch with the extra "reference_logprobs"."""
        return batch.with_extras(reference_logprobs=self.logprobs(batch))


class PackingWithReference(Packing):
    """Sequences with the extra "reference_logprobs": fp32 [sequences, sequence_length], indexed
    like the sequences.
    """

    def __init__(self, packing: Packing, logprobs: np.ndarray) -> None:
        self._packing = packing
        self._logprobs = logprobs

    @property
    def num_sequences(self) -> int:
        return self._packing.num_sequences

    @property
    def extras(self) -> list[Extra]:
        return [*self._packing.extras, "reference_logprobs"]

    def read(self, index: int, out: PackedSequence) -> None:
        self._packing.read(index, out)
        out.extras["reference_logprobs"][:] = (
            self._logprobs[index] if index < self.num_sequences else 0
        )


def build_reference(
    ctx: RunContext, inputs: RunInputs, built: BuiltModel, temperature: float = 1.0
) -> ReferenceModel:
    """The reference of a recipe.

    Where its log-probabilities are precomputed, the policy before its first update computes them.
    """
    config = ctx.config
    policy = built.parallel_model
    assert isinstance(config, AlignConfig)
    precomputed = config.reference == "precomputed"
    if config.reference == "adapters-off" or (config.lora.rank is not None and precomputed):
        return ReferenceModel(policy, partial(disable_adapters, policy.model), temperature)
    if precomputed and built.point.step == 0:
        return ReferenceModel(policy, temperature=temperature)
    # The model that the policy began as.
    frozen = build_frozen_model(
        ctx, built, empty_model(config, inputs.model_config), find_required_pretrained(config)
    )
    return ReferenceModel(frozen, temperature=temperature)


def build_frozen_model(
    ctx: RunContext, built: BuiltModel, model: LanguageModel, weights: Pretrained
) -> ParallelModel:
    """A model that only scores batches, distributed like the one that is trained, with the given
    weights.
    """
    config = ctx.config
    dist_ctx = ctx.dist_ctx
    options = ctx.config.parallel
    if choose_engine(options, dist_ctx.world_size, dist_ctx.device.type) in ("single", "ddp"):
        # There are no gradients to exchange.
        options = ParallelOptions()
        dist_ctx = DistributedContext(RankInfo(), dist_ctx.device, None)

    def fill(model: LanguageModel) -> None:
        with ctx.dist_ctx.raise_on_all():
            weights.load_weights(model)

    return parallelize(
        model.requires_grad_(False),
        reference_logprobs,
        dist_ctx=dist_ctx,
        # The same as for the policy, or the two would differ before the first update.
        dtype=built.dtype,
        compile_model=built.compiled,
        float8=config.train.float8,
        options=options.model_copy(update={"activation_checkpointing": "none"}),
        init_weights=fill,
        loads_weights=True,
    )


def precompute_reference_logprobs(
    ctx: RunContext,
    inputs: RunInputs,
    built: BuiltModel,
    dataset: PackedDataset,
    get_reference: Callable[[], ReferenceModel],
) -> np.ndarray:
    """log p of each label of every sequence under the reference: fp32 [sequences, sequence_length].

    Every rank calls it.

    The folder of its files is named by a hash of everything that they depend on.
    """
    config = ctx.config
    assert isinstance(config, AlignConfig)
    depends_on = {
        "format": 2,
        "weights": find_required_pretrained(config).digest,
        "shape": to_config_json(inputs.model_config),
        "dtype": str(built.dtype),
        "masters": config.train.master_dtype,
        "float8": config.train.float8,
    }
    if config.lora.base_dtype:
        depends_on["base"] = [config.lora.base_dtype, config.lora.double_quant]
    key = json.dumps([dataset.plan_hash, dataset.sequence_length, depends_on], sort_keys=True)
    folder = Path(inputs.data_source) / f"reference-{xxhash.xxh3_64_hexdigest(key.encode())}"
    paths = write_chunks(
        ctx,
        inputs,
        dataset,
        folder,
        lambda batch: get_reference().logprobs(batch),
        np.ndarray.tobytes,
    )
    with ctx.dist_ctx.raise_on_all():
        content = b"".join(map(_read_chunk, paths))
    return np.frombuffer(content, np.float32).reshape(-1, dataset.sequence_length)


def _read_chunk(path: Path) -> bytes:
    content = path.read_bytes()
    checksum = chunk_checksum(path)
    checksum.update(content[:-CHECKSUM_BYTES])
    if checksum.digest() != content[-CHECKSUM_BYTES:]:
        raise UserError(
            f"{path}: does not hold what was written (its checksum differs); delete it, and it is"
            " computed again"
        )
    return content[:-CHECKSUM_BYTES]


def chunk_checksum(path: Path) -> xxhash.xxh3_128:
    """What the content of a file of `write_chunks` is added to.

    A file that lies in the place of another has another one.
    """
    return xxhash.xxh3_128("/".join(path.parts[-2:]).encode())


def chunk_paths(folder: Path, dataset: PackedDataset) -> list[Path]:
    """The files of `write_chunks`."""
    return [
        folder / f"{first:09d}.npy"
        for first in range(0, dataset.packing.num_sequences, CHUNK_SEQUENCES)
    ]


def write_chunks(
    ctx: RunContext,
    inputs: RunInputs,
    dataset: PackedDataset,
    folder: Path,
    compute: Callable[[Batch], Tensor],
    encode: Callable[[np.ndarray], bytes],
) -> list[Path]:
    """Files with what `compute` says of the sequences of a dataset, CHUNK_SEQUENCES in each, in
    their order. Every rank calls it.

    `compute` gets batches with keys that belong to their places in the dataset, and returns
    [sequences, sequence_length, …], which `encode` is given as fp32. Each file is written as it is
    computed, with its `chunk_checksum` at its end, so that an interrupted pass continues where it
    stopped, on any ranks. What `encode` raises is raised on every rank.
    """
    config = ctx.config
    dist_ctx = ctx.dist_ctx
    in_order = replace(dataset, shuffle=False)
    count = dataset.packing.num_sequences
    if dist_ctx.rank_info.local_rank == 0:
        folder.mkdir(parents=True, exist_ok=True)
    paths = chunk_paths(folder, dataset)
    missing = sorted(
        set().union(
            *dist_ctx.all_gather([index for index, path in enumerate(paths) if not path.exists()])
        )
    )
    if missing:
        ctx.console.info(f"{config.of_stage:<10} computing {count:,} sequences into {folder}")
    rank, size = data_parallel_rank_and_size(
        config.parallel, dist_ctx.rank_info.rank, dist_ctx.world_size
    )
    local_size = -(-CHUNK_SEQUENCES // size)
    batch_size = inputs.batch_plan.micro_batch_size
    for index in missing:
        first = index * CHUNK_SEQUENCES + rank * local_size
        local = Batch.from_sequences(in_order.sequences(first, first + local_size))
        keys = torch.from_numpy(
            token_rng_keys(0, first, first + local_size, dataset.sequence_length)
        )
        local = replace(local, rng_keys=keys).to(dist_ctx.device)
        values = []
        for start in range(0, local_size, batch_size):
            # Each batch counts as progress for the watchdog.
            ctx.watch.set_phase("evaluate", 0)
            values.append(compute(local[start : start + batch_size]))
        # Ranks of one data-parallel rank have the same.
        parts = dict(dist_ctx.all_gather((rank, torch.cat(values).float().cpu().numpy())))
        chunk = np.concatenate([parts[number] for number in range(size)])[
            : min(CHUNK_SEQUENCES, count - index * CHUNK_SEQUENCES)
        ]
        with dist_ctx.raise_on_all():
            # Hosts may share the folder: each writes only the chunks that no other host has
            # written.
            if dist_ctx.rank_info.local_rank == 0 and not paths[index].exists():
                checksum = chunk_checksum(paths[index])
                checksum.update(content := encode(chunk))
                with atomic_write(paths[index]) as file:
                    file.write(content)
                    file.write(checksum.digest())
    # Until all chunks are written.
    dist_ctx.all_gather(None)
    return paths
