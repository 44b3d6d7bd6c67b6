"""The stages of training: pretrain, sft and align. Each is four functions; run_stage.py does everything else."""

from lmforge.config.align import AlignConfig
from lmforge.config.stage import PretrainConfig
from lmforge.config.tuning import SftConfig
from lmforge.objectives.language import NextTokenObjective
from lmforge.stages.align import build_preference_batches, build_preference_objective
from lmforge.stages.dataset_batches import DatasetBatches
from lmforge.stages.examples import open_example_inputs, prepare_examples
from lmforge.stages.grpo import build_policy_objective, build_rollouts
from lmforge.stages.inputs import download_pretrained, open_pretrain_inputs
from lmforge.stages.prompt_inputs import check_prompts_and_rewards, open_prompt_inputs
from lmforge.stages.run_stage import StageSpec, run_stage


def pretrain(config: PretrainConfig) -> int:
    """Train a model on token shards: from random or given weights, or from this run's newest checkpoint.

    Every rank calls it. Returns the exit status: 0, or 128 + signal where the run was interrupted and saved. Raises
    UserError before anything of the run is written, and RunFailed after that.
    """
    return run_stage(
        config, StageSpec(download_pretrained, open_pretrain_inputs, lambda config: NextTokenObjective(), DatasetBatches)
    )


def sft(config: SftConfig) -> int:
    """Fine-tune a model on conversations. See `pretrain`."""
    return run_stage(
        config, StageSpec(prepare_examples, open_example_inputs, lambda config: NextTokenObjective(), DatasetBatches)
    )


def align(config: AlignConfig) -> int:
    """Align a model with preferences, or optimize it for a reward. See `pretrain`."""
    if config.align.method == "grpo":
        spec = StageSpec(check_prompts_and_rewards, open_prompt_inputs, build_policy_objective, build_rollouts)
    else:
        spec = StageSpec(prepare_examples, open_example_inputs, build_preference_objective, build_preference_batches)
    return run_stage(config, spec)
