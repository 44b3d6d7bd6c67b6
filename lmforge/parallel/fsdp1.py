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

from lmforge.cluster.ranks import Ranks
from lmforge.errors import Mistake
from lmforge.model import build
from lmforge.model.layers import LanguageModel
from lmforge.model.lora import add_lora
from lmforge.parallel.engine import Spread
from lmforge.parallel.mesh import SHARD, Sharding

# Said above, and by it once for each block in as many lines as the block has tensors.
warnings.filterwarnings("ignore", message=r"(?s).* has both parameters with requires_grad=True and False")

STRATEGIES = {
    "full-shard": ShardingStrategy.FULL_SHARD,
    "grad-shard": ShardingStrategy.SHARD_GRAD_OP,
    "hybrid-full-shard": ShardingStrategy.HYBRID_SHARD,
    "hybrid-grad-shard": ShardingStrategy._HYBRID_SHARD_ZERO2,
}
_SCORED_PREFIX = "model."  # how `Scored` calls the model
_TIED_HEAD = "lm_head.weight"


class FlatSharded(Spread):
    """FSDP1 divides gradients by the number of ranks; `loss_scale` takes that back."""

    engine = "fsdp1"

    def __init__(
        self,
        scored: nn.Module,
        model: LanguageModel,
        ranks: Ranks,
        sharding: Sharding,
        *,
        dtype: torch.dtype,
        offload: bool = False,
        embedding_unit: bool = True,
        limit_all_gathers: bool = True,
        forward_prefetch: bool = False,
        reduce_every_micro_batch: bool = True,
    ) -> None:
        """Wrap `scored`, whose weights are filled, on any device. Raises Mistake for no-shard, which is DDP."""
        if sharding.shards == 1:
            # Its no-shard is deprecated, and a hybrid of groups of one computes wrong gradients: it exchanges none.
            raise Mistake(f"parallel.sharding = {sharding.name}: over one rank fsdp1 shards nothing; use engine = ddp")
        self._sharding = sharding
        self._offload = offload
        self._reduce_every_micro_batch = reduce_every_micro_batch
        strategy = STRATEGIES[sharding.name]
        if not sharding.hybrid:  # one group of all ranks is no hybrid
            strategy = STRATEGIES[sharding.name.removeprefix("hybrid-")]
        self._mesh = sharding.mesh(ranks.device.type)
        shapes = [parameter.shape for parameter in model.parameters()]
        tied = model.lm_head.weight is model.embeddings[0].weight
        units: set[nn.Module] = set(model.blocks)
        if not tied:
            units |= {model.lm_head, *(model.embeddings if embedding_unit else [])}
        narrow = dtype != torch.float32
        wrapped = FullyShardedDataParallel(
            scored,
            device_mesh=self._mesh,
            sharding_strategy=strategy,
            cpu_offload=CPUOffload(offload_params=offload),
            auto_wrap_policy=CustomPolicy(lambda module: module in units),
            mixed_precision=MixedPrecision(
                param_dtype=dtype if narrow else None,
                reduce_dtype=torch.float32,
                # Angles and masks stay what they are; hidden states are narrow from the embedding on.
                cast_forward_inputs=False,
                cast_root_forward_inputs=False,
            ),
            device_id=ranks.device,
            limit_all_gathers=limit_all_gathers,
            forward_prefetch=forward_prefetch,
            use_orig_params=True,
        )
        super().__init__(wrapped, model, ranks, None)
        self.loss_scale = float(ranks.count)
        names = (name for name, _ in model.named_parameters())
        self._shapes = dict(zip(names, shapes, strict=True))

    @property
    def name(self) -> str:
        return f"{self.engine} {self._sharding.name}" + (", offloaded" if self._offload else "")

    def shapes(self) -> dict[str, torch.Size]:
        return self._shapes

    def micro_batch(self, last: bool) -> AbstractContextManager[Any]:
        assert isinstance(self.scored, FullyShardedDataParallel)
        return nullcontext() if last or self._reduce_every_micro_batch else self.scored.no_sync()

    def zero_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad(set_to_none=not self._offload)

    def _gradients(self) -> list[Tensor]:
        # A tensor of which this rank holds nothing has an empty gradient.
        return [gradient for gradient in super()._gradients() if gradient.numel()]

    def _sum_over_shards(self, squares: Tensor) -> None:
        dist.all_reduce(squares, group=self._mesh.get_group(SHARD))

    @contextmanager
    def whole(self) -> Iterator[LanguageModel]:
        # FSDP1 lets nobody run its modules while their weights are whole, so a copy decodes.
        config = self.model.config
        copy = build(config, seed=None, device=self.ranks.device)
        if self.model.lora is not None:
            add_lora(copy, self.model.lora)
        with FullyShardedDataParallel.summon_full_params(self.scored, writeback=False), torch.no_grad():
            filled = {name.removeprefix(_SCORED_PREFIX): value for name, value in self.scored.named_parameters()}
            for name, parameter in copy.named_parameters():
                parameter.copy_(filled[name])
        yield copy

    def state(self, optimizer: torch.optim.Optimizer, by_name: Callable[..., dict[str, dict[str, Tensor]]]) -> dict[str, Any]:
        model, states = get_state_dict(self.scored, optimizer)
        by_parameter: Any = states["state"]
        if self.model.config.tie_word_embeddings:  # one tensor, which goes by the embedding's name
            model.pop(_SCORED_PREFIX + _TIED_HEAD, None)
        return {
            "model": {name.removeprefix(_SCORED_PREFIX): value for name, value in model.items()},
            "optimizer": {name.removeprefix(_SCORED_PREFIX): value for name, value in by_parameter.items()},
        }

    def loaded(self, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        model, states = get_state_dict(self.scored, optimizer)
        model |= {_SCORED_PREFIX + name: value for name, value in state["model"].items()}
        if self.model.config.tie_word_embeddings:
            model[_SCORED_PREFIX + _TIED_HEAD] = model[_SCORED_PREFIX + _tied_embedding(self.model)]
        states["state"] = {_SCORED_PREFIX + name: value for name, value in state["optimizer"].items()}
        set_state_dict(self.scored, optimizer, model_state_dict=model, optim_state_dict=states)


def _tied_embedding(model: LanguageModel) -> str:
    names = [name for name, module in model.named_modules() if module is model.embeddings[0]]
    return f"{names[0]}.weight".replace("_fsdp_wrapped_module.", "")
