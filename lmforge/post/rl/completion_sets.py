"""Where sets of completions come from: `CompletionSets` samples each when it is asked for,
`SetsAhead` while earlier ones are learned from. What becomes of them is not known here.
"""

import time
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from queue import SimpleQueue

import torch

from lmforge.core.errors import UserError
from lmforge.core.stages.build_model import BuiltModel
from lmforge.core.stages.context import RunContext
from lmforge.core.stages.inputs import RunInputs
from lmforge.post.options.align import AlignConfig
from lmforge.post.prompts import PromptPacking
from lmforge.post.rl.async_sampling import AsyncSampler
from lmforge.post.rl.engines.started_servers import ServerStarter
from lmforge.post.rl.remote_sampling import RemoteSampler
from lmforge.post.rl.rollout_worker import GroupPrompts, RolloutWorker, SampledSet
from lmforge.post.rl.sampler import InProcessSampler, SamplingSettings
from lmforge.post.rl.sampling_ahead import SamplingAhead
from lmforge.post.rl.scoring import RewardModelScorer, completions_table_name
from lmforge.text.chat.preferences import TokenizedPrompt


class CompletionSets:
    """This rank's part of each set.

    Every rank has one, with reward functions of its own, and calls it at the same steps.
    """

    def __init__(
        self,
        ctx: RunContext,
        inputs: RunInputs,
        built: BuiltModel,
        places: Callable[[int], list[range]],
        samples: bool,
        num_workers: int = 1,
    ) -> None:
        """`places(set)`: those of its groups (GroupPrompts).

        `samples`: whether this rank does. Raises UserError where a server does not start.
        """
        packing = inputs.packed_dataset.packing
        assert isinstance(packing, PromptPacking)
        assert isinstance(ctx.config, AlignConfig)
        options, seed = ctx.config.rollout, ctx.config.train.seed
        self._ctx, self._dist_ctx, self._detector = ctx, ctx.dist_ctx, built.detector
        self._options, self._places = options, places
        self._group_prompts = GroupPrompts(
            packing.prompts, inputs.packed_dataset.indices, options, seed, ctx.console.warn
        )
        self.wait_seconds = 0.0  # of the set that was taken in this step
        self._workers: list[RolloutWorker] = []
        self._free_workers: SimpleQueue[RolloutWorker] = SimpleQueue()
        heartbeat, device = partial(ctx.watch.set_phase, "reward"), self._dist_ctx.device
        # Workers share the models.
        open_reward_model = cache(
            partial(RewardModelScorer, device=device, dtype=built.dtype, on_batch=heartbeat)
        )
        with ExitStack() as opened:
            for number in range(num_workers):
                start = built.point.step
                worker = RolloutWorker(
                    ctx, inputs, open_reward_model, start, samples=samples, another=number > 0
                )
                self._workers.append(worker)
                opened.callback(worker.close)
                self._free_workers.put(worker)
            self._sampler = _build_sampler(ctx, inputs, built, self._workers[0].stop_token_ids)
            opened.callback(self._sampler.close)
            self._opened = opened.pop_all()

    def begin(self, batch_index: int, known: Container[int]) -> bool:
        """Before each step.

        `known` sets are not sampled. Returns whether sets that were taken are not of this run any
        more.
        """
        return False

    def take(self, set_index: int, step: int) -> SampledSet:
        """A set, for its first step."""
        places, sample = self._places(set_index), partial(self.sample, step)
        sampled = self._group_prompts.sample_set(set_index, places, sample, self._sum_over_ranks)
        self._workers[0].check_rewards(sampled, step)
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
        version, on_step = (
            step + self._detector.batch_offset,
            partial(self._ctx.watch.set_phase, "sample", step),
        )
        sampled, problem = SampledSet([], []), None
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
        self._workers[0].report(sampled, step, table)
        return sampled

    @contextmanager
    def _free_worker(self) -> Iterator[RolloutWorker]:
        worker = self._free_workers.get()
        try:
            yield worker
        finally:
            self._free_workers.put(worker)

    def _sum_over_ranks(self, count: int) -> int:
        return int(self._dist_ctx.all_reduce_sum(torch.tensor(count, device=self._dist_ctx.device)))

    def close(self) -> None:
        self._opened.close()


class SetsAhead(CompletionSets):
    """Sets that are sampled in threads, up to `max_staleness` versions ahead."""

    def __init__(
        self,
        ctx: RunContext,
        inputs: RunInputs,
        built: BuiltModel,
        places: Callable[[int], list[range]],
        samples: bool,
    ) -> None:
        assert isinstance(ctx.config, AlignConfig)
        staleness, iterations = ctx.config.rollout.max_staleness, ctx.config.rollout.num_iterations
        self._ahead = SamplingAhead(
            self._sample_ahead,
            lambda version: self._servers.publish(version),
            staleness,
            iterations,
        )
        super().__init__(ctx, inputs, built, places, samples, self._ahead.most_at_once)
        self._opened.callback(self._ahead.close)
        assert isinstance(self._sampler, AsyncSampler)
        self._servers = self._sampler
        self._batch_offset = self._detector.batch_offset

    def begin(self, batch_index: int, known: Container[int]) -> bool:
        """Publish the weights and begin the sets that may begin before this step."""
        self.wait_seconds, offset = 0.0, self._detector.batch_offset
        # The run has rolled back: later weights, and what they sampled, are not of this run.
        if rolled_back := offset != self._batch_offset:
            self._ahead.abandon()
            self._servers.forget()
            self._batch_offset = offset
        self._ahead.advance(batch_index, self._ctx.config.train.steps + offset, known)
        return rolled_back

    def take(self, set_index: int, step: int) -> SampledSet:
        with self._dist_ctx.raise_on_all():
            began = time.perf_counter()
            sampled = self._ahead.take(
                set_index, partial(self._ctx.watch.set_phase, "sample", step)
            )
            self.wait_seconds = time.perf_counter() - began
        self._workers[0].report(sampled, step, completions_table_name(set_index, self._options))
        self._workers[0].check_rewards(sampled, step)
        return sampled

    def _sample_ahead(
        self, set_index: int, first_version: int, on_step: Callable[[], None]
    ) -> SampledSet:
        """A set of this rank, sampled and scored in a thread. No rank waits for another one."""
        with self._free_worker() as worker:

            def sample(
                prompts: Sequence[TokenizedPrompt], seeds: Sequence[int], table: str | None
            ) -> SampledSet:
                sampled = worker.sample(
                    prompts, seeds, self._servers.session_from(first_version), on_step
                )
                on_step()
                worker.score(sampled, table, on_step)
                return sampled

            return self._group_prompts.sample_set(
                set_index, self._places(set_index), sample, add_up=int
            )


def _build_sampler(
    ctx: RunContext, inputs: RunInputs, built: BuiltModel, stop_token_ids: frozenset[int]
) -> InProcessSampler | RemoteSampler | AsyncSampler:
    """The sampler that `rollout.engine` names: the trainer itself, servers, or servers that sample
    while it trains.
    """
    assert isinstance(ctx.config, AlignConfig)
    options, model, starter = ctx.config.rollout, inputs.model_config, None
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

    if options.engine_start:
        starter = ServerStarter(
            ctx.config, settings, inputs.tokenizer, built.dtype, ctx.run.logs_folder
        )
    remote = RemoteSampler(built.parallel_model, model, options, settings, ctx.run, warn, starter)
    return AsyncSampler(remote) if options.max_staleness else remote
