"""Reward models as judges: what a trained one gives answers, wherever reward functions are asked."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from lmforge.data.batch import Batch
from lmforge.data.chat.preferences import encode_completions
from lmforge.generate.model_loading import load_model
from lmforge.objectives.preference import document_rewards
from lmforge.rewards.functions import FunctionResult

SCORING_BATCH_SIZE = 16


class RewardModelScorer:
    """A reward model under the name by which it is asked for, whole on one device. Raises UserError where it is none.

    It reads prompt and answer with its own tokenizer and chat template, to the end of the answer's turn; `alive` is called as
    it does.
    """

    def __init__(
        self, spec: str, device: torch.device, dtype: torch.dtype, on_batch: Callable[[], None] = lambda: None
    ) -> None:
        self._spec, self._on_batch = spec, on_batch
        self._loaded = load_model(Path(spec), device, dtype, reward_model=True)
        self._device = device
        self.required_columns: dict[str, list[str]] = {spec: []}
        self.accepted_columns: dict[str, list[str] | None] = {spec: ["tools"]}

    def score(self, request: dict[str, Any], timeout_seconds: float) -> dict[str, FunctionResult]:
        """What it gives each of the job's completions; None for one that is longer than it reads."""
        tools = request["columns"].get("tools")
        encoded = encode_completions(self._loaded.tokenizer, request["prompts"], request["completions"], tools)
        limit = self._loaded.config.max_sequence_length
        places = [place for place, tokens in enumerate(encoded) if limit is None or len(tokens) <= limit]
        places.sort(key=lambda place: len(encoded[place]))  # rows of like length share a batch
        given: list[float | None] = [None] * len(encoded)
        for first in range(0, len(places), SCORING_BATCH_SIZE):
            self._on_batch()
            some = places[first : first + SCORING_BATCH_SIZE]
            for place, reward in zip(some, self._score([encoded[place] for place in some]), strict=True):
                given[place] = reward
        return {self._spec: FunctionResult(given)}

    @torch.no_grad()
    def _score(self, sequences: list[list[int]]) -> list[float]:
        batch = Batch.from_token_lists(sequences).to(self._device)
        rewards: list[float] = document_rewards(self._loaded.model, batch)[:, 0].tolist()
        return rewards

    def close(self) -> None:
        """There is no process to be ended."""
