"""Adapters in PEFT's layout, out and in: adapter_config.json beside adapter_model.safetensors.

Tensors there have our names with a prefix. What of PEFT's many options changes the result of a forward pass and is not
computed here is refused by its name, and so is an option that came later than this file.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lmforge.errors import UserError
from lmforge.hub import is_hub_name
from lmforge.interop.export import replace_folder_atomically, write_safetensors
from lmforge.interop.safetensors_file import SafetensorsFile
from lmforge.model.init_weights import LORA_SUFFIXES
from lmforge.model.lora import ALL_LINEAR, LoraConfig

ADAPTER_CONFIG_FILE, ADAPTER_WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
# What is read here, or says nothing about what is computed once there are tensors.
_SUPPORTED_OPTIONS = {
    "r", "lora_alpha", "lora_dropout", "use_rslora", "target_modules", "peft_type",
    "exclude_modules", "layers_to_transform", "layers_pattern", "fan_in_fan_out",
    "auto_mapping", "base_model_name_or_path", "revision", "task_type", "inference_mode", "peft_version",
    "megatron_core", "qalora_group_size", "runtime_config", "ephemeral_gpu_offload", "eva_config",
}  # fmt: skip
_UNSET_VALUES: tuple[Any, ...] = (None, False, "none", [], {})
# The ways to begin that leave the base's weights as they are.
_SUPPORTED_INIT_LORA_WEIGHTS = (True, False, None, "gaussian", "orthogonal", "eva")


def save_peft_folder(
    folder: str | Path, tensors: Mapping[str, Tensor], config: LoraConfig, base_model_name: str, overwrite: bool = False
) -> None:
    """Write adapters as a folder that `peft.PeftModel.from_pretrained` opens.

    Args:
        tensors: whole ones by our names (lora.adapter_tensors; gather sharded ones first).
        base_name: of the model they belong to: a folder, or a name on the hub.
        overwrite: replace the folder if it exists and holds adapters. Otherwise an existing one is a UserError.
    """
    folder = Path(folder)
    if folder.exists():
        if not overwrite:
            raise UserError(f"{folder}: exists already; choose another folder, or ask to overwrite it")
        if not (folder / ADAPTER_CONFIG_FILE).is_file():
            raise UserError(f"{folder}: holds no adapters, so it is not overwritten; choose another folder")
    layers = _adapted_layer_names(tensors)
    plain = all(target == ALL_LINEAR or target.isidentifier() for target in config.target_modules)
    content = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model_name,
        "r": config.rank,
        "lora_alpha": int(config.alpha) if float(config.alpha).is_integer() else config.alpha,
        "lora_dropout": config.dropout,
        "use_rslora": config.use_rslora,
        # A regular expression of ours may mean other layers there; names that are whole mean themselves.
        "target_modules": _module_names(layers) if plain else layers,
        "bias": "none",
        "fan_in_fan_out": any(name.startswith("transformer.h.") for name in layers),
        "inference_mode": True,
    }
    with replace_folder_atomically(folder) as beside:
        (beside / ADAPTER_CONFIG_FILE).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        named = {_PREFIX + name: tensor for name, tensor in tensors.items()}
        write_safetensors(beside / ADAPTER_WEIGHTS_FILE, named, named.__getitem__, None)


def is_peft_folder(folder: Path) -> bool:
    """Whether a folder holds adapters, and not a model as well."""
    return (folder / ADAPTER_CONFIG_FILE).is_file() and not (folder / "config.json").exists()


def base_model_of(folder: Path) -> Path:
    """What a PEFT folder says its adapters belong to: a folder, or a name on the hub. Raises UserError where it does not say."""
    content = _read_config(folder / ADAPTER_CONFIG_FILE)
    base, revision = content.get("base_model_name_or_path"), content.get("revision")
    if not isinstance(base, str) or not base:
        raise UserError(
            f"{folder / ADAPTER_CONFIG_FILE}: base_model_name_or_path does not say which model these adapters belong to; name it"
        )
    if is_peft_folder(Path(base)):
        raise UserError(
            f"{folder / ADAPTER_CONFIG_FILE}: belongs to {base}, which is adapters too; merge those into their model first"
        )
    return Path(f"{base}@{revision}" if revision and is_hub_name(base) else base)


def load_peft_folder(folder: str | Path) -> tuple[LoraConfig, dict[str, Tensor]]:
    """The adapters of a PEFT folder: what to give `add_lora`, and then `fill`, whose tensors have our names.

    Raises UserError where the folder is damaged, or for a kind of adapter that is not computed here.
    """
    folder = Path(folder)
    path = folder / ADAPTER_CONFIG_FILE
    content = _read_config(path)
    kind = content.get("peft_type")
    if kind != "LORA":
        raise UserError(f"{path}: peft_type {kind}: only LORA adapters are supported; merge it into its model with PEFT first")
    refused = [name for name, value in content.items() if name not in _SUPPORTED_OPTIONS and value not in _UNSET_VALUES]
    if content.get("init_lora_weights", True) in _SUPPORTED_INIT_LORA_WEIGHTS:
        refused = [name for name in refused if name != "init_lora_weights"]
    if refused:
        told = ", ".join(f"{name} = {json.dumps(content[name])}" for name in refused)
        raise UserError(f"{path}: {told}: not supported here; merge it into its model with PEFT first")
    tensors = _read_tensors(folder / ADAPTER_WEIGHTS_FILE)
    layers = _adapted_layer_names(tensors)
    named = content.get("target_modules")
    narrowed = any(content.get(name) for name in ("exclude_modules", "layers_to_transform"))
    by_last_part = isinstance(named, list) and sorted(named) == _module_names(layers) and not narrowed
    try:
        config = LoraConfig(
            rank=content["r"],
            alpha=content["lora_alpha"],
            target_modules=tuple(_module_names(layers) if by_last_part else layers),
            dropout=content.get("lora_dropout", 0.0),
            use_rslora=content.get("use_rslora", False),
        )
    except (KeyError, TypeError, UserError) as problem:
        raise UserError(f"{path}: {problem}; copy the folder again") from None
    return config, tensors


def _read_config(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; give a folder of adapters in PEFT's layout") from None
    except ValueError as problem:
        raise UserError(f"{path}: not valid JSON ({problem}); copy the file again") from None
    if not isinstance(content, dict):
        raise UserError(f"{path}: expected an object of options, got {type(content).__name__}; copy the file again")
    return content


def _read_tensors(path: Path) -> dict[str, Tensor]:
    if not path.is_file():
        raise UserError(f"{path}: no such file; adapters are opened from safetensors only")
    file = SafetensorsFile(path)
    tensors = {}
    with file.open_for_reading():
        for name, stored in file.entries.items():
            ours = name.removeprefix(_PREFIX)
            if ours == name or not ours.endswith(LORA_SUFFIXES) or len(stored.shape) != 2:
                raise UserError(f"{path}: {name}: not an adapter of a linear layer, so not supported")
            tensors[ours] = torch.empty(stored.shape, dtype=stored.dtype)
            file.read_into(tensors[ours], name, tuple(slice(0, size) for size in stored.shape))
    if not tensors:
        raise UserError(f"{path}: holds no tensors; copy the folder again")
    return tensors


def _adapted_layer_names(tensors: Mapping[str, Tensor]) -> list[str]:
    """The names of the layers that these tensors adapt."""
    return [name.removesuffix(LORA_SUFFIXES[0]) for name in tensors if name.endswith(LORA_SUFFIXES[0])]


def _module_names(layers: list[str]) -> list[str]:
    return sorted({name.rpartition(".")[2] for name in layers})
