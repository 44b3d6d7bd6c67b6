"""The model that a run begins from: its config, tokenizer and weights, from a checkpoint or a Hugging Face folder.

Where a recipe names a PEFT folder, that is its base model with the adapters merged; beside a base in few bits they stay
adapters, and are trained further.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

import xxhash

from lmforge.core import checkpoint
from lmforge.core.checkpoint import Manifest
from lmforge.core.data.shards.staged_copy import find_staged
from lmforge.core.data.tokenizer import Tokenizer
from lmforge.core.distributed.distributed import DistributedContext
from lmforge.core.errors import UserError
from lmforge.core.model.config import ModelConfig
from lmforge.core.model.layers import LanguageModel
from lmforge.core.model.presets import PRESETS
from lmforge.core.options.lora import LoraOptions
from lmforge.core.options.sections import ModelOptions
from lmforge.core.options.stage import StageConfig
from lmforge.core.records.kinds import MODELS, Kind, kind_of, unexpected
from lmforge.hf.config_json import is_nf4_folder, read_config_json
from lmforge.hf.hub import cache_folder, resolve_model_folder
from lmforge.hf.peft_folder import base_model_of, base_model_overrides, load_peft_folder, tokenizer_folder
from lmforge.hf.resolve import check_balance, model_config_from_options, stored_model_config
from lmforge.hf.weights import LM_HEAD_WEIGHT, continue_adapters, describe_folder, load_folder, merge_adapters

ConfigT = TypeVar("ConfigT", bound=StageConfig)
# Of a file in `content_digest`: 1 MiB in all.
SAMPLES, SAMPLE_BYTES = 256, 4096


@dataclass(frozen=True)
class Pretrained:
    """A folder of weights; with `manifest` it is a checkpoint. `adapters` is a PEFT folder for these weights."""

    folder: Path
    manifest: Manifest | None
    adapters: Path | None = None

    def resolve_model_config(self, options: ModelOptions, vocab_size: int | None = None) -> ModelConfig:
        """The model config. Raises UserError where the options change that of a checkpoint."""
        if self.manifest is None:
            changed = {} if self.adapters is None else base_model_overrides(self.adapters)
            return model_config_from_options(options.model_copy(update={"source": self.folder}), vocab_size, changed)
        if changed := options.overrides():
            raise UserError(f"model.{next(iter(changed))}: a checkpoint's model config cannot be changed; leave it out")
        config = stored_model_config(self.manifest)
        check_balance(options, config)
        return config

    @property
    def digest(self) -> str:
        """A hash that changes with the weights: of a checkpoint's checksums, or of the sizes and times of a folder's files."""
        return self._digest(lambda path: path.stat().st_mtime_ns)

    @property
    def content_digest(self) -> str:
        """As `digest`, and the same for a copy: of a folder's files their headers and samples of the rest, not their times."""
        return self._digest(_sample_file)

    def _digest(self, of_file: Callable[[Path], object]) -> str:
        if self.manifest is not None:
            described: Any = {name: dict(written) for name, written in self.manifest.files.items()}
        else:
            folders = [self.folder, *([self.adapters] if self.adapters else [])]
            files = [path for folder in folders for path in sorted(folder.glob("*.safetensors"))]
            described = [(path.name, path.stat().st_size, of_file(path)) for path in files]
        return xxhash.xxh3_64_hexdigest(json.dumps(described, sort_keys=True).encode())

    @property
    def notes(self) -> list[str]:
        """What is done with the weights besides reading them, in words."""
        if self.manifest is None:
            return describe_folder(self.folder)
        lora = checkpoint.stored_lora_config(self.manifest)
        return [f"dequantized from {lora.stored.describe()}"] if lora is not None and lora.stored is not None else []

    @property
    def tokenizer_folder(self) -> Path:
        """Where the tokenizer is, if there is one."""
        return tokenizer_folder(self.folder, self.adapters)

    def tokenizer(self) -> Tokenizer:
        return Tokenizer.open(self.tokenizer_folder)

    def load_weights(self, model: LanguageModel) -> frozenset[str]:
        """Load the weights into a model, sharded or not; each rank reads its own parts. Returns the names that are missing in
        the files and were left unchanged, such as the head of a reward model. Raises UserError and CorruptCheckpoint.
        """
        lacks_head = model.config.reward and not self.resolve_model_config(ModelOptions(source=self.folder)).reward
        new = frozenset({LM_HEAD_WEIGHT} if lacks_head else ())
        if self.manifest is None:
            load_folder(self.folder, model, new)
        else:
            checkpoint.load_weights(self.folder, self.manifest, model, new)
        if self.adapters is not None:
            lora, tensors = load_peft_folder(self.adapters)
            tensors = continue_adapters(model, lora, tensors, str(self.adapters))
            merge_adapters(model, lora, tensors, str(self.adapters))
        return new


def _sample_file(path: Path) -> str:
    """A hash of what each of SAMPLES equal parts of a file begins with: models of one shape have the same headers and sizes."""
    digest, size = xxhash.xxh3_64(), path.stat().st_size
    with open(path, "rb") as file:
        for start in range(0, size, -(-size // SAMPLES) or 1):
            file.seek(start)
            digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()


def find_pretrained(source: Path, required_file: Literal["weights", "config.json"] = "config.json") -> Pretrained:
    """The model that `source` names. Raises UserError where there is none."""
    kind = kind_of(source)
    if kind == Kind.ADAPTERS:
        return replace(find_pretrained(base_model_of(source), required_file), adapters=source)
    if kind in (Kind.HUB_NAME, Kind.HF_FOLDER):
        return Pretrained(resolve_model_folder(source, required_file), None)
    if kind not in MODELS:
        hint = f"; the preset of this name is --model.preset {source}" if str(source) in PRESETS else ""
        raise unexpected(source, MODELS, hint)
    (folder, manifest), _ = checkpoint.open_checkpoint(source, lambda folder, manifest: (folder, manifest))
    return Pretrained(folder, manifest)


def resolve_model_config(config: StageConfig, pretrained: Pretrained | None, vocab_size: int | None) -> ModelConfig:
    """The model config of a recipe: that of the model it begins from, or of its options. Raises UserError."""
    if pretrained is None:
        return model_config_from_options(config.model, vocab_size)
    return pretrained.resolve_model_config(config.model, vocab_size)


def prefer_staged(config: StageConfig, pretrained: Pretrained) -> Pretrained:
    """The same model, read from the copy on this host's own disk where data.stage_to has one."""
    adapters = pretrained.adapters and find_staged(config.data.stage_to, pretrained.adapters)
    return replace(pretrained, folder=find_staged(config.data.stage_to, pretrained.folder), adapters=adapters)


def download_pretrained(config: StageConfig, dist_ctx: DistributedContext) -> None:
    """Make the model that a recipe begins from available on every host. Every rank calls it. Raises UserError where it can be
    neither found nor downloaded.
    """
    if config.model.source is not None:
        required: Literal["weights", "config.json"] = "weights" if config.model.load_weights else "config.json"
        dist_ctx.run_once_per_folder(partial(find_pretrained, config.model.source, required), cache_folder())


def check_has_weights(pretrained: Pretrained) -> None:
    """Raise UserError where there are no weights to begin from."""
    # Weights in an unsupported format count too, since they are refused later with a more specific message.
    there = any(any(pretrained.folder.glob(each)) for each in ("*.safetensors*", "pytorch_model*.bin*"))
    if pretrained.manifest is None and not there:
        raise UserError(f"{pretrained.folder}: no weights here; to begin with random ones use --model.load_weights false")


def check_base(pretrained: Pretrained, lora: LoraOptions | None) -> None:
    """Raise UserError where weights in 4 bits would be trained themselves."""
    content = {} if pretrained.manifest else read_config_json(pretrained.folder / "config.json")
    if is_nf4_folder(content) and (lora is None or lora.rank is None):
        way = "give lora.rank" if lora else "use lmforge sft with lora.rank"
        raise UserError(f"{pretrained.folder}: its weights are in 4 bits, so only adapters beside them can be trained; {way}")


def pin_checkpoints(config: ConfigT) -> ConfigT:
    """The recipe with runs in model.source, rollout.reward_functions and distill.teacher replaced by their checkpoints. So a
    resumed run uses the same ones, even if those runs have saved newer checkpoints.
    """
    return config.with_models(config.model.source and _pin(config.model.source), _pin)


def _pin(source: Path) -> Path:
    pretrained = find_pretrained(source)
    return source if pretrained.manifest is None or pretrained.adapters is not None else pretrained.folder


def with_original_sources(config: ConfigT, manifest: Manifest | None) -> tuple[ConfigT, list[str]]:
    """The recipe of a resumed run, with the model and the reward models or teacher that it began with, and lines to log. The
    reference is computed from that model. If it no longer exists, the requested model is used instead.
    """
    if manifest is None:
        return config, []
    original, source = manifest.recipe.get("model", {}).get("source"), config.model.source
    notes = []
    if original is not None and source is not None and Path(original) != source:
        if kind_of(original) != Kind.MISSING:
            notes = [
                f"model.source: this run began from {original} and continues from its own checkpoint; {source} is not read"
            ]
            source = Path(original)
        else:
            notes = [f"{original}, from which this run began, no longer exists; {source} takes its place"]
    before = [Path(spec) for spec in manifest.recipe.get("rollout", {}).get("reward_functions", [])]
    before += [Path(teacher)] if (teacher := manifest.recipe.get("distill", {}).get("teacher")) else []
    of_run = {path.parent: path for path in before if kind_of(path) == Kind.CHECKPOINT}
    return config.with_models(source, lambda model: of_run.get(model.parent, model)), notes
