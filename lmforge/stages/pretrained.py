"""Where a model comes from that is trained on: its shape, tokenizer and first weights, of a checkpoint of ours or a
Hugging Face folder, with the adapters of a PEFT folder merged where that is what was named."""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

import xxhash

from lmforge import checkpoint
from lmforge.checkpoint import Manifest
from lmforge.config.align import AlignConfig
from lmforge.config.sections import ModelOptions
from lmforge.config.stage import StageConfig
from lmforge.data.tokenizer import Tokenizer
from lmforge.errors import UserError
from lmforge.hub import is_hub_name, resolve_model_folder
from lmforge.interop.peft_folder import base_model_of, is_peft_folder, load_peft_folder
from lmforge.interop.resolve import model_config_from_options
from lmforge.interop.weights import LM_HEAD_WEIGHT, load_folder, merge_adapters
from lmforge.model.config import ModelConfig
from lmforge.model.layers import LanguageModel
from lmforge.rewards.functions import is_model_folder
from lmforge.runs import MANIFEST, Run

ConfigT = TypeVar("ConfigT", bound=StageConfig)


@dataclass(frozen=True)
class Pretrained:
    """A folder of weights; with `manifest` it is a checkpoint of ours. `adapters`: a PEFT folder for these weights."""

    folder: Path
    manifest: Manifest | None
    adapters: Path | None = None

    def resolve_model_config(self, options: ModelOptions, vocab_size: int | None = None) -> ModelConfig:
        """Raises UserError where the options ask for another shape than the checkpoint's."""
        if self.manifest is None:
            return model_config_from_options(options.model_copy(update={"source": self.folder}), vocab_size)
        if changed := options.overrides():
            raise UserError(f"model.{next(iter(changed))}: a checkpoint's shape stays as it is; leave it out")
        return self.manifest.model_config

    @property
    def digest(self) -> str:
        """A hash that is another one where the weights are others: of a checkpoint by its checksums, of a folder by the sizes
        and times of its files."""
        if self.manifest is not None:
            told: Any = {name: dict(written) for name, written in self.manifest.files.items()}
        else:
            folders = [self.folder, *([self.adapters] if self.adapters else [])]
            files = [(path.name, path.stat()) for folder in folders for path in sorted(folder.glob("*.safetensors"))]
            told = [(name, stat.st_size, stat.st_mtime_ns) for name, stat in files]
        return xxhash.xxh3_64_hexdigest(json.dumps(told, sort_keys=True).encode())

    def has_tokenizer(self) -> bool:
        return (self.folder / "tokenizer.json").exists()

    def tokenizer(self) -> Tokenizer:
        return Tokenizer.open(self.folder)

    def load_weights(self, model: LanguageModel) -> frozenset[str]:
        """Give a model, sharded or not, the weights; each rank reads its own parts. Raises UserError, and CorruptCheckpoint.

        Returns what is new to them and was left as it is: the head of a model that is to give rewards, where these do not.
        """
        new = frozenset(
            {LM_HEAD_WEIGHT}
            if model.config.reward and not self.resolve_model_config(ModelOptions(source=self.folder)).reward
            else ()
        )
        if self.manifest is None:
            load_folder(self.folder, model, new)
        else:
            checkpoint.load_weights(self.folder, self.manifest, model, new)
        if self.adapters is not None:
            merge_adapters(model, *load_peft_folder(self.adapters), str(self.adapters))
        return new


def find_pretrained(source: Path, required_file: Literal["weights", "config.json"] = "config.json") -> Pretrained:
    """What a recipe's model.source names. Raises UserError where that is nothing to begin from."""
    if is_peft_folder(source):
        return replace(find_pretrained(base_model_of(source), required_file), adapters=source)
    if is_hub_name(source) or (source / "config.json").exists():
        return Pretrained(resolve_model_folder(source, required_file), None)
    if not ((source / MANIFEST).exists() or Run.open(source).checkpoint_steps()):
        return Pretrained(source, None)  # refused, in its own words, by whoever reads its config.json
    (folder, manifest), _ = checkpoint.open_checkpoint(source, lambda folder, manifest: (folder, manifest))
    return Pretrained(folder, manifest)


def pin_checkpoints(config: ConfigT) -> ConfigT:
    """The recipe with checkpoints in place of the runs that model.source and rollout.reward_functions name, so that a run that goes on
    has the same ones, whatever the others have saved since."""
    if isinstance(config, AlignConfig):
        judges = tuple(
            str(_pin_checkpoint(Path(spec))) if is_model_folder(spec) else spec for spec in config.rollout.reward_functions
        )
        config = config.model_copy(update={"rollout": config.rollout.model_copy(update={"rewards": judges})})
    if config.model.source is None:
        return config
    return config.model_copy(update={"model": config.model.model_copy(update={"source": _pin_checkpoint(config.model.source)})})


def _pin_checkpoint(source: Path) -> Path:
    origin = find_pretrained(source)
    return source if origin.manifest is None or origin.adapters is not None else origin.folder


def with_original_sources(config: ConfigT, manifest: Manifest | None) -> tuple[ConfigT, list[str]]:
    """The recipe of a run that goes on, with the model that it began from, which its reference is, and the judges that it had;
    and a line where the model is not the one that was asked for. What is gone is not gone back to."""
    if isinstance(config, AlignConfig) and manifest is not None:
        had = [Path(spec) for spec in manifest.recipe.get("rollout", {}).get("rewards", [])]
        of_run = {path.parent: str(path) for path in had if (path / MANIFEST).exists()}
        judges = tuple(
            of_run.get(Path(spec).parent, spec) if is_model_folder(spec) else spec for spec in config.rollout.reward_functions
        )
        config = config.model_copy(update={"rollout": config.rollout.model_copy(update={"rewards": judges})})
    begun, asked = manifest.recipe["model"].get("source") if manifest else None, config.model.source
    if begun is None or asked is None or Path(begun) == asked:
        return config, []
    if not (is_hub_name(begun) or Path(begun).exists()):
        return config, [f"{begun}, from which this run began, is gone; {asked} stands for it"]
    going_on = config.model_copy(update={"model": config.model.model_copy(update={"source": Path(begun)})})
    return going_on, [f"model.source: this run began from {begun} and goes on from its own checkpoint; {asked} is not read"]
