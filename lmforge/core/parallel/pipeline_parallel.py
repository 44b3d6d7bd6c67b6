"""Pipeline parallelism: the blocks are cut into stages on different ranks, and micro-batches flow
through them.

torch.distributed.pipelining runs the schedule and sends activations and gradients. FSDP2 shards a
stage over the ranks that run it. The loss is part of the last stage, so that the head's weight is
gathered where it is used.
"""

from collections import deque
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B

from lmforge.core.data.batch import Batch, Extras, Metrics
from lmforge.core.errors import UserError
from lmforge.core.model.layers import LanguageModel, LMHead
from lmforge.core.parallel.dims import PIPELINE
from lmforge.core.parallel.fsdp2 import FSDP2Model
from lmforge.core.parallel.parallel_model import LossFn


def split_blocks(num_blocks: int, num_stages: int) -> list[range]:
    """Which blocks each stage runs: equal numbers, and one more for the first stages where they do
    not divide.

    The last stage also computes the head.
    """
    starts = [
        stage * (num_blocks // num_stages) + min(stage, num_blocks % num_stages)
        for stage in range(num_stages + 1)
    ]
    return [range(start, end) for start, end in pairwise(starts)]


class StageModule(nn.Module):
    """Consecutive blocks of a model; the first stage has the embedding too, the last one the final
    norm, head and loss.
    """

    def __init__(
        self,
        model: LanguageModel,
        block_indices: range,
        loss_fn: LossFn,
        is_first: bool,
        is_last: bool,
    ) -> None:
        super().__init__()
        self.is_first = is_first
        self.is_last = is_last
        self.embeddings = nn.ModuleList(model.embeddings if is_first else [])
        self.blocks = nn.ModuleList(model.blocks[number] for number in block_indices)
        self.norm_and_head = nn.ModuleList([model.final_norm, model.lm_head] if is_last else [])
        self._model_ref = (model,)  # in a tuple, so that the model is not registered as a submodule
        self._block_indices = block_indices
        self._loss_fn = loss_fn
        # In the last stage: those of the micro-batches to come, and the loss's metrics of those
        # that came. As arguments extras would be cast by FSDP, and not cut by torch's schedule.
        self.extras: deque[Extras | None] = deque()
        self.metrics: list[Metrics] = []

    def forward(self, inputs: Tensor, score_fn: LossFn | None = None, **tensors: Any) -> Tensor:
        """`inputs` are tokens in the first stage, else the hidden states of the stage before.

        Returns hidden states; in the last stage the summed loss [1], or what `score_fn` returns.
        """
        (model,) = self._model_ref
        batch = model.local_batch(
            Batch(**tensors, extras=self.extras.popleft() if self.is_last else None)
        )
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
    """Stands for the model in the last stage, where the objective calls it: only the final norm is
    left to compute.
    """

    def __init__(self, model: LanguageModel, hidden: Tensor) -> None:
        self._model = model
        self._hidden = hidden
        self.lm_head = model.lm_head
        self.context_parallel = model.context_parallel

    def __call__(self, *tensors: Tensor, **named_tensors: Tensor | None) -> Tensor:
        return self._model.final_norm(self._hidden)


class PipelineModel(FSDP2Model):
    """FSDP2 within the stages of a pipeline.

    `model` keeps only the parameters of this rank's stages.
    """

    def _wrap(self, model_with_loss: nn.Module) -> nn.Module:
        """Cut the model into stages in place, on any device."""
        assert self._mesh is not None
        self._group = self._mesh[PIPELINE].get_group()
        size = self._group.size()
        self.pipeline_rank = self._group.rank()
        per_rank = self.options.stages_per_rank
        self._num_stages = size * per_rank
        cuts = split_blocks(len(self.model.blocks), self._num_stages)
        self._indices = [self.pipeline_rank + size * turn for turn in range(per_rank)]
        last = self._num_stages - 1
        check_stages_are_trained(self.model, cuts)
        self._stages = [
            StageModule(
                self.model, cuts[index], self._loss_fn, is_first=index == 0, is_last=index == last
            )
            for index in self._indices
        ]
        _drop_other_parameters(self.model, self._stages)
        self._schedule: Any = None  # torch's two schedules have no common type that can be called
        self._schedule_shape: tuple[int, ...] = ()
        self._loss_factor = torch.ones(())
        # Those of batches by the names of their extras.
        self._metric_names: dict[frozenset[str], list[str]] = {}
        return super()._wrap(nn.ModuleList(self._stages))

    @property
    def description(self) -> str:
        schedule = (
            "1F1B"
            if len(self._stages) == 1
            else f"interleaved 1F1B with {len(self._stages)} stages per rank"
        )
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
        shape = len(micro_batches), micro_batches[0].batch_size, batch.sequence_length
        # Torch does so with a new schedule, which other pipelines may not need now, and ranks of a
        # stage gather together.
        for unit in self._units:
            unit.reshard()
        if shape != self._schedule_shape:
            self._schedule = self._build_schedule(*shape)
            self._schedule_shape = shape
        last = self._stages[-1]
        last.extras = deque(each.extras for each in micro_batches)
        last.metrics.clear()
        inputs = [batch.tokens] if self._stages[0].is_first else []
        # torch computes no loss without a target; the loss here does not use it.
        target: dict[str, Any] = {"target": batch.tokens} if last.is_last else {}
        tensors: dict[str, Any] = batch.tensors
        self._schedule.step(*inputs, **target, return_outputs=False, **tensors)
        return self._on_all_stages([*last.metrics], batch)

    def _on_all_stages(self, metrics: list[Metrics], batch: Batch) -> list[Metrics]:
        """The metrics of the last stage, and on other ranks the same names with zeros."""
        extras = frozenset(batch.extra_tensors)
        if extras not in self._metric_names:
            names = self.dist_ctx.all_gather([*metrics[0]] if metrics else [])
            self._metric_names[extras] = max(names, key=len)
        zero = torch.zeros((), device=self.dist_ctx.device)
        return metrics or [dict.fromkeys(self._metric_names[extras], (zero, zero))]

    def _build_schedule(self, num_micro_batches: int, size: int, length: int) -> Any:
        device = self.dist_ctx.device
        # Shapes are given, or torch would run every stage forward and backward to find them. Its
        # first message on several ranks at once needs the communicator of the group, which all of
        # them make together.
        dist.all_reduce(torch.zeros(1, device=device), group=self._group)
        tokens = torch.empty(size, length, dtype=torch.int64, device="meta")
        hidden = torch.empty(
            self._hidden_shape(size, length),
            dtype=self._hidden_dtype,
            device="meta",
            requires_grad=True,
        )
        loss = torch.empty(1, device="meta", requires_grad=True)
        stages = [
            PipelineStage(
                stage,
                index,
                self._num_stages,
                device,
                input_args=tokens if stage.is_first else hidden,
                output_args=loss if stage.is_last else hidden,
                group=self._group,
            )
            for stage, index in zip(self._stages, self._indices, strict=True)
        ]
        kwargs: dict[str, Any] = {
            "loss_fn": lambda total, _: total.sum() * self._loss_factor,
            "scale_grads": False,
        }
        if len(stages) == 1:
            return Schedule1F1B(stages[0], num_micro_batches, **kwargs)
        return ScheduleInterleaved1F1B([*stages], num_micro_batches, **kwargs)

    def _hidden_shape(self, size: int, length: int) -> tuple[int, int, int]:
        """The shape of what stages send each other."""
        parts = self.options.context_parallel_degree * self.options.tensor_parallel_degree
        return size, length // parts, self.model.config.hidden_size

    def score(self, batch: Batch, score_fn: LossFn) -> Any:
        """The result of `score_fn` on the rank of the last stage and 0 on the others, so that sums
        over ranks are correct.
        """
        hidden = batch.tokens
        device = self.dist_ctx.device
        result: Any = torch.zeros((), dtype=torch.float64, device=device)
        size = self._group.size()
        shape = self._hidden_shape(batch.batch_size, batch.sequence_length)
        self._stages[-1].extras = deque([batch.extras])
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

    def score_tokens(self, batch: Batch, score_fn: LossFn) -> Tensor:
        values = self.score(batch, score_fn)
        if not self._stages[-1].is_last:
            values = torch.empty(batch.tokens.shape, device=self.dist_ctx.device)
        values = values.float().contiguous()
        dist.broadcast(values, group=self._group, group_src=self._group.size() - 1)
        return values

    def score_loss(self, batch: Batch, loss_fn: LossFn) -> Metrics:
        result = self.score(batch, loss_fn)
        return self._on_all_stages([result[1]] if self._stages[-1].is_last else [], batch)[0]


def check_stages_are_trained(model: LanguageModel, cuts: list[range]) -> None:
    """Raise UserError, on all ranks, where one stage of a model has trained weights and another
    none, for whose gradients torch would wait.
    """
    if not any(parameter.requires_grad for parameter in model.parameters()):
        return
    for stage, cut in enumerate(cuts, start=1):
        modules = [model.blocks[number] for number in cut] + [model.lm_head] * (stage == len(cuts))
        if not any(
            parameter.requires_grad for module in modules for parameter in module.parameters()
        ):
            raise UserError(
                f"lora.target_modules: no layer of stage {stage} of {len(cuts)} has an adapter, and"
                " a pipeline needs one in each; name layers of all stages, or use a smaller"
                " parallel.pipeline_parallel_degree"
            )


def _drop_other_parameters(model: LanguageModel, stages: list[StageModule]) -> None:
    """Remove all parameters and buffers from `model` except those of `stages`, which keep their
    names.
    """
    kept = {id(tensor) for stage in stages for tensor in (*stage.parameters(), *stage.buffers())}
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if id(parameter) not in kept:
                module.register_parameter(name, None)
        module._buffers |= {
            name: each if id(each) in kept else None for name, each in module._buffers.items()
        }
