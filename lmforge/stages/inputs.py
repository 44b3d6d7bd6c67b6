"""What every stage opens and checks before anything is written: the model that a run begins from, and pretraining's data."""

from importlib.util import find_spec

from lmforge.config.align import AlignConfig
from lmforge.config.batch_plan import BatchPlan
from lmforge.config.stage import PretrainConfig, StageConfig
from lmforge.config.tuning import TunedConfig
from lmforge.data.dataset import TokenDataset
from lmforge.data.shards import TokenFolder
from lmforge.data.tokenizer import Tokenizer
from lmforge.errors import UserError
from lmforge.interop.resolve import model_config_from_options
from lmforge.model.config import ModelConfig
from lmforge.parallel.dims import plan_batches
from lmforge.parallel.validate import check_parallel
from lmforge.plan.parameter_counts import build_meta_model, get_lora_config
from lmforge.stages.pretrained import Pretrained, find_pretrained
from lmforge.train.context import RunInputs
from lmforge.train.optimizer import assign_groups


def check_tracker(config: StageConfig) -> None:
    """Raise UserError where metrics are to go to a tracker that is not installed."""
    if config.log.tensorboard and find_spec("tensorboard") is None:
        raise UserError("log.tensorboard: it is not installed; pip install 'lmforge[tensorboard]', or leave the option out")


def open_pretrain_inputs(config: PretrainConfig, world_size: int) -> RunInputs:
    """Open the token shards and the model to begin from. Raises UserError where they do not fit together."""
    batch_plan = plan_batches(config, world_size)
    tokens = TokenFolder.open(config.data.folder)
    tokenizer = tokens.tokenizer
    pretrained = find_pretrained(config.model.source) if config.model.source else None
    if pretrained and pretrained.has_tokenizer() and pretrained.tokenizer().hash != tokenizer.hash:
        raise UserError(
            f"{config.data.folder}: prepared with another tokenizer than {pretrained.folder} has; prepare it with"
            f" --tokenizer {pretrained.folder}"
        )
    model_config = resolve_model_config(config, pretrained, tokenizer.vocab_size)
    check_model(config, model_config, batch_plan, tokenizer)
    load_weights = None
    if loads_pretrained_weights(config):
        assert pretrained is not None
        check_has_weights(pretrained)
        load_weights = pretrained.load_weights
    length = config.data.sequence_length
    train = TokenDataset(tokens, split="train", sequence_length=length, seed=config.train.seed)
    return RunInputs(
        tokenizer,
        train,
        TokenDataset(tokens, split="validation", sequence_length=length, shuffle=False),
        model_config,
        batch_plan,
        data_source=str(config.data.folder),
        data_summary=f"{config.data.folder}: {tokens.split('train').num_tokens:,} tokens,"
        f" {train.sequences_per_epoch:,} sequences an epoch",
        load_weights=load_weights,
    )


def resolve_model_config(config: StageConfig, pretrained: Pretrained | None, vocab_size: int | None) -> ModelConfig:
    """The model config of a recipe: that of the model it begins from, or of its options. Raises UserError."""
    if pretrained is None:
        return model_config_from_options(config.model, vocab_size)
    return pretrained.resolve_model_config(config.model, vocab_size)


def open_tuned_model(config: TunedConfig) -> tuple[Pretrained, Tokenizer, ModelConfig]:
    """The model that a recipe tunes, its tokenizer and its model config. Raises UserError where there are no weights."""
    pretrained = find_required_pretrained(config)
    check_has_weights(pretrained)
    tokenizer = pretrained.tokenizer()
    return pretrained, tokenizer, pretrained.resolve_model_config(config.model, tokenizer.vocab_size)


def find_required_pretrained(config: TunedConfig) -> Pretrained:
    """The model that a recipe tunes. Raises UserError where it names none."""
    if config.model.source is None:
        raise UserError(
            "model.source: name what to begin from: a run, a checkpoint, a Hugging Face folder or a name on the hub"
        )
    return find_pretrained(config.model.source, "weights")


def check_model(config: StageConfig, model_config: ModelConfig, batch_plan: BatchPlan, tokenizer: Tokenizer) -> None:
    """Raise UserError where a model with this config cannot be trained as the recipe says."""
    if config.model.embedding_initializer_range is not None and model_config.tie_word_embeddings:
        raise UserError(
            "model.embedding_initializer_range: this head is tied to the embedding; untie it, or leave that option out"
        )
    if model_config.reward and not (isinstance(config, AlignConfig) and config.align.method == "reward"):
        raise UserError(
            f"{config.model.source}: a reward model, which writes nothing; only align.method = reward goes on from it"
        )
    limit = model_config.max_sequence_length
    if limit is not None and config.data.sequence_length > limit:
        length = config.data.sequence_length
        raise UserError(f"data.sequence_length = {length}: this model has positions for {limit} tokens; use at most that")
    longest = max((len(tokenizer.encode(prompt)) for prompt in config.sample.prompts), default=0) + config.sample.max_tokens
    if config.sample.every_steps is not None and limit is not None and longest > limit:
        raise UserError(f"sample.max_tokens: prompt and sample take {longest} tokens, this model has positions for {limit}")
    check_parallel(config.parallel, model_config, batch_plan)
    if config.optimizer.groups or get_lora_config(config) is not None:
        model = build_meta_model(config, model_config)
        assign_groups([name for name, each in model.named_parameters() if each.requires_grad], config.optimizer.groups)


def loads_pretrained_weights(config: StageConfig) -> bool:
    """Whether the recipe begins from weights that are there."""
    return config.model.source is not None and config.model.load_weights


def download_pretrained(config: StageConfig) -> None:
    """Have the model that a recipe begins from on this host. Raises UserError where it can be neither found nor fetched."""
    if config.model.source is not None:
        find_pretrained(config.model.source, "weights" if loads_pretrained_weights(config) else "config.json")


def check_has_weights(pretrained: Pretrained) -> None:
    """Raise UserError where there are no weights to begin from."""
    # Those in a format that is not opened count: it is refused with a better reason.
    there = any(any(pretrained.folder.glob(each)) for each in ("*.safetensors*", "pytorch_model*.bin*"))
    if pretrained.manifest is None and not there:
        raise UserError(f"{pretrained.folder}: no weights here; to begin with random ones use --model.load_weights false")
