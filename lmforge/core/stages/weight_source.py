"""The model that a run begins from, found by its name: another run, a checkpoint, a folder, or a
name on the hub.
"""

from functools import partial
from pathlib import Path
from typing import TypeVar

from lmforge.core import registry
from lmforge.core.distributed.distributed import DistributedContext
from lmforge.core.model.config import ModelConfig
from lmforge.core.model.resolve import preset_model_config
from lmforge.core.options.stage import StageConfig
from lmforge.core.records.kinds import Kind, kind_of
from lmforge.core.records.manifests import Manifest
from lmforge.core.seams import WeightFile, WeightSource, WeightSources

ConfigT = TypeVar("ConfigT", bound=StageConfig)


def _sources() -> WeightSources:
    sources: WeightSources = registry.get("weight_source", "pretrained").load()
    return sources


def find_weights(source: Path, required_file: WeightFile = "config.json") -> WeightSource:
    """The model that `source` names. Raises UserError where there is none."""
    return _sources().find(source, required_file)


def download_weights(config: StageConfig, dist_ctx: DistributedContext) -> None:
    """Make the model that a recipe begins from available on every host.

    Every rank calls it. Raises UserError where it can be neither found nor downloaded.
    """
    if config.model.source is not None:
        required: WeightFile = "weights" if config.model.load_weights else "config.json"
        dist_ctx.run_once_per_folder(
            partial(find_weights, config.model.source, required), _sources().cache_folder()
        )


def resolve_model_config(
    config: StageConfig, weights: WeightSource | None, vocab_size: int | None
) -> ModelConfig:
    """The model config of a recipe: that of the model it begins from, or of its options.

    Raises UserError.
    """
    if weights is None:
        return preset_model_config(config.model, vocab_size)
    return weights.resolve_model_config(config.model, vocab_size)


def pin_checkpoints(config: ConfigT) -> ConfigT:
    """The recipe with runs in model.source, rollout.reward_functions and distill.teacher replaced
    by their checkpoints. So a resumed run uses the same ones, even if those runs have saved newer
    checkpoints.
    """
    return config.with_models(config.model.source and _pin(config.model.source), _pin)


def _pin(source: Path) -> Path:
    weights = find_weights(source)
    return source if weights.manifest is None or weights.adapters is not None else weights.folder


def with_original_sources(config: ConfigT, manifest: Manifest | None) -> tuple[ConfigT, list[str]]:
    """The recipe of a resumed run, with the model and the reward models or teacher that it began
    with, and lines to log. The reference is computed from that model. If it no longer exists, the
    requested model is used instead.
    """
    if manifest is None:
        return config, []
    original = manifest.recipe.get("model", {}).get("source")
    source = config.model.source
    notes = []
    if original is not None and source is not None and Path(original) != source:
        if kind_of(original) != Kind.MISSING:
            notes = [
                (
                    f"model.source: this run began from {original} and continues from its own"
                    f" checkpoint; {source} is not read"
                )
            ]
            source = Path(original)
        else:
            notes = [
                f"{original}, from which this run began, no longer exists; {source} takes its place"
            ]
    before = [Path(spec) for spec in manifest.recipe.get("rollout", {}).get("reward_functions", [])]
    before += (
        [Path(teacher)] if (teacher := manifest.recipe.get("distill", {}).get("teacher")) else []
    )
    of_run = {path.parent: path for path in before if kind_of(path) == Kind.CHECKPOINT}
    return config.with_models(source, lambda model: of_run.get(model.parent, model)), notes
