"""Rollouts: the batches of policy optimization, from prompts to micro-batches.

`Rollouts.batches` is the whole way: a set of completions is sampled and scored (sets.py), or read
from the journal (journal.py), then laid out with log-probabilities and advantages
(rollout_batches.py), and cut into the micro-batches of its steps.

A set serves `num_iterations` optimizer steps. Its prompts and the seed of each completion depend
only on the index of the set, so ranks and restarts change only the last bits of sums. The
completions of a prompt are a group, which stays on one rank. A checkpoint between the steps of a
set holds the set. With `max_staleness` sets are sampled while others are learned from, and kept in
a journal.
"""

import math
import time
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lmforge.core import checkpoint
from lmforge.core.data.batch import Batch, Extras
from lmforge.core.errors import LockLost, UserError
from lmforge.core.parallel.dims import data_parallel_rank_and_size
from lmforge.core.stages.build_model import BuiltModel
from lmforge.core.stages.context import RunContext
from lmforge.core.stages.inputs import RunInputs
from lmforge.post.objectives.policy import (
    MEAN_DIFFERENCE,
    build_policy_loss_config,
    completion_metric_names,
)
from lmforge.post.options.align import AlignConfig
from lmforge.post.prompts import PromptPacking
from lmforge.post.reference import ReferenceModel, build_reference
from lmforge.post.rl.journal import SEQUENCE_TENSORS, RolloutJournal
from lmforge.post.rl.rollout_batches import (
    add_advantages,
    add_staleness,
    lay_out,
    split_micro_batches,
    trim_padding,
)
from lmforge.post.rl.scoring import locate_completions
from lmforge.post.rl.sets import SetSampler

# Mean |log-probability of the trainer − of what sampled|, in nats. bf16 kernels differ by some
# 0.01, other weights by more.
MAX_MEAN_DIFFERENCE = 0.1


class Rollouts:
    """The batches of a policy objective: completions sampled from the model as it is now.

    A BatchSource. Every rank has one, with reward functions of its own.
    """

    def __init__(self, ctx: RunContext, inputs: RunInputs, built: BuiltModel) -> None:
        """`inputs.packed_dataset` gives the order of the prompts of its PromptPacking."""
        packing = inputs.packed_dataset.packing
        assert isinstance(packing, PromptPacking)
        assert isinstance(ctx.config, AlignConfig)
        options = ctx.config.rollout
        parallel = ctx.config.parallel
        self.data_wait_seconds = 0.0
        self.dataset = inputs.packed_dataset
        self.global_batch_size = inputs.batch_plan.global_batch_size
        self._ctx = ctx
        self._built = built
        self._options = options
        self._packing = packing
        self._dist_ctx = ctx.dist_ctx
        self._batch_plan = inputs.batch_plan
        # Ranks of tensor, context and pipeline parallelism train on the same completions: the first
        # of them samples. What is called rank here is that of data parallelism.
        rank = ctx.dist_ctx.rank_info.rank
        world_size = ctx.dist_ctx.world_size
        self._rank, self._world_size = data_parallel_rank_and_size(parallel, rank, world_size)
        self._shares = self._world_size < world_size
        split = parallel.context_parallel_degree * parallel.tensor_parallel_degree
        self._samples = built.parallel_model.pipeline_rank == 0 and rank % split == 0
        self._cuts = 2 * split if split > 1 else 1
        self._is_pipeline = parallel.pipeline_parallel_degree > 1
        # A group stays on one rank. If the number of groups is not divisible, the first ranks have
        # one more and the others padding, so that all have the same number of micro-batches.
        self._num_groups = self._batch_plan.global_batch_size // options.num_generations
        base_size, num_larger = divmod(self._num_groups, self._world_size)
        self._first_group = self._rank * base_size + min(self._rank, num_larger)
        self._local_groups = base_size + (self._rank < num_larger)
        self._local_batch_size = self._local_groups * options.num_generations
        # This rank's part of the set: the completions of `num_iterations` steps, one in each
        # sequence.
        self._set_index: int | None = None
        self._set: Batch | None = None
        self._experts_shape: tuple[int, int] | None = None
        if options.replay_routed_experts:
            model = inputs.model_config
            self._experts_shape = model.num_hidden_layers, model.num_experts_per_tok
        self._warned_of_difference = False
        self._journal: RolloutJournal | None = None
        if options.max_staleness:
            first_batch = built.point.step + built.detector.batch_offset
            self._journal = RolloutJournal(ctx, inputs, first_batch)
        self._loss_config = build_policy_loss_config(options)
        self._proximal: ReferenceModel | None = None
        self._reference: ReferenceModel | None = None
        with ExitStack() as opened:
            self._sets = opened.enter_context(
                closing(SetSampler(ctx, inputs, built, self._places, self._samples))
            )
            if self._loss_config.importance_sampling_mode != "none" and options.num_iterations > 1:
                self._proximal = ReferenceModel(
                    built.parallel_model, temperature=options.temperature, replays=True
                )
            if self._loss_config.kl_estimator != "none":
                self._reference = build_reference(ctx, inputs, built, self._loss_config.temperature)
            folder = built.point.checkpoint_folder
            if options.num_iterations > 1 and folder is not None and self._journal is None:
                self._restore(folder)
            self._opened = opened.pop_all()

    def batches(self, batch_index: int) -> list[Batch]:
        """This rank's micro-batches of a step.

        At the first step of a set its completions are sampled and scored.
        """
        began = time.perf_counter()
        set_index, iteration = divmod(batch_index, self._options.num_iterations)
        if self._sets.begin(batch_index, known=self._journal or ()):
            self._set = None
        if self._set is None or self._set_index != set_index:
            step = batch_index - self._built.detector.batch_offset
            self._set = self._make_set(set_index, step)
            self._set_index = set_index
        self.data_wait_seconds += time.perf_counter() - began
        first = iteration * self._local_batch_size
        local = self._set[first : first + self._local_batch_size]
        if self._journal is not None:
            local = add_staleness(local, batch_index, self._sets.wait_seconds)
        if iteration:
            local = local.with_extras(reused=torch.ones(local.tokens.shape))
        if self._is_pipeline:  # its micro-batches have one length
            micro_batches = self._micro_batches(trim_padding(local, self._cuts))
        else:
            micro_batches = [
                trim_padding(batch, self._cuts) for batch in self._micro_batches(local)
            ]
        return [batch.to(self._dist_ctx.device) for batch in micro_batches]

    def _micro_batches(self, batch: Batch) -> list[Batch]:
        return split_micro_batches(
            batch, self._batch_plan.local_batch_size, self._batch_plan.micro_batch_size
        )

    def _make_set(self, set_index: int, step: int) -> Batch:
        """This rank's part of a set: read from the journal, or sampled and laid out."""
        if self._journal is not None and set_index in self._journal:
            with self._dist_ctx.raise_on_all():
                first = self._first_group * self._options.num_generations
                return self._journal.read(set_index, first, self._local_batch_size)
        sampled = self._sets.take(set_index, step)
        if self._shares:  # what the first rank of those that share sequences has sampled
            ids = [prompt._replace(prompt="", columns={}) for prompt in sampled.prompts]
            own = replace(sampled, prompts=ids, episodes=None) if self._samples else None
            # In the order of data-parallel ranks.
            sets = [each for each in self._dist_ctx.all_gather(own) if each is not None]
            sampled = sets[self._rank]
        assert sampled.rewards is not None
        assert sampled.failures is not None
        batch = lay_out(
            [prompt.tokens.tolist() for prompt in sampled.prompts],
            sampled.completions,
            self._batch_plan.sequence_length,
            with_versions=self._journal is not None,
            experts_shape=self._experts_shape,
        )
        models = {"reference_logprobs": self._reference, "proximal_logprobs": self._proximal}
        batch = batch.with_extras(
            **{name: self._logprobs(batch, model) for name, model in models.items() if model}
        )
        batch = add_advantages(
            batch,
            sampled.completions,
            sampled.rewards,
            sampled.failures,
            sampled.learned(self._options),
            self._options,
            self._loss_config,
        )
        if self._journal is not None:
            with self._dist_ctx.raise_on_all():
                if self._samples:
                    self._journal.write(set_index, batch)
        return batch

    def _places(self, set_index: int) -> list[range]:
        """The places in the order of the data of the groups that this rank samples."""
        if not self._samples:
            return []
        iterations = self._options.num_iterations
        steps = range(set_index * iterations, (set_index + 1) * iterations)
        starts = [step * self._num_groups + self._first_group for step in steps]
        return [range(start, start + self._local_groups) for start in starts]

    def _logprobs(self, batch: Batch, model: ReferenceModel) -> Tensor:
        """log p of each label under a model that all ranks share.

        Every rank calls it, with as many completions.
        """
        logprobs = list[Tensor]()
        # In parts of one step each, the same number on all ranks.
        for start in range(0, batch.batch_size, self._local_batch_size):
            of_step = batch[start : start + self._local_batch_size]
            parts = [part.to(self._dist_ctx.device) for part in self._micro_batches(of_step)]
            computed = torch.cat([model.logprobs(part).cpu() for part in parts])
            logprobs.append(computed.float()[: of_step.batch_size])
        return torch.cat(logprobs)

    def validate(self, step: int) -> dict[str, float]:
        """Mean reward and pass rate of greedy completions of validation prompts.

        Every rank calls it, for its part of them.
        """
        prompts = self._packing.validation_prompts
        count = min(self._ctx.config.validation.sequences, len(prompts))
        if not count:
            return {}
        # Evenly spaced.
        chosen = [prompts[index * len(prompts) // count] for index in range(count)]
        local = chosen[self._rank :: self._world_size] if self._samples else []
        table = f"step-{step:06d}-validation"
        rewards = self._sets.sample(step, local, [0] * len(local), table, greedy=True).rewards
        assert rewards is not None
        known = rewards[~rewards.isnan()]
        passed = (known >= self._options.pass_threshold).double().sum()
        number = torch.tensor(float(len(known)), dtype=torch.float64)
        sums = torch.stack([known.sum(), passed, number]).to(self._dist_ctx.device)
        reward, passes, num_known = self._dist_ctx.all_reduce_sum(sums).tolist()
        if not num_known:
            return {}
        return {"val/reward": reward / num_known, "val/pass@1": passes / num_known}

    def warning(self, step: int, record: dict[str, Any]) -> str | None:
        """Says once that what samples computes something else than the trainer.

        A nucleus alone makes its tokens likelier.
        """
        difference = record.get(MEAN_DIFFERENCE, 0.0)
        if record.get("staleness/max", 0.0) > 0:  # other weights have sampled
            return None
        allowed = MAX_MEAN_DIFFERENCE - math.log(self._options.top_p)
        if self._warned_of_difference or difference <= allowed:
            return None
        self._warned_of_difference = True
        return (
            f"step {step}: log-probabilities of sampled tokens differ from the trainer's by"
            f" {difference:.2f} nats on average ({MEAN_DIFFERENCE}): what samples does not compute"
            " this model; check its dtype and options"
        )

    def describe(self, batch_index: int) -> tuple[dict[str, Any], str | None]:
        """Where the completions of a batch are."""
        record = locate_completions(batch_index, self._options, self._world_size)
        if record["completions"] is None:
            return record, "its completions were not written (rollout.log_completions_every)"
        return record, f"its completions are in {self._ctx.run.path / record['completions']}"

    def state_dict(self) -> dict[str, Tensor]:
        """The current set of all ranks, each tensor [num_iterations, global batch size, …].

        Empty where a set serves one step only: a run that resumes samples a new one. Empty too
        where there is a journal, from which what no checkpoint needs any more is deleted. Every
        rank calls it.
        """
        iterations = self._options.num_iterations
        if self._journal is not None and self._dist_ctx.is_rank0:
            try:
                self._journal.prune(min(self._ctx.run.checkpoint_steps(), default=0) // iterations)
            except (OSError, UserError, LockLost) as problem:  # other ranks go on
                self._ctx.console.warn(f"{problem}; the journal keeps what no checkpoint needs")
        if iterations == 1 or self._journal is not None:
            return {}
        assert self._set is not None
        local = self._set.tensors | self._set.extra_tensors
        own = {
            name: tensor.unflatten(0, (iterations, -1)).numpy() for name, tensor in local.items()
        }
        of_ranks = self._dist_ctx.all_gather(own if self._samples else None)
        gathered = [each for each in of_ranks if each is not None]
        full = {
            name: torch.from_numpy(np.concatenate([each[name] for each in gathered], axis=1))
            for name in local
        }
        return {**full, "set": torch.tensor(self._set_index)}

    def _restore(self, folder: Path) -> None:
        """Load the set of a checkpoint, which may be of another number of ranks."""
        with_environment = self._options.environment is not None
        metrics = completion_metric_names(self._options.num_generations, with_environment)
        names = ["old_logprobs", "advantages", *metrics]
        if self._reference is not None:
            names.append("reference_logprobs")
        if self._proximal is not None:
            names.append("proximal_logprobs")
        size = (
            self._options.num_iterations,
            self._batch_plan.global_batch_size,
            self._batch_plan.sequence_length,
        )
        dtypes = SEQUENCE_TENSORS | dict.fromkeys(names, torch.float32)
        state = {
            **{name: torch.zeros(size, dtype=dtype) for name, dtype in dtypes.items()},
            "set": torch.tensor(0),
        }
        if self._experts_shape is not None:
            state["routed_experts"] = torch.zeros(*size, *self._experts_shape, dtype=torch.int32)
        try:
            with self._dist_ctx.raise_on_all(), torch.no_grad():
                checkpoint.load(folder, {"rollouts": state})
        except UserError as reason:
            # The set is corrupt, or was saved with other options.
            self._ctx.console.warn(
                f"{folder}: {reason}; the completions of this set are sampled again"
            )
            return
        first = self._first_group * self._options.num_generations
        self._set_index = int(state.pop("set"))
        local = {
            name: tensor[:, first : first + self._local_batch_size].flatten(0, 1)
            for name, tensor in state.items()
        }
        tensors = {name: local.pop(name) for name in SEQUENCE_TENSORS}
        self._set = Batch(**tensors, extras=Extras(**local))

    def close(self) -> None:
        self._opened.close()
