"""The gated delta rule (Gated DeltaNet, arXiv 2412.06464) as Qwen 3.5 has it: linear attention whose
state, a matrix for each head, forgets by a factor and corrects what it holds under a key.

For each token, with S [key_dim, value_dim] fp32: S ← e^g S; S ← S + β k (v − Sᵀk)ᵀ; output Sᵀq. The
state begins anew at each document, and so does the window of the convolution before it.
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import silu, softplus

from lmforge.core.model.attention import LayerCache
from lmforge.core.model.blocks import Mixer
from lmforge.core.model.config import ModelConfig
from lmforge.core.model.layers import RMSNorm, add_linears, local_weight
from lmforge.core.model.modules.recurrent import (
    CHUNK,
    CausalConvolution,
    RecurrentMixer,
    Share,
    decay_factors,
    in_chunks,
    project,
    wide,
    without_autocast,
)
from lmforge.core.model.rng.token_rng import TokenRng


class GatedDeltaRule(RecurrentMixer):
    in_proj_qkv: nn.Linear
    in_proj_z: nn.Linear
    in_proj_b: nn.Linear
    in_proj_a: nn.Linear

    def __init__(self, config: ModelConfig, mixer: Mixer) -> None:
        super().__init__()
        self.key_dim = config.linear_key_head_dim
        self.value_dim = config.linear_value_head_dim
        self.heads = config.linear_num_key_heads
        self.value_heads = (config.linear_num_value_heads,)
        keys = self.heads * self.key_dim
        self.parts = (keys, keys, config.linear_num_value_heads * self.value_dim)
        self.copies = config.linear_num_value_heads // self.heads
        self.conv1d = CausalConvolution(sum(self.parts), config.linear_conv_kernel_dim)
        self.dt_bias = nn.Parameter(torch.empty(config.linear_num_value_heads))
        self.A_log = nn.Parameter(torch.empty(config.linear_num_value_heads))
        self.norm = RMSNorm(self.value_dim, config.rms_norm_eps)
        add_linears(self, mixer)

    def mix(
        self,
        x: Tensor,
        document_ids: Tensor | None,
        cache: LayerCache | None,
        token_rng: TokenRng | None,
        share: Share,
    ) -> Tensor:
        qkv, z, b, a = self.projected(x, token_rng, share)
        rate, bias = (
            wide(share.of(local_weight(each), self.value_heads))
            for each in (self.A_log, self.dt_bias)
        )
        decay = -rate.exp() * softplus(wide(a) + bias)
        beta = wide(b).sigmoid()
        convolved = silu(self.conv1d(qkv, document_ids, cache, share, self.parts))
        if cache is None:
            out, _ = gated_delta_rule(*self._heads(convolved), decay, beta, document_ids)
        else:
            is_token = cache.is_token()[..., None]
            out, state = gated_delta_rule(
                *self._heads(convolved), decay * is_token, beta * is_token, None, cache.state()
            )
            cache.keep_state(state)
        normed = self.norm(out.to(x.dtype)) * silu(wide(z)).unflatten(-1, out.shape[-2:])
        return normed.flatten(2).to(x.dtype)

    def projected(self, x: Tensor, token_rng: TokenRng | None, share: Share) -> tuple[Tensor, ...]:
        """Queries, keys and values in one tensor, in this order; z; and for each head b and a."""
        segments = {
            self.in_proj_qkv: self.parts,
            self.in_proj_z: self.parts[2:],
            self.in_proj_b: self.value_heads,
            self.in_proj_a: self.value_heads,
        }
        return tuple(project(layer, x, token_rng, share, each) for layer, each in segments.items())

    def _heads(self, convolved: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values in fp32, [sequences, length, value heads, ·] each; queries and
        keys have length 1, and queries are scaled.
        """
        parts = [each * convolved.shape[-1] // sum(self.parts) for each in self.parts]
        q, k, v = wide(convolved).split(parts, dim=-1)
        q, k = (each.unflatten(-1, (-1, self.key_dim)) for each in (q, k))
        q, k = (
            (each * (each.square().sum(-1, keepdim=True) + 1e-6).rsqrt()).repeat_interleave(
                self.copies, dim=2
            )
            for each in (q, k)
        )
        return q * self.key_dim**-0.5, k, v.unflatten(-1, (-1, self.value_dim))


class GatedDeltaRuleByKeyHead(GatedDeltaRule):
    """The same with the outputs of two matrices in the order of key heads, as Qwen3-Next has it."""

    in_proj_qkvz: nn.Linear
    in_proj_ba: nn.Linear

    def projected(self, x: Tensor, token_rng: TokenRng | None, share: Share) -> tuple[Tensor, ...]:
        values = self.copies * self.value_dim
        of_head = 2 * (self.key_dim + values)
        by_head = project(self.in_proj_qkvz, x, token_rng, share, (self.heads * of_head,))
        *qkv, z = by_head.unflatten(-1, (-1, of_head)).split(
            (self.key_dim, self.key_dim, values, values), dim=-1
        )
        ba = project(self.in_proj_ba, x, token_rng, share, (2 * self.value_heads[0],))
        b, a = ba.unflatten(-1, (-1, 2, self.copies)).unbind(-2)
        return torch.cat([each.flatten(2) for each in qkv], dim=-1), *(
            each.flatten(2) for each in (z, b, a)
        )


def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    beta: Tensor,
    document_ids: Tensor | None,
    state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The outputs [sequences, length, heads, value_dim] and the last state [sequences, heads,
    key_dim, value_dim], in the dtype of all arguments.

    Args:
        q, k: [sequences, length, heads, key_dim]. v: [sequences, length, heads, value_dim].
        decay: g, at most 0, and beta: [sequences, length, heads].
        document_ids: int [sequences, length]: the state begins anew where they change; None: all
            tokens are of one document, which continues from `state`, if there is one.

    In chunks (arXiv 2412.06464, section 3.3): within one, what each token adds follows from a
    triangular system; between chunks the state is carried.
    """
    if state is None:
        state = q.new_zeros(len(q), *q.shape[2:], v.shape[-1])
    compute = _chunk_by_chunk if q.shape[1] > 1 else _one_token
    with without_autocast(q):
        return compute(q, k, v, decay, beta, document_ids, state)


def _chunk_by_chunk(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    beta: Tensor,
    document_ids: Tensor | None,
    state: Tensor,
) -> tuple[Tensor, Tensor]:
    length = q.shape[1]
    key_dim = q.shape[-1]
    size = min(CHUNK, length)
    q, k, v = (in_chunks(each, size) for each in (q, k, v))
    decay, beta = (in_chunks(each[..., None], size)[..., 0] for each in (decay, beta))
    since, entered = decay_factors(decay, document_ids)
    weighted = k * beta[..., None]
    system = (weighted @ k.transpose(-1, -2) * since).tril(-1)
    right = torch.cat((v * beta[..., None], weighted * entered[..., None]), dim=-1)
    solved = torch.linalg.solve_triangular(
        system + torch.eye(size, dtype=q.dtype, device=q.device),
        right,
        upper=False,
        unitriangular=True,
    )
    added, removed = solved.split((v.shape[-1], key_dim), dim=-1)
    scores = q @ k.transpose(-1, -2) * since
    asked = q * entered[..., None]
    kept = (k * since[..., -1, :, None]).transpose(-1, -2)
    carried = entered[..., -1, None, None]
    outputs = []
    for chunk in range(q.shape[2]):
        values = added[:, :, chunk] - removed[:, :, chunk] @ state
        outputs.append(asked[:, :, chunk] @ state + scores[:, :, chunk] @ values)
        state = carried[:, :, chunk] * state + kept[:, :, chunk] @ values
    return torch.stack(outputs, dim=2).flatten(2, 3)[:, :, :length].transpose(1, 2), state


def _one_token(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    beta: Tensor,
    document_ids: Tensor | None,
    state: Tensor,
) -> tuple[Tensor, Tensor]:
    q, k, v, decay, beta = (each[:, 0] for each in (q, k, v, decay, beta))
    state = state * decay.exp()[..., None, None]
    held = (k[..., None, :] @ state)[..., 0, :]
    state = state + k[..., None] * (beta[..., None] * (v - held))[..., None, :]
    return (q[..., None, :] @ state)[..., 0, :][:, None], state
