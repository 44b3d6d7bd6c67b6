"""transformers' own models: configs, modules without weights, and the differences of families.

Families differ in more than their configs say: which list holds the blocks, what is done to logits,
which constants lie beside the weights. These are determined by inspecting the modules and by
running them on small inputs. Models that a `LanguageModel` cannot express are refused. No code that
comes with a folder runs.

Most families are stored as they are computed. Some are not: experts are one tensor each in a
folder, and computed as one stack. The rules for that are transformers' own, used in both
directions, so that an export opens anywhere.
"""

import logging
import re
from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from lmforge.core.errors import UserError, how_to_install, prefix_errors
from lmforge.core.files.untrusted import quoted
from lmforge.core.model.config_json import reject_extreme_sizes
from lmforge.core.model.layers import cap_logits
from lmforge.core.options.ranges import MODEL_RANGES

MIN_TRANSFORMERS_VERSION = (5, 20)
# Their positions are slopes on the distance of two tokens, so they do not need document boundaries.
ALIBI_MODEL_TYPES = ("bloom", "mpt")
_ATTENTION_LAYER_TYPES = {"full_attention", "sliding_attention", "chunked_attention"}
_HEAD_NAME = "lm_head"
# The kernel that multiplies all experts at once needs rows of whole 16 bytes, 8 numbers in bf16;
# else one by one.
_GROUPED_MM_MULTIPLE = 8


def import_transformers() -> Any:
    """transformers, imported and silent. Raises UserError where it is not installed, or too old."""
    # It imports torchao, if that is installed, whose warnings do not concern the user of another
    # feature.
    for name in ("torchao", "torch.utils._pytree"):
        logging.getLogger(name).setLevel(logging.ERROR)
    try:
        import transformers
    except ImportError:
        raise UserError(
            "transformers is not installed, and this model needs it;"
            f" {how_to_install('transformers')}"
        ) from None
    version = transformers.__version__
    if tuple(map(int, version.split(".")[:2])) < MIN_TRANSFORMERS_VERSION:
        raise UserError(
            f"transformers {version} is too old to be wrapped; {how_to_install('transformers')}"
        )
    transformers.utils.logging.set_verbosity_error()
    return transformers


def read_pretrained_config(content: dict[str, Any], source: str) -> Any:
    """transformers' own configuration object. Code that comes with a folder is never run."""
    transformers = import_transformers()
    model_type = str(content.get("model_type"))
    if content.get("quantization_config"):
        raise UserError(
            f"{source}: quantization_config: quantized weights cannot be trained; use the"
            " unquantized model"
        )
    if model_type not in transformers.CONFIG_MAPPING:
        why = "it is unknown to it"
        if "auto_map" in content:
            why = "its code comes with the folder, and such code is not run"
        raise UserError(
            f'{source}: model_type: transformers {transformers.__version__} has no "{model_type}"'
            f" ({why}); use another model"
        )
    with prefix_errors(source):
        reject_extreme_sizes(content)
    try:
        fields = {name: value for name, value in content.items() if name != "generation_config"}
        # Infinity, as transformers writes it.
        fields = transformers.PreTrainedConfig._decode_special_floats(fields)
        config = transformers.CONFIG_MAPPING[model_type].from_dict(fields)
    except Exception as error:  # whatever a family's own checks raise
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        problem = f"{type(error).__name__}: {' '.join(lines)}"[:200]
        raise UserError(
            f"{source}: transformers cannot read it ({problem}); copy the file again"
        ) from None
    if type(config) not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        raise UserError(
            f"{source}: transformers has no causal language model of type {model_type}; use one"
            " that writes text"
        )
    if config.get_text_config() is not config:
        raise UserError(
            f"{source}: a {model_type} model reads more than text; use the folder of its text model"
        )
    # Of layers that differ the config's own numbers are read: they only estimate.
    config.allow_global_per_layer_attribute_access = True
    for name, bounds in MODEL_RANGES.items():
        value = getattr(config, name, None)
        if isinstance(value, int | float) and not -bounds["le"] <= value <= bounds["le"]:
            raise UserError(
                f"{source}: {name}: expected a number of at most {bounds['le']:.16g}, got"
                f" {quoted(value)}"
            )
    if getattr(config, "output_router_logits", False):
        config.output_router_logits = False
    return config


def build_causal_lm(content: dict[str, Any]) -> Any:
    """transformers' own model on the meta device, in fp32 and without dropout. Raises UserError."""
    transformers = import_transformers()
    with torch.device("meta"):
        config = read_pretrained_config(content, "model")
        causal = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    stacks = [
        each for name, each in causal.named_parameters() if ".experts." in name and each.ndim == 3
    ]
    if any(size % _GROUPED_MM_MULTIPLE for stack in stacks for size in stack.shape[1:]):
        causal.set_experts_implementation("eager")
    # Some families give a tensor a dtype of its own.
    return causal.eval().float()


def find_block_list(base_model: nn.Module) -> str:
    """The name of the longest list of modules of one class that is in no other list.

    Raises UserError where there is none.
    """
    lists = {
        name: module
        for name, module in base_model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module)
    }
    outer = [name for name in lists if not any(name.startswith(f"{other}.") for other in lists)]
    alike = [name for name in outer if len({type(block) for block in lists[name]}) == 1]
    if not alike:
        raise UserError(
            f"model: {type(base_model).__name__} has no list of blocks of one class to shard; use"
            " another model"
        )
    return max(alike, key=lambda name: len(lists[name]))


def find_logit_transform(causal: Any, hidden_size: int) -> tuple[float, float | None]:
    """(scale, softcap) of the logits of a model.

    They are softcap · tanh(scale · (product + bias) / softcap) of its head's products. Found by
    trying: its own forward runs with a small head, on given hidden states in place of the base
    model. Raises UserError where it does anything else to its logits.
    """
    name = find_base_model_name(causal)
    head = causal.get_output_embeddings()
    base = causal.get_submodule(name)
    softcap = getattr(causal.config, "final_logit_softcapping", None)
    with torch.device("cpu"), torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        hidden = torch.randn(1, 3, hidden_size)
        small = nn.Linear(hidden_size, 5, bias=False)
        plain = 100 * torch.randn(1, 3, 5)  # so large that soft-capped ones would differ
        small.weight.copy_(torch.linalg.lstsq(hidden[0], plain[0]).solution.t())
        plain = small(hidden)
        try:
            setattr(causal, name, _FixedBaseModel(base, hidden))
            causal.set_output_embeddings(small)
            logits = causal(input_ids=torch.zeros(1, 3, dtype=torch.long)).logits
        except (RuntimeError, TypeError, ValueError, AttributeError, KeyError) as problem:
            reason = str(problem)[:100]
            raise UserError(
                f"model: {type(causal).__name__} cannot be taken apart ({reason}); use another"
                " model"
            ) from None
        finally:
            setattr(causal, name, base)
            causal.set_output_embeddings(head)
        if softcap is not None and torch.allclose(
            logits, cap_logits(plain, softcap), rtol=1e-4, atol=1e-3
        ):
            return 1.0, softcap
        scale = float((logits * plain).sum() / plain.square().sum())
        alike = torch.allclose(logits, scale * plain, rtol=1e-4, atol=1e-3 * abs(scale))
    if not alike or (head.bias is not None and abs(scale - 1) >= 1e-5):
        raise UserError(
            f"model: {type(causal).__name__} changes its logits in a way that lmforge's loss does"
            " not (it knows a scale, a bias, and final_logit_softcapping); use another model"
        )
    return (1.0 if abs(scale - 1) < 1e-5 else scale), None


class _FixedBaseModel(nn.Module):
    """Replaces a base model: returns the hidden states that it was made with."""

    def __init__(self, base: nn.Module, hidden: Tensor) -> None:
        super().__init__()
        self.__dict__ |= {"base": base, "hidden": hidden}

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return _FixedModelOutput(last_hidden_state=self.hidden)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.base, name)
        # Some models read a factor of their base model, or call a part of it.
        return value if isinstance(value, int | float) else self


class _FixedModelOutput(SimpleNamespace):
    def __getattr__(self, name: str) -> None:
        return None

    def __getitem__(self, index: int) -> Tensor:
        return self.last_hidden_state


@torch.no_grad()
def constant_buffers(causal: Any) -> list[tuple[nn.Module, str, Tensor]]:
    """(module, name, value on the CPU) of a model's buffers, such as rotary frequencies.

    They are those that are not stored with its weights. On the meta device they have no values;
    transformers computes them where it initializes weights.
    """
    constants = []
    for name, module in causal.named_modules():
        if any(isinstance(value, Tensor) and value.is_meta for value in vars(module).values()):
            raise UserError(
                f"model: {name} keeps tensors that are neither weights nor buffers; use another"
                " model"
            )
        buffers = initial_buffers(causal, module)
        for key in sorted(module._non_persistent_buffers_set & buffers.keys()):
            value = buffers[key]
            if value is None:
                raise UserError(
                    f"model: transformers does not say what the first value of {name}.{key} is; use"
                    " another model"
                )
            module._buffers[key] = value
            constants.append((module, key, value))
    return constants


@torch.no_grad()
def initial_buffers(causal: Any, module: nn.Module) -> dict[str, Tensor | None]:
    """The first values of a module's own buffers, on the CPU, by name; None where transformers
    gives none. The module stays as it is.
    """
    buffers = {key: buffer for key, buffer in module._buffers.items() if buffer is not None}
    if not buffers:
        return {}
    with torch.device("cpu"):
        for key, buffer in buffers.items():
            unset = float("nan") if buffer.is_floating_point() else 0
            module._buffers[key] = torch.full(buffer.shape, unset, dtype=buffer.dtype)
        causal._init_weights(module)
    values = {key: module._buffers[key] for key in buffers}
    module._buffers |= buffers
    return {
        key: None if value is None or value.isnan().any() else value
        for key, value in values.items()
    }


def find_base_model_name(causal: Any) -> str:
    """The name of the one module beside the head.

    Raises UserError where there are several, or none.
    """
    parts = [
        name
        for name, part in causal.named_children()
        if name != _HEAD_NAME and [*part.parameters()]
    ]
    if len(parts) != 1:
        name = type(causal).__name__
        raise UserError(
            f"model: {name} is not one base model and a head ({', '.join(parts)}); use another"
            " model"
        )
    return parts[0]


def layers_with_state(causal: Any) -> list[str]:
    """Kinds of layers that may carry something from token to token other than by attention with a
    mask. Raises UserError for attention of a kind that is not known.
    """
    kinds = set(getattr(causal.config, "layer_types", None) or ()) - _ATTENTION_LAYER_TYPES
    # Which may choose keys before it masks them, beyond some length: no small model tells.
    unknown = {each for each in kinds if each.endswith("attention")} - {"linear_attention"}
    if unknown:
        raise UserError(
            f"model: {type(causal).__name__} has layers of {min(unknown)}, which documents of a"
            " sequence may see each other through; use another model"
        )
    if getattr(type(causal), "_is_stateful", False):
        kinds.add("recurrent")
    if any(isinstance(module, nn.Conv1d) for module in causal.modules()):
        kinds.add("convolution")
    return sorted(kinds)


def reject_unsupported_parts(causal: Any) -> None:
    name = type(causal).__name__
    head = causal.get_output_embeddings()
    if getattr(causal, _HEAD_NAME, None) is not head or not isinstance(head, nn.Linear):
        raise UserError(f"model: {name} has no plain {_HEAD_NAME}; use another model")
    named = causal.named_parameters(remove_duplicate=False)
    weights = [weight for key, weight in named if not key.startswith(_HEAD_NAME)]
    if len(set(weights)) < len(weights):
        raise UserError(
            f"model: {name} uses some weights in several places, which sharding would separate; use"
            " another model"
        )


@dataclass(frozen=True)
class TensorConversion:
    """Stored tensors that together make one or several of the model's.

    target_name: the first of these.
    """

    target_name: str
    source_patterns: dict[str, str]  # stored name → the pattern that it matches
    converter: Any
    causal: Any

    def convert(self, read_tensor: Callable[[str], Tensor]) -> dict[str, Tensor]:
        """The model's tensors by name, made of the stored ones that `read_tensor` returns.

        Of meta tensors only shapes are made.
        """
        rule = deepcopy(self.converter)
        for stored, pattern in self.source_patterns.items():
            rule.add_tensor(
                self.target_name, stored, pattern, lambda stored=stored: read_tensor(stored)
            )
        try:
            made = rule.convert(self.target_name, model=self.causal, config=self.causal.config)
        except (RuntimeError, ValueError, KeyError, IndexError) as problem:
            raise UserError(
                f"{self.target_name}: its parts do not match ({problem}); copy the folder again"
            ) from None
        return {
            name: value[0] if isinstance(value, list) else value for name, value in made.items()
        }


def map_stored_names(
    content: dict[str, Any], stored: Iterable[str]
) -> tuple[dict[str, str], list[TensorConversion]]:
    """The tensors of a folder: (our name by stored name, those that must be converted)."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import (
        WeightConverter,
        WeightRenaming,
        dot_natural_key,
        rename_source_key,
    )

    causal = build_causal_lm(content)
    state = causal.state_dict()
    prefix = causal.base_model_prefix
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
            ours = name
            pattern = None
        if ours not in state and any(each.search(ours) for each in ignored):
            continue
        if pattern is None:
            plain[name] = ours
        else:
            conversion = TensorConversion(ours, {}, by_pattern[pattern], causal)
            conversions.setdefault(ours, conversion).source_patterns[name] = pattern
    return plain, list(conversions.values())


def to_stored_tensors(content: dict[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A model's tensors by the names and in the pieces of folders of its family."""
    from transformers.core_model_loading import revert_weight_conversion

    return dict(revert_weight_conversion(build_causal_lm(content), dict(tensors)))
