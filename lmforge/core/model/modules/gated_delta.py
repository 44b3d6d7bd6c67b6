"""The gated delta rule (Gated DeltaNet, arXiv 2412.06464) as Qwen 3.5 has it: linear attention whose
state, a matrix for each head, forgets by a factor and corrects what it holds under a key.

For each token, with S [key_dim, value_dim] fp32: S ← e^g S; S ← S + β k (v − Sᵀk)ᵀ; output Sᵀq. The
state begins anew at each document, and so does the window of the convolution before it.
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import pad, silu, softplus

from lmforge.core.model.attention import LayerCache
from lmforge.core.model.blocks import Mixer
from lmforge.core.model.config import ModelConfig
from lmforge.core.model.layers import RMSNorm, add_linears, local_weight, without_autocast
from lmforge.core.model.modules.recurrent import (
    CHUNK,
    CausalConvolution,
    RecurrentMixer,
    Share,
    decay_since,
    decay_since_entry,
    documents_in_chunks,
    in_chunks,
    project,
    wide,
)
from lmforge.core.model.rng.token_rng import TokenRng


class DeltaRule(RecurrentMixer):
    """What layers of the delta rule share: the convolution, heads, states and the norm of outputs."""

    def __init__(self, config: ModelConfig, mixer: Mixer) -> None:
        super().__init__()
        heads = config.linear_num_key_heads
        self.key_dim = config.linear_key_head_dim
        self.value_dim = config.linear_value_head_dim or self.key_dim
        self.heads = heads
        value_heads = config.linear_num_value_heads or heads
        self.value_heads = (value_heads,)
        self.copies = value_heads // heads
        keys = heads * self.key_dim
        self.parts = (keys, keys, value_heads * self.value_dim)
        self.conv1d = CausalConvolution(sum(self.parts), config.linear_conv_kernel_dim)
        (norm,) = mixer.norms
        self._norm = norm.name.rpartition(".")[2]
        self.add_module(self._norm, RMSNorm(norm.size, norm.eps or config.rms_norm_eps))
        self._inputs = add_linears(self, mixer)[:-1]

    def mix(
        self,
        x: Tensor,
        document_ids: Tensor | None,
        cache: LayerCache | None,
        token_rng: TokenRng | None,
        share: Share,
    ) -> Tensor:
        qkv, z, decay, beta = self.read_inputs(x, token_rng, share)
        convolved = silu(self.conv1d(qkv, document_ids, cache, share, self.parts))
        if cache is None:
            out, _ = gated_delta_rule(*self._heads(convolved), decay, beta, document_ids)
        else:
            is_token = cache.is_token()[..., None]
            out, state = gated_delta_rule(
                *self._heads(convolved),
                decay * is_token[..., None],
                beta * is_token,
                None,
                cache.state(),
            )
            cache.keep_state(state)
        gated = self.gate(out.to(x.dtype), z.unflatten(-1, out.shape[-2:]))
        return gated.flatten(2).to(x.dtype)

    def read_inputs(
        self, x: Tensor, token_rng: TokenRng | None, share: Share
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Of a share of the heads, and x [sequences, length, width]: queries, keys and values in
        one tensor, in this order; what outputs are gated by; and decay and beta, as
        `gated_delta_rule` takes them.
        """
        raise NotImplementedError

    def gate(self, out: Tensor, z: Tensor) -> Tensor:
        """The outputs [sequences, length, heads, value_dim], normed and gated by z of that shape."""
        return getattr(self, self._norm)(out) * silu(wide(z))

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


class GatedDeltaRule(DeltaRule):
    """One decay for each head and token."""

    beta_scale = 1.0

    def __init__(self, config: ModelConfig, mixer: Mixer) -> None:
        super().__init__(config, mixer)
        self.dt_bias = nn.Parameter(torch.empty(self.value_heads))
        self.A_log = nn.Parameter(torch.empty(self.value_heads))

    def read_inputs(
        self, x: Tensor, token_rng: TokenRng | None, share: Share
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        qkv, z, b, a = self.projected(x, token_rng, share)
        rate, bias = (
            wide(share.of(local_weight(each), self.value_heads))
            for each in (self.A_log, self.dt_bias)
        )
        decay = -rate.exp() * softplus(wide(a) + bias)
        return qkv, z, decay[..., None], wide(b).sigmoid() * self.beta_scale

    def projected(self, x: Tensor, token_rng: TokenRng | None, share: Share) -> tuple[Tensor, ...]:
        """Queries, keys and values in one tensor, in this order; z; and for each head b and a."""
        of_qkv = [self.parts] if len(self._inputs) == 4 else [(each,) for each in self.parts]
        segments = (*of_qkv, self.parts[2:], self.value_heads, self.value_heads)
        *qkv, z, b, a = (
            project(getattr(self, name), x, token_rng, share, each)
            for name, each in zip(self._inputs, segments, strict=True)
        )
        return qkv[0] if len(qkv) == 1 else torch.cat(qkv, dim=-1), z, b, a


class ReflectingDeltaRule(GatedDeltaRule):
    """OLMo Hybrid's, whose beta goes up to 2, so that a state's eigenvalues may be negative (arXiv
    2411.12537).
    """

    output = "o_proj"
    beta_scale = 2.0


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
        decay: g, at most 0: [sequences, length, heads, 1], or [sequences, length, heads, key_dim]
            with one for each channel of the keys. beta: [sequences, length, heads].
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
    by_channel = decay.shape[-1] > 1
    size = CHUNK if by_channel else min(CHUNK, length)
    q, k, v, decay, beta = (in_chunks(each, size) for each in (q, k, v, decay, beta[..., None]))
    reads, continues = documents_in_chunks(document_ids, size, q.device)
    entered = decay_since_entry(decay, continues)
    weighted = k * beta
    products = _products_by_channel if by_channel else _products
    system, scores, left = products(weighted, q, k, decay, reads)
    right = torch.cat((v * beta, weighted * entered), dim=-1)
    solved = torch.linalg.solve_triangular(
        system.tril(-1) + torch.eye(size, dtype=q.dtype, device=q.device),
        right,
        upper=False,
        unitriangular=True,
    )
    added, removed = solved.split((v.shape[-1], k.shape[-1]), dim=-1)
    asked = q * entered
    kept = (k * left).transpose(-1, -2)
    carried = entered[..., -1, :, None]
    outputs = []
    for chunk in range(q.shape[2]):
        values = added[:, :, chunk] - removed[:, :, chunk] @ state
        outputs.append(asked[:, :, chunk] @ state + scores[:, :, chunk] @ values)
        state = carried[:, :, chunk] * state + kept[:, :, chunk] @ values
    return torch.stack(outputs, dim=2).flatten(2, 3)[:, :, :length].transpose(1, 2), state


def _products(
    weighted: Tensor, q: Tensor, k: Tensor, decay: Tensor, reads: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Within chunks, each weighted key and each query [..., size, key_dim] times the keys that it
    reads and the decay [..., size, 1] since them: [..., size, size] each; and the decay from each
    token to the last, zero where that does not read it: [..., size, 1].
    """
    since = decay_since(decay, reads)
    return weighted @ k.mT * since, q @ k.mT * since, since[..., -1, :, None]


def _products_by_channel(
    weighted: Tensor, q: Tensor, k: Tensor, decay: Tensor, reads: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The same with a decay for each channel [..., size, key_dim].

    The decay is a factor within each product, which is no product of matrices, and e^Γ · e^−Γ would
    overflow. So a chunk is halved again and again (Kimi Linear, arXiv 2510.26692, has two sizes of
    blocks): the tokens of a second half read those of the first by way of its own first token, from
    which and to which both exponents are sums of decays, at most 0.
    """
    rows = torch.stack((weighted, q))
    products = (rows * k).sum(-1)[..., None, None]  # of each token with itself
    half = 1
    while half < k.shape[-2]:
        first, second = decay.unflatten(-2, (-1, 2, half)).unbind(-3)
        since = pad(second[..., 1:, :], (0, 0, 1, 0)).cumsum(-2).exp()
        until = _sums_to_the_end(torch.cat((first[..., 1:, :], second[..., :1, :]), dim=-2)).exp()
        asked = rows.unflatten(-2, (-1, 2, half))[..., 1, :, :] * since
        held = k.unflatten(-2, (-1, 2, half))[..., 0, :, :] * until
        early, late = products.unflatten(-3, (-1, 2)).unbind(-3)
        late = torch.cat((asked @ held.mT, late), dim=-1)
        products = torch.cat((pad(early, (0, half)), late), dim=-2)
        half *= 2
    system, scores = products.squeeze(-3).masked_fill(~reads, 0.0)
    left = _sums_to_the_end(pad(decay[..., 1:, :], (0, 0, 0, 1)))
    return system, scores, left.masked_fill(~reads[..., -1, :, None], -torch.inf).exp()


def _sums_to_the_end(x: Tensor) -> Tensor:
    """The sum of each row of [..., rows, width] and those after it."""
    return x.flip(-2).cumsum(-2).flip(-2)


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
    state = state * decay.exp()[..., None]
    held = (k[..., None, :] @ state)[..., 0, :]
    state = state + k[..., None] * (beta[..., None] * (v - held))[..., None, :]
    return (q[..., None, :] @ state)[..., 0, :][:, None], state
