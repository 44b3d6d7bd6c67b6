"""Tensor parallelism with sequence-parallel norms: the matrices of a block are split over ranks;
between them the sequence is split.

Heads and feed-forward channels are split; of mixtures of experts the tokens, but for shared
experts. The outputs of attention and feed-forward are summed and scattered along the sequence in
one collective (Korthikanti et al., arXiv 2205.05198). DTensor's styles do the splitting, so that
FSDP2 and checkpoints understand the result. Embedding and head are split by vocabulary where it
divides. Where it does not, every rank has them whole, and looks up and scores
(core/losses/sharded_head.py) its own part of the sequence.
"""

import logging
import warnings
from dataclasses import replace

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import (
    DTensor,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
)
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from lmforge.core.model.blocks import Block, Linear, Mixer
from lmforge.core.model.config import ModelConfig
from lmforge.core.model.layers import LanguageModel

# Hidden states are local tensors of DTensors, which are views; nothing here writes into them.
warnings.filterwarnings("ignore", message=r"FSDP2-wrapped module .* returned a view tensor")
# It warns when a full tensor is gathered in two collectives instead of one, which happens only
# where weights are compared.
logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)

SEQUENCE_DIM = 1  # of hidden states [sequences, length, width]


def apply_tensor_parallel(model: LanguageModel, mesh: DeviceMesh) -> None:
    """Split the parameters of `model` (on any device, meta too) over the one-dimensional `mesh`, in
    place.
    """
    model.setup = replace(model.setup, sequence_shard=(mesh.get_local_rank(), mesh.size()))
    for layer, block in zip(model.blocks, model.config.blocks, strict=True):
        parallelize_module(layer, mesh, _block_plan(model.config, block))
        for mixer in block.mixers:
            if mixer.mixes_tokens and not mixer.states:  # a number of each head
                _split_vectors(layer, mixer, mesh)
    if model.balance is not None:
        model.balance.groups += (mesh.get_group(),)
    parallelize_module(model.final_norm, mesh, SequenceParallel(use_local_output=True))
    (embedding,) = model.embeddings
    by_vocabulary = model.config.vocab_size % mesh.size() == 0
    if by_vocabulary:
        split = RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(SEQUENCE_DIM))
        parallelize_module(embedding, mesh, split)
        # A compiled block must not be given a tensor that is still being reduced: the gradient
        # would be wrong (torch 2.13).
        embedding.register_forward_hook(lambda module, args, hidden: hidden.clone())
    else:
        # Every rank has the full embedding, and looks up its own part of the sequence.
        to_shard = PrepareModuleInput(
            input_layouts=Replicate(), desired_input_layouts=Shard(SEQUENCE_DIM)
        )
        parallelize_module(embedding, mesh, to_shard)
        parallelize_module(embedding, mesh, SequenceParallel(use_local_output=True))
    head = distribute_tensor(
        model.lm_head.weight, mesh, [Shard(0) if by_vocabulary else Replicate()]
    )
    model.lm_head.weight = nn.Parameter(head)
    model.tie_weights()


def _block_plan(config: ModelConfig, block: Block) -> dict[str, ParallelStyle]:
    over = {
        "sequence": SequenceParallel(use_local_output=True),
        # These see [sequences, length, heads, head_dim], split by heads, or [sequences, length,
        # channels], split by channels.
        "heads": SequenceParallel(sequence_dim=2, use_local_output=True),
        "channels": ChannelParallelNorm(),
        "latents": Replicated(),
    }
    plan: dict[str, ParallelStyle] = {}
    recurrent = tuple(f"{mixer.name}." for mixer in block.mixers if mixer.states)
    for mixer in block.mixers:
        owner = mixer.name
        if mixer.states or (mixer.splits_tokens and not mixer.is_mixture):
            plan[owner] = Replicated()
            continue
        if mixer.is_mixture:
            whole = (mixer.router, "experts", mixer.shared_gate, *mixer.latents)
            plan |= {f"{owner}.{name}": Replicated() for name in whole if name}
            if not mixer.shared:
                continue
            owner = f"{owner}.{mixer.shared}"
        if split := [each for each in mixer.linears if each.name.startswith(f"{owner}.")]:
            plan[owner] = _gather_first(4 if mixer.mixes_tokens else 1)
            plan |= {each.name: _split(each) for each in split}
    norms = block.norms(config.hidden_size)
    split_norms = {each.name: each.over for each in norms if not each.name.startswith(recurrent)}
    return plan | {name: over[kind] for name, kind in split_norms.items()}


def _split_vectors(layer: nn.Module, mixer: Mixer, mesh: DeviceMesh) -> None:
    for vector in mixer.vectors:
        owner, _, name = vector.name.rpartition(".")
        parameter = layer.get_parameter(vector.name)
        part = distribute_tensor(parameter.detach(), mesh, [Shard(0)])
        layer.get_submodule(owner).register_parameter(
            name, nn.Parameter(part, requires_grad=parameter.requires_grad)
        )


def _gather_first(num_arguments: int) -> ParallelStyle:
    """The first of these arguments of a module, the hidden states, is gathered."""
    rest = (None,) * (num_arguments - 1)
    return PrepareModuleInput(
        input_layouts=(Shard(SEQUENCE_DIM), *rest),
        desired_input_layouts=(Replicate(), *rest),
        use_local_output=False,
    )


def _split(linear: Linear) -> ParallelStyle:
    if linear.whole:
        return Replicated()
    if linear.residual:
        return RowwiseParallel(output_layouts=Shard(SEQUENCE_DIM))
    return ColwiseParallel()


class Replicated(ParallelStyle):
    """What every rank has whole: a mixture of experts or a fused feed-forward, computed for its own
    part of the sequence, what makes latents, and a recurrent mixer, of which it computes some heads.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return distribute_module(module, device_mesh)


class ChannelParallelNorm(ParallelStyle):
    """A norm over channels that are split over ranks, and so are its weights: the mean square is
    all-reduced.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def split(name: str, norm: nn.Module, mesh: DeviceMesh) -> None:
            for each, parameter in norm.named_parameters():
                norm.register_parameter(
                    each, nn.Parameter(distribute_tensor(parameter, mesh, [Shard(0)]))
                )

        return distribute_module(
            module,
            device_mesh,
            split,
            lambda norm, inputs, mesh: DTensor.from_local(inputs[0], mesh, [Shard(-1)]),  # type: ignore[arg-type]
            lambda norm, output, mesh: output.to_local(),
        )
