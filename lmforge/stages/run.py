"""The stages of training: pretrain, sft and align. Each is four functions; run_stage.py does everything else.

Those of pretraining are here; examples.py, prompt_inputs.py and align.py have the others.
"""

from lmforge.config.align import AlignConfig
from lmforge.config.stage import PretrainConfig
from lmforge.config.tuning import SftConfig
from lmforge.data.dataset import TokenDataset
from lmforge.data.shards import TokenFolder
from lmforge.errors import UserError
from lmforge.objectives.language import NextTokenObjective
from lmforge.parallel.dims import plan_batches
from lmforge.stages.align import (
    build_policy_objective,
    build_preference_batches,
    build_preference_objective,
    build_rollouts,
)
from lmforge.stages.build_model import check_model
from lmforge.stages.dataset_batches import DatasetBatches
from lmforge.stages.examples import open_example_inputs, prepare_examples
from lmforge.stages.pretrained import check_has_weights, download_pretrained, find_pretrained, resolve_model_config
from lmforge.stages.prompt_inputs import check_prompts_and_rewards, open_prompt_inputs
from lmforge.stages.run_stage import StageSpec, run_stage
from lmforge.train.trainer import RunInputs


def pretrain(config: PretrainConfig) -> int:
    """Train a model on token shards: from random or given weights, or from this run's newest checkpoint.

    Every rank calls it. Returns the exit status: 0, or 128 + signal where the run was interrupted and saved. Raises
    UserError before anything of the run is written, and RunFailed after that.
    """
    spec = StageSpec(download_pretrained, open_pretrain_inputs, lambda config: NextTokenObjective(), DatasetBatches)
    return run_stage(config, spec)


def sft(config: SftConfig) -> int:
    """Fine-tune a model on conversations. See `pretrain`."""
    spec = StageSpec(prepare_examples, open_example_inputs, lambda config: NextTokenObjective(), DatasetBatches)
    return run_stage(config, spec)


def align(config: AlignConfig) -> int:
    """Align a model with preferences, or optimize it for a reward. See `pretrain`."""
    if config.align.method == "grpo":
        spec = StageSpec(check_prompts_and_rewards, open_prompt_inputs, build_policy_objective, build_rollouts)
    else:
        spec = StageSpec(prepare_examples, open_example_inputs, build_preference_objective, build_preference_batches)
    return run_stage(config, spec)


def open_pretrain_inputs(config: PretrainConfig, world_size: int) -> RunInputs:
    """Open the token shards and the model to begin from. Raises UserError where they do not fit together."""
    batch_plan = plan_batches(config, world_size)
    folder, length = config.data.folder, config.data.sequence_length
    tokens = TokenFolder.open(folder)
    tokenizer = tokens.tokenizer
    pretrained = find_pretrained(config.model.source) if config.model.source else None
    has_tokenizer = pretrained and (pretrained.folder / "tokenizer.json").exists()
    if pretrained and has_tokenizer and pretrained.tokenizer().hash != tokenizer.hash:
        way = f"prepare it with --tokenizer {pretrained.folder}"
        raise UserError(f"{folder}: prepared with another tokenizer than {pretrained.folder} has; {way}")
    model_config = resolve_model_config(config, pretrained, tokenizer.vocab_size)
    check_model(config, model_config, batch_plan, tokenizer)
    load_weights = None
    if pretrained and config.model.load_weights:
        check_has_weights(pretrained)
        load_weights = pretrained.load_weights
    train = TokenDataset(tokens, split="train", sequence_length=length, seed=config.train.seed)
    return RunInputs(
        tokenizer,
        train,
        TokenDataset(tokens, split="validation", sequence_length=length, shuffle=False),
        model_config,
        batch_plan,
        data_source=str(folder),
        data_summary=f"{folder}: {tokens.split('train').num_tokens:,} tokens, {train.sequences_per_epoch:,} sequences an epoch",
        load_weights=load_weights,
    )
