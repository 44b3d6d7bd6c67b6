"""Tensor parallelism with sequence-parallel norms: the matrices of a block are split over ranks; between them the sequence is
split.

Heads and feed-forward channels are split; the outputs of attention and feed-forward are summed and scattered along the
sequence in one collective (Korthikanti et al., arXiv 2205.05198). torch's DTensor styles do the splitting, so that FSDP2 and
checkpoints understand the result. Embedding and head are split by vocabulary where it divides. Where it does not, every rank
has them whole, and looks up and scores (objectives/sharded_head.py) its own part of the sequence.
"""

import logging
import warnings

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
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
    if by_vocabulary:
        split = RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(SEQUENCE_DIM))
        parallelize_module(embedding, mesh, split)
    else:
        # Every rank has the full embedding, and looks up its own part of the sequence.
        to_shard = PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Shard(SEQUENCE_DIM))
        parallelize_module(embedding, mesh, to_shard)
        parallelize_module(embedding, mesh, SequenceParallel(use_local_output=True))
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
