"""What fine-tuning and alignment are made from: files of examples, read once into rows by the tokenizer of the model."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from lmforge.config.align import AlignDataOptions
from lmforge.config.sft import ConversationOptions
from lmforge.config.tuning import ExampleOptions, TunedConfig
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
from lmforge.data.packing import TokenizedExample
from lmforge.data.tokenizer import Tokenizer
from lmforge.errors import UserError
from lmforge.parallel.dims import plan_batches
from lmforge.stages.inputs import RunInputs, check_has_weights, check_model
from lmforge.stages.pretrained import Pretrained, find_pretrained

COUNT_LABELS = {
    "overlong": "left out as too long",
    "truncated": "truncated",
    "nothing_to_learn": "left out with nothing to learn",
}


def read_examples(options: ExampleOptions, example_type: str, path: Path, tokenizer: Tokenizer) -> Iterator[ExampleGroup]:
    """The examples of a file. Raises UserError naming the record where one makes no sense."""
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
    """The example with one more token, which nobody predicts: what comes last in a row of tokens is never read, and who judges
    a text reads all of it."""
    return TokenizedExample(np.append(example.tokens, example.tokens[-1:]), np.append(example.loss_mask, False))


def examples_folder(config: TunedConfig, tokenizer: Tokenizer) -> Path:
    """Where the examples of a recipe are kept. Raises UserError where a file cannot be read."""
    return config.data.folder / xxhash.xxh3_64_hexdigest(json.dumps(_cache_key(config, tokenizer), sort_keys=True).encode())


def _cache_key(config: TunedConfig, tokenizer: Tokenizer) -> dict[str, object]:
    options = config.data
    chosen = options.model_dump(mode="json", exclude={"files", "validation_files", "folder", "packing"})
    files = {"files": hash_files(options.files), "validation": hash_files(options.validation_files)}
    texts = {name: text for name, text in tokenizer.files.items() if name != "tokenizer.json"}
    return {"algorithm": EXAMPLES_VERSION, "kind": config.kind, "tokenizer": tokenizer.hash, "beside": texts, **chosen, **files}


def prepare_examples(config: TunedConfig) -> None:
    """Have the examples of a recipe on this host, as tokens. Raises UserError where there is something wrong with them."""
    options = config.data
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
        # A judged answer shares its row with another one to the same prompt (see Packed).
        sequence_length=options.sequence_length // 2 if config.kind == "judged" else options.sequence_length,
        limit_description=f"half of data.sequence_length = {options.sequence_length}"
        if config.kind == "judged"
        else f"data.sequence_length = {options.sequence_length}",
        overlong=options.overlong,
        validation_ratio=None if options.validation_files else options.validation_ratio,
    )


def find_required_pretrained(config: TunedConfig) -> Pretrained:
    """The model that a recipe tunes. Raises UserError where it names none."""
    if config.model.source is None:
        raise UserError(
            "model.source: name what to begin from: a run, a checkpoint, a Hugging Face folder or a name on the hub"
        )
    return find_pretrained(config.model.source, "weights")


def open_example_inputs(config: TunedConfig, world_size: int) -> RunInputs:
    """What `prepare_examples` has left on this host, and the model. Raises UserError where they do not fit."""
    plan = plan_batches(config, world_size)
    origin = find_required_pretrained(config)
    tokenizer = origin.tokenizer()
    shape = origin.resolve_model_config(config.model, tokenizer.vocab_size)
    if config.kind == "ranked":
        if shape.family == "transformers":
            raise UserError(
                f"{config.model.source}: transformers computes it, and gives it no head for rewards; import it first"
            )
        shape = replace(shape, reward=True)
    prompts = [len(tokenizer.encode(prompt)) for prompt in config.sample.prompts]
    check_model(config, shape, plan, longest_prompt_tokens=max(prompts, default=0))
    check_has_weights(origin)
    folder = ExampleFolder.open(examples_folder(config, tokenizer))
    about: dict[str, Any] = {"sequence_length": config.data.sequence_length, "pack": config.data.packing == "best-fit"}
    train = example_dataset(folder, "train", **about, seed=config.train.seed)
    there = folder.manifest["splits"]
    held_out = example_dataset(folder, "validation", **about, shuffle=False) if there["validation"]["examples"] else None
    if (
        config.kind == "judged"
        and isinstance(train.packing, ExamplePacking)
        and 2 * train.packing.num_single_example_sequences > train.sequences_per_epoch
    ):
        raise UserError(
            f"data.sequence_length = {config.data.sequence_length}: {train.packing.num_single_example_sequences} of {train.sequences_per_epoch} rows hold one answer, and"
            f" kto compares those of a row; use a longer one, such as {4 * config.data.sequence_length}"
        )
    counts = folder.manifest["counts"]
    words = [f"; {counts[name]:,} {words}" for name, words in COUNT_LABELS.items() if counts[name]]
    about_data = (
        f"{folder.path}: {there['train']['examples']:,} examples in {train.sequences_per_epoch:,} rows an epoch,"
        f" {there['train']['scored']:,} of {there['train']['tokens']:,} tokens scored; {there['validation']['examples']:,} held"
        f" out{''.join(words)}"
    )
    return RunInputs(tokenizer, train, held_out, shape, plan, str(folder.path), about_data, origin)
