"""FSDP1, `torch.distributed.fsdp.FullyShardedDataParallel`: for users of it, and for comparison.

Each unit's parameters are one flat tensor, of which each rank keeps a part. Their names and shapes
are the model's only through torch's state-dict functions, which checkpoints go through here. For a
unit that is partly frozen (adapters) FSDP1 allocates the whole gradient all the same; the other
engines do not.
"""

import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import (
    CPUOffload,
    FullyShardedDataParallel,
    MixedPrecision,
    ShardingStrategy,
)
from torch.distributed.fsdp.wrap import CustomPolicy
from torch.optim import Optimizer

from lmforge.core.errors import UserError
from lmforge.core.model.build import build_model
from lmforge.core.model.init_weights import FlatShard
from lmforge.core.model.layers import LanguageModel
from lmforge.core.model.lora import add_lora
from lmforge.core.options.sections import TORCH_SHARDING_NAMES
from lmforge.core.parallel.dims import SHARD
from lmforge.core.parallel.parallel_model import NamedState, ParallelModel

# The module's docstring says this; FSDP1 would print a warning with a line per tensor for each
# block.
warnings.filterwarnings(
    "ignore", message=r"(?s).* has both parameters with requires_grad=True and False"
)

_MODEL_PREFIX = "model."  # the name of the model in ModelWithLoss
_HEAD_WEIGHT = "lm_head.weight"


class FSDP1Model(ParallelModel):
    """A model under FSDP1, whose division of gradients by the number of ranks is undone by
    `gradient_divide_factor`.
    """

    engine = "fsdp1"
    is_sharded = True

    def _wrap(self, model_with_loss: nn.Module) -> nn.Module:
        """Wrap a model whose weights are allocated, on any device.

        Raises UserError for no-shard.
        """
        model = self.model
        dims = self._dims
        options = self.options
        if dims.fsdp_degree == 1:
            # Its no-shard is deprecated, and hybrid sharding with groups of one rank computes wrong
            # gradients, since it does not reduce them.
            raise UserError(
                f"parallel.sharding = {dims.sharding}: over one rank fsdp1 shards nothing; use"
                " engine = ddp"
            )
        # With one group of all ranks it is not hybrid.
        sharding = dims.sharding if dims.is_hybrid else dims.sharding.removeprefix("hybrid-")
        mesh = dims.build_mesh(self.dist_ctx.device.type)
        self._shard_group = mesh.get_group(SHARD)
        units: set[nn.Module] = set(model.blocks)
        if model.lm_head.weight is not model.embeddings[0].weight:
            units |= {model.lm_head, *(model.embeddings if options.wrap_embedding else [])}
        self.fsdp = FullyShardedDataParallel(
            model_with_loss,
            device_mesh=mesh,
            sharding_strategy=ShardingStrategy[TORCH_SHARDING_NAMES[sharding]],
            cpu_offload=CPUOffload(offload_params=options.cpu_offload),
            auto_wrap_policy=CustomPolicy(lambda module: module in units),
            mixed_precision=MixedPrecision(
                param_dtype=self._dtype,
                reduce_dtype=torch.float32,
                # Rotary angles and masks keep their dtype; hidden states are in `dtype` from the
                # embedding on.
                cast_forward_inputs=False,
                cast_root_forward_inputs=False,
            ),
            device_id=self.dist_ctx.device,
            limit_all_gathers=options.limit_all_gathers,
            forward_prefetch=options.forward_prefetch,
            use_orig_params=True,
        )
        self.gradient_divide_factor = float(self.dist_ctx.world_size)
        # FSDP1 puts the names of its wrappers into those of the parameters.
        shapes = self.parameter_shapes
        self.parameter_shapes = {}
        starts = _flat_starts(self.fsdp)
        flat_shards = {}
        for (name, shape), (wrapped, parameter) in zip(
            shapes.items(), model.named_parameters(), strict=True
        ):
            self.parameter_shapes[wrapped] = shape
            flat_shards[wrapped] = FlatShard(name, shape, starts[parameter])
        model.flat_shards = flat_shards
        return self.fsdp

    def micro_batch_context(self, is_last: bool) -> AbstractContextManager[Any]:
        return self.fsdp.no_sync() if self._reduces_once and not is_last else nullcontext()

    def _local_grads(self) -> list[Tensor]:
        # Where this rank holds no part of a tensor, its gradient is empty.
        return [gradient for gradient in super()._local_grads() if gradient.numel()]

    def _sum_over_ranks(self, squares: Tensor) -> Tensor:
        total = squares.sum()
        dist.all_reduce(total, group=self._shard_group)
        return total

    @contextmanager
    def unsharded(self) -> Iterator[LanguageModel]:
        # FSDP1 does not let its modules run while their weights are gathered, so a copy of the
        # model decodes.
        copy = build_model(self.model.config, self.dist_ctx.device)
        if self.model.lora_config is not None:
            add_lora(copy, self.model.lora_config)
        with (
            FullyShardedDataParallel.summon_full_params(self.model_with_loss, writeback=False),
            torch.no_grad(),
        ):
            filled = {
                name.removeprefix(_MODEL_PREFIX): value
                for name, value in self.model_with_loss.named_parameters()
            }
            for name, parameter in copy.named_parameters():
                parameter.copy_(filled[name])
            for own, buffer in zip(copy.buffers(), self.model.buffers(), strict=True):
                own.copy_(buffer)
        yield copy

    def state_dict(self, optimizer: Optimizer, named_state: NamedState) -> dict[str, Any]:
        model, states = get_state_dict(self.model_with_loss, optimizer)
        by_parameter: Any = states["state"]
        if self.model.config.tie_word_embeddings:  # one tensor, under the embedding's name
            model.pop(_MODEL_PREFIX + _HEAD_WEIGHT, None)
        return {
            "model": {name.removeprefix(_MODEL_PREFIX): value for name, value in model.items()},
            "optimizer": {
                name.removeprefix(_MODEL_PREFIX): value for name, value in by_parameter.items()
            },
            **self._balance_state(),
        }

    def load_state_dict(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
        model, states = get_state_dict(self.model_with_loss, optimizer)
        model |= {_MODEL_PREFIX + name: value for name, value in state_dict["model"].items()}
        if self.model.config.tie_word_embeddings:
            model[_MODEL_PREFIX + _HEAD_WEIGHT] = model[
                f"{_MODEL_PREFIX}{self.model.embedding_names[0]}.weight"
            ]
        states["state"] = {
            _MODEL_PREFIX + name: value for name, value in state_dict["optimizer"].items()
        }
        set_state_dict(
            self.model_with_loss, optimizer, model_state_dict=model, optim_state_dict=states
        )


def _flat_starts(fsdp: FullyShardedDataParallel) -> dict[nn.Parameter, int]:
    """Where in each flattened parameter the part of this rank begins; 0 where it has none.

    Private to torch; checked with 2.13.0.
    """
    flat_params: list[Any] = [
        each._handle.flat_param
        for each in FullyShardedDataParallel.fsdp_modules(fsdp)
        if each._handle
    ]
    return {
        parameter: info.intra_param_start_idx or 0
        for flat in flat_params
        for parameter, info in zip(flat._params, flat._shard_param_infos, strict=True)
    }
