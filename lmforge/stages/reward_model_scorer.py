"""Reward models as reward functions: the scores that a trained one gives completions."""

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
    """A reward model, unsharded on one device. Raises UserError where the model is none.

    It reads prompt and completion with its own tokenizer and chat template, to the end of the assistant's turn. `on_batch`
    is called before each batch.
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
        """The score of each completion of the request; None for one that is longer than the model reads."""
        tools = request["columns"].get("tools")
        encoded = encode_completions(self._loaded.tokenizer, request["prompts"], request["completions"], tools)
        limit = self._loaded.config.max_sequence_length
        indices = [index for index, tokens in enumerate(encoded) if limit is None or len(tokens) <= limit]
        indices.sort(key=lambda index: len(encoded[index]))  # sequences of similar length share a batch
        given: list[float | None] = [None] * len(encoded)
        for first in range(0, len(indices), SCORING_BATCH_SIZE):
            self._on_batch()
            batch = indices[first : first + SCORING_BATCH_SIZE]
            for index, reward in zip(batch, self._score([encoded[index] for index in batch]), strict=True):
                given[index] = reward
        return {self._spec: FunctionResult(given)}

    @torch.no_grad()
    def _score(self, sequences: list[list[int]]) -> list[float]:
        batch = Batch.from_token_lists(sequences).to(self._device)
        rewards: list[float] = document_rewards(self._loaded.model, batch)[:, 0].tolist()
        return rewards

    def close(self) -> None:
        """Nothing: there is no process to end."""
