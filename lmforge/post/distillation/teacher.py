"""The teacher: how it is found, compared with the student, and run beside it."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from lmforge.core.data.batch import Batch
from lmforge.core.data.labels import IGNORE_INDEX
from lmforge.core.data.loader import batch_of_token_lists
from lmforge.core.data.tokenizer import Tokenizer
from lmforge.core.distributed.distributed import DistributedContext
from lmforge.core.errors import UserError, prefix_errors
from lmforge.core.files.untrusted import quoted
from lmforge.core.losses.top_logprobs import top_log_probs
from lmforge.core.model.build import build_model
from lmforge.core.model.layers import HeadOptions
from lmforge.core.options.sections import ModelOptions
from lmforge.core.parallel.parallel_model import ParallelModel
from lmforge.core.parallel.validate import check_parallel
from lmforge.core.stages.build_model import BuiltModel
from lmforge.core.stages.context import RunContext
from lmforge.core.stages.inputs import RunInputs
from lmforge.hf.hub import cache_folder
from lmforge.hf.pretrained import Pretrained, find_pretrained
from lmforge.post.distillation.stored import check_stored
from lmforge.post.distillation.teacher_server import TeacherServer
from lmforge.post.examples import open_example_inputs, prepare_examples
from lmforge.post.objectives.distillation import DistillationConfig, TeacherHead
from lmforge.post.options.tuning import DistillConfig
from lmforge.post.reference import build_frozen_model, full_sequences
from lmforge.serve.decoding.model_loading import check_reward_head

# Texts on which tokenizers differ: cases, digits, blanks, scripts, composed characters, code.
TEXTS = (
    "The quick brown fox jumps over the lazy dog. DON'T PANIC, it's 1984!",
    "  leading,\ttabs,\r\n\n\nand   blanks  ",
    "3.14159265358979 = π; 1,000,000 ≠ 1 000 000; 0x7fff",
    "Straße, naïve, Ünïcödé, e\u0301 and \u00e9, ﬁ, İstanbul",
    "日本語のテキスト、中文文本，한국어 텍스트, русский текст, نص عربي, हिन्दी",
    "def f(x):\n    return {'a': [x ** 2 for _ in range(10)]}  # 🤖👩\u200d🚀\n",
)
FIRST_IDS = 8  # of a text are compared, and shown in a message


def find_teacher(config: DistillConfig) -> Pretrained:
    """The teacher of a recipe. Raises UserError where there is none, or it has no weights."""
    assert config.distill.teacher is not None
    with prefix_errors("distill.teacher"):
        teacher = find_pretrained(config.distill.teacher, "weights")
        teacher.check_has_weights()
        return teacher


def prepare_distillation(config: DistillConfig, dist_ctx: DistributedContext) -> None:
    """Make student, teacher and tokenized examples available on every host.

    Every rank calls it. Raises UserError.
    """
    config.require_inputs()
    if config.distill.teacher is not None and not config.distill.server:
        dist_ctx.run_once_per_folder(partial(find_teacher, config), cache_folder())
    prepare_examples(config, dist_ctx)


def open_distill_inputs(config: DistillConfig, world_size: int) -> RunInputs:
    """The inputs of fine-tuning, of which the teacher can say something.

    Raises UserError where it cannot.
    """
    inputs = open_example_inputs(config, world_size)
    if config.distill.logprobs is not None:
        check_stored(config, inputs, teacher_digest(config, inputs))
    if config.distill.teacher is None or config.distill.server:
        return inputs
    teacher = find_teacher(config)
    with prefix_errors("distill.teacher"):
        check_same_tokenizer(teacher.tokenizer(), inputs.tokenizer, str(config.distill.teacher))
        model_config = teacher.resolve_model_config(ModelOptions(source=teacher.folder))
        check_reward_head(model_config, teacher.folder, reward_model=False)
        model_config.check_length(config.data.sequence_length)
        if model_config.vocab_size < inputs.tokenizer.vocab_size:
            raise UserError(
                f"{config.distill.teacher}: its head has {model_config.vocab_size:,} ids, and the"
                f" tokenizer {inputs.tokenizer.vocab_size:,}; take a teacher with all of them"
            )
        check_parallel(config.parallel, model_config, inputs.batch_plan)
    return inputs if config.distill.logprobs else replace(inputs, teacher=model_config)


def open_server(config: DistillConfig, inputs: RunInputs) -> TeacherServer:
    """The teacher that is a server."""
    assert config.distill.server is not None
    return TeacherServer(
        config.distill.server, min(config.distill.top_k, inputs.tokenizer.vocab_size)
    )


def teacher_digest(config: DistillConfig, inputs: RunInputs) -> str | None:
    """What the manifest of stored tokens calls the teacher: of a server the name of its model; None
    where none is named. Raises UserError where it has another tokenizer, or does not answer.
    """
    if config.distill.server is not None:
        name = open_server(config, inputs).check(
            inputs.tokenizer, TEXTS, config.data.sequence_length
        )
        return f"served as {name}"
    return None if config.distill.teacher is None else find_teacher(config).content_digest


def check_same_tokenizer(theirs: Tokenizer, ours: Tokenizer, teacher: str) -> None:
    """Raise UserError where the same ids do not mean the same to both, in text or as special
    tokens.
    """
    if theirs.hash == ours.hash:
        return
    for what, their_ids, our_ids in _encodings(theirs, ours):
        if their_ids != our_ids:
            difference = f"{what} is {their_ids} there, and {our_ids} to the student"
            raise UserError(
                f"another tokenizer at {teacher}: {difference}; take a teacher with the student's"
                " tokenizer"
            )


def _encodings(theirs: Tokenizer, ours: Tokenizer) -> Iterator[tuple[str, Any, Any]]:
    for text in TEXTS:
        for part in (*text.split(), text):
            yield quoted(part), theirs.encode(part)[:FIRST_IDS], ours.encode(part)[:FIRST_IDS]
    yield "the end of a text", theirs.eos_token_id, ours.eos_token_id
    yield "the number of ids", theirs.vocab_size, ours.vocab_size
    for token in range(ours.vocab_size):
        yield f"id {token}", quoted(theirs.id_to_token(token)), quoted(ours.id_to_token(token))


def _packed_top(model: Any, batch: Batch, k: int, config: DistillationConfig) -> Tensor:
    """What `top_log_probs` returns, ids before values: fp32 [sequences, length, 2 k + 1] of full
    sequences, on every rank. A batch with keys has drawn tokens.
    """
    hidden = model(
        batch.tokens, batch.positions, batch.document_ids, document_starts=batch.document_starts
    )
    packed: Tensor = model.lm_head(
        hidden, partial(_packed_top_of_head, k=k, config=config, rng_keys=batch.rng_keys)
    )
    return full_sequences(model, packed)


def _packed_top_of_head(
    hidden: Tensor,
    weight: Tensor,
    k: int,
    config: DistillationConfig,
    rng_keys: Tensor | None,
    head: HeadOptions,
) -> Tensor:
    # Whose hidden states are a part of each sequence.
    if rng_keys is not None and isinstance(weight, DTensor):
        rng_keys = rng_keys.chunk(weight.device_mesh.size(), dim=1)[
            weight.device_mesh.get_local_rank()
        ]
    ids, values = top_log_probs(
        hidden, weight, k, config.temperature, config.vocab_size, head, rng_keys
    )
    packed = torch.cat([ids.float(), values], -1)
    if isinstance(weight, DTensor):
        packed = DTensor.from_local(
            packed, weight.device_mesh, [Shard(1)], run_check=False
        ).full_tensor()
    return packed


def _hidden(model: Any, batch: Batch) -> Tensor:
    """Hidden states [sequences, length, width] of full sequences, on every rank."""
    hidden = model(
        batch.tokens, batch.positions, batch.document_ids, document_starts=batch.document_starts
    )
    states: Tensor = model.lm_head(hidden, _whole_hidden)
    return full_sequences(model, states)


def _whole_hidden(hidden: Tensor, weight: Tensor, head: HeadOptions) -> Tensor:
    if isinstance(weight, DTensor):
        hidden = DTensor.from_local(
            hidden, weight.device_mesh, [Shard(1)], run_check=False
        ).full_tensor()
    return hidden


def _head(model: Any, batch: Batch, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """Copies of the head's weight, in `dtype`, and bias, whole, on every rank."""
    hidden = model(
        batch.tokens, batch.positions, batch.document_ids, document_starts=batch.document_starts
    )
    copies: tuple[Tensor, Tensor | None] = model.lm_head(hidden, partial(_copied_head, dtype=dtype))
    return copies


def _copied_head(
    hidden: Tensor, weight: Tensor, head: HeadOptions, dtype: torch.dtype
) -> tuple[Tensor, Tensor | None]:
    if isinstance(weight, DTensor):
        weight = weight.full_tensor()
    # Here, since a sharded engine frees what it gathered when the head returns.
    return weight.to(dtype, copy=True), None if head.bias is None else head.bias.clone()


@dataclass(frozen=True)
class TeacherModel:
    """A frozen teacher in its compute dtype, distributed like the student."""

    parallel_model: ParallelModel
    dtype: torch.dtype

    @torch.no_grad()
    def copy_head(self, sequence_length: int) -> TeacherHead:
        """A copy of its head, whole on each rank: the student's may be split over ranks between
        other ids. Every rank calls it.
        """
        batch = batch_of_token_lists([[0] * sequence_length]).to(
            self.parallel_model.dist_ctx.device
        )
        weight, bias = self.parallel_model.score(batch, partial(_head, dtype=self.dtype))
        return TeacherHead(weight, bias, self.parallel_model.model.lm_head.softcap)

    @torch.no_grad()
    def add_hidden(self, batch: Batch) -> Batch:
        """The batch with the extra "teacher_hidden" [sequences, length, width].

        Every rank calls it equally often.
        """
        states: Tensor = self.parallel_model.score(batch, _hidden)
        return batch.with_extras(teacher_hidden=states.to(self.dtype))

    @torch.no_grad()
    def score_top(self, batch: Batch, k: int, config: DistillationConfig) -> Tensor:
        """The `k` likeliest, or drawn, ids of each label's place, and then the values of
        StoredTeacher or SampledTeacher: fp32 [sequences, length, 2 k + 1], -1 where nothing is
        scored. Every rank calls it equally often.
        """
        batch = batch if config.sampled else replace(batch, rng_keys=None)
        packed: Tensor = self.parallel_model.score(batch, partial(_packed_top, k=k, config=config))
        return packed.masked_fill((batch.labels == IGNORE_INDEX)[..., None], -1.0)


def build_teacher(ctx: RunContext, built: BuiltModel) -> TeacherModel:
    """The teacher of a recipe, in the student's compute dtype. Every rank calls it."""
    assert isinstance(ctx.config, DistillConfig)
    weights = find_teacher(ctx.config)
    model = build_model(
        weights.resolve_model_config(ModelOptions(source=weights.folder)), "meta"
    ).to(built.dtype)
    return TeacherModel(build_frozen_model(ctx, built, model, weights), built.dtype)
