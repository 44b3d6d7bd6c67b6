"""Which objective a run has: `build_objective`, and how each of ours is built from a config.

Each is called as `(config, options)`: the config of the stage, and the objective's own options, of which these have none. The
losses themselves are in objectives/.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, get_args

from lmforge.core import registry
from lmforge.core.errors import UserError
from lmforge.core.losses.language import NextTokenObjective
from lmforge.core.losses.objective import Objective
from lmforge.core.options.extend import entry_options
from lmforge.core.options.mixture import AnySourceOptions
from lmforge.core.options.stage import PretrainConfig, StageConfig
from lmforge.post.objectives.distillation import DistillationConfig, DistillationObjective
from lmforge.post.objectives.policy import STALENESS_METRICS, PolicyObjective, build_policy_loss_config, completion_metric_names
from lmforge.post.objectives.preference import KTOObjective, PreferenceObjective, RewardModelObjective, dpo, orpo, simpo
from lmforge.post.options.align import AlignConfig, Method
from lmforge.post.options.tuning import DistillConfig, SftConfig


def build_objective(config: StageConfig) -> Objective:
    """The objective that a recipe chooses. Raises UserError for one that its stage has no data for."""
    default: str = "distillation" if isinstance(config, DistillConfig) else "next-token"
    if isinstance(config, AlignConfig):
        default = config.align.method
    name = config.objective.name or default
    if name in get_args(Method) and name != default:
        raise UserError(f"objective.name = {name}: it is a method of alignment; choose it with align.method")
    if name == "next-token" and name != default:
        raise UserError(f"objective.name = {name}: it reads texts alone, and this is {config.of_stage}; use pretrain or sft")
    if name == "distillation" and name != default:
        raise UserError(f"objective.name = {name}: it needs a teacher; use lmforge distill")
    entry = registry.get("objective", name)
    objective = entry.build(config, entry_options(config.objective, entry))
    return check_objective(objective, f"{entry.origin}: objective {name}")


def check_objective(objective: Any, what: str = "objective") -> Objective:
    """The objective itself. Raises UserError if it is not an objective."""
    if missing := [method for method in ("num_items", "loss") if not callable(getattr(objective, method, None))]:
        raise UserError(f"{what}: {type(objective).__name__} has no method {missing[0]}")
    return objective


def build_next_token_objective(config: StageConfig, options: None = None) -> NextTokenObjective:
    """The objective of pretraining and fine-tuning."""
    sources: Sequence[AnySourceOptions] = ()
    if isinstance(config, PretrainConfig):
        sources = config.data.all_sources
    elif isinstance(config, SftConfig):
        sources = config.data.file_sources
    names = [source.label for source in sources] if len(sources) > 1 else []
    return NextTokenObjective(z_loss=config.train.z_loss, source_names=names)


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
