"""The options of `lmforge pretrain`."""

from pathlib import Path

from lmforge.config.options import option, section
from lmforge.config.sections import SequenceOptions
from lmforge.config.stage import StageConfig


class PretrainDataOptions(SequenceOptions):
    """What the model is trained on."""

    folder: Path = option(Path("data/stdlib"), "folder of token shards, as `lmforge prepare` writes them")


class PretrainConfig(StageConfig):
    """A pretraining run. `lmforge pretrain RECIPE.toml --section.option value` overrides any option of the recipe."""

    data: PretrainDataOptions = section(PretrainDataOptions, "training data")
