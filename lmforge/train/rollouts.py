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

from lmforge.config import BatchPlan
from lmforge.config_post import RolloutOptions
from lmforge.data.batch import Batch, Metrics
from lmforge.data.order import key
from lmforge.data.packing import Row
from lmforge.data.preferences import Prompt
from lmforge.data.stream import Rows
from lmforge.data.tokenizer import Tokenizer
from lmforge.infer.engine import Engine, Request
from lmforge.infer.sampling import Sampling
from lmforge.model.layers import LanguageModel
from lmforge.objectives.logprobs import document_sums
from lmforge.objectives.policy import Policy, Switches, advantages, has_spread, penalised
from lmforge.objectives.reward import Rewards
from lmforge.parallel.engine import Spread
from lmforge.train.completions import set_name
from lmforge.train.reference import Reference, with_extras

TENSORS = ("tokens", "targets", "positions", "documents")


def told_names(samples: int) -> tuple[str, ...]:
    """What is told of an answer, one of so many to its prompt: its reward, whether none was given, which share of the reward
    functions failed on it, how likely k answers of its group hold a pass, its length, and whether it was cut."""
    passes = [f"pass@{2**power}" for power in range(samples.bit_length()) if 2**power < samples]
    return ("reward", "unjudged", "reward_failures", *passes, "pass@n", "completion_tokens", "overlong")


def pass_at(k: int, passed: Tensor, known: Tensor) -> Tensor:
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
class Answer:
    """What was written after a prompt: tokens with the one that ended it, and the log-probability of each as it was drawn."""

    tokens: list[int]
    logprobs: list[float]
    ended: bool


class PromptRows:
    """Prompts as rows that are not scored, a prompt each: what a shuffled order is made of."""

    def __init__(self, prompts: Sequence[Prompt], held_out: Sequence[Prompt], length: int) -> None:
        self.prompts, self.held_out = prompts, held_out
        self._length = length

    @property
    def rows(self) -> int:
        return len(self.prompts)

    def row(self, index: int) -> Row:
        row = Row.padding(self._length)
        if index < self.rows:
            tokens = self.prompts[index].tokens
            row.tokens[: len(tokens)] = tokens
            row.positions[: len(tokens)] = np.arange(len(tokens))
            row.documents[: len(tokens)] = 0
        return row


class Told:
    """A policy objective that also tells what the answers earned; a row holds one answer."""

    def __init__(self, policy: Policy, names: Sequence[str]) -> None:
        self._policy, self._names = policy, names
        self.weight = policy.weight

    def loss(self, model: Any, batch: Batch) -> tuple[Tensor, Metrics]:
        total, metrics = self._policy.loss(model, batch)
        for name in self._names:
            values = batch.extra(name)[:, 0]
            known = ~values.isnan()
            metrics[name] = torch.where(known, values, 0.0).sum(), known.sum().float()
        return total, metrics


@dataclass(frozen=True)
class Judge:
    """What answers earn: reward functions, and where what they were given is written for people.

    columns: names of those of all prompts of the run, so that functions are called with the same whatever the answers.
    """

    rewards: Rewards
    columns: Sequence[str]
    tokenizer: Tokenizer
    passes_at: float
    table: Callable[[str, list[dict[str, Any]]], None]

    def scores(self, name: str, prompts: list[Prompt], answers: list[Answer]) -> tuple[Tensor, Tensor]:
        """Rewards, fp64 [answers], NaN where nothing was given, and the share of the functions that failed on each, fp32.

        `name` is what their table is called.
        """
        if not prompts:
            return torch.zeros(0, dtype=torch.float64), torch.zeros(0)
        texts = [self.tokenizer.decode(answer.tokens) for answer in answers]
        columns = {name: [prompt.columns.get(name) for prompt in prompts] for name in self.columns}
        found = self.rewards([prompt.prompt for prompt in prompts], texts, columns)
        lines = [
            {
                "prompt": prompt.prompt,
                "completion": text,
                "reward": reward,
                "parts": {name: part[place] for name, part in found.parts.items()},
                "tokens": len(answer.tokens),
                "ended": answer.ended,
            }
            for place, (prompt, text, reward, answer) in enumerate(zip(prompts, texts, found.rewards, answers, strict=True))
        ]
        self.table(name, lines)
        rewards = [float("nan") if reward is None else reward for reward in found.rewards]
        failed = sum(count > 0 for count in found.failures.values()) / len(found.failures)
        return torch.tensor(rewards, dtype=torch.float64), torch.full((len(answers),), failed)


class Rollouts:
    """The batches of a policy objective. Every rank has one and asks for the same steps."""

    def __init__(
        self,
        trained: Spread,
        prompts: Sequence[Prompt],
        order: Rows,
        judge: Judge,
        *,
        options: RolloutOptions,
        switches: Switches,
        plan: BatchPlan,
        seed: int,
        ends: frozenset[int],
        vocab_size: int,
        reference: Reference | None,
        mark: Callable[[int], None],
    ) -> None:
        """`ends`: ids that end an answer. `mark(step)` is called while answers are written, as a sign of life."""
        self.data_seconds = 0.0
        self._trained, self._prompts, self._order, self._judge = trained, prompts, order, judge
        self._options, self._switches, self._plan, self._seed = options, switches, plan, seed
        self._ends, self._vocab_size, self._reference, self._mark = ends, vocab_size, reference, mark
        self._ranks = trained.ranks
        self._rows = plan.rows // self._ranks.count
        self._set: int | None = None
        # The step that answers are being written for.
        self.step = 0
        # Of this rank: `updates` × its rows of a step, one answer each.
        self._kept: Batch = Batch.of([order.packing.row(order.packing.rows)] * (options.updates * self._rows))
        self._kept = with_extras(
            self._kept, **{name: torch.zeros(self._kept.tokens.shape) for name in self._names()[len(TENSORS) :]}
        )

    def batches(self, step: int) -> list[Batch]:
        """This rank's micro-batches of a step; at the first step of a set the answers are written and judged."""
        began = time.perf_counter()
        number, update = divmod(step, self._options.updates)
        if self._set != number:
            self._kept, self._set = self._made(number, step), number
        self.data_seconds += time.perf_counter() - began
        mine = self._kept[update * self._rows : (update + 1) * self._rows]
        size = self._plan.micro_batch_rows
        parts = [mine[start : start + size] for start in range(0, self._rows, size)]
        return [_trimmed(part).to(self._ranks.device) for part in parts]

    def _made(self, number: int, step: int) -> Batch:
        options, samples = self._options, self._options.samples
        # Those of all ranks make up each update, in their order.
        mine = self._rows // samples
        firsts = [
            ((number * options.updates + update) * self._ranks.count + self._ranks.place.rank) * mine
            for update in range(options.updates)
        ]
        places = [first + place for first in firsts for place in range(mine)]
        groups = len(places)
        chosen = [self._prompts[int(index)] for first in firsts for index in self._order.indices(first, first + mine)]
        seeds = [key(self._seed, "rollout", place, sample) for place in places for sample in range(samples)]
        asked = [prompt for prompt in chosen for _ in range(samples)]
        answers = self.write(asked, seeds, step)
        batch = Batch.of([self._row(prompt, answer) for prompt, answer in zip(asked, answers, strict=True)])
        old = _spread_out(batch, [answer.logprobs for answer in answers])
        with self._ranks.agreeing():
            rewards, failed = self._judge.scores(set_name(number), asked, answers)
        told = self._told(rewards.view(groups, samples), failed, answers)
        # Of what was earned: a penalty makes answers differ that were all as good.
        spread = has_spread(rewards.view(groups, samples))
        if self._reference is not None:
            size = self._plan.micro_batch_rows
            parts = [batch[start : start + size].to(self._ranks.device) for start in range(0, batch.rows, size)]
            reference = torch.cat([self._reference.of(part).cpu() for part in parts]).float()
            ours, theirs = (document_sums(each, batch.documents)[:, 0].double() for each in (old, reference))
            rewards = penalised(rewards, ours, theirs, self._switches)
            batch = with_extras(batch, reference=reference)
        advantage = advantages(rewards.view(groups, samples), self._switches).float().flatten()
        # What nothing was said of teaches nothing either.
        keep = ~rewards.isnan()
        if options.drop_even:
            keep &= spread.repeat_interleave(samples)
        batch = replace(batch, targets=torch.where(keep[:, None], batch.targets, -100))
        length = batch.length
        everywhere = {name: values[:, None].expand(-1, length).contiguous() for name, values in told.items()}
        return with_extras(batch, old=old, advantage=advantage[:, None].expand(-1, length).contiguous(), **everywhere)

    def _told(self, rewards: Tensor, failed: Tensor, answers: list[Answer]) -> dict[str, Tensor]:
        """What is told of each answer, fp32 [answers], by name."""
        known = ~rewards.isnan()
        passed = rewards >= self._judge.passes_at
        told = {
            "reward": rewards.float().flatten(),
            "unjudged": rewards.isnan().float().flatten(),
            "reward_failures": failed,
            "completion_tokens": torch.tensor([float(len(answer.tokens)) for answer in answers]),
            "overlong": torch.tensor([float(not answer.ended) for answer in answers]),
        }
        for name in told_names(rewards.shape[1]):
            if name.startswith("pass@"):
                k = rewards.shape[1] if name == "pass@n" else int(name.removeprefix("pass@"))
                # Of a group in which something was not judged, what is known of all the others.
                of_groups = pass_at(k, passed, known) if name != "pass@n" else (passed & known).any(1).double()
                told[name] = torch.where(known, of_groups[:, None], math.nan).float().flatten()
        return told

    def write(self, prompts: Sequence[Prompt], seeds: Sequence[int], step: int, greedy: bool = False) -> list[Answer]:
        """Answers by the policy as it is now: every rank calls it, with prompts of its own."""
        self.step = step
        sampling = Sampling(0.0 if greedy else self._options.temperature, top_p=self._options.top_p)
        with self._trained.whole() as model, torch.compiler.set_stance("force_eager"), self._trained.autocast():
            # A rank without prompts has come in with the others, as it must.
            return self._written(model, prompts, seeds, sampling, step) if prompts else []

    def _written(
        self, model: LanguageModel, prompts: Sequence[Prompt], seeds: Sequence[int], sampling: Sampling, step: int
    ) -> list[Answer]:
        engine = Engine(
            model, vocab_size=self._vocab_size, rows=min(self._options.rows, len(prompts)), max_length=self._plan.length
        )
        answers = [Answer([], [], False) for _ in prompts]
        places: dict[int, int] = {}
        waiting = list(range(len(prompts)))[::-1]
        while waiting or engine.running:
            while waiting and engine.free:
                place = waiting.pop()
                tokens = prompts[place].tokens.tolist()
                request = Request(tokens, self._options.max_tokens, sampling, seeds[place], self._ends)
                places[engine.add(request)] = place
            for token in engine.step():
                place = places[token.request]
                answers[place].tokens.append(token.id)
                answers[place].logprobs.append(token.logprob)
                if token.last == "stop":
                    answers[place] = replace(answers[place], ended=True)
            self._mark(step)
        return answers

    def _row(self, prompt: Prompt, answer: Answer) -> Row:
        row = Row.padding(self._plan.length)
        tokens = np.concatenate([prompt.tokens, np.array(answer.tokens, np.int32)])
        count = len(tokens) - 1
        row.tokens[:count] = tokens[:-1]
        row.targets[len(prompt.tokens) - 1 : count] = answer.tokens
        row.positions[:count] = np.arange(count)
        row.documents[:count] = 0
        return row

    def validate(self, prompts: Sequence[Prompt], step: int) -> dict[str, float]:
        """What the likeliest answers to held-out prompts earn. Every rank calls it, and answers its share."""
        mine = list(prompts[self._ranks.place.rank :: self._ranks.count])
        answers = self.write(mine, [0] * len(mine), step, greedy=True)
        with self._ranks.agreeing():
            rewards, _ = self._judge.scores(f"step-{step:06d}-held-out", mine, answers)
        known = rewards[~rewards.isnan()]
        passed = (known >= self._judge.passes_at).double().sum()
        sums = torch.stack([known.sum(), passed, torch.tensor(float(len(known)), dtype=torch.float64)])
        earned, passes, count = self._ranks.sum_(sums.to(self._ranks.device)).tolist()
        return {"val/reward": earned / count, "val/pass@1": passes / count} if count else {}

    def state(self) -> dict[str, Tensor]:
        """The set that is being learnt from, of all ranks, by name: what a checkpoint keeps. Every rank calls it."""
        assert self._kept.extras is not None
        tensors = {**self._kept.tensors, **self._kept.extras.tensors}
        updates = self._options.updates
        gathered = self._ranks.gather({name: tensors[name].unflatten(0, (updates, -1)).numpy() for name in self._names()})
        whole = {name: torch.from_numpy(np.concatenate([each[name] for each in gathered], axis=1)) for name in self._names()}
        return {**whole, "set": torch.tensor(-1 if self._set is None else self._set)}

    def restore(self, whole: dict[str, Tensor]) -> None:
        """Go on with a set that `state` gave, on any ranks."""
        number, first = int(whole["set"]), self._ranks.place.rank * self._rows
        mine = {name: whole[name][:, first : first + self._rows].flatten(0, 1) for name in self._names()}
        tokens, targets, positions, documents = (mine.pop(name) for name in TENSORS)
        batch = Batch(tokens, targets, positions, documents)
        self._kept, self._set = with_extras(batch, **mine), None if number < 0 else number

    def empty(self) -> dict[str, Tensor]:
        """Tensors of the shapes of `state`, to be filled."""
        return {name: torch.zeros_like(value) for name, value in self.state().items()}

    def _names(self) -> tuple[str, ...]:
        kept = (*TENSORS, "old", "advantage", *told_names(self._options.samples))
        return kept if self._reference is None else (*kept, "reference")


def _trimmed(batch: Batch) -> Batch:
    """Without columns that are padding in every row; by quarters, since every length may have to be compiled for."""
    used = int((batch.documents >= 0).sum(1).max())
    unit = -(-batch.length // 4)
    end = max(1, -(-used // unit)) * unit
    return batch.map(lambda tensor: tensor[:, :end])


def _spread_out(batch: Batch, values: list[list[float]]) -> Tensor:
    """A number for each target of each row, in its place: fp32 [rows, length]."""
    found = torch.zeros(batch.tokens.shape)
    for row, each in enumerate(values):
        places = (batch.targets[row] != -100).nonzero()[:, 0]
        found[row, places] = torch.tensor(each)
    return found
