"""Writes and reads adapters in PEFT's layout: adapter_config.json and adapter_model.safetensors.

Tensors there have our names with a prefix; those of the language model of a multimodal folder the
names of that model's modules (core/model/text_tower.py). Options of PEFT that change the result of a forward pass
and are not supported are refused by name, and so are options that are not known here.
"""

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, NotRequired

from pydantic import ConfigDict, Field
from torch import Tensor
from typing_extensions import TypedDict

from lmforge.core.errors import UserError
from lmforge.core.files.untrusted import compile_pattern, read_json
from lmforge.core.model.build import build_model
from lmforge.core.model.init_weights import LORA_SUFFIXES
from lmforge.core.model.lora_config import ALL_LINEAR, LoraConfig, adapted_name
from lmforge.core.model.text_tower import full_model_name, tower_tensor
from lmforge.core.records.kinds import ADAPTER_CONFIG, Kind, kind_of
from lmforge.hf.export import new_folder
from lmforge.hf.merge_adapters import LM_HEAD_WEIGHT
from lmforge.hf.resolve import resolve_model_config
from lmforge.hf.safetensors_file import SafetensorsFile, write_safetensors

ADAPTER_WEIGHTS_FILE = "adapter_model.safetensors"
_PREFIX = "base_model.model."
_NESTED = ".base_layer"  # inside of an adapter
# In the order in which PEFT wraps them.
_STACKS = ("gate_up_proj", "up_proj", "down_proj")
# Options that are read here, or that do not change the computation once tensors exist.
_SUPPORTED = {
    "r",
    "lora_alpha",
    "rank_pattern",
    "alpha_pattern",
    "modules_to_save",
    "lora_dropout",
    "use_rslora",
    "target_modules",
    "target_parameters",
    "peft_type",
    "exclude_modules",
    "layers_to_transform",
    "layers_pattern",
    "fan_in_fan_out",
    "auto_mapping",
    "base_model_name_or_path",
    "revision",
    "task_type",
    "inference_mode",
    "peft_version",
    "ensure_weight_tying",
    "megatron_core",
    "qalora_group_size",
    "runtime_config",
    "ephemeral_gpu_offload",
    "eva_config",
}
_UNSET_VALUES: tuple[Any, ...] = (None, False, "none", [], {})
# Names of layers that a model may tie, of which PEFT adapts each alone.
_TIED_LAYERS = re.compile(r"\.(embed_tokens|wte|word_embeddings|embed_in|embed_out|lm_head)\.")
_OF_WRAPPER = re.compile(r"\.(modules_to_save|original_module)\.weight$")
# The initializations that leave the weights of the base model as they are.
_SUPPORTED_INITS = (True, False, None, "gaussian", "orthogonal", "eva")


_Rank = Annotated[int, Field(ge=1)]
_Alpha = Annotated[float, Field(gt=0)]


class _AnyPeftConfig(TypedDict):
    """The config of any type of adapter; its options are kept."""

    __pydantic_config__ = ConfigDict(extra="allow")  # type: ignore[misc]
    peft_type: NotRequired[str | None]


class _PeftConfig(_AnyPeftConfig):
    """The options that are read here; others are kept, to be refused by name."""

    r: _Rank
    lora_alpha: _Alpha
    rank_pattern: NotRequired[dict[str, _Rank] | None]
    alpha_pattern: NotRequired[dict[str, _Alpha] | None]
    lora_dropout: NotRequired[Annotated[float, Field(ge=0, lt=1)]]
    use_rslora: NotRequired[bool]
    target_parameters: NotRequired[list[str] | None]
    base_model_name_or_path: NotRequired[str | None]
    revision: NotRequired[str | None]


def save_peft_folder(
    folder: str | Path,
    tensors: Mapping[str, Tensor],
    config: LoraConfig,
    base_model_name: str,
    overwrite: bool = False,
    files: Mapping[str, str] = MappingProxyType({}),
    in_full_model: bool = False,
) -> None:
    """Write adapters as a folder that `peft.PeftModel.from_pretrained` opens.

    Args:
        tensors: full tensors by our names (lora.adapter_parameters; gather sharded ones first), and
        whole weights.
        base_model_name: the model that they belong to: a folder, or a name on the hub.
        overwrite: replace the folder if it exists and holds adapters. Otherwise an existing folder
        is a UserError.
        files: the texts of other files by name: a tokenizer, to whose number of tokens PEFT resizes
        the base model.
        in_full_model: it is a multimodal model, and they belong to its language model.
    """
    if in_full_model:
        tensors = {full_model_name(name): each for name, each in tensors.items()}
    layers = _layer_names(tensors)
    modules = [layer for layer in layers if ".adapters." not in layer]
    targets: list[str] | str = modules
    if all(each == ALL_LINEAR or each.isidentifier() for each in config.target_modules):
        targets = sorted({name.rpartition(".")[2] for name in modules})
        if in_full_model and targets:  # not the layers of these names that read images
            targets = rf"{re.escape(full_model_name(''))}.*\.({'|'.join(targets)})"
    content = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model_name,
        "r": config.rank,
        "lora_alpha": int(config.alpha) if float(config.alpha).is_integer() else config.alpha,
        "lora_dropout": config.dropout,
        "use_rslora": config.use_rslora,
        # A regular expression of a recipe may match other layers there; full names match
        # themselves.
        "target_modules": targets,
        "target_parameters": [adapted_name(layer) for layer in layers if layer not in modules],
        "bias": "none",
        "fan_in_fan_out": any(name.startswith("transformer.h.") for name in layers),
        "inference_mode": True,
    }
    with new_folder(
        Path(folder), overwrite, marker=ADAPTER_CONFIG, content="a folder of adapters"
    ) as partial:
        (partial / ADAPTER_CONFIG).write_text(
            json.dumps(content, indent=2) + "\n", encoding="utf-8"
        )
        for name, text in files.items():
            (partial / name).write_text(text, encoding="utf-8")
        renamed = dict(_as_peft_has_it(name, tensor, tensors) for name, tensor in tensors.items())
        write_safetensors(partial / ADAPTER_WEIGHTS_FILE, renamed, renamed.__getitem__)


def base_model_of(folder: Path) -> Path:
    """The model that the adapters of a PEFT folder belong to: a folder, or a name on the hub.

    Raises UserError.
    """
    path = folder / ADAPTER_CONFIG
    content = _read_config(path)
    base = content.get("base_model_name_or_path")
    revision = content.get("revision")
    if not base:
        raise UserError(
            f"{path}: base_model_name_or_path does not say which model these adapters belong to;"
            " name it"
        )
    if kind_of(base) == Kind.ADAPTERS:
        raise UserError(
            f"{path}: belongs to {base}, which is itself a folder of adapters; merge those into"
            " their model first"
        )
    return Path(f"{base}@{revision}" if revision and kind_of(base) == Kind.HUB_NAME else base)


def tokenizer_folder(base: Path, adapters: Path | None) -> Path:
    """The folder of a model's tokenizer: beside its adapters, else with the base model."""
    if adapters is not None and (adapters / "tokenizer.json").exists():
        return adapters
    return base


def base_model_overrides(folder: Path) -> dict[str, Any]:
    """Fields of the base model's config that adapters change.

    Adapters of the embedding or the head alone untie the two, and with whole ones the model has as
    many tokens. `peft` computes such a model so; when it merges, it adds to both of a tied pair,
    which is another model.
    """
    entries = _open_tensors(folder).entries
    overrides: dict[str, Any] = {}
    if any(map(_TIED_LAYERS.search, entries)):
        overrides["tie_word_embeddings"] = False
    rows = [entries[name].shape[0] for name in _whole_ends(entries)]
    if rows:
        overrides["vocab_size"] = max(rows)
    return overrides


def _whole_ends(entries: Mapping[str, Any]) -> list[str]:
    """The names in a folder of the whole matrices of embedding and head.

    PEFT saves them where they were trained or resized. While it saves, it has what it trained and
    what was before under longer names too.
    """
    found = [
        name
        for name in entries
        if _TIED_LAYERS.search(name) and name.endswith(".weight") and ".lora_" not in name
    ]
    return [name for name in found if not _OF_WRAPPER.search(name)]


def load_peft_folder(folder: str | Path) -> tuple[LoraConfig, dict[str, Tensor]]:
    """The adapters of a PEFT folder: their config, and full tensors for `merge_adapters`.

    The tensors have our names. Those that need another scaling than the config's have it in their
    B. Whole weights that replace the model's are among the tensors. Raises UserError where the
    folder is damaged, or for a type of adapter that is not supported.
    """
    folder = Path(folder)
    path = folder / ADAPTER_CONFIG
    content = _read_config(path)
    refused = [
        name
        for name, value in content.items()
        if name not in _SUPPORTED and value not in _UNSET_VALUES
    ]
    if content.get("init_lora_weights", True) in _SUPPORTED_INITS:
        refused = [name for name in refused if name != "init_lora_weights"]
    if refused:
        options = ", ".join(f"{name} = {json.dumps(content[name])}" for name in refused)
        raise UserError(
            f"{path}: {options}: not supported; merge it into its model with PEFT first"
        )
    tensors = _read_tensors(folder, content.get("target_parameters") or ())
    tensors |= _tied_to_frozen(folder, tensors)
    layers = _layer_names(tensors)
    config = LoraConfig(
        rank=content["r"],
        alpha=content["lora_alpha"],
        target_modules=tuple(layer for layer in layers if ".adapters." not in layer),
        target_parameters=tuple(adapted_name(layer) for layer in layers if ".adapters." in layer),
        dropout=content.get("lora_dropout", 0.0),
        use_rslora=content.get("use_rslora", False),
    )
    ranks = content.get("rank_pattern") or {}
    alphas = content.get("alpha_pattern") or {}
    for layer in layers:
        is_stack = ".experts.adapters." in layer
        name = adapted_name(layer) if ".adapters." in layer else layer
        own = replace(
            config,
            rank=_of_layer(ranks, name, config.rank),
            alpha=_of_layer(alphas, name, config.alpha),
        )
        a, b = (f"{layer}{end}" for end in LORA_SUFFIXES)
        experts = tensors[a].shape[0] // own.rank if is_stack else 1
        if b not in tensors or not tensors[a].shape[0] == tensors[b].shape[1] == experts * own.rank:
            raise UserError(
                f"{folder}: {layer}: not a pair of matrices of rank {own.rank}; copy the folder"
                " again"
            )
        if is_stack:
            tensors[a] = tensors[a].unflatten(0, (experts, own.rank))
            tensors[b] = tensors[b].unflatten(1, (own.rank, experts)).permute(2, 0, 1)
        if own.scaling != config.scaling:
            tensors[b] = tensors[b].float() * (own.scaling / config.scaling)
    return config, tensors


def _tied_to_frozen(folder: Path, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The embedding or head of which adapters leave no trace.

    A base that ties the two had the other's frozen matrix.
    """
    ends = _whole_ends(_open_tensors(folder).entries)
    if len(ends) != 1 or f"{_NESTED}." not in ends[0]:
        return {}
    base = base_model_of(folder)
    if kind_of(base) not in (Kind.HF_FOLDER, Kind.HUB_NAME):
        return {}
    config = resolve_model_config(base, {}, implementation="auto")
    if not config.tie_word_embeddings:
        return {}
    pair = (f"{build_model(config, 'meta').embedding_names[0]}.weight", LM_HEAD_WEIGHT)
    return {name: tensors[each] for each in pair for name in pair if each in tensors}


def _as_peft_has_it(name: str, tensor: Tensor, tensors: Mapping[str, Tensor]) -> tuple[str, Tensor]:
    """The name and the tensor in a folder of a tensor of ours.

    Stacks are [experts · rank, inputs] and [outputs, rank · experts] there, and adapters of several
    parameters of one module are nested, the last outermost.
    """
    owner, _, rest = name.partition(".adapters.")
    if not rest:
        return _PREFIX + name, tensor
    parameter, _, end = rest.partition(".")
    inside = [each for each in _STACKS if f"{owner}.adapters.{each}.{end}" in tensors]
    depth = 0
    if parameter in inside:
        depth = len(inside) - 1 - inside.index(parameter)
    if tensor.ndim == 3:
        if f".{end}" == LORA_SUFFIXES[0]:
            tensor = tensor.flatten(0, 1)
        else:
            tensor = tensor.permute(1, 2, 0).flatten(1)
    return f"{_PREFIX}{owner}{depth * _NESTED}.{end}", tensor


def _our_layer(layer: str, parameters: Collection[str]) -> str:
    """Our name of the adapter that PEFT calls `layer`. parameters: those that it adapts."""
    owner = layer.replace(_NESTED, "")
    depth = (len(layer) - len(owner)) // len(_NESTED)
    known = _STACKS if owner.endswith(".experts") else ("weight",)
    inside = [
        each
        for each in known
        if any(f".{owner}.{each}".endswith(f".{target}") for target in parameters)
    ]
    if depth >= len(inside):
        return owner
    return f"{owner}.adapters.{inside[-1 - depth]}"


def _of_layer(patterns: Mapping[str, Any], layer: str, default: Any) -> Any:
    """The value of the first pattern that matches the end of a layer's name, as PEFT does it.

    In a multimodal model the layer has a longer name.
    """
    for pattern, value in patterns.items():
        matches = compile_pattern(rf"(.*\.)?({pattern})", "rank_pattern, alpha_pattern").fullmatch
        if matches(layer) or matches(full_model_name(layer)):
            return value
    return default


def _read_config(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise UserError(f"{path}: no such file; give a folder of adapters in PEFT's layout")
    # First, since other types have other options.
    peft_type = read_json(path, _AnyPeftConfig, hint="copy the file again").get("peft_type")
    if peft_type != "LORA":
        way = "merge it into its model with PEFT first, if it can be merged"
        raise UserError(f"{path}: peft_type {peft_type}: only LORA adapters are supported; {way}")
    return {**read_json(path, _PeftConfig, hint="copy the file again")}


def _open_tensors(folder: Path) -> SafetensorsFile:
    path = folder / ADAPTER_WEIGHTS_FILE
    if not path.is_file():
        raise UserError(f"{path}: no such file; adapters are loaded from safetensors only")
    return SafetensorsFile(path)


def _read_tensors(folder: Path, parameters: Collection[str]) -> dict[str, Tensor]:
    """Adapters, those of embeddings as pairs for their transpose, and whole weights.

    `parameters`: PEFT's target_parameters.
    """
    file = _open_tensors(folder)
    tensors = {}
    # Read as of a text model: names of another one's towers fit none of ours.
    parameters = [each if (ours := tower_tensor(each)) is None else ours for each in parameters]
    for name, stored in file.entries.items():
        if _OF_WRAPPER.search(name) and _OF_WRAPPER.sub(".weight", name) in file.entries:
            continue
        ours = name.removeprefix(_PREFIX)
        ours = tower_tensor(ours) or ours
        for end in LORA_SUFFIXES:
            if ours.endswith(end):
                ours = _our_layer(ours.removesuffix(end), parameters) + end
                break
        else:
            ours = ours.replace(f"{_NESTED}.", ".")
        layer, _, kind = ours.rpartition(".lora_embedding_")
        if layer and kind in ("A", "B"):
            suffix = LORA_SUFFIXES[1] if kind == "A" else LORA_SUFFIXES[0]
            tensors[layer + suffix] = file.read(name).t()
        elif (
            name.startswith(_PREFIX)
            and len(stored.shape) <= 2
            and (ours.endswith(LORA_SUFFIXES) or ".lora_" not in ours)
        ):
            tensors[ours] = file.read(name)
        else:
            raise UserError(
                f"{file.path}: {name}: not an adapter of a linear layer, so not supported"
            )
    if not tensors:
        raise UserError(f"{file.path}: holds no tensors; copy the folder again")
    return tensors


def _layer_names(tensors: Mapping[str, Tensor]) -> list[str]:
    """The names of the layers that these tensors adapt."""
    return [
        name.removesuffix(LORA_SUFFIXES[0]) for name in tensors if name.endswith(LORA_SUFFIXES[0])
    ]
