"""The scores of sampled completions, from reward functions and reward models, and the tables in a
run's folder `completions`.

A table has prompts, completions and rewards; there is one file for each set and data-parallel rank.
"""

import json
import math
import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lmforge.core.data.loader import batch_of_token_lists
from lmforge.core.data.tokenizer import Tokenizer
from lmforge.core.parallel.dims import data_parallel_rank_and_size
from lmforge.core.records.run_records import completions_path
from lmforge.core.stages.context import RunContext
from lmforge.post.environments.process import EnvironmentPool
from lmforge.post.objectives.preference import document_rewards
from lmforge.post.options.align import RolloutOptions
from lmforge.post.prompts import reward_options
from lmforge.post.rewards.functions import FunctionResult, load_reward_functions
from lmforge.post.rl.episodes import Episode
from lmforge.post.rl.sampler import SampledCompletion
from lmforge.serve.decoding.model_loading import load_model
from lmforge.serve.decoding.prompts import check_token_ids
from lmforge.text.chat.preferences import TokenizedPrompt, encode_completions

SCORING_BATCH_SIZE = 16
# What functions are given of an episode that failed before there was an answer.
NO_ANSWER = [{"role": "assistant", "content": ""}]
# Errors of reward functions and environments that are named, of one set and rank and of the run.
MAX_ERRORS_NAMED = 5


class CompletionScorer:
    """The reward functions of a run: they score completions, and readable tables of that are
    written. Every rank has one.
    """

    def __init__(
        self,
        ctx: RunContext,
        options: RolloutOptions,
        tokenizer: Tokenizer,
        prompts: Sequence[TokenizedPrompt],
        open_reward_model: Callable[[str], "RewardModelScorer"],
        environment: EnvironmentPool | None = None,
    ) -> None:
        """`prompts`: all of the run, so that functions are always called with the same columns.

        Every rank calls it.
        """
        self._ctx = ctx
        self._tokenizer = tokenizer
        self._environment = environment
        self._spec = options.environment
        rank = ctx.dist_ctx.rank_info.rank
        world_size = ctx.dist_ctx.world_size
        self._rank, _ = data_parallel_rank_and_size(ctx.config.parallel, rank, world_size)
        self._named_errors: set[str] = set()
        self._warned_of_no_reward = False
        self._columns = sorted({name for prompt in prompts for name in prompt.columns})
        heartbeat = partial(ctx.watch.set_phase, "reward")
        with ctx.dist_ctx.raise_on_all():
            self._functions = load_reward_functions(
                options.reward_functions,
                weights=options.reward_weights or None,
                timeout_seconds=options.reward_timeout_seconds,
                open_reward_model=open_reward_model,
                heartbeat=heartbeat,
                options=reward_options(options),
                environment=environment,
            )

    def report(
        self,
        table: str | None,
        step: int,
        rewards: Tensor,
        errors: list[str],
        episodes: Sequence[Episode] | None = None,
    ) -> None:
        """Name the first `errors` that `score` returned on any rank, on the console and for the
        report; say that no completion of any rank has a reward; announce the table that `score`
        wrote to trackers. Every rank calls it.

        An episode that has failed has no reward, and is a line in this rank's log.
        """
        console = self._ctx.console
        for number, episode in enumerate(episodes or ()):
            if episode.error:
                error = _encodable(episode.error)
                self._ctx.log.write(
                    f"environment {self._spec}: step {step}: episode {number} failed: {error}"
                )
        first = [*dict.fromkeys(errors)][:MAX_ERRORS_NAMED]
        gathered = self._ctx.dist_ctx.all_gather((len(rewards), int(rewards.isnan().sum()), first))
        for rank, (_, _, failures) in enumerate(gathered):
            for error in failures:
                if error not in self._named_errors and len(self._named_errors) < MAX_ERRORS_NAMED:
                    self._named_errors.add(error)
                    self._ctx.events.add("failed rewards", step, reason=error)
                    console.warn(
                        f"{error} (step {step}, rank {rank}): no reward; later failures of this"
                        " kind are only counted"
                    )
        count = sum(num_rewards for num_rewards, _, _ in gathered)
        without = sum(num_missing for _, num_missing, _ in gathered)
        if count and count == without and not self._warned_of_no_reward:
            self._warned_of_no_reward = True
            console.warn(
                f"step {step}: none of {count:,} completions has a reward: nothing is learned from"
                " them"
            )
        if table is not None and len(rewards):
            self._ctx.events.add("completions", step, table=table)

    def score(
        self,
        table: str | None,
        prompts: Sequence[TokenizedPrompt],
        completions: Sequence[SampledCompletion],
        episodes: Sequence[Episode] | None = None,
        on_scored: Callable[[], None] = lambda: None,
    ) -> tuple[Tensor, dict[str, Tensor], list[str]]:
        """Rewards, fp64 [completions], NaN where there is none, and metrics of what failed, fp32
        [completions]: the fraction of functions, and with `episodes` whether its environment did,
        its turns, and its calls of tools; and all errors.

        Functions are given completions as text, and those of `episodes`, which these prompts and
        completions are, as messages. Writes the table called `table`, one JSON object per line,
        unless that is None, or `on_scored` raises before.
        """
        if not prompts:
            return torch.zeros(0, dtype=torch.float64), {}, []
        texts = [self._tokenizer.decode(completion.tokens) for completion in completions]
        columns = {name: [prompt.columns.get(name) for prompt in prompts] for name in self._columns}
        given = texts if episodes is None else [episode.turns or NO_ANSWER for episode in episodes]
        scores = self._functions([prompt.prompt for prompt in prompts], given, columns)
        rewards = [math.nan if reward is None else reward for reward in scores.rewards]
        errors = [f"reward {spec}: {error}" for spec, error in scores.errors.items()]
        of_episodes: list[dict[str, Any]] = [{} for _ in texts]
        if episodes is not None and self._environment is not None:
            # Some while their rewards were asked for.
            for number, error in self._environment.failed_episodes.items():
                episodes[number].error = episodes[number].error or error
            errors += [f"environment {self._spec}: {each.error}" for each in episodes if each.error]
            texts = [episode.describe() for episode in episodes]
            of_episodes = [
                {"turns": each.turns} | ({"error": each.error} if each.error else {})
                for each in episodes
            ]
            rewards = [
                math.nan if each.error else reward
                for each, reward in zip(episodes, rewards, strict=True)
            ]
        on_scored()
        if table is not None and self._ctx.run.holds_lock():
            path = completions_path(self._ctx.run.path, table, self._rank)
            path.parent.mkdir(exist_ok=True)
            # Half of a surrogate pair, which UTF-8 cannot encode, becomes JSON's own escape of it.
            with open(path, "w", encoding="utf-8", errors="backslashreplace") as file:
                for index, (prompt, text, completion) in enumerate(
                    zip(prompts, texts, completions, strict=True)
                ):
                    record = {
                        "prompt": prompt.prompt,
                        "completion": text,
                        "reward": None if math.isnan(rewards[index]) else rewards[index],
                        "parts": {
                            name: rewards[index] for name, rewards in scores.by_function.items()
                        },
                        "tokens": len(completion.tokens),
                        "ended": completion.stopped,
                        **of_episodes[index],
                    }
                    file.write(json.dumps(record, ensure_ascii=False) + "\n")
        failures = {
            "reward_failures": torch.full(
                (len(completions),), len(scores.errors) / len(scores.by_function)
            )
        }
        if episodes is not None:
            counts = [
                {"environment_failures": bool(each.error), **each.counts()} for each in episodes
            ]
            failures |= {
                name: torch.tensor([float(each[name]) for each in counts]) for name in counts[0]
            }
        return torch.tensor(rewards, dtype=torch.float64), failures, [*map(_encodable, errors)]

    def close(self) -> None:
        """End the processes of the functions."""
        self._functions.close()


def _encodable(error: str) -> str:
    """An error without halves of surrogate pairs, which logs do not take."""
    return error.encode("utf-8", "backslashreplace").decode()


class RewardModelScorer:
    """A reward model as a reward function, unsharded on one device.

    Raises UserError where the model is not a reward model. It reads prompt and completion with its
    own tokenizer and chat template, to the end of the assistant's turn. `on_batch` is called before
    each batch. Threads may share it.
    """

    def __init__(
        self,
        spec: str,
        device: torch.device,
        dtype: torch.dtype,
        on_batch: Callable[[], None] = lambda: None,
    ) -> None:
        self._spec = spec
        self._device = device
        self._on_batch = on_batch
        self._lock = threading.Lock()
        self._loaded = load_model(Path(spec), device, dtype, reward_model=True)
        self.required_columns: dict[str, list[str]] = {spec: []}
        self.accepted_columns: dict[str, list[str] | None] = {spec: ["tools", "documents"]}

    @torch.no_grad()
    def score(self, request: dict[str, Any], timeout_seconds: float) -> dict[str, FunctionResult]:
        """The score of each completion of the request; None for one that is longer than the model
        reads.
        """
        columns = request["columns"]
        records = [
            dict(zip(columns, values, strict=True))
            for values in zip(*columns.values(), strict=True)
        ]
        encoded = encode_completions(
            self._loaded.tokenizer, request["prompts"], request["completions"], records
        )
        for tokens in encoded:
            check_token_ids(
                tokens,
                self._loaded.config.vocab_size,
                f"{self._spec}: a completion with its prompt",
            )
        limit = self._loaded.config.max_sequence_length
        indices = [
            index for index, tokens in enumerate(encoded) if limit is None or len(tokens) <= limit
        ]
        # Sequences of similar length share a batch.
        indices.sort(key=lambda index: len(encoded[index]))
        scores: list[float | None] = [None] * len(encoded)
        for first in range(0, len(indices), SCORING_BATCH_SIZE):
            self._on_batch()
            members = indices[first : first + SCORING_BATCH_SIZE]
            batch = batch_of_token_lists([encoded[index] for index in members]).to(self._device)
            with self._lock:
                rewards = document_rewards(self._loaded.model, batch)[:, 0].tolist()
            for index, reward in zip(members, rewards, strict=True):
                scores[index] = reward
        return {self._spec: FunctionResult(scores)}

    def close(self) -> None:
        """Does nothing, since there is no process to end."""


def completions_table_name(set_index: int, options: RolloutOptions) -> str | None:
    """The name of the table of a set, without its rank; None where the set is not written."""
    return f"set-{set_index:06d}" if set_index % options.log_completions_every == 0 else None


def locate_completions(batch_index: int, options: RolloutOptions, num_ranks: int) -> dict[str, Any]:
    """Where the completions of a batch are, for the file of a bad step.

    {"completions": pattern of their files, relative to the run, or None where they were not
    written; "ranks": how many data-parallel ranks; "part": which part of each file the batch is,
    from 0, and of how many}.
    """
    set_index, iteration = divmod(batch_index, options.num_iterations)
    table = completions_table_name(set_index, options)
    files = str(completions_path(Path(), table, "*")) if table else None
    return {"completions": files, "ranks": num_ranks, "part": [iteration, options.num_iterations]}
