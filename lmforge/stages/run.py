"""The stages of training: pretrain, sft and align. Each is three functions; run_stage.py does everything else.

Those of pretraining are here; examples.py, prompt_inputs.py and align.py have the others.
"""

from dataclasses import replace

from lmforge.config.align import AlignConfig
from lmforge.config.stage import PretrainConfig
from lmforge.config.tuning import SftConfig
from lmforge.errors import UserError
from lmforge.parallel.dims import plan_batches
from lmforge.parallel.validate import check_parallel
from lmforge.stages.alignment.align import build_preference_batches, build_rollouts
from lmforge.stages.alignment.prompt_inputs import open_prompt_inputs, prepare_prompts
from lmforge.stages.check_model import check_model
from lmforge.stages.custom_code import NO_CUSTOM_CODE, CustomCode
from lmforge.stages.dataset_batches import DatasetBatches
from lmforge.stages.examples import open_example_inputs, prepare_examples
from lmforge.stages.pretrained import (
    check_has_weights,
    download_pretrained,
    find_pretrained,
    prefer_staged,
    resolve_model_config,
)
from lmforge.stages.run_stage import StageSpec, run_stage
from lmforge.stages.training_data import TokenSources
from lmforge.train.inputs import RunInputs


def pretrain(config: PretrainConfig, custom: CustomCode = NO_CUSTOM_CODE) -> int:
    """Train a model on token shards: from random or given weights, or from this run's newest checkpoint.

    Every rank calls it, with objective and callbacks of the program that calls it in `custom`. Returns the exit status: 0, or
    128 + signal where the run was interrupted and saved. Raises UserError before anything of the run is written, and RunFailed
    after that.
    """
    spec = StageSpec(download_pretrained, open_pretrain_inputs, DatasetBatches)
    return run_stage(config, spec, custom)


def sft(config: SftConfig, custom: CustomCode = NO_CUSTOM_CODE) -> int:
    """Fine-tune a model on conversations. See `pretrain`."""
    spec = StageSpec(prepare_examples, open_example_inputs, DatasetBatches)
    return run_stage(config, spec, custom)


def align(config: AlignConfig, custom: CustomCode = NO_CUSTOM_CODE) -> int:
    """Align a model with preferences, or optimize it for a reward. See `pretrain`."""
    if config.align.method == "grpo":
        spec = StageSpec(prepare_prompts, open_prompt_inputs, build_rollouts)
    else:
        spec = StageSpec(prepare_examples, open_example_inputs, build_preference_batches)
    return run_stage(config, spec, custom)


def open_pretrain_inputs(config: PretrainConfig, world_size: int) -> RunInputs:
    """Open the token shards and the model to begin from. Raises UserError where they do not fit together."""
    batch_plan = plan_batches(config, world_size)
    sources = TokenSources.open(config)
    tokenizer = sources.tokenizer
    pretrained = prefer_staged(config, find_pretrained(config.model.source)) if config.model.source else None
    has_tokenizer = pretrained and (pretrained.folder / "tokenizer.json").exists()
    if pretrained and has_tokenizer and pretrained.tokenizer().hash != tokenizer.hash:
        way = f"prepare it with --tokenizer {pretrained.folder}"
        raise UserError(f"{sources.location}: prepared with another tokenizer than {pretrained.folder} has; {way}")
    model_config = resolve_model_config(config, pretrained, tokenizer.vocab_size)
    check_model(config, model_config, batch_plan, tokenizer)
    load_weights = None
    if pretrained and config.model.load_weights:
        check_has_weights(pretrained)
        load_weights = pretrained.load_weights
    for length in config.data.sequence_lengths:
        check_parallel(config.parallel, model_config, replace(batch_plan, sequence_length=length))
    train = sources.training(batch_plan.global_batch_size)
    return RunInputs(
        tokenizer,
        train,
        sources.validation(),
        model_config,
        batch_plan,
        data_source=sources.location,
        data_summary="\n           ".join([sources.describe(), *(train.describe_phases() if len(train.phases) > 1 else [])]),
        load_weights=load_weights,
        source_folders=sources.folders_by_name,
    )
