"""The weights of a wrapped model: their first values, and what they are called and how they are cut in a folder.

Most families are stored as they are computed. Some are not: experts, one tensor each in a folder, are computed as one
stack. transformers keeps the rules for that, and they are used both ways, so that what is exported opens anywhere.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lmforge.errors import UserError
from lmforge.interop.transformers_config import TransformersConfig
from lmforge.interop.transformers_model import build_causal_lm


@torch.no_grad()
def initial_values(config: TransformersConfig, seed_of: Callable[[str], int]) -> Iterator[tuple[str, Tensor]]:
    """(name, first value in fp32 on the CPU) of every tensor, as the family's own initialisation draws it.

    Each module draws from a generator of its own, seeded with key(its name), so that values depend on nothing else. Raises
    UserError where transformers leaves a tensor without a value.
    """
    causal = build_causal_lm(config)
    for name, module in causal.named_modules():
        if not module._parameters:
            continue
        with torch.device("cpu"), torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed_of(name))
            for short, parameter in module._parameters.items():
                if parameter is not None:
                    module._parameters[short] = torch.nn.Parameter(torch.full(parameter.shape, torch.nan))
            causal._init_weights(module)
        for short, value in module._parameters.items():
            if value is None:
                continue
            if value.isnan().any():
                raise UserError(
                    f"model: transformers does not say what {name}.{short} begins as; start from a folder's weights"
                )
            yield f"{name}.{short}", value.detach()
            module._parameters[short] = torch.nn.Parameter(value.to("meta"))  # or the whole model would be here in the end


@dataclass(frozen=True)
class TensorConversion:
    """Stored tensors that are together one or several of the model's; `first` is the name of the first of those."""

    target_name: str
    source_patterns: dict[str, str]  # stored name → the pattern that it fits
    converter: Any
    causal_lm: Any

    def convert(self, read_tensor: Callable[[str], Tensor]) -> dict[str, Tensor]:
        """The model's tensors by name, out of the stored ones that `read` gives (meta tensors: shapes alone)."""
        rule = deepcopy(self.converter)
        for stored, pattern in self.source_patterns.items():
            rule.add_tensor(self.target_name, stored, pattern, lambda stored=stored: read_tensor(stored))
        try:
            made = rule.convert(self.target_name, model=self.causal_lm, config=self.causal_lm.config)
        except (RuntimeError, ValueError, KeyError, IndexError) as problem:
            raise UserError(f"{self.target_name}: its parts do not fit together ({problem}); copy the folder again") from None
        return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}


def map_stored_names(config: TransformersConfig, stored: Iterable[str]) -> tuple[dict[str, str], list[TensorConversion]]:
    """What the tensors of a folder are here: (our name by stored name, those that have to be joined)."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

    causal = build_causal_lm(config)
    state, prefix = causal.state_dict(), causal.base_model_prefix
    rules = get_model_conversion_mapping(causal)
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    by_pattern = {pattern: rule for rule in converters for pattern in rule.source_patterns}
    ignored = [re.compile(pattern) for pattern in causal._keys_to_ignore_on_load_unexpected or ()]
    plain: dict[str, str] = {}
    joints: dict[str, TensorConversion] = {}
    for name in sorted(stored, key=dot_natural_key):  # experts in the order of their numbers
        ours, pattern = rename_source_key(name, renamings, converters, prefix, state)
        if ours not in state and name in state:
            ours, pattern = name, None
        if ours not in state and any(each.search(ours) for each in ignored):
            continue
        if pattern is None:
            plain[name] = ours
        else:
            joints.setdefault(ours, TensorConversion(ours, {}, by_pattern[pattern], causal)).source_patterns[name] = pattern
    return plain, list(joints.values())


def to_stored_tensors(config: TransformersConfig, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A model's tensors under the names and in the pieces in which folders of its family hold them."""
    from transformers.core_model_loading import revert_weight_conversion

    return dict(revert_weight_conversion(build_causal_lm(config), dict(tensors)))
