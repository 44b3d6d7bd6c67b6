"""How the objectives of distillation and alignment are built from a config.

Each is called as `(config, options)`: the config of the stage, and the objective's own options, of
which these have none.
"""

from functools import partial

from lmforge.core.losses.objective import Objective
from lmforge.post.objectives.distillation import DistillationConfig, DistillationObjective
from lmforge.post.objectives.policy import STALENESS_METRICS, PolicyObjective, build_policy_loss_config, completion_metric_names
from lmforge.post.objectives.preference import KTOObjective, PreferenceObjective, RewardModelObjective, dpo, orpo, simpo
from lmforge.post.options.align import AlignConfig
from lmforge.post.options.tuning import DistillConfig


def build_distillation_objective(config: DistillConfig, options: None = None) -> DistillationObjective:
    distill = config.distill
    sampled = distill.stored == "sampled"
    return DistillationObjective(DistillationConfig(distill.beta, distill.temperature, distill.kd_ratio, sampled=sampled))


def build_dpo(config: AlignConfig, options: None = None) -> Objective:
    align = config.align
    loss_fn = partial(dpo, beta=config.beta, loss_type=align.loss_type, label_smoothing=align.label_smoothing)
    return PreferenceObjective(loss_fn, uses_reference=True)


def build_orpo(config: AlignConfig, options: None = None) -> Objective:
    return PreferenceObjective(partial(orpo, beta=config.beta), uses_reference=False)


def build_simpo(config: AlignConfig, options: None = None) -> Objective:
    return PreferenceObjective(partial(simpo, beta=config.beta, gamma=config.align.gamma), uses_reference=False)


def build_kto(config: AlignConfig, options: None = None) -> Objective:
    weights = {"desirable_weight": config.align.desirable_weight, "undesirable_weight": config.align.undesirable_weight}
    return KTOObjective(beta=config.beta, **weights)


def build_reward_model_objective(config: AlignConfig, options: None = None) -> Objective:
    return RewardModelObjective(center_rewards_coefficient=config.align.center_rewards_coefficient)


def build_policy_objective(config: AlignConfig, options: None = None) -> PolicyObjective:
    """The objective of grpo."""
    names = completion_metric_names(config.rollout.num_generations, config.rollout.environment is not None)
    names += STALENESS_METRICS if config.rollout.max_staleness else ()
    return PolicyObjective(build_policy_loss_config(config.rollout), names)
