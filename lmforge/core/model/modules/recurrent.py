"""What recurrent mixers have in common: the causal convolution, and how ranks share their work.

With context and tensor parallelism a rank is given whole sequences, computes some of the heads for
them, and adds what they write to its own tokens. It has the matrices whole, and multiplies by its
part of them. Where the ranks do not divide the heads, each computes all of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.nn.functional import linear, pad

from lmforge.core.model.attention import AttentionMask, LayerCache
from lmforge.core.model.layers import apply_linear, apply_replicated, local_weight
from lmforge.core.model.rng.token_rng import TokenRng
from lmforge.core.model.rope import RotaryEmbedding

# Tokens that are computed at once, by matrix products.
CHUNK = 64


def wide(x: Tensor) -> Tensor:
    """In fp32, or fp64 if it is that."""
    return x if x.dtype == torch.float64 else x.float()


@dataclass(frozen=True)
class Share:
    """Which of so many equal parts of its heads a rank computes."""

    part: int = 0
    parts: int = 1

    def divided(self, part: int, parts: int) -> "Share":
        """Such a part of this share; all of it where there is but one."""
        return self if parts == 1 else Share(self.part * parts + part, self.parts * parts)

    def of(self, x: Tensor, segments: Sequence[int], dim: int = 0) -> Tensor:
        """Its part of each of the segments that follow each other along `dim`."""
        if self.parts == 1:
            return x
        parts = (each.chunk(self.parts, dim)[self.part] for each in x.split([*segments], dim))
        return torch.cat([*parts], dim)

    def widened(self, x: Tensor) -> Tensor:
        """x with zeros in place of the channels of the other parts."""
        width = x.shape[-1]
        return pad(x, (self.part * width, (self.parts - 1 - self.part) * width))


WHOLE = Share()


def in_chunks(x: Tensor, size: int) -> Tensor:
    """[sequences, length, heads, width] → [sequences, heads, chunks, size, width], with zeros after
    the last token.
    """
    padded = pad(x, (0, 0, 0, 0, 0, -x.shape[1] % size))
    return padded.transpose(1, 2).unflatten(2, (-1, size))


def documents_in_chunks(
    document_ids: Tensor | None, size: int, device: torch.device
) -> tuple[Tensor, Tensor | None]:
    """Which tokens of a chunk read which, bool [sequences, 1, chunks, size, size] or [size, size]; and
    which of them are of the document that comes into it, [sequences, 1, chunks, size], or None: all.

    document_ids: int [sequences, length], without what pads the last chunk; None: one document.
    """
    causal = torch.ones(size, size, dtype=torch.bool, device=device).tril()
    if document_ids is None:
        return causal, None
    more = -document_ids.shape[1] % size
    ids = pad(document_ids, (0, more), value=-2).unflatten(1, (-1, size))[:, None]
    before = pad(ids[:, :, :-1, -1:], (0, 0, 1, 0), value=-3)
    return causal & (ids[..., :, None] == ids[..., None, :]), ids == before


def decay_since(decay: Tensor, reads: Tensor) -> Tensor:
    """What is left of a token's part of the state at a later token of its chunk, [..., size, size];
    0 where that does not read it.

    decay: logarithms of a token's factors, at most 0: [..., size, 1]. Exponents are masked before
    they are taken, so that none overflows, and each is a sum of its own, since differences of long
    sums lose digits.
    """
    size = decay.shape[-2]
    later = torch.ones(size, size, dtype=torch.bool, device=decay.device).tril(-1)
    steps = decay.expand(*decay.shape[:-1], size).masked_fill(~later, 0.0)
    return steps.cumsum(-2).masked_fill(~reads, -torch.inf).exp()


def decay_since_entry(decay: Tensor, continues: Tensor | None) -> Tensor:
    """What is left at each token of the state that came into its chunk, 0 where a document has begun
    in between: [..., size, width] as `decay`.
    """
    entered = decay.cumsum(-2)
    if continues is not None:
        entered = entered.masked_fill(~continues[..., None], -torch.inf)
    return entered.exp()


class CausalConvolution(nn.Module):
    """A causal convolution of each channel by itself: weight [channels, 1, width], bias [channels]."""

    def __init__(self, channels: int, width: int, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, 1, width))
        self.bias = nn.Parameter(torch.empty(channels)) if bias else None

    def forward(
        self,
        x: Tensor,
        document_ids: Tensor | None,
        cache: LayerCache | None,
        share: Share = WHOLE,
        segments: Sequence[int] = (),
    ) -> Tensor:
        """x [sequences, length, channels] → the same shape. Tokens of other documents [sequences,
        length] count as zeros; None: all are of one, which the cache continues, if there is one.
        x has the channels of a share of these segments.
        """
        length = x.shape[1]
        back = self.weight.shape[-1] - 1
        if cache is None:
            earlier = x.new_zeros(len(x), back, x.shape[-1])
        else:
            earlier = cache.window()
        whole = torch.cat((earlier.to(x.dtype), x), dim=1)
        if cache is not None:
            cache.keep_window(whole)
        ids = None if document_ids is None else pad(document_ids, (back, 0), value=-2)
        # So that taps are added up in fp32.
        weight = wide(share.of(local_weight(self.weight), segments))[:, 0]
        total = x * weight[:, -1]
        if self.bias is not None:
            total = total + share.of(local_weight(self.bias), segments)
        for steps in range(1, back + 1):
            shifted = whole[:, back - steps : back - steps + length]
            if ids is not None and document_ids is not None:
                same = ids[:, back - steps : back - steps + length] == document_ids
                shifted = shifted * same[..., None]
            total = total + shifted * weight[:, -1 - steps]
        return total.to(x.dtype)


def project(
    layer: nn.Linear,
    x: Tensor,
    token_rng: TokenRng | None,
    share: Share = WHOLE,
    segments: Sequence[int] = (),
) -> Tensor:
    """The outputs of `layer`, which are segments of these sizes, that belong to a share."""
    if share.parts == 1:
        return apply_replicated(layer, x, token_rng)
    if type(layer) is nn.Linear:
        bias = None if layer.bias is None else share.of(local_weight(layer.bias), segments)
        return linear(x, share.of(local_weight(layer.weight), segments), bias)
    return share.of(apply_linear(layer, x, token_rng), segments, -1)


class RecurrentMixer(nn.Module):
    """A mixer whose tokens read earlier ones of their document through a state of one size.

    heads: how many parts its work divides into.
    """

    output = "out_proj"  # the name of its last linear layer
    heads: int

    def forward(
        self,
        x: Tensor,
        rotary: RotaryEmbedding,
        mask: AttentionMask,
        cache: LayerCache | None,
        token_rng: TokenRng | None = None,
    ) -> Tensor:
        """x [sequences, length, width] → the same shape and dtype; positions are in the order of
        the tokens alone.
        """
        weight = getattr(self, self.output).weight
        mesh = weight.device_mesh if isinstance(weight, DTensor) else None
        parallel = mask.context_parallel
        tensor_degree = 1 if mesh is None else mesh.size()
        context_degree = 1 if parallel is None else parallel.group.size()
        # A cache keeps the states of all heads.
        if cache is not None or self.heads % tensor_degree:
            tensor_degree = 1
        if cache is not None or self.heads % (tensor_degree * context_degree):
            context_degree = 1
        share = WHOLE
        whole_rng = token_rng
        if mesh is not None:
            x = gather_sequence(x, mesh)
            share = share.divided(mesh.get_local_rank(), tensor_degree)
        if parallel is not None:
            x = parallel.all_gather_sequence(x, 1)
            share = share.divided(parallel.group.rank(), context_degree)
            if token_rng is not None:
                keys = parallel.all_gather_sequence(token_rng.rng_keys, 1)
                whole_rng = replace(token_rng, rng_keys=keys)
        mixed = self.mix(x, mask.document_ids, cache, whole_rng, share)
        if parallel is None:
            mixed = self._project_out(mixed, token_rng, share)
        elif context_degree == 1:  # all heads of its own tokens
            mixed = self._project_out(parallel.own_tokens(mixed, 1), token_rng, share)
        else:
            mixed = self._project_out(mixed, whole_rng, share)
            mixed = parallel.reduce_scatter_sequence(mixed, 1)
        if mesh is not None:
            mixed = scatter_sequence(mixed, mesh, is_partial=tensor_degree > 1)
        return mixed

    def _project_out(self, mixed: Tensor, token_rng: TokenRng | None, share: Share) -> Tensor:
        """The last layer of a share of its inputs; the sum over shares is that of all."""
        layer = getattr(self, self.output)
        if share.parts == 1:
            return project(layer, mixed, token_rng)
        if type(layer) is nn.Linear:
            weight = share.of(local_weight(layer.weight), (layer.in_features,), 1)
            out = linear(mixed, weight)
        else:
            out = apply_linear(layer, share.widened(mixed), token_rng)
        if layer.bias is None:
            return out
        # Added by one rank; the others multiply by 0, since FSDP wants a gradient from each.
        times = float(share.part == 0) - float(type(layer) is not nn.Linear)
        return out + times * local_weight(layer.bias)

    def mix(
        self,
        x: Tensor,
        document_ids: Tensor | None,
        cache: LayerCache | None,
        token_rng: TokenRng | None,
        share: Share,
    ) -> Tensor:
        """What the last layer is given, of a share of the heads, for whole sequences x [sequences,
        length, width].
        """
        raise NotImplementedError


def gather_sequence(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """Hidden states of all ranks of tensor parallelism along the sequence; gradients are summed."""
    part = DTensor.from_local(x, mesh, [Shard(1)], run_check=False)
    return part.redistribute(mesh, [Replicate()]).to_local(grad_placements=[Partial()])


def scatter_sequence(x: Tensor, mesh: DeviceMesh, is_partial: bool) -> Tensor:
    """This rank's part of the sequence of hidden states, which ranks have in sum, if they are
    partial, or each of them.
    """
    if not is_partial:
        return x.chunk(mesh.size(), 1)[mesh.get_local_rank()]
    whole = DTensor.from_local(x, mesh, [Partial()], run_check=False)
    return whole.redistribute(mesh, [Shard(1)]).to_local()
