"""Rollouts: completions are sampled from the policy, scored, and made into batches.

A set of completions serves `num_iterations` optimizer steps. Its prompts and the seed of each completion depend only on the
index of the set, so ranks and restarts change only the last bits of sums. The completions of a prompt are a group, which stays
on one rank. A checkpoint between the steps of a set holds the set.
"""

import math
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lmforge import checkpoint
from lmforge.config.align import AlignConfig
from lmforge.data.batch import Batch, Extras
from lmforge.data.chat.preferences import TokenizedPrompt
from lmforge.data.chat.templates import ChatTemplate
from lmforge.data.labels import IGNORE_INDEX
from lmforge.data.order import derive_key
from lmforge.data.packing import PackedSequences
from lmforge.errors import UserError
from lmforge.generate.engine import Engine, GenerationRequest
from lmforge.generate.sampling import SamplingParams
from lmforge.objectives.logprobs import document_sums
from lmforge.objectives.policy import (
    build_policy_loss_config,
    completion_metric_names,
    compute_advantages,
    has_nonzero_std,
    pass_at_k,
    pass_sizes,
    subtract_kl_penalty,
)
from lmforge.parallel.parallel_model import unsharded_for_decoding
from lmforge.stages.alignment.completions import CompletionScorer, SampledCompletion, completions_table_name, locate_completions
from lmforge.stages.alignment.prompt_inputs import PromptPacking, is_conversational
from lmforge.stages.alignment.reference import build_reference, with_extras
from lmforge.stages.attempt import RunContext
from lmforge.stages.build_model import BuiltModel
from lmforge.stages.inputs import RunInputs

# Tensors of a batch in a checkpoint.
BATCH_TENSORS = {"tokens": torch.int64, "labels": torch.int64, "positions": torch.int64, "document_ids": torch.int32}


class Rollouts:
    """The batches of a policy objective: completions sampled from the model as it is now. A BatchSource.

    Every rank has one, with reward functions of its own.
    """

    def __init__(self, ctx: RunContext, inputs: RunInputs, built: BuiltModel) -> None:
        """`inputs.packed_dataset` gives the order of the prompts of its PromptPacking."""
        packing, tokenizer = inputs.packed_dataset.packing, inputs.tokenizer
        assert isinstance(packing, PromptPacking)
        assert isinstance(ctx.config, AlignConfig)
        options = ctx.config.rollout
        self.data_wait_seconds = 0.0
        self._ctx, self._inputs, self._built, self._options, self._packing = ctx, inputs, built, options, packing
        self._dist_ctx, self._batch_plan = ctx.dist_ctx, inputs.batch_plan
        self.dataset, self.global_batch_size = inputs.packed_dataset, inputs.batch_plan.global_batch_size
        # Alignment refuses model parallelism, so every rank has sequences of its own: the rank is the data-parallel rank.
        self._rank, self._world_size = self._dist_ctx.rank_info.rank, self._dist_ctx.world_size
        # A group stays on one rank. If the number of groups is not divisible, the first ranks have one more and the others
        # padding, so that all have the same number of micro-batches.
        self._num_groups = self._batch_plan.global_batch_size // options.num_generations
        base_size, num_larger = divmod(self._num_groups, self._world_size)
        self._first_group = self._rank * base_size + min(self._rank, num_larger)
        self._local_groups = base_size + (self._rank < num_larger)
        self._local_batch_size = self._local_groups * options.num_generations
        # This rank's part of the set: the completions of `num_iterations` steps, one in each sequence.
        self._set_index: int | None = None
        self._set: Batch | None = None
        prompts = [*packing.prompts, *packing.validation_prompts]
        self._scorer = CompletionScorer(ctx, options, tokenizer, prompts, built.dtype)
        self._stop_token_ids = inputs.model_config.end_token_ids | {tokenizer.eos_token_id}  # as in `generate` and `chat`
        if is_conversational(prompts):
            self._stop_token_ids |= ChatTemplate.from_tokenizer(tokenizer).stop_ids
        self._loss_config = build_policy_loss_config(options)
        self._reference = None
        if self._loss_config.kl_estimator != "none":
            self._reference = build_reference(ctx, inputs, built, self._loss_config.temperature)
        if options.num_iterations > 1 and built.point.checkpoint_folder is not None:
            self._restore(built.point.checkpoint_folder)

    def batches(self, batch_index: int) -> list[Batch]:
        """This rank's micro-batches of a step. At the first step of a set its completions are sampled and scored."""
        began = time.perf_counter()
        set_index, iteration = divmod(batch_index, self._options.num_iterations)
        if self._set is None or self._set_index != set_index:
            step = batch_index - self._built.detector.batch_offset
            self._set, self._set_index = self._make_set(set_index, step), set_index
        self.data_wait_seconds += time.perf_counter() - began
        local = self._set[iteration * self._local_batch_size : (iteration + 1) * self._local_batch_size]
        return [_trim_padding(batch).to(self._dist_ctx.device) for batch in self._micro_batches(local)]

    def _micro_batches(self, batch: Batch) -> list[Batch]:
        size = self._batch_plan.micro_batch_size
        if missing := self._batch_plan.local_batch_size - batch.batch_size:
            batch = Batch.cat([batch, _padding_like(batch, missing)])
        return [batch[start : start + size] for start in range(0, batch.batch_size, size)]

    def _make_set(self, set_index: int, step: int) -> Batch:
        options, num_generations = self._options, self._options.num_generations
        # The prompts of a step are those of all ranks, in the order of the ranks.
        order, seed = self.dataset, self._ctx.config.train.seed
        prompts: list[TokenizedPrompt] = []
        seeds: list[int] = []
        for each in range(set_index * options.num_iterations, (set_index + 1) * options.num_iterations):
            first = each * self._num_groups + self._first_group
            for sample, index in enumerate(order.indices(first, first + self._local_groups), start=first):
                prompts += [self._packing.prompts[index]] * num_generations
                seeds += [derive_key(seed, "rollout", sample, number) for number in range(num_generations)]
        completions = self.generate(prompts, seeds, step)
        batch = self._to_batch(prompts, completions)
        old_logprobs = _scatter_to_labels(batch, [completion.logprobs for completion in completions])
        rewards, failed = self._scorer.score(completions_table_name(set_index, options), prompts, completions, step)
        groups = rewards.view(-1, num_generations)
        metrics = self._completion_metrics(groups, failed, completions)
        # Computed from the rewards without the KL penalty, with which equally good completions would differ.
        differs = has_nonzero_std(groups)
        extras = {"old_logprobs": old_logprobs}
        if self._reference is not None:
            logprobs = list[Tensor]()
            # In parts of one step each, the same number on all ranks.
            for start in range(0, batch.batch_size, self._local_batch_size):
                of_step = batch[start : start + self._local_batch_size]
                parts = [part.to(self._dist_ctx.device) for part in self._micro_batches(of_step)]
                computed = torch.cat([self._reference.logprobs(part).cpu() for part in parts])
                logprobs.append(computed.float()[: of_step.batch_size])
            extras["reference_logprobs"] = torch.cat(logprobs)
            ours, theirs = (document_sums(each, batch.document_ids)[:, 0].double() for each in extras.values())
            rewards = subtract_kl_penalty(rewards, ours, theirs, self._loss_config)
        advantages = compute_advantages(rewards.view(groups.shape), self._loss_config).float().flatten()
        # A completion without a reward does not contribute to the loss.
        keep = ~rewards.isnan()
        if options.drop_zero_std_groups:
            keep &= differs.repeat_interleave(num_generations)
        batch = replace(batch, labels=torch.where(keep[:, None], batch.labels, IGNORE_INDEX))
        for name, values in {"advantages": advantages, **metrics}.items():
            extras[name] = values[:, None].expand(-1, batch.sequence_length).contiguous()
        return with_extras(batch, **extras)

    def _completion_metrics(self, rewards: Tensor, failed: Tensor, completions: list[SampledCompletion]) -> dict[str, Tensor]:
        """Metrics of each completion, fp32 [completions], by name, from rewards [groups, num_generations]."""
        known, passed = ~rewards.isnan(), rewards >= self._options.pass_threshold
        passes = {f"pass@{k}": pass_at_k(k, passed, known) for k in pass_sizes(rewards.shape[1])}
        # A group in which some completions have no reward passes if one of the others passes.
        passes["pass@n"] = (passed & known).any(1).double()
        return {
            "reward": rewards.float().flatten(),
            "no_reward": rewards.isnan().float().flatten(),
            "reward_failures": failed,
            "completion_tokens": torch.tensor([float(len(completion.tokens)) for completion in completions]),
            "truncated": torch.tensor([float(not completion.stopped) for completion in completions]),
            **{name: torch.where(known, values[:, None], math.nan).float().flatten() for name, values in passes.items()},
        }

    def generate(
        self, prompts: Sequence[TokenizedPrompt], seeds: Sequence[int], step: int, greedy: bool = False
    ) -> list[SampledCompletion]:
        """Completions by the policy as it is now. Every rank calls it, with prompts of its own."""
        options, completions = self._options, [SampledCompletion() for _ in prompts]
        sampling = SamplingParams(0.0 if greedy else options.temperature, top_p=options.top_p)
        with unsharded_for_decoding(self._built.parallel_model) as model:
            # A rank without prompts also takes part, since this is collective.
            if not prompts:
                return []
            engine = Engine(
                model,
                vocab_size=self._inputs.tokenizer.vocab_size,
                max_batch_size=min(options.decode_batch_size, len(prompts)),
                max_length=self._batch_plan.sequence_length,
            )
            by_request: dict[int, SampledCompletion] = {}
            waiting = list(zip(prompts, seeds, completions, strict=True))[::-1]
            while waiting or engine.num_unfinished:
                while waiting and engine.num_free_slots:
                    prompt, seed, completion = waiting.pop()
                    request = GenerationRequest(
                        prompt.tokens.tolist(), options.max_completion_length, sampling, seed, self._stop_token_ids
                    )
                    by_request[engine.add_request(request)] = completion
                for token in engine.step():
                    completion = by_request[token.request_id]
                    completion.tokens.append(token.token_id)
                    completion.logprobs.append(token.logprob)
                    completion.stopped = token.finish_reason == "stop"
                self._ctx.watch.set_phase("sample", step)
        return completions

    def _to_batch(self, prompts: Sequence[TokenizedPrompt], completions: Sequence[SampledCompletion]) -> Batch:
        sequences = PackedSequences.empty(len(prompts), self._batch_plan.sequence_length)
        for sequence, prompt, completion in zip(sequences, prompts, completions, strict=True):
            tokens = [*prompt.tokens, *completion.tokens]
            sequence.put_document(tokens[:-1])
            sequence.labels[len(prompt.tokens) - 1 : len(tokens) - 1] = completion.tokens
        return Batch.from_sequences(sequences)

    def validate(self, step: int) -> dict[str, float]:
        """Mean reward and pass rate of greedy completions of validation prompts. Every rank calls it, for its part of them."""
        prompts = self._packing.validation_prompts
        count = min(self._ctx.config.validation.sequences, len(prompts))
        if not count:
            return {}
        # Evenly spaced.
        chosen = [prompts[index * len(prompts) // count] for index in range(count)]
        local = chosen[self._rank :: self._world_size]
        completions = self.generate(local, [0] * len(local), step, greedy=True)
        rewards, _ = self._scorer.score(f"step-{step:06d}-validation", local, completions, step)
        known = rewards[~rewards.isnan()]
        passed = (known >= self._options.pass_threshold).double().sum()
        sums = torch.stack([known.sum(), passed, torch.tensor(float(len(known)), dtype=torch.float64)])
        reward, passes, num_known = self._dist_ctx.all_reduce_sum(sums.to(self._dist_ctx.device)).tolist()
        return {"val/reward": reward / num_known, "val/pass@1": passes / num_known} if num_known else {}

    def describe(self, batch_index: int) -> tuple[dict[str, Any], str | None]:
        """Where the completions of a batch are."""
        record = locate_completions(batch_index, self._options, self._world_size)
        if record["completions"] is None:
            return record, "its completions were not written (rollout.log_completions_every)"
        return record, f"its completions are in {self._ctx.run.path / record['completions']}"

    def state_dict(self) -> dict[str, Tensor]:
        """The current set of all ranks, each tensor [num_iterations, global batch size, …].

        Empty where a set serves one step only: a run that resumes samples a new one. Every rank calls it.
        """
        iterations = self._options.num_iterations
        if iterations == 1:
            return {}
        assert self._set is not None
        assert self._set.extras is not None
        local = self._set.tensors | self._set.extras.tensors
        gathered = self._dist_ctx.all_gather(
            {name: tensor.unflatten(0, (iterations, -1)).numpy() for name, tensor in local.items()}
        )
        full = {name: torch.from_numpy(np.concatenate([each[name] for each in gathered], axis=1)) for name in local}
        return {**full, "set": torch.tensor(self._set_index)}

    def _restore(self, folder: Path) -> None:
        """Load the set of a checkpoint, which may be of another number of ranks."""
        names = ["old_logprobs", "advantages", *completion_metric_names(self._options.num_generations)]
        names += [] if self._reference is None else ["reference_logprobs"]
        size = self._options.num_iterations, self._batch_plan.global_batch_size, self._batch_plan.sequence_length
        dtypes = BATCH_TENSORS | dict.fromkeys(names, torch.float32)
        state = {**{name: torch.zeros(size, dtype=dtype) for name, dtype in dtypes.items()}, "set": torch.tensor(0)}
        try:
            with self._dist_ctx.raise_on_all(), torch.no_grad():
                checkpoint.load(folder, {"rollouts": state})
        except UserError as reason:
            # The set is corrupt, or was saved with other options.
            self._ctx.console.warn(f"{folder}: {reason}; the completions of this set are sampled again")
            return
        first = self._first_group * self._options.num_generations
        self._set_index = int(state.pop("set"))
        local = {name: tensor[:, first : first + self._local_batch_size].flatten(0, 1) for name, tensor in state.items()}
        tensors = {name: local.pop(name) for name in BATCH_TENSORS}
        self._set = Batch(**tensors, extras=Extras(**local))

    def close(self) -> None:
        self._scorer.close()


def _padding_like(batch: Batch, num_sequences: int) -> Batch:
    """Sequences of padding with the extras of a batch: NaN, which no metric counts, in what is not learned from."""
    sequences = PackedSequences.empty(num_sequences, batch.sequence_length)
    sequences.pad()
    empty = Batch.from_sequences(sequences)
    if batch.extras is None:
        return empty
    learned_from = ("old_logprobs", "reference_logprobs", "advantages")
    fill = {name: 0.0 if name in learned_from else math.nan for name in batch.extras.tensors}
    shape = (num_sequences, batch.sequence_length)
    return replace(empty, extras=Extras(**{name: torch.full(shape, value) for name, value in fill.items()}))


def _trim_padding(batch: Batch) -> Batch:
    """The batch without the columns that are padding in every sequence. Lengths are multiples of a quarter, since each length
    may need a compilation."""
    used = int((batch.document_ids >= 0).sum(1).max())
    unit = -(-batch.sequence_length // 4)
    end = max(1, -(-used // unit)) * unit
    return batch.map(lambda tensor: tensor[:, :end])


def _scatter_to_labels(batch: Batch, values: list[list[float]]) -> Tensor:
    """The values of each sequence at its label positions, 0 elsewhere: fp32 [sequences, sequence_length]."""
    scattered = torch.zeros(batch.tokens.shape)
    for index, of_sequence in enumerate(values):
        scattered[index, (batch.labels[index] != IGNORE_INDEX).nonzero()[:, 0]] = torch.tensor(of_sequence)
    return scattered
