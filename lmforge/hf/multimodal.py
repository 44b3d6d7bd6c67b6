"""The folder of a model that reads images too, of which a run trained the language model: what an
export takes over from it.

That is every tensor that the run did not read (vision, audio, projector), as it is; its config.json
but for what the trained weights change; the files of its processor and templates. Tensors that
predict further tokens are left out: they belong to the language model as it was.
"""

import json
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import fields
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor

from lmforge.core.errors import UserError, format_count, name_some
from lmforge.core.files.untrusted import read_json
from lmforge.core.model.config import ModelConfig
from lmforge.core.model.text_tower import full_model_name, tower_tensor
from lmforge.core.records.kinds import Kind, kind_of
from lmforge.core.records.manifests import MultimodalSource
from lmforge.hf.hub import SAFE_WEIGHTS_INDEX_NAME, read_weight_map, resolve_model_folder
from lmforge.hf.merge_adapters import LM_HEAD_WEIGHT
from lmforge.hf.resolve import resolve_model_config
from lmforge.hf.safetensors_file import PAGE_BYTES
from lmforge.hf.weights import open_weights

_COPIED = re.compile(r".*\.(json|jinja|model)|merges\.txt")
_NOT_COPIED = ("config.json", "generation_config.json", SAFE_WEIGHTS_INDEX_NAME)
_DTYPE_FIELDS = ("dtype", "torch_dtype")  # of transformers 5 and 4
_EMBEDDING = "model.embed_tokens.weight"
_MTP_LAYERS = "mtp_num_hidden_layers"
# Fields of the language model that a run may have changed: they are written into text_config.
_WRITTEN = ("vocab_size", "max_position_embeddings")
# Those that its computation does not depend on, and those that are decided here.
_FREE = (
    *_WRITTEN,
    "tie_word_embeddings",
    "generation_config",
    "initializer_range",
    "output_router_logits",
    "router_aux_loss_coef",
)


class MultimodalFolder:
    """Such a folder, opened. Raises UserError where it is incomplete.

    language_tensors: the stored name of each tensor of the language model, by our name.
    changes: what of the folder is not as it was in the export, in words; set by `config_json`.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._file_of = open_weights(folder)
        self.language_tensors = {
            ours: stored for stored in self._file_of if (ours := tower_tensor(stored)) is not None
        }
        self.changes: list[str] = []
        index = folder / SAFE_WEIGHTS_INDEX_NAME
        absent = [
            name
            for name in (read_weight_map(folder) if index.is_file() else ())
            if name not in self._file_of and tower_tensor(name) is None
        ]
        if absent:
            raise UserError(
                f"{index}: names {name_some(absent, limit=1)}, which its files do not hold; copy"
                " the folder again"
            )

    @property
    def digest(self) -> str:
        """A hash of config.json, and of each weight file's name, header, size and first and last
        page of data.
        """
        digest = xxhash.xxh3_64((self.folder / "config.json").read_bytes())
        for path in sorted({file.path for file in self._file_of.values()}):
            size = path.stat().st_size
            digest.update(f"{path.name} {size}".encode())
            with path.open("rb") as file:
                header_bytes = file.read(8)
                digest.update(header_bytes + file.read(int.from_bytes(header_bytes, "little")))
                digest.update(file.read(PAGE_BYTES))
                file.seek(max(0, size - PAGE_BYTES))
                digest.update(file.read(PAGE_BYTES))
        return digest.hexdigest()

    @cached_property
    def _text_config(self) -> ModelConfig:
        return resolve_model_config(self.folder, {})

    @cached_property
    def _unread(self) -> list[str]:
        """The names of the tensors that an export takes over."""
        mtp = self._text_config.family.unread_names
        return [
            name
            for name in self._file_of
            if tower_tensor(name) is None and not name.startswith(mtp)
        ]

    def complete(
        self, tensors: Mapping[str, Tensor], read_tensor: Callable[[str], Tensor]
    ) -> tuple[dict[str, Tensor], Callable[[str], Tensor]]:
        """The tensors of the full model by their names in the folder, on the meta device, and a
        function that reads one; of the language model's by their names on disk.
        """
        of_head = self.language_tensors.get(LM_HEAD_WEIGHT)
        sources = {self._stored_name(name): name for name in tensors}
        if of_head is not None and LM_HEAD_WEIGHT not in tensors:  # tied, and stored twice
            sources[of_head] = _EMBEDDING
        full = {stored: tensors[ours] for stored, ours in sources.items()}
        full |= {name: self._file_of[name].entries[name].meta for name in self._unread}

        def read(name: str) -> Tensor:
            if name in sources:
                return read_tensor(sources[name])
            return self._file_of[name].read(name)

        return full, read

    def _stored_name(self, name: str) -> str:
        if name in self.language_tensors:
            return self.language_tensors[name]
        inside = next(stored for stored in self.language_tensors.values() if "layers." in stored)
        return full_model_name(name, like=inside)

    def config_json(self, config: ModelConfig, dtype: torch.dtype) -> dict[str, Any]:
        """The folder's config.json for a language model of this config and dtype.

        Raises UserError where the run changed what would not be read back there, or where the
        folder's own tensors need a quantization that is left out.
        """
        own = self._text_config
        for each in fields(config):
            ours, theirs = (getattr(one, each.name) for one in (config, own))
            if each.name not in _FREE and ours != theirs:
                raise UserError(
                    f"{self.folder}: the run changed {each.name} from {theirs} to {ours}, which its"
                    " config.json cannot say; export the language model alone (--text_only)"
                )
        content = read_json(self.folder / "config.json", dict[str, Any], allow_nan=True)
        text = content["text_config"]
        self.changes = []

        def change(name: str, value: Any, table: dict[str, Any]) -> None:
            """In a table, and in the other one if it has the field."""
            for each in (content, text):
                if each is not table and name not in each:
                    continue
                note = f"{name} {json.dumps(each.get(name))} → {json.dumps(value)}"
                if each.get(name) != value and note not in self.changes:
                    self.changes.append(note)
                each[name] = value

        stated = [name for name in _DTYPE_FIELDS if name in content or name in text]
        for name in stated or _DTYPE_FIELDS[:1]:
            change(name, str(dtype).removeprefix("torch."), content)
        quantized = [table.pop("quantization_config", None) for table in (content, text)]
        if any(quantized):
            self._reject_quantized_rest()
            self.changes.append("no quantization_config")
        if config.tie_word_embeddings != own.tie_word_embeddings:
            change("tie_word_embeddings", config.tie_word_embeddings, content)
        for name in _WRITTEN:
            if getattr(config, name) != getattr(own, name):
                change(name, getattr(config, name), text)
        if text.get(_MTP_LAYERS):
            change(_MTP_LAYERS, 0, text)
        dropped = len(self._file_of) - len(self.language_tensors) - len(self._unread)
        if dropped:
            of_further = format_count(dropped, "tensor")
            self.changes.append(f"without {of_further} for the prediction of further tokens")
        return content

    def _reject_quantized_rest(self) -> None:
        plain = (torch.int32, torch.int64, torch.bool)
        entries = {name: self._file_of[name].entries[name] for name in self._unread}
        quantized = [
            name
            for name, entry in entries.items()
            if entry.dtype not in plain and entry.dtype.itemsize < 2
        ]
        if quantized:
            raise UserError(
                f"{self.folder}: {name_some(quantized, limit=1)} is quantized, and the language"
                " model no longer is; export that alone (--text_only)"
            )

    def copy_files(self, folder: Path) -> None:
        """Copy what is beside the weights into a folder, but for files that it has already."""
        for path in sorted(self.folder.iterdir()):
            wanted = _COPIED.fullmatch(path.name) and path.name not in _NOT_COPIED
            if wanted and path.is_file() and not (folder / path.name).exists():
                shutil.copyfile(path, folder / path.name)

    def describe(self) -> str:
        """What the export has besides the language model, in words."""
        others = format_count(len(self._unread), "tensor")
        changed = f"; changed there: {', '.join(self.changes)}" if self.changes else ""
        return f"with {others} of {self.folder} as they were, and its config.json{changed}"


def open_source(recorded: MultimodalSource, given: Path | None, model: Path) -> MultimodalFolder:
    """The folder whose language model the checkpoint `model` has, as its manifest names it, or as
    it is `given`.

    Raises UserError where it is gone or another.
    """
    source = given or Path(recorded["source"])
    way = "give it with --source, or export the language model alone with --text_only"
    if kind_of(source) not in (Kind.HF_FOLDER, Kind.HUB_NAME):
        raise UserError(
            f"{source}: {kind_of(source)}, and {model} began from the language model of a"
            f" multimodal folder there; {way}"
        )
    found = MultimodalFolder(resolve_model_folder(source, "weights"))
    if found.digest != recorded["digest"]:
        raise UserError(
            f"{source}: its config.json or weights are not those that {model} began from; {way}"
        )
    return found
