"""The weights of a wrapped model: their first values, and their names and pieces in a folder.

Most families are stored as they are computed. Some are not: experts are one tensor each in a folder, and computed as one
stack. The rules for that are transformers' own, used in both directions, so that an export opens anywhere.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lmforge.errors import UserError
from lmforge.interop.transformers_causal_lm import build_causal_lm
from lmforge.model.init_weights import tensor_seed


@torch.no_grad()
def initial_values(config_dict: dict[str, Any], seed: int) -> Iterator[tuple[str, Tensor]]:
    """(name, first value in fp32 on the CPU) of every tensor, as the family's own initialization draws it.

    Each module draws from a generator of its own, seeded with the seed and its name, so that values depend on nothing else.
    Raises UserError where transformers leaves a tensor without a value.
    """
    causal = build_causal_lm(config_dict)
    for name, module in causal.named_modules():
        if not module._parameters:
            continue
        with torch.device("cpu"), torch.random.fork_rng(devices=[]):
            torch.manual_seed(tensor_seed(seed, name))
            for short, parameter in module._parameters.items():
                if parameter is not None:
                    module._parameters[short] = torch.nn.Parameter(torch.full(parameter.shape, torch.nan))
            causal._init_weights(module)
        for short, value in module._parameters.items():
            if value is None:
                continue
            if value.isnan().any():
                raise UserError(f"model: transformers does not initialize {name}.{short}; start from a folder's weights")
            yield f"{name}.{short}", value.detach()
            module._parameters[short] = torch.nn.Parameter(value.to("meta"))  # so that one module is in memory at a time


@dataclass(frozen=True)
class TensorConversion:
    """Stored tensors that together make one or several of the model's, the first of which is `target_name`."""

    target_name: str
    source_patterns: dict[str, str]  # stored name → the pattern that it matches
    converter: Any
    causal_lm: Any

    def convert(self, read_tensor: Callable[[str], Tensor]) -> dict[str, Tensor]:
        """The model's tensors by name, made of the stored ones that `read_tensor` returns (of meta tensors: shapes only)."""
        rule = deepcopy(self.converter)
        for stored, pattern in self.source_patterns.items():
            rule.add_tensor(self.target_name, stored, pattern, lambda stored=stored: read_tensor(stored))
        try:
            made = rule.convert(self.target_name, model=self.causal_lm, config=self.causal_lm.config)
        except (RuntimeError, ValueError, KeyError, IndexError) as problem:
            raise UserError(f"{self.target_name}: its parts do not match ({problem}); copy the folder again") from None
        return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}


def map_stored_names(config_dict: dict[str, Any], stored: Iterable[str]) -> tuple[dict[str, str], list[TensorConversion]]:
    """The tensors of a folder: (our name by stored name, those that must be converted)."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

    causal = build_causal_lm(config_dict)
    state, prefix = causal.state_dict(), causal.base_model_prefix
    rules = get_model_conversion_mapping(causal)
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    by_pattern = {pattern: rule for rule in converters for pattern in rule.source_patterns}
    ignored = [re.compile(pattern) for pattern in causal._keys_to_ignore_on_load_unexpected or ()]
    plain: dict[str, str] = {}
    conversions: dict[str, TensorConversion] = {}
    for name in sorted(stored, key=dot_natural_key):  # experts in numerical order
        ours, pattern = rename_source_key(name, renamings, converters, prefix, state)
        if ours not in state and name in state:
            ours, pattern = name, None
        if ours not in state and any(each.search(ours) for each in ignored):
            continue
        if pattern is None:
            plain[name] = ours
        else:
            conversions.setdefault(ours, TensorConversion(ours, {}, by_pattern[pattern], causal)).source_patterns[name] = (
                pattern
            )
    return plain, list(conversions.values())


def to_stored_tensors(config_dict: dict[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A model's tensors by the names and in the pieces of folders of its family."""
    from transformers.core_model_loading import revert_weight_conversion

    return dict(revert_weight_conversion(build_causal_lm(config_dict), dict(tensors)))
