"""Writing a model as a Hugging Face folder: config.json, safetensors, and the tokenizer's files."""

import json
import re
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from lmforge.core.errors import UserError
from lmforge.core.files.atomic_files import atomic_folder, check_output
from lmforge.core.model.build import build_model
from lmforge.core.model.config import ModelConfig
from lmforge.core.model.config_json import to_config_json
from lmforge.core.model.init_weights import named_tensors, stored_buffers
from lmforge.hf.hub import SAFE_WEIGHTS_INDEX_NAME
from lmforge.hf.merge_adapters import LM_HEAD_WEIGHT
from lmforge.hf.multimodal import MultimodalFolder
from lmforge.hf.safetensors_file import write_safetensors
from lmforge.hf.stored_experts import Piece, pieces, stored_name, with_stored_prefix
from lmforge.hf.transformers_causal_lm import to_stored_tensors
from lmforge.hf.transformers_model import TransformersConfig
from lmforge.hf.turned_experts import is_turned, turned
from lmforge.hf.weights import CLASSIFIER_HEAD_WEIGHT

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


# The files of a folder that --overwrite may replace: somebody's own files beside a model are not
# lmforge's to delete.
_OF_A_MODEL = re.compile(
    r".*\.(json|safetensors|jinja|model)|merges\.txt|README\.md|additional_chat_templates"
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
    multimodal: MultimodalFolder | None = None,
) -> None:
    """Write a folder that transformers opens.

    It has config.json, weights, and the tokenizer's files if given. The folder is written
    atomically: it appears complete or not at all.

    Args:
        model: a model, or its tensors by name; full tensors (gather sharded ones first).
        dtype: of the written tensors; None keeps each one's own. Those that are not trained always keep
            it.
        max_shard_bytes: weights are split into files of at most this size, unless a single tensor
        is larger.
        overwrite: replace the folder if it exists and holds a model. Otherwise an existing folder
        is a UserError.
        read_tensor: returns the tensor of a name, where those of `model` are on the meta device.
            Each is read when it is written, so that only one of them is in memory; those of a
            wrapped model are all read at once.
        extra_files: other files by name, JSON or text; fields for config.json replace its own.
        multimodal: the folder whose language model it is: what else that has is written too.
    """
    wrapped = isinstance(config, TransformersConfig)
    if config.final_logit_softcapping is not None and not (wrapped or config.family.caps_logits):
        raise UserError(
            f"{folder}: the model's logits are capped (final_logit_softcapping), which"
            f" transformers' {config.model_type} models are not: they would compute other"
            " probabilities; use the checkpoint itself"
        )
    folder = Path(folder)
    named = named_tensors(model) if isinstance(model, nn.Module) else model
    tensors = dict[str, torch.Tensor](named)
    if config.tie_word_embeddings:
        tensors.pop(LM_HEAD_WEIGHT, None)
    meta_model = build_model(config, "meta")
    expected = {name: tensor.shape for name, tensor in named_tensors(meta_model)}
    if {name: tensor.shape for name, tensor in tensors.items()} != expected:
        raise ValueError("the tensors to export are not those of the config")
    if any(isinstance(tensor, DTensor) for tensor in tensors.values()):
        raise ValueError("gather sharded tensors before exporting them")
    value_of = read_tensor or tensors.__getitem__
    if isinstance(config, TransformersConfig):
        values = {name: value_of(name) for name in tensors}
        buffers = {name: values.pop(name) for name, _ in stored_buffers(meta_model)}
        buffers = to_stored_tensors(config.config_dict, buffers)
        untrained = {*buffers}
        tensors = to_stored_tensors(config.config_dict, values) | buffers
        value_of = tensors.__getitem__
    else:
        untrained = {with_stored_prefix(name, config) for name, _ in stored_buffers(meta_model)}
        whole = () if multimodal is None else multimodal.language_tensors
        tensors, value_of = _in_pieces(tensors, value_of, config, whole)
    name_of = dict[str, str]()  # of tensors that have another name on disk
    if config.reward:
        tensors = {**tensors}
        tensors[CLASSIFIER_HEAD_WEIGHT] = tensors.pop(LM_HEAD_WEIGHT)
        name_of[CLASSIFIER_HEAD_WEIGHT] = LM_HEAD_WEIGHT
    stated_dtype = dtype or next(iter(tensors.values())).dtype
    written = {
        name: each.to("meta", None if name in untrained else dtype)
        for name, each in tensors.items()
    }

    files = _described(config, stated_dtype, extra_files or {})
    if multimodal is not None:
        files["config.json"] = multimodal.config_json(config, stated_dtype)
        written, value_of = multimodal.complete(written, value_of)
    with new_folder(folder, overwrite, marker="config.json", content="a model") as partial:
        if tokenizer_folder is not None:
            paths = [Path(tokenizer_folder) / name for name in _TOKENIZER_FILES]
            copied = [path for path in paths if path.is_file()]
            if not copied:
                raise UserError(
                    f"{tokenizer_folder}: holds no tokenizer.json; give the folder of the run's"
                    " tokenizer"
                )
            for path in copied:
                shutil.copyfile(path, partial / path.name)
        for file, content in files.items():
            if not (partial / file).exists():
                text = content if isinstance(content, str) else json.dumps(content, indent=2) + "\n"
                (partial / file).parent.mkdir(exist_ok=True)
                (partial / file).write_text(text, encoding="utf-8")
        if multimodal is not None:
            multimodal.copy_files(partial)
        _write_shards(
            partial, written, lambda name: value_of(name_of.get(name, name)), max_shard_bytes
        )


def _in_pieces(
    tensors: Mapping[str, torch.Tensor],
    read_tensor: Callable[[str], torch.Tensor],
    config: ModelConfig,
    whole: Collection[str],
) -> tuple[dict[str, torch.Tensor], Callable[[str], torch.Tensor]]:
    """Tensors by their names on disk, and a function that returns the value of each of them.

    On disk each expert has a tensor of its own, except for stacks that are stored `whole`.
    """
    read = lru_cache(maxsize=1)(read_tensor)  # the pieces of one follow each other
    result = {}
    values = dict[str, Callable[[], torch.Tensor]]()

    def read_piece(name: str, piece: Piece) -> torch.Tensor:
        return piece.cut(read(name))

    def read_turned(name: str) -> torch.Tensor:
        return turned(name, read_tensor(name))

    for name, tensor in tensors.items():
        stack = [] if name in whole else [*pieces(name, tensor.shape, config)]
        for piece in stack:
            result[piece.name] = piece.cut(tensor)
            values[piece.name] = partial(read_piece, name, piece)
        if is_turned(name, config):
            result[name] = turned(name, tensor)
            values[name] = partial(read_turned, name)
        elif not stack:
            theirs = name if name in whole else stored_name(name, config)
            result[theirs] = tensor
            values[theirs] = partial(read_tensor, name)
    ours_of = {with_stored_prefix(name, config): name for name in result}
    result = {name: result[ours] for name, ours in ours_of.items()}
    return result, lambda name: values[ours_of[name]]()


def _described(
    config: ModelConfig, dtype: torch.dtype, extra_files: Mapping[str, dict[str, Any] | str]
) -> dict[str, dict[str, Any] | str]:
    """config.json, generation_config.json where the model has one, and the further files.

    Fields of these come before ours.
    """
    content = to_config_json(config) | {"torch_dtype": str(dtype).removeprefix("torch.")}
    generation = content.pop("generation_config", None)
    files = dict(extra_files)
    if generation is not None:
        files.setdefault("generation_config.json", generation)
    extra_fields = files.get("config.json", {})
    assert isinstance(extra_fields, dict)
    files["config.json"] = content | extra_fields
    return files


@contextmanager
def new_folder(folder: Path, overwrite: bool, *, marker: str, content: str) -> Iterator[Path]:
    """A context with a folder to fill that appears as `folder` at the end, complete or not at all.

    With `overwrite`, a folder that holds the file `marker`, weights, and only files of a model, and
    so is a `content`, is replaced (where `folder` is a link, what it leads to); any other one is a
    UserError, and so is an error of the disk.
    """

    def is_replaceable(path: Path) -> bool:
        others = []
        if path.is_dir():
            others = [each for each in path.iterdir() if not _OF_A_MODEL.fullmatch(each.name)]
        return (path / marker).is_file() and any(path.glob("*.safetensors")) and not others

    if overwrite:
        check_output(folder, kind=content, is_of_kind=is_replaceable, other="folder")
    else:
        check_output(folder, other="folder, or add --overwrite")
    try:
        with atomic_folder(folder.resolve(), replace=True) as partial:
            yield partial
    except OSError as error:
        raise UserError(
            f"{folder}: could not be written ({error}); choose another folder"
        ) from None


def _write_shards(
    folder: Path,
    tensors: dict[str, torch.Tensor],
    read_tensor: Callable[[str], torch.Tensor],
    max_shard_bytes: int,
) -> None:
    from huggingface_hub import split_state_dict_into_shards_factory

    split = split_state_dict_into_shards_factory(
        tensors,
        get_storage_size=lambda tensor: tensor.nbytes,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=max_shard_bytes,
    )
    for file, names in split.filename_to_tensors.items():
        write_safetensors(folder / file, {name: tensors[name] for name in names}, read_tensor)
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        (folder / SAFE_WEIGHTS_INDEX_NAME).write_text(
            json.dumps(index, indent=2) + "\n", encoding="utf-8"
        )
