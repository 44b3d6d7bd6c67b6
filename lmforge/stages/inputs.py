"""What a run is made from: data, tokenizer, shape and batch plan, found to fit together before anything is touched."""

from collections.abc import Iterable
from dataclasses import dataclass
from importlib.util import find_spec

from torch import nn

from lmforge.config.align import AlignConfig
from lmforge.config.batch_plan import BatchPlan
from lmforge.config.pretrain import PretrainConfig
from lmforge.config.stage import StageConfig
from lmforge.config.tuning import TunedConfig
from lmforge.data.dataset import PackedDataset, TokenDataset
from lmforge.data.shards import TokenFolder
from lmforge.data.tokenizer import Tokenizer
from lmforge.errors import UserError
from lmforge.evaluate.tasks import QuestionTask
from lmforge.interop.resolve import model_config_from_options
from lmforge.model import build_model
from lmforge.model.config import ModelConfig
from lmforge.model.flops import flops_per_token, parameter_count
from lmforge.model.lora import LoraConfig, adapter_parameters, add_lora
from lmforge.parallel.dims import plan_batches
from lmforge.parallel.validate import check_parallel
from lmforge.plan.memory import ParameterCounts
from lmforge.stages.pretrained import Pretrained, find_pretrained
from lmforge.train.optimizer import assign_groups


@dataclass(frozen=True)
class RunInputs:
    """What a run is made from, all of it opened and found to fit together.

    data        where it lies
    about_data  what it is, in words
    held_out    what is validated on; None where nothing is
    origin      where first weights come from; None where they are random
    uses        rows of a batch that are made of each row of the data
    tasks       questions that are asked at each validation, and rows in a batch of them
    """

    tokenizer: Tokenizer
    train_dataset: PackedDataset
    validation_dataset: PackedDataset | None
    model_config: ModelConfig
    batch_plan: BatchPlan
    data_source: str
    data_summary: str
    pretrained: Pretrained | None
    sequences_per_sample: int = 1
    tasks: tuple[tuple[QuestionTask, int], ...] = ()


def check_tracker(config: StageConfig) -> None:
    """Raise UserError where metrics are to go to a tracker that is not installed."""
    if config.log.tensorboard and find_spec("tensorboard") is None:
        raise UserError("log.tensorboard: it is not installed; pip install 'lmforge[tensorboard]', or leave the option out")


def open_pretrain_inputs(config: PretrainConfig, world_size: int) -> RunInputs:
    """Open the data, derive the batch plan and the shape. Raises UserError where they do not fit."""
    plan = plan_batches(config, world_size)
    tokens = TokenFolder.open(config.data.folder)
    tokenizer = tokens.tokenizer
    origin = find_pretrained(config.model.source) if config.model.source else None
    if origin and origin.has_tokenizer() and origin.tokenizer().hash != tokenizer.hash:
        raise UserError(
            f"{config.data.folder}: prepared with another tokenizer than {origin.folder} has; prepare it with"
            f" --tokenizer {origin.folder}"
        )
    shape = (
        origin.resolve_model_config(config.model, tokenizer.vocab_size)
        if origin
        else model_config_from_options(config.model, tokenizer.vocab_size)
    )
    prompts = [len(tokenizer.encode(prompt)) for prompt in config.sample.prompts]
    check_model(config, shape, plan, longest_prompt_tokens=max(prompts, default=0))
    if loads_pretrained_weights(config):
        assert origin is not None
        check_has_weights(origin)
    train = TokenDataset(tokens, split="train", sequence_length=config.data.sequence_length, seed=config.train.seed)
    held_out = TokenDataset(tokens, split="validation", sequence_length=config.data.sequence_length, shuffle=False)
    there = tokens.split("train").num_tokens
    about_data = f"{config.data.folder}: {there:,} tokens, {train.sequences_per_epoch:,} rows an epoch"
    first = origin if loads_pretrained_weights(config) else None
    return RunInputs(tokenizer, train, held_out, shape, plan, str(config.data.folder), about_data, first)


def check_model(config: StageConfig, model_config: ModelConfig, batch_plan: BatchPlan, longest_prompt_tokens: int) -> None:
    """Raise UserError where a model of this shape cannot be trained as the recipe says; prompts of samples are in tokens."""
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
        raise UserError(
            f"data.sequence_length = {config.data.sequence_length}: this model has positions for {limit} tokens; use at most that"
        )
    longest = longest_prompt_tokens + config.sample.max_tokens
    if config.sample.every_steps is not None and limit is not None and longest > limit:
        raise UserError(f"sample.max_tokens: prompt and sample take {longest} tokens, this model has positions for {limit}")
    check_parallel(config.parallel, model_config, batch_plan)
    lora = get_lora_config(config)
    if config.optimizer.groups or lora is not None:  # refused before anything is touched
        model = build_model(model_config, "meta")
        if lora is not None:
            add_lora(model, lora)
        trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        assign_groups(trained, config.optimizer.groups)


def get_lora_config(config: StageConfig) -> LoraConfig | None:
    """The adapters that a recipe asks for; None where all weights are trained."""
    if not isinstance(config, TunedConfig) or config.lora.rank is None:
        return None
    return LoraConfig(**config.lora.model_dump())


def count_parameters(config: StageConfig, model_config: ModelConfig) -> ParameterCounts:
    """Numbers of parameters of a recipe's model, adapters included."""
    count = parameter_count(model_config)
    if (lora := get_lora_config(config)) is None:
        return ParameterCounts(count.total, count.total, count.block_matrices)
    model = build_model(model_config, "meta")
    add_lora(model, lora)

    def trained(parameters: Iterable[nn.Parameter]) -> int:
        return sum(parameter.numel() for parameter in parameters if parameter.requires_grad)

    adapters = sum(tensor.numel() for tensor in adapter_parameters(model).values())
    matrices = [parameter for parameter in model.blocks.parameters() if parameter.ndim == 2]
    return ParameterCounts(count.total + adapters, trained(model.parameters()), trained(matrices))


def training_flops_per_token(config: StageConfig, model_config: ModelConfig) -> float:
    """Floating-point operations that training takes per token: as flops.py counts them, less the gradients of frozen weights.

    A weight takes two operations in the forward pass, two for the gradient of its input, and two for its own.
    """
    per_token = float(flops_per_token(model_config, config.data.sequence_length))
    if get_lora_config(config) is None:
        return per_token
    counts, count = count_parameters(config, model_config), parameter_count(model_config)
    return per_token - 2 * count.active_matmul + 4 * (counts.total - count.total) + 2 * counts.trained


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
