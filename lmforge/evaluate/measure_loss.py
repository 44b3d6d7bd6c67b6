"""The loss of a loaded model on documents given by name, as `lmforge evaluate` prints it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from lmforge.cluster.distributed import DistributedContext
from lmforge.cluster.memory import check_fits
from lmforge.errors import UserError
from lmforge.evaluate.evaluation_data import open_evaluation_dataset
from lmforge.evaluate.perplexity import evaluate_loss
from lmforge.generate.model_loading import LoadedModel
from lmforge.objectives.logprobs import score_text

DEFAULT_SEQUENCE_LENGTH = 1024
MIN_BATCH_LIMIT = 16  # sequences; batches up to this size are as they were requested, so that results do not depend on the data


def measure_loss(
    loaded: LoadedModel,
    dist_ctx: DistributedContext,
    *,
    data: Path | None,
    split: str,
    sequences: int | None,
    sequence_length: int | None,
    batch_size: int,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, Any]:
    """loss (nats per token), perplexity, bits_per_byte, tokens, bytes, and what was measured on what. Every rank calls it.

    data             token shards, or files of text or conversations; None: what the model was trained on
    split            "validation" or "train" of prepared data
    sequences        how many, evenly spaced over the split; None: all
    sequence_length  in tokens; None: as in training
    batch_size       sequences in one forward pass

    Of several sources, each has its own, such as `loss/NAME`. Raises UserError for data that cannot be used.
    """
    sources = {str(data): data} if data else loaded.training_data
    if not sources:
        raise UserError(f"{loaded.path}: does not say what it was trained on; name files or token shards with --data")
    length = sequence_length or (loaded.recipe or {}).get("data", {}).get("sequence_length") or DEFAULT_SEQUENCE_LENGTH
    if loaded.config.max_sequence_length is not None:
        length = min(length, loaded.config.max_sequence_length)
    with dist_ctx.raise_on_all():
        dataset, split = open_evaluation_dataset(loaded, sources, split, length)
    # Sequences beyond the data would be padding.
    batch_size = min(batch_size, max(MIN_BATCH_LIMIT, -(-dataset.sequences_per_epoch // dist_ctx.world_size)))
    with dist_ctx.raise_on_all():
        # A lower bound: the batch, the residual stream and a block's output.
        bytes_per_token = 64 + 2 * 4 * loaded.config.hidden_size
        what, way = f"{batch_size:,} sequences of {length:,} tokens", "give a smaller --batch_size or --sequence_length"
        check_fits(batch_size * length * bytes_per_token, dist_ctx.device, what, way)
    token_bytes = torch.from_numpy(loaded.tokenizer.token_byte_lengths()).to(dist_ctx.device)
    result = evaluate_loss(
        lambda batch: score_text(loaded.model, batch, token_bytes),
        dataset,
        dist_ctx,
        num_sequences=sequences,
        batch_size=batch_size,
        on_progress=on_progress,
    )
    where = ", ".join(map(str, sources.values()))
    counts = {name: int(value) for name, value in result.items() if name.startswith(("tokens", "bytes"))}
    return {"model": str(loaded.path), "data": where, "split": split, "sequence_length": length, **result, **counts}
