"""Writing a model as a Hugging Face folder: config.json, safetensors, and the tokenizer's files."""

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from lmforge.errors import UserError
from lmforge.hub import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME
from lmforge.interop.safetensors_file import NAME_BY_DTYPE
from lmforge.interop.transformers_config import TransformersConfig
from lmforge.interop.transformers_weights import to_stored_tensors
from lmforge.interop.weights import CLASSIFIER_HEAD_WEIGHT, LM_HEAD_WEIGHT
from lmforge.model import build_model
from lmforge.model.config import ModelConfig

_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
)


def export_folder(
    model: nn.Module | Mapping[str, torch.Tensor],
    config: ModelConfig,
    folder: str | Path,
    tokenizer_folder: str | Path | None = None,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = 5_000_000_000,
    overwrite: bool = False,
    read_tensor: Callable[[str], torch.Tensor] | None = None,
    extra_files: Mapping[str, dict[str, Any] | str] | None = None,
) -> None:
    """Write a folder that transformers opens: config.json, weights, and the tokenizer's files if given.

    Written beside and renamed at the end, so the folder is there whole or not at all.

    Args:
        model: a model, or its state by tensor name; whole tensors (gather sharded ones first).
        dtype: of the written tensors; None keeps each one's own.
        shard_bytes: files are cut before they grow beyond this; a single tensor may.
        overwrite: replace the folder if it exists and is a model's. Otherwise an existing one is a UserError.
        read: gives the tensor of a name, when those of `model` only show shape and dtype (on the meta device). Each is read
            when it is written, so that no more than one of them is in memory; those of a wrapped model all at once.
        more: what other files hold, by their names, JSON or text; what is in config.json is joined to it.
    """
    folder = Path(folder)
    tensors = dict(model.named_parameters()) if isinstance(model, nn.Module) else dict(model)
    if config.tie_word_embeddings:
        tensors.pop(LM_HEAD_WEIGHT, None)
    wanted = {name: tensor.shape for name, tensor in build_model(config, seed=None, device="meta").named_parameters()}
    if {name: tensor.shape for name, tensor in tensors.items()} != wanted:
        raise ValueError("the tensors to export are not those of the config")
    if any(isinstance(tensor, DTensor) for tensor in tensors.values()):
        raise ValueError("gather sharded tensors before exporting them")
    if isinstance(config, TransformersConfig):
        tensors = to_stored_tensors(config, {name: read_tensor(name) for name in tensors} if read_tensor else tensors)
        read_tensor = None
    value_of = read_tensor or tensors.__getitem__
    if config.reward:
        head = tensors.pop(LM_HEAD_WEIGHT)
        tensors = {**tensors, CLASSIFIER_HEAD_WEIGHT: head}
        ours, value_of = value_of, lambda name: ours(LM_HEAD_WEIGHT if name == CLASSIFIER_HEAD_WEIGHT else name)
    if folder.exists():
        if not overwrite:
            raise UserError(f"{folder}: exists already; choose another folder, or ask to overwrite it")
        if not (folder / "config.json").is_file():
            raise UserError(f"{folder}: holds no model, so it is not overwritten; choose another folder")
    with replace_folder_atomically(folder) as beside:
        for name in _tokenizer_files(tokenizer_folder):
            shutil.copyfile(name, beside / name.name)
        kept = dtype or next(iter(tensors.values())).dtype
        files = dict(extra_files or {})
        shape = {**config.to_config_json(), "torch_dtype": str(kept).removeprefix("torch.")}
        described = files.get("config.json", {})
        assert isinstance(described, dict)
        files["config.json"] = {**described, **shape}
        for file, content in files.items():
            if not (beside / file).exists():
                text = content if isinstance(content, str) else json.dumps(content, indent=2) + "\n"
                (beside / file).write_text(text, encoding="utf-8")
        _write_shards(beside, tensors, value_of, dtype, max_shard_bytes)


def _tokenizer_files(folder: str | Path | None) -> list[Path]:
    if folder is None:
        return []
    found = [Path(folder) / name for name in _TOKENIZER_FILES if (Path(folder) / name).is_file()]
    if not found:
        raise UserError(f"{folder}: holds no tokenizer.json; give the folder of the run's tokenizer")
    return found


def _write_shards(
    folder: Path,
    tensors: Mapping[str, torch.Tensor],
    read_tensor: Callable[[str], torch.Tensor],
    dtype: torch.dtype | None,
    max_shard_bytes: int,
) -> None:
    sizes = {name: tensor.numel() * (dtype or tensor.dtype).itemsize for name, tensor in tensors.items()}
    shards: list[list[str]] = [[]]
    filled = 0
    for name, size in sizes.items():
        if filled and filled + size > max_shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size
    places: dict[str, str] = {}
    for number, names in enumerate(shards, start=1):
        file = SAFE_WEIGHTS_NAME if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        write_safetensors(folder / file, {name: tensors[name] for name in names}, read_tensor, dtype)
        places |= dict.fromkeys(names, file)
    if len(shards) > 1:
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": places}
        (folder / SAFE_WEIGHTS_INDEX_NAME).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def write_safetensors(
    path: Path, tensors: Mapping[str, torch.Tensor], read_tensor: Callable[[str], torch.Tensor], dtype: torch.dtype | None
) -> None:
    """One safetensors file, a tensor at a time: the library's own writer wants all of them in memory.

    The format: the header's length in 8 bytes, a header of JSON that says where each tensor lies, then their bytes.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in tensors.items():
        begin, kept = end, dtype or tensor.dtype
        end += tensor.numel() * kept.itemsize
        header[name] = {"dtype": NAME_BY_DTYPE[kept], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    described = json.dumps(header).encode()
    described += b" " * (-len(described) % 8)
    with path.open("wb") as file:
        file.write(len(described).to_bytes(8, "little") + described)
        for name, tensor in tensors.items():
            value = read_tensor(name).detach().to("cpu", dtype or tensor.dtype).contiguous()
            file.write(value.flatten().view(torch.uint8).numpy().data)


@contextmanager
def replace_folder_atomically(folder: Path) -> Iterator[Path]:
    """A folder to write in, renamed to `folder` at the end; if anything fails it is gone, and what was there before stays."""
    beside = folder.with_name(f".{folder.name}.{os.getpid()}.partial")
    previous = folder.with_name(f".{folder.name}.{os.getpid()}.previous")
    try:
        beside.mkdir(parents=True)
        yield beside
        for path in beside.iterdir():
            with path.open("rb") as file:
                os.fsync(file.fileno())
        if folder.exists():
            folder.rename(previous)
        beside.rename(folder)
    except OSError as error:
        raise UserError(f"{folder}: could not be written ({error}); free some space or choose another folder") from None
    finally:
        shutil.rmtree(beside, ignore_errors=True)
        if previous.exists() and not folder.exists():
            previous.rename(folder)
        shutil.rmtree(previous, ignore_errors=True)
