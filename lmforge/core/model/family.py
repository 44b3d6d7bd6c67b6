"""What a model family is, said once and without torch: what its blocks are made of, which options
its configs have, and how its config.json spells them.

Everything else follows from that: numbers of parameters and FLOPs (flops.py), the modules
(decoder.py), the checks of configs (config.py), the split of tensor parallelism
(core/parallel/tensor_parallel.py), and the translation of a config.json
(core/model/config_json.py). The families themselves are in families/, a file for each model_type.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import import_module
from typing import Any, Literal

from lmforge.core.errors import UserError
from lmforge.core.files.untrusted import quoted
from lmforge.core.model.blocks import Block, Branch, Linear, Mixer, Norm, Vector
from lmforge.core.model.fields import ModelFields

# Fields of a config.json that all families with rotary positions have.
ROTARY_FIELDS = ("num_key_value_heads", "head_dim", "rms_norm_eps", "rope_theta")
# Those that all mixtures of experts have.
EXPERT_FIELDS = (
    "num_experts",
    "num_experts_per_tok",
    "router_aux_loss_coef",
    "output_router_logits",
)
LINEAR_ATTENTION_FIELDS = (
    "linear_num_key_heads",
    "linear_num_value_heads",
    "linear_key_head_dim",
    "linear_value_head_dim",
    "linear_conv_kernel_dim",
)
# Those that only some families have; of others they have the value that does nothing.
OWN_FIELDS = (
    "moe_intermediate_size",
    "norm_topk_prob",
    "decoder_sparse_step",
    "mlp_only_layers",
    "first_k_dense_replace",
    "n_shared_experts",
    "shared_expert_intermediate_size",
    "moe_latent_size",
    "routed_scaling_factor",
    "n_group",
    "topk_group",
    "q_lora_rank",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
    "rope_interleave",
    "partial_rotary_factor",
    "no_rope_layers",
    *LINEAR_ATTENTION_FIELDS,
    "conv_bias",
    "time_step_limit",
)
# What a router does, by the fields of a config.json, where a mixture of experts has no such field.
ROUTER_VALUES: dict[str, Any] = {
    "norm_topk_prob": False,
    "moe_intermediate_size": None,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "first_k_dense_replace": 0,
    "moe_layer_freq": 1,
    "n_shared_experts": 0,
    "shared_expert_intermediate_size": 0,
    "moe_latent_size": None,
    "routed_scaling_factor": 1,
    "n_group": 1,
    "topk_group": 1,
    "scoring_func": "softmax",
    "topk_method": "greedy",
    "router_jitter_noise": 0,
}
# Of the modules of most families, and of their names on disk.
OUR_PREFIX = "model."
# How most families store their experts (Family.stored_experts).
STORED_EXPERTS = {
    "mlp.experts.gate_up_proj": (
        "mlp.experts.{}.gate_proj.weight",
        "mlp.experts.{}.up_proj.weight",
    ),
    "mlp.experts.down_proj": ("mlp.experts.{}.down_proj.weight",),
}


def grouped_attention(
    family: "Family",
    config: ModelFields,
    output: str = "o_proj",
    norms_of: tuple[str, str] = ("q_norm", "k_norm"),
    name: str = "self_attn",
) -> Mixer:
    """Grouped attention (arXiv 2305.13245), whose queries and keys the family may normalize; with
    the names of the output's linear layer, of these norms, and its own.
    """
    width = config.hidden_size
    queries = config.num_attention_heads * config.head_dim
    keys = config.num_key_value_heads * config.head_dim
    sizes = (queries, keys) if family.qk_norm == "channels" else (config.head_dim,) * 2
    norms = tuple(
        Norm(f"{name}.{norm}", size, family.qk_norm)
        for norm, size in zip(norms_of, sizes, strict=True)
        if family.qk_norm and config.qk_norm
    )
    linears = (
        Linear(f"{name}.q_proj", width, queries, config.attention_bias),
        Linear(f"{name}.k_proj", width, keys, config.attention_bias),
        Linear(f"{name}.v_proj", width, keys, config.attention_bias),
        Linear(f"{name}.{output}", queries, width, config.attention_output_bias, residual=True),
    )
    mixer = Mixer(name, "attention", linears, norms, mixes_tokens=True)
    if not family.attention_sinks:
        return mixer
    sinks = Vector(f"{name}.sinks", (config.num_attention_heads,), 0.0)
    return replace(mixer, kind="attention-with-sinks", vectors=(sinks,))


def output_gated_attention(family: "Family", config: ModelFields) -> Mixer:
    """Grouped attention whose heads are multiplied by sigmoids, which q_proj computes too: each head
    of its outputs is a query, then a gate.
    """
    mixer = grouped_attention(family, config)
    queries, *others = mixer.linears
    return replace(
        mixer,
        kind="output-gated-attention",
        linears=(replace(queries, outputs=2 * queries.outputs), *others),
    )


def gated_delta_rule(config: ModelFields, by_key_head: bool = False) -> Mixer:
    """The gated delta rule (arXiv 2412.06464) with one matrix for queries, keys and values; or, if
    it is `by_key_head`, one for these and z, whose outputs are ordered by key heads, and one for
    the two numbers of each head.
    """
    width = config.hidden_size
    heads = config.linear_num_value_heads
    key_dim = config.linear_key_head_dim
    value_dim = config.linear_value_head_dim
    values = heads * value_dim
    channels = 2 * config.linear_num_key_heads * key_dim + values
    kernel = config.linear_conv_kernel_dim
    outputs = {
        "in_proj_qkv": channels,
        "in_proj_z": values,
        "in_proj_b": heads,
        "in_proj_a": heads,
    }
    if by_key_head:
        outputs = {"in_proj_qkvz": channels + values, "in_proj_ba": 2 * heads}
    return Mixer(
        "linear_attn",
        "gated-delta-rule-by-key-head" if by_key_head else "gated-delta-rule",
        (
            *(Linear(f"linear_attn.{name}", width, size) for name, size in outputs.items()),
            Linear("linear_attn.out_proj", values, width, residual=True),
        ),
        (Norm("linear_attn.norm", value_dim, "heads", has_offset=False),),
        (
            Vector("linear_attn.conv1d.weight", (channels, 1, kernel)),
            Vector("linear_attn.dt_bias", (heads,), 1.0),
            # Rates of forgetting that are spread evenly over 0 to 16.
            Vector(
                "linear_attn.A_log",
                (heads,),
                tuple(math.log(16 * (head + 0.5) / heads) for head in range(heads)),
            ),
        ),
        mixes_tokens=True,
        states=((kernel - 1, channels), (heads, key_dim, value_dim)),
        state_flops=6 * heads * key_dim * value_dim + 2 * kernel * channels,
    )


def latent_attention(config: ModelFields) -> Mixer:
    """Latent attention (DeepSeek-V2, arXiv 2405.04434): keys and values, and queries if
    q_lora_rank, come from a few channels.
    """
    width = config.hidden_size
    heads = config.num_attention_heads
    bias = config.attention_bias
    keys = config.kv_lora_rank
    queries = heads * config.qk_head_dim
    latents = config.q_lora_rank
    of_queries: tuple[Linear, ...] = (Linear("self_attn.q_proj", width, queries),)
    if latents:
        of_queries = (
            Linear("self_attn.q_a_proj", width, latents, bias, whole=True),
            Linear("self_attn.q_b_proj", latents, queries),
        )
    linears = (
        *of_queries,
        Linear(
            "self_attn.kv_a_proj_with_mqa", width, keys + config.qk_rope_head_dim, bias, whole=True
        ),
        Linear("self_attn.kv_b_proj", keys, heads * (config.qk_nope_head_dim + config.v_head_dim)),
        Linear(
            "self_attn.o_proj",
            heads * config.v_head_dim,
            width,
            config.attention_output_bias,
            residual=True,
        ),
    )
    sizes = {"q_a_layernorm": latents, "kv_a_layernorm": keys}
    # Their eps is RMSNorm's default, whatever rms_norm_eps is.
    norms = tuple(
        Norm(f"self_attn.{name}", size, "latents", 1e-6) for name, size in sizes.items() if size
    )
    return Mixer("self_attn", "latent-attention", linears, norms, mixes_tokens=True)


def gated_feed_forward(
    config: ModelFields,
    name: str = "mlp",
    linears: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
) -> Mixer:
    """A gated feed-forward (arXiv 2002.05202), with the names of the gate, the other factor, and the
    output.
    """
    width = config.hidden_size
    inner = config.intermediate_size
    gate, up, down = (f"{name}.{each}" for each in linears)
    return Mixer(
        name,
        "feed-forward",
        (
            Linear(gate, width, inner, config.mlp_bias),
            Linear(up, width, inner, config.mlp_bias),
            Linear(down, inner, width, config.mlp_bias, residual=True),
        ),
    )


def short_convolution(config: ModelFields) -> Mixer:
    """The gated short convolution of LFM2: from one matrix the factors before and after it, and
    what it convolves.
    """
    width = config.hidden_size
    kernel = config.linear_conv_kernel_dim
    bias = config.conv_bias
    vectors = (Vector("conv.conv.weight", (width, 1, kernel)),)
    return Mixer(
        "conv",
        "short-convolution",
        (
            Linear("conv.in_proj", width, 3 * width, bias),
            Linear("conv.out_proj", width, width, bias, residual=True),
        ),
        vectors=(*vectors, Vector("conv.conv.bias", (width,), 0.0)) if bias else vectors,
        mixes_tokens=True,
        states=((kernel - 1, width),),
        state_flops=2 * kernel * width,
    )


def mixture_of_experts(
    config: ModelFields,
    shared: str = "shared_experts",
    shared_gate: str = "",
    name: str = "mlp",
    router: str = "gate",
    gated: bool = True,
) -> Mixer:
    """A router and experts, which are `gated` or have one matrix inwards; and shared ones, if there
    are any, with the name of their module, and of that of a number for each token whose sigmoid
    they are multiplied by. With moe_latent_size the experts that are chosen compute in so many
    channels.
    """
    width = config.hidden_size
    inner = config.expert_size
    experts = config.num_experts
    size = config.shared_expert_size
    narrow = config.moe_latent_size or width
    latents = ("fc1_latent_proj", "fc2_latent_proj") if config.moe_latent_size else ()
    first, copies = ("gate_up_proj", 2) if gated else ("up_proj", 1)
    linears = [
        Linear(f"{name}.{router}", width, experts),
        Linear(f"{name}.experts.{first}", narrow, copies * inner, experts=experts),
        Linear(f"{name}.experts.down_proj", inner, narrow, residual=not latents, experts=experts),
    ]
    if latents:
        before, after = latents
        linears += [
            Linear(f"{name}.{before}", width, narrow),
            Linear(f"{name}.{after}", narrow, width, residual=True),
        ]
    if not size:
        shared = shared_gate = ""
    if shared:
        inwards = ("gate_proj", "up_proj") if gated else ("up_proj",)
        linears += [Linear(f"{name}.{shared}.{each}", width, size) for each in inwards]
        linears.append(Linear(f"{name}.{shared}.down_proj", size, width, residual=True))
    if shared_gate:
        linears.append(Linear(f"{name}.{shared_gate}", width, 1))
    return Mixer(
        name,
        "mixture",
        tuple(linears),
        is_mixture=True,
        shared=shared,
        shared_gate=shared_gate,
        latents=latents,
    )


def decoder_block(
    family: "Family",
    config: ModelFields,
    layer: int,
    attention_norms: tuple[str | None, str | None] = ("input_layernorm", None),
    mlp_norms: tuple[str | None, str | None] = ("post_attention_layernorm", None),
) -> Block:
    """Attention, then a feed-forward, which is a mixture in sparse layers; with the names of the
    norms before and after each. Llama has those before.
    """
    attention = grouped_attention(family, config)
    if family.latent_attention:
        attention = latent_attention(config)
    feed_forward = gated_feed_forward(config)
    if config.sparse_layers[layer]:
        feed_forward = mixture_of_experts(config)
    return Block((Branch((attention,), *attention_norms), Branch((feed_forward,), *mlp_norms)))


def read_rope(content: dict[str, Any], table: Any = None) -> dict[str, Any]:
    """rope_scaling and rope_theta of a ModelConfig, from `table` or, as transformers chooses them,
    tables of a config.json.

    `rope_scaling`, which transformers 4 writes, replaces `rope_parameters` of transformers 5, which
    has rope_theta too.
    """
    name = "rope_scaling" if content.get("rope_scaling") else "rope_parameters"
    if table is None:
        table = content.get(name) or {}
        beside = content.get("original_max_position_embeddings")
    else:
        beside = None
    if not isinstance(table, dict):
        raise UserError(f"{name}: expected an object, got {quoted(table)}")
    if nested := [key for key, value in table.items() if isinstance(value, dict)]:
        raise UserError(
            f"{name}: {quoted(nested[0])}: positions of a type of layers are not supported in this"
            " family"
        )
    rotated = table.get("partial_rotary_factor", content.get("partial_rotary_factor"))
    if rotated not in (None, 1):
        raise UserError(
            f"partial_rotary_factor: {quoted(rotated)} is not supported; use a model that rotates"
            " whole heads"
        )
    if beside is not None:
        table = {**table, "original_max_position_embeddings": beside}
    theta = table.get("rope_theta")
    return {"rope_scaling": table} | ({} if theta is None else {"rope_theta": theta})


def read_layer_types(content: dict[str, Any], every: int | None = None) -> list[str] | None:
    """layer_types of a config.json, which may be given as a period, sliding_window_pattern (default:
    `every`); None where neither is.
    """
    types: list[str] | None = content.get("layer_types")
    every = content.get("sliding_window_pattern", every)
    if types or not every:
        return types or None
    if not isinstance(every, int):
        raise UserError(
            f"sliding_window_pattern: {quoted(every)} is not supported without layer_types; add"
            " them"
        )
    return [*name_layer_types(content["num_hidden_layers"], every)]


def read_partial_rope(content: dict[str, Any]) -> dict[str, Any]:
    """As `read_rope`, with partial_rotary_factor; positions of several axes are one for text."""
    name = "rope_scaling" if content.get("rope_scaling") else "rope_parameters"
    table = content.get(name) or {}
    rotated = content.get("partial_rotary_factor")
    if isinstance(table, dict):
        rotated = table.get("partial_rotary_factor", rotated)
        left_out = ("partial_rotary_factor", "mrope_section", "mrope_interleaved")
        table = {key: value for key, value in table.items() if key not in left_out}
    plain = {**content, name: table, "partial_rotary_factor": None}
    factor = {} if rotated is None else {"partial_rotary_factor": rotated}
    return {**read_rope(plain), **factor}


@dataclass(frozen=True)
class Family:
    """One model_type. The defaults are those of Llama.

    Modules:
        module: "module:class" that computes it.
        block: (family, config, number of a layer) → what that layer is made of (blocks.py).
        layer_norm: norms subtract the mean and have biases. norm_offset: of an RMSNorm, as in
        layers.RMSNorm.
        qk_norm: what queries and keys are normalized over: the channels of each head, or all
        channels; None: they are not. optional_qk_norm: or not, as the option qk_norm says.
        attention_sinks: grouped attention has a number for each head, the score of a key without a
        value. latent_attention: as in `latent_attention`. sigmoid_router: a router scores experts by
            sigmoids, and chooses by scores with a bias, and by groups, as DeepSeek-V3's
            (arXiv 2412.19437). router_epsilon: added to the sum that weights are divided by.
        activations: values of hidden_act; the first is the default.
        scaled_embeddings: they are multiplied by sqrt(hidden_size). has_multipliers: a config has
        Multipliers.
        learned_positions: instead of rotary ones. rotates_neighbours: rotary positions pair
        channel 2i with 2i + 1. rotates: which layers have rotary positions: all; those with a
        window, where there are such layers; where no_rope_layers does not say, all but every
        fourth one; none; or none where rope_theta is None.
        embedding, final_norm: the names of the first and the last module of its backbone.
        transposed: weights of linear layers are stored [inputs, outputs].
        why_not_split: why tensor parallelism cannot split it; empty where it can.
        stored_experts: of a mixture of experts; the names on disk of the tensors of a block that
            are stored in pieces, in their order along the rows, with a number for {} where each
            expert has its own. interleaved_experts: they are stored stacked, [experts, inputs,
            outputs], with gates and other factors by turns, and so are their biases.
    Options of a config:
        attention_biases: possible (attention_bias, attention_output_bias); the first is the
        default.
        mlp_biases: whether mlp_bias may be true.
        intermediate_ratio: intermediate_size / hidden_size where it is not given; 0: it must be.
        grouped_heads: num_key_value_heads and head_dim may be chosen. heads_divide_width:
        transformers requires that.
        windows: sliding_window: none, one for all layers, or for those that layer_types names.
        default_window: of sliding_window. window_pattern: every how many layers one sees
            everything, where layer_types is not given; 0: none does. recurrent_type: the entry
            of layer_types of recurrent layers; other_types: further ones than those that see
            everything, of which "moe" is a mixture.
        may_lack_experts: of a family with mixtures; a model of it has any.
        local_rope_theta: the default of rope_local_base_freq; None: it has none. scales_scores: it
        has query_pre_attn_scalar.
        caps_logits: final_logit_softcapping is an option of transformers, too. can_tie:
        tie_word_embeddings may be true.
    config.json:
        architecture, classifier: transformers' classes.
        fields: those of ModelConfig besides the common ones. names: by our names, where they
        differ.
        defaults: what transformers assumes for fields that are left out. required_values: others
        are refused.
        dropouts: written as zero.
        read, write: fields of ModelConfig from a config.json, and the reverse, which are more than
            names; the former reads the rotary positions, too.
        optional_prefix: of tensor names on disk, which may leave it out. stored_prefix: what they
        begin with on disk where ours begin with "model.", as do those of transformers' modules.
        other_names: by the names of tensors of a block, those that a folder may have for them,
            which are read only.
        names_layers: num_hidden_layers is ignored: `read` counts the types of layers.
        unread_layers: the field, and its default, of how many layers after the last one a folder
        may have that nothing reads. unread_names: beginnings of names on disk of further tensors
            that nothing reads.
    """

    architecture: str
    classifier: str
    module: str = "lmforge.core.model.modules.decoder:Decoder"
    block: Callable[["Family", ModelFields, int], Block] = decoder_block
    layer_norm: bool = False
    norm_offset: float | None = None
    qk_norm: Literal["heads", "channels"] | None = None
    optional_qk_norm: bool = False
    attention_sinks: bool = False
    latent_attention: bool = False
    sigmoid_router: bool = False
    router_epsilon: float = 1e-20  # sigmoids may all be 0
    activations: tuple[str, ...] = ("silu", "swish")
    scaled_embeddings: bool = False
    has_multipliers: bool = False
    learned_positions: bool = False
    rotates_neighbours: bool = False
    rotates: Literal["all", "windows", "three of four", "none", "all or none"] = "all"
    embedding: str = "embed_tokens"
    final_norm: str = "norm"
    transposed: bool = False
    why_not_split: str = ""
    stored_experts: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    interleaved_experts: bool = False
    attention_biases: tuple[tuple[bool, bool], ...] = ((False, False),)
    mlp_biases: bool = False
    intermediate_ratio: int = 0
    grouped_heads: bool = True
    heads_divide_width: bool = False
    windows: Literal["none", "all layers", "by layer"] = "none"
    default_window: int | None = None
    window_pattern: int = 0
    recurrent_type: str = ""
    other_types: tuple[str, ...] = ()
    may_lack_experts: bool = False
    local_rope_theta: float | None = None
    scales_scores: bool = False
    caps_logits: bool = False
    can_tie: bool = True
    fields: tuple[str, ...] = ROTARY_FIELDS
    names: Mapping[str, str] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    required_values: Mapping[str, Any] = field(default_factory=dict)
    dropouts: tuple[str, ...] = ("attention_dropout",)
    read: Callable[[dict[str, Any]], dict[str, Any]] = read_rope
    write: Callable[[ModelFields], dict[str, Any]] = lambda config: {}
    optional_prefix: str = ""
    other_names: Mapping[str, str] = field(default_factory=dict)
    stored_prefix: str = OUR_PREFIX
    names_layers: bool = False
    unread_layers: tuple[str, int] = ("", 0)
    unread_names: tuple[str, ...] = ()

    def has_rotary(self, config: ModelFields) -> bool:
        """Whether attention of a model of it has rotary positions."""
        never = self.learned_positions or self.rotates == "none"
        return not never and config.rope_theta is not None


def name_layer_types(
    num_layers: int, every: int, other: str = "sliding_attention"
) -> tuple[str, ...]:
    """The layer_types of a model in which every `every`-th layer sees everything (0: none does);
    the others are of the type `other`.
    """
    return tuple(
        "full_attention" if every and layer % every == 0 else other
        for layer in range(1, num_layers + 1)
    )


@cache
def load_family(model_type: str) -> Family:
    """The description of a built-in model_type."""
    family: Family = import_module(f"lmforge.core.model.families.{model_type}").FAMILY
    return family
