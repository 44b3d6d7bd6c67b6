"""Pipeline parallel: the blocks are cut into stages, each on ranks of its own, and micro-batches flow through them.

torch.distributed.pipelining runs the schedule and sends activations and gradients; a stage is sharded by FSDP2 over the
ranks that share it. The loss is part of the last stage, so that the head's weight is gathered where it is used.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B

from lmforge.data.batch import Batch, Metrics
from lmforge.model.layers import LanguageModel, LMHead
from lmforge.parallel.dims import PIPELINE
from lmforge.parallel.fsdp2 import FSDP2Model
from lmforge.parallel.parallel_model import LossFn


def split_blocks(num_blocks: int, num_stages: int) -> list[range]:
    """Which blocks each stage runs: as even as can be, the last stages, which have the head to do, not with more."""
    starts = [stage * (num_blocks // num_stages) + min(stage, num_blocks % num_stages) for stage in range(num_stages + 1)]
    return [range(start, end) for start, end in pairwise(starts)]


class StageModule(nn.Module):
    """Some neighbouring blocks of a model, with the embedding before the first and the head and its loss after the last."""

    def __init__(self, model: LanguageModel, block_indices: range, loss_fn: LossFn, is_first: bool, is_last: bool) -> None:
        super().__init__()
        self.is_first, self.is_last = is_first, is_last
        self.embeddings = nn.ModuleList(model.embeddings if is_first else [])
        self.blocks = nn.ModuleList(model.blocks[number] for number in block_indices)
        self.norm_and_head = nn.ModuleList([model.final_norm, model.lm_head] if is_last else [])
        self._model_ref = (model,)  # in a tuple, or all of it would be a module of this one
        self._block_indices = block_indices
        self._loss_fn = loss_fn
        # What the loss told of each micro-batch since it was last emptied.
        self.metrics: list[Metrics] = []

    def forward(self, inputs: Tensor, score_fn: LossFn | None = None, **tensors: Any) -> Tensor:
        """`received` is tokens at the first stage, else the hidden states of the stage before.

        Returns hidden states; at the last stage the sum of losses [1], or what `instead` of the loss gives.
        """
        (model,) = self._model_ref
        batch = model.local_batch(Batch(**tensors))
        noise = model.make_token_rng(batch.rng_keys, batch.document_ids)
        hidden = model.embed(batch.tokens, batch.positions, noise) if self.is_first else inputs
        hidden = model.run_blocks(
            hidden, batch.positions, batch.document_ids, layer_indices=self._block_indices, token_rng=noise
        )
        if not self.is_last:
            return hidden
        rest = _NormOnly(model, hidden)
        if score_fn is not None:
            return score_fn(rest, batch)
        total, told = self._loss_fn(rest, batch)
        self.metrics.append(told)
        return torch.stack([total])


class _NormOnly:
    """What an objective takes for the model at the last stage: there, all but the final norm has been done."""

    def __init__(self, model: LanguageModel, hidden: Tensor) -> None:
        self._model, self._hidden = model, hidden
        self.lm_head = model.lm_head

    def __call__(self, tokens: Tensor, positions: Tensor, document_ids: Tensor, rng_keys: Tensor | None = None) -> Tensor:
        return self._model.final_norm(self._hidden)


class PipelineModel(FSDP2Model):
    """FSDP2 within the stages of a pipeline. `model` has parameters only where they are of a stage that is here."""

    def __init__(self, model: LanguageModel, loss_fn: LossFn, stages_per_rank: int, **fsdp_options: Any) -> None:
        """Cut `model` in place, on any device. `about` is as FullySharded takes it."""
        mesh = fsdp_options["mesh"]
        self._pipeline_group = mesh[PIPELINE].get_group()
        ranks, here = self._pipeline_group.size(), self._pipeline_group.rank()
        self._num_stages = ranks * stages_per_rank
        self._parameter_shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
        cuts = split_blocks(len(model.blocks), self._num_stages)
        self._stage_indices = [here + ranks * turn for turn in range(stages_per_rank)]
        stages = [
            StageModule(model, cuts[place], loss_fn, place == 0, place == self._num_stages - 1) for place in self._stage_indices
        ]
        _drop_other_parameters(model, stages)
        super().__init__(nn.ModuleList(stages), model, **fsdp_options)
        self.batch_copies *= ranks
        self.part = here
        self._stages = stages
        self._schedule: Any = None  # torch's two kinds of schedule have no type in common that can be called
        self._loss_factor = torch.ones(())
        self._metric_names: list[str] = []

    @property
    def description(self) -> str:
        schedule = "1F1B" if len(self._stages) == 1 else f"interleaved 1F1B with {len(self._stages)} stages a rank"
        return f"{super().description}, {schedule}"

    def parameter_shapes(self) -> dict[str, torch.Size]:
        return self._parameter_shapes

    def _apply_fsdp(
        self, model_with_loss: nn.Module, model: LanguageModel, wrap_embedding: bool, fsdp_kwargs: dict[str, Any]
    ) -> None:
        assert isinstance(model_with_loss, nn.ModuleList)
        for stage in model_with_loss:
            assert isinstance(stage, StageModule)
            heads = [module for module in stage.norm_and_head if isinstance(module, LMHead)]
            self._shard_modules(stage, stage.blocks, stage.embeddings if wrap_embedding else [], heads, fsdp_kwargs)

    def forward_backward(
        self, micro_batches: Sequence[Batch], num_items: Tensor, set_phase: Callable[[str], None]
    ) -> list[Metrics]:
        set_phase("forward")
        whole = Batch.cat(micro_batches)
        self._loss_factor = self.loss_scale / num_items
        schedule = self._schedule or self._build_schedule(len(micro_batches))
        for stage in self._stages:
            stage.metrics.clear()
        at_start, at_end = self._stages[0].is_first, self._stages[-1].is_last
        tensors: dict[str, Any] = whole.tensors
        # The target is for torch, which computes no loss without one.
        target: dict[str, Any] = {"target": whole.tokens} if at_end else {}
        schedule.step(*([whole.tokens] if at_start else []), **target, return_outputs=False, **tensors)
        # The first time torch runs every stage once more, before the others, to see what comes out.
        told = self._stages[-1].metrics[-len(micro_batches) :]
        if not self._metric_names:
            self._metric_names = max(self.dist_ctx.all_gather([*told[0]] if told else []), key=len)
        zero = torch.zeros((), device=self.dist_ctx.device)
        return told or [dict.fromkeys(self._metric_names, (zero, zero))]

    def _build_schedule(self, num_micro_batches: int) -> Any:
        device = self.dist_ctx.device
        stages = [
            PipelineStage(stage, place, self._num_stages, device, group=self._pipeline_group)
            for stage, place in zip(self._stages, self._stage_indices, strict=True)
        ]
        options: dict[str, Any] = {"loss_fn": lambda total, _: total.sum() * self._loss_factor, "scale_grads": False}
        if len(stages) == 1:
            self._schedule = Schedule1F1B(stages[0], num_micro_batches, **options)
        else:
            self._schedule = ScheduleInterleaved1F1B(list(stages), num_micro_batches, **options)
        return self._schedule

    def score(self, batch: Batch, score_fn: LossFn) -> Any:
        """What `instead` gives where the last stage is, else 0: sums over ranks come out right."""
        hidden, device = batch.tokens, self.dist_ctx.device
        result: Any = torch.zeros((), dtype=torch.float64, device=device)
        ranks = self._pipeline_group.size()
        for stage, place in zip(self._stages, self._stage_indices, strict=True):
            if not stage.is_first:
                hidden = torch.empty(self._hidden_shape(batch), dtype=self._hidden_dtype, device=device)
                dist.recv(hidden, group=self._pipeline_group, group_src=(place - 1) % ranks)
            hidden = stage(hidden, score_fn=score_fn if stage.is_last else None, **batch.tensors)
            if stage.is_last:
                result = hidden
            else:
                dist.send(hidden.contiguous(), group=self._pipeline_group, group_dst=(place + 1) % ranks)
        return result

    def _hidden_shape(self, batch: Batch) -> tuple[int, int, int]:
        shared_out = self._dims.context_parallel_degree * self._dims.tensor_parallel_degree
        return batch.batch_size, batch.sequence_length // shared_out, self.model.config.hidden_size


def _drop_other_parameters(model: LanguageModel, stages: list[StageModule]) -> None:
    """Leave `model` no parameters but those of `stages`, under the names that they have."""
    kept = {id(parameter) for stage in stages for parameter in stage.parameters()}
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if id(parameter) not in kept:
                module.register_parameter(name, None)
