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
from lmforge.model.layers import Head, LanguageModel
from lmforge.parallel.engine import Loss
from lmforge.parallel.fsdp2 import FullySharded
from lmforge.parallel.mesh import PIPELINE


def stage_blocks(blocks: int, stages: int) -> list[range]:
    """Which blocks each stage runs: as even as can be, the last stages, which have the head to do, not with more."""
    starts = [stage * (blocks // stages) + min(stage, blocks % stages) for stage in range(stages + 1)]
    return [range(start, end) for start, end in pairwise(starts)]


class Stage(nn.Module):
    """Some neighbouring blocks of a model, with the embedding before the first and the head and its loss after the last."""

    def __init__(self, model: LanguageModel, numbers: range, loss: Loss, first: bool, last: bool) -> None:
        super().__init__()
        self.first, self.last = first, last
        self.embeddings = nn.ModuleList(model.embeddings if first else [])
        self.blocks = nn.ModuleList(model.blocks[number] for number in numbers)
        self.ending = nn.ModuleList([model.final_norm, model.lm_head] if last else [])
        self._model = (model,)  # in a tuple, or all of it would be a module of this one
        self._numbers = numbers
        self._loss = loss
        # What the loss told of each micro-batch since it was last emptied.
        self.told: list[Metrics] = []

    def forward(self, received: Tensor, instead: Loss | None = None, **tensors: Any) -> Tensor:
        """`received` is tokens at the first stage, else the hidden states of the stage before.

        Returns hidden states; at the last stage the sum of losses [1], or what `instead` of the loss gives.
        """
        (model,) = self._model
        batch = model.share(Batch(**tensors))
        noise = model.noise(batch.keys, batch.documents)
        hidden = model.embed(batch.tokens, batch.positions, noise) if self.first else received
        hidden = model.run_blocks(hidden, batch.positions, batch.documents, numbers=self._numbers, noise=noise)
        if not self.last:
            return hidden
        rest = _Rest(model, hidden)
        if instead is not None:
            return instead(rest, batch)
        total, told = self._loss(rest, batch)
        self.told.append(told)
        return torch.stack([total])


class _Rest:
    """What an objective takes for the model at the last stage: there, all but the final norm has been done."""

    def __init__(self, model: LanguageModel, hidden: Tensor) -> None:
        self._model, self._hidden = model, hidden
        self.lm_head = model.lm_head

    def __call__(self, tokens: Tensor, positions: Tensor, documents: Tensor, keys: Tensor | None = None) -> Tensor:
        return self._model.final_norm(self._hidden)


class Pipelined(FullySharded):
    """FSDP2 within the stages of a pipeline. `model` has parameters only where they are of a stage that is here."""

    def __init__(self, model: LanguageModel, loss: Loss, stages_a_rank: int, **about: Any) -> None:
        """Cut `model` in place, on any device. `about` is as FullySharded takes it."""
        mesh = about["mesh"]
        self._group = mesh[PIPELINE].get_group()
        ranks, here = self._group.size(), self._group.rank()
        self._count = ranks * stages_a_rank
        self._whole_shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
        cuts = stage_blocks(len(model.blocks), self._count)
        self._places = [here + ranks * turn for turn in range(stages_a_rank)]
        stages = [Stage(model, cuts[place], loss, place == 0, place == self._count - 1) for place in self._places]
        _drop_others(model, stages)
        super().__init__(nn.ModuleList(stages), model, **about)
        self.batch_copies *= ranks
        self.part = here
        self._stages = stages
        self._schedule: Any = None  # torch's two kinds of schedule have no type in common that can be called
        self._scale = torch.ones(())
        self._names: list[str] = []

    @property
    def name(self) -> str:
        schedule = "1F1B" if len(self._stages) == 1 else f"interleaved 1F1B with {len(self._stages)} stages a rank"
        return f"{super().name}, {schedule}"

    def shapes(self) -> dict[str, torch.Size]:
        return self._whole_shapes

    def _wrap(self, scored: nn.Module, model: LanguageModel, embedding_unit: bool, about: dict[str, Any]) -> None:
        assert isinstance(scored, nn.ModuleList)
        for stage in scored:
            assert isinstance(stage, Stage)
            heads = [module for module in stage.ending if isinstance(module, Head)]
            self._wrap_units(stage, stage.blocks, stage.embeddings if embedding_unit else [], heads, about)

    def accumulate(self, micro_batches: Sequence[Batch], weight: Tensor, mark: Callable[[str], None]) -> list[Metrics]:
        mark("forward")
        whole = Batch.cat(micro_batches)
        self._scale = self.loss_scale / weight
        schedule = self._schedule or self._start(len(micro_batches))
        for stage in self._stages:
            stage.told.clear()
        at_start, at_end = self._stages[0].first, self._stages[-1].last
        tensors: dict[str, Any] = whole.tensors
        # The target is for torch, which computes no loss without one.
        target: dict[str, Any] = {"target": whole.tokens} if at_end else {}
        schedule.step(*([whole.tokens] if at_start else []), **target, return_outputs=False, **tensors)
        # The first time torch runs every stage once more, before the others, to see what comes out.
        told = self._stages[-1].told[-len(micro_batches) :]
        if not self._names:
            self._names = max(self.ranks.gather([*told[0]] if told else []), key=len)
        zero = torch.zeros((), device=self.ranks.device)
        return told or [dict.fromkeys(self._names, (zero, zero))]

    def _start(self, micro_batches: int) -> Any:
        device = self.ranks.device
        stages = [
            PipelineStage(stage, place, self._count, device, group=self._group)
            for stage, place in zip(self._stages, self._places, strict=True)
        ]
        options: dict[str, Any] = {"loss_fn": lambda total, _: total.sum() * self._scale, "scale_grads": False}
        if len(stages) == 1:
            self._schedule = Schedule1F1B(stages[0], micro_batches, **options)
        else:
            self._schedule = ScheduleInterleaved1F1B(list(stages), micro_batches, **options)
        return self._schedule

    def score(self, batch: Batch, instead: Loss) -> Any:
        """What `instead` gives where the last stage is, else 0: sums over ranks come out right."""
        hidden, device = batch.tokens, self.ranks.device
        result: Any = torch.zeros((), dtype=torch.float64, device=device)
        ranks = self._group.size()
        for stage, place in zip(self._stages, self._places, strict=True):
            if not stage.first:
                hidden = torch.empty(self._hidden_shape(batch), dtype=self._hidden_dtype, device=device)
                dist.recv(hidden, group=self._group, group_src=(place - 1) % ranks)
            hidden = stage(hidden, instead=instead if stage.last else None, **batch.tensors)
            if stage.last:
                result = hidden
            else:
                dist.send(hidden.contiguous(), group=self._group, group_dst=(place + 1) % ranks)
        return result

    def _hidden_shape(self, batch: Batch) -> tuple[int, int, int]:
        shared_out = self._sharding.context * self._sharding.tensor
        return batch.rows, batch.length // shared_out, self.model.config.hidden_size


def _drop_others(model: LanguageModel, stages: list[Stage]) -> None:
    """Leave `model` no parameters but those of `stages`, under the names that they have."""
    kept = {id(parameter) for stage in stages for parameter in stage.parameters()}
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if id(parameter) not in kept:
                module.register_parameter(name, None)
