"""`lmforge doctor --coordinates`: whether activations and their changes keep their size as a model gets wider.

The coordinate check of Yang et al. (arXiv 2203.03466, appendix D): models of several widths take a few steps on one batch, and
what each kind of module computes is compared with what it computed before the first.
"""

import json
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
from rich.table import Table
from torch import Tensor, nn

from lmforge.atomic_files import without_non_finite
from lmforge.config.sections import BASE_OPTIONS, ModelOptions, OptimizerOptions
from lmforge.config.stage import StageConfig
from lmforge.data.batch import Batch
from lmforge.model import build_model
from lmforge.model.config import ModelConfig
from lmforge.model.init_weights import init_weights
from lmforge.model.layers import LanguageModel
from lmforge.model.parametrization import relative_to_base
from lmforge.model.proportions import in_proportion
from lmforge.objectives.language import NextTokenObjective
from lmforge.terminal.cells import page_console
from lmforge.train.optimizers.optimizer import build_optimizer

WIDTHS = (64, 128, 256, 512)
SEEDS = 2
SEQUENCES, LENGTH = 4, 32
HEAD_DIM, MOST_LAYERS, MOST_IDS = 16, 4, 512
# The largest over the smallest size that counts as flat.
FLAT = 1.6
# Modules of a block, by the ends of their names, whose outputs are compared.
OUTPUTS = {"self_attn": "attention", "attn": "attention", "mlp": "feed-forward"}


@dataclass(frozen=True)
class Coordinates:
    """Of one kind of module: the mean absolute value of its output after the steps, and of how it changed, for each width."""

    module: str
    sizes: tuple[float, ...]
    changes: tuple[float, ...]

    @property
    def spread(self) -> float:
        """The largest change over the smallest, or size, where that is more; infinite where one is 0 or not finite. Those of
        logits may shrink before they are learned: only their changes count."""
        compared = [self.changes] if self.module == "logits" else [self.changes, self.sizes]
        if not all(math.isfinite(each) and each > 0 for values in compared for each in values):
            return math.inf
        return max(max(values) / min(values) for values in compared)


def small(config: ModelConfig, width: int, layers: int | None = None) -> ModelConfig:
    """A small model of this kind and hidden size: all else grows in proportion, but heads have the same width."""
    layers = layers or min(config.num_hidden_layers, MOST_LAYERS)
    config = replace(config, vocab_size=min(config.vocab_size, MOST_IDS))
    return in_proportion(config, width, width // HEAD_DIM, HEAD_DIM, layers)


def compare(
    configs: Sequence[ModelConfig], options: ModelOptions, optimizer: OptimizerOptions, steps: int, seeds: int = SEEDS
) -> list[Coordinates]:
    """What each kind of module computes in each model; the mean over seeds."""
    found: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for config in configs:
        runs = [_measure(config, options, optimizer, steps, seed) for seed in range(seeds)]
        for name in runs[0]:
            sizes, changes = zip(*(run[name] for run in runs), strict=True)
            found[name].append((sum(sizes) / seeds, sum(changes) / seeds))
    return [Coordinates(name, *zip(*pairs, strict=True)) for name, pairs in found.items()]


def check_coordinates(config: StageConfig, model: ModelConfig, steps: int, output: str) -> int:
    """Compare small models like this one under mup, with the narrowest as the base, and in the standard parametrization, and
    print a table. Returns 1 where the former is not flat."""
    configs = [small(model, width) for width in WIDTHS]
    standard = config.model.model_copy(update=dict.fromkeys(BASE_OPTIONS) | {"parametrization": "standard"})
    scaled = standard.model_copy(update={"parametrization": "mup", "base_width": WIDTHS[0]})
    results = compare(configs, scaled, config.optimizer, steps)
    plain = compare(configs, standard, config.optimizer, steps)
    if output == "json":
        pairs = zip(results, plain, strict=True)
        rows = [asdict(each) | {"spread": each.spread, "standard": other.spread} for each, other in pairs]
        print(json.dumps(without_non_finite({"widths": WIDTHS, "flat": FLAT, "modules": rows}), indent=1))
    else:
        _print_table(results, plain, steps)
    return int(any(each.spread > FLAT for each in results))


def _print_table(results: list[Coordinates], plain: list[Coordinates], steps: int) -> None:
    title = f"change of a module's output after {steps} steps, at widths {WIDTHS[0]} to {WIDTHS[-1]}"
    table = Table(title=title, title_justify="left")
    table.add_column("module")
    for name in (*map(str, WIDTHS), "mup", "spread", "standard", "spread"):
        table.add_column(name, justify="right")
    for each, other in zip(results, plain, strict=True):
        row = [each.module, *(f"{change:.3g}" for change in each.changes), _bars(each.changes), f"{each.spread:.2f}"]
        table.add_row(*row, _bars(other.changes), f"{other.spread:.2f}", style="bold red" if each.spread > FLAT else None)
    console = page_console(120)
    console.print(table)
    how = "spread: largest ÷ smallest size or change over the widths, whichever is more (of logits, change)"
    console.print(how, soft_wrap=True)
    uneven = [each.module for each in results if each.spread > FLAT]
    verdict = f"NOT FLAT, spread above {FLAT}: {', '.join(uneven)}" if uneven else f"flat: every spread is at most {FLAT}"
    console.print(f"mup: {verdict}", style="bold red" if uneven else None, soft_wrap=True)


def _bars(values: Sequence[float]) -> str:
    """A character for each value, an eighth of its height for each factor of the root of 2 below the largest."""
    known = [value for value in values if math.isfinite(value) and value > 0]
    heights = [max(0, 7 - round(2 * math.log2(max(known) / value))) if value in known else None for value in values]
    return "".join("?" if height is None else "▁▂▃▄▅▆▇█"[height] for height in heights)


def _measure(
    config: ModelConfig, options: ModelOptions, optimizer_options: OptimizerOptions, steps: int, seed: int
) -> dict[str, tuple[float, float]]:
    """(size, change) of each kind of module after the steps."""
    model = build_model(config, torch.device("cpu"))
    model.parametrization = relative_to_base(options, config)
    init_weights(model, seed, options.embedding_initializer_range)
    optimizer, objective = build_optimizer(model, optimizer_options), NextTokenObjective()
    batch = _batch(config.vocab_size, seed)
    before = _outputs(model, batch)
    for _ in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = optimizer_options.lr * group.get("lr_ratio", 1.0)
        total, _metrics = objective.loss(model, batch)
        (total / objective.num_items(batch)).backward()
        optimizer.step()
        optimizer.zero_grad()
    after = _outputs(model, batch)
    kinds: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for (kind, old), (_, new) in zip(before, after, strict=True):
        kinds[kind].append((new.abs().mean().item(), (new - old).abs().mean().item()))
    return {kind: tuple(sum(each) / len(pairs) for each in zip(*pairs, strict=True)) for kind, pairs in kinds.items()}


def _batch(vocab_size: int, seed: int) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(vocab_size, (SEQUENCES, LENGTH), generator=generator)
    positions = torch.arange(LENGTH).expand(SEQUENCES, -1)
    return Batch(tokens, (tokens * 7 + 3) % vocab_size, positions, torch.zeros(SEQUENCES, LENGTH, dtype=torch.int32))


@torch.no_grad()
def _outputs(model: LanguageModel, batch: Batch) -> list[tuple[str, Tensor]]:
    """(kind, output) of the modules, in their order."""
    outputs: list[tuple[str, Tensor]] = []

    def keep(kind: str, module: nn.Module, args: Any, output: Any) -> None:
        outputs.append((kind, output[0] if isinstance(output, tuple) else output))

    kinds: list[tuple[nn.Module, str]] = [(model.blocks[-1], "residual stream")]
    for block in model.blocks:
        kinds += [(module, OUTPUTS[name]) for name, module in block.named_children() if name in OUTPUTS]
    handles = [module.register_forward_hook(partial(keep, kind)) for module, kind in kinds]
    # Some families scale embeddings before the first block.
    handles.append(model.blocks[0].register_forward_pre_hook(lambda block, args: outputs.append(("embedding", args[0]))))
    hidden = model(batch.tokens, batch.positions, batch.document_ids)
    outputs.append(("logits", model.lm_head(hidden)))
    for handle in handles:
        handle.remove()
    return outputs
