"""FSDP1, `torch.distributed.fsdp.FullyShardedDataParallel`: for those who come from it, and to compare with.

Each unit's parameters are one flat tensor, of which each rank keeps a part. Names and shapes are those of the model only
through torch's state-dict functions, which checkpoints go through here. Of a unit that is partly frozen (adapters), it
makes room for the whole gradient all the same; the other engines do not.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import CPUOffload, FullyShardedDataParallel, MixedPrecision, ShardingStrategy
from torch.distributed.fsdp.wrap import CustomPolicy

from lmforge.cluster.distributed import DistributedContext
from lmforge.errors import UserError
from lmforge.model import build_model
from lmforge.model.layers import LanguageModel
from lmforge.model.lora import add_lora
from lmforge.parallel.dims import SHARD, ParallelDims
from lmforge.parallel.parallel_model import ParallelModel

# Said above, and by it once for each block in as many lines as the block has tensors.
warnings.filterwarnings("ignore", message=r"(?s).* has both parameters with requires_grad=True and False")

SHARDING_STRATEGIES = {
    "full-shard": ShardingStrategy.FULL_SHARD,
    "grad-shard": ShardingStrategy.SHARD_GRAD_OP,
    "hybrid-full-shard": ShardingStrategy.HYBRID_SHARD,
    "hybrid-grad-shard": ShardingStrategy._HYBRID_SHARD_ZERO2,
}
_MODEL_PREFIX = "model."  # how `Scored` calls the model
_HEAD_WEIGHT = "lm_head.weight"


class FSDP1Model(ParallelModel):
    """FSDP1 divides gradients by the number of ranks; `loss_scale` takes that back."""

    engine = "fsdp1"

    def __init__(
        self,
        model_with_loss: nn.Module,
        model: LanguageModel,
        dist_ctx: DistributedContext,
        dims: ParallelDims,
        *,
        dtype: torch.dtype,
        cpu_offload: bool = False,
        wrap_embedding: bool = True,
        limit_all_gathers: bool = True,
        forward_prefetch: bool = False,
        reduce_every_micro_batch: bool = True,
    ) -> None:
        """Wrap `scored`, whose weights are filled, on any device. Raises UserError for no-shard, which is DDP."""
        if dims.fsdp_degree == 1:
            # Its no-shard is deprecated, and a hybrid of groups of one computes wrong gradients: it exchanges none.
            raise UserError(f"parallel.sharding = {dims.sharding_name}: over one rank fsdp1 shards nothing; use engine = ddp")
        self._dims = dims
        self._cpu_offload = cpu_offload
        self._reduce_every_micro_batch = reduce_every_micro_batch
        strategy = SHARDING_STRATEGIES[dims.sharding_name]
        if not dims.is_hybrid:  # one group of all ranks is no hybrid
            strategy = SHARDING_STRATEGIES[dims.sharding_name.removeprefix("hybrid-")]
        self._mesh = dims.build_mesh(dist_ctx.device.type)
        shapes = [parameter.shape for parameter in model.parameters()]
        tied = model.lm_head.weight is model.embeddings[0].weight
        units: set[nn.Module] = set(model.blocks)
        if not tied:
            units |= {model.lm_head, *(model.embeddings if wrap_embedding else [])}
        narrow = dtype != torch.float32
        wrapped = FullyShardedDataParallel(
            model_with_loss,
            device_mesh=self._mesh,
            sharding_strategy=strategy,
            cpu_offload=CPUOffload(offload_params=cpu_offload),
            auto_wrap_policy=CustomPolicy(lambda module: module in units),
            mixed_precision=MixedPrecision(
                param_dtype=dtype if narrow else None,
                reduce_dtype=torch.float32,
                # Angles and masks stay what they are; hidden states are narrow from the embedding on.
                cast_forward_inputs=False,
                cast_root_forward_inputs=False,
            ),
            device_id=dist_ctx.device,
            limit_all_gathers=limit_all_gathers,
            forward_prefetch=forward_prefetch,
            use_orig_params=True,
        )
        super().__init__(wrapped, model, dist_ctx, None)
        self.loss_scale = float(dist_ctx.world_size)
        names = (name for name, _ in model.named_parameters())
        self._parameter_shapes = dict(zip(names, shapes, strict=True))

    @property
    def description(self) -> str:
        return f"{self.engine} {self._dims.sharding_name}" + (", offloaded" if self._cpu_offload else "")

    def parameter_shapes(self) -> dict[str, torch.Size]:
        return self._parameter_shapes

    def micro_batch_context(self, is_last: bool) -> AbstractContextManager[Any]:
        assert isinstance(self.model_with_loss, FullyShardedDataParallel)
        return nullcontext() if is_last or self._reduce_every_micro_batch else self.model_with_loss.no_sync()

    def zero_grad(self, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad(set_to_none=not self._cpu_offload)

    def _local_grads(self) -> list[Tensor]:
        # A tensor of which this rank holds nothing has an empty gradient.
        return [gradient for gradient in super()._local_grads() if gradient.numel()]

    def _all_reduce_over_shards(self, squares: Tensor) -> None:
        dist.all_reduce(squares, group=self._mesh.get_group(SHARD))

    @contextmanager
    def unsharded(self) -> Iterator[LanguageModel]:
        # FSDP1 lets nobody run its modules while their weights are whole, so a copy decodes.
        config = self.model.config
        copy = build_model(config, self.dist_ctx.device)
        if self.model.lora_config is not None:
            add_lora(copy, self.model.lora_config)
        with FullyShardedDataParallel.summon_full_params(self.model_with_loss, writeback=False), torch.no_grad():
            filled = {name.removeprefix(_MODEL_PREFIX): value for name, value in self.model_with_loss.named_parameters()}
            for name, parameter in copy.named_parameters():
                parameter.copy_(filled[name])
        yield copy

    def state_dict(
        self, optimizer: torch.optim.Optimizer, named_state: Callable[..., dict[str, dict[str, Tensor]]]
    ) -> dict[str, Any]:
        model, states = get_state_dict(self.model_with_loss, optimizer)
        by_parameter: Any = states["state"]
        if self.model.config.tie_word_embeddings:  # one tensor, which goes by the embedding's name
            model.pop(_MODEL_PREFIX + _HEAD_WEIGHT, None)
        return {
            "model": {name.removeprefix(_MODEL_PREFIX): value for name, value in model.items()},
            "optimizer": {name.removeprefix(_MODEL_PREFIX): value for name, value in by_parameter.items()},
        }

    def load_state_dict(self, optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
        model, states = get_state_dict(self.model_with_loss, optimizer)
        model |= {_MODEL_PREFIX + name: value for name, value in state_dict["model"].items()}
        if self.model.config.tie_word_embeddings:
            model[_MODEL_PREFIX + _HEAD_WEIGHT] = model[_MODEL_PREFIX + _tied_embedding_name(self.model)]
        states["state"] = {_MODEL_PREFIX + name: value for name, value in state_dict["optimizer"].items()}
        set_state_dict(self.model_with_loss, optimizer, model_state_dict=model, optim_state_dict=states)


def _tied_embedding_name(model: LanguageModel) -> str:
    names = [name for name, module in model.named_modules() if module is model.embeddings[0]]
    return f"{names[0]}.weight".replace("_fsdp_wrapped_module.", "")
