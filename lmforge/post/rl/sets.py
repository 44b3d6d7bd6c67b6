"""Sets of completions: which prompts they have, when each is sampled, and what of them is learned
from.

A set serves `num_iterations` optimizer steps. The completions of one prompt in it are a group. What
holds of sets holds because of this file:
- Set k serves the steps from k × num_iterations on, always: sets are neither reordered nor left
  out. Its prompts and seeds depend on k alone.
- It begins once the weights of the version of its first step less `max_staleness` have been
  published, and no token in it is older. With 0 it is sampled when it is taken.
- What was sampled with weights that a rollback has left is abandoned and sampled again.
- A group is dropped in one place, `SampledSet.learned`, and the log of the rank says how many were.
How completions are sampled is in sampler.py and servers.py, how they are scored in scoring.py.
"""

import threading
import time
from collections.abc import Callable, Container, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from queue import SimpleQueue
from typing import Any, Generic, NamedTuple, TypeVar, cast

import numpy as np
import torch
from torch import Tensor

from lmforge.core.data.order import derive_key
from lmforge.core.distributed.distributed import use_device_in_thread
from lmforge.core.distributed.waiting import start_in_thread
from lmforge.core.errors import RunFailed, UserError, format_count
from lmforge.core.stages.build_model import BuiltModel
from lmforge.core.stages.context import RunContext
from lmforge.core.stages.inputs import RunInputs
from lmforge.post.objectives.policy import has_nonzero_std
from lmforge.post.options.align import AlignConfig, RolloutOptions
from lmforge.post.prompts import PromptPacking, is_conversational, name_environment
from lmforge.post.rl.engines.started_servers import ServerStarter
from lmforge.post.rl.episodes import Episode, EpisodePlayer
from lmforge.post.rl.sampler import (
    InProcessSampler,
    SampledCompletion,
    SampleRequest,
    SamplingSession,
    SamplingSettings,
    sample_all,
)
from lmforge.post.rl.scoring import CompletionScorer, RewardModelScorer, completions_table_name
from lmforge.post.rl.servers import Servers
from lmforge.text.chat.preferences import TokenizedPrompt
from lmforge.text.chat.templates import ChatTemplate

# Metrics of what fails: a reward function, an environment.
FAILURES = ("reward_failures", "environment_failures")
HEARTBEAT_SECONDS = 1.0
# How long the end of a run waits for threads, which notice it when they next look.
CLOSE_SECONDS = 5.0
T = TypeVar("T")


@dataclass
class SampledSet:
    """Completions of this rank, and the prompts that they follow; with an environment its episodes.

    rewards   fp64 [completions], NaN where there is none
    failures  metrics of what failed, fp32 [completions]
    errors    of what failed
    """

    prompts: list[TokenizedPrompt]
    completions: list[SampledCompletion]
    episodes: list[Episode] | None = None
    rewards: Tensor | None = None
    failures: dict[str, Tensor] | None = None
    errors: list[str] = field(default_factory=list)

    @property
    def failed(self) -> Tensor:
        """Whether a completion has no reward because what computes it failed: bool
        [completions].
        """
        assert self.rewards is not None
        causes = [
            self.failures[name] for name in FAILURES if self.failures and name in self.failures
        ]
        return self.rewards.isnan() & (sum(causes, torch.zeros(len(self.rewards))) > 0)

    def differing_groups(self, num_generations: int) -> Tensor:
        """Whether the rewards of a group differ, so that something can be learned from it: bool
        [groups].
        """
        assert self.rewards is not None
        return has_nonzero_std(
            self.rewards.view(len(self.rewards) // num_generations, num_generations)
        )

    def learned(self, options: RolloutOptions) -> Tensor:
        """Whether a completion is learned from: bool [completions].

        Not without a reward, nor in a group whose rewards are all equal (`drop_zero_std_groups`):
        those before a KL penalty, with which equally good completions would differ.
        """
        assert self.rewards is not None
        learned = ~self.rewards.isnan()
        if options.drop_zero_std_groups:
            count = options.num_generations
            learned &= self.differing_groups(count).repeat_interleave(count)
        return learned

    def replace(self, indices: Sequence[int], others: "SampledSet") -> None:
        """Put the completions of another set at these places."""
        others_failures = others.failures or {}
        self.errors += others.errors
        pairs: list[tuple[Any, Any]] = [
            (self.prompts, others.prompts),
            (self.completions, others.completions),
            (self.episodes, others.episodes),
            (self.rewards, others.rewards),
            *(
                (values, others_failures.get(name))
                for name, values in (self.failures or {}).items()
            ),
        ]
        for mine, theirs in pairs:
            if mine is not None:
                for place, index in enumerate(indices):
                    mine[index] = theirs[place]


# (prompts, seeds, table of completions) → a set with rewards.
Sample = Callable[[list[TokenizedPrompt], list[int], str | None], SampledSet]


class RolloutWorker:
    """Samples and scores one set at a time, in any session, with an environment and reward
    functions of its own. One thread uses it at a time.
    """

    def __init__(
        self,
        ctx: RunContext,
        inputs: RunInputs,
        open_reward_model: Callable[[str], RewardModelScorer],
        *,
        samples: bool = True,
        another: bool = False,
    ) -> None:
        """Every rank calls it.

        `samples`: whether this rank does; else it opens no reward functions. `another`: not with
        the processes that `inputs` has opened.
        """
        packing = inputs.packed_dataset.packing
        assert isinstance(packing, PromptPacking)
        assert isinstance(ctx.config, AlignConfig)
        options = ctx.config.rollout
        tokenizer = inputs.tokenizer
        self._device = ctx.dist_ctx.device
        self._max_tokens = options.max_completion_length
        prompts = [*packing.prompts, *packing.validation_prompts]
        without_rewards = options.model_copy(update={"reward_functions": (), "reward_weights": ()})
        turns = packing.turns
        if turns is not None and another:
            pool = name_environment(options)
            assert pool is not None
            turns = turns._replace(pool=pool)
        self.scorer = CompletionScorer(
            ctx,
            options if samples else without_rewards,
            tokenizer,
            prompts,
            open_reward_model,
            turns and turns.pool,
        )
        # As in `generate` and `chat`.
        self.stop_token_ids = frozenset(
            inputs.model_config.end_token_ids | {tokenizer.eos_token_id}
        )
        if is_conversational(prompts):
            self.stop_token_ids |= ChatTemplate.from_tokenizer(tokenizer).stop_ids
        self._player = None
        if turns is not None:
            self.stop_token_ids |= turns.stop_token_ids
            turns.pool.heartbeat = partial(ctx.watch.set_phase, "environment")
            self._player = EpisodePlayer(
                turns,
                max_turns=options.max_turns,
                max_tokens=self._max_tokens,
                max_length=inputs.batch_plan.sequence_length,
            )

    def sample(
        self,
        prompts: Sequence[TokenizedPrompt],
        seeds: Sequence[int],
        session: SamplingSession,
        on_step: Callable[[], None],
    ) -> SampledSet:
        """A completion of each prompt, without rewards.

        Raises UserError where the environment cannot be used.
        """
        use_device_in_thread(self._device)  # for reward models
        if self._player is None:
            requests = [
                SampleRequest(key, prompt.tokens.tolist(), self._max_tokens, seed)
                for key, (prompt, seed) in enumerate(zip(prompts, seeds, strict=True))
            ]
            return SampledSet(list(prompts), sample_all(session, requests, on_step))
        episodes = self._player.play(prompts, seeds, session, on_step)
        played = [
            TokenizedPrompt(
                np.array(episode.prompt_ids, np.int32),
                cast("list[Any]", episode.messages),
                prompt.columns,
            )
            for prompt, episode in zip(prompts, episodes, strict=True)
        ]
        return SampledSet(played, [episode.completion for episode in episodes], episodes)

    def score(
        self, sampled: SampledSet, table: str | None, on_scored: Callable[[], None] = lambda: None
    ) -> None:
        """Add the rewards of a set that was just sampled.

        Raises UserError as CompletionScorer does.
        """
        scored = self.scorer.score(
            table, sampled.prompts, sampled.completions, sampled.episodes, on_scored
        )
        sampled.rewards, sampled.failures, sampled.errors = scored


class _Begun(NamedTuple, Generic[T]):
    """A set that is being sampled; `ended` asks its thread to end."""

    result: Future[T]
    ended: threading.Event


class SetSchedule(Generic[T]):
    """Begins sets while earlier ones are learned from, each in a thread.

    Every rank has one, and calls its methods for the same batches in the same order.
    """

    def __init__(
        self,
        sample: Callable[[int, int, Callable[[], None]], T],
        publish: Callable[[int], None],
        max_staleness: int,
        num_iterations: int = 1,
    ) -> None:
        """`sample(set, first_version, on_step)` is called in a thread: tokens of versions from
        `first_version` on may be used. It calls `on_step` often, which raises once nobody waits for
        it. `publish(version)` gives weights to what samples.
        """
        self._sample = sample
        self._publish = publish
        self._max_staleness = max_staleness
        self._num_iterations = num_iterations
        self._begun: dict[int, _Begun[T]] = {}
        self._next_set = 0

    @property
    def most_at_once(self) -> int:
        """The largest number of sets that are sampled at a time."""
        return (self._max_staleness + self._num_iterations - 1) // self._num_iterations + 1

    def advance(self, batch_index: int, num_batches: int, known: Container[int] = ()) -> None:
        """Before the step of a batch: publish the weights if a later set needs them, and begin the
        sets that may begin.

        `num_batches` ends the run, and sets that are `known` are not sampled.
        """
        first = batch_index // self._num_iterations
        last = (num_batches - 1) // self._num_iterations
        newest = min((batch_index + self._max_staleness) // self._num_iterations, last)
        sets = range(max(first, self._next_set), newest + 1)
        new = [each for each in sets if each not in self._begun and each not in known]
        if new or any(each > first for each in self._begun):
            self._publish(batch_index)
        for each in new:
            self._begin(each)

    def _begin(self, set_index: int) -> None:
        ended = threading.Event()

        def on_step() -> None:
            if ended.is_set():
                raise RunFailed(f"set {set_index}: nobody waits for it any more")

        first_version = set_index * self._num_iterations - self._max_staleness
        sample = partial(self._sample, set_index, first_version, on_step)
        self._begun[set_index] = _Begun(start_in_thread(sample, f"set {set_index}"), ended)

    def take(self, set_index: int, on_wait: Callable[[], None]) -> T:
        """The set, once it is sampled, or what its thread raised.

        `on_wait` is called every second.
        """
        self._next_set = set_index + 1
        result = self._begun.pop(set_index).result
        while not wait([result], HEARTBEAT_SECONDS).done:
            on_wait()
        return result.result()

    def abandon(self) -> list[Future[T]]:
        """End what is being sampled.

        Sets begin anew at the next `advance`, also the one that was taken last.
        """
        abandoned = [*self._begun.values()]
        self._begun.clear()
        self._next_set = 0
        for each in abandoned:
            each.ended.set()
        return [each.result for each in abandoned]

    def close(self) -> None:
        wait(self.abandon(), CLOSE_SECONDS)


class SetSampler:
    """Samples this rank's part of each set: in threads, up to `max_staleness` versions ahead of its
    first step, or with 0 when it is taken.

    Every rank has one, with reward functions of its own, and calls it at the same steps.
    """

    def __init__(
        self,
        ctx: RunContext,
        inputs: RunInputs,
        built: BuiltModel,
        places: Callable[[int], list[range]],
        samples: bool,
    ) -> None:
        """`places(set)`: the places in the order of the data of the groups that this rank samples,
        a range for each step of the set.

        `samples`: whether this rank does. Raises UserError where a server does not start.
        """
        packing = inputs.packed_dataset.packing
        assert isinstance(packing, PromptPacking)
        assert isinstance(ctx.config, AlignConfig)
        options = ctx.config.rollout
        self._ctx = ctx
        self._dist_ctx = ctx.dist_ctx
        self._detector = built.detector
        self._batch_offset = built.detector.batch_offset
        self._options = options
        self._places = places
        self._prompts = packing.prompts
        self._indices = inputs.packed_dataset.indices
        self._has_given_up = False  # dynamic sampling, on some set
        self._schedule = SetSchedule(
            self._sample_ahead,
            lambda version: self._servers.publish(version),
            options.max_staleness,
            options.num_iterations,
        )
        self.wait_seconds = 0.0  # of the set that was taken in this step
        self._num_failed_steps = 0  # in a row
        self._max_failed_steps = min(
            ctx.config.faults.max_bad_steps, ctx.config.train.steps - built.point.step
        )
        self._workers: SimpleQueue[RolloutWorker] = SimpleQueue()  # those that nobody uses
        # Workers share the models.
        open_reward_model = cache(
            partial(
                RewardModelScorer,
                device=self._dist_ctx.device,
                dtype=built.dtype,
                on_batch=partial(ctx.watch.set_phase, "reward"),
            )
        )
        num_workers = self._schedule.most_at_once if options.max_staleness else 1
        with ExitStack() as opened:
            workers = []
            for number in range(num_workers):
                worker = RolloutWorker(
                    ctx, inputs, open_reward_model, samples=samples, another=number > 0
                )
                opened.callback(worker.scorer.close)
                workers.append(worker)
                self._workers.put(worker)
            self._scorer = workers[0].scorer
            self._sampler = _build_sampler(ctx, inputs, built, workers[0].stop_token_ids)
            opened.callback(self._sampler.close)
            opened.callback(self._schedule.close)
            self._opened = opened.pop_all()

    @property
    def _servers(self) -> Servers:
        assert isinstance(self._sampler, Servers)
        return self._sampler

    def begin(self, batch_index: int, known: Container[int]) -> bool:
        """Before each step: publish the weights, and begin the sets that may begin ahead of it.

        `known` sets are not sampled. Returns whether sets that were taken are not of this run any
        more.
        """
        if not self._options.max_staleness:
            return False
        self.wait_seconds = 0.0
        # The run has rolled back: later weights, and what they sampled, are not of this run.
        offset = self._detector.batch_offset
        rolled_back = offset != self._batch_offset
        if rolled_back:
            self._ctx.log.write(f"sets after batch {batch_index}: sampled again after the rollback")
            self._schedule.abandon()
            self._servers.forget()
            self._batch_offset = offset
        self._schedule.advance(batch_index, self._ctx.config.train.steps + offset, known)
        return rolled_back

    def take(self, set_index: int, step: int) -> SampledSet:
        """A set, for its first step. Every rank calls it."""
        if self._options.max_staleness:
            with self._dist_ctx.raise_on_all():
                began = time.perf_counter()
                on_wait = partial(self._ctx.watch.set_phase, "sample", step)
                sampled = self._schedule.take(set_index, on_wait)
                self.wait_seconds = time.perf_counter() - began
            self._report(sampled, step, completions_table_name(set_index, self._options))
        else:
            sampled = self._sample_groups(
                set_index, partial(self.sample, step), self._sum_over_ranks
            )
        self._check_rewards(sampled, step)
        self._log_dropped(sampled, set_index, step)
        return sampled

    def sample(
        self,
        step: int,
        prompts: Sequence[TokenizedPrompt],
        seeds: Sequence[int],
        table: str | None,
        greedy: bool = False,
    ) -> SampledSet:
        """Completions by the policy as it is now, and their rewards.

        Every rank calls it, with prompts of its own.
        """
        version = step + self._detector.batch_offset
        on_step = partial(self._ctx.watch.set_phase, "sample", step)
        sampled = SampledSet([], [])
        problem = None
        with self._free_worker() as worker:
            with self._sampler.session(len(prompts), version, greedy=greedy) as session:
                try:
                    sampled = worker.sample(prompts, seeds, session, on_step)
                except UserError as error:  # other ranks wait at the end of the session
                    problem = error
            with self._dist_ctx.raise_on_all():
                if problem is not None:
                    raise problem
            with self._dist_ctx.raise_on_all():
                worker.score(sampled, table)
        self._report(sampled, step, table)
        return sampled

    def _sample_ahead(
        self, set_index: int, first_version: int, on_step: Callable[[], None]
    ) -> SampledSet:
        """A set of this rank, sampled and scored in a thread. No rank waits for another one."""
        with self._free_worker() as worker:

            def sample(
                prompts: Sequence[TokenizedPrompt], seeds: Sequence[int], table: str | None
            ) -> SampledSet:
                session = self._servers.session_from(first_version)
                sampled = worker.sample(prompts, seeds, session, on_step)
                on_step()
                worker.score(sampled, table, on_step)
                return sampled

            return self._sample_groups(set_index, sample, add_up=int)

    def _sample_groups(
        self, set_index: int, sample: Sample, add_up: Callable[[int], int]
    ) -> SampledSet:
        """The groups of a set, each `num_generations` completions of one prompt; those whose
        rewards are all equal give way to groups of other prompts (dynamic sampling: DAPO, arXiv
        2503.14476).

        The place of a group in the order of the data decides on prompts and seeds, and neither
        ranks and restarts, nor what was sampled before. `add_up` sums over the ranks that sample
        together. After `dynamic_sampling_rounds` what is left stays, and a line says so once.
        """
        rounds = self._options.dynamic_sampling_rounds
        count = self._options.num_generations
        seed = self._ctx.config.train.seed
        places = self._places(set_index)
        in_order = [place for part in places for place in part]
        table = completions_table_name(set_index, self._options)
        indices = [index for part in places for index in self._indices(part.start, part.stop)]
        prompts = [self._prompts[index] for index in indices for _ in range(count)]
        seeds = [
            derive_key(seed, "rollout", place, number)
            for place in in_order
            for number in range(count)
        ]
        sampled = sample(prompts, seeds, table)

        def find_even() -> list[int]:
            differs = sampled.differing_groups(count).tolist()
            return [group for group, each in enumerate(differs) if not each]

        for number in range(1, rounds + 1):
            even = find_even()
            if not add_up(len(even)):
                return sampled
            keys = [derive_key(seed, "replacement", in_order[group], number) for group in even]
            prompts = [
                self._prompts[key % len(self._prompts)] for key in keys for _ in range(count)
            ]
            seeds = [derive_key(key, "rollout", index) for key in keys for index in range(count)]
            others = sample(prompts, seeds, table and f"{table}-round-{number}")
            sampled.replace(
                [group * count + index for group in even for index in range(count)], others
            )
        if not rounds:
            return sampled
        left = add_up(len(find_even()))
        if left and not self._has_given_up:
            self._has_given_up = True
            self._ctx.console.warn(
                f"set {set_index}: the rewards of {format_count(left, 'group')} are still all equal"
                f" after {format_count(rounds, 'round')} of further prompts, and nothing is learned"
                " from them (from here on see the metric frac_reward_zero_std)"
            )
        return sampled

    @contextmanager
    def _free_worker(self) -> Iterator[RolloutWorker]:
        worker = self._workers.get()
        try:
            yield worker
        finally:
            self._workers.put(worker)

    def _sum_over_ranks(self, count: int) -> int:
        return int(self._dist_ctx.all_reduce_sum(torch.tensor(count, device=self._dist_ctx.device)))

    def _report(self, sampled: SampledSet, step: int, table: str | None) -> None:
        """Say what failed in a set that any worker has scored. Every rank calls it."""
        assert sampled.rewards is not None
        self._scorer.report(table, step, sampled.rewards, sampled.errors, sampled.episodes)

    def _check_rewards(self, sampled: SampledSet, step: int) -> None:
        """Raise RunFailed, on every rank, where all rewards of `faults.max_bad_steps` steps in a
        row, or of all steps of a shorter attempt, have failed. Every rank calls it for each set to
        learn from, after `step` steps.
        """
        failed = sampled.failed
        counts = torch.tensor(
            [failed.sum(), len(failed)], dtype=torch.float64, device=self._dist_ctx.device
        )
        num_failed, num_rewards = self._dist_ctx.all_reduce_sum(counts).tolist()
        num_steps = min(self._options.num_iterations, self._ctx.config.train.steps - step)
        all_failed = num_failed == num_rewards
        self._num_failed_steps = self._num_failed_steps + num_steps if all_failed else 0
        with self._dist_ctx.raise_on_all():
            if sampled.errors and self._num_failed_steps >= self._max_failed_steps:
                in_a_row = f"{format_count(self._max_failed_steps, 'step')} in a row"
                raise RunFailed(f"all rewards of {in_a_row} have failed: {sampled.errors[-1]}")

    def _log_dropped(self, sampled: SampledSet, set_index: int, step: int) -> None:
        count = self._options.num_generations
        learned = sampled.learned(self._options).view(-1, count).any(1)
        if num_dropped := int((~learned).sum()):
            self._ctx.log.write(
                f"set {set_index}: step {step}: nothing is learned from"
                f" {format_count(num_dropped, 'group')} of {len(learned)}: no rewards, or equal ones"
            )

    def close(self) -> None:
        self._opened.close()


def _build_sampler(
    ctx: RunContext, inputs: RunInputs, built: BuiltModel, stop_token_ids: frozenset[int]
) -> InProcessSampler | Servers:
    """What `rollout.engine` names: the trainer itself, or servers."""
    assert isinstance(ctx.config, AlignConfig)
    options = ctx.config.rollout
    model = inputs.model_config
    # vLLM samples ids with which a head is padded, too.
    vocab_size = inputs.tokenizer.vocab_size if options.engine == "in-process" else model.vocab_size
    settings = SamplingSettings(
        options.temperature,
        options.top_p,
        vocab_size,
        inputs.batch_plan.sequence_length,
        stop_token_ids,
        options.decode_batch_size,
        model if options.replay_routed_experts else None,
    )
    if options.engine == "in-process":
        return InProcessSampler(built.parallel_model, settings)

    def warn(line: str) -> None:
        """The console prints on rank 0 only; other ranks print to their logs."""
        if ctx.dist_ctx.is_rank0:
            ctx.console.warn(line)
        else:
            print(line, flush=True)

    starter = None
    if options.engine_start:
        starter = ServerStarter(
            ctx.config, settings, inputs.tokenizer, built.dtype, ctx.run.logs_folder
        )
    return Servers(built.parallel_model, model, options, settings, ctx.run, warn, starter)
