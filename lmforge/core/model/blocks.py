"""What a block of a model is made of, said without torch: an ordered list of residual branches, each
with its norms and one or several mixers, whose outputs are summed.

The families put blocks together (family.py), modules/decoder.py computes them, and what depends on
their matrices and norms (parameters, FLOPs, first values, tensor parallelism, `lmforge plan`) is
read from here.
"""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Linear:
    """A linear layer of a block by its name there.

    A `residual` one writes into the residual stream: it starts with smaller weights, and tensor
    parallelism splits its inputs; of the others it splits the outputs, but for a `whole` one.
    `experts` of them may be stacked.
    """

    name: str
    inputs: int
    outputs: int
    bias: bool = False
    residual: bool = False
    experts: int = 1
    whole: bool = False

    @property
    def weights(self) -> int:
        """The numbers of its matrices."""
        return self.experts * self.inputs * self.outputs


@dataclass(frozen=True)
class Norm:
    """A norm of a block by its name there, with `size` weights, and `eps` if it is not that of the
    model. `over` says what tensor parallelism has split before it: the sequence of hidden states,
    the heads of queries and keys, or their channels, over which the norm goes; nothing of latents.
    has_offset: the family's norm_offset is added to its weights.
    """

    name: str
    size: int
    over: Literal["sequence", "heads", "channels", "latents"] = "sequence"
    eps: float | None = None
    has_offset: bool = True


@dataclass(frozen=True)
class Vector:
    """A parameter of a block that is no matrix, by its name there: one number for each head, or the
    few of each channel's convolution [channels, 1, width].

    first: its first value; None: evenly from −1/sqrt(width) to 1/sqrt(width).
    stored: the names on disk of the tensors whose rows it has, with the number of each; () where it
    is stored whole.
    """

    name: str
    shape: tuple[int, ...]
    first: float | tuple[float, ...] | None = None
    stored: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True)
class Mixer:
    """What a branch computes, by the name of its module in the block.

    kind: the entry of the registry's `mixer` that makes the module. linears: its linear layers, in
    the order of the forward pass, of a mixture the router first. norms, vectors: its own.
    mixes_tokens: it is given positions, a mask and the cache; others compute each token by itself.
    is_mixture: of experts.
    states: of a recurrent one, the shapes of what it keeps of a sequence while it decodes: the last
    tokens of its convolution, [tokens, channels], and the state; others that mix tokens keep keys
    and values. state_flops: floating-point operations of a token with the state.
    shared, shared_gate: of a mixture, its modules for the experts that all tokens go to, and for
    what these are multiplied by, if there is that. latents: its linear layers before and after the
    other experts, if these compute in fewer channels.
    """

    name: str
    kind: str
    linears: tuple[Linear, ...]
    norms: tuple[Norm, ...] = ()
    vectors: tuple[Vector, ...] = ()
    mixes_tokens: bool = False
    is_mixture: bool = False
    states: tuple[tuple[int, ...], ...] = ()
    state_flops: int = 0
    shared: str = ""
    shared_gate: str = ""
    latents: tuple[str, ...] = ()

    @property
    def splits_tokens(self) -> bool:
        """Whether tensor parallelism splits its tokens, and every rank has its matrices whole."""
        return self.is_mixture or all(each.whole for each in self.linears)

    @property
    def router(self) -> str:
        """The name of a mixture's router in its module."""
        return self.linears[0].name.rpartition(".")[2]


@dataclass(frozen=True)
class Branch:
    """A residual branch: hidden + after(sum of mixers of before(hidden)), with names of norms; None
    where there is none.
    """

    mixers: tuple[Mixer, ...]
    before: str | None = None
    after: str | None = None


@dataclass(frozen=True)
class Block:
    """One layer. Equal blocks of a model differ in their weights alone, and in what attention sees,
    so that one compilation and one trace serve them all.
    """

    branches: tuple[Branch, ...]

    @property
    def mixers(self) -> tuple[Mixer, ...]:
        return tuple(mixer for branch in self.branches for mixer in branch.mixers)

    @property
    def linears(self) -> tuple[Linear, ...]:
        """Its linear layers, in the order of the forward pass."""
        return tuple(linear for mixer in self.mixers for linear in mixer.linears)

    @property
    def mixture(self) -> Mixer | None:
        """The mixture of experts, where it has one."""
        return next((mixer for mixer in self.mixers if mixer.is_mixture), None)

    @property
    def states(self) -> tuple[tuple[int, ...], ...]:
        """Those of its recurrent mixer; () where it has none."""
        return next((mixer.states for mixer in self.mixers if mixer.states), ())

    @property
    def attends(self) -> bool:
        """Whether it keeps keys and values of earlier tokens."""
        return any(mixer.mixes_tokens and not mixer.states for mixer in self.mixers)

    @property
    def vectors(self) -> tuple[Vector, ...]:
        return tuple(vector for mixer in self.mixers for vector in mixer.vectors)

    def norms(self, width: int) -> tuple[Norm, ...]:
        """Its norms, where hidden states have this width."""
        names = (name for branch in self.branches for name in (branch.before, branch.after) if name)
        own = (norm for mixer in self.mixers for norm in mixer.norms)
        return (*(Norm(name, width) for name in names), *own)
