"""Tokenized corpora of other trainers, written from the published descriptions of their formats.

Those of Megatron-LM and llm.c are read by the plugins of examples/token_files/.
"""

import json
import struct
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow
import pytest

from lmforge.core.data.shards.folder import TokenFolder
from lmforge.core.data.tokenizer import Tokenizer
from lmforge.core.plugins import load_plugins
from lmforge.text.prepare.prepare import prepare
from lmforge.text.sources import token_files
from lmforge.text.sources.plugin_unit import PluginReaders
from lmforge.text.sources.records import ReadProgress
from lmforge.text.sources.token_files import find_token_files, open_token_source
from tests.conftest import Refusal
from tests.seeds import fresh_random

PLUGINS = Path(__file__).parents[2] / "examples" / "token_files"
EOS, BOS = 0, 1
Documents = list[list[int]]


@pytest.fixture
def tokenizer(tmp_path: Path, byte_tokenizer: Tokenizer) -> Path:
    """A vocabulary of 261 ids; 0 ends a text and 1 begins one."""
    folder = tmp_path / "tokenizer"
    byte_tokenizer.save(folder)
    config = {
        "eos_token": byte_tokenizer.id_to_token(EOS),
        "bos_token": byte_tokenizer.id_to_token(BOS),
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def some_documents(count: int = 40) -> Documents:
    chance = fresh_random()
    return [
        [chance.randrange(5, 261) for _ in range(chance.choice([1, 2, 3, 50]))]
        for _ in range(count)
    ]


# --- the formats ----------------------------------------------------------------------------------


def write_fms(path: Path, documents: Documents, name: str = "tokens") -> Path:
    """fms-fsdp: an Arrow IPC file, a record batch for each document, one column of uint32."""
    path = path / "part.arrow"
    path.parent.mkdir(exist_ok=True)
    schema = pyarrow.schema([pyarrow.field(name, pyarrow.uint32())])
    with pyarrow.OSFile(str(path), "wb") as sink, pyarrow.ipc.new_file(sink, schema) as writer:
        for document in documents:
            writer.write(
                pyarrow.record_batch([pyarrow.array([*document, EOS], pyarrow.uint32())], schema)
            )
    (path.parent / "meta").mkdir()
    (path.parent / "meta" / "combined_counts.csv").write_text(
        "dataset/filename,documents,tokens\n/part.arrow,1,1\n"
    )
    return path.parent


def write_megatron(path: Path, documents: Documents, code: int = 4, kind: str = "i") -> Path:
    """Megatron-LM: IDs in .bin; in .idx magic, version, dtype, counts, lengths, pointers and the
    first sequence of documents.

    Each document is stored in two sequences, as sentences are, where it has two tokens.
    """
    path.mkdir(exist_ok=True)
    sequences, firsts = [], [0]
    for document in documents:
        whole = [*document, EOS]
        middle = len(whole) // 2
        sequences += [piece for piece in (whole[:middle], whole[middle:]) if piece]
        firsts.append(len(sequences))
    content, pointers = b"", []
    for sequence in sequences:
        pointers.append(len(content))
        content += struct.pack(f"<{len(sequence)}{kind}", *sequence)
    (path / "text_document.bin").write_bytes(content)
    index = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, code, len(sequences), len(firsts))
    index += struct.pack(f"<{len(sequences)}i", *map(len, sequences))
    index += struct.pack(f"<{len(sequences)}q", *pointers) + struct.pack(
        f"<{len(firsts)}q", *firsts
    )
    (path / "text_document.idx").write_bytes(index)
    return path / "text_document.bin"


def write_nanogpt(path: Path, documents: Documents) -> Path:
    """nanoGPT: uint16 of all documents, each followed by the end-of-text id."""
    np.array([id for document in documents for id in (*document, EOS)], np.uint16).tofile(
        path / "train.bin"
    )
    return path / "train.bin"


def write_llmc(
    path: Path,
    documents: Documents,
    magic: int = 20240520,
    version: int = 1,
    dtype: type = np.uint16,
) -> Path:
    """llm.c: 256 int32 (magic, version, number of tokens), then the ids; each document follows an
    end-of-text id.
    """
    ids = np.array([id for document in documents for id in (EOS, *document)], dtype)
    header = np.zeros(256, np.int32)
    header[:3] = magic, version, len(ids)
    (path / "shard.bin").write_bytes(header.tobytes() + ids.tobytes())
    return path / "shard.bin"


def write_llmc_llama3(path: Path, documents: Documents) -> Path:
    """As llm.c writes Llama 3's tokens: uint32, each document after the beginning-of-text id."""
    shifted = [[BOS, *document] for document in documents]
    path = write_llmc(path, shifted, 20240801, 7, np.uint32)
    raw = path.read_bytes()
    ids = np.frombuffer(raw[1024:], np.uint32)
    header = np.frombuffer(raw[:1024], np.int32).copy()
    ids = ids[ids != EOS]
    header[2] = len(ids)
    path.write_bytes(header.tobytes() + ids.tobytes())
    return path


WRITERS = [write_fms, write_megatron, write_nanogpt, write_llmc, write_llmc_llama3]
NEEDED = {write_megatron: "megatron.py", write_llmc: "llmc.py", write_llmc_llama3: "llmc.py"}


def readers_of(write: object) -> PluginReaders:
    """The plugin that reads what is written so, loaded."""
    paths = tuple(str(PLUGINS / name) for writer, name in NEEDED.items() if writer is write)
    load_plugins(paths)
    return PluginReaders(paths)


@pytest.mark.parametrize("write", WRITERS)
def test_documents_are_imported_as_they_are_with_one_end_of_text_each(
    tmp_path: Path, tokenizer: Path, write: object
) -> None:
    documents = some_documents()
    source = write(tmp_path / "x" if write is write_fms else tmp_path, documents)  # type: ignore[operator]
    summary = prepare(
        str(source),
        tmp_path / "out",
        tokenizer=tokenizer,
        validation_ratio=0.1,
        readers=readers_of(write),
    )
    folder = TokenFolder.open(tmp_path / "out")
    stored = []
    for name in folder.splits:
        split = folder.split(name)
        edges = [0, *split.document_starts(0, split.num_tokens).tolist(), split.num_tokens]
        stored += [split.read(start, stop).tolist() for start, stop in pairwise(edges)]
    assert sorted(stored) == sorted([*document, EOS] for document in documents)
    assert sum(summary.text_bytes.values()) == sum(len(document) for document in documents)


@pytest.mark.parametrize("write", WRITERS)
def test_units_of_any_size_have_each_document_once_and_in_order(
    tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch, write: object
) -> None:
    documents = some_documents()
    source = write(tmp_path / "x" if write is write_fms else tmp_path, documents)  # type: ignore[operator]
    readers = readers_of(write)
    files = find_token_files(str(source), readers)
    opened = open_token_source(str(source), files, Tokenizer.open(tokenizer), readers=readers)
    for unit_bytes, chunk in ((1, 1), (7, 3), (100, 64), (10**9, 10**6)):
        monkeypatch.setattr(token_files, "UNIT_BYTES", unit_bytes)
        monkeypatch.setattr(token_files, "CHUNK_TOKENS", chunk)
        units = opened.units()
        assert [
            ids.tolist() for unit in units for ids in unit.documents(ReadProgress())
        ] == documents
        assert sum(unit.size for unit in units) == opened.size
        assert len(units) > 10 or unit_bytes > 7 or readers.plugins  # a plugin reads a whole file


@pytest.mark.parametrize(("code", "kind"), [(1, "B"), (3, "h"), (4, "i"), (5, "q"), (8, "H")])
def test_every_whole_number_type_of_megatron_is_read(
    tmp_path: Path, tokenizer: Path, code: int, kind: str
) -> None:
    documents = [[5, 6, 7], [255], [8] * 20]
    path = write_megatron(tmp_path, documents, code, kind)
    readers = readers_of(write_megatron)
    files = find_token_files(str(path.with_suffix(".idx")), readers)
    opened = open_token_source(str(path), files, Tokenizer.open(tokenizer), readers=readers)
    assert [
        ids.tolist() for unit in opened.units() for ids in unit.documents(ReadProgress())
    ] == documents


def test_rows_of_lists_are_documents_and_another_separator_may_divide_them(
    tmp_path: Path, tokenizer: Path
) -> None:
    table = pyarrow.table({"input_ids": [[5, 6, 99, 7], [], [8, 9]]})
    with (
        pyarrow.OSFile(str(tmp_path / "a.arrow"), "wb") as sink,
        pyarrow.ipc.new_file(sink, table.schema) as writer,
    ):
        writer.write_table(table)
    opened = open_token_source(
        str(tmp_path), find_token_files(str(tmp_path)), Tokenizer.open(tokenizer), separator_id=99
    )
    assert [ids.tolist() for unit in opened.units() for ids in unit.documents(ReadProgress())] == [
        [5, 6],
        [7],
        [8, 9],
    ]


def test_tokens_without_any_boundary_are_one_document_whose_end_is_for_validation(
    tmp_path: Path, tokenizer: Path
) -> None:
    ids = [5 + number % 200 for number in range(1000)]
    np.array(ids, np.uint16).tofile(tmp_path / "train.bin")
    prepare(
        str(tmp_path / "train.bin"), tmp_path / "out", tokenizer=tokenizer, validation_ratio=0.1
    )
    folder = TokenFolder.open(tmp_path / "out")
    train, validation = folder.split("train"), folder.split("validation")
    assert [*train.read(0, 900), *validation.read(0, 100)] == ids
    assert (train.num_tokens, validation.num_tokens) == (901, 101)


def test_equal_documents_of_tokens_are_kept_once(tmp_path: Path, tokenizer: Path) -> None:
    source = write_nanogpt(tmp_path, [[5, 6], [7], [5, 6], [5, 6, 7], [5, 6]])
    summary = prepare(
        str(source),
        tmp_path / "out",
        tokenizer=tokenizer,
        deduplicate="exact",
        validation_ratio=0.3,
    )
    assert sum(summary.documents.values()) == 3
    assert summary.removed_documents == {"duplicate": 2}


# --- bad input ------------------------------------------------------------------------------------


@pytest.mark.parametrize("write", WRITERS)
def test_an_id_beyond_the_vocabulary_is_named_with_its_file(
    tmp_path: Path, tokenizer: Path, refused: Refusal, write: object
) -> None:
    source = write(tmp_path / "x" if write is write_fms else tmp_path, [[5, 6], [7, 261]])  # type: ignore[operator]
    plugins = readers_of(write).plugins
    words = ["--plugins", *plugins] if plugins else []
    message = refused("prepare", source, tmp_path / "out", "--tokenizer", tokenizer, *words)
    assert message.startswith(str(find_token_files(str(source))[0]))
    assert (
        "is 261, beyond the vocabulary of 261: name the tokenizer that made these tokens" in message
    )


def test_tokens_without_a_tokenizer_and_files_that_are_not_what_they_seem_are_refused(
    tmp_path: Path, tokenizer: Path, refused: Refusal
) -> None:
    source, out = write_nanogpt(tmp_path, [[5]]), tmp_path / "out"
    message = refused("prepare", source, out)
    assert (
        message == f"{source}: token ids, and nothing says which tokenizer made them; name it with"
        " --tokenizer"
    )
    named = ("--tokenizer", tokenizer)
    assert (
        "near duplicates, decontamination, parse_special_tokens and skip_invalid need text"
        in refused("prepare", source, out, *named, "--deduplicate", "near")
    )
    assert "the vocabulary has ids up to 260" in refused(
        "prepare", source, out, *named, "--separator_id", 261
    )
    source.write_bytes(b"odd")
    assert "no tokens of nanoGPT" in refused("prepare", source, out, *named)
    folder = write_fms(tmp_path / "fms", [[5]], name="other")
    assert "no column tokens or input_ids: there are other" in refused(
        "prepare", folder, out, *named
    )
    (folder / "part.arrow").write_bytes(b"no Arrow file")
    assert "cannot be read as an Arrow file" in refused("prepare", folder, out, *named)
    (folder / "notes.txt").write_text("text")
    assert "holds both tokens (part.arrow) and text (notes.txt)" in refused(
        "prepare", folder, out, *named
    )


def test_files_of_megatron_and_llmc_are_not_taken_for_nanogpts_and_the_plugin_is_named(
    tmp_path: Path, tokenizer: Path, refused: Refusal
) -> None:
    named = (tmp_path / "out", "--tokenizer", tokenizer)
    pair = write_megatron(tmp_path / "pair", [[5, 6], [7]])
    expected = (
        f"{pair}: tokens of Megatron-LM, which a plugin reads: --plugins"
        " examples/token_files/megatron.py"
    )
    assert refused("prepare", pair, *named) == expected
    shard = write_llmc(tmp_path, [[5, 6]])
    assert (
        refused("prepare", shard, *named)
        == f"{shard}: tokens of llm.c, which a plugin reads: --plugins examples/token_files/llmc.py"
    )


def test_a_broken_file_of_llmc_is_named(tmp_path: Path, tokenizer: Path, refused: Refusal) -> None:
    named = (tmp_path / "out", "--tokenizer", tokenizer, "--plugins", PLUGINS / "llmc.py")
    shard = write_llmc(tmp_path, [[5, 6]])
    shard.write_bytes(shard.read_bytes()[:-1])
    assert "its header says 3 tokens: truncated" in refused("prepare", shard, *named)
    write_llmc(tmp_path, [[5, 6]], version=9)
    assert "a file of llm.c of version 9" in refused("prepare", shard, *named)
    assert "not a file of llm.c; leave this plugin out" in refused(
        "prepare", write_nanogpt(tmp_path, [[5]]), *named
    )


def test_a_broken_pair_of_megatron_is_named(
    tmp_path: Path, tokenizer: Path, refused: Refusal
) -> None:
    named = (tmp_path / "out", "--tokenizer", tokenizer, "--plugins", PLUGINS / "megatron.py")
    pair = write_megatron(tmp_path / "pair", [[5, 6], [7]])
    pair.write_bytes(pair.read_bytes()[:-1])
    assert f"{pair}: truncated: its index has more tokens" in refused("prepare", pair, *named)
    pair.with_suffix(".idx").write_bytes(b"MMIDIDX\x00\x00" + bytes(40))
    assert "not a Megatron-LM index of version 1" in refused("prepare", pair, *named)
    pair.with_suffix(".idx").unlink()
    assert "no such file: tokens of Megatron-LM are a pair" in refused("prepare", pair, *named)


TOKENS_OF_MINE = """
import numpy as np
import lmforge

@lmforge.register("document_source", "mine", gives="tokens")
def read(path, options):
    yield np.array([5, 6])
    {then}
"""


@pytest.mark.parametrize(
    ("then", "said"),
    [
        ("yield [7]", ", document 1: the plugin gave no array of whole numbers"),
        ("yield np.array([0.5])", ", document 1: the plugin gave no array of whole numbers"),
        ("raise KeyError('x')", ", after 1 documents: document source mine raised KeyError"),
    ],
)
def test_what_a_plugin_of_tokens_gives_is_checked(
    tmp_path: Path, tokenizer: Path, refused: Refusal, then: str, said: str
) -> None:
    (tmp_path / "plugin.py").write_text(TOKENS_OF_MINE.format(then=then))
    (tmp_path / "a.mine").write_text("")
    named = ("--tokenizer", tokenizer, "--plugins", tmp_path / "plugin.py")
    assert refused("prepare", tmp_path / "a.mine", tmp_path / "out", *named).startswith(
        f"{tmp_path / 'a.mine'}{said}"
    )


def test_a_binary_file_in_a_folder_of_text_is_left_out_as_before(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.txt").write_text("text")
    (tmp_path / "in" / "weights.bin").write_bytes(b"1234")
    assert prepare(str(tmp_path / "in"), tmp_path / "out", vocab_size=300).left_out == (
        (".bin", 1),
    )


@pytest.mark.parametrize(
    "column", [[[5, 6], None], [[5, None]], [5, None]], ids=["row", "id in a row", "id"]
)
def test_null_rows_and_ids_of_arrow_files_are_refused(
    tmp_path: Path, tokenizer: Path, refused: Refusal, column: list[object]
) -> None:
    table = pyarrow.table({"input_ids": column})
    with (
        pyarrow.OSFile(str(tmp_path / "a.arrow"), "wb") as sink,
        pyarrow.ipc.new_file(sink, table.schema) as writer,
    ):
        writer.write_table(table)
    said = refused("prepare", tmp_path / "a.arrow", tmp_path / "out", "--tokenizer", tokenizer)
    assert said == f"{tmp_path / 'a.arrow'}: record batch 0 has rows or ids that are null"
