"""Low-rank adapters added to the weights of a model, sharded or not."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lmforge.core.errors import UserError
from lmforge.core.model.build import build_model
from lmforge.core.model.init_weights import LORA_SUFFIXES, local_part
from lmforge.core.model.layers import LanguageModel
from lmforge.core.model.lora import lora_delta
from lmforge.core.model.lora_config import LoraConfig, adapted_name

# Our head.
LM_HEAD_WEIGHT = "lm_head.weight"


def copy_part(parameter: Tensor, whole: Tensor) -> None:
    """Fill this rank's part of a parameter from the whole tensor."""
    target, part = local_part(parameter)
    target.copy_(whole[part])


@torch.no_grad()
def merge_adapters(
    model: LanguageModel, lora_config: LoraConfig, tensors: Mapping[str, Tensor], source: str
) -> None:
    """Add low-rank adapters, full tensors by our names, to the weights of a model in place; other
    tensors replace its own.

    In a sharded model each rank adds to its own part; a pipeline stage may lack layers; adapters
    that the model has itself stay as they are. Raises UserError, beginning with `source` (where
    they come from), unless each fits the model.
    """
    local = dict(model.named_parameters())
    full_model = full_model_of(model)
    shapes = {name: [*each.shape] for name, each in full_model.named_parameters()}
    whole = {name: tensor for name, tensor in tensors.items() if not name.endswith(LORA_SUFFIXES)}
    tied = (model.embedding_names[0], "lm_head") if model.config.tie_word_embeddings else ()
    if any(f"{layer}{end}" in tensors for layer in tied for end in (".weight", LORA_SUFFIXES[0])):
        raise UserError(
            f"{source}: changes the embedding or the head, which its model ties; export that to a"
            " folder first"
        )
    for name, value in whole.items():
        _check_shape(source, name, shapes, [*value.shape])
        if name in local:
            target, part = local_part(local[name])
            target.copy_(value[part])
    never_transposed = {LM_HEAD_WEIGHT, *(f"{each}.weight" for each in model.embedding_names)}
    for layer in dict.fromkeys(
        name.removesuffix(end) for name in tensors for end in LORA_SUFFIXES if name.endswith(end)
    ):
        name = adapted_name(layer)
        transposed = model.config.family.transposed and name not in never_transposed
        a, b = (tensors.get(f"{layer}{end}") for end in LORA_SUFFIXES)
        if a is None or b is None or (*a.shape[:-2], a.shape[-2]) != (*b.shape[:-2], b.shape[-1]):
            raise UserError(
                f"{source}: {layer}: not a pair of matrices of one rank; copy the folder again"
            )
        _check_shape(
            source,
            name,
            shapes,
            [a.shape[1], b.shape[0]] if transposed else [*b.shape[:-1], a.shape[-1]],
        )
        if name in local:
            target, part = local_part(local[name])
            if a.ndim == 3:  # only this rank's experts
                a, b, part = a[part[0]], b[part[0]], (slice(None), *part[1:])
            target += lora_delta(lora_config.scaling, a, b, transposed)[part].to(target.device)


def _check_shape(source: str, name: str, shapes: Mapping[str, list[int]], sizes: list[int]) -> None:
    if shapes.get(name) != sizes:
        ours = "has none" if name not in shapes else f"has {shapes[name]}"
        raise UserError(
            f"{source}: adapters for another model: they are for {name} {sizes}, and the model"
            f" {ours}"
        )


def full_model_of(model: Any) -> Any:
    """The full model, for names and shapes, of which `model` may be a pipeline stage; a wrapped
    model is never one.
    """
    return (
        model
        if model.config.implementation == "transformers"
        else build_model(model.config, "meta")
    )
