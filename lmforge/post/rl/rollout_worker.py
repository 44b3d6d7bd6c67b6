"""A rollout worker samples and scores one set of completions at a time, with an environment and
reward functions of its own; and the prompts and seeds that it is given.

Several workers may work at once, each in a thread. When they do, and what becomes of their sets, is
not known here.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from lmforge.core.data.order import derive_key
from lmforge.core.distributed.distributed import use_device_in_thread
from lmforge.core.errors import RunFailed, format_count
from lmforge.core.stages.context import RunContext
from lmforge.core.stages.inputs import RunInputs
from lmforge.post.objectives.policy import has_nonzero_std
from lmforge.post.options.align import AlignConfig, RolloutOptions
from lmforge.post.prompts import PromptPacking, is_conversational, name_environment
from lmforge.post.rl.episodes import Episode, EpisodePlayer
from lmforge.post.rl.sampler import SampledCompletion, SampleRequest, SamplingSession, sample_all
from lmforge.post.rl.scoring import CompletionScorer, RewardModelScorer, completions_table_name
from lmforge.text.chat.preferences import TokenizedPrompt
from lmforge.text.chat.templates import ChatTemplate

# Metrics of what fails: a reward function, an environment.
FAILURES = ("reward_failures", "environment_failures")


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
            for place, index in enumerate(indices if mine is not None else ()):
                mine[index] = theirs[place]


class RolloutWorker:
    """Samples with any session, and scores. One thread uses it at a time."""

    def __init__(
        self,
        ctx: RunContext,
        inputs: RunInputs,
        open_reward_model: Callable[[str], RewardModelScorer],
        start_step: int,
        *,
        samples: bool = True,
        another: bool = False,
    ) -> None:
        """Every rank calls it.

        `samples`: whether this rank does; else it opens no reward functions. `another`: not with
        the processes that `inputs` has opened.
        """
        packing, tokenizer, plan = (
            inputs.packed_dataset.packing,
            inputs.tokenizer,
            inputs.batch_plan,
        )
        assert isinstance(packing, PromptPacking)
        assert isinstance(ctx.config, AlignConfig)
        options = ctx.config.rollout
        self._dist_ctx, self._config, self._max_tokens = (
            ctx.dist_ctx,
            ctx.config,
            options.max_completion_length,
        )
        self._num_failed_steps = 0  # in a row
        self._max_failed_steps = min(
            ctx.config.faults.max_bad_steps, ctx.config.train.steps - start_step
        )
        prompts = [*packing.prompts, *packing.validation_prompts]
        without_rewards = options.model_copy(update={"reward_functions": (), "reward_weights": ()})
        turns = packing.turns
        pool = (name_environment(options) if another else turns.pool) if turns else None
        self._scorer = CompletionScorer(
            ctx,
            options if samples else without_rewards,
            tokenizer,
            prompts,
            open_reward_model,
            pool,
        )
        self._player = None
        # As in `generate` and `chat`.
        self.stop_token_ids = frozenset(
            inputs.model_config.end_token_ids | {tokenizer.eos_token_id}
        )
        if is_conversational(prompts):
            self.stop_token_ids |= ChatTemplate.from_tokenizer(tokenizer).stop_ids
        if turns is not None and pool is not None:
            self.stop_token_ids |= turns.stop_token_ids
            pool.heartbeat = partial(ctx.watch.set_phase, "environment")
            self._player = EpisodePlayer(
                turns._replace(pool=pool),
                max_turns=options.max_turns,
                max_tokens=self._max_tokens,
                max_length=plan.sequence_length,
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
        use_device_in_thread(self._dist_ctx.device)  # for reward models
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
        scored = self._scorer.score(
            table, sampled.prompts, sampled.completions, sampled.episodes, on_scored
        )
        sampled.rewards, sampled.failures, sampled.errors = scored

    def check_rewards(self, sampled: SampledSet, step: int) -> None:
        """Raise RunFailed, on every rank, where all rewards of `faults.max_bad_steps` steps in a
        row, or of all steps of a shorter attempt, have failed. Every rank calls it for each set to
        learn from, after `step` steps.
        """
        failed = sampled.failed
        counts = torch.tensor(
            [failed.sum(), len(failed)], dtype=torch.float64, device=self._dist_ctx.device
        )
        num_failed, num_rewards = self._dist_ctx.all_reduce_sum(counts).tolist()
        num_steps = min(self._config.rollout.num_iterations, self._config.train.steps - step)
        self._num_failed_steps = (
            self._num_failed_steps + num_steps if num_failed == num_rewards else 0
        )
        with self._dist_ctx.raise_on_all():
            if sampled.errors and self._num_failed_steps >= self._max_failed_steps:
                in_a_row = f"{format_count(self._max_failed_steps, 'step')} in a row"
                raise RunFailed(f"all rewards of {in_a_row} have failed: {sampled.errors[-1]}")

    def report(self, sampled: SampledSet, step: int, table: str | None) -> None:
        """Say what failed in a set that any worker has scored. Every rank calls it."""
        assert sampled.rewards is not None
        self._scorer.report(table, step, sampled.rewards, sampled.errors, sampled.episodes)

    def close(self) -> None:
        """End the processes of environment and reward functions."""
        self._scorer.close()


# (prompts, seeds, table of completions) → a set with rewards.
Sample = Callable[[list[TokenizedPrompt], list[int], str | None], SampledSet]


class GroupPrompts:
    """The prompts and seeds of groups: each prompt `num_generations` times in a row.

    The place of a group in the order of the data decides, and neither ranks and restarts, nor what
    was sampled before.
    """

    def __init__(
        self,
        prompts: Sequence[TokenizedPrompt],
        indices: Callable[[int, int], Iterable[int]],
        options: RolloutOptions,
        seed: int,
        warn: Callable[[str], None],
    ) -> None:
        """`indices(start, stop)`: those of the prompts at these places in the order of the data."""
        self._prompts, self._indices, self._options, self._seed, self._warn = (
            prompts,
            indices,
            options,
            seed,
            warn,
        )
        self._has_given_up = False

    def sample_set(
        self, set_index: int, places: Sequence[range], sample: Sample, add_up: Callable[[int], int]
    ) -> SampledSet:
        """Those at these places, sampled; groups whose rewards are all equal give way to groups of
        other prompts (dynamic sampling: DAPO, arXiv 2503.14476).

        `places`: those in the order of the data, of each step of the set, of the groups that this
        rank samples. `add_up` sums over the ranks that sample together. After
        `dynamic_sampling_rounds` what is left stays, and a line says so once.
        """
        rounds, count = self._options.dynamic_sampling_rounds, self._options.num_generations
        in_order, table = (
            [place for part in places for place in part],
            completions_table_name(set_index, self._options),
        )
        indices = [index for part in places for index in self._indices(part.start, part.stop)]
        prompts = [self._prompts[index] for index in indices for _ in range(count)]
        seeds = [
            derive_key(self._seed, "rollout", place, number)
            for place in in_order
            for number in range(count)
        ]
        sampled = sample(prompts, seeds, table)
        for number in range(1, rounds + 1):
            even = _even_groups(sampled, count)
            if not add_up(len(even)):
                return sampled
            keys = [
                derive_key(self._seed, "replacement", in_order[group], number) for group in even
            ]
            prompts = [
                self._prompts[key % len(self._prompts)] for key in keys for _ in range(count)
            ]
            seeds = [derive_key(key, "rollout", index) for key in keys for index in range(count)]
            others = sample(prompts, seeds, table and f"{table}-round-{number}")
            sampled.replace(
                [group * count + index for group in even for index in range(count)], others
            )
        if (
            rounds
            and (left := add_up(len(_even_groups(sampled, count))))
            and not self._has_given_up
        ):
            self._has_given_up = True
            self._warn(
                f"set {set_index}: the rewards of {format_count(left, 'group')} are still all equal"
                f" after {format_count(rounds, 'round')} of further prompts, and nothing is learned"
                " from them (from here on see the metric frac_reward_zero_std)"
            )
        return sampled


def _even_groups(sampled: SampledSet, num_generations: int) -> list[int]:
    assert sampled.rewards is not None
    differs = has_nonzero_std(
        sampled.rewards.view(len(sampled.rewards) // num_generations, num_generations)
    ).tolist()
    return [group for group, each in enumerate(differs) if not each]
