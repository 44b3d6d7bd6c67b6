"""A teacher that is a server: `lmforge serve` or vLLM, which says the likeliest tokens of each
place of a prompt.

What is stored of them is in stored.py. The calls are those of vLLM's interface for ids
(post/rl/engines).
"""

import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from pydantic import BaseModel
from torch import Tensor

from lmforge.core.data.batch import Batch
from lmforge.core.data.labels import IGNORE_INDEX
from lmforge.core.data.tokenizer import Tokenizer
from lmforge.core.errors import RunFailed, UserError
from lmforge.core.files.untrusted import quoted
from lmforge.post.rl.engines.rollout_server import (
    API_KEY_VARIABLE,
    Logprob,
    ServerProblem,
    TokenId,
    TokenServer,
)

TIMEOUT_SECONDS = 600.0
CONCURRENT_REQUESTS = 16
# What all other tokens weigh together at least: likeliest ones may round to more than all there is.
LEAST_REST = 1e-9
# How much more than 1 probabilities may add up to.
MASS_ROUNDING = 0.01


class _Ranked(BaseModel):
    logprob: Logprob
    rank: int


class _Scored(BaseModel):
    prompt_logprobs: list[dict[TokenId, _Ranked] | None]


class _Tokenized(BaseModel):
    tokens: list[TokenId]


class _Model(BaseModel):
    id: str


class _Models(BaseModel):
    data: list[_Model]


class TeacherServer(TokenServer):
    """A server by its address, of which `k` likeliest tokens of each place are asked."""

    def __init__(self, url: str, k: int) -> None:
        start = f"start it with lmforge serve, or vllm serve --enable-scale-out --max-logprobs {k}"
        super().__init__(url, {"": start}, TIMEOUT_SECONDS, os.environ.get(API_KEY_VARIABLE))
        self._k = k

    def check(self, tokenizer: Tokenizer, texts: tuple[str, ...], sequence_length: int) -> str:
        """The name of its model.

        Raises UserError where it does not answer, has another tokenizer, or cannot score a sequence
        of this length and all ids.
        """
        try:
            names = [each.id for each in self._call("/v1/models", _Models).data]
            for text in texts:
                request = {"prompt": text, "add_special_tokens": False}
                theirs = self._call("/tokenize", _Tokenized, request).tokens
                ours = tokenizer.encode(text)
                if theirs != ours:
                    at = next(
                        (
                            at
                            for at, (one, other) in enumerate(zip(theirs, ours, strict=False))
                            if one != other
                        ),
                        0,
                    )
                    difference = (
                        f"{quoted(text)} is {theirs[at : at + 8]} there, and {ours[at : at + 8]} to"
                        " the student"
                    )
                    raise UserError(
                        f"distill.teacher: another tokenizer at {self.url}: {difference}; serve a"
                        " teacher with the student's tokenizer"
                    )
            self.top_logprobs(
                [tokenizer.vocab_size - 1] * (sequence_length + 1), tokenizer.vocab_size
            )
        except ServerProblem as problem:
            raise UserError(f"distill.teacher: {problem}") from None
        return names[0] if names else ""

    def top_logprobs(self, token_ids: list[int], vocab_size: int) -> tuple[np.ndarray, np.ndarray]:
        """What the teacher says after each token but the last: ids int64 [n - 1, k], the likeliest
        first, and the logarithms of their probabilities and of that of all other ids, fp32 [n - 1,
        k + 1]. Raises ServerProblem.
        """
        sampling = {"max_tokens": 1, "temperature": 0.0, "prompt_logprobs": self._k}
        body = {"token_ids": token_ids, "sampling_params": sampling}
        places = self._call(
            "/inference/v1/generate", _Scored, body, self._timeout_seconds
        ).prompt_logprobs[1:]
        # vLLM names the token itself too, whatever its rank.
        ranked = [
            sorted((each or {}).items(), key=lambda item: item[1].rank)[: self._k]
            for each in places
        ]
        if len(ranked) != len(token_ids) - 1 or any(len(place) < self._k for place in ranked):
            raise ServerProblem(
                f"{self.url}: says less than {self._k} tokens of each place of a prompt"
            )
        ids = np.array([[id for id, _ in place] for place in ranked], np.int64).reshape(-1, self._k)
        logprobs = np.array([[each.logprob for _, each in place] for place in ranked]).reshape(
            -1, self._k
        )
        if ids.max(initial=0) >= vocab_size:
            raise ServerProblem(
                f"{self.url}: {ids.max()} is no id of the tokenizer, which has {vocab_size:,}"
            )
        mass = np.exp(logprobs).sum(1, keepdims=True)
        if mass.max(initial=0) > 1 + MASS_ROUNDING:
            raise ServerProblem(
                f"{self.url}: the probabilities of tokens of one place add up to {mass.max():.4g}"
            )
        rest = np.log(np.maximum(1 - mass, LEAST_REST))
        return ids, np.concatenate([logprobs, rest], 1).astype(np.float32)

    def score_top(self, batch: Batch, vocab_size: int) -> Tensor:
        """What TeacherModel.score_top returns, fp32 [sequences, length, 2 k + 1].

        Raises RunFailed.
        """
        scored = torch.full((*batch.tokens.shape, 2 * self._k + 1), -1.0)

        def score(place: tuple[int, int]) -> None:
            row, document = place
            at = (batch.document_ids[row] == document).nonzero().flatten().cpu()
            tokens = batch.tokens[row].cpu()[at]
            labels = batch.labels[row].cpu()[at]
            known = labels != IGNORE_INDEX
            if not known.any():
                return
            last = [int(labels[-1])] * bool(known[-1])  # what follows the last token
            ids, values = self.top_logprobs([*tokens.tolist(), *last], vocab_size)
            packed = torch.from_numpy(np.concatenate([ids, values], 1).astype(np.float32))
            scored[row, at[known]] = packed[known[: len(packed)]]

        documents = [
            (row, document)
            for row, ids in enumerate(batch.document_ids.tolist())
            for document in range(max(ids) + 1)
        ]
        try:
            with ThreadPoolExecutor(CONCURRENT_REQUESTS) as pool:
                list(pool.map(score, documents))
        except ServerProblem as problem:
            raise RunFailed(
                f"distill.teacher: {problem}; what is stored is kept, and the same command"
                " continues"
            ) from None
        return scored
