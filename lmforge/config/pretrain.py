"""The options of `lmforge pretrain`."""

from pathlib import Path

from lmforge.config.options import option, section
from lmforge.config.sections import SequenceOptions
from lmforge.config.stage import StageConfig


class PretrainDataOptions(SequenceOptions):
    """What the model is trained on."""

    folder: Path = option(Path("data/stdlib"), "folder of token shards, as `lmforge prepare` writes them")


class PretrainConfig(StageConfig):
    """lmforge pretrain [RECIPE.toml]: train a model on token shards, or continue a run."""

    data: PretrainDataOptions = section(PretrainDataOptions, "training data")
