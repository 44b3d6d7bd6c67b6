"""Run in every rank: gradients of objectives under each engine, against one process.

All logits are capped.

objective_ranks.py SEED WHICH     fails where an engine gives another loss or gradient than one
                                  process, or narrows the
                                  extras; WHICH is all, or sample: one vocabulary and one dtype
                                  of each objective and engine, by turns
"""

import sys
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from lmforge.core.data.batch import Batch, Metrics
from lmforge.core.distributed import distributed as cluster
from lmforge.core.losses.language import NextTokenObjective
from lmforge.core.model.build import build_model
from lmforge.core.model.config import ModelConfig
from lmforge.core.model.init_weights import init_weights
from lmforge.core.model.layers import LanguageModel
from lmforge.core.options.sections import ParallelOptions
from lmforge.core.parallel.parallelize import parallelize
from lmforge.post.objectives.distillation import (
    DistillationConfig,
    DistillationObjective,
    TeacherHead,
)
from lmforge.post.objectives.policy import PolicyLossConfig, PolicyObjective
from lmforge.post.objectives.preference import KTOObjective, PreferenceObjective, dpo
from tests.core.losses.oracle import drawn_pairs, logprobs_under, moved, packed, with_extras
from tests.core.model.foreign import described

# A head that tensor parallel shares out by rows, and one that it leaves whole on each rank.
SHAPES: dict[Any, ModelConfig] = {
    vocabulary: ModelConfig(
        vocab_size=vocabulary,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.2,
        final_logit_softcapping=2.0,
    )
    for vocabulary in (64, 61)
}
# transformers' own, whose head has a bias; it is not split.
SHAPES["61, with a bias"] = described("phi", vocab_size=61, num_hidden_layers=2)
STRATEGIES = {
    "ddp": ParallelOptions(engine="ddp"),
    "fsdp1": ParallelOptions(engine="fsdp1"),
    "fsdp2": ParallelOptions(engine="fsdp2"),
    "fsdp2, recompute": ParallelOptions(engine="fsdp2", activation_checkpointing="full"),
    "tensor": ParallelOptions(engine="fsdp2", tensor_parallel_degree=2),
    # The passes that a GPU compiles, as they are written.
    "fsdp2, fused": ParallelOptions(engine="fsdp2"),
    "tensor, fused": ParallelOptions(engine="fsdp2", tensor_parallel_degree=2),
    "pipeline": ParallelOptions(engine="fsdp2", pipeline_parallel_degree=2),
    "context": ParallelOptions(engine="fsdp2", context_parallel_degree=2),
}
OBJECTIVES: dict[str, Any] = {
    "next token": NextTokenObjective(z_loss=0.1),
    "dpo": PreferenceObjective(partial(dpo, beta=0.1), uses_reference=True),
    "kto": KTOObjective(beta=0.1, desirable_weight=1.0, undesirable_weight=0.7),
    "grpo": PolicyObjective(
        PolicyLossConfig(
            epsilon=0.5, epsilon_high=1.0, loss_aggregation="sequence", kl_estimator="k3", beta=0.04
        )
    ),
    # Without bounds on the ratios, of sequences: the mean of several may be near any.
    "gspo": PolicyObjective(
        PolicyLossConfig(
            importance_sampling_level="sequence",
            epsilon=0.999,
            epsilon_high=1000.0,
            loss_aggregation="constant",
            max_completion_length=10,
            off_policy_mask_threshold=1000.0,
        )
    ),
    # Ids from 60 on pad both heads; the teacher's has fewer rows than the student's.
    "distillation": DistillationObjective(
        DistillationConfig(beta=0.3, temperature=1.5, kd_ratio=0.7, vocab_size=60)
    ),
    "stored distillation": DistillationObjective(
        DistillationConfig(beta=0.3, temperature=1.5, kd_ratio=0.7, vocab_size=60)
    ),
}
DTYPES = (torch.float32, torch.bfloat16)
# Of importance ratios, within the clipped range, below and above it. Where a ratio crosses a bound
# (-0.69 and 0.69) the gradient jumps by all that a token gives: no bf16 log-probability is as far
# off as these are from the bounds.
LOG_RATIOS = torch.tensor([0.0, -1.1, 1.1])


def whole_batch(model: LanguageModel, seed: int) -> Batch:
    """Four rows of two pairs with all that any objective asks for, of a length that two ranks cut
    into two pieces each.
    """
    generator = torch.Generator().manual_seed(seed)
    rows = [[side for pair in drawn_pairs(generator, 2) for side in pair] for _ in range(4)]
    batch = packed(rows)
    batch = packed(rows, padding=3 + -batch.sequence_length % 4)
    draw = partial(torch.randn, generator=generator)
    # Of both signs, but of other sizes: losses that cancel are rounding in bf16.
    advantages = torch.randn(4, 4, generator=generator)
    advantages[advantages > 0] *= 3
    return with_extras(
        batch,
        reference_logprobs=logprobs_under(moved(model, 0.02, seed), batch),
        old_logprobs=logprobs_under(model, batch)
        - LOG_RATIOS[torch.randint(3, batch.tokens.shape, generator=generator)],
        advantages=advantages.tolist(),
        kto_labels=[[1.0, 1.0, 0.0, 0.0]] * 4,
        teacher_hidden=draw(*batch.tokens.shape, 24),
        teacher_ids=torch.rand(*batch.tokens.shape, 60, generator=generator)
        .argsort(-1)[..., :5]
        .float(),
        teacher_logprobs=draw(*batch.tokens.shape, 6).log_softmax(-1),
    )


def in_fp32(objective: Any, model: LanguageModel, batch: Batch) -> tuple[Tensor, Metrics]:
    assert all(tensor.dtype == torch.float32 for tensor in batch.extras.tensors.values())  # type: ignore[union-attr]
    return objective.loss(model, batch)


def has_bias(shape: ModelConfig) -> bool:
    return shape.implementation == "transformers"


def whole(gradient: Tensor) -> Tensor:
    return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient


if __name__ == "__main__":
    seed, which, ranks = int(sys.argv[1]), sys.argv[2], cluster.init_distributed("cpu", threads=1)
    torch.compiler.set_stance("force_eager")
    for shape_number, (vocabulary, shape) in enumerate(SHAPES.items()):
        for objective_number, (name, objective) in enumerate(OBJECTIVES.items()):
            if has_bias(shape) and name != "next token":
                continue
            model = init_weights(build_model(shape), seed)
            batch = whole_batch(model, seed)
            if name == "distillation":
                objective.teacher_head = TeacherHead(
                    torch.randn(60, 24, generator=torch.Generator().manual_seed(seed))
                )
            weight = objective.num_items(batch)
            total, alone = objective.loss(model, batch)
            (total / weight).backward()
            expected = {key: parameter.grad for key, parameter in model.named_parameters()}
            norm = torch.cat(
                [gradient.flatten() for gradient in expected.values() if gradient is not None]
            ).norm()
            for number, (engine, strategy) in enumerate(
                STRATEGIES.items(), start=shape_number + objective_number
            ):
                is_pipeline, is_context = (
                    strategy.pipeline_parallel_degree > 1,
                    strategy.context_parallel_degree > 1,
                )
                is_split = strategy.splits_model or is_context
                if (has_bias(shape) and is_split) or (
                    is_pipeline and name.endswith("distillation")
                ):
                    continue
                if which == "sample" and not has_bias(shape) and number % 2:
                    continue
                for dtype in DTYPES if which == "all" else [DTYPES[number // 2 % 2]]:
                    # What fp32 leaves of sums in another order; of bf16 products it is the order of
                    # magnitude.
                    tolerance = 1e-5 if dtype == torch.float32 else 0.2
                    loss = partial(in_fp32, objective)
                    whole_model = init_weights(build_model(shape), seed)
                    whole_model.lm_head.passes = "fused" if engine.endswith("fused") else "stored"
                    made = parallelize(
                        whole_model, loss, dist_ctx=ranks, dtype=dtype, options=strategy
                    )
                    part, parts = (
                        ranks.rank_info.rank // made.model_parallel_size,
                        ranks.world_size // made.model_parallel_size,
                    )
                    size = batch.batch_size // parts
                    mine = batch[part * size : (part + 1) * size]
                    metrics = made.forward_backward(
                        [mine[: size // 2], mine[size // 2 :]], weight, lambda phase: None
                    )
                    where = f"{name} under {engine} in {dtype}, vocabulary {vocabulary}"
                    assert abs(made.clip_grad_norm(0.0) - norm) <= tolerance * norm, where
                    if engine != "fsdp1":
                        for key, parameter in made.model.named_parameters():
                            assert parameter.grad is not None
                            apart = (whole(parameter.grad) - expected[key]).norm()  # type: ignore[operator]
                            assert apart <= tolerance * norm, f"{where}: {key}"
                    for metric in alone.keys() & {"loss", "z_loss"}:
                        found = ranks.all_reduce_sum(
                            torch.stack([each[metric][0] for each in metrics]).sum()
                        )
                        # Of a pipeline the last stage has it; and of losses of single tokens each
                        # rank has its own part.
                        once = is_pipeline or (is_context and name not in ("dpo", "kto"))
                        found /= 1 if once else made.model_parallel_size
                        assert abs(found - alone[metric][0]) <= tolerance * max(
                            1.0, abs(float(alone[metric][0]))
                        ), where
            if ranks.is_rank0:
                print(f"{name}, vocabulary {vocabulary}: the same")
    cluster.destroy_distributed()
