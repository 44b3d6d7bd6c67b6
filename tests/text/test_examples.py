"""Examples in a folder, and the sequences made of them."""

import io
import json
import random
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import xxhash

from lmforge.core.data.batch import Batch
from lmforge.core.data.packing import IGNORE_INDEX, TokenizedExample, best_fit
from lmforge.core.data.tokenizer import MIN_VOCAB_SIZE, Tokenizer, train_tokenizer
from lmforge.core.errors import UserError
from lmforge.text.chat.examples import ExampleFolder, example_dataset, write_examples
from lmforge.text.chat.spill_buffer import ExampleGroup
from tests.seeds import fresh_random

Make = Callable[..., ExampleFolder]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer(["some words to begin with"], 300)


@pytest.fixture
def rng() -> random.Random:
    return fresh_random()


def drawn(rng: random.Random, longest: int) -> TokenizedExample:
    """A prompt that is not scored, and an answer that is."""
    prompt, answer = rng.randint(1, longest - 1), rng.randint(1, longest // 2)
    tokens = np.array([rng.randrange(MIN_VOCAB_SIZE) for _ in range(prompt + answer)], np.int32)
    return TokenizedExample(tokens, np.arange(prompt + answer) >= prompt)


@pytest.fixture
def make(tmp_path: Path, tokenizer: Tokenizer) -> Make:
    def written(
        items: list[ExampleGroup], length: int, *, overlong: str = "drop", ratio: float | None = 0.0
    ) -> ExampleFolder:
        folder = tmp_path / f"examples-{len(list(tmp_path.iterdir()))}"
        read = {"train": items, "validation": []}
        write_examples(
            folder,
            read.__getitem__,
            tokenizer,
            plan={"kind": "conversations", "tokenizer": tokenizer.hash},
            sequence_length=length,
            limit_description=f"data.sequence_length = {length}",
            overlong=overlong,
            validation_ratio=ratio,
        )
        return ExampleFolder.open(folder)

    return written


def test_best_fit_places_everything_once_and_no_bin_is_too_full(rng: random.Random) -> None:
    for _ in range(200):
        capacity = rng.randint(1, 300)
        sizes = np.array([rng.randint(1, capacity) for _ in range(rng.randint(1, 80))])
        things, starts = best_fit(sizes, capacity)
        assert sorted(things) == list(range(len(sizes)))
        loads = [int(sizes[things[a:b]].sum()) for a, b in pairwise(starts)]
        assert max(loads) <= capacity
        # Two bins that are at most half full would have been one.
        assert sum(2 * load <= capacity for load in loads) <= 1


def test_a_sequence_holds_complete_examples_that_do_not_attend_to_each_other(
    rng: random.Random, make: Make
) -> None:
    items = [ExampleGroup((drawn(rng, 20),)) for _ in range(60)]
    dataset = example_dataset(
        make(items, 64), "train", sequence_length=64, pack=True, shuffle=False
    )
    results = []
    for index in range(dataset.sequences_per_epoch):
        sequence = dataset.sequence(index)
        for document in range(sequence.document_ids.max() + 1):
            here = sequence.document_ids == document
            assert list(sequence.positions[here]) == list(range(here.sum()))
            scored = sequence.labels[here] != IGNORE_INDEX
            assert list(sequence.labels[here][:-1][scored[:-1]]) == list(
                sequence.tokens[here][1:][scored[:-1]]
            )
            results.append((*sequence.tokens[here], int(sequence.labels[here][-1])))
        assert (sequence.labels[sequence.document_ids < 0] == IGNORE_INDEX).all()
    assert sorted(results) == sorted(
        tuple(int(id) for id in item.sequences[0].tokens) for item in items
    )
    assert dataset.sequences_per_epoch < len(items) / 2


def test_pairs_lie_in_documents_two_by_two(rng: random.Random, make: Make) -> None:
    items = [ExampleGroup((drawn(rng, 12), drawn(rng, 12))) for _ in range(20)]
    dataset = example_dataset(
        make(items, 64), "train", sequence_length=64, pack=True, shuffle=False
    )
    sides = [tuple(part.tokens[:-1].tolist() for part in item.sequences) for item in items]
    for index in range(dataset.sequences_per_epoch):
        sequence = dataset.sequence(index)
        parts = [
            sequence.tokens[sequence.document_ids == document].tolist()
            for document in range(sequence.document_ids.max() + 1)
        ]
        assert len(parts) % 2 == 0
        assert all(pair in sides for pair in zip(parts[::2], parts[1::2], strict=True))


def test_unpaired_completions_are_followed_by_the_next_ones_completion_to_the_same_prompt(
    rng: random.Random, make: Make
) -> None:
    items = [ExampleGroup((drawn(rng, 10),), {"kto_labels": float(n % 2)}) for n in range(30)]
    dataset = example_dataset(
        make(items, 32), "train", sequence_length=64, pack=True, shuffle=False
    )
    several = 0
    for index in range(dataset.sequences_per_epoch):
        sequence = dataset.sequence(index)
        members = [items[n].sequences[0] for n in dataset.packing.example_indices(index)]  # type: ignore[attr-defined]
        several += len(members) > 1
        for place, member in enumerate(members):
            other = members[(place + 1) % len(members)]
            own, mismatched = (
                sequence.tokens[sequence.document_ids == 2 * place + side] for side in (0, 1)
            )
            assert own.tolist() == member.tokens[:-1].tolist()
            expected = (
                [*member.tokens[~member.loss_mask], *other.tokens[other.loss_mask]][:-1]
                if len(members) > 1
                else []
            )
            assert mismatched.tolist() == expected
    assert several
    batch = Batch.from_sequences(dataset.sequences(0, dataset.sequences_per_epoch))
    assert set(batch.extra("kto_labels").flatten().tolist()) <= {0.0, 1.0}


def test_examples_that_are_too_long_or_have_no_scored_token_are_counted(make: Make) -> None:
    long = TokenizedExample(np.arange(40, dtype=np.int32), np.arange(40) > 30)
    short = TokenizedExample(np.arange(10, dtype=np.int32), np.arange(10) > 5)
    unscored = TokenizedExample(np.arange(10, dtype=np.int32), np.zeros(10, bool))
    items = [ExampleGroup((each,)) for each in (long, short, unscored)]
    assert make(items, 20).manifest["counts"] == {
        "overlong": 1,
        "truncated": 0,
        "nothing_to_learn": 1,
    }
    # Cut at 20 nothing scored is left of the long one; at 35 something is.
    assert make(items, 20, overlong="truncate").manifest["counts"] == {
        "overlong": 0,
        "truncated": 1,
        "nothing_to_learn": 2,
    }
    assert make(items, 35, overlong="truncate").manifest["splits"]["train"]["examples"] == 2
    with pytest.raises(
        UserError,
        match=(
            r"no example is left of the train files: 1 are longer than data\.sequence_length = 20,"
            r" 1 have nothing to learn"
        ),
    ):
        make([items[0], items[2]], 20)


def test_validation_examples_are_apart_even_where_they_are_there_twice(
    rng: random.Random, make: Make
) -> None:
    different = [ExampleGroup((drawn(rng, 20),)) for _ in range(20)]
    folder = make([rng.choice(different) for _ in range(100)], 64, ratio=0.1)
    sides = [
        {tuple(next(examples.sequences(n)).tokens.tolist()) for n in range(len(examples))}
        for examples in (folder.split("train"), folder.split("validation"))
    ]
    assert all(sides)
    assert not sides[0] & sides[1]


@pytest.mark.parametrize("file", ["train-tokens.npy", "train-starts.npy", "train-scored.npy"])
def test_a_flipped_bit_in_a_folder_is_found(file: str, rng: random.Random, make: Make) -> None:
    folder = make([ExampleGroup((drawn(rng, 20),)) for _ in range(20)], 64)
    path = folder.path / file
    content = bytearray(path.read_bytes())
    content[rng.randrange(128, len(content))] ^= 1 << rng.randrange(8)
    path.write_bytes(content)
    with pytest.raises(UserError, match="does not match its checksum; delete"):
        folder.split("train")


def test_a_folder_that_was_not_finished_is_made_again(tmp_path: Path, tokenizer: Tokenizer) -> None:
    def broken(split: str) -> list[ExampleGroup]:
        raise UserError("a.jsonl, record 3: no answer")

    options = {
        "plan": {},
        "sequence_length": 8,
        "limit_description": "8",
        "overlong": "drop",
        "validation_ratio": 0.0,
    }
    with pytest.raises(UserError, match="record 3"):
        write_examples(tmp_path / "a", broken, tokenizer, **options)  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []
    item = ExampleGroup((TokenizedExample(np.arange(5, dtype=np.int32), np.ones(5, bool)),))
    for _ in range(2):
        write_examples(
            tmp_path / "a", {"train": [item], "validation": []}.__getitem__, tokenizer, **options
        )  # type: ignore[arg-type]
    assert (
        json.loads((tmp_path / "a" / "examples.json").read_text())["splits"]["train"]["examples"]
        == 1
    )


def test_turns_of_one_conversation_are_all_for_training_or_all_for_validation(make: Make) -> None:
    items = [
        ExampleGroup(
            (
                TokenizedExample(
                    np.arange(3 + turn, dtype=np.int32),
                    np.ones(3 + turn, bool),
                    part_of=10 + conversation,
                ),
            )
        )
        for conversation in range(5)
        for turn in range(3)
    ]
    folder = make(items, 8, ratio=0.4)
    assert (folder.num_examples("validation"), folder.num_examples("train")) == (6, 9)


def plainly(
    items: list[ExampleGroup], ratio: float
) -> tuple[dict[str, dict[str, np.ndarray]], dict[str, dict[str, object]]]:
    """The arrays of both splits, and how the manifest describes them, with everything in memory."""
    hashes = [
        xxhash.xxh3_64_intdigest(b"".join(one.tokens.tobytes() for one in item.sequences))
        for item in items
    ]
    validation = set(sorted(hashes)[: max(1, round(ratio * len(items)))] if ratio else ()) - {
        max(hashes)
    }
    arrays: dict[str, dict[str, np.ndarray]] = {}
    described: dict[str, dict[str, object]] = {}
    for split in ("train", "validation"):
        chosen = [
            item
            for item, hash in zip(items, hashes, strict=True)
            if (hash in validation) == (split == "validation")
        ]
        sequences = [sequence for item in chosen for sequence in item.sequences]
        nothing = TokenizedExample(np.zeros(0, np.int32), np.zeros(0, bool))
        arrays[split] = {
            "tokens": np.concatenate([sequence.tokens for sequence in [nothing, *sequences]]),
            "scored": np.concatenate([sequence.loss_mask for sequence in [nothing, *sequences]]),
            "starts": np.cumsum([0, *(len(sequence.tokens) for sequence in sequences)]),
        }
        for name in sorted(chosen[0].scalars if chosen else ()):
            arrays[split][f"label-{name}"] = np.array(
                [item.scalars[name] for item in chosen], np.float32
            )
        described[split] = {
            "examples": len(chosen),
            "group": len(chosen[0].sequences) if chosen else 1,
            "tokens": sum(len(sequence.tokens) for sequence in sequences),
            "scored": sum(int(sequence.loss_mask[1:].sum()) for sequence in sequences),
            "xxh3": {
                name: xxhash.xxh3_64_hexdigest(array.tobytes())
                for name, array in arrays[split].items()
            },
        }
    return arrays, described


@pytest.mark.parametrize("ratio", [0.0, 0.02, 0.5, 0.99])
@pytest.mark.parametrize("sides", [1, 2])
def test_a_folder_is_to_the_byte_what_it_would_be_of_all_examples_in_memory(
    sides: int, ratio: float, rng: random.Random, make: Make
) -> None:
    different = [
        ExampleGroup(
            tuple(drawn(rng, 20) for _ in range(sides)),
            {"margins": rng.random(), "kto_labels": float(rng.random() < 0.5)},
        )
        for _ in range(rng.randint(1, 60))
    ]
    items = [rng.choice(different) for _ in range(rng.randint(1, 100))]
    folder = make(items, 1000, ratio=ratio)
    arrays, described = plainly(items, ratio)
    assert folder.manifest["splits"] == described
    files = {
        f"{split}-{name}.npy": array
        for split, named in arrays.items()
        for name, array in named.items()
    }
    for name, array in files.items():
        saved = io.BytesIO()
        np.save(saved, array)
        assert (folder.path / name).read_bytes() == saved.getvalue(), name
    assert {path.name for path in folder.path.iterdir()} == {*files, "examples.json", "tokenizer"}


MEMORY = """
import resource, sys
from pathlib import Path
import numpy as np
from lmforge.core.data.packing import TokenizedExample
from lmforge.text.chat.examples import write_examples
from lmforge.text.chat.spill_buffer import ExampleGroup
from lmforge.core.data.tokenizer import Tokenizer

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # KiB; bytes on macOS

def read(split):
    for number in range(20_000 if split == "train" else 0):
        tokens = np.full(1000, number, np.int32)
        yield ExampleGroup((TokenizedExample(tokens, np.ones(1000, bool)),))

tokenizer = Tokenizer.open(sys.argv[1])
before = peak()
options = {"plan": {}, "sequence_length": 1000, "limit_description": "1000", "overlong": "drop", "validation_ratio": 0.02}
write_examples(Path(sys.argv[2]), read, tokenizer, **options)
print((peak() - before) // (1 << 20 if sys.platform == "darwin" else 1 << 10))
"""


def test_examples_that_are_written_do_not_have_to_fit_in_memory(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    """What is written is 100 MB; a few numbers of each example take less than one."""
    tokenizer.save(tmp_path / "tokenizer")
    words = [sys.executable, "-c", MEMORY, str(tmp_path / "tokenizer"), str(tmp_path / "examples")]
    taken = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    assert sum(file.stat().st_size for file in (tmp_path / "examples").glob("*.npy")) > 95 << 20
    assert int(taken) < 25
