"""The inputs of fine-tuning and preference methods: files of examples, tokenized once by the tokenizer of the model."""

import json
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from lmforge.config.align import AlignDataOptions
from lmforge.config.tuning import ConversationOptions, ExampleOptions, TunedConfig
from lmforge.data.chat.conversations import read_conversations
from lmforge.data.chat.examples import (
    EXAMPLES_VERSION,
    ExampleFolder,
    ExamplePacking,
    example_dataset,
    hash_files,
    write_examples,
)
from lmforge.data.chat.preferences import read_preference_pairs, read_unpaired_preferences
from lmforge.data.chat.spill_buffer import ExampleGroup
from lmforge.data.dataset import PackedDataset
from lmforge.data.packing import TokenizedExample
from lmforge.data.tokenizer import Tokenizer
from lmforge.errors import UserError
from lmforge.parallel.dims import plan_batches
from lmforge.stages.build_model import check_model
from lmforge.stages.pretrained import find_required_pretrained, open_tuned_model
from lmforge.train.trainer import RunInputs

COUNT_LABELS = {
    "overlong": "left out as too long",
    "truncated": "truncated",
    "nothing_to_learn": "left out with nothing to learn",
}


def read_examples(options: ExampleOptions, kind: str, path: Path, tokenizer: Tokenizer) -> Iterator[ExampleGroup]:
    """The examples of a file. Raises UserError naming the record where one is not valid."""
    if isinstance(options, ConversationOptions):
        for example in read_conversations(path, tokenizer, format=options.format, mask=options.mask, fields=options.renamed):
            yield ExampleGroup((example,))
        return
    assert isinstance(options, AlignDataOptions)
    reading: dict[str, Any] = {"apply_chat_template": options.apply_chat_template, "fields": options.renamed}
    if kind == "unpaired":
        for labelled in read_unpaired_preferences(path, tokenizer, **reading):
            yield ExampleGroup((labelled.example,), {"kto_labels": float(labelled.desirable)})
    elif kind == "pairs":
        for pair in read_preference_pairs(path, tokenizer, **reading):
            yield ExampleGroup((pair.chosen, pair.rejected))
    else:
        for pair in read_preference_pairs(path, tokenizer, with_margins=True, **reading):
            yield ExampleGroup((repeat_last_token(pair.chosen), repeat_last_token(pair.rejected)), {"margins": pair.margin})


def repeat_last_token(example: TokenizedExample) -> TokenizedExample:
    """The example with its last token twice. The last one of a sequence is only a label, and a reward model reads all."""
    return TokenizedExample(np.append(example.tokens, example.tokens[-1:]), np.append(example.loss_mask, False))


def examples_folder(config: TunedConfig, tokenizer: Tokenizer) -> Path:
    """The folder of a recipe's tokenized examples. Raises UserError where a file cannot be read."""
    return _folder_and_plan(config, tokenizer)[0]


def _folder_and_plan(config: TunedConfig, tokenizer: Tokenizer) -> tuple[Path, dict[str, object]]:
    """The folder of a recipe's tokenized examples, and all that they depend on, of which its name is a hash."""
    options = config.data
    plan = {
        "algorithm": EXAMPLES_VERSION,
        "kind": config.kind,
        "tokenizer": tokenizer.hash,
        "beside": {name: text for name, text in tokenizer.files.items() if name != "tokenizer.json"},
        **options.model_dump(mode="json", exclude={"files", "validation_files", "folder", "packing"}),
        "files": hash_files(options.files),
        "validation": hash_files(options.validation_files),
    }
    return options.folder / xxhash.xxh3_64_hexdigest(json.dumps(plan, sort_keys=True).encode()), plan


def prepare_examples(config: TunedConfig) -> None:
    """Tokenize the examples of a recipe on this host. Raises UserError where one of them is not valid."""
    options, length = config.data, config.data.sequence_length
    tokenizer = find_required_pretrained(config).tokenizer()
    folder, plan = _folder_and_plan(config, tokenizer)
    # An unpaired completion shares its sequence with another one of the same prompt.
    limit, half = (length // 2, "half of ") if config.kind == "unpaired" else (length, "")

    def read(split: str) -> Iterator[ExampleGroup]:
        for path in options.files if split == "train" else options.validation_files:
            yield from read_examples(options, config.kind, path, tokenizer)

    write_examples(
        folder,
        read,
        tokenizer,
        plan=plan,
        sequence_length=limit,
        limit_description=f"{half}data.sequence_length = {length}",
        overlong=options.overlong,
        validation_ratio=None if options.validation_files else options.validation_ratio,
    )


def open_example_inputs(config: TunedConfig, world_size: int) -> RunInputs:
    """Open what `prepare_examples` has written on this host, and the model. Raises UserError where they do not fit together."""
    batch_plan = plan_batches(config, world_size)
    pretrained, tokenizer, model_config = open_tuned_model(config)
    if config.kind == "pairs-with-margins":
        if model_config.family == "transformers":
            raise UserError(
                f"{config.model.source}: transformers computes it, and gives it no head for rewards; import it first"
            )
        model_config = replace(model_config, reward=True)
    check_model(config, model_config, batch_plan, tokenizer)
    folder = ExampleFolder.open(examples_folder(config, tokenizer))
    length, pack = config.data.sequence_length, config.data.packing == "best-fit"
    open_split = partial(example_dataset, folder, sequence_length=length, pack=pack)
    train = open_split("train", seed=config.train.seed)
    if config.kind == "unpaired":
        _check_pairs_of_completions(train, length)
    counts, splits = folder.manifest["counts"], folder.manifest["splits"]
    in_train, in_validation = splits["train"], splits["validation"]
    left_out = [f"; {counts[name]:,} {words}" for name, words in COUNT_LABELS.items() if counts.get(name)]
    return RunInputs(
        tokenizer,
        train,
        open_split("validation", shuffle=False) if in_validation["examples"] else None,
        model_config,
        batch_plan,
        data_source=str(folder.path),
        data_summary=f"{folder.path}: {in_train['examples']:,} examples in {train.sequences_per_epoch:,} sequences an epoch,"
        f" {in_train['scored']:,} of {in_train['tokens']:,} tokens scored; {in_validation['examples']:,} for validation"
        f"{''.join(left_out)}",
        load_weights=pretrained.load_weights,
    )


def _check_pairs_of_completions(dataset: PackedDataset, length: int) -> None:
    """Raise UserError where most sequences hold one completion: kto compares those of a sequence."""
    assert isinstance(dataset.packing, ExamplePacking)
    single, count = dataset.packing.num_single_example_sequences, dataset.sequences_per_epoch
    if 2 * single > count:
        raise UserError(
            f"data.sequence_length = {length}: {single} of {count} sequences hold one completion, and kto compares the"
            f" completions of a sequence; use a longer one, such as {4 * length}"
        )
