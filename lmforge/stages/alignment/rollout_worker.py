"""A rollout worker samples and scores one set of completions at a time, with an environment and reward functions of its own.

Several workers may work at once, each in a thread. When they do, and what becomes of their sets, is not known here.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from lmforge.cluster.distributed import use_device_in_thread
from lmforge.config.align import AlignConfig
from lmforge.data.chat.preferences import TokenizedPrompt
from lmforge.data.chat.templates import ChatTemplate
from lmforge.errors import UserError
from lmforge.stages.alignment.completions import SampledCompletion
from lmforge.stages.alignment.episodes import Episode, EpisodePlayer
from lmforge.stages.alignment.prompt_inputs import PromptPacking, is_conversational, name_environment
from lmforge.stages.alignment.sampling import SampleRequest, SamplingSession, sample_all
from lmforge.stages.alignment.scoring import CompletionScorer
from lmforge.stages.attempt import RunContext
from lmforge.stages.inputs import RunInputs


@dataclass
class SampledSet:
    """Completions of this rank, and the prompts that they follow; with an environment its episodes.

    rewards   fp64 [completions], NaN where there is none
    failures  metrics of what failed, fp32 [completions]
    """

    prompts: list[TokenizedPrompt]
    completions: list[SampledCompletion]
    episodes: list[Episode] | None = None
    rewards: Tensor | None = None
    failures: dict[str, Tensor] | None = None


class RolloutWorker:
    """Samples with any session, and scores. One thread uses it at a time."""

    def __init__(self, ctx: RunContext, inputs: RunInputs, dtype: torch.dtype, another: bool = False) -> None:
        """Every rank calls it. `dtype`: that of reward models. `another`: not with the processes that `inputs` has opened."""
        packing, tokenizer, plan = inputs.packed_dataset.packing, inputs.tokenizer, inputs.batch_plan
        assert isinstance(packing, PromptPacking)
        assert isinstance(ctx.config, AlignConfig)
        options = ctx.config.rollout
        self._dist_ctx, self._environment, self._max_tokens = ctx.dist_ctx, options.environment, options.max_completion_length
        prompts = [*packing.prompts, *packing.validation_prompts]
        turns = packing.turns
        pool = (name_environment(options) if another else turns.pool) if turns else None
        self._scorer = CompletionScorer(ctx, options, tokenizer, prompts, dtype, pool)
        self._player = None
        # As in `generate` and `chat`.
        self.stop_token_ids = frozenset(inputs.model_config.end_token_ids | {tokenizer.eos_token_id})
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
        self, prompts: Sequence[TokenizedPrompt], seeds: Sequence[int], session: SamplingSession, on_step: Callable[[], None]
    ) -> SampledSet:
        """A completion of each prompt, without rewards. Raises UserError where the environment cannot be used."""
        use_device_in_thread(self._dist_ctx.device)  # for reward models
        if self._player is None:
            requests = [
                SampleRequest(key, prompt.tokens.tolist(), self._max_tokens, seed)
                for key, (prompt, seed) in enumerate(zip(prompts, seeds, strict=True))
            ]
            return SampledSet(list(prompts), sample_all(session, requests, on_step))
        episodes = self._player.play(prompts, seeds, session, on_step)
        played = [
            TokenizedPrompt(np.array(episode.prompt_ids, np.int32), cast("list[Any]", episode.messages), prompt.columns)
            for prompt, episode in zip(prompts, episodes, strict=True)
        ]
        return SampledSet(played, [episode.completion for episode in episodes], episodes)

    def score(self, sampled: SampledSet, table: str | None) -> None:
        """Add the rewards of a set that was just sampled. Raises UserError as CompletionScorer does."""
        sampled.rewards, sampled.failures = self._scorer.score(table, sampled.prompts, sampled.completions, sampled.episodes)

    def check_episodes(self, sampled: SampledSet, step: int) -> None:
        """Raise UserError, on every rank, where the environment failed in all episodes of a set. Every rank calls it."""
        if sampled.episodes is None:
            return
        failed = [episode.error for episode in sampled.episodes if episode.error]
        counts = torch.tensor([len(failed), len(sampled.episodes)], dtype=torch.float64, device=self._dist_ctx.device)
        num_failed, num_episodes = self._dist_ctx.all_reduce_sum(counts).tolist()
        with self._dist_ctx.raise_on_all():
            if failed and num_failed == num_episodes:
                raise UserError(f"rollout.environment: {self._environment}: all episodes of step {step} failed: {failed[0]}")

    def report(self, sampled: SampledSet, step: int, table: str | None) -> None:
        """Say what failed in a set that any worker has scored. Every rank calls it."""
        assert sampled.rewards is not None
        self._scorer.report(table, step, sampled.rewards, sampled.episodes)

    def close(self) -> None:
        """End the processes of environment and reward functions."""
        self._scorer.close()
