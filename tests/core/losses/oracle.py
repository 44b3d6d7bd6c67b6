"""Rows packed by hand, the tiny model, and log-probabilities computed directly: one completion at a
time, full logits, fp64.
"""

import copy
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from lmforge.core.data.batch import Batch, Extras, Metrics
from lmforge.core.data.labels import IGNORE_INDEX
from lmforge.core.losses.logprobs import token_logprobs
from lmforge.core.model.build import build_model
from lmforge.core.model.config import ModelConfig
from lmforge.core.model.init_weights import init_weights
from lmforge.core.model.layers import LanguageModel
from tests.core.losses import tiny
from tests.seeds import fresh_seed

VECTORS = Path(__file__).parent / "vectors"
# Of losses, and of gradients relative to the norm of the whole: what fp32 leaves after two layers
# and some sums.
TOLERANCE = 1e-5

Ids = list[int]


@dataclass(frozen=True)
class Document:
    prompt: Ids
    completion: Ids


def tiny_model(moved: float = 0.0, seed: int = 0, reward: bool = False) -> LanguageModel:
    """With `reward` the head has the first row of what it has otherwise."""
    model = build_model(ModelConfig(**tiny.SHAPE, reward=reward))
    with torch.no_grad():
        for name, value in tiny.weights(moved, seed).items():
            parameter = model.get_parameter(name)
            parameter.copy_(torch.from_numpy(value)[: len(parameter)])
    return model


def moved(model: LanguageModel, by: float, seed: int) -> LanguageModel:
    """Another model, near this one."""
    other = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter += by * torch.randn(
                parameter.shape, generator=generator, dtype=parameter.dtype
            )
    return other


def packed(rows: Sequence[Sequence[Document]], padding: int = 3) -> Batch:
    """One row of documents each, completions scored, and at least `padding` tokens of padding
    behind them.
    """
    length = padding + max(sum(len(one.prompt + one.completion) for one in row) for row in rows)
    tokens, positions = (torch.zeros(len(rows), length, dtype=torch.int64) for _ in range(2))
    labels = torch.full((len(rows), length), IGNORE_INDEX)
    documents = torch.full((len(rows), length), -1, dtype=torch.int32)
    for row, chosen in enumerate(rows):
        start = 0
        for number, one in enumerate(chosen):
            ids = one.prompt + one.completion
            place = slice(start, start + len(ids))
            tokens[row, place] = torch.tensor(ids)
            positions[row, place] = torch.arange(len(ids))
            documents[row, place] = number
            first = start + len(one.prompt) - 1
            labels[row, first : first + len(one.completion)] = torch.tensor(one.completion)
            start += len(ids)
    return Batch(tokens, labels, positions, documents)


def with_extras(batch: Batch, **extras: Tensor | Sequence[Sequence[float]]) -> Batch:
    """The batch with further tensors [rows, length], or with values given by row and document."""
    made = {}
    for name, values in extras.items():
        if not isinstance(values, Tensor):
            spread = torch.zeros(batch.batch_size, batch.sequence_length)
            for row, of_row in enumerate(values):
                for number, value in enumerate(of_row):
                    spread[row, batch.document_ids[row] == number] = value
            values = spread
        made[name] = values
    return replace(batch, extras=Extras(**{**batch.extra_tensors, **made}))


@torch.no_grad()
def logprobs_under(model: LanguageModel, batch: Batch, temperature: float = 1.0) -> Tensor:
    hidden = model(batch.tokens, batch.positions, batch.document_ids)
    return model.lm_head(
        hidden, partial(token_logprobs, labels=batch.labels, temperature=temperature)
    )


def plain(model: LanguageModel, one: Document, temperature: float = 1.0) -> list[Tensor]:
    """log p of each token of the completion, from whole logits of the document alone."""
    ids = torch.tensor([one.prompt + one.completion])
    hidden = model(ids, torch.arange(ids.shape[1])[None], torch.zeros_like(ids, dtype=torch.int32))
    every = (model.lm_head(hidden)[0] / temperature).log_softmax(-1)
    return [every[len(one.prompt) - 1 + place, token] for place, token in enumerate(one.completion)]


@dataclass(frozen=True)
class WholeLogits:
    """Every number that the head's losses have, from whole logits in fp64, each differentiable."""

    cross_entropy: Tensor
    z_loss: Tensor
    logprobs: Tensor
    entropies: Tensor


def whole_logits(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None = None,
    softcap: float | None = None,
    z_weight: float = 0.0,
    temperature: float = 1.0,
) -> WholeLogits:
    """hidden [tokens, width], weight [vocab, width], bias [vocab], labels [tokens]."""
    logits = torch.nn.functional.linear(
        hidden.double(), weight.double(), None if bias is None else bias.double()
    )
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    every = (logits / temperature).log_softmax(-1)
    scored = labels != IGNORE_INDEX
    logprobs = every.gather(1, labels.clamp(min=0)[:, None])[:, 0] * scored
    squares = (logits / temperature).logsumexp(-1).square() * scored
    return WholeLogits(
        -logprobs.sum(), z_weight * squares.sum(), logprobs, -(every.exp() * every).sum(-1) * scored
    )


def gradient(total: Tensor, model: LanguageModel) -> Tensor:
    """Of all parameters, as one vector in fp64."""
    result = torch.autograd.grad(total, list(model.parameters()))
    return torch.cat([part.double().flatten() for part in result])


def assert_same(
    ours: tuple[Tensor, Tensor], reference: tuple[Tensor, Tensor], tolerance: float = TOLERANCE
) -> None:
    """Losses and gradients, relative; of the gradient its norm."""
    assert abs(float(ours[0]) - float(reference[0])) <= tolerance * max(
        1.0, abs(float(reference[0]))
    )
    scale = reference[1].norm()
    assert scale > 1e-3
    assert (ours[1] - reference[1]).norm() <= tolerance * scale


def drawn(seed: int | None = None) -> tuple[torch.Generator, LanguageModel]:
    """Random numbers of a fresh seed, which is printed, and a model drawn from it."""
    seed = fresh_seed() if seed is None else seed
    config = ModelConfig(
        **{**tiny.SHAPE, "vocab_size": 40, "hidden_size": 32, "intermediate_size": 48},
        initializer_range=0.2,
    )
    return torch.Generator().manual_seed(seed), init_weights(build_model(config), seed)


def drawn_pairs(generator: torch.Generator, count: int) -> list[tuple[Document, Document]]:
    def ids(shortest: int, longest: int) -> Ids:
        size = int(torch.randint(shortest, longest + 1, (), generator=generator))
        return torch.randint(0, 40, (size,), generator=generator).tolist()

    prompts = [ids(1, 6) for _ in range(count)]
    return [(Document(prompt, ids(1, 9)), Document(prompt, ids(1, 9))) for prompt in prompts]


@cache
def trl() -> tuple[dict[str, Any], dict[str, Tensor]]:
    return json.loads((VECTORS / "trl.json").read_text())["cases"], load_file(
        VECTORS / "trl.safetensors"
    )


def assert_as_trl(
    case: str, loss: Callable[[LanguageModel], tuple[Tensor, Tensor, Metrics]], reward: bool = False
) -> Metrics:
    """`loss(model)` gives (sum, weight, metrics); its quotient and the gradients are those that
    TRL's trainer found.
    """
    cases, gradients = trl()
    model = tiny_model(reward=reward)
    total, weight, metrics = loss(model)
    (mean := total / weight).backward()
    assert abs(float(mean.detach()) - cases[case]["loss"]) <= TOLERANCE * max(
        1.0, abs(cases[case]["loss"])
    )
    ours, theirs = [], []
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        ours.append(torch.from_numpy(tiny.recorded(parameter.grad.numpy())))
        theirs.append(gradients[f"{case}/{name}"])
        # Each tensor by itself too: a small one would vanish in the whole.
        assert (ours[-1] - theirs[-1]).norm() <= 4 * TOLERANCE * theirs[-1].norm(), name
    assert (torch.cat(ours) - torch.cat(theirs)).norm() <= TOLERANCE * torch.cat(theirs).norm()
    return metrics
