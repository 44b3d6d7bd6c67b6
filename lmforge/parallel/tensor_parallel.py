"""Tensor parallelism with sequence-parallel norms: the matrices of a block are split over ranks, and between them the sequence.

Heads and feed-forward channels are split; the outputs of attention and feed-forward are summed and scattered along the
sequence in one collective (Korthikanti et al., arXiv 2205.05198). torch's DTensor styles do the splitting, so that FSDP2 and
checkpoints understand the result. Embedding and head are split by vocabulary where it divides. Where it does not, every rank
has them whole, and looks up and scores (objectives/sharded_head.py) its own part of the sequence.
"""

import logging
import warnings
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from lmforge.model.config import ModelConfig
from lmforge.model.layers import LanguageModel
from lmforge.model.llama import Llama

# Hidden states are local tensors of DTensors, which are views; nothing here writes into them.
warnings.filterwarnings("ignore", message=r"FSDP2-wrapped module .* returned a view tensor")
# It warns when a full tensor is gathered in two collectives instead of one, which happens only where weights are compared.
logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)

SEQUENCE_DIM = 1  # of hidden states [sequences, length, width]


def apply_tensor_parallel(model: LanguageModel, mesh: DeviceMesh) -> None:
    """Split the parameters of `model` (on any device, meta too) over the one-dimensional `mesh`, in place."""
    assert isinstance(model, Llama)
    model.sequence_parallel_shard = mesh.get_local_rank(), mesh.size()
    for block in model.blocks:
        parallelize_module(block, mesh, _block_plan(model.config))
    parallelize_module(model.final_norm, mesh, SequenceParallel(use_local_output=True))
    (embedding,) = model.embeddings
    by_vocabulary = model.config.vocab_size % mesh.size() == 0
    split = RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(SEQUENCE_DIM))
    parallelize_module(embedding, mesh, split if by_vocabulary else _ReplicatedEmbedding())
    head = distribute_tensor(model.lm_head.weight, mesh, [Shard(0) if by_vocabulary else Replicate()])
    model.lm_head.weight = nn.Parameter(head)
    model.tie_weights()


def _block_plan(config: ModelConfig) -> dict[str, ParallelStyle]:
    def gather_first(num_arguments: int) -> ParallelStyle:
        rest = (None,) * (num_arguments - 1)
        return PrepareModuleInput(
            input_layouts=(Shard(SEQUENCE_DIM), *rest), desired_input_layouts=(Replicate(), *rest), use_local_output=False
        )

    plan: dict[str, ParallelStyle] = {
        "input_layernorm": SequenceParallel(),
        "self_attn": gather_first(4),
        "self_attn.o_proj": RowwiseParallel(output_layouts=Shard(SEQUENCE_DIM)),
        "post_attention_layernorm": SequenceParallel(),
        "mlp": gather_first(1),
        "mlp.down_proj": RowwiseParallel(output_layouts=Shard(SEQUENCE_DIM)),
    }
    columns = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"]
    plan |= {name: ColwiseParallel() for name in columns}
    if config.qk_norm:
        # These see [sequences, length, heads, head_dim], split by heads.
        norm = SequenceParallel(sequence_dim=2, use_local_output=True)
        plan |= {"self_attn.q_norm": norm, "self_attn.k_norm": norm}
    return plan


class _ReplicatedEmbedding(ParallelStyle):
    """The full embedding on every rank, which looks up its own part of the sequence."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def replicate(name: str, module: nn.Module, mesh: DeviceMesh) -> None:
            for key, parameter in module.named_parameters():
                module.register_parameter(key, nn.Parameter(distribute_tensor(parameter, mesh, [Replicate()])))

        def shard_tokens(module: nn.Module, inputs: Any, mesh: DeviceMesh) -> Any:
            tokens = DTensor.from_local(inputs[0], mesh, [Replicate()], run_check=False)
            return (tokens.redistribute(placements=[Shard(SEQUENCE_DIM)]),)

        def to_local(module: nn.Module, output: Any, mesh: DeviceMesh) -> Tensor:
            return output.to_local()

        return distribute_module(module, device_mesh, replicate, shard_tokens, to_local)  # type: ignore[arg-type]
