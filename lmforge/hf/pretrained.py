"""The models that a run can begin from, as checkpoints or Hugging Face folders.

They have config, tokenizer and weights. Where a recipe names a PEFT folder, that is its base model
with the adapters merged; beside a base in few bits they stay adapters, and are trained further.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Self

import xxhash

from lmforge.core import checkpoint
from lmforge.core.data.shards.staged_copy import find_staged
from lmforge.core.data.tokenizer import Tokenizer
from lmforge.core.errors import UserError
from lmforge.core.model.config import ModelConfig
from lmforge.core.model.config_json import is_nf4_folder, read_config_json
from lmforge.core.model.layers import LanguageModel
from lmforge.core.model.presets import PRESETS
from lmforge.core.model.resolve import check_balance, stored_model_config
from lmforge.core.model.text_tower import TOWER_OF
from lmforge.core.options.lora import LoraOptions
from lmforge.core.options.sections import ModelOptions
from lmforge.core.records.kinds import MODELS, Kind, kind_of, unexpected
from lmforge.core.records.manifests import Manifest, MultimodalSource
from lmforge.hf import stored_model
from lmforge.hf.hub import cache_folder, resolve_model_folder
from lmforge.hf.merge_adapters import LM_HEAD_WEIGHT, merge_adapters
from lmforge.hf.multimodal import MultimodalFolder
from lmforge.hf.peft_folder import (
    base_model_of,
    base_model_overrides,
    load_peft_folder,
    tokenizer_folder,
)
from lmforge.hf.resolve import model_config_from_options
from lmforge.hf.turned_experts import adapters_of_model
from lmforge.hf.weights import continue_adapters, describe_folder, load_folder

# Of a file in `content_digest`: 1 MiB in all.
SAMPLES = 256
SAMPLE_BYTES = 4096


@dataclass(frozen=True)
class Pretrained:
    """A folder of weights; with `manifest` it is a checkpoint.

    `adapters` is a PEFT folder for these weights.
    """

    folder: Path
    manifest: Manifest | None
    adapters: Path | None = None

    def resolve_model_config(
        self, options: ModelOptions, vocab_size: int | None = None
    ) -> ModelConfig:
        """The model config. Raises UserError where the options change that of a checkpoint."""
        if self.manifest is None:
            changed = {} if self.adapters is None else base_model_overrides(self.adapters)
            return model_config_from_options(
                options.model_copy(update={"source": self.folder}), vocab_size, changed
            )
        overrides = options.overrides()
        if overrides:
            name = next(iter(overrides))
            raise UserError(
                f"model.{name}: a checkpoint's model config cannot be changed; leave it out"
            )
        config = stored_model_config(self.manifest)
        check_balance(options, config)
        return config

    @property
    def digest(self) -> str:
        """A hash that changes with the weights.

        It is one of a checkpoint's checksums, or of the sizes and times of a folder's files.
        """
        return self._digest(lambda path: path.stat().st_mtime_ns)

    @property
    def content_digest(self) -> str:
        """A hash like `digest` that is the same for a copy.

        It is one of the headers of a folder's files and samples of the rest, not of their times.
        """
        return self._digest(_sample_file)

    def _digest(self, of_file: Callable[[Path], object]) -> str:
        if self.manifest is not None:
            described: Any = {name: dict(written) for name, written in self.manifest.files.items()}
        else:
            files = sorted(self.folder.glob("*.safetensors"))
            if self.adapters:
                files += sorted(self.adapters.glob("*.safetensors"))
            described = [(path.name, path.stat().st_size, of_file(path)) for path in files]
        return xxhash.xxh3_64_hexdigest(json.dumps(described, sort_keys=True).encode())

    @property
    def notes(self) -> list[str]:
        """Notes on what is done with the weights besides reading them."""
        if self.manifest is None:
            return describe_folder(self.folder)
        lora = stored_model.stored_lora_config(self.manifest)
        if lora is not None and lora.stored is not None:
            return [f"dequantized from {lora.stored.describe()}"]
        return []

    @property
    def multimodal(self) -> MultimodalSource | None:
        """The folder of the full model, of which this is the language model; None: of none."""
        if self.manifest is not None:
            return self.manifest.written_by.get("multimodal")
        if TOWER_OF not in read_config_json(self.folder / "config.json"):
            return None
        digest = MultimodalFolder(self.folder).digest
        return {"source": str(self.folder.absolute()), "digest": digest}

    @property
    def tokenizer_folder(self) -> Path:
        """The folder of the tokenizer, if there is one."""
        return tokenizer_folder(self.folder, self.adapters)

    def tokenizer(self) -> Tokenizer:
        return Tokenizer.open(self.tokenizer_folder)

    def staged(self, stage_to: Path | None) -> Self:
        """The same model, read from a copy on this host's own disk.

        The copy is under `stage_to`, if there is one.
        """
        adapters = self.adapters and find_staged(stage_to, self.adapters)
        return replace(self, folder=find_staged(stage_to, self.folder), adapters=adapters)

    def check_has_weights(self) -> None:
        """Raise UserError where there are no weights to begin from."""
        # Weights in an unsupported format count too, since they are refused later with a more
        # specific message.
        there = any(
            any(self.folder.glob(each)) for each in ("*.safetensors*", "pytorch_model*.bin*")
        )
        if self.manifest is None and not there:
            raise UserError(
                f"{self.folder}: no weights here; to begin with random ones use"
                " --model.load_weights false"
            )

    def check_base(self, lora: LoraOptions | None) -> None:
        """Raise UserError where weights in 4 bits would be trained themselves."""
        content = {} if self.manifest else read_config_json(self.folder / "config.json")
        if is_nf4_folder(content) and (lora is None or lora.rank is None):
            way = "give lora.rank" if lora else "use lmforge sft with lora.rank"
            raise UserError(
                f"{self.folder}: its weights are in 4 bits, so only adapters beside them can be"
                f" trained; {way}"
            )

    def load_weights(self, model: LanguageModel) -> frozenset[str]:
        """Load the weights into a model, sharded or not; each rank reads its own parts.

        Returns the names that are missing in the files and were left unchanged, such as the head of
        a reward model. Raises UserError and CorruptCheckpoint.
        """
        new = frozenset[str]()
        if model.config.reward:
            own = self.resolve_model_config(ModelOptions(source=self.folder))
            if not own.reward:
                new = frozenset({LM_HEAD_WEIGHT})
        if self.manifest is None:
            load_folder(self.folder, model, new)
        else:
            stored_model.load_weights(self.folder, self.manifest, model, new)
        if self.adapters is not None:
            lora, tensors = load_peft_folder(self.adapters)
            tensors = adapters_of_model(tensors, model.config)
            tensors = continue_adapters(model, lora, tensors, str(self.adapters))
            merge_adapters(model, lora, tensors, str(self.adapters))
        return new


def _sample_file(path: Path) -> str:
    """A hash of the beginnings of SAMPLES equal parts of a file.

    Models of one shape have the same headers and sizes.
    """
    digest = xxhash.xxh3_64()
    size = path.stat().st_size
    with open(path, "rb") as file:
        for start in range(0, size, -(-size // SAMPLES) or 1):
            file.seek(start)
            digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()


def find_pretrained(
    source: Path, required_file: Literal["weights", "config.json"] = "config.json"
) -> Pretrained:
    """The model that `source` names. Raises UserError where there is none."""
    kind = kind_of(source)
    if kind == Kind.ADAPTERS:
        return replace(find_pretrained(base_model_of(source), required_file), adapters=source)
    if kind in (Kind.HUB_NAME, Kind.HF_FOLDER):
        return Pretrained(resolve_model_folder(source, required_file), None)
    if kind not in MODELS:
        hint = ""
        if str(source) in PRESETS:
            hint = f"; the preset of this name is --model.preset {source}"
        raise unexpected(source, MODELS, hint)
    (folder, manifest), _ = checkpoint.open_checkpoint(
        source, lambda folder, manifest: (folder, manifest)
    )
    return Pretrained(folder, manifest)


class PretrainedModels:
    """The source of models for the core (`WeightSource` in core/seams.py)."""

    find = staticmethod(find_pretrained)
    cache_folder = staticmethod(cache_folder)
