"""Mamba-2 (arXiv 2405.21060): a state, a matrix for each head, that forgets by a factor and adds
what each token writes.

For each token, with S [value_dim, state_dim] fp32: S ← e^{dt·A} S + dt · x Bᵀ; output S·C + D·x. B
and C are of a group of heads. The state begins anew at each document, and so does the window of the
convolution of x, B and C.
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import silu, softplus

from lmforge.core.model.attention import LayerCache
from lmforge.core.model.blocks import Mixer
from lmforge.core.model.config import ModelConfig
from lmforge.core.model.layers import add_linears, local_weight, without_autocast
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


class GroupNorm(nn.Module):
    """RMSNorm of each of equal groups of channels, of which each channel has its weight."""

    def __init__(self, channels: int, groups: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels))
        self.groups = groups
        self.eps = eps

    def forward(self, x: Tensor, share: Share) -> Tensor:
        """x [..., channels] in fp32, those of a share → the same."""
        grouped = x.unflatten(-1, (self.groups // share.parts, -1))
        normed = grouped * torch.rsqrt(grouped.square().mean(-1, keepdim=True) + self.eps)
        weight = share.of(local_weight(self.weight), (len(self.weight),))
        return normed.flatten(-2) * wide(weight)


class Mamba2(RecurrentMixer):
    in_proj: nn.Linear

    def __init__(self, config: ModelConfig, mixer: Mixer) -> None:
        super().__init__()
        heads = config.linear_num_value_heads
        self.heads = config.linear_num_key_heads  # groups, which have norms of their own
        self.value_dim = config.linear_value_head_dim
        self.state_dim = config.linear_key_head_dim
        self.limits = config.time_step_limit
        values = heads * self.value_dim
        keys = self.heads * self.state_dim
        # z, x, B, C and a step for each head.
        self.parts = (values, values, keys, keys, heads)
        self.conv1d = CausalConvolution(
            values + 2 * keys, config.linear_conv_kernel_dim, config.conv_bias
        )
        self.dt_bias = nn.Parameter(torch.empty(heads))
        self.A_log = nn.Parameter(torch.empty(heads))
        self.D = nn.Parameter(torch.empty(heads))
        self.norm = GroupNorm(values, self.heads, config.rms_norm_eps)
        add_linears(self, mixer)

    def mix(
        self,
        x: Tensor,
        document_ids: Tensor | None,
        cache: LayerCache | None,
        token_rng: TokenRng | None,
        share: Share,
    ) -> Tensor:
        own, _, *keys, heads = (each // share.parts for each in self.parts)
        projected = project(self.in_proj, x, token_rng, share, self.parts)
        z, to_convolve, dt = projected.split((own, own + sum(keys), heads), dim=-1)
        rate, bias, skip = (
            wide(share.of(local_weight(each), self.parts[4:]))
            for each in (self.A_log, self.dt_bias, self.D)
        )
        steps = softplus(wide(dt) + bias).clamp(*self.limits)
        convolved = self.conv1d(to_convolve, document_ids, cache, share, self.parts[1:4])
        values, b, c = wide(silu(convolved)).split((own, *keys), dim=-1)
        values = values.unflatten(-1, (-1, self.value_dim))
        b, c = (each.unflatten(-1, (-1, self.state_dim)) for each in (b, c))
        if cache is not None:
            steps = steps * cache.is_token()[..., None]
        state = None if cache is None else cache.state()
        written = steps[..., None] * values
        out, state = state_space_scan(written, -rate.exp() * steps, b, c, document_ids, state)
        if cache is not None:
            cache.keep_state(state)
        out = (out + skip[:, None] * values).flatten(2)
        return self.norm(out * silu(wide(z)), share).to(x.dtype)


def state_space_scan(
    written: Tensor,
    decay: Tensor,
    b: Tensor,
    c: Tensor,
    document_ids: Tensor | None,
    state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The outputs S·C [sequences, length, heads, value_dim] and the last state [sequences, heads,
    value_dim, state_dim], in the dtype of all arguments.

    Args:
        written: dt · x, [sequences, length, heads, value_dim].
        decay: dt · A, at most 0: [sequences, length, heads].
        b, c: [sequences, length, groups, state_dim]; a group is of consecutive heads.
        document_ids: int [sequences, length]: the state begins anew where they change; None: all
            tokens are of one document, which continues from `state`, if there is one.

    In chunks (arXiv 2405.21060, section 6): within one, as attention with factors for forgetting;
    between chunks the state is carried.
    """
    if state is None:
        state = written.new_zeros(len(written), *written.shape[2:], b.shape[-1])
    compute = _chunk_by_chunk if written.shape[1] > 1 else _one_token
    with without_autocast(written):
        return compute(written, decay, b, c, document_ids, state)


def _chunk_by_chunk(
    written: Tensor,
    decay: Tensor,
    b: Tensor,
    c: Tensor,
    document_ids: Tensor | None,
    state: Tensor,
) -> tuple[Tensor, Tensor]:
    length = written.shape[1]
    size = min(CHUNK, length)
    copies = written.shape[2] // b.shape[2]
    written, b, c = (in_chunks(each, size) for each in (written, b, c))
    decay = in_chunks(decay[..., None], size)
    reads, continues = documents_in_chunks(document_ids, size, decay.device)
    since = decay_since(decay, reads)
    entered = decay_since_entry(decay, continues)
    scores = (c @ b.transpose(-1, -2)).repeat_interleave(copies, dim=1) * since
    b, c = (each.repeat_interleave(copies, dim=1) for each in (b, c))
    added = (written * since[..., -1, :, None]).transpose(-1, -2) @ b
    carried = entered[..., -1, :, None]
    states = []
    for chunk in range(added.shape[2]):
        states.append(state)
        state = carried[:, :, chunk] * state + added[:, :, chunk]
    before = torch.stack(states, dim=2).transpose(-1, -2)
    out = scores @ written + (c * entered) @ before
    return out.flatten(2, 3)[:, :, :length].transpose(1, 2), state


def _one_token(
    written: Tensor,
    decay: Tensor,
    b: Tensor,
    c: Tensor,
    document_ids: Tensor | None,
    state: Tensor,
) -> tuple[Tensor, Tensor]:
    copies = written.shape[2] // b.shape[2]
    b, c = (each[:, 0].repeat_interleave(copies, dim=1) for each in (b, c))
    state = state * decay[:, 0].exp()[..., None, None] + written[:, 0, :, :, None] * b[:, :, None]
    return (state @ c[..., None])[..., 0][:, None], state
