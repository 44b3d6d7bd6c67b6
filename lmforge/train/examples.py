"""What fine-tuning and alignment are made from: files of examples, read once into rows by the tokenizer of the model."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from lmforge.config_post import AlignDataOptions, ConversationOptions, ExampleOptions, TunedConfig
from lmforge.data.conversations import Example, read_conversations
from lmforge.data.examples import ALGORITHM, ExampleFolder, Packed, example_rows, files_digest, write_examples
from lmforge.data.preferences import read_labelled, read_pairs
from lmforge.data.spool import Item
from lmforge.data.tokenizer import Tokenizer
from lmforge.errors import Mistake
from lmforge.parallel.mesh import plan_batches
from lmforge.train.material import Material, check_model, check_weights
from lmforge.train.origin import Origin, find_origin

LEFT_OUT = {
    "too_long": "left out as too long",
    "cut": "cut",
    "nothing_to_learn": "left out with nothing to learn",
}


def read_items(options: ExampleOptions, kind: str, path: Path, tokenizer: Tokenizer) -> Iterator[Item]:
    """The examples of a file. Raises Mistake naming the record where one makes no sense."""
    if isinstance(options, ConversationOptions):
        for example in read_conversations(path, tokenizer, format=options.format, mask=options.mask, fields=options.renamed):
            yield Item((example,))
        return
    assert isinstance(options, AlignDataOptions)
    if kind == "judged":
        for judged in read_labelled(path, tokenizer, as_chat=options.as_chat, fields=options.renamed):
            yield Item((judged.example,), {"label": float(judged.good)})
        return
    ranked = kind == "ranked"
    for pair in read_pairs(path, tokenizer, as_chat=options.as_chat, margins=ranked, fields=options.renamed):
        if ranked:
            yield Item((read_to_its_end(pair.chosen), read_to_its_end(pair.rejected)), {"margin": pair.margin})
        else:
            yield Item((pair.chosen, pair.rejected))


def read_to_its_end(example: Example) -> Example:
    """The example with one more token, which nobody predicts: what comes last in a row of tokens is never read, and who judges
    a text reads all of it."""
    return Example(np.append(example.tokens, example.tokens[-1:]), np.append(example.scored, False))


def folder_of(config: TunedConfig, tokenizer: Tokenizer) -> Path:
    """Where the examples of a recipe are kept. Raises Mistake where a file cannot be read."""
    return config.data.folder / xxhash.xxh3_64_hexdigest(json.dumps(_plan(config, tokenizer), sort_keys=True).encode())


def _plan(config: TunedConfig, tokenizer: Tokenizer) -> dict[str, object]:
    options = config.data
    chosen = options.model_dump(mode="json", exclude={"files", "held_out", "folder", "packing"})
    files = {"files": files_digest(options.files), "held_out": files_digest(options.held_out)}
    texts = {name: text for name, text in tokenizer.texts.items() if name != "tokenizer.json"}
    return {"algorithm": ALGORITHM, "kind": config.kind, "tokenizer": tokenizer.hash, "beside": texts, **chosen, **files}


def prepare_examples(config: TunedConfig) -> None:
    """Have the examples of a recipe on this host, as tokens. Raises Mistake where there is something wrong with them."""
    options = config.data
    tokenizer = origin_of(config).tokenizer()
    if not options.files:
        raise Mistake("data.files: name the files to learn from, such as --data.files chats.jsonl")

    def read(split: str) -> Iterator[Item]:
        for path in options.files if split == "train" else options.held_out:
            yield from read_items(options, config.kind, path, tokenizer)

    write_examples(
        folder_of(config, tokenizer),
        read,
        tokenizer,
        plan=_plan(config, tokenizer),
        # A judged answer shares its row with another one to the same prompt (see Packed).
        length=options.length // 2 if config.kind == "judged" else options.length,
        bound=f"half of data.length = {options.length}" if config.kind == "judged" else f"data.length = {options.length}",
        too_long=options.too_long,
        held_out_share=None if options.held_out else options.held_out_share,
    )


def origin_of(config: TunedConfig) -> Origin:
    """The model that a recipe tunes. Raises Mistake where it names none."""
    if config.model.source is None:
        raise Mistake("model.source: name what to begin from: a run, a checkpoint, a Hugging Face folder or a name on the hub")
    return find_origin(config.model.source, "weights")


def open_examples(config: TunedConfig, ranks: int) -> Material:
    """What `prepare_examples` has left on this host, and the model. Raises Mistake where they do not fit."""
    plan = plan_batches(config, ranks)
    origin = origin_of(config)
    tokenizer = origin.tokenizer()
    shape = origin.shape(config.model, tokenizer.vocab_size)
    if config.kind == "ranked":
        if shape.family == "transformers":
            raise Mistake(f"{config.model.source}: transformers computes it, and gives it no head for rewards; import it first")
        shape = replace(shape, reward=True)
    prompts = [len(tokenizer.encode(prompt)) for prompt in config.sample.prompts]
    check_model(config, shape, plan, longest_prompt=max(prompts, default=0))
    check_weights(origin)
    folder = ExampleFolder.open(folder_of(config, tokenizer))
    about: dict[str, Any] = {"length": config.data.length, "fit": config.data.packing == "best-fit"}
    train = example_rows(folder, "train", **about, seed=config.train.seed)
    there = folder.manifest["splits"]
    held_out = example_rows(folder, "held_out", **about, shuffle=False) if there["held_out"]["examples"] else None
    if config.kind == "judged" and isinstance(train.packing, Packed) and 2 * train.packing.lonely > train.rows_per_epoch:
        raise Mistake(
            f"data.length = {config.data.length}: {train.packing.lonely} of {train.rows_per_epoch} rows hold one answer, and"
            f" kto compares those of a row; use a longer one, such as {4 * config.data.length}"
        )
    counts = folder.manifest["counts"]
    words = [f"; {counts[name]:,} {words}" for name, words in LEFT_OUT.items() if counts[name]]
    about_data = (
        f"{folder.path}: {there['train']['examples']:,} examples in {train.rows_per_epoch:,} rows an epoch,"
        f" {there['train']['scored']:,} of {there['train']['tokens']:,} tokens scored; {there['held_out']['examples']:,} held"
        f" out{''.join(words)}"
    )
    return Material(tokenizer, train, held_out, shape, plan, str(folder.path), about_data, origin)
