"""The inputs of fine-tuning and preference methods: files of examples, tokenized once by the tokenizer of the model."""

import json
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

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
from lmforge.stages.inputs import check_model, find_required_pretrained, open_tuned_model
from lmforge.train.context import RunInputs

COUNT_LABELS = {
    "overlong": "left out as too long",
    "truncated": "truncated",
    "nothing_to_learn": "left out with nothing to learn",
}


def read_examples(options: ExampleOptions, example_type: str, path: Path, tokenizer: Tokenizer) -> Iterator[ExampleGroup]:
    """The examples of a file. Raises UserError naming the record where one is not valid."""
    if isinstance(options, ConversationOptions):
        for example in read_conversations(path, tokenizer, format=options.format, mask=options.mask, fields=options.renamed):
            yield ExampleGroup((example,))
        return
    assert isinstance(options, AlignDataOptions)
    if example_type == "judged":
        for judged in read_unpaired_preferences(
            path, tokenizer, apply_chat_template=options.apply_chat_template, fields=options.renamed
        ):
            yield ExampleGroup((judged.example,), {"label": float(judged.desirable)})
        return
    ranked = example_type == "ranked"
    for pair in read_preference_pairs(
        path, tokenizer, apply_chat_template=options.apply_chat_template, with_margins=ranked, fields=options.renamed
    ):
        if ranked:
            yield ExampleGroup((repeat_last_token(pair.chosen), repeat_last_token(pair.rejected)), {"margin": pair.margin})
        else:
            yield ExampleGroup((pair.chosen, pair.rejected))


def repeat_last_token(example: TokenizedExample) -> TokenizedExample:
    """The example with its last token twice. The last one of a sequence is only a label, and a reward model reads all."""
    return TokenizedExample(np.append(example.tokens, example.tokens[-1:]), np.append(example.loss_mask, False))


def examples_folder(config: TunedConfig, tokenizer: Tokenizer) -> Path:
    """The folder of a recipe's tokenized examples. Raises UserError where a file cannot be read."""
    return config.data.folder / xxhash.xxh3_64_hexdigest(json.dumps(_cache_key(config, tokenizer), sort_keys=True).encode())


def _cache_key(config: TunedConfig, tokenizer: Tokenizer) -> dict[str, object]:
    options = config.data
    chosen = options.model_dump(mode="json", exclude={"files", "validation_files", "folder", "packing"})
    files = {"files": hash_files(options.files), "validation": hash_files(options.validation_files)}
    texts = {name: text for name, text in tokenizer.files.items() if name != "tokenizer.json"}
    return {"algorithm": EXAMPLES_VERSION, "kind": config.kind, "tokenizer": tokenizer.hash, "beside": texts, **chosen, **files}


def prepare_examples(config: TunedConfig) -> None:
    """Tokenize the examples of a recipe on this host. Raises UserError where one of them is not valid."""
    options, length = config.data, config.data.sequence_length
    paired = config.kind == "judged"  # such a completion shares its sequence with another one of the same prompt
    tokenizer = find_required_pretrained(config).tokenizer()
    if not options.files:
        raise UserError("data.files: name the files to learn from, such as --data.files chats.jsonl")

    def read(split: str) -> Iterator[ExampleGroup]:
        for path in options.files if split == "train" else options.validation_files:
            yield from read_examples(options, config.kind, path, tokenizer)

    write_examples(
        examples_folder(config, tokenizer),
        read,
        tokenizer,
        plan=_cache_key(config, tokenizer),
        sequence_length=length // 2 if paired else length,
        limit_description=f"{'half of ' if paired else ''}data.sequence_length = {length}",
        overlong=options.overlong,
        validation_ratio=None if options.validation_files else options.validation_ratio,
    )


def open_example_inputs(config: TunedConfig, world_size: int) -> RunInputs:
    """Open what `prepare_examples` has written on this host, and the model. Raises UserError where they do not fit together."""
    batch_plan = plan_batches(config, world_size)
    pretrained, tokenizer, model_config = open_tuned_model(config)
    if config.kind == "ranked":
        if model_config.family == "transformers":
            raise UserError(
                f"{config.model.source}: transformers computes it, and gives it no head for rewards; import it first"
            )
        model_config = replace(model_config, reward=True)
    check_model(config, model_config, batch_plan, tokenizer)
    folder = ExampleFolder.open(examples_folder(config, tokenizer))
    splits, counts = folder.manifest["splits"], folder.manifest["counts"]
    open_split = partial(
        example_dataset, folder, sequence_length=config.data.sequence_length, pack=config.data.packing == "best-fit"
    )
    train = open_split("train", seed=config.train.seed)
    _check_pairs_of_completions(config, train)
    left_out = [f"; {counts[name]:,} {words}" for name, words in COUNT_LABELS.items() if counts[name]]
    return RunInputs(
        tokenizer,
        train,
        open_split("validation", shuffle=False) if splits["validation"]["examples"] else None,
        model_config,
        batch_plan,
        data_source=str(folder.path),
        data_summary=f"{folder.path}: {splits['train']['examples']:,} examples in {train.sequences_per_epoch:,} sequences an"
        f" epoch, {splits['train']['scored']:,} of {splits['train']['tokens']:,} tokens scored;"
        f" {splits['validation']['examples']:,} for validation{''.join(left_out)}",
        load_weights=pretrained.load_weights,
    )


def _check_pairs_of_completions(config: TunedConfig, dataset: PackedDataset) -> None:
    """Raise UserError where most sequences hold one completion: kto compares those of a sequence."""
    if config.kind != "judged" or not isinstance(dataset.packing, ExamplePacking):
        return
    single, count, length = (
        dataset.packing.num_single_example_sequences,
        dataset.sequences_per_epoch,
        config.data.sequence_length,
    )
    if 2 * single > count:
        raise UserError(
            f"data.sequence_length = {length}: {single} of {count} sequences hold one completion, and kto compares the"
            f" completions of a sequence; use a longer one, such as {4 * length}"
        )
