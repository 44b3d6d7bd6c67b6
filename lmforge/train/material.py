"""What a run is made from: data, tokenizer, shape and batch plan, found to fit together before anything is touched."""

from dataclasses import dataclass
from importlib.util import find_spec

from lmforge.config import BatchPlan, Config, StageConfig
from lmforge.config_post import AlignConfig, TunedConfig
from lmforge.data.shards import TokenFolder
from lmforge.data.stream import Rows, Stream
from lmforge.data.tokenizer import Tokenizer
from lmforge.errors import Mistake
from lmforge.infer.tasks import Task
from lmforge.model import build
from lmforge.model.flops import flops_per_token, parameters
from lmforge.model.lora import LoraConfig, adapter_tensors, add_lora
from lmforge.model.shapes import ModelConfig, shape_of
from lmforge.parallel.fits import check_fits
from lmforge.parallel.mesh import plan_batches
from lmforge.train.optim import choose_groups
from lmforge.train.origin import Origin, find_origin


@dataclass(frozen=True)
class Material:
    """What a run is made from, all of it opened and found to fit together.

    data        where it lies
    about_data  what it is, in words
    held_out    what is validated on; None where nothing is
    origin      where first weights come from; None where they are random
    uses        rows of a batch that are made of each row of the data
    tasks       questions that are asked at each validation, and rows in a batch of them
    """

    tokenizer: Tokenizer
    train: Rows
    held_out: Rows | None
    shape: ModelConfig
    plan: BatchPlan
    data: str
    about_data: str
    origin: Origin | None
    uses: int = 1
    tasks: tuple[tuple[Task, int], ...] = ()


def check_tracker(config: StageConfig) -> None:
    """Raise Mistake where metrics are to go to a tracker that is not installed."""
    if config.log.tensorboard and find_spec("tensorboard") is None:
        raise Mistake("log.tensorboard: it is not installed; pip install 'lmforge[tensorboard]', or leave the option out")


def open_material(config: Config, ranks: int) -> Material:
    """Open the data, derive the batch plan and the shape. Raises Mistake where they do not fit."""
    plan = plan_batches(config, ranks)
    tokens = TokenFolder.open(config.data.folder)
    tokenizer = tokens.tokenizer
    origin = find_origin(config.model.source) if config.model.source else None
    if origin and origin.has_tokenizer() and origin.tokenizer().hash != tokenizer.hash:
        raise Mistake(
            f"{config.data.folder}: prepared with another tokenizer than {origin.folder} has; prepare it with"
            f" --tokenizer {origin.folder}"
        )
    shape = origin.shape(config.model, tokenizer.vocab_size) if origin else shape_of(config.model, tokenizer.vocab_size)
    prompts = [len(tokenizer.encode(prompt)) for prompt in config.sample.prompts]
    check_model(config, shape, plan, longest_prompt=max(prompts, default=0))
    if has_weights(config):
        assert origin is not None
        check_weights(origin)
    train = Stream(tokens, split="train", length=config.data.length, seed=config.train.seed)
    held_out = Stream(tokens, split="held_out", length=config.data.length, shuffle=False)
    there = tokens.split("train").tokens
    about_data = f"{config.data.folder}: {there:,} tokens, {train.rows_per_epoch:,} rows an epoch"
    first = origin if has_weights(config) else None
    return Material(tokenizer, train, held_out, shape, plan, str(config.data.folder), about_data, first)


def check_model(config: StageConfig, shape: ModelConfig, plan: BatchPlan, longest_prompt: int) -> None:
    """Raise Mistake where a model of this shape cannot be trained as the recipe says; prompts of samples are in tokens."""
    if config.model.embedding_initializer_range is not None and shape.tie_word_embeddings:
        raise Mistake(
            "model.embedding_initializer_range: this head is tied to the embedding; untie it, or leave that option out"
        )
    if shape.reward and not (isinstance(config, AlignConfig) and config.align.method == "reward"):
        raise Mistake(
            f"{config.model.source}: a reward model, which writes nothing; only align.method = reward goes on from it"
        )
    limit = shape.longest_row_tokens
    if limit is not None and config.data.length > limit:
        raise Mistake(f"data.length = {config.data.length}: this model has positions for {limit} tokens; use at most that")
    longest = longest_prompt + config.sample.max_tokens
    if config.sample.every_steps is not None and limit is not None and longest > limit:
        raise Mistake(f"sample.max_tokens: prompt and sample take {longest} tokens, this model has positions for {limit}")
    check_fits(config.parallel, shape, plan)
    lora = adapters_of(config)
    if config.optimizer.groups or lora is not None:  # refused before anything is touched
        model = build(shape, seed=None, device="meta")
        if lora is not None:
            add_lora(model, lora)
        trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        choose_groups(trained, config.optimizer.groups)


def adapters_of(config: StageConfig) -> LoraConfig | None:
    """The adapters that a recipe asks for; None where all weights are trained."""
    if not isinstance(config, TunedConfig) or config.lora.rank is None:
        return None
    return LoraConfig(**config.lora.model_dump())


def counted(config: StageConfig, shape: ModelConfig) -> tuple[int, int]:
    """How many numbers a recipe's model holds, adapters included, and how many of them are trained."""
    total = parameters(shape).total
    if (lora := adapters_of(config)) is None:
        return total, total
    model = build(shape, seed=None, device="meta")
    add_lora(model, lora)
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    return total + sum(tensor.numel() for tensor in adapter_tensors(model).values()), trained


def step_flops_per_token(config: StageConfig, shape: ModelConfig) -> float:
    """Floating-point operations that training takes per token: as flops.py counts them, less the gradients of frozen weights.

    A weight takes two operations in the forward pass, two for the gradient of its input, and two for its own.
    """
    per_token = float(flops_per_token(shape, config.data.length))
    if adapters_of(config) is None:
        return per_token
    total, trained = counted(config, shape)
    return per_token - 2 * parameters(shape).multiplied + 4 * (total - parameters(shape).total) + 2 * trained


def has_weights(config: StageConfig) -> bool:
    """Whether the recipe begins from weights that are there."""
    return config.model.source is not None and config.model.load_weights


def fetch_source(config: StageConfig) -> None:
    """Have the model that a recipe begins from on this host. Raises Mistake where it can be neither found nor fetched."""
    if config.model.source is not None:
        find_origin(config.model.source, "weights" if has_weights(config) else "config.json")


def check_weights(origin: Origin) -> None:
    """Raise Mistake where there are no weights to begin from."""
    # Those in a format that is not opened count: it is refused with a better reason.
    there = any(any(origin.folder.glob(each)) for each in ("*.safetensors*", "pytorch_model*.bin*"))
    if origin.manifest is None and not there:
        raise Mistake(f"{origin.folder}: no weights here; to begin with random ones use --model.load_weights false")
