"""Any causal model of the transformers library, wrapped as a LanguageModel.

Its modules and tensor names are those of transformers; the head is ours, so that the full logits
never exist. There is no dropout. Incremental decoding uses the cache of transformers, which has one
length for all sequences: they are padded at their left, and every sequence is computed again when
another one joins. That works for any family, and is slower than serve/decoding/incremental.py.
"""

import inspect
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from lmforge.core.errors import UserError
from lmforge.core.model.config import ModelConfig
from lmforge.core.model.config_json import NUM_EXPERTS_FIELDS
from lmforge.core.model.family import Family
from lmforge.core.model.init_weights import LORA_SUFFIXES, InitialValue, stored_buffers
from lmforge.core.model.layers import LanguageModel, LMHead, to_autocast_dtype
from lmforge.hf.transformers_causal_lm import (
    ALIBI_MODEL_TYPES,
    build_causal_lm,
    constant_buffers,
    find_base_model_name,
    find_block_list,
    find_logit_transform,
    import_transformers,
    layers_with_state,
    read_pretrained_config,
    reject_unsupported_parts,
)
from lmforge.hf.transformers_init import family_initial_values
from lmforge.hf.transformers_packing import TOLERANCE, packing_error


@dataclass(frozen=True)
class TransformersConfig(ModelConfig):
    """The config of any causal model of transformers.

    `config_dict`, the config.json, decides; the other fields repeat it.

    A field that a family does not have (head_dim, intermediate_size) is estimated from its other
    numbers.
    """

    config_dict: dict[str, Any] = field(default_factory=dict, hash=False)
    # That of learned positions.
    max_sequence_length: int | None = None
    implementation = "transformers"
    family = Family(architecture="", classifier="", why_not_split="transformers computes it")

    def __post_init__(self) -> None:
        """Nothing is derived or refused: transformers has checked the content."""

    def new_module(self) -> "TransformersModel":
        return TransformersModel(self)

    @property
    def rotary_positions(self) -> int | None:
        rotary = {"rope_parameters", "rope_scaling", "rope_theta"} & self.config_dict.keys()
        positions = self.config_dict.get("max_position_embeddings")
        return positions if rotary and isinstance(positions, int) else None

    def counted_parameters(self) -> tuple[int, int, int, int]:
        return _count_parameters(json.dumps(self.config_dict, sort_keys=True))


def _first(config: Any, *names: str, default: Any = 0) -> Any:
    """The first of these fields of transformers' config that is neither missing nor None nor 0."""
    values = (getattr(config, name, None) for name in names)
    return next(filter(None, values), default)


def to_transformers_config(content: dict[str, Any], source: str) -> TransformersConfig:
    """The config that a config.json describes.

    Raises UserError, beginning with `source`, for what cannot be wrapped.
    """
    content = dict(content)
    generation = content.pop("generation_config", None)
    theirs = read_pretrained_config(content, source)
    first = partial(_first, theirs)
    heads = first("num_attention_heads", default=1)
    end_tokens = getattr(theirs, "eos_token_id", None)
    if isinstance(end_tokens, list):
        end_tokens = tuple(end_tokens)
    width = first("hidden_size")
    longest = first("max_position_embeddings")
    # Rotary angles and slopes have no end; tables of learned positions do.
    slopes = theirs.model_type in ALIBI_MODEL_TYPES or first("alibi", default=False)
    unbounded = first("rope_parameters") or slopes or not longest
    return TransformersConfig(
        vocab_size=first("vocab_size"),
        hidden_size=width,
        num_hidden_layers=first("num_hidden_layers"),
        num_attention_heads=heads,
        intermediate_size=first("intermediate_size", "ffn_dim", default=4 * width),
        num_key_value_heads=first("num_key_value_heads", "num_kv_heads", default=heads),
        head_dim=first("head_dim", default=width // heads),
        model_type=theirs.model_type,
        max_position_embeddings=longest or 2048,
        tie_word_embeddings=bool(first("tie_word_embeddings", default=False)),
        initializer_range=first("initializer_range", "init_std", default=0.02),
        eos_token_id=end_tokens,
        final_logit_softcapping=first("final_logit_softcapping", default=None),
        generation_config=generation,
        config_dict=content,
        max_sequence_length=None if unbounded else longest,
    )


class TransformersModel(LanguageModel):
    """A causal model of transformers without its loss, under its own tensor names."""

    config: TransformersConfig
    has_dropout = False

    def __init__(self, config: TransformersConfig, keeps_documents_apart: bool = False) -> None:
        """`keeps_documents_apart`: it is known to, or to be measured (transformers_packing.py)."""
        super().__init__(config)
        causal = build_causal_lm(config.config_dict)
        if not keeps_documents_apart:
            _reject_leaks(causal, config)
        reject_unsupported_parts(causal)
        self._base_model_name = find_base_model_name(causal)
        base = causal.get_submodule(self._base_model_name)
        head = causal.get_output_embeddings()
        self.blocks_name = f"{self._base_model_name}.{find_block_list(base)}"
        embedding = causal.get_input_embeddings()
        self.embedding_names = tuple(
            name for name, module in causal.named_modules() if module is embedding
        )
        embedding.register_forward_hook(lambda module, args, hidden: to_autocast_dtype(hidden))
        self._takes_positions = "position_ids" in inspect.signature(base.forward).parameters
        if not self._takes_positions and config.model_type not in ALIBI_MODEL_TYPES:
            raise UserError(
                f"model: a {config.model_type} model does not support document boundaries; use"
                " another model"
            )
        self._logit_scale, softcap = find_logit_transform(causal, head.in_features)
        self._constant_buffers = constant_buffers(causal)
        self._constants_device = torch.device("cpu")
        self.add_module(self._base_model_name, base)
        self.lm_head = LMHead(
            head.in_features, head.out_features, bias=head.bias is not None, softcap=softcap
        )
        self.tie_weights()

    def initial_values(
        self, shapes: Mapping[str, torch.Size], seed: int, embedding_std: float | None = None
    ) -> Iterator[tuple[str, InitialValue | Tensor]]:
        """(name, first value) of the parameters of these names.

        The family itself initializes them, and adapters are as ours.
        """
        if embedding_std is not None:
            raise UserError(
                "model.embedding_initializer_range: transformers initialises this model; leave that"
                " option out"
            )
        yield from family_initial_values(
            build_causal_lm(self.config.config_dict), shapes.keys(), seed
        )
        yield from super().initial_values(
            {name: shapes[name] for name in shapes if name.endswith(LORA_SUFFIXES)}, seed
        )

    @property
    def base_model(self) -> nn.Module:
        """transformers' model without its head."""
        return self.get_submodule(self._base_model_name)

    def train(self, mode: bool = True) -> "TransformersModel":
        """The modules of transformers stay in evaluation mode: no dropout, no noise on routers."""
        super().train(mode)
        self.base_model.train(False)
        return self

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> "TransformersModel":
        before = dict(stored_buffers(self))
        super()._apply(fn, recurse)
        # What is stored but not trained keeps its dtype, such as the biases of routers.
        for name, now in stored_buffers(self):
            if now.dtype != before[name].dtype:
                owner, _, key = name.rpartition(".")
                self.get_submodule(owner)._buffers[key] = before[name].to(now.device)
        # Constants are not weights: `to_empty` leaves them without values, and `to` in a dtype of
        # too few bits.
        self._move_constants(next(self.parameters()).device)
        return self

    def _move_constants(self, device: torch.device) -> None:
        self._constants_device = device
        for module, name, value in self._constant_buffers:
            module._buffers[name] = value.to(device)

    def incremental_decoder(
        self,
        batch_size: int,
        max_length: int,
        *,
        device: torch.device,
        dtype: torch.dtype,
        records_experts: bool = False,
    ) -> "TransformersIncrementalDecoder":
        assert not records_experts  # refused before
        return TransformersIncrementalDecoder(self, max_length, device)

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        document_ids: Tensor,
        cache: Any = None,
        rng_keys: Tensor | None = None,
        document_starts: Tensor | None = None,
        routed_experts: Tensor | None = None,
    ) -> Tensor:
        """Hidden states after the final norm, [sequences, length, hidden_size], for `lm_head`.

        Args as in LanguageModel.forward, without dropout; `document_starts` and `routed_experts`
        are not used. `cache` is transformers'; with it, `positions` and `document_ids` are those of
        all tokens so far. Raises UserError for sequences longer than the learned positions.
        """
        length = tokens.shape[1]
        self.config.check_length(length)
        if self._constants_device != tokens.device:  # weights may be offloaded to host memory
            self._move_constants(tokens.device)
        extra = {"position_ids": positions[:, -length:]} if self._takes_positions else {}
        base: Any = self.base_model
        with document_attention_masks(base.config._attn_implementation, document_ids, positions):
            output = base(
                input_ids=tokens,
                # All ones: with a mask, transformers does not derive documents from positions.
                attention_mask=torch.ones_like(document_ids, dtype=torch.long),
                past_key_values=cache,
                use_cache=cache is not None,
                return_dict=True,
                **extra,
            )
        hidden = output.last_hidden_state
        return hidden if self._logit_scale == 1 else hidden * self._logit_scale


def _reject_leaks(causal: Any, config: TransformersConfig) -> None:
    """Raise UserError where packed documents would see each other through layers with a state."""
    states = layers_with_state(causal)
    if not states:
        return
    error = packing_error(json.dumps(config.config_dict, sort_keys=True), unmeasured_model)
    if error is not None and error <= TOLERANCE:
        return
    measured = (
        "no small model of its config runs, to measure it"
        if error is None
        else f"{error:.1g} of the largest hidden state, measured on a small model of its config"
    )
    raise UserError(
        f"model: {type(causal).__name__} has layers without attention ({', '.join(states)}), in"
        f" which documents of a sequence would see each other ({measured}); use another model"
    )


def unmeasured_model(content: dict[str, Any]) -> TransformersModel:
    """The model of a config.json, of which `packing_error` measures what it does to documents."""
    return TransformersModel(to_transformers_config(content, "model"), keeps_documents_apart=True)


@contextmanager
def document_attention_masks(
    attn_implementation: str, document_ids: Tensor, positions: Tensor
) -> Iterator[None]:
    """A context in which masks that transformers makes let tokens see only their own document.

    They are all masks for this attention. Its rules (causal, sliding windows, chunks) are given
    positions within the document, not slots of the sequence, so that a document is computed the
    same wherever it stands. `document_ids`,
    `positions`: [sequences, slots] of all keys.
    """
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS as MASKS

    original = MASKS[attn_implementation]
    masks_made = 0

    def make_mask(*args: Any, mask_function: Callable[..., Tensor], **rest: Any) -> Any:
        nonlocal masks_made
        masks_made += 1

        def seen(sequence: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            same_document = document_ids[sequence, query] == document_ids[sequence, key]
            by_rules = mask_function(
                sequence, head, positions[sequence, query], positions[sequence, key]
            )
            return same_document & (key <= query) & by_rules

        return original(*args, mask_function=seen, **{**rest, "allow_is_causal_skip": False})

    MASKS[attn_implementation] = make_mask
    try:
        yield
    finally:
        del MASKS[attn_implementation]
    if not masks_made:
        raise UserError(
            "model: this family attends without a mask, so packed documents would see each other;"
            " use another model"
        )


@cache
def _count_parameters(config_json: str) -> tuple[int, int, int, int]:
    """The fields of flops.ParameterCount.

    Of experts the fraction that a token is routed to counts as active.
    """
    config = to_transformers_config(json.loads(config_json), "model")
    model = TransformersModel(config)
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    embedding = model.embeddings[0].weight.numel()
    theirs = model.base_model.config
    experts = _first(theirs, *NUM_EXPERTS_FIELDS, default=1)
    chosen = _first(theirs, "num_experts_per_tok", "moe_topk", default=1)
    routed = sum(size for name, size in sizes.items() if ".experts." in name)
    total = sum(sizes.values())
    idle = routed - routed * chosen // experts
    matrices = sum(
        parameter.numel() for parameter in model.blocks.parameters() if parameter.ndim == 2
    )
    active = total - idle
    if not config.tie_word_embeddings:
        active -= embedding
    return total, embedding, active, matrices


class TransformersIncrementalDecoder:
    """The counterpart of `IncrementalDecoder` (serve/decoding/incremental.py) for a TransformersModel."""

    def __init__(self, model: TransformersModel, max_length: int, device: torch.device) -> None:
        model.config.check_length(max_length)
        self._model = model
        self._device = device
        self._lengths: list[int] = []
        # Each sequence ends in the last column.
        self._tokens = torch.zeros(0, 0, dtype=torch.long, device=device)
        self._cache: Any = None

    def prefill(self, prompts: Sequence[Sequence[int]]) -> Tensor:
        """Compute prompts as new sequences after the others.

        Returns hidden states of each last token [prompts, hidden_size].
        """
        earlier = [
            tokens[-length:] for tokens, length in zip(self._tokens, self._lengths, strict=True)
        ]
        new = [torch.tensor(prompt, device=self._device) for prompt in prompts]
        self._tokens = pad_sequence([*earlier, *new], batch_first=True, padding_side="left")
        self._lengths = [*map(len, earlier), *map(len, new)]
        self._cache = import_transformers().DynamicCache(config=self._model.base_model.config)
        return self._forward(self._tokens)[len(earlier) :, -1]

    def decode_step(self, tokens: Tensor) -> Tensor:
        """Compute the next token of every sequence, int64 [sequences].

        Returns hidden states [sequences, hidden_size].
        """
        self._tokens = torch.cat([self._tokens, tokens[:, None]], dim=1)
        self._lengths = [length + 1 for length in self._lengths]
        return self._forward(tokens[:, None])[:, 0]

    def _forward(self, tokens: Tensor) -> Tensor:
        """Hidden states of the last tokens of each sequence, those that are not in the cache."""
        lengths = torch.tensor(self._lengths, device=self._device)[:, None]
        positions = torch.arange(-self._tokens.shape[1], 0, device=self._device) + lengths
        document_ids = torch.where(positions < 0, -1, 0).int()
        return self._model(tokens, positions.clamp(min=0), document_ids, self._cache)

    def select_sequences(self, indices: Sequence[int]) -> None:
        """Keep only these sequences; they become 0, 1, … in this order."""
        chosen = torch.tensor(indices, dtype=torch.long, device=self._device)
        self._tokens = self._tokens[chosen]
        self._lengths = [self._lengths[index] for index in indices]
        if indices:
            self._cache.batch_select_indices(chosen)
        else:  # a step that failed has filled a part of its layers
            self._cache = None
