"""Best-fit packing against an independent oracle, and the messages about a missing or damaged
index.
"""

import json
import os
import re
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lmforge.cli import run
from lmforge.core.data.batch import Batch
from lmforge.core.data.best_fit_index import (
    BestFitIndex,
    IndexReader,
    manifest_name,
    pack_documents,
    write_index,
)
from lmforge.core.data.dataset import TokenDataset
from lmforge.core.data.loader import BatchLoader
from lmforge.core.data.mixture import MixedDataset
from lmforge.core.data.shards.folder import TokenFolder
from lmforge.core.data.shards.storage import LocalStorage
from lmforge.core.errors import UserError
from lmforge.core.options.load import read_config
from lmforge.core.records.runs import Run
from lmforge.core.stages.training_data import TokenSources
from lmforge.text.prepare.dist_context import SingleProcessContext
from lmforge.text.prepare.pack import pack_folder
from lmforge.text.prepare.prepare import prepare
from tests.conftest import Command, Refusal
from tests.core.data.file_server import file_server
from tests.core.data.test_dataset import (
    as_lists,
    corpus_digest,
    read_corpus,
    shards_of_documents,
    slow_index,
)
from tests.core.data.test_shards import flip_bit
from tests.seeds import fresh_random, fresh_seed
from tests.text.test_prepare import content
from tests.text.test_prepare_ranks import prepare_on_ranks

Writer = Callable[..., TokenFolder]
Sequences = list[dict[str, list[int]]]


def packed(folder: Path, length: int) -> TokenFolder:
    pack_folder(
        str(folder), length, workers=1, progress=lambda *step: None, dist_ctx=SingleProcessContext()
    )
    return TokenFolder.open(folder)


def dataset_of(folder: TokenFolder, length: int, **options: Any) -> TokenDataset:
    return TokenDataset(folder, sequence_length=length, packing="best-fit", **options)


# --- the oracle -----------------------------------------------------------------------------------


def slow_bins(sizes: list[int], capacity: int) -> list[list[int]]:
    """Best fit decreasing as a text book has it; of bins with equal space the one that was filled
    last.
    """
    bins: list[tuple[int, int, list[int]]] = []  # (space, when it was filled last, items)
    longest_first = sorted(range(len(sizes)), key=lambda item: (-sizes[item], item))
    for now, item in enumerate(longest_first):
        fitting = [number for number, (space, _, _) in enumerate(bins) if space >= sizes[item]]
        if fitting:
            number = min(fitting, key=lambda number: (bins[number][0], -bins[number][1]))
            space, _, items = bins[number]
            bins[number] = space - sizes[item], now, [*items, item]
        else:
            bins.append((capacity - sizes[item], now, [item]))
    return [items for _, _, items in bins]


def slow_sequences(
    shards: list[list[int]], tokens: list[int], length: int, group_sequences: int
) -> Sequences:
    """All sequences of shards whose documents have these lengths."""
    sequences: Sequences = []
    base = 0
    for documents in shards:
        size, begin = sum(documents), 0
        groups = max(1, round(size / (group_sequences * length)))
        of_groups: list[list[list[int]]] = [[] for _ in range(groups)]
        for document in documents:
            group = max(number for number in range(groups) if number * size // groups <= begin)
            ids = tokens[base + begin : base + begin + document]
            of_groups[group] += [ids[at : at + length + 1] for at in range(0, document - 1, length)]
            begin += document
        for spans in of_groups:
            for members in slow_bins([len(span) - 1 for span in spans], length):
                sequences.append(slow_sequence([spans[member] for member in members], length))
        base += size
    return sequences


def slow_sequence(spans: list[list[int]], length: int) -> dict[str, list[int]]:
    sequence: dict[str, list[int]] = {
        "tokens": [],
        "labels": [],
        "positions": [],
        "document_ids": [],
    }
    for number, span in enumerate(spans):
        for position, (token, label) in enumerate(pairwise(span)):
            for name, value in zip(sequence, (token, label, position, number), strict=True):
                sequence[name].append(value)
    for name, value in zip(sequence, (0, -100, 0, -1), strict=True):
        sequence[name] += [value] * (length - len(sequence[name]))
    return sequence


# --- what sequences hold --------------------------------------------------------------------------


@settings(
    max_examples=30,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    shards=shards_of_documents,
    length=st.integers(1, 70),
    group_sequences=st.integers(1, 20),
    seed=st.integers(0, 2**63),
    sample=st.integers(0, 10_000),
)
def test_any_sample_equals_the_slow_oracle(
    tmp_path: Path,
    folder_of: Writer,
    shards: list[list[int]],
    length: int,
    group_sequences: int,
    seed: int,
    sample: int,
) -> None:
    path = Path(tempfile.mkdtemp(dir=tmp_path)) / "folder"
    folder_of(path, shards, seed=sample)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lmforge.core.data.best_fit_index.GROUP_SEQUENCES", group_sequences)
        dataset = dataset_of(packed(path, length), length, seed=seed)
    tokens, owners = read_corpus(path)
    expected = slow_sequences(shards, tokens, length, group_sequences)
    count = dataset.sequences_per_epoch
    assert count == len(expected)
    for n, sequence in zip(
        range(sample, sample + 5), dataset.sequences(sample, sample + 5), strict=True
    ):
        assert as_lists(sequence) == expected[slow_index(n, count, seed, corpus_digest(path))]

    # An epoch scores every transition within a document once, and reads no other.
    epoch = dataset.sequences(3 * count, 4 * count)
    scored = Counter(
        (int(a), int(b))
        for each in epoch
        for a, b in zip(each.tokens, each.labels, strict=True)
        if b != -100
    )
    pairs = zip(tokens, tokens[1:], owners, owners[1:], strict=False)
    assert scored == Counter((a, b) for a, b, mine, its in pairs if mine == its)
    # Every token but a document's last is an input once.
    inputs = Counter(int(token) for each in epoch for token in each.tokens[each.document_ids >= 0])
    assert inputs == Counter(
        a for a, mine, its in zip(tokens, owners, [*owners[1:], -1], strict=True) if mine == its
    )


@pytest.mark.parametrize(
    "shards",
    [
        [[2]],
        [[8]],
        [[9]],  # a sequence exactly
        [[10]],
        [[1, 1, 9, 1]],
        [[17, 8, 1], [1], [2, 2, 2]],
        [[1], [9]],
        [[9] * 50],
        [[1_000_003, 5], [3, 3]],
    ],
)
def test_edge_lengths_equal_the_oracle(
    tmp_path: Path, folder_of: Writer, shards: list[list[int]]
) -> None:
    folder_of(tmp_path / "folder", shards)
    dataset = dataset_of(packed(tmp_path / "folder", 8), 8, shuffle=False)
    tokens, _ = read_corpus(tmp_path / "folder")
    if tokens[1_000_000:]:
        # The second document is in another group than the first.
        assert dataset.sequences_per_epoch == 125_003
        assert as_lists(dataset.sequence(77)) == slow_sequence([tokens[8 * 77 : 8 * 78 + 1]], 8)
        return
    expected = slow_sequences(shards, tokens, 8, 4096)
    assert [
        as_lists(each) for each in dataset.sequences(0, dataset.sequences_per_epoch)
    ] == expected
    assert as_lists(dataset.sequence(len(expected))) == slow_sequence([], 8)


@pytest.mark.parametrize(
    ("median", "sigma"), [(600, 1.0), (150, 0.8), (800, 1.4)], ids=["web", "short", "code"]
)
@pytest.mark.parametrize("length", [1024, 2048, 4096])
def test_hardly_a_place_is_empty_and_no_token_is_lost_on_lengths_of_real_documents(
    median: int, sigma: float, length: int
) -> None:
    # Of two tokens at least: a document of one has no span (test_edge_lengths_equal_the_oracle).
    lengths = (
        np.random.default_rng(fresh_seed())
        .lognormal(np.log(median), sigma, 100_000)
        .astype(np.int64)
        + 2
    )
    ends = np.cumsum(lengths[np.cumsum(lengths) < 20_000_000])
    firsts, spans = pack_documents(ends, length)
    sizes = np.add.reduceat(spans[:, 1], firsts[:-1])
    assert sizes.max() <= length
    assert sizes.sum() / (len(sizes) * length) >= 0.999
    starts, stops = np.sort(spans[:, 0]), np.sort(spans.sum(1))
    # Spans follow each other but for the last token of each document.
    between = np.isin(stops + 1, ends)
    assert np.array_equal(starts[1:], (stops + between)[:-1])
    assert between.sum() == len(ends)


def test_a_shard_of_more_than_four_billion_tokens_is_indexed(tmp_path: Path) -> None:
    length, ends = 2**26, np.array([10, 2**32 + 5, 2**32 + 105])
    entry = write_index(tmp_path, "train-00000", ends, length)
    folder: Any = SimpleNamespace(storage=LocalStorage(tmp_path), path=tmp_path)
    reader = IndexReader(folder, entry, length)
    spans = sorted(span for sequence in range(entry.sequences) for span in reader.spans(sequence))
    whole = [(10 + n * length, length) for n in range(63)]
    last = 10 + 63 * length
    assert spans == [(0, 9), *whole, (last, 2**32 + 4 - last), (2**32 + 5, 99)]
    assert (
        os.path.getsize(tmp_path / "train-00000.best-fit-67108864")
        == entry.body_bytes + entry.checksum_bytes
    )


def test_another_number_of_ranks_or_prefetch_changes_no_batch(
    tmp_path: Path, folder_of: Writer
) -> None:
    folder_of(tmp_path / "folder", [[30, 2, 50, 7], [40, 9]])
    dataset = dataset_of(packed(tmp_path / "folder", 16), 16, seed=fresh_seed(), window=1)
    whole = Batch.from_sequences(dataset.sequences(24, 36))
    for ranks in (1, 2, 3, 6):
        parts = []
        for rank in range(ranks):
            sizes = {
                "global_batch_size": 12,
                "micro_batch_size": 2,
                "data_parallel_rank": rank,
                "data_parallel_size": ranks,
            }
            with BatchLoader(dataset, **sizes) as loader:
                parts += loader.batches(2)
        for name, tensor in whole.tensors.items():
            assert (Batch.cat(parts).tensors[name] == tensor).all()


# --- preparing it ---------------------------------------------------------------------------------


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    rng = fresh_random()
    texts = [
        " ".join(rng.choices(["one", "two", "three"], k=rng.randint(1, 80))) + f" {n}"
        for n in range(200)
    ]
    (tmp_path / "corpus.jsonl").write_text(
        "".join(json.dumps({"text": text}) + "\n" for text in texts)
    )
    return tmp_path / "corpus.jsonl"


def test_packed_at_once_later_again_or_by_ranks_a_folder_has_the_same_bytes(
    tmp_path: Path, corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options: dict[str, Any] = {"tokenizer": "bytes", "shard_tokens": 5000}
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    plain, at_once, later, ranks = (
        tmp_path / name for name in ("plain", "at_once", "later", "ranks")
    )
    prepare(str(corpus), plain, workers=1, **options)
    summary = prepare(str(corpus), at_once, workers=1, best_fit_length=64, **options)
    assert re.fullmatch(r"[0-9,]+ sequences of 64 tokens, 9\d\.\d\d% filled", summary.best_fit[64])
    shutil.copytree(plain, later)
    shutil.copytree(plain, tmp_path / "unpacked")
    assert run(["prepare", "--pack", str(later), "--best_fit_length", "64"]) == 0
    assert capsys.readouterr().out == f"{later}: packed for best-fit, {summary.best_fit[64]}\n"
    assert content(later) == content(at_once)
    # The command that prepared a folder packs it too, and nothing more.
    assert run(["prepare", str(corpus), str(plain), *words, "--best_fit_length", "64"]) == 0
    out = capsys.readouterr().out
    assert "prepared already, nothing to do" in out
    assert f"best-fit  {summary.best_fit[64]}\n" in out
    assert content(plain) == content(at_once)
    shutil.copytree(tmp_path / "unpacked", ranks)
    ended = prepare_on_ranks(tmp_path, 2, "--pack", ranks, "--best_fit_length", 64)
    assert ended.stdout.count("packed for best-fit, ") == 1, ended.stderr
    assert content(ranks) == content(at_once)
    # A second length is added to the first; a changed index is written again.
    flip_bit(later / "train-00000.best-fit-64", 3)
    packed(later, 64)
    packed(later, 32)
    assert sorted(TokenFolder.open(later).manifest.best_fit) == ["32", "64"]
    assert [file for file in content(later) if "best-fit-64" in file] == [
        file for file in content(at_once) if "best-fit-64" in file
    ]
    assert run(["show", str(later)]) == 0
    assert re.search(
        r"best-fit   [0-9,]+ sequences of 32 tokens, 9\d\.\d\d% filled\nbest-fit .* 64 ",
        capsys.readouterr().out,
    )
    # What replaces a preparation leaves nothing of its packing.
    prepare(str(corpus), later, workers=1, tokenizer="characters", overwrite=True)
    assert not list(later.glob("*best-fit*"))


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--pack", "FOLDER"], "--pack: needs the sequence length, such as --best_fit_length 2048"),
        (["--pack", "FOLDER", "--best_fit_length", 0], "--best_fit_length: "),
        (
            ["--pack", "FOLDER", "--best_fit_length", 8, "--overwrite"],
            "--pack: reads no source, and writes to the folder that it names; leave out overwrite",
        ),
        (
            ["--verify", "FOLDER", "--best_fit_length", 8],
            "--verify: reads a folder and writes none; leave out best_fit_length",
        ),
        (
            ["--pack", "FOLDER/tokenizer", "--best_fit_length", 8],
            "FOLDER/tokenizer: no token folder (manifest.json is",
        ),
        (
            ["--pack", "memory://a/b", "--best_fit_length", 8],
            "memory://a/b: packing writes files: pack the folder that was",
        ),
    ],
)
def test_what_cannot_be_packed_is_refused(
    tmp_path: Path, folder_of: Writer, refused: Refusal, words: list[Any], complaint: str
) -> None:
    folder_of(tmp_path / "folder", [[20, 30]])
    before, path = content(tmp_path / "folder"), str(tmp_path / "folder")
    message = refused("prepare", *(str(word).replace("FOLDER", path) for word in words))
    assert complaint.replace("FOLDER", path) in message
    assert content(tmp_path / "folder") == before


# --- reading it -----------------------------------------------------------------------------------


def test_a_folder_that_is_not_packed_for_the_length_says_which_command_packs_it(
    tmp_path: Path, folder_of: Writer, refused: Refusal
) -> None:
    path = tmp_path / "folder"
    folder_of(path, [[200, 300]])
    words = [
        "pretrain",
        "--data.folder",
        path,
        "--data.packing",
        "best-fit",
        "--data.sequence_length",
        64,
    ]
    words += ["--run.folder", tmp_path, "--run.name", "a"]
    command = f"`lmforge prepare --pack {path} --best_fit_length 64` packs it"
    assert (
        refused(*words) == f"{path}: not packed for best-fit with sequences of 64 tokens: {command}"
    )
    packed(path, 32)
    assert (
        refused(*words)
        == f"{path}: not packed for best-fit with sequences of 64 tokens (it is for 32): {command}"
    )
    assert not (tmp_path / "a" / "recipe.toml").exists()
    packed(path, 64)
    (tmp_path / "r.toml").write_text(
        f'[data]\nfolder = "{path}"\npacking = "best-fit"\nsequence_length ='
        " 64\n[[data.phases]]\nsteps = 3\n[[data.phases]]\nsequence_length = 32\n"
    )
    reason = (
        "its sequence_length = 32 is not data.sequence_length = 64, the only one under data.packing"
        " = best-fit"
    )
    message = refused("pretrain", tmp_path / "r.toml", "--run.folder", tmp_path)
    assert (
        message == f"{tmp_path}/r.toml: data.phases: phase 2: {reason}; leave it out, or use concat"
    )


def test_a_folder_without_a_token_to_predict_is_refused(tmp_path: Path, folder_of: Writer) -> None:
    folder_of(tmp_path / "folder", [[1, 1], [1]])
    with pytest.raises(
        UserError, match="folder: train: no token to predict from another; prepare more text"
    ):
        dataset_of(packed(tmp_path / "folder", 8), 8)


@pytest.fixture
def path(tmp_path: Path, folder_of: Writer) -> Path:
    """Three shards of several blocks, packed for 64."""
    rng = fresh_random()
    path = tmp_path / "served" / "folder"
    folder_of(path, [[rng.randint(1, 200) for _ in range(1500)] for _ in range(3)])
    packed(path, 64)
    return path


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("at", [0, 70_000, -8], ids=["first spans", "spans", "checksums"])
def test_a_damaged_index_is_named_when_read_and_when_verified_and_packing_again_mends_it(
    path: Path, capsys: pytest.CaptureFixture[str], at: int
) -> None:
    before = content(path)
    file = path / "train-00001.best-fit-64"
    flip_bit(file, at % file.stat().st_size)
    hint = f"`lmforge prepare --pack {path} --best_fit_length 64` writes it again"
    dataset = dataset_of(TokenFolder.open(path), 64, shuffle=False)
    with pytest.raises(
        UserError,
        match=rf"^sample \d+: {file}: the block at byte \d+ does not match its checksum: ",
    ) as raised:
        dataset.sequences(0, dataset.sequences_per_epoch)
    assert str(raised.value).endswith(hint)
    assert run(["prepare", "--verify", str(path)]) == 1
    problem, summary = capsys.readouterr().out.splitlines()
    assert problem.startswith(f"{file}: ")
    assert problem.endswith(f": {hint}")
    assert summary.startswith(
        f"{path}: 3 shards, every block as it was written, 1 files of best-fit packing damaged, in "
    )
    packed(path, 64)
    assert content(path) == before
    assert run(["prepare", "--verify", str(path)]) == 0


@pytest.mark.usefixtures("impatient")
def test_missing_truncated_swapped_and_foreign_files_of_the_index_are_named_on_opening(
    path: Path,
) -> None:
    def problem() -> str:
        with pytest.raises(UserError) as raised:
            dataset_of(TokenFolder.open(path), 64)
        return str(raised.value)

    hint = f"`lmforge prepare --pack {path} --best_fit_length 64` writes it again"
    file, manifest = path / "train-00002.best-fit-64", path / manifest_name(64)
    size, text = file.stat().st_size, manifest.read_text()
    os.truncate(file, size - 1)
    assert problem() == f"{file}: truncated: {size - 1} bytes of {size}: {hint}"
    file.unlink()
    assert problem() == f"{file}: missing: {hint}"
    packed(path, 64)
    manifest.unlink()
    assert problem() == f"{manifest}: missing: {hint}"
    manifest.write_text(text.replace('"spans": ', '"spans": 1'))
    assert problem() == f"{manifest}: is not the one written for {path}: changed or swapped: {hint}"


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("damaged", ["best-fit-64.json", "train-00000.best-fit-64"])
def test_a_damaged_index_is_described_and_preparing_with_its_length_again_mends_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], damaged: str
) -> None:
    (tmp_path / "corpus.txt").write_text("a line of text\n" * 300)
    folder, command = (
        tmp_path / "folder",
        ["prepare", str(tmp_path / "corpus.txt"), str(tmp_path / "folder")],
    )
    command += ["--tokenizer", "bytes", "--workers", "1", "--best_fit_length"]
    assert run([*command, "64"]) == 0
    before = content(folder)
    os.truncate(folder / damaged, 9)
    capsys.readouterr()
    hint = f"`lmforge prepare --pack {folder} --best_fit_length 64` writes it again"
    for words in (["show", str(folder)], command[:-1], [*command, "32"]):
        assert run(words) == 0
        [line] = [line for line in capsys.readouterr().out.splitlines() if " damaged: " in line]
        assert re.match(rf"best-fit +damaged: {folder / damaged}: ", line)
        assert line.endswith(hint)
    assert run([*command, "64"]) == 0
    assert " damaged: " not in capsys.readouterr().out
    # Of two lengths now.
    assert before.items() - content(folder).items() == {("manifest.json", before["manifest.json"])}
    assert TokenFolder.open(folder).manifest.best_fit.keys() == {"32", "64"}


@pytest.mark.usefixtures("impatient")
def test_any_value_in_the_manifest_of_an_index_is_refused_in_one_line(path: Path) -> None:
    """As someone would write it who knows the checksum that the folder has of it."""
    manifest, of_folder = path / manifest_name(64), json.loads((path / "manifest.json").read_text())
    table = json.loads(manifest.read_text())
    values = [None, True, "x", -1, 0, 1.5, 2**63, 10**30, [], {}, ["x"], {"x": 1}]

    def use(where: dict[str, Any], name: str, value: Any) -> None:
        before, where[name] = where[name], value
        text = json.dumps(table)
        manifest.write_text(text)
        of_folder["best_fit"]["64"] = xxhash.xxh3_128_hexdigest(text.encode())
        (path / "manifest.json").write_text(json.dumps(of_folder))
        with pytest.raises(UserError) as raised:
            dataset_of(TokenFolder.open(path), 64, shuffle=False).sequences(0, 3)
        message = str(raised.value)
        assert "\n" not in message
        assert len(message) < len(str(path)) * 2 + 300, message
        where[name] = before

    for name, before in list(table.items()):
        for value in values:
            if value != before:
                use(table, name, value)
    for name, before in list(table["shards"][0].items()):
        near = [before - 1, before + 1] if isinstance(before, int) else [before[::-1]]
        for value in [*values, *near]:
            use(table["shards"][0], name, value)


@pytest.mark.slow
def test_samples_of_an_address_are_those_of_the_local_folder(path: Path, tmp_path: Path) -> None:
    local = dataset_of(TokenFolder.open(path), 64)
    with file_server(path.parent) as server:
        folder = TokenFolder.open(f"{server.address}/folder", cache_folder=tmp_path / "cache")
        remote = dataset_of(folder, 64)
        assert remote.plan_hash == local.plan_hash
        server.faults = ["error", "truncated", "none", "cut", "short", "none"]
        for a, b in zip(remote.sequences(5, 200), local.sequences(5, 200), strict=True):
            assert as_lists(a) == as_lists(b)
        with pytest.raises(
            UserError,
            match=f"^{server.address}/folder: not packed for best-fit with sequences of 32 tokens",
        ):
            dataset_of(folder, 32)


@pytest.mark.usefixtures("impatient")
def test_sequences_with_a_token_in_quarantine_are_padding_and_the_others_as_before(
    path: Path,
) -> None:
    before = dataset_of(TokenFolder.open(path), 64, shuffle=False)
    index = BestFitIndex.open(TokenFolder.open(path), 64)
    expected = before.sequences(0, before.sequences_per_epoch)
    # Its first token, and the one after its last, which is a label.
    spans = [
        [(start, start + size) for start, size in index.spans(n)] for n in range(len(expected))
    ]
    for suffix in (".tokens", ".documents", ".json", ".best-fit-64"):
        (path / f"train-00001{suffix}").unlink()
    flip_bit(path / "train-00000.tokens", 65_536 + 9)
    tokens = [entry.tokens for entry in index.manifest.shards]
    damaged = [(32_768, 65_536), (tokens[0], tokens[0] + tokens[1])]
    dataset = dataset_of(
        TokenFolder.open(path, quarantine=["train-00000:1", "train-00001"]), 64, shuffle=False
    )
    masked = 0
    for n, sequence in enumerate(dataset.sequences(0, len(expected))):
        if any(start < b and stop >= a for start, stop in spans[n] for a, b in damaged):
            assert (sequence.document_ids == -1).all()
            assert (sequence.labels == -100).all()
            masked += 1
        else:
            assert as_lists(sequence) == as_lists(expected[n])
    assert 0 < masked < len(expected)


# --- in a plan ------------------------------------------------------------------------------------


def test_a_mixture_takes_the_sequences_of_each_source_and_its_plan_knows_the_packing(
    tmp_path: Path, folder_of: Writer
) -> None:
    rng = fresh_random()
    for source in ("web", "code"):
        folder_of(
            tmp_path / source,
            [[rng.randint(1, 90) for _ in range(40)] for _ in range(2)],
            seed=rng.randrange(2**31),
        )
        packed(tmp_path / source, 32)
    tables = "".join(
        f'[[data.sources]]\nfolder = "{tmp_path / name}"\nweight = {w}\n'
        for name, w in (("web", 3), ("code", 1))
    )
    phases = '[[data.phases]]\nsteps = 3\n[[data.phases]]\nweights = ["code=1"]\n'
    mixtures: dict[str, MixedDataset] = {}
    for packing in ("best-fit", "concat"):
        recipe = tmp_path / f"{packing}.toml"
        recipe.write_text(f'[data]\npacking = "{packing}"\nsequence_length = 32\n{tables}{phases}')
        mixtures[packing] = TokenSources.open(read_config(recipe)).training(8)
    mixture = mixtures["best-fit"]
    sources, indices = mixture.assign(0, 200)
    alone = [
        dataset_of(TokenFolder.open(tmp_path / name), 32, shuffle=False) for name in ("web", "code")
    ]
    for n, sequence in enumerate(mixture.sequences(0, 200)):
        assert as_lists(sequence) == as_lists(alone[sources[n]].sequence(int(indices[n])))
    assert np.bincount(sources[:24]).tolist() == [18, 6]
    of_code = indices[sources == 1]
    count = alone[1].sequences_per_epoch
    assert sorted(of_code[:count].tolist()) == list(range(count))
    assert mixture.plan_hash_at(8) != mixtures["concat"].plan_hash_at(8)
    assert mixture.plan_at(8)["phases"][0]["packing"][0] == "best-fit"
    hashes = {mixture.plan_hash_at(8)}
    for options in (
        "shuffle_window = 1",
        "shuffle_window = 2",
    ):
        recipe.write_text(
            f'[data]\npacking = "best-fit"\n{options}\nsequence_length = 32\n{tables}{phases}'
        )
        hashes.add(TokenSources.open(read_config(recipe)).training(8).plan_hash_at(8))
    assert len(hashes) == 3


def test_a_run_trains_on_packed_documents_shows_them_and_refuses_to_resume_with_another_packing(
    tmp_path: Path, tiny_tokens: Path, tiny_options: list[str], lmforge: Command, refused: Refusal
) -> None:
    folder = shutil.copytree(tiny_tokens, tmp_path / "tokens")
    length = next(
        tiny_options[n + 1]
        for n, word in enumerate(tiny_options)
        if word == "--data.sequence_length"
    )
    assert lmforge("prepare", "--pack", folder, "--best_fit_length", length).returncode == 0
    words = [
        *tiny_options,
        "--data.folder",
        folder,
        "--run.folder",
        tmp_path,
        "--run.name",
        "a",
        "--train.steps",
        4,
    ]
    done = lmforge("pretrain", *words, "--data.packing", "best-fit", ranks=2)
    assert done.returncode == 0, done.stderr
    losses = [
        record["loss"] for record in Run.open(tmp_path / "a").read_metrics() if "loss" in record
    ]
    assert losses[-1] < losses[0]
    shown = lmforge("show", "data", tmp_path / "a", "--num_samples", 2).stdout
    assert "── document 1: " in shown
    assert "sequences per epoch" in done.stdout
    assert "(data.packing best-fit → concat)" in refused("pretrain", *words)
