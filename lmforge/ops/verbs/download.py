"""`lmforge download`: models and datasets of the Hugging Face hub, by name or as recipes and
pipelines name them.

What is downloaded here is found later by its name, also on hosts without a network that share the
cache.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from lmforge.core.options.load import STAGES, parse_config, read_config
from lmforge.core.options.mixture import is_remote
from lmforge.core.options.options import Options, parse_options, read_recipe, validate_options
from lmforge.core.options.stage import PretrainConfig, StageConfig
from lmforge.core.options.verbs import VERBS
from lmforge.core.records.kinds import Kind, is_hub_name, kind_of
from lmforge.hf import hub
from lmforge.hf.peft_folder import base_model_of
from lmforge.ops.options.running import PipelineOptions
from lmforge.ops.verbs.running.pipeline import plan_stages
from lmforge.serve.options.models import DownloadOptions
from lmforge.text.options.prepare import PrepareOptions

# For verbs that do not train: the options that name a model, and which of its files they read.
MODEL_OPTIONS = {"model": True, "models": True, "tokenizer": False, "config_from": False}


@dataclass(frozen=True)
class HubItem:
    """A model or a dataset by its name on the hub; `weights`: whether the weights of a model are
    needed, and not only its tokenizer.
    """

    name: str
    kind: hub.Kind = "model"
    weights: bool = True


def run_download(options: DownloadOptions) -> int:
    """Download what is named and print what was downloaded. Raises UserError."""
    path = Path(options.name)
    if path.suffix == ".toml":
        return _download_all(path)
    item = HubItem(options.name, "dataset" if options.dataset else "model", options.weights)
    _download(item, options.folder)
    return 0


def _download_all(file: Path) -> int:
    """Download what a recipe or a pipeline names."""
    items = list(dict.fromkeys(_items_of_file(file)))
    # The same model with its weights and without them is downloaded once.
    items = [item for item in items if item.weights or HubItem(item.name, item.kind) not in items]
    for item in items:
        _download(item)
    if not items:
        print(
            f"{file}: nothing to download; all models and datasets that it names are local folders,"
            " or it names none"
        )
    return 0


def _download(item: HubItem, folder: Path | None = None) -> None:
    name, revision = hub.parse_model_name(item.name)
    result = hub.download(
        name,
        revision,
        folder,
        kind=item.kind,
        include_weights=item.weights,
        report=lambda line: print(line, flush=True),
    )
    print(
        f"{result.folder}: {name} at {result.commit}; {len(result.sizes)} files,"
        f" {sum(result.sizes.values()):,} bytes"
    )


def _items_of_file(file: Path) -> Iterator[HubItem]:
    table = read_recipe(file)
    if "stages" not in table:
        yield from _items_of_recipe(read_config(file))
        return
    for stage in plan_stages(validate_options(PipelineOptions, table, str(file)), file):
        verb, *words = stage.arguments
        if verb in STAGES:
            yield from _items_of_recipe(parse_config(STAGES[verb], words))
        elif verb != "download" and not issubclass(VERBS[verb].options, StageConfig):
            yield from _items_of_verb(parse_options(VERBS[verb].options, words))


def _items_of_recipe(config: StageConfig) -> Iterator[HubItem]:
    source = config.model.source
    if source is not None and kind_of(source) == Kind.ADAPTERS:
        source = base_model_of(source)
    if source is not None and kind_of(source) == Kind.HUB_NAME:
        yield HubItem(str(source), weights=config.model.load_weights)
    if isinstance(config, PretrainConfig):
        for folder in (each.folder for each in config.data.all_sources if is_remote(each.folder)):
            print(
                f"{folder}: is read over the network while training; copy it to a folder for hosts"
                " without one"
            )


def _items_of_verb(options: Options) -> Iterator[HubItem]:
    if isinstance(options, PrepareOptions) and is_hub_name(options.source):
        yield HubItem(options.source, "dataset")
    for name, weights in MODEL_OPTIONS.items():
        given = getattr(options, name, None) or ()
        for each in given if isinstance(given, tuple) else (given,):
            if is_hub_name(each):
                yield HubItem(str(each), weights=weights)
