"""The inputs of a run, and whether its model can be trained as the recipe says: what is known
before anything of the run is written. Those of pretraining are opened here; the others in
post/examples.py and post/prompts.py.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from lmforge.core.data.dataset import PackedDataset
from lmforge.core.data.mixture import TrainingDataset
from lmforge.core.data.tokenizer import Tokenizer
from lmforge.core.errors import UserError
from lmforge.core.files.untrusted import quoted
from lmforge.core.model.config import ModelConfig
from lmforge.core.model.config_json import to_config_json
from lmforge.core.model.layers import LanguageModel
from lmforge.core.model.parametrization import relative_to_base
from lmforge.core.optim.optimizer import assign_groups
from lmforge.core.options.batch_plan import BatchPlan
from lmforge.core.options.sections import SampleOptions
from lmforge.core.options.stage import PretrainConfig, StageConfig
from lmforge.core.parallel.dims import plan_batches
from lmforge.core.parallel.validate import check_parallel
from lmforge.core.plugins import describe_plugins
from lmforge.core.stages.parameter_counts import build_meta_model, get_lora_config
from lmforge.core.stages.training_data import TokenSources
from lmforge.core.stages.weight_source import find_weights, resolve_model_config


@dataclass(frozen=True)
class RunInputs:
    """All inputs of a run, opened and checked against each other.

    Nothing of the run has been written yet.

    validation_dataset    None where nothing is validated, or the stage validates in its own way
    data_source           where the data lies; goes into checkpoints and messages
    data_summary          what the data is, in words
    source_folders        the folder of each source of a mixture, by its name
    load_weights          fills a model with its first weights and returns the names it left out;
                          None: random weights
    sequences_per_sample  sequences of a batch made from each sequence of `train_dataset`
    opened                what observers have opened, by their names
    teacher               of a distillation: the model whose forward pass each batch takes; None
                          where it was stored
    dtype_reason          why the compute dtype is what the recipe says, in words
    """

    tokenizer: Tokenizer
    train_dataset: TrainingDataset
    validation_dataset: PackedDataset | None
    model_config: ModelConfig
    batch_plan: BatchPlan
    data_source: str
    data_summary: str
    load_weights: Callable[[LanguageModel], frozenset[str]] | None
    source_folders: Mapping[str, str] = field(default_factory=dict)
    sequences_per_sample: int = 1
    opened: Mapping[str, Any] = field(default_factory=dict)
    teacher: ModelConfig | None = None
    dtype_reason: str = ""

    @property
    def packed_dataset(self) -> PackedDataset:
        """`train_dataset` of a stage that has no mixtures."""
        assert isinstance(self.train_dataset, PackedDataset)
        return self.train_dataset

    def manifest_fields(self, config: StageConfig) -> dict[str, Any]:
        """What the manifests of a run's checkpoints say of the recipe and its inputs."""
        return {
            "global_batch_size": self.batch_plan.global_batch_size,
            "hf_config": to_config_json(self.model_config),
            "recipe": config.model_dump(mode="json", exclude={"plugins"}),
            "tokenizer_hash": self.tokenizer.hash,
            "written_by": {
                "data": self.data_source,
                "sources": dict(self.source_folders),
                "plugins": describe_plugins(config.plugins),
            },
        }


def open_pretrain_inputs(config: PretrainConfig, world_size: int) -> RunInputs:
    """Open the token shards and the model to begin from.

    Raises UserError where they do not fit together.
    """
    batch_plan = plan_batches(config, world_size)
    sources = TokenSources.open(config)
    tokenizer = sources.tokenizer
    pretrained = (
        find_weights(config.model.source).staged(config.data.stage_to)
        if config.model.source
        else None
    )
    has_tokenizer = pretrained and (pretrained.tokenizer_folder / "tokenizer.json").exists()
    if pretrained and has_tokenizer and pretrained.tokenizer().hash != tokenizer.hash:
        folder = pretrained.tokenizer_folder
        way = f"prepare it with --tokenizer {folder}"
        raise UserError(
            f"{sources.location}: prepared with another tokenizer than {folder} has; {way}"
        )
    model_config = resolve_model_config(config, pretrained, tokenizer.vocab_size)
    check_model(config, model_config, batch_plan, tokenizer)
    load_weights = None
    if pretrained and config.model.load_weights:
        pretrained.check_has_weights()
        pretrained.check_base(None)
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
        data_summary="\n           ".join(
            [sources.describe(), *(train.describe_phases() if len(train.phases) > 1 else [])]
        ),
        load_weights=load_weights,
        source_folders=sources.folders_by_name,
    )


def check_model(
    config: StageConfig, model_config: ModelConfig, batch_plan: BatchPlan, tokenizer: Tokenizer
) -> None:
    """Raise UserError where a model with this config cannot be trained as the recipe says."""
    if config.model.embedding_initializer_range is not None and model_config.tie_word_embeddings:
        raise UserError(
            "model.embedding_initializer_range: this head is tied to the embedding; untie it, or"
            " leave that option out"
        )
    if model_config.reward and not config.trains_reward_model:
        raise UserError(
            f"{config.model.source}: a reward model, which generates no text; only align.method ="
            " reward can start from it"
        )
    limit = model_config.max_sequence_length
    length = config.data.sequence_length
    if limit is not None and length > limit:
        raise UserError(
            f"data.sequence_length = {length}: this model has positions for {limit} tokens; use at"
            " most that"
        )
    _check_samples(config, model_config, tokenizer)
    check_parallel(config.parallel, model_config, batch_plan)
    relative_to_base(config.model, model_config)
    if config.optimizer.groups or get_lora_config(config) is not None:
        parameters = build_meta_model(model_config, get_lora_config(config)).named_parameters()
        assign_groups(
            [name for name, each in parameters if each.requires_grad], config.optimizer.groups
        )


def describe_long_sequences(config: StageConfig, inputs: RunInputs) -> list[str]:
    """A line for sequences that are longer than the rotary positions of the model, or of its
    teacher, are made for.
    """
    length = config.data.sequence_length
    lines = []
    for whose, model in (("this model's", inputs.model_config), ("the teacher's", inputs.teacher)):
        positions = None if model is None else model.rotary_positions
        if positions is not None and length > positions:
            made_for = (
                f"{whose} rotary positions are made for {positions} tokens"
                " (max_position_embeddings)"
            )
            lines.append(
                f"data.sequence_length = {length}: {made_for}; use at most that, unless it shall"
                " learn longer ones"
            )
    return lines


def _check_samples(config: StageConfig, model_config: ModelConfig, tokenizer: Tokenizer) -> None:
    """Raise UserError for sample prompts that are longer than the training sequences or the model's
    context.
    """
    sample = config.sample
    length = config.data.sequence_length
    longest = 0
    if sample == SampleOptions():
        return
    # Encoding a text that cannot fit would take long. A tokenizer's normalizer may shorten a text,
    # by less than this factor.
    most_bytes = 4 * length * int(tokenizer.token_byte_lengths().max())
    for prompt in sample.prompts:
        count = len(tokenizer.encode(prompt)) if len(prompt.encode()) <= most_bytes else length + 1
        longest = max(longest, count)
        if count > length:
            way = f"does not fit into data.sequence_length = {length} tokens; shorten it"
            raise UserError(f"sample.prompts: {quoted(prompt)} {way}")
    limit = max(length, model_config.max_position_embeddings)
    if sample.every_steps is not None and longest + sample.max_tokens > limit:
        total = longest + sample.max_tokens
        raise UserError(
            f"sample.max_tokens: prompt and sample take {total} tokens, this model has positions"
            f" for {limit}"
        )
