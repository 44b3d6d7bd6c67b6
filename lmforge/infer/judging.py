"""Reward models as judges: what a trained one gives answers, wherever reward functions are asked."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from lmforge.data.batch import Batch
from lmforge.data.packing import Row
from lmforge.data.preferences import encode_answers
from lmforge.infer.opening import open_model
from lmforge.objectives.preference import rewards_of

ROWS_AT_ONCE = 16


class ModelJudge:
    """A reward model under the name by which it is asked for, whole on one device. Raises Mistake where it is none.

    It reads prompt and answer with its own tokenizer and chat template, to the end of the answer's turn; `alive` is called as
    it does.
    """

    def __init__(self, spec: str, device: torch.device, dtype: torch.dtype, alive: Callable[[], None] = lambda: None) -> None:
        self._spec, self._alive = spec, alive
        self._opened = open_model(Path(spec), device, dtype, judges=True)
        self._device = device
        self.needs: dict[str, list[str]] = {spec: []}
        self.takes: dict[str, list[str] | None] = {spec: ["tools"]}

    def call(self, job: dict[str, Any], seconds: float) -> dict[str, dict[str, Any]]:
        """What it gives each of the job's completions; None for one that is longer than it reads."""
        tools = job["columns"].get("tools")
        encoded = encode_answers(self._opened.tokenizer, job["prompts"], job["completions"], tools)
        limit = self._opened.config.longest_row_tokens
        places = [place for place, tokens in enumerate(encoded) if limit is None or len(tokens) <= limit]
        places.sort(key=lambda place: len(encoded[place]))  # rows of like length share a batch
        given: list[float | None] = [None] * len(encoded)
        for first in range(0, len(places), ROWS_AT_ONCE):
            self._alive()
            some = places[first : first + ROWS_AT_ONCE]
            for place, reward in zip(some, self._judge([encoded[place] for place in some]), strict=True):
                given[place] = reward
        return {self._spec: {"given": given, "problem": None, "mistake": None}}

    @torch.no_grad()
    def _judge(self, texts: list[list[int]]) -> list[float]:
        rows = []
        for tokens in texts:
            row = Row.padding(max(map(len, texts)))
            row.tokens[: len(tokens)] = tokens
            row.positions[: len(tokens)] = range(len(tokens))
            row.documents[: len(tokens)] = 0
            rows.append(row)
        rewards: list[float] = rewards_of(self._opened.model, Batch.of(rows).to(self._device))[:, 0].tolist()
        return rewards

    def end(self) -> None:
        """There is no process to be ended."""
