"""Pipeline parallelism: the blocks are cut into stages on different ranks, and micro-batches flow through them.

torch.distributed.pipelining runs the schedule and sends activations and gradients. FSDP2 shards a stage over the ranks that
run it. The loss is part of the last stage, so that the head's weight is gathered where it is used.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B

from lmforge.data.batch import Batch, Metrics
from lmforge.errors import UserError
from lmforge.model.layers import LanguageModel, LMHead
from lmforge.parallel.dims import PIPELINE
from lmforge.parallel.fsdp2 import FSDP2Model
from lmforge.parallel.parallel_model import LossFn


def split_blocks(num_blocks: int, num_stages: int) -> list[range]:
    """Which blocks each stage runs: equal numbers, and one more for the first stages where they do not divide.

    The last stage also computes the head.
    """
    starts = [stage * (num_blocks // num_stages) + min(stage, num_blocks % num_stages) for stage in range(num_stages + 1)]
    return [range(start, end) for start, end in pairwise(starts)]


class StageModule(nn.Module):
    """Consecutive blocks of a model; the first stage has the embedding too, the last one the final norm, head and loss."""

    def __init__(self, model: LanguageModel, block_indices: range, loss_fn: LossFn, is_first: bool, is_last: bool) -> None:
        super().__init__()
        self.is_first, self.is_last = is_first, is_last
        self.embeddings = nn.ModuleList(model.embeddings if is_first else [])
        self.blocks = nn.ModuleList(model.blocks[number] for number in block_indices)
        self.norm_and_head = nn.ModuleList([model.final_norm, model.lm_head] if is_last else [])
        self._model_ref = (model,)  # in a tuple, so that the model is not registered as a submodule
        self._block_indices = block_indices
        self._loss_fn = loss_fn
        # Whether the next input is meaningless: before its first step torch runs every stage, to find the shapes of outputs.
        self.finds_shapes = False
        # The loss's metrics of each micro-batch, until `forward_backward` clears them.
        self.metrics: list[Metrics] = []

    def forward(self, inputs: Tensor, score_fn: LossFn | None = None, **tensors: Any) -> Tensor:
        """`inputs` are tokens in the first stage, else the hidden states of the stage before.

        Returns hidden states; in the last stage the summed loss [1], or what `score_fn` returns.
        """
        (model,) = self._model_ref
        batch = model.local_batch(Batch(**tensors))
        if self.finds_shapes:
            self.finds_shapes = False
            batch = replace(batch, document_ids=torch.full_like(batch.document_ids, -1))  # of padding no expert is counted
        rng = model.make_token_rng(batch.rng_keys, batch.document_ids)
        hidden = model.embed(batch.tokens, batch.positions, rng) if self.is_first else inputs
        hidden = model.run_blocks(
            hidden,
            batch.positions,
            batch.document_ids,
            layer_indices=self._block_indices,
            token_rng=rng,
            document_starts=batch.document_starts,
        )
        if not self.is_last:
            return hidden
        rest = _NormOnly(model, hidden)
        if score_fn is not None:
            return score_fn(rest, batch)
        total, metrics = self._loss_fn(rest, batch)
        self.metrics.append(metrics)
        return torch.stack([total])


class _NormOnly:
    """Stands for the model in the last stage, where the objective calls it: only the final norm is left to compute."""

    def __init__(self, model: LanguageModel, hidden: Tensor) -> None:
        self._model, self._hidden = model, hidden
        self.lm_head = model.lm_head

    def __call__(self, *tensors: Tensor, **named_tensors: Tensor | None) -> Tensor:
        return self._model.final_norm(self._hidden)


class PipelineModel(FSDP2Model):
    """FSDP2 within the stages of a pipeline. `model` keeps only the parameters of this rank's stages."""

    def _wrap(self, model_with_loss: nn.Module) -> nn.Module:
        """Cut the model into stages in place, on any device."""
        assert self._mesh is not None
        self._group = self._mesh[PIPELINE].get_group()
        size, self.pipeline_rank = self._group.size(), self._group.rank()
        per_rank = self.options.stages_per_rank
        self._num_stages = size * per_rank
        cuts = split_blocks(len(self.model.blocks), self._num_stages)
        self._indices = [self.pipeline_rank + size * turn for turn in range(per_rank)]
        last = self._num_stages - 1
        check_stages_are_trained(self.model, cuts)
        self._stages = [
            StageModule(self.model, cuts[index], self._loss_fn, is_first=index == 0, is_last=index == last)
            for index in self._indices
        ]
        _drop_other_parameters(self.model, self._stages)
        self._schedule: Any = None  # torch's two schedules have no common type that can be called
        self._loss_factor = torch.ones(())
        self._metric_names: list[str] = []
        return super()._wrap(nn.ModuleList(self._stages))

    @property
    def description(self) -> str:
        schedule = "1F1B" if len(self._stages) == 1 else f"interleaved 1F1B with {len(self._stages)} stages per rank"
        return f"{super().description}, {schedule}"

    def _apply_fsdp(self, root: nn.Module) -> None:
        for stage in self._stages:
            heads = [module for module in stage.norm_and_head if isinstance(module, LMHead)]
            self._shard_modules(stage, stage.blocks, stage.embeddings, heads)

    def forward_backward(
        self, micro_batches: Sequence[Batch], num_items: Tensor, set_phase: Callable[[str], None]
    ) -> list[Metrics]:
        set_phase("forward")
        batch = Batch.cat(micro_batches)
        self._loss_factor = self.gradient_divide_factor / num_items
        schedule = self._schedule or self._build_schedule(len(micro_batches))
        for stage in self._stages:
            stage.metrics.clear()
        inputs = [batch.tokens] if self._stages[0].is_first else []
        # torch computes no loss without a target; the loss here does not use it.
        target: dict[str, Any] = {"target": batch.tokens} if self._stages[-1].is_last else {}
        tensors: dict[str, Any] = batch.tensors
        schedule.step(*inputs, **target, return_outputs=False, **tensors)
        # Without those of a run that finds shapes.
        metrics = self._stages[-1].metrics[-len(micro_batches) :]
        if not self._metric_names:
            self._metric_names = max(self.dist_ctx.all_gather([*metrics[0]] if metrics else []), key=len)
        zero = torch.zeros((), device=self.dist_ctx.device)
        return metrics or [dict.fromkeys(self._metric_names, (zero, zero))]

    def _build_schedule(self, num_micro_batches: int) -> Any:
        device = self.dist_ctx.device
        stages = [
            PipelineStage(stage, index, self._num_stages, device, group=self._group)
            for stage, index in zip(self._stages, self._indices, strict=True)
        ]
        for stage in self._stages:
            stage.finds_shapes = True
        kwargs: dict[str, Any] = {"loss_fn": lambda total, _: total.sum() * self._loss_factor, "scale_grads": False}
        if len(stages) == 1:
            self._schedule = Schedule1F1B(stages[0], num_micro_batches, **kwargs)
        else:
            self._schedule = ScheduleInterleaved1F1B([*stages], num_micro_batches, **kwargs)
        return self._schedule

    def score(self, batch: Batch, score_fn: LossFn) -> Any:
        """The result of `score_fn` on the rank of the last stage and 0 on the others, so that sums over ranks are correct."""
        hidden, device = batch.tokens, self.dist_ctx.device
        result: Any = torch.zeros((), dtype=torch.float64, device=device)
        size = self._group.size()
        parts = self.options.context_parallel_degree * self.options.tensor_parallel_degree
        shape = batch.batch_size, batch.sequence_length // parts, self.model.config.hidden_size
        for stage, index in zip(self._stages, self._indices, strict=True):
            if not stage.is_first:
                hidden = torch.empty(shape, dtype=self._hidden_dtype, device=device)
                dist.recv(hidden, group=self._group, group_src=(index - 1) % size)
            hidden = stage(hidden, score_fn=score_fn if stage.is_last else None, **batch.tensors)
            if stage.is_last:
                result = hidden
            else:
                dist.send(hidden.contiguous(), group=self._group, group_dst=(index + 1) % size)
        return result


def check_stages_are_trained(model: LanguageModel, cuts: list[range]) -> None:
    """Raise UserError, on all ranks, where a stage has no trained weights, for which torch would wait for gradients."""
    for stage, cut in enumerate(cuts, start=1):
        modules = [model.blocks[number] for number in cut] + [model.lm_head] * (stage == len(cuts))
        if not any(parameter.requires_grad for module in modules for parameter in module.parameters()):
            raise UserError(
                f"lora.target_modules: no layer of stage {stage} of {len(cuts)} has an adapter, and a pipeline needs one in"
                " each; name layers of all stages, or use a smaller parallel.pipeline_parallel_degree"
            )


def _drop_other_parameters(model: LanguageModel, stages: list[StageModule]) -> None:
    """Remove all parameters and buffers from `model` except those of `stages`, which keep their names."""
    kept = {id(tensor) for stage in stages for tensor in (*stage.parameters(), *stage.buffers())}
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if id(parameter) not in kept:
                module.register_parameter(name, None)
        module._buffers |= {name: each if id(each) in kept else None for name, each in module._buffers.items()}
