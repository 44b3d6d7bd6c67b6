"""Decoding against the plain definition (read everything again for each token), and what becomes of the tokens as text."""

import secrets
import string
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lmforge.data.tokenizer import Tokenizer
from lmforge.errors import Mistake
from lmforge.infer.engine import Completion, decode, generate
from lmforge.infer.sampling import Sampling
from lmforge.model import build
from lmforge.model.layers import LanguageModel
from lmforge.model.shapes import ModelConfig
from tests.infer.conftest import Scripted

GREEDY = Sampling(temperature=0.0)
SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "initializer_range": 0.4,
}
SHAPES: dict[str, dict[str, Any]] = {
    "llama, grouped": {"intermediate_size": 40, "num_key_value_heads": 2},
    "qwen3": {"model_type": "qwen3", "intermediate_size": 40, "num_key_value_heads": 1, "qk_norm": True, "head_dim": 10},
    "mistral, window 5": {"model_type": "mistral", "intermediate_size": 40, "sliding_window": 5},
    "gpt2": {"model_type": "gpt2", "max_position_embeddings": 40},
}
Spelling = Callable[[str], LanguageModel]


def fresh_seed() -> int:
    seed = secrets.randbelow(2**31)
    print(f"seed {seed}")
    return seed


def random_prompts(seed: int, lengths: list[int]) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(1, 97, (length,), generator=generator).tolist() for length in lengths]


def decoded(
    model: LanguageModel, prompts: list[list[int]], max_tokens: int, sampling: Sampling, seed: int = 0
) -> list[list[int]]:
    steps = decode(model, prompts, vocab_size=97, max_tokens=max_tokens, sampling=sampling, seed=seed, stop_ids=frozenset({0}))
    return [[token for token in row if token is not None] for row in zip(*steps, strict=True)]


@pytest.mark.parametrize("shape", SHAPES)
def test_greedy_decoding_of_ragged_prompts_is_the_argmax_of_reading_everything_again(shape: str) -> None:
    seed = fresh_seed()
    model = build(ModelConfig(**SIZES, **SHAPES[shape]), seed=seed)
    prompts = random_prompts(seed, [1, 7, 12, 3])
    for prompt, written in zip(prompts, decoded(model, prompts, 20, GREEDY), strict=True):
        assert len(written) == 20 or written[-1] == 0
        ids = torch.tensor([prompt + written[:-1]])
        with torch.no_grad():
            hidden = model(ids, torch.arange(ids.shape[1])[None], torch.zeros_like(ids, dtype=torch.int32))
            logits = model.lm_head(hidden)[0, len(prompt) - 1 :]
        # The same sums in another order: what was chosen is the largest, to rounding.
        chosen = logits.gather(1, torch.tensor(written)[:, None])[:, 0]
        torch.testing.assert_close(chosen, logits.amax(-1), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("shape", SHAPES)
def test_what_a_row_writes_does_not_depend_on_its_neighbours(shape: str) -> None:
    seed = fresh_seed()
    model = build(ModelConfig(**SIZES, **SHAPES[shape]), seed=seed)
    mine, *others = random_prompts(seed, [5, 1, 9, 5])
    together = [
        decoded(model, [others[0], mine, others[1]], 15, Sampling(1.0), seed),
        decoded(model, [others[2], mine], 15, Sampling(1.0), seed),
        decoded(model, [others[1], mine, others[0], others[2]], 15, Sampling(1.0), seed),
    ]
    assert together[0][1] == together[1][1] == together[2][1]
    assert together[0][0] != together[1][0]  # the neighbours do differ


def test_the_seed_and_the_row_decide_what_is_drawn() -> None:
    model = build(ModelConfig(**{**SIZES, "initializer_range": 0.02}, intermediate_size=40), seed=1)
    first = decoded(model, [[5, 6]] * 3, 20, Sampling(1.0), seed=3)
    assert decoded(model, [[5, 6]] * 3, 20, Sampling(1.0), seed=3) == first
    assert decoded(model, [[5, 6]] * 3, 20, Sampling(1.0), seed=4) != first
    assert len({tuple(row) for row in first}) == 3


def test_an_ended_row_gives_no_more_tokens_while_others_go_on(scripted: Scripted) -> None:
    model = scripted({10: 11, 11: 0, 20: 21, 21: 22, 22: 23, 23: 0})
    steps = decode(model, [[10], [20]], vocab_size=261, max_tokens=99, sampling=GREEDY, seed=0, stop_ids=frozenset({0}))
    assert list(steps) == [[11, 21], [0, 22], [None, 23], [None, 0]]


def test_only_tokens_that_the_tokenizer_has_are_chosen(scripted: Scripted, byte_tokenizer: Tokenizer) -> None:
    """Published models round their vocabulary up: the last rows of the head belong to no token."""
    start = byte_tokenizer.encode("a")[0]
    model = scripted({start: 262}, vocab_size=264)
    with torch.no_grad():
        model.lm_head.weight[start + 1, start] = 0.5
    assert generate(model, byte_tokenizer, ["a"], max_tokens=3, sampling=GREEDY, seed=0)[0].tokens == [start + 1] * 3
    hot = generate(model, byte_tokenizer, ["a"] * 20, max_tokens=10, sampling=Sampling(50.0), seed=fresh_seed())
    assert all(token < 261 for completion in hot for token in completion.tokens)


def test_an_empty_list_of_ids_is_no_prompt(scripted: Scripted) -> None:
    with pytest.raises(ValueError, match="an empty prompt"):
        decoded(scripted({}), [[1], []], 5, GREEDY)


def test_more_tokens_than_learned_positions_are_a_mistake() -> None:
    model = build(ModelConfig(**SIZES, **SHAPES["gpt2"]), seed=0)
    assert len(decoded(model, [[5] * 30, [7]], 10, GREEDY)[0]) <= 10
    with pytest.raises(Mistake, match="reads at most 40 tokens, not 41"):
        decoded(model, [[5] * 30, [7]], 11, GREEDY)


def test_under_autocast_the_cache_follows(spelling: Spelling, byte_tokenizer: Tokenizer) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        assert generate(spelling("hey"), byte_tokenizer, ["h"], max_tokens=9, sampling=GREEDY, seed=0)[0].text == "ey"


class Told:
    """What `on_text` was told, by row."""

    def __init__(self, rows: int) -> None:
        self.pieces: list[list[str]] = [[] for _ in range(rows)]

    def __call__(self, row: int, piece: str) -> None:
        self.pieces[row].append(piece)


def test_end_of_text_ends_a_row_and_is_no_text(spelling: Spelling, byte_tokenizer: Tokenizer) -> None:
    [completion] = generate(spelling("hey"), byte_tokenizer, ["h"], max_tokens=9, sampling=GREEDY, seed=0)
    assert completion == Completion([*byte_tokenizer.encode("ey"), byte_tokenizer.separator_id], "ey", "stop")


def test_a_row_ends_after_max_tokens(spelling: Spelling, byte_tokenizer: Tokenizer) -> None:
    completions = generate(spelling("abcdefgh"), byte_tokenizer, ["a", "f"], max_tokens=4, sampling=GREEDY, seed=0)
    assert [(row.text, row.reason) for row in completions] == [("bcde", "length"), ("gh", "stop")]


def test_pieces_come_token_by_token_to_their_row(spelling: Spelling, byte_tokenizer: Tokenizer) -> None:
    told = Told(3)
    generate(spelling("abcdefgh"), byte_tokenizer, ["a", "g", "h"], max_tokens=3, sampling=GREEDY, seed=0, on_text=told)
    assert told.pieces == [["b", "c", "d"], ["h"], []]


def test_characters_of_several_bytes_come_whole(spelling: Spelling, byte_tokenizer: Tokenizer) -> None:
    told = Told(1)
    [completion] = generate(spelling("aé漢🙂z"), byte_tokenizer, ["a"], max_tokens=99, sampling=GREEDY, seed=0, on_text=told)
    assert completion.text == "é漢🙂z"
    assert told.pieces == [["é", "漢", "🙂", "z"]]


@pytest.mark.parametrize("tokens", range(11))
def test_a_character_that_never_became_whole_is_marked_at_the_end(
    spelling: Spelling, byte_tokenizer: Tokenizer, tokens: int
) -> None:
    told = Told(1)
    whole = "é漢🙂z"
    [completion] = generate(
        spelling("a" + whole), byte_tokenizer, ["a"], max_tokens=max(1, tokens), sampling=GREEDY, seed=0, on_text=told
    )
    assert completion.text == whole.encode()[: max(1, tokens)].decode(errors="replace")
    assert "".join(told.pieces[0]) == completion.text


def test_a_character_cut_off_by_the_end_of_text_is_marked_too(scripted: Scripted, byte_tokenizer: Tokenizer) -> None:
    start, first, _ = byte_tokenizer.encode("aé")
    model = scripted({start: first, first: byte_tokenizer.separator_id})
    [completion] = generate(model, byte_tokenizer, ["a"], max_tokens=9, sampling=GREEDY, seed=0)
    assert (completion.text, completion.reason) == ("\ufffd", "stop")


def until_a_stop(text: str, stops: list[str]) -> str | None:
    """`text` up to the first stop text that is complete, None where none ever is."""
    for end in range(1, len(text) + 1):
        found = [text.find(stop) for stop in stops if stop in text[:end]]
        if found:
            return text[: min(found)]
    return None


letters = st.permutations(string.ascii_lowercase[:14]).map("".join)


@settings(max_examples=40, deadline=None)
@given(text=letters, data=st.data())
def test_a_stop_text_ends_a_row_and_no_part_of_it_is_ever_told(
    text: str, data: st.DataObject, scripted: Scripted, byte_tokenizer: Tokenizer
) -> None:
    starts = st.tuples(st.integers(1, 13), st.integers(1, 5)).map(lambda cut: text[cut[0] : cut[0] + cut[1]])
    # Some stop texts occur, some only begin to.
    stops = data.draw(st.lists(starts | starts.map(lambda stop: stop + "!"), max_size=3))
    ids = byte_tokenizer.encode(text)
    model = scripted(dict(zip(ids, [*ids[1:], byte_tokenizer.separator_id], strict=True)))
    told = Told(1)
    [completion] = generate(model, byte_tokenizer, [text[0]], max_tokens=50, sampling=GREEDY, seed=0, stop=stops, on_text=told)
    cut = until_a_stop(text[1:], stops)
    assert completion.text == (text[1:] if cut is None else cut)
    assert completion.reason == "stop"
    assert "".join(told.pieces[0]) == completion.text


def test_of_stop_texts_that_are_complete_at_once_the_earlier_one_cuts(spelling: Spelling, byte_tokenizer: Tokenizer) -> None:
    for stops in (["cd", "d"], ["d", "cd"]):
        [completion] = generate(spelling("abcdef"), byte_tokenizer, ["a"], max_tokens=50, sampling=GREEDY, seed=0, stop=stops)
        assert completion.text == "b"


def test_text_is_held_back_only_while_it_may_begin_a_stop_text(spelling: Spelling, byte_tokenizer: Tokenizer) -> None:
    told = Told(1)
    model = spelling("abcdefghij")
    generate(model, byte_tokenizer, ["a"], max_tokens=50, sampling=GREEDY, seed=0, stop=["cdX", "ghij"], on_text=told)
    assert told.pieces == [["b", "cde", "f"]]


def test_a_stop_text_that_is_half_written_at_the_end_is_text(spelling: Spelling, byte_tokenizer: Tokenizer) -> None:
    for max_tokens, expected in ((3, "bcd"), (50, "bcdef")):
        told = Told(1)
        [completion] = generate(
            spelling("abcdef"),
            byte_tokenizer,
            ["a"],
            max_tokens=max_tokens,
            sampling=GREEDY,
            seed=0,
            stop=["cdefg"],
            on_text=told,
        )
        assert completion.text == expected
        assert told.pieces == [["b", expected[1:]]]


def test_an_empty_prompt_begins_with_the_token_that_begins_or_else_ends_a_text(
    scripted: Scripted, byte_tokenizer: Tokenizer, tmp_path: Path
) -> None:
    byte_tokenizer.save(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<|endoftext|>", "bos_token": "<|user|>"}')
    with_bos = Tokenizer.open(tmp_path)
    bos = with_bos.bos_id
    assert bos is not None
    a, b = byte_tokenizer.encode("ab")
    model = scripted({bos: a, byte_tokenizer.separator_id: b})
    assert generate(model, with_bos, [""], max_tokens=2, sampling=GREEDY, seed=0)[0].text == "aa"
    assert generate(model, byte_tokenizer, [""], max_tokens=2, sampling=GREEDY, seed=0)[0].text == "bb"


def test_sampled_text_streams_to_exactly_what_is_returned(tiny_model_and_tokenizer: tuple[LanguageModel, Tokenizer]) -> None:
    model, tokenizer = tiny_model_and_tokenizer
    prompts = ["The king", "", "é 漢", "First Citizen:\n"]
    told = Told(4)
    completions = generate(
        model, tokenizer, prompts, max_tokens=60, sampling=Sampling(1.2), seed=fresh_seed(), stop=["\n\n", " a"], on_text=told
    )
    for row, completion in enumerate(completions):
        assert "".join(told.pieces[row]) == completion.text
        assert "\n\n" not in completion.text
        assert " a" not in completion.text
        assert completion.reason == "stop" or len(completion.tokens) == 60
