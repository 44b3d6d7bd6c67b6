"""Any causal model of the transformers library, wrapped into what the rest of the house asks of a model.

Its modules and tensor names are theirs; the head is ours, so that logits are never whole. What families differ in is
found by looking and by trying: the repeated block, what is done to logits, which constants are kept beside the weights.
What a LanguageModel cannot express is refused when the model is built. There is no dropout, and no code of a folder runs.
"""

import inspect
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from lmforge.errors import UserError
from lmforge.interop.transformers_config import (
    ALIBI_MODEL_TYPES,
    TransformersConfig,
    import_transformers,
    read_pretrained_config,
)
from lmforge.interop.transformers_incremental import TransformersIncrementalDecoder, TransformersKVCache
from lmforge.model.layers import LanguageModel, LMHead

_ATTENTION_LAYER_TYPES = {"full_attention", "sliding_attention", "chunked_attention"}
_HEAD_NAME = "lm_head"
# The kernel that multiplies all experts at once wants rows of whole 16 bytes, 8 numbers in bf16; else one by one.
_GROUPED_MM_MULTIPLE = 8


def build_causal_lm(config: TransformersConfig) -> Any:
    """transformers' own model of this shape on the meta device, in fp32 and without dropout. Raises UserError."""
    transformers = import_transformers()
    with torch.device("meta"):
        causal = transformers.AutoModelForCausalLM.from_config(
            read_pretrained_config(config.config_dict, "model"), dtype=torch.float32
        )
    stacks = [parameter for name, parameter in causal.named_parameters() if ".experts." in name and parameter.ndim == 3]
    if any(size % _GROUPED_MM_MULTIPLE for stack in stacks for size in stack.shape[1:]):
        causal.set_experts_implementation("eager")
    return causal.eval()


class TransformersModel(LanguageModel):
    """A causal model of transformers without its loss, under its own tensor names."""

    config: TransformersConfig

    def __init__(self, config: TransformersConfig) -> None:
        super().__init__()
        self.config = config
        causal = build_causal_lm(config)
        _reject_unsupported_parts(causal)
        self._base_model_name = find_base_model_name(causal)
        base, head = causal.get_submodule(self._base_model_name), causal.get_output_embeddings()
        self._blocks_name = f"{self._base_model_name}.{find_block_list(base)}"
        self._takes_positions = "position_ids" in inspect.signature(base.forward).parameters
        if not self._takes_positions and config.model_type not in ALIBI_MODEL_TYPES:
            raise UserError(f"model: a {config.model_type} model cannot be told where documents begin; use another model")
        self._logit_scale = find_logit_scale(causal, head.in_features)
        self._constant_buffers, self._constants_device = constant_buffers(causal), torch.device("cpu")
        self.add_module(self._base_model_name, base)
        self.lm_head = LMHead(head.in_features, head.out_features)
        self.tie_weights()

    def tie_weights(self) -> None:
        if self.config.tie_word_embeddings:
            self.lm_head.weight = self.embeddings[0].weight  # type: ignore[assignment]

    @property
    def base_model(self) -> nn.Module:
        """transformers' model without its head."""
        return self.get_submodule(self._base_model_name)

    @property
    def embeddings(self) -> list[nn.Embedding]:
        return [self.base_model.get_input_embeddings()]  # type: ignore[operator]

    @property
    def blocks(self) -> nn.ModuleList:
        return self.get_submodule(self._blocks_name)  # type: ignore[return-value]

    @property
    def final_norm(self) -> nn.Module:
        children = [child for name, child in self.base_model.named_children() if "norm" in name or "ln" in name]
        return children[-1]

    def train(self, mode: bool = True) -> "TransformersModel":
        """Its modules stay as they are for reading: no dropout, no noise on routers."""
        super().train(mode)
        self.base_model.train(False)
        return self

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> "TransformersModel":
        super()._apply(fn, recurse)
        # Constants are no weights: `to_empty` has left them without values, and `to` in a dtype that is too narrow.
        self._move_constants(next(self.parameters()).device)
        return self

    def _move_constants(self, device: torch.device) -> None:
        self._constants_device = device
        for module, name, value in self._constant_buffers:
            module._buffers[name] = value.to(device)

    def new_cache(self) -> TransformersKVCache:
        """An empty one, for tokens that follow each other to be read into."""
        return TransformersKVCache(import_transformers().DynamicCache(config=self.base_model.config))

    def incremental_decoder(
        self, batch_size: int, max_length: int, *, device: torch.device, dtype: torch.dtype
    ) -> TransformersIncrementalDecoder:
        return TransformersIncrementalDecoder(self, max_length, device)

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        document_ids: Tensor,
        cache: TransformersKVCache | None = None,
        rng_keys: Tensor | None = None,
    ) -> Tensor:
        """Hidden states after the final norm: [rows, length, hidden_size], ready for `lm_head`.

        Args as in decoder.Decoder.forward, but nothing is dropped. Raises UserError for rows longer than the learned positions.
        """
        limit = self.config.max_sequence_length
        if limit is not None and tokens.shape[1] > limit:
            raise UserError(f"this model reads at most {limit} tokens in a row, not {tokens.shape[1]}: use shorter rows")
        if self._constants_device != tokens.device:  # weights may rest in host memory
            self._move_constants(tokens.device)
        places = {"position_ids": positions} if self._takes_positions else {}
        if cache is not None:
            positions, document_ids = cache.extend(positions, document_ids)
        base = self.base_model
        with document_attention_masks(base.config._attn_implementation, document_ids, positions):  # type: ignore[union-attr, arg-type]
            outcome = base(
                input_ids=tokens,
                # All seen: with it, transformers does not guess documents from positions.
                create_attention_mask=torch.ones_like(document_ids, dtype=torch.long),
                past_key_values=None if cache is None else cache.past_key_values,
                use_cache=cache is not None,
                return_dict=True,
                **places,
            )
        hidden = outcome.last_hidden_state
        return hidden if self._logit_scale == 1 else hidden * self._logit_scale


@contextmanager
def document_attention_masks(attn_implementation: str, document_ids: Tensor, positions: Tensor) -> Iterator[None]:
    """While entered, every mask that transformers makes for `attention` lets tokens see their own document only.

    Its rules (causal, sliding windows, chunks) are asked about positions within the document, not about slots of the row,
    so that a document is read the same wherever it stands. `documents`, `positions`: [rows, slots] of all keys.
    """
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS as MASKS

    usual, asked = MASKS[attn_implementation], 0

    def make(*args: Any, mask_function: Callable[..., Tensor], **rest: Any) -> Any:
        nonlocal asked
        asked += 1

        def seen(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            together = (document_ids[row, query] == document_ids[row, key]) & (key <= query)
            return together & mask_function(row, head, positions[row, query], positions[row, key])

        return usual(*args, mask_function=seen, **{**rest, "allow_is_causal_skip": False})

    MASKS[attn_implementation] = make
    try:
        yield
    finally:
        del MASKS[attn_implementation]
    if not asked:
        raise UserError(
            "model: this family attends without a mask, so documents in a row would see each other; use another model"
        )


def find_block_list(base_model: nn.Module) -> str:
    """The name of the longest list of modules of one class that is in no other list. Raises UserError where there is none."""
    lists = {name: module for name, module in base_model.named_modules() if isinstance(module, nn.ModuleList) and len(module)}
    outer = {name: found for name, found in lists.items() if not any(name.startswith(f"{other}.") for other in lists)}
    alike = [name for name, found in outer.items() if len({type(block) for block in found}) == 1]
    if not alike:
        raise UserError(
            f"model: {type(base_model).__name__} has no list of blocks of one class, so it cannot be spread; use another model"
        )
    return max(alike, key=lambda name: len(outer[name]))


def find_logit_scale(causal_lm: Any, hidden_size: int) -> float:
    """What `causal` multiplies its logits by. Raises UserError where it does more to them than that.

    Found by trying: its own forward is run with a small head on hidden states that are given, in place of the base model.
    """
    name, head = find_base_model_name(causal_lm), causal_lm.get_output_embeddings()
    base = causal_lm.get_submodule(name)
    with torch.device("cpu"), torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        hidden = torch.randn(1, 3, hidden_size)
        small = nn.Linear(hidden_size, 5, bias=False)
        plain = 100 * torch.randn(1, 3, 5)  # so large that capped ones would differ
        small.weight.copy_(torch.linalg.lstsq(hidden[0], plain[0]).solution.t())
        plain = small(hidden)
        try:
            setattr(causal_lm, name, _FixedBaseModel(hidden))
            causal_lm.set_output_embeddings(small)
            logits = causal_lm(input_ids=torch.zeros(1, 3, dtype=torch.long)).logits
            scale = float((logits * plain).sum() / plain.square().sum())
            alike = torch.allclose(logits, scale * plain, rtol=1e-4, atol=1e-3 * abs(scale))
        except (RuntimeError, TypeError, ValueError, AttributeError, KeyError) as problem:
            raise UserError(
                f"model: {type(causal_lm).__name__} cannot be taken apart ({str(problem)[:100]}); use another model"
            ) from None
        finally:
            setattr(causal_lm, name, base)
            causal_lm.set_output_embeddings(head)
    if not alike:
        raise UserError(
            f"model: {type(causal_lm).__name__} bends its logits (final_logit_softcapping or the like), which lmforge's loss does"
            " not; take that out of its config.json, or use another model"
        )
    return 1.0 if abs(scale - 1) < 1e-5 else scale


class _FixedBaseModel(nn.Module):
    """Stands in for a base model: returns the hidden states it was made with, and nothing else."""

    def __init__(self, hidden: Tensor) -> None:
        super().__init__()
        self.__dict__["hidden"] = hidden

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return _FixedModelOutput(last_hidden_state=self.hidden)

    def __getattr__(self, name: str) -> Any:
        return self  # some call a part of their base model


class _FixedModelOutput(SimpleNamespace):
    def __getattr__(self, name: str) -> None:
        return None

    def __getitem__(self, index: int) -> Tensor:
        return self.last_hidden_state


@torch.no_grad()
def constant_buffers(causal_lm: Any) -> list[tuple[nn.Module, str, Tensor]]:
    """(module, name, value on the CPU) of what a model keeps beside its weights, such as rotary frequencies.

    On the meta device they have no values; transformers computes them anew where it gives weights their first values.
    """
    found = []
    for name, module in causal_lm.named_modules():
        there = {key: buffer for key, buffer in module._buffers.items() if buffer is not None}
        if any(isinstance(value, Tensor) and value.is_meta for value in vars(module).values()):
            raise UserError(f"model: {name} keeps tensors that are neither weights nor buffers; use another model")
        if kept := there.keys() - module._non_persistent_buffers_set:
            raise UserError(f"model: {name}.{min(kept)} is stored with the weights but not trained, which is not supported yet")
        if not there:
            continue
        with torch.device("cpu"):
            for key, buffer in there.items():
                unset = float("nan") if buffer.is_floating_point() else 0
                module._buffers[key] = torch.full(buffer.shape, unset, dtype=buffer.dtype)
            causal_lm._init_weights(module)
        for key in there:
            value = module._buffers[key]
            assert value is not None
            if value.is_floating_point() and value.isnan().any():
                raise UserError(f"model: transformers does not say what {name}.{key} begins as; use another model")
            found.append((module, key, value))
    return found


def find_base_model_name(causal_lm: Any) -> str:
    """The name of what `causal` has beside its head. Raises UserError where that is more than one thing, or none."""
    parts = [name for name, part in causal_lm.named_children() if name != _HEAD_NAME and any(True for _ in part.parameters())]
    if len(parts) != 1:
        raise UserError(
            f"model: {type(causal_lm).__name__} is not one base model and a head ({', '.join(parts)}); use another model"
        )
    return parts[0]


def _reject_unsupported_parts(causal_lm: Any) -> None:
    kind, config = type(causal_lm).__name__, causal_lm.config
    other = set(getattr(config, "layer_types", None) or ()) - _ATTENTION_LAYER_TYPES
    if other or getattr(type(causal_lm), "_is_stateful", False):
        raise UserError(
            f"model: {kind} has layers that are no attention ({', '.join(sorted(other)) or 'recurrent'}), in which documents"
            " of a row would see each other; use another model"
        )
    head = causal_lm.get_output_embeddings()
    if getattr(causal_lm, _HEAD_NAME, None) is not head or not isinstance(head, nn.Linear):
        raise UserError(f"model: {kind} has no plain {_HEAD_NAME}; use another model")
    shared = Counter(
        id(part) for name, part in causal_lm.named_parameters(remove_duplicate=False) if not name.startswith(_HEAD_NAME)
    )
    if max(shared.values()) > 1:
        raise UserError(f"model: {kind} uses some weights in several places, which sharding would part; use another model")
    if head.bias is not None:
        raise UserError(f"model: the head of {kind} has a bias, which lmforge's loss has not; use another model")


def count_wrapped_parameters(config: TransformersConfig) -> tuple[int, int, int, int]:
    """The fields of a ParameterCount (model/flops.py)."""
    model = TransformersModel(config)
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    embedding = model.embeddings[0].weight.numel()
    theirs = model.base_model.config
    experts, chosen = (
        next((value for name in names if (value := getattr(theirs, name, None))), 1)
        for names in (("num_local_experts", "num_experts", "n_routed_experts"), ("num_experts_per_tok", "moe_topk"))
    )
    routed = sum(size for name, size in sizes.items() if ".experts." in name)
    total = sum(sizes.values())
    idle = routed - routed * chosen // experts
    matrices = sum(parameter.numel() for parameter in model.blocks.parameters() if parameter.ndim == 2)
    return total, embedding, total - idle - (0 if config.tie_word_embeddings else embedding), matrices
