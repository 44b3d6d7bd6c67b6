"""The batches of a distillation: those of fine-tuning, or answers of the student, with what the
teacher says of them.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache, partial

import torch
from torch import Tensor

from lmforge.core.data.batch import Batch, Extras
from lmforge.core.data.labels import IGNORE_INDEX
from lmforge.core.data.order import derive_key
from lmforge.core.stages.build_model import BuiltModel
from lmforge.core.stages.context import RunContext
from lmforge.core.stages.dataset_batches import DatasetBatches
from lmforge.core.stages.inputs import RunInputs
from lmforge.core.steps.callbacks import BatchSource
from lmforge.post.distillation.stored import read_stored
from lmforge.post.distillation.teacher import (
    TeacherModel,
    build_teacher,
    open_server,
    teacher_digest,
)
from lmforge.post.objectives.distillation import DistillationConfig, DistillationObjective
from lmforge.post.options.tuning import DistillConfig
from lmforge.post.rl.rollout_batches import lay_out
from lmforge.post.rl.sampler import (
    InProcessSampler,
    SampledCompletion,
    SampleRequest,
    SamplingSettings,
    sample_all,
)
from lmforge.serve.decoding.model_loading import prefix_and_stop_ids

DECODE_BATCH_SIZE = 64


def build_distill_batches(ctx: RunContext, inputs: RunInputs, built: BuiltModel) -> BatchSource:
    """The batches, and what the objective has to know of the teacher. Every rank calls it."""
    config = ctx.config
    objective = built.objective
    assert isinstance(config, DistillConfig)
    if isinstance(objective, DistillationObjective):  # and not one of a plugin
        objective.config = replace(objective.config, vocab_size=inputs.tokenizer.vocab_size)
    if config.distill.logprobs is not None:
        sampled = config.distill.stored == "sampled"
        loss = DistillationConfig(
            0.0, config.distill.temperature, 1.0, inputs.tokenizer.vocab_size, sampled
        )
        k = min(config.distill.top_k, inputs.tokenizer.vocab_size)
        get_teacher = cache(partial(build_teacher, ctx, built))  # only if something is missing
        served = open_server(config, inputs) if config.distill.server else None

        def score(batch: Batch) -> Tensor:
            if served is not None:
                return served.score_top(batch, inputs.tokenizer.vocab_size)
            return get_teacher().score_top(batch, k, loss)

        read_stored(ctx, inputs, teacher_digest(config, inputs), score)
        return DatasetBatches(ctx, inputs, built)
    teacher = build_teacher(ctx, built)
    if isinstance(objective, DistillationObjective):
        objective.teacher_head = teacher.copy_head(inputs.batch_plan.sequence_length)
    return DistillBatches(ctx, inputs, built, teacher)


class DistillBatches(DatasetBatches):
    """Batches with the teacher beside the student; a fraction `lmbda` of them has answers that the
    student samples.
    """

    def __init__(
        self, ctx: RunContext, inputs: RunInputs, built: BuiltModel, teacher: TeacherModel
    ) -> None:
        super().__init__(ctx, inputs, built, teacher.add_hidden)
        assert isinstance(ctx.config, DistillConfig)
        self._options = ctx.config.distill
        _, stop_ids = prefix_and_stop_ids(inputs.tokenizer, ctx.config.of_stage)
        settings = SamplingSettings(
            self._options.temperature,
            top_p=1.0,
            vocab_size=inputs.tokenizer.vocab_size,
            max_length=inputs.batch_plan.sequence_length,
            stop_token_ids=stop_ids
            | inputs.model_config.end_token_ids
            | {inputs.tokenizer.eos_token_id},
            decode_batch_size=DECODE_BATCH_SIZE,
        )
        self._sampler = InProcessSampler(built.parallel_model, settings)

    def batches(self, batch_index: int) -> list[Batch]:
        seed = self._ctx.config.train.seed
        micro_batches = self._loader.batches(batch_index)
        # Drawn by the index of the batch, the same on all ranks.
        if derive_key(seed, "on-policy", batch_index) < self._options.lmbda * 2**64:
            micro_batches = self._with_sampled_answers(micro_batches, batch_index)
        return [self._add_extras(batch) for batch in micro_batches]

    def _with_sampled_answers(
        self, micro_batches: Sequence[Batch], batch_index: int
    ) -> list[Batch]:
        """The same prompts, up to the last answer of each, with what the student as it is now
        answers.
        """
        step = batch_index - self._built.detector.batch_offset
        device = self._ctx.dist_ctx.device
        given = Batch.cat([batch.to("cpu") for batch in micro_batches])
        first = batch_index * self.global_batch_size + self._loader.first
        length = given.sequence_length
        prompts = [
            _prompt_ids(tokens, labels)
            for tokens, labels in zip(given.tokens, given.labels, strict=True)
        ]
        requests = [
            SampleRequest(
                key,
                prompt,
                min(self._options.max_completion_length, length - len(prompt)),
                derive_key(self._ctx.config.train.seed, "distill", first + key),
            )
            for key, prompt in enumerate(prompts)
            if 0 < len(prompt) < length
        ]
        with self._sampler.session(len(requests), step) as session:
            sampled = sample_all(
                session, requests, lambda: self._ctx.watch.set_phase("sample", step)
            )
        completions = dict(zip((request.key for request in requests), sampled, strict=True))
        answered = [completions.get(key, SampledCompletion()) for key in range(len(prompts))]
        laid_out = lay_out(prompts, answered, length)
        batch = replace(
            laid_out,
            rng_keys=given.rng_keys,
            extras=Extras(sampled=torch.ones(given.batch_size, length)),
        ).to(device)
        size = self._inputs.batch_plan.micro_batch_size
        return [batch[start : start + size] for start in range(0, batch.batch_size, size)]


def _prompt_ids(tokens: torch.Tensor, labels: torch.Tensor) -> list[int]:
    """What comes before the last scored span of a sequence, which has one document; nothing where
    none is scored.
    """
    scored = (labels != IGNORE_INDEX).nonzero().flatten().tolist()
    begin = next((at for at in reversed(scored) if at == 0 or labels[at - 1] == IGNORE_INDEX), None)
    return [] if begin is None else tokens[: begin + 1].tolist()
