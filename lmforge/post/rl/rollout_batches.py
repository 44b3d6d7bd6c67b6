"""Batches of completions and their rewards: labels, log-probabilities, advantages and metrics of
each sampled token.

Where completions and rewards come from is not known here.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from lmforge.core.data.batch import Batch, Extras
from lmforge.core.data.labels import IGNORE_INDEX
from lmforge.core.data.packing import PackedSequences
from lmforge.core.losses.logprobs import document_sums
from lmforge.post.objectives.policy import (
    PolicyBatch,
    PolicyLossConfig,
    compute_advantages,
    has_nonzero_std,
    pass_at_k,
    pass_sizes,
    subtract_kl_penalty,
)
from lmforge.post.options.align import RolloutOptions
from lmforge.post.rl.sampler import NOT_SAMPLED, SampledCompletion


def lay_out(
    prompts: Sequence[Sequence[int]],
    completions: Sequence[SampledCompletion],
    sequence_length: int,
    with_versions: bool = False,
    experts_shape: tuple[int, int] | None = None,
) -> Batch:
    """A sequence for each completion, after the ids of its prompt; sampled tokens are labels, given
    ones are not.

    With the extra "old_logprobs", 0 where there is no label, and if it is asked for "versions",
    NOT_SAMPLED there, and "routed_experts" [sequences, length, *experts_shape], -1 where a
    completion has none, such as one without a sampled token.
    """
    sequences = PackedSequences.empty(len(prompts), sequence_length)
    old_logprobs = torch.zeros(len(prompts), sequence_length)
    versions = torch.full((len(prompts), sequence_length), float(NOT_SAMPLED))
    for index, (sequence, prompt, completion) in enumerate(
        zip(sequences, prompts, completions, strict=True)
    ):
        tokens = [*prompt, *completion.tokens]
        sequence.put_document(tokens[:-1])
        labels = slice(len(prompt) - 1, len(tokens) - 1)
        sampled = np.array(completion.versions) != NOT_SAMPLED
        sequence.labels[labels] = np.where(sampled, completion.tokens, IGNORE_INDEX)
        old_logprobs[index, labels] = torch.tensor(completion.logprobs)
        versions[index, labels] = torch.tensor(completion.versions, dtype=torch.float32)
    extras = {}
    if with_versions:
        extras["versions"] = versions
    if experts_shape is not None:
        extras["routed_experts"] = torch.full(
            (len(prompts), sequence_length, *experts_shape), -1, dtype=torch.int32
        )
        for row, completion in zip(extras["routed_experts"], completions, strict=True):
            if completion.routed_experts is not None:
                row[: len(completion.routed_experts)] = torch.from_numpy(completion.routed_experts)
    return Batch.from_sequences(sequences).with_extras(old_logprobs=old_logprobs, **extras)


def add_staleness(batch: Batch, version: int, wait_seconds: float) -> Batch:
    """A batch with the extra "versions" at its use by weights of a version: instead of it, the
    metrics of each completion.
    """
    versions = batch.extra("versions")
    learned = (versions != NOT_SAMPLED) & (batch.labels != IGNORE_INDEX)
    behind = torch.where(learned, version - versions, 0.0)
    count = learned.sum(1)
    values = {
        "staleness": behind.sum(1) / count,  # NaN, which is not counted, where nothing is learned
        "staleness/max": torch.where(count > 0, behind.amax(1), math.nan),
        "generation_wait_seconds": torch.full(count.shape, wait_seconds),
    }
    extras = {name: each for name, each in batch.extra_tensors.items() if name != "versions"}
    extras |= {name: each[:, None].expand(batch.tokens.shape) for name, each in values.items()}
    return replace(batch, extras=Extras(**extras))


def add_advantages(
    batch: Batch,
    completions: Sequence[SampledCompletion],
    rewards: Tensor,
    failures: Mapping[str, Tensor],
    learned: Tensor,
    options: RolloutOptions,
    loss_config: PolicyLossConfig,
) -> Batch:
    """The laid out completions with advantages and metrics; those that are not learned from have no
    labels.

    rewards: fp64 [completions], NaN where there is none, groups one after another. failures:
    metrics of what failed, fp32 [completions]. learned: whether a completion is learned from, bool
    [completions]. Where the batch has a reference, k1 is taken off the rewards.
    """
    groups = rewards.view(-1, options.num_generations)
    metrics = _completion_metrics(groups, failures, completions, options.pass_threshold)
    own = PolicyBatch(batch)
    if own.has_reference:
        ours, theirs = (
            document_sums(logprobs, batch.document_ids)[:, 0].double()
            for logprobs in (own.old_logprobs, own.reference_logprobs)
        )
        rewards = subtract_kl_penalty(rewards, ours, theirs, loss_config)
    advantages = compute_advantages(rewards.view(groups.shape), loss_config).float().flatten()
    batch = replace(batch, labels=torch.where(learned[:, None], batch.labels, IGNORE_INDEX))
    values = {"advantages": advantages, **metrics}
    extras = {
        name: each[:, None].expand(-1, batch.sequence_length).contiguous()
        for name, each in values.items()
    }
    return batch.with_extras(**extras)


def _completion_metrics(
    rewards: Tensor,
    failures: Mapping[str, Tensor],
    completions: Sequence[SampledCompletion],
    pass_threshold: float,
) -> dict[str, Tensor]:
    """Metrics of each completion, fp32 [completions], by name, from rewards [groups,
    num_generations].
    """
    known = ~rewards.isnan()
    passed = rewards >= pass_threshold
    passes = {f"pass@{k}": pass_at_k(k, passed, known) for k in pass_sizes(rewards.shape[1])}
    # A group in which some completions have no reward passes if one of the others passes.
    passes["pass@n"] = (passed & known).any(1).double()
    return {
        "reward": rewards.float().flatten(),
        "no_reward": rewards.isnan().float().flatten(),
        "frac_reward_zero_std": (~has_nonzero_std(rewards))[:, None]
        .expand_as(rewards)
        .float()
        .flatten(),
        **failures,
        "completion_tokens": torch.tensor(
            [float(completion.num_sampled) for completion in completions]
        ),
        "truncated": torch.tensor([float(not completion.stopped) for completion in completions]),
        **{
            name: torch.where(known, values[:, None], math.nan).float().flatten()
            for name, values in passes.items()
        },
    }


def split_micro_batches(batch: Batch, num_sequences: int, size: int) -> list[Batch]:
    """A batch as micro-batches of `size`, after padding it to `num_sequences`."""
    if missing := num_sequences - batch.batch_size:
        batch = Batch.cat([batch, _padding_like(batch, missing)])
    return [batch[start : start + size] for start in range(0, batch.batch_size, size)]


def _padding_like(batch: Batch, num_sequences: int) -> Batch:
    """Sequences of padding with the extras of a batch: NaN, which no metric counts, in what is not
    learned from.
    """
    sequences = PackedSequences.empty(num_sequences, batch.sequence_length)
    sequences.pad()
    empty = Batch.from_sequences(sequences)
    if batch.extras is None:
        return empty
    learned_from = ("old_logprobs", "proximal_logprobs", "reference_logprobs", "advantages")
    fill = {name: 0.0 if name in learned_from else math.nan for name in batch.extra_tensors} | {
        "routed_experts": -1
    }
    extras = {
        name: torch.full((num_sequences, *each.shape[1:]), fill[name], dtype=each.dtype)
        for name, each in batch.extra_tensors.items()
    }
    return replace(empty, extras=Extras(**extras))


def trim_padding(batch: Batch, multiple: int = 1) -> Batch:
    """The batch without the columns that are padding in every sequence.

    Lengths are multiples of a quarter, since each length may need a compilation, and of `multiple`,
    since ranks may split them.
    """
    used = int((batch.document_ids >= 0).sum(1).max())
    unit = -(-batch.sequence_length // (4 * multiple)) * multiple
    end = max(1, -(-used // unit)) * unit
    return batch.map(lambda tensor: tensor[:, :end])
