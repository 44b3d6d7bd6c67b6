"""What a run is made from: data, tokenizer, shape and batch plan, found to fit together before anything is touched."""

from dataclasses import dataclass
from importlib.util import find_spec

from lmforge.config import BatchPlan, Config
from lmforge.data.hub import local_folder
from lmforge.data.shards import TokenFolder
from lmforge.data.stream import Stream
from lmforge.data.tokenizer import Tokenizer
from lmforge.errors import Mistake
from lmforge.model import build
from lmforge.model.shapes import ModelConfig, shape_of
from lmforge.parallel.fits import check_fits
from lmforge.parallel.mesh import plan_batches
from lmforge.train.optim import choose_groups


@dataclass(frozen=True)
class Material:
    """What a run is made from, all of it opened and found to fit together."""

    tokens: TokenFolder
    train: Stream
    held_out: Stream
    shape: ModelConfig
    plan: BatchPlan


def check_tracker(config: Config) -> None:
    """Raise Mistake where metrics are to go to a tracker that is not installed."""
    if config.log.tensorboard and find_spec("tensorboard") is None:
        raise Mistake("log.tensorboard: it is not installed; pip install 'lmforge[tensorboard]', or leave the option out")


def open_material(config: Config, ranks: int) -> Material:
    """Open the data, derive the batch plan and the shape. Raises Mistake where they do not fit."""
    plan = plan_batches(config, ranks)
    tokens = TokenFolder.open(config.data.folder)
    tokenizer = tokens.tokenizer
    source = config.model.source and local_folder(config.model.source, "config.json")
    if source and (source / "tokenizer.json").exists() and Tokenizer.open(source).hash != tokenizer.hash:
        raise Mistake(
            f"{config.data.folder}: prepared with another tokenizer than {source} has; prepare it with --tokenizer {source}"
        )
    shape = shape_of(config.model, tokenizer.vocab_size)
    if config.model.embedding_initializer_range is not None and shape.tie_word_embeddings:
        raise Mistake(
            "model.embedding_initializer_range: this head is tied to the embedding; untie it, or leave that option out"
        )
    limit = shape.longest_row_tokens
    if limit is not None and config.data.length > limit:
        raise Mistake(f"data.length = {config.data.length}: this model has positions for {limit} tokens; use at most that")
    if config.sample.every_steps is not None and limit is not None:
        longest = max(len(tokenizer.encode(prompt)) for prompt in config.sample.prompts) + config.sample.max_tokens
        if longest > limit:
            raise Mistake(f"sample.max_tokens: prompt and sample take {longest} tokens, this model has positions for {limit}")
    check_fits(config.parallel, shape, plan)
    check_weights(config)
    if config.optimizer.groups:
        names = dict(build(shape, seed=None, device="meta").named_parameters())
        choose_groups(names, config.optimizer.groups)  # refuses before anything is touched
    train = Stream(tokens, split="train", length=config.data.length, seed=config.train.seed)
    held_out = Stream(tokens, split="held_out", length=config.data.length, shuffle=False)
    return Material(tokens, train, held_out, shape, plan)


def has_weights(config: Config) -> bool:
    """Whether the recipe begins from a folder's weights."""
    return config.model.source is not None and config.model.load_weights


def fetch_source(config: Config) -> None:
    """Have the model that a recipe begins from on this host. Raises Mistake where it can be neither found nor fetched."""
    if config.model.source is not None:
        local_folder(config.model.source, "weights" if has_weights(config) else "config.json")


def check_weights(config: Config) -> None:
    """Raise Mistake where the recipe begins from the weights of a folder that has none."""
    if not has_weights(config) or config.model.source is None:
        return
    source = local_folder(config.model.source)
    # Those in a format that is not opened count: it is refused with a better reason.
    if not any(any(source.glob(each)) for each in ("*.safetensors*", "pytorch_model*.bin*")):
        raise Mistake(f"{source}: no weights here; to begin with random ones use --model.load_weights false")
