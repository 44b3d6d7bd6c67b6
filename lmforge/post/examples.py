"""The inputs of fine-tuning and preference methods: files of examples, tokenized once by the
tokenizer of the model.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from lmforge.core.data.dataset import PackedDataset, join_datasets
from lmforge.core.data.mixture import MixedDataset, Phase, TrainingDataset, proportions_of
from lmforge.core.data.packing import TokenizedExample
from lmforge.core.data.tokenizer import Tokenizer
from lmforge.core.distributed.distributed import DistributedContext
from lmforge.core.errors import UserError, prefix_errors
from lmforge.core.options.mixture import FileSourceOptions
from lmforge.core.parallel.dims import plan_batches
from lmforge.core.stages.inputs import RunInputs, check_model
from lmforge.core.stages.weight_source import download_weights
from lmforge.post.options.align import AlignDataOptions
from lmforge.post.options.tuning import ConversationOptions, ExampleOptions, TunedConfig
from lmforge.post.tuned_model import find_required_pretrained, open_tuned_model
from lmforge.text.chat.conversations import read_conversations
from lmforge.text.chat.examples import (
    EXAMPLES_VERSION,
    ExampleFolder,
    ExamplePacking,
    example_dataset,
    hash_files,
    write_examples,
)
from lmforge.text.chat.preferences import read_preference_pairs, read_unpaired_preferences
from lmforge.text.chat.spill_buffer import ExampleGroup
from lmforge.text.sources.folders import FileSplit
from lmforge.text.sources.records import (
    UNUSABLE,
    UnusableRecords,
    describe_folders,
    describe_special_text,
    find_record_files,
)

# Options of the data section on which tokenized examples do not depend; files are hashed.
NOT_OF_EXAMPLES = {
    "files",
    "validation_files",
    "sources",
    "folder",
    "packing",
    "stage_to",
}
COUNT_LABELS = {
    "overlong": "left out as too long",
    "truncated": "truncated",
    "nothing_to_learn": "left out with nothing to learn",
    "unusable": f"left out that cannot be used, listed in its {UNUSABLE}",
}


def read_examples(
    options: ExampleOptions, kind: str, path: Path, tokenizer: Tokenizer, unusable: UnusableRecords
) -> Iterator[ExampleGroup]:
    """The examples of a file.

    Raises UserError naming a record that is not valid, unless `unusable` leaves it out.
    """
    reading: dict[str, Any] = {
        "fields": options.renamed,
        "ignore_media": options.ignore_media,
        "unusable": unusable,
    }
    reading["parse_special_tokens"] = options.parse_special_tokens
    if isinstance(options, ConversationOptions):
        reading |= {
            "split_turns": options.split_turns,
            "format": options.format,
            "mask": options.mask,
        }
        for example in read_conversations(path, tokenizer, **reading):
            yield ExampleGroup((example,))
        return
    assert isinstance(options, AlignDataOptions)
    reading["apply_chat_template"] = options.apply_chat_template
    if kind == "unpaired":
        for labelled in read_unpaired_preferences(path, tokenizer, **reading):
            yield ExampleGroup((labelled.example,), {"kto_labels": float(labelled.desirable)})
    elif kind == "pairs":
        for pair in read_preference_pairs(path, tokenizer, **reading):
            yield ExampleGroup((pair.chosen, pair.rejected))
    else:
        for pair in read_preference_pairs(path, tokenizer, with_margins=True, **reading):
            yield ExampleGroup(
                (repeat_last_token(pair.chosen), repeat_last_token(pair.rejected)),
                {"margins": pair.margin},
            )


def repeat_last_token(example: TokenizedExample) -> TokenizedExample:
    """The example with its last token repeated.

    The last token of a sequence is only a label, and a reward model reads all tokens.
    """
    return TokenizedExample(
        np.append(example.tokens, example.tokens[-1:]), np.append(example.loss_mask, False)
    )


def _folder_and_plan(
    config: TunedConfig, source: FileSourceOptions, tokenizer: Tokenizer
) -> tuple[Path, dict[str, object]]:
    """The folder of a source's tokenized examples, and everything that they depend on.

    The folder is named by its hash.

    Raises UserError where a file cannot be read.
    """
    options = config.data
    plan = {
        "algorithm": EXAMPLES_VERSION,
        "kind": config.kind,
        "tokenizer": tokenizer.hash,
        "beside": {
            name: text for name, text in tokenizer.files.items() if name != "tokenizer.json"
        },
        **options.model_dump(mode="json", exclude=NOT_OF_EXAMPLES),
        "files": hash_files(source.files),
        "validation": hash_files(source.validation_files, "validation"),
    }
    return (
        options.folder / xxhash.xxh3_64_hexdigest(json.dumps(plan, sort_keys=True).encode()),
        plan,
    )


def prepare_examples(config: TunedConfig, dist_ctx: DistributedContext) -> None:
    """Make a recipe's model and its tokenized examples available on every host.

    Every rank calls it.

    Raises UserError where there is no such model, or an example is not valid.
    """
    config.require_inputs()
    download_weights(config, dist_ctx)
    dist_ctx.run_once_per_folder(partial(_tokenize_examples, config), config.data.folder)


def _tokenize_examples(config: TunedConfig) -> None:
    tokenizer = find_required_pretrained(config).tokenizer()
    options = config.data
    length = config.data.sequence_length
    # An unpaired completion shares its sequence with another one of the same prompt.
    limit, half = (length // 2, "half of ") if config.kind == "unpaired" else (length, "")

    unusable = UnusableRecords(options.skip_invalid)  # of one source at a time

    def read(source: FileSourceOptions, split: FileSplit) -> Iterator[ExampleGroup]:
        for path in source.files if split == "train" else source.validation_files:
            for file in find_record_files(path, split):
                yield from read_examples(options, config.kind, file, tokenizer, unusable)

    for source in options.file_sources:
        folder, plan = _folder_and_plan(config, source, tokenizer)
        unusable.problems = []
        unusable.with_special_text = 0
        write_examples(
            folder,
            partial(read, source),
            tokenizer,
            plan=plan,
            sequence_length=limit,
            limit_description=f"{half}data.sequence_length = {length}",
            overlong=options.overlong,
            validation_ratio=None if source.validation_files else options.validation_ratio,
            unusable=unusable,
        )


def open_example_inputs(config: TunedConfig, world_size: int) -> RunInputs:
    """Open what `prepare_examples` has written, and the model.

    Raises UserError where they do not fit together.
    """
    batch_plan = plan_batches(config, world_size)
    pretrained, tokenizer, model_config = open_tuned_model(config)
    if config.kind == "pairs-with-margins":
        if model_config.implementation == "transformers":
            raise UserError(
                f"{config.model.source}: transformers computes it, and gives it no head for"
                " rewards; import it first"
            )
        model_config = replace(model_config, reward=True)
    check_model(config, model_config, batch_plan, tokenizer)
    folders, splits, train = _open_train(config, tokenizer, batch_plan.global_batch_size)
    if config.kind == "unpaired":
        assert isinstance(train, PackedDataset)
        assert isinstance(train.packing, ExamplePacking)
        single = train.packing.num_single_example_sequences
        count = train.sequences_per_epoch
        length = config.data.sequence_length
        if 2 * single > count:
            raise UserError(
                f"data.sequence_length = {length}: {single} of {count} sequences hold one"
                " completion, and kto compares the completions of a sequence; use a longer one,"
                f" such as {4 * length}"
            )
    named = {
        source.label: folder
        for source, folder in zip(config.data.file_sources, folders, strict=True)
    }
    validation = {
        name: _open_split(config, folder, "validation")
        for name, folder in named.items()
        if folder.num_examples("validation")
    }
    validation_dataset = next(iter(validation.values()), None)
    if len(folders) > 1 and validation:
        validation_dataset = join_datasets(validation)
    source_folders = {name: str(folder.path) for name, folder in named.items()}
    return RunInputs(
        tokenizer,
        train,
        validation_dataset,
        model_config,
        batch_plan,
        data_source=", ".join(str(folder.path) for folder in folders),
        data_summary="; ".join(map(_describe_examples, config.data.file_sources, folders, splits)),
        load_weights=pretrained.load_weights,
        source_folders=source_folders if len(named) > 1 else {},
    )


def open_training_examples(
    config: TunedConfig, global_batch_size: int
) -> tuple[Tokenizer, TrainingDataset]:
    """The tokenizer and the samples to train on, of a recipe whose examples are prepared.

    Raises UserError.
    """
    folders, _, train = _open_train(
        config, find_required_pretrained(config).tokenizer(), global_batch_size
    )
    return folders[0].tokenizer, train


def _open_train(
    config: TunedConfig, tokenizer: Tokenizer, global_batch_size: int
) -> tuple[list[ExampleFolder], list[PackedDataset], TrainingDataset]:
    """The folder of each source, its train split, and the samples mixed of all splits."""
    folders = [ExampleFolder.open(path) for path in example_folder_paths(config, tokenizer)]
    splits = [_open_split(config, folder, "train") for folder in folders]
    return folders, splits, mix_examples(config, folders, splits, global_batch_size)


def mix_examples(
    config: TunedConfig,
    folders: Sequence[ExampleFolder],
    datasets: Sequence[PackedDataset],
    global_batch_size: int,
) -> TrainingDataset:
    """The samples of the folder of each source, mixed by their weights."""
    if len(datasets) == 1:
        return datasets[0]
    assert isinstance(config.data, ConversationOptions)
    weights = {source.label: Fraction(str(source.weight)) for source in config.data.sources}
    counts = [folder.manifest["splits"]["train"]["tokens"] for folder in folders]
    # Whole tokens: exact fractions of many sources have thousands of digits.
    tokens = [
        Fraction(max(1, round(count / each.sequences_per_epoch)))
        for count, each in zip(counts, datasets, strict=True)
    ]
    with prefix_errors("data.sources"):
        if len({dataset.name for dataset in datasets}) < len(datasets):
            raise UserError(
                "two sources have the same examples; name them once, with a higher weight"
            )
        phase = Phase(None, proportions_of(weights, tokens), tuple(datasets))
    return MixedDataset(tuple(weights), [phase], unit=global_batch_size, seed=config.train.seed)


def example_folder_paths(config: TunedConfig, tokenizer: Tokenizer) -> list[Path]:
    """Where a recipe's tokenized examples are kept, one folder a source.

    Raises UserError where a file cannot be read.
    """
    return [_folder_and_plan(config, source, tokenizer)[0] for source in config.data.file_sources]


def _open_split(config: TunedConfig, folder: ExampleFolder, split: str) -> PackedDataset:
    length = config.data.sequence_length
    pack = config.data.packing == "best-fit"
    return example_dataset(
        folder,
        split,
        sequence_length=length,
        pack=pack,
        seed=config.train.seed,
        shuffle=split == "train",
    )


def _describe_examples(
    source: FileSourceOptions, folder: ExampleFolder, train: PackedDataset
) -> str:
    counts = folder.manifest["counts"]
    splits = folder.manifest["splits"]
    in_train = splits["train"]
    in_validation = splits["validation"]
    left_out = [
        f"; {counts[name]:,} {words}" for name, words in COUNT_LABELS.items() if counts.get(name)
    ]
    examples = in_train["examples"] + in_validation["examples"]
    left_out.append(
        describe_special_text(counts.get("special_text", 0), examples, "data.parse_special_tokens")
    )
    return (
        f"{folder.path}: {in_train['examples']:,} examples in {train.sequences_per_epoch:,}"
        " sequences per epoch,"
        f" {in_train['scored']:,} of {in_train['tokens']:,} tokens scored;"
        f" {in_validation['examples']:,} for validation"
        f"{''.join(left_out)}{describe_folders(source.files, validation_paths=source.validation_files)}"
    )
