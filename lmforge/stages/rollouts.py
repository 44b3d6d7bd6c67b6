"""Rollouts: prompts are answered by the policy in place, the answers judged, and what is to be learnt made into batches.

A set of answers serves `updates` optimizer steps. Which prompts a set has, and the seed of each answer, follow from the
number of the set, so that nothing of it depends on ranks or restarts but the last bits of sums. The groups of answers to
one prompt stay on one rank. What a set had been when a run was saved amid its steps is in the checkpoint.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lmforge.config.align import RolloutOptions
from lmforge.config.batch_plan import BatchPlan
from lmforge.data.batch import Batch, Metrics
from lmforge.data.chat.preferences import TokenizedPrompt
from lmforge.data.dataset import PackedDataset
from lmforge.data.order import derive_key
from lmforge.data.packing import PackedSequence
from lmforge.data.tokenizer import Tokenizer
from lmforge.generate.engine import Engine, GenerationRequest
from lmforge.generate.sampling import SamplingParams
from lmforge.model.layers import LanguageModel
from lmforge.objectives.logprobs import document_sums
from lmforge.objectives.policy import (
    PolicyLossConfig,
    PolicyObjective,
    compute_advantages,
    has_nonzero_std,
    subtract_kl_penalty,
)
from lmforge.parallel.parallel_model import ParallelModel
from lmforge.rewards.functions import RewardFunctions
from lmforge.stages.completions import completions_table_name
from lmforge.stages.reference import ReferenceModel, with_extras

BATCH_TENSORS = ("tokens", "targets", "positions", "documents")


def completion_metric_names(num_generations: int) -> tuple[str, ...]:
    """What is told of an answer, one of so many to its prompt: its reward, whether none was given, which share of the reward
    functions failed on it, how likely k answers of its group hold a pass, its length, and whether it was cut."""
    passes = [f"pass@{2**power}" for power in range(num_generations.bit_length()) if 2**power < num_generations]
    return ("reward", "unjudged", "reward_failures", *passes, "pass@n", "completion_tokens", "overlong")


def pass_at_k(k: int, passed: Tensor, known: Tensor) -> Tensor:
    """How likely one of `k` answers drawn from a group passes, fp64 [groups], from bools [groups, samples].

    NaN where fewer than k are known.
    1 − C(n − c, k) / C(n, k) of n answers with c passes, without bias (Chen et al., arXiv 2107.03374).
    """
    count, passes = known.sum(1), (passed & known).sum(1)
    found = [
        1 - math.comb(n - c, k) / math.comb(n, k) if n >= k else math.nan
        for n, c in zip(count.tolist(), passes.tolist(), strict=True)
    ]
    return torch.tensor(found, dtype=torch.float64)


@dataclass(frozen=True)
class SampledCompletion:
    """What was written after a prompt: tokens with the one that ended it, and the log-probability of each as it was drawn."""

    tokens: list[int]
    logprobs: list[float]
    stopped: bool


class PromptPacking:
    """Prompts as rows that are not scored, a prompt each: what a shuffled order is made of."""

    def __init__(
        self, prompts: Sequence[TokenizedPrompt], validation_prompts: Sequence[TokenizedPrompt], sequence_length: int
    ) -> None:
        self.prompts, self.validation_prompts = prompts, validation_prompts
        self._sequence_length = sequence_length

    @property
    def num_sequences(self) -> int:
        return len(self.prompts)

    def sequence(self, index: int) -> PackedSequence:
        row = PackedSequence.all_padding(self._sequence_length)
        if index < self.num_sequences:
            tokens = self.prompts[index].tokens
            row.tokens[: len(tokens)] = tokens
            row.positions[: len(tokens)] = np.arange(len(tokens))
            row.document_ids[: len(tokens)] = 0
        return row


class RolloutObjective:
    """A policy objective that also tells what the answers earned; a row holds one answer."""

    def __init__(self, policy: PolicyObjective, metric_names: Sequence[str]) -> None:
        self._policy, self._metric_names = policy, metric_names
        self.num_items = policy.num_items

    def loss(self, model: Any, batch: Batch) -> tuple[Tensor, Metrics]:
        total, metrics = self._policy.loss(model, batch)
        for name in self._metric_names:
            values = batch.extra(name)[:, 0]
            known = ~values.isnan()
            metrics[name] = torch.where(known, values, 0.0).sum(), known.sum().float()
        return total, metrics


@dataclass(frozen=True)
class CompletionScorer:
    """What answers earn: reward functions, and where what they were given is written for people.

    columns: names of those of all prompts of the run, so that functions are called with the same whatever the answers.
    """

    reward_functions: RewardFunctions
    columns: Sequence[str]
    tokenizer: Tokenizer
    pass_threshold: float
    write_table: Callable[[str, list[dict[str, Any]]], None]

    def score(
        self, table_name: str, prompts: list[TokenizedPrompt], completions: list[SampledCompletion]
    ) -> tuple[Tensor, Tensor]:
        """Rewards, fp64 [answers], NaN where nothing was given, and the share of the functions that failed on each, fp32.

        `name` is what their table is called.
        """
        if not prompts:
            return torch.zeros(0, dtype=torch.float64), torch.zeros(0)
        texts = [self.tokenizer.decode(answer.tokens) for answer in completions]
        columns = {table_name: [prompt.columns.get(table_name) for prompt in prompts] for table_name in self.columns}
        found = self.reward_functions([prompt.prompt for prompt in prompts], texts, columns)
        lines = [
            {
                "prompt": prompt.prompt,
                "completion": text,
                "reward": reward,
                "parts": {table_name: part[place] for table_name, part in found.by_function.items()},
                "tokens": len(answer.tokens),
                "ended": answer.stopped,
            }
            for place, (prompt, text, reward, answer) in enumerate(zip(prompts, texts, found.rewards, completions, strict=True))
        ]
        self.write_table(table_name, lines)
        rewards = [float("nan") if reward is None else reward for reward in found.rewards]
        failed = sum(count > 0 for count in found.failures.values()) / len(found.failures)
        return torch.tensor(rewards, dtype=torch.float64), torch.full((len(completions),), failed)


class Rollouts:
    """The batches of a policy objective. Every rank has one and asks for the same steps."""

    def __init__(
        self,
        parallel_model: ParallelModel,
        prompts: Sequence[TokenizedPrompt],
        order: PackedDataset,
        scorer: CompletionScorer,
        *,
        options: RolloutOptions,
        loss_config: PolicyLossConfig,
        batch_plan: BatchPlan,
        seed: int,
        stop_token_ids: frozenset[int],
        vocab_size: int,
        reference: ReferenceModel | None,
        heartbeat: Callable[[int], None],
    ) -> None:
        """`ends`: ids that end an answer. `mark(step)` is called while answers are written, as a sign of life."""
        self.data_wait_seconds = 0.0
        self._parallel_model, self._prompts, self._order, self._scorer = parallel_model, prompts, order, scorer
        self._options, self._loss_config, self._batch_plan, self._seed = options, loss_config, batch_plan, seed
        self._stop_token_ids, self._vocab_size, self._reference, self._heartbeat = (
            stop_token_ids,
            vocab_size,
            reference,
            heartbeat,
        )
        self._dist_ctx = parallel_model.dist_ctx
        self._local_batch_size = batch_plan.rows // self._dist_ctx.world_size
        self._set_index: int | None = None
        # The step that answers are being written for.
        self.current_step = 0
        # Of this rank: `updates` × its rows of a step, one answer each.
        self._set_batch: Batch = Batch.from_sequences(
            [order.packing.sequence(order.packing.num_sequences)] * (options.num_iterations * self._local_batch_size)
        )
        self._set_batch = with_extras(
            self._set_batch,
            **{name: torch.zeros(self._set_batch.tokens.shape) for name in self._state_names()[len(BATCH_TENSORS) :]},
        )

    def batches(self, step: int) -> list[Batch]:
        """This rank's micro-batches of a step; at the first step of a set the answers are written and judged."""
        began = time.perf_counter()
        number, update = divmod(step, self._options.num_iterations)
        if self._set_index != number:
            self._set_batch, self._set_index = self._make_set(number, step), number
        self.data_wait_seconds += time.perf_counter() - began
        mine = self._set_batch[update * self._local_batch_size : (update + 1) * self._local_batch_size]
        size = self._batch_plan.micro_batch_size
        parts = [mine[start : start + size] for start in range(0, self._local_batch_size, size)]
        return [_trim_padding(part).to(self._dist_ctx.device) for part in parts]

    def _make_set(self, set_index: int, step: int) -> Batch:
        options, samples = self._options, self._options.num_generations
        # Those of all ranks make up each update, in their order.
        mine = self._local_batch_size // samples
        firsts = [
            ((set_index * options.num_iterations + update) * self._dist_ctx.world_size + self._dist_ctx.rank_info.rank) * mine
            for update in range(options.num_iterations)
        ]
        places = [first + place for first in firsts for place in range(mine)]
        groups = len(places)
        chosen = [self._prompts[int(index)] for first in firsts for index in self._order.indices(first, first + mine)]
        seeds = [derive_key(self._seed, "rollout", place, sample) for place in places for sample in range(samples)]
        asked = [prompt for prompt in chosen for _ in range(samples)]
        answers = self.generate(asked, seeds, step)
        batch = Batch.from_sequences([self._to_sequence(prompt, answer) for prompt, answer in zip(asked, answers, strict=True)])
        old = _scatter_to_labels(batch, [answer.logprobs for answer in answers])
        with self._dist_ctx.raise_on_all():
            rewards, failed = self._scorer.score(completions_table_name(set_index), asked, answers)
        told = self._completion_metrics(rewards.view(groups, samples), failed, answers)
        # Of what was earned: a penalty makes answers differ that were all as good.
        spread = has_nonzero_std(rewards.view(groups, samples))
        if self._reference is not None:
            size = self._batch_plan.micro_batch_size
            parts = [batch[start : start + size].to(self._dist_ctx.device) for start in range(0, batch.batch_size, size)]
            reference = torch.cat([self._reference.logprobs(part).cpu() for part in parts]).float()
            ours, theirs = (document_sums(each, batch.document_ids)[:, 0].double() for each in (old, reference))
            rewards = subtract_kl_penalty(rewards, ours, theirs, self._loss_config)
            batch = with_extras(batch, reference=reference)
        advantage = compute_advantages(rewards.view(groups, samples), self._loss_config).float().flatten()
        # What nothing was said of teaches nothing either.
        keep = ~rewards.isnan()
        if options.drop_zero_std_groups:
            keep &= spread.repeat_interleave(samples)
        batch = replace(batch, labels=torch.where(keep[:, None], batch.labels, -100))
        length = batch.sequence_length
        everywhere = {name: values[:, None].expand(-1, length).contiguous() for name, values in told.items()}
        return with_extras(batch, old=old, advantage=advantage[:, None].expand(-1, length).contiguous(), **everywhere)

    def _completion_metrics(self, rewards: Tensor, failed: Tensor, completions: list[SampledCompletion]) -> dict[str, Tensor]:
        """What is told of each answer, fp32 [answers], by name."""
        known = ~rewards.isnan()
        passed = rewards >= self._scorer.pass_threshold
        told = {
            "reward": rewards.float().flatten(),
            "unjudged": rewards.isnan().float().flatten(),
            "reward_failures": failed,
            "completion_tokens": torch.tensor([float(len(answer.tokens)) for answer in completions]),
            "overlong": torch.tensor([float(not answer.stopped) for answer in completions]),
        }
        for name in completion_metric_names(rewards.shape[1]):
            if name.startswith("pass@"):
                k = rewards.shape[1] if name == "pass@n" else int(name.removeprefix("pass@"))
                # Of a group in which something was not judged, what is known of all the others.
                of_groups = pass_at_k(k, passed, known) if name != "pass@n" else (passed & known).any(1).double()
                told[name] = torch.where(known, of_groups[:, None], math.nan).float().flatten()
        return told

    def generate(
        self, prompts: Sequence[TokenizedPrompt], seeds: Sequence[int], step: int, greedy: bool = False
    ) -> list[SampledCompletion]:
        """Answers by the policy as it is now: every rank calls it, with prompts of its own."""
        self.current_step = step
        sampling = SamplingParams(0.0 if greedy else self._options.temperature, top_p=self._options.top_p)
        with (
            self._parallel_model.unsharded() as model,
            torch.compiler.set_stance("force_eager"),
            self._parallel_model.autocast(),
        ):
            # A rank without prompts has come in with the others, as it must.
            return self._generate_local(model, prompts, seeds, sampling, step) if prompts else []

    def _generate_local(
        self,
        model: LanguageModel,
        prompts: Sequence[TokenizedPrompt],
        seeds: Sequence[int],
        sampling: SamplingParams,
        step: int,
    ) -> list[SampledCompletion]:
        engine = Engine(
            model,
            vocab_size=self._vocab_size,
            max_batch_size=min(self._options.decode_batch_size, len(prompts)),
            max_length=self._batch_plan.length,
        )
        answers = [SampledCompletion([], [], False) for _ in prompts]
        places: dict[int, int] = {}
        waiting = list(range(len(prompts)))[::-1]
        while waiting or engine.num_unfinished:
            while waiting and engine.num_free_slots:
                place = waiting.pop()
                tokens = prompts[place].tokens.tolist()
                request = GenerationRequest(
                    tokens, self._options.max_completion_length, sampling, seeds[place], self._stop_token_ids
                )
                places[engine.add_request(request)] = place
            for token in engine.step():
                place = places[token.request_id]
                answers[place].tokens.append(token.token_id)
                answers[place].logprobs.append(token.logprob)
                if token.finish_reason == "stop":
                    answers[place] = replace(answers[place], stopped=True)
            self._heartbeat(step)
        return answers

    def _to_sequence(self, prompt: TokenizedPrompt, completion: SampledCompletion) -> PackedSequence:
        row = PackedSequence.all_padding(self._batch_plan.length)
        tokens = np.concatenate([prompt.tokens, np.array(completion.tokens, np.int32)])
        count = len(tokens) - 1
        row.tokens[:count] = tokens[:-1]
        row.labels[len(prompt.tokens) - 1 : count] = completion.tokens
        row.positions[:count] = np.arange(count)
        row.document_ids[:count] = 0
        return row

    def validate(self, prompts: Sequence[TokenizedPrompt], step: int) -> dict[str, float]:
        """What the likeliest answers to held-out prompts earn. Every rank calls it, and answers its share."""
        mine = list(prompts[self._dist_ctx.rank_info.rank :: self._dist_ctx.world_size])
        answers = self.generate(mine, [0] * len(mine), step, greedy=True)
        with self._dist_ctx.raise_on_all():
            rewards, _ = self._scorer.score(f"step-{step:06d}-held-out", mine, answers)
        known = rewards[~rewards.isnan()]
        passed = (known >= self._scorer.pass_threshold).double().sum()
        sums = torch.stack([known.sum(), passed, torch.tensor(float(len(known)), dtype=torch.float64)])
        earned, passes, count = self._dist_ctx.all_reduce_sum(sums.to(self._dist_ctx.device)).tolist()
        return {"val/reward": earned / count, "val/pass@1": passes / count} if count else {}

    def state_dict(self) -> dict[str, Tensor]:
        """The set that is being learnt from, of all ranks, by name: what a checkpoint keeps. Every rank calls it."""
        assert self._set_batch.extras is not None
        tensors = {**self._set_batch.tensors, **self._set_batch.extras.tensors}
        updates = self._options.num_iterations
        gathered = self._dist_ctx.all_gather(
            {name: tensors[name].unflatten(0, (updates, -1)).numpy() for name in self._state_names()}
        )
        whole = {
            name: torch.from_numpy(np.concatenate([each[name] for each in gathered], axis=1)) for name in self._state_names()
        }
        return {**whole, "set": torch.tensor(-1 if self._set_index is None else self._set_index)}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Go on with a set that `state` gave, on any ranks."""
        number, first = int(state["set"]), self._dist_ctx.rank_info.rank * self._local_batch_size
        mine = {name: state[name][:, first : first + self._local_batch_size].flatten(0, 1) for name in self._state_names()}
        tokens, targets, positions, documents = (mine.pop(name) for name in BATCH_TENSORS)
        batch = Batch(tokens, targets, positions, documents)
        self._set_batch, self._set_index = with_extras(batch, **mine), None if number < 0 else number

    def empty_state_dict(self) -> dict[str, Tensor]:
        """Tensors of the shapes of `state`, to be filled."""
        return {name: torch.zeros_like(value) for name, value in self.state_dict().items()}

    def _state_names(self) -> tuple[str, ...]:
        kept = (*BATCH_TENSORS, "old", "advantage", *completion_metric_names(self._options.num_generations))
        return kept if self._reference is None else (*kept, "reference")


def _trim_padding(batch: Batch) -> Batch:
    """Without columns that are padding in every row; by quarters, since every length may have to be compiled for."""
    used = int((batch.document_ids >= 0).sum(1).max())
    unit = -(-batch.sequence_length // 4)
    end = max(1, -(-used // unit)) * unit
    return batch.map(lambda tensor: tensor[:, :end])


def _scatter_to_labels(batch: Batch, values: list[list[float]]) -> Tensor:
    """A number for each target of each row, in its place: fp32 [rows, length]."""
    found = torch.zeros(batch.tokens.shape)
    for row, each in enumerate(values):
        places = (batch.labels[row] != -100).nonzero()[:, 0]
        found[row, places] = torch.tensor(each)
    return found
