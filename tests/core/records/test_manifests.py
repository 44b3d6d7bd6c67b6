"""Manifests on users' disks: what an earlier lmforge wrote is read, and the same content is written
with the same bytes.
"""

import json
from pathlib import Path

import numpy as np
import pytest

from lmforge.cli import run
from lmforge.core.data.best_fit_index import BestFitIndex
from lmforge.core.data.packing import TokenizedExample
from lmforge.core.data.shards.folder import TokenFolder
from lmforge.core.data.tokenizer import Tokenizer
from lmforge.core.records.manifests import CorruptCheckpoint, Manifest, check_sizes, read_manifest
from lmforge.core.records.runs import MANIFEST
from lmforge.text.chat.examples import ExampleFolder, write_examples
from lmforge.text.chat.spill_buffer import ExampleGroup

# As format 3 of checkpoints and format 2 of token folders were first written.
CHECKPOINT = """\
{
 "step": 2,
 "consumed_sequences": 12,
 "global_batch_size": 4,
 "plan_hash": "5f",
 "hf_config": {
  "model_type": "llama",
  "hidden_size": 8
 },
 "recipe": {
  "run": {
   "stage": "pretrain"
  },
  "data": {
   "sequence_length": 16,
   "folder": "tokens"
  }
 },
 "tokenizer_hash": "e1",
 "rng": "AAA=",
 "written_by": {
  "lmforge": "0.1.0",
  "ranks": 2,
  "engine": "fsdp2",
  "dtype": "bf16",
  "data": "tokens"
 },
 "files": {
  "__0_0.distcp": {
   "bytes": 5,
   "xxh3": [
    "5b2d4b3d4e1c1d0a"
   ]
  }
 },
 "data_plan": {
  "version": 1,
  "seed": 0,
  "unit": 4,
  "phases": [
   {
    "samples": 12,
    "sequence_length": 16,
    "proportions": {
     "d5": "1/2"
    },
    "packing": [
     "concat",
     2
    ]
   }
  ],
  "names": {
   "d5": "web"
  }
 },
 "contents": [
  "model",
  "optimizer"
 ],
 "metrics": {
  "loss": 2.5,
  "val/loss": null
 },
 "kept": true,
 "bad_step_detector": {
  "skipped_steps": 1,
  "consecutive_bad_steps": 0,
  "rollbacks": 0,
  "losses": [
   2.5,
   null
  ]
 },
 "format": 3,
 "xxh3": "cb27d588a160cd3c"
}
"""
TOKENS = {
    "manifest.json": (
        """\
{
 "format": 2,
 "source": "corpus.jsonl",
 "plan": {
  "files": "068b3121b4c6bda915f01ce1859ae234",
  "text_field": "text",
  "tokenizer": "e1a50b215455168e6226a141d783b17f",
  "vocab_size": null,
  "validation_ratio": 0.3,
  "shard_tokens": 100000000,
  "seed": 0,
  "hook": null,
  "deduplicate": null,
  "decontaminate": null,
  "parse_special_tokens": null,
  "skip_invalid": null
 },
 "tokenizer": "e1a50b215455168e6226a141d783b17f",
 "vocab_size": 261,
 "dtype": "uint16",
 "skipped_files": 0,
 "empty_documents": 0,
 "text_bytes": {
  "train": 25,
  "validation": 7
 },
 "splits": {
  "train": [
   {
    "name": "train-00000",
    "tokens": 27,
    "documents": 2,
    "xxh3": "a67db664c9a682e085c77692ba9bd1f3"
   }
  ],
  "validation": [
   {
    "name": "validation-00000",
    "tokens": 8,
    "documents": 1,
    "xxh3": "5c384b9b20846ebd8263f430fa3ce134"
   }
  ]
 },
 "tokenizer_files": {
  "tokenizer_config.json": "6e2de62b75dd28de08d4edeeac4c7a3d"
 },
 "removed_documents": {},
 "special_text_documents": 0,
 "best_fit": {
  "64": "337131bbb6aa741f78abd976a663f95b"
 }
}
"""
    ),
    "train-00000.json": (
        '{"format": 2, "bytes": 54, "tokens": 27, "documents": 2, "dtype": "uint16", "tokenizer":'
        ' "e1a50b215455168e6226a141d783b17f", "block_bytes": 65536, "checksum_block_bytes": 4096,'
        ' "checksum_blocks": ["7cff70a115ef5771"], "document_blocks": ["eb2faf60edbccb87"],'
        ' "document_block_firsts": [9]}'
    ),
    "best-fit-64.json": (
        '{"version": 1, "sequence_length": 64, "tokens": "d54020567cfe752826b86d07a344bfb0",'
        ' "shards": [{"name": "train-00000", "tokens": 27, "sequences": 1, "spans": 2, "xxh3":'
        ' "f9947251697d3a66"}]}'
    ),
}
EXAMPLES = """\
{
 "plan": {
  "kind": "conversations",
  "tokenizer": "e1a50b215455168e6226a141d783b17f",
  "files": [
   "0a"
  ]
 },
 "sequence_length": 8,
 "vocab_size": 261,
 "counts": {
  "overlong": 0,
  "truncated": 0,
  "nothing_to_learn": 0
 },
 "splits": {
  "train": {
   "examples": 2,
   "group": 1,
   "tokens": 6,
   "scored": 2,
   "xxh3": {
    "tokens": "ee18bb65cba8494c",
    "scored": "d9bb261254a7a8fd",
    "starts": "49f2159a075e3fa1"
   }
  },
  "validation": {
   "examples": 1,
   "group": 1,
   "tokens": 3,
   "scored": 1,
   "xxh3": {
    "tokens": "347e66242cd20305",
    "scored": "6f15e63fb37c575a",
    "starts": "a9c537f75b27a974"
   }
  }
 }
}
"""


def test_the_manifest_of_a_checkpoint_is_read_and_written_again_with_the_same_bytes(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "step-00000002"
    folder.mkdir()
    (folder / MANIFEST).write_text(CHECKPOINT)
    (folder / "__0_0.distcp").write_bytes(b"12345")
    manifest = read_manifest(folder)
    fields = json.loads(CHECKPOINT)
    assert json.loads(manifest.json_text) == fields
    del fields["xxh3"]
    assert Manifest(**fields).json_text == CHECKPOINT
    assert (manifest.step, manifest.batch_offset, manifest.metrics) == (
        2,
        1,
        {"loss": 2.5, "val/loss": None},
    )
    check_sizes(folder, manifest)
    (folder / "__0_0.distcp").write_bytes(b"1234")
    with pytest.raises(CorruptCheckpoint, match=r"^__0_0.distcp has 4 bytes instead of 5$"):
        check_sizes(folder, manifest)


@pytest.mark.parametrize("field", ["data_plan", "contents", "metrics", "kept", "bad_step_detector"])
def test_a_manifest_without_what_was_added_later_has_its_default(
    tmp_path: Path, field: str
) -> None:
    fields = json.loads(CHECKPOINT)
    del fields["xxh3"], fields[field]
    (tmp_path / MANIFEST).write_text(Manifest(**fields).json_text)
    assert getattr(read_manifest(tmp_path), field) in (
        {},
        ["model", "optimizer"],
        False,
        EMPTY_DETECTOR,
    )


EMPTY_DETECTOR = {"skipped_steps": 0, "consecutive_bad_steps": 0, "rollbacks": 0, "losses": []}


def test_the_manifests_of_a_token_folder_are_read_and_written_with_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    texts = ("one line", "two lines of text", "a third")
    (tmp_path / "corpus.jsonl").write_text(
        "".join(json.dumps({"text": text}) + "\n" for text in texts)
    )
    options = [
        "--tokenizer",
        "bytes",
        "--workers",
        "1",
        "--best_fit_length",
        "64",
        "--validation_ratio",
        "0.3",
    ]
    assert run(["prepare", "corpus.jsonl", "tokens", *options]) == 0
    written = {name: (tmp_path / "tokens" / name).read_text() for name in TOKENS}
    # Has its time.
    of_corpus, before = (
        json.loads(each["manifest.json"])["plan"]["files"] for each in (written, TOKENS)
    )
    assert {name: text.replace(of_corpus, before) for name, text in written.items()} == TOKENS
    for name, text in TOKENS.items():
        (tmp_path / "tokens" / name).write_text(text)
    folder = TokenFolder.open(tmp_path / "tokens")
    assert folder.split("train").read(0, 27)[8] == folder.tokenizer.eos_token_id
    assert BestFitIndex.open(folder, 64).spans(0) == [(9, 17), (0, 8)]


def test_the_manifest_of_a_folder_of_examples_is_read_and_written_with_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "corpus.txt").write_text("text\n\ntext")
    assert run(["prepare", "corpus.txt", "tokens", "--tokenizer", "bytes", "--workers", "1"]) == 0
    tokenizer = Tokenizer.open(tmp_path / "tokens" / "tokenizer")
    scored = np.array([False, False, True])
    groups = [
        ExampleGroup((TokenizedExample(np.array([n, 5, 6], np.int32), scored),)) for n in (1, 2, 3)
    ]
    write_examples(
        tmp_path / "examples",
        {"train": groups, "validation": []}.__getitem__,
        tokenizer,
        plan={"kind": "conversations", "tokenizer": tokenizer.hash, "files": ["0a"]},
        sequence_length=8,
        limit_description="8 tokens",
        overlong="drop",
        validation_ratio=0.4,
    )
    assert (tmp_path / "examples" / "examples.json").read_text() == EXAMPLES
    folder = ExampleFolder.open(tmp_path / "examples")
    assert (folder.num_examples("train"), folder.num_examples("validation")) == (2, 1)
    assert len(folder.split("train")) == 2
    assert folder.manifest["plan"]["files"] == ["0a"]  # type: ignore[typeddict-item]
