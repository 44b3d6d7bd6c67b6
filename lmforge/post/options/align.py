"""The options of `lmforge align`: preferences, reward models and reinforcement learning from
rewards.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field

from lmforge.core import registry
from lmforge.core.errors import UserError, prefix_errors
from lmforge.core.options.options import Options, choice, option, section, with_default
from lmforge.core.options.ranges import (
    COUNT,
    DURATION,
    FRACTION,
    LENGTH,
    NONZERO_FRACTION,
    SCALE,
    SCALE_OR_0,
    SEQUENCES,
)
from lmforge.core.options.sections import Stage
from lmforge.post.options.tuning import ExampleOptions, TunedConfig

Method = Literal["dpo", "kto", "orpo", "simpo", "reward", "grpo"]

SERVER_PATTERN = re.compile(r"(?:([\w.@\[\]%][\w.@:\[\]%-]*):)?(cpu|cuda(?::[0-9]+)?)")


def split_server(name: str) -> tuple[str | None, str]:
    """The host of an item of `rollout.engine_start`, None for this one, and its device."""
    match = SERVER_PATTERN.fullmatch(name)
    assert match
    return match[1], match[2]


class AlignDataOptions(ExampleOptions):
    """Files of pairs ({prompt, chosen, rejected}; reward takes a margin too), of unpaired
    preferences ({prompt, completion, label}) for kto, or of prompts with columns for grpo.
    """

    overlong: Literal["drop"] = with_default(ExampleOptions, "overlong", "drop")
    apply_chat_template: bool = option(
        False, "prompts and completions that are strings become turns of the chat template"
    )


class AlignOptions(Options):
    """How the model is aligned."""

    method: Method = option(
        "dpo",
        "from pairs: dpo, orpo, simpo, or reward (a reward model); from unpaired preferences: kto;"
        " from rewards: grpo",
    )
    loss_type: Literal[
        "sigmoid", "ipo", "hinge", "robust", "exo", "nca", "apo-zero", "apo-down"
    ] = option(
        "sigmoid", "dpo: the loss, as in TRL (which writes exo_pair, nca_pair, apo_zero, apo_down)"
    )
    beta: float | None = option(
        None,
        "strength of the penalty for leaving the reference; orpo: weight of the odds ratio"
        " (default: 0.1; simpo 2.0)",
        **SCALE,
    )
    label_smoothing: float = option(
        0.0,
        "dpo with loss_type sigmoid, robust or exo: assumed fraction of wrong labels",
        ge=0,
        lt=0.5,
    )
    gamma: float = option(0.5, "simpo: target margin (TRL: simpo_gamma)", **SCALE_OR_0)
    desirable_weight: float = option(1.0, "kto: weight of desirable completions", **SCALE)
    undesirable_weight: float = option(1.0, "kto: weight of undesirable completions", **SCALE)
    center_rewards_coefficient: float = option(
        0.0,
        "reward: weight of the squared sum of both rewards, which keeps rewards near zero",
        **SCALE_OR_0,
    )
    reference: Literal["auto", "copy", "adapters-off", "precomputed"] = option(
        "auto",
        "the reference model: a frozen copy, distributed like the policy; the policy with its"
        " adapters off; or log-probabilities computed once before training (TRL:"
        " precompute_ref_log_probs); auto is adapters-off with lora.rank, else copy",
    )

    def problems(self) -> Iterator[str]:
        if self.loss_type == "exo" and not self.label_smoothing:
            yield "align.loss_type = exo: needs align.label_smoothing above 0, such as 0.1"
        if self.label_smoothing and self.loss_type not in ("sigmoid", "robust", "exo"):
            yield (
                f"align.label_smoothing: not with align.loss_type = {self.loss_type}; it is for"
                " sigmoid, robust and exo"
            )


class RolloutOptions(Options):
    """grpo: how completions are sampled and rewarded, and the loss. none leaves a choice to
    rollout.loss_type.
    """

    loss_type: str = choice(
        "grpo",
        "a named set of values for the options below; each of these options overrides it",
        "algorithm",
    )
    num_generations: int = option(8, "completions of each prompt: a group", gt=1, le=2**16)
    max_completion_length: int = option(
        128,
        "longest completion, in tokens; a prompt may have data.sequence_length minus this many",
        **LENGTH,
    )
    temperature: float = option(
        1.0, "temperature of the sampling and of the log-probabilities in the loss", **SCALE
    )
    top_p: float = option(
        1.0,
        "nucleus sampling: the likeliest tokens that add up to this; below 1 ratios are biased",
        **NONZERO_FRACTION,
    )
    decode_batch_size: int = option(
        64,
        "completions that a rank decodes at once; fewer need a smaller KV cache, with the same"
        " results",
        **SEQUENCES,
    )
    engine: Literal["in-process", "lmforge", "vllm"] = option(
        "in-process",
        "what samples: the trainer itself, or servers at engine_urls, lmforge serve"
        " --weight_updates or vLLM",
    )
    engine_urls: tuple[str, ...] = option(
        (), "addresses of servers that run already, such as http://127.0.0.1:8000"
    )
    engine_start: tuple[str, ...] = option(
        (),
        "servers that the run starts and ends: the device of each, as cuda:1, or host and device,"
        " as node2:cuda:0 (by ssh)",
    )
    engine_timeout_seconds: float = option(
        600.0,
        "time limit of a server for a completion, new weights or its start, in seconds; others do"
        " its work then",
        **DURATION,
    )
    weights_folder: Path | None = option(
        None,
        "where servers read the policy's weights: a folder that they share (default: in memory,"
        " /dev/shm)",
    )
    max_staleness: int = option(
        0,
        "with servers: sample while earlier completions are learned from, with weights at most this"
        " many steps old; 0 waits",
        ge=0,
        le=1000,
    )
    dynamic_sampling_rounds: int = option(
        0,
        "sample further prompts in place of groups whose rewards are all equal, at most so often"
        " for a set (DAPO; verl: filter_groups)",
        ge=0,
        le=1000,
    )
    replay_routed_experts: bool = option(
        False,
        "mixtures of experts: learn from completions with the experts that sampled them, which"
        " kernels choose otherwise",
    )
    num_iterations: int = option(1, "optimizer steps on each set of completions", **COUNT)
    reward_functions: tuple[str, ...] = option(
        (),
        "reward functions, summed with weights: FILE.py:FUNCTION, python_code (built in), or the"
        " folder of a reward model",
    )
    reward_weights: tuple[Annotated[float, Field(ge=-1e9, le=1e9)], ...] = option(
        (), "weight of each reward function (default: 1)"
    )
    reward_timeout_seconds: float = option(
        60.0,
        "time limit of a reward function, in seconds; after it the function is skipped",
        **DURATION,
    )
    environment: str | None = option(
        None,
        "what the model talks to over several turns: FILE.py:CLASS, FILE.py:FUNCTION (a tool),"
        " FILE.py:DICT (of several), calculator, python (a sandbox), openenv:URL, or"
        " verifiers:TASKSET; its own reward is added to those of reward_functions",
    )
    max_turns: int = option(
        8, "environment: answers in an episode, the last of which ends it", gt=0, le=1000
    )
    environment_timeout_seconds: float = option(
        60.0,
        "time limit of a call of the environment, in seconds; after it the episode is left out",
        **DURATION,
    )
    environment_processes: int = option(
        2, "processes in which a rank's environments run", gt=0, le=1024
    )
    importance_sampling_level: Literal["token", "sequence", "product"] | None = option(
        None,
        "importance ratio of each token, of the sequence per token (geometric mean), or of the"
        " whole sequence (product, not in TRL)",
    )
    epsilon: float | None = option(None, "ratios are clipped below 1 - epsilon", **FRACTION)
    epsilon_high: float | None = option(
        None, "ratios are clipped above 1 + epsilon_high", **SCALE_OR_0
    )
    importance_sampling_mode: Literal[
        "none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask"
    ] = option(
        "none",
        "correct for what sampled with other probabilities than the trainer's: weigh tokens or"
        " completions by their ratio, bounded (truncate) or 0 outside of the bounds (mask); ratios"
        " are then to the policy when a set begins, not to what sampled it (TRL:"
        " vllm_importance_sampling_mode)",
    )
    importance_sampling_clip_max: float | None = option(
        3.0, "largest weight of importance_sampling_mode", **SCALE
    )
    importance_sampling_clip_min: float | None = option(
        None, "least weight of importance_sampling_mode", **SCALE
    )
    off_policy_mask_threshold: float | None = option(
        None,
        "completions worse than their group do not count if they were likelier when sampled, in"
        " nats per token",
        **SCALE,
    )
    loss_aggregation: Literal["sequence", "token", "constant"] | None = option(
        None,
        "mean over sequences of token means (TRL's loss_type grpo), mean over all tokens (dapo), or"
        " sum over a constant (dr_grpo)",
    )
    baseline: Literal["group", "leave-one-out"] | None = option(
        None, "the reward is compared with the mean of its group, or of the others in it (RLOO)"
    )
    scale_rewards: Literal["none", "group-population", "group"] | None = option(
        None,
        "advantages are divided by the group's standard deviation: as in TRL (group), or of the"
        " population (/ n)",
    )
    kl_estimator: Literal["none", "k1", "k2", "k3"] | None = option(
        None,
        "estimator of the KL divergence from the reference: k1 in the reward, k2 and k3 (TRL's) in"
        " the loss",
    )
    beta: float | None = option(None, "weight of the KL divergence", **SCALE_OR_0)
    use_bias_correction_kl: bool | None = option(
        None,
        "k2, k3: multiply the divergence by the importance ratio, so that its gradient is unbiased",
    )
    mask_truncated_completions: bool | None = option(
        None, "leave completions that were cut at max_completion_length out of the loss"
    )
    drop_zero_std_groups: bool = option(
        True, "leave out groups whose rewards are all equal, whose advantages are 0"
    )
    pass_threshold: float = option(
        1.0, "reward from which a completion counts as a pass, for pass@k", ge=-1e9, le=1e9
    )
    log_completions_every: int = option(
        1, "write every k-th set of completions to the run's folder completions", **COUNT
    )

    def problems(self) -> Iterator[str]:
        if self.engine == "in-process":
            for name in sorted(
                {"engine_urls", "engine_start", "weights_folder"} & {*self.changed()}
            ):
                yield (
                    f"rollout.{name}: for servers; give rollout.engine = lmforge or vllm too, or"
                    " leave it out"
                )
            if self.max_staleness:
                yield (
                    "rollout.max_staleness: a trainer that samples itself cannot train meanwhile;"
                    " give rollout.engine = lmforge or vllm, or leave it out"
                )
        elif bool(self.engine_urls) == bool(self.engine_start):
            yield (
                f"rollout.engine = {self.engine}: give the servers' addresses in"
                " rollout.engine_urls, or the devices of servers that the run shall start in"
                " rollout.engine_start"
            )
        for name in self.engine_start:
            if not SERVER_PATTERN.fullmatch(name):
                yield (
                    f"rollout.engine_start: {name}: expected cpu or cuda:NUMBER, or a host before"
                    " it, as node2:cuda:0"
                )
        low = self.importance_sampling_clip_min
        high = self.importance_sampling_clip_max
        if self.importance_sampling_mode == "none":
            for name in {"importance_sampling_clip_min", "importance_sampling_clip_max"} & {
                *self.changed()
            }:
                yield (
                    f"rollout.{name}: needs rollout.importance_sampling_mode, such as"
                    " token_truncate"
                )
        elif low is not None and high is not None and low >= high:
            yield (
                f"rollout.importance_sampling_clip_min = {low:g}: must be below"
                f" importance_sampling_clip_max = {high:g}"
            )
        for url in self.engine_urls:
            if not re.fullmatch(r"https?://[^/?#\s]+/?", url):
                yield f"rollout.engine_urls: {url}: expected http://HOST:PORT"


def is_model_folder(spec: str) -> bool:
    """Whether a reward is named by a folder, which is a reward model's."""
    return Path(spec).is_dir()


# Options of alignment that only some methods read.
METHODS_THAT_READ = {
    "loss_type": ("dpo",),
    "beta": ("dpo", "kto", "orpo", "simpo"),
    "label_smoothing": ("dpo",),
    "gamma": ("simpo",),
    "desirable_weight": ("kto",),
    "undesirable_weight": ("kto",),
    "center_rewards_coefficient": ("reward",),
    "reference": ("dpo", "kto", "grpo"),
}


class AlignConfig(TunedConfig):
    """lmforge align [RECIPE.toml] --method dpo|kto|orpo|simpo|reward|grpo: align a model with
    preferences or rewards.
    """

    of_stage: ClassVar[Stage] = "align"
    SHORT: ClassVar[Mapping[str, str]] = {**TunedConfig.SHORT, "method": "align.method"}
    ESSENTIAL: ClassVar[str] = (
        "align.method align.loss_type align.beta align.reference rollout.reward_functions"
        f" rollout.num_generations rollout.max_completion_length {TunedConfig.ESSENTIAL}"
    )
    data: AlignDataOptions = section(AlignDataOptions, "preferences, or prompts")
    align: AlignOptions = section(AlignOptions, "how the model is aligned")
    rollout: RolloutOptions = section(
        RolloutOptions, "grpo: how completions are sampled and rewarded, and the loss"
    )

    @property
    def kind(self) -> str:
        return {"kto": "unpaired", "reward": "pairs-with-margins", "grpo": "prompts"}.get(
            self.align.method, "pairs"
        )

    @property
    def trains_reward_model(self) -> bool:
        return self.align.method == "reward"

    @property
    def copies_reference(self) -> bool:
        if self.reference != "copy" or self.align.method != "grpo":
            return self.reference == "copy"
        if self.rollout.kl_estimator is None:
            algorithm = registry.find("algorithm", self.rollout.loss_type)
            return algorithm is not None and "reads_reference" in algorithm.facts
        return self.rollout.kl_estimator != "none"

    @property
    def group_size(self) -> int:
        return self.rollout.num_generations if self.align.method == "grpo" else 1

    @property
    def default_objective(self) -> str:
        return self.align.method

    def with_models(self, source: Path | None, replace_model: Callable[[Path], Path]) -> Self:
        changed = super().with_models(source, replace_model)
        with prefix_errors("rollout.reward_functions"):
            specs = tuple(
                str(replace_model(Path(spec))) if is_model_folder(spec) else spec
                for spec in self.rollout.reward_functions
            )
        return changed.model_copy(
            update={"rollout": self.rollout.model_copy(update={"reward_functions": specs})}
        )

    @property
    def beta(self) -> float:
        return (
            self.align.beta
            if self.align.beta is not None
            else {"simpo": 2.0}.get(self.align.method, 0.1)
        )

    @property
    def reference(self) -> str | None:
        """Which reference there is; None where the method has none."""
        if self.align.method not in METHODS_THAT_READ["reference"]:
            return None
        if self.align.reference == "auto":
            return "copy" if self.lora.rank is None else "adapters-off"
        return self.align.reference

    def require_inputs(self) -> None:
        super().require_inputs()
        if (
            self.align.method == "grpo"
            and not self.rollout.reward_functions
            and self.rollout.environment is None
        ):
            raise UserError(
                "rollout.reward_functions: name a reward function, such as"
                " --rollout.reward_functions rewards.py:reward"
            )

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        method = self.align.method
        reference = self.align.reference
        for name in self.align.changed():
            readers = METHODS_THAT_READ.get(name, (method,))
            if method not in readers:
                yield (
                    f"align.{name}: {method} does not read it; it is for {', '.join(readers)}:"
                    " leave it out"
                )
        if method == "grpo" and self.data.packing != "best-fit":
            yield (
                f"data.packing = {self.data.packing}: grpo has a sequence for each completion;"
                " leave it out"
            )
        if method != "grpo" and (given := self.rollout.changed()):
            yield f"rollout.{given[0]}: {method} does not read it; it is for grpo: leave it out"
        if self.rollout.replay_routed_experts and self.parallel.model_parallel_size > 1:
            yield (
                "rollout.replay_routed_experts: not with tensor, context or pipeline parallelism;"
                " shard with fsdp2 instead"
            )
        if self.rollout.environment is None:
            for name in set(self.rollout.changed()) & {
                "max_turns",
                "environment_timeout_seconds",
                "environment_processes",
            }:
                yield (
                    f"rollout.{name}: there is no environment; name one with rollout.environment,"
                    " or leave it out"
                )
        if self.train.z_loss:
            yield (
                "train.z_loss: alignment does not read it; it is for pretrain and sft: leave it out"
            )
        samples_here = method == "grpo" and self.rollout.engine == "in-process"
        if self.parallel.model_parallel_size > 1 and (method == "reward" or samples_here):
            yield (
                "parallel.tensor_parallel_degree, context_parallel_degree,"
                f" pipeline_parallel_degree: {method} needs whole completions on one rank; shard"
                " with fsdp2"
                f" instead{', or sample with servers (rollout.engine)' if samples_here else ''}"
            )
        if self.rollout.engine != "in-process" and self.lora.base_dtype:
            yield (
                f"lora.base_dtype: not with rollout.engine = {self.rollout.engine}, which gets"
                " whole weights; use in-process"
            )
        if self.rollout.engine != "in-process" and self.parallel.engine == "fsdp1":
            yield (
                f"rollout.engine = {self.rollout.engine}: not with parallel.engine = fsdp1; shard"
                " with fsdp2 instead"
            )
        if method == "grpo" and reference == "precomputed":
            yield (
                "align.reference = precomputed: grpo samples its completions while it trains; use"
                " copy"
            )
        if method == "grpo" and (
            self.model.dropout or self.model.neftune_noise_alpha or self.lora.dropout
        ):
            yield (
                "model.dropout, model.neftune_noise_alpha, lora.dropout: not with grpo, whose"
                " completions are sampled without"
            )
        if self.lora.base_dtype and reference == "copy":
            yield (
                "align.reference = copy: not with lora.base_dtype, which a copy would not have; use"
                " adapters-off"
            )
        if reference == "adapters-off" and self.lora.rank is None:
            yield (
                "align.reference = adapters-off: there are no adapters; give lora.rank, or use copy"
            )
        if method == "kto" and self.data.packing == "none":
            yield (
                "data.packing = none: kto compares the completions of a sequence with each other;"
                " use best-fit"
            )
        if self.rollout.reward_weights and len(self.rollout.reward_weights) != len(
            self.rollout.reward_functions
        ):
            yield "rollout.reward_weights: give as many as rollout.reward_functions"
        if method == "reward" and self.model.implementation != "lmforge":
            yield (
                "model.implementation = transformers: not with align.method = reward; leave it out"
            )
        if method == "reward" and self.sample.every_steps is not None:
            yield "sample.every_steps: a reward model generates nothing; leave it out"
        if method == "reward" and self.validation.tasks:
            yield "validation.tasks: a reward model answers nothing; leave it out"
