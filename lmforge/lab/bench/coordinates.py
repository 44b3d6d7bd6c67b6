"""Sizes of activations and of their changes as a model gets wider or deeper.

The coordinate check of Yang et al. (arXiv 2203.03466, appendix D): models of several sizes take a
few steps on one batch, and what each kind of module computes is compared with what it computed
before the first. The verdict is in coordinates_table.py.
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lmforge.core.data.batch import Batch
from lmforge.core.losses.language import NextTokenObjective
from lmforge.core.model.build import build_model
from lmforge.core.model.config import ModelConfig
from lmforge.core.model.init_weights import init_weights
from lmforge.core.model.layers import LanguageModel
from lmforge.core.model.parametrization import relative_to_base
from lmforge.core.model.setup import ModelSetup
from lmforge.core.optim.optimizer import build_optimizer
from lmforge.core.options.sections import ModelOptions, OptimizerOptions
from lmforge.core.parallel.parallel_model import set_learning_rate
from lmforge.lab.proportions import in_proportion

SEEDS = 2
SEQUENCES = 4
LENGTH = 32
HEAD_DIM = 16
MOST_LAYERS = 4
MOST_IDS = 512
# Modules of a block, by the ends of their names, whose outputs are compared.
OUTPUTS = {
    "self_attn": "attention",
    "attn": "attention",
    "linear_attn": "linear attention",
    "conv": "convolution",
    "mamba": "state space",
    "mixer": "mixer",
    "mlp": "feed-forward",
    "feed_forward": "feed-forward",
    "block_sparse_moe": "feed-forward",
    "shared_mlp": "feed-forward",
}


@dataclass(frozen=True)
class Coordinates:
    """The output of one kind of module after the steps, for each model.

    sizes, changes: the mean absolute value of the output, and of its change. changes_alone: sizes
    do not count.
    """

    module: str
    sizes: tuple[float, ...]
    changes: tuple[float, ...]
    changes_alone: bool = False

    @property
    def spread(self) -> float:
        """The largest change over the smallest, or size, where that is more.

        It is infinite where one is 0 or not finite.
        """
        compared = [self.changes] if self.changes_alone else [self.changes, self.sizes]
        if not all(math.isfinite(each) and each > 0 for values in compared for each in values):
            return math.inf
        return max(max(values) / min(values) for values in compared)


def small(config: ModelConfig, width: int, layers: int | None = None) -> ModelConfig:
    """A small model of this kind and hidden size.

    All else grows in proportion, but heads have the same width.
    """
    layers = layers or min(config.num_hidden_layers, MOST_LAYERS)
    config = replace(config, vocab_size=min(config.vocab_size, MOST_IDS))
    return in_proportion(config, width, width // HEAD_DIM, HEAD_DIM, layers)


def compare(
    configs: Sequence[ModelConfig],
    options: ModelOptions,
    optimizer: OptimizerOptions,
    steps: int,
    seeds: int = SEEDS,
) -> list[Coordinates]:
    """The output of each kind of module in each model, as the mean over seeds."""
    found: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for config in configs:
        runs = [_measure(config, options, optimizer, steps, seed) for seed in range(seeds)]
        for name in runs[0]:
            sizes, changes = zip(*(run[name] for run in runs), strict=True)
            found[name].append((sum(sizes) / seeds, sum(changes) / seeds))
    # Logits may shrink before they are learned.
    return [
        Coordinates(
            name,
            tuple(size for size, _ in pairs),
            tuple(change for _, change in pairs),
            name == "logits",
        )
        for name, pairs in found.items()
    ]


def _measure(
    config: ModelConfig,
    options: ModelOptions,
    optimizer_options: OptimizerOptions,
    steps: int,
    seed: int,
) -> dict[str, tuple[float, float]]:
    """(size, change) of each kind of module after the steps."""
    model = build_model(config, torch.device("cpu"))
    model.setup = ModelSetup(relative_to_base(options, config))
    init_weights(model, seed, options.embedding_initializer_range)
    optimizer = build_optimizer(model, optimizer_options)
    objective = NextTokenObjective()
    batch = drawn_batch(config.vocab_size, seed)
    before = _outputs(model, batch)
    for _ in range(steps):
        set_learning_rate(optimizer, optimizer_options.lr)
        total, _metrics = objective.loss(model, batch)
        (total / objective.num_items(batch)).backward()
        optimizer.step()
        optimizer.zero_grad()
    after = _outputs(model, batch)
    kinds: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for (kind, old), (_, new) in zip(before, after, strict=True):
        kinds[kind].append((new.abs().mean().item(), (new - old).abs().mean().item()))
    return {
        kind: tuple(sum(each) / len(pairs) for each in zip(*pairs, strict=True))
        for kind, pairs in kinds.items()
    }


def drawn_batch(vocab_size: int, seed: int) -> Batch:
    """A batch of random tokens, whose labels follow from them."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(vocab_size, (SEQUENCES, LENGTH), generator=generator)
    return Batch(
        tokens,
        (tokens * 7 + 3) % vocab_size,
        torch.arange(LENGTH).expand(SEQUENCES, -1),
        torch.zeros(SEQUENCES, LENGTH, dtype=torch.int32),
    )


@torch.no_grad()
def _outputs(model: LanguageModel, batch: Batch) -> list[tuple[str, Tensor]]:
    """(kind, output) of the modules, in their order."""
    outputs: list[tuple[str, Tensor]] = []

    def keep(kind: str, module: nn.Module, args: Any, output: Any) -> None:
        outputs.append((kind, output[0] if isinstance(output, tuple) else output))

    kinds: list[tuple[nn.Module, str]] = [(model.blocks[-1], "residual stream")]
    for block in model.blocks:
        kinds += [
            (module, OUTPUTS[name]) for name, module in block.named_children() if name in OUTPUTS
        ]
    handles = [module.register_forward_hook(partial(keep, kind)) for module, kind in kinds]
    # Some families scale embeddings before the first block.
    handles.append(
        model.blocks[0].register_forward_pre_hook(
            lambda block, args: outputs.append(("embedding", args[0]))
        )
    )
    hidden = model(batch.tokens, batch.positions, batch.document_ids)
    outputs.append(("logits", model.lm_head(hidden)))
    for handle in handles:
        handle.remove()
    return outputs
