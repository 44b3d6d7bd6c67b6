"""Decoding against its definition (a full forward pass for each token), and the text of the
tokens.
"""

import math
import random
import string
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from lmforge.core.data.tokenizer import Tokenizer
from lmforge.core.errors import RunFailed, UserError
from lmforge.core.model.build import build_model
from lmforge.core.model.config import ModelConfig
from lmforge.core.model.fields import Multipliers
from lmforge.core.model.init_weights import init_weights
from lmforge.core.model.layers import LanguageModel
from lmforge.hf.export import export_folder
from lmforge.serve.decoding.engine import (
    Completion,
    Engine,
    GeneratedToken,
    GenerationRequest,
    generate,
)
from lmforge.serve.decoding.sampling import SamplingParams
from tests.core.model.conftest import (
    MODEL_TYPES,
    ONE_BY_ONE,
    built,
    drawn_config,
    token_by_token,  # noqa: F401  (a fixture)
)
from tests.seeds import fresh_seed
from tests.serve.decoding.conftest import Scripted
from tests.support.decoding import decode

GREEDY = SamplingParams(temperature=0.0)
SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "initializer_range": 0.4,
}
SHAPES: dict[str, dict[str, Any]] = {
    "llama, grouped": {"intermediate_size": 40, "num_key_value_heads": 2},
    "qwen3": {
        "model_type": "qwen3",
        "intermediate_size": 40,
        "num_key_value_heads": 1,
        "qk_norm": True,
        "head_dim": 10,
    },
    "mistral, window 5": {"model_type": "mistral", "intermediate_size": 40, "sliding_window": 5},
    "gpt2": {"model_type": "gpt2", "max_position_embeddings": 40},
    "hybrid": {
        "model_type": "qwen3_5_text",
        "intermediate_size": 40,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "partial_rotary_factor": 0.5,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 6,
        "linear_value_head_dim": 5,
        "linear_conv_kernel_dim": 4,
        # A norm divides the small outputs of a young state by themselves.
        "rms_norm_eps": 1e-2,
        "layer_types": ["linear_attention", "full_attention"],
    },
    "kimi": {
        "model_type": "kimi_linear",
        "intermediate_size": 40,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "moe_intermediate_size": 12,
        "first_k_dense_replace": 1,
        "norm_topk_prob": True,
        "kv_lora_rank": 12,
        "qk_nope_head_dim": 6,
        "qk_rope_head_dim": 4,
        "v_head_dim": 7,
        "linear_num_key_heads": 3,
        "linear_key_head_dim": 6,
        "linear_conv_kernel_dim": 4,
        "rms_norm_eps": 1e-2,
        "layer_types": ["linear_attention", "full_attention"],
    },
    "state space": {
        "model_type": "nemotron_h",
        "num_hidden_layers": 4,
        "intermediate_size": 40,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 6,
        "linear_value_head_dim": 5,
        "linear_conv_kernel_dim": 4,
        "conv_bias": True,
        "rms_norm_eps": 1e-2,
        "layer_types": ["linear_attention", "mlp", "full_attention", "linear_attention"],
    },
    "constants": {
        "model_type": "granitemoehybrid",
        "intermediate_size": 40,
        "linear_num_key_heads": 1,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 6,
        "linear_value_head_dim": 6,
        "linear_conv_kernel_dim": 4,
        "rope_theta": None,
        "shared_expert_intermediate_size": 20,
        "norm_topk_prob": True,
        "multipliers": Multipliers(3.0, 0.1, 0.5, 2.0),
        "rms_norm_eps": 1e-2,
        "layer_types": ["linear_attention", "full_attention"],
    },
}
Spelling = Callable[[str], LanguageModel]


def random_prompts(seed: int, lengths: list[int]) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(1, 97, (length,), generator=generator).tolist() for length in lengths]


def decoded(
    model: LanguageModel,
    prompts: list[list[int]],
    max_tokens: int,
    sampling: SamplingParams,
    seed: int = 0,
) -> list[list[int]]:
    return decode(
        model,
        prompts,
        vocab_size=97,
        max_tokens=max_tokens,
        sampling=sampling,
        seed=seed,
        stop_ids=frozenset({0}),
    )


@pytest.mark.parametrize("shape", SHAPES)
def test_greedy_decoding_of_ragged_prompts_is_the_argmax_of_the_full_forward_pass(
    shape: str,
) -> None:
    seed = fresh_seed()
    model = init_weights(build_model(ModelConfig(**SIZES | SHAPES[shape])), seed)
    prompts = random_prompts(seed, [1, 7, 12, 3])
    for prompt, written in zip(prompts, decoded(model, prompts, 20, GREEDY), strict=True):
        assert len(written) == 20 or written[-1] == 0
        ids = torch.tensor([prompt + written[:-1]])
        with torch.no_grad():
            hidden = model(
                ids, torch.arange(ids.shape[1])[None], torch.zeros_like(ids, dtype=torch.int32)
            )
            logits = model.lm_head(hidden)[0, len(prompt) - 1 :]
        # The same sums in another order: what was chosen is the largest, to rounding.
        chosen = logits.gather(1, torch.tensor(written)[:, None])[:, 0]
        torch.testing.assert_close(chosen, logits.amax(-1), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_completion_does_not_depend_on_the_others_in_its_batch(shape: str) -> None:
    seed = fresh_seed()
    # In fp64: batches of other sizes change the last bits of logits, and those of fp32 change a
    # sample once in many seeds.
    model = init_weights(build_model(ModelConfig(**SIZES | SHAPES[shape])), seed).double()
    mine, *others = random_prompts(seed, [5, 1, 9, 5])  # the neighbours differ in length
    together = [
        decoded(model, [others[0], mine, others[1]], 15, SamplingParams(1.0), seed),
        decoded(model, [others[2], mine], 15, SamplingParams(1.0), seed),
        decoded(model, [others[1], mine, others[0], others[2]], 15, SamplingParams(1.0), seed),
    ]
    assert together[0][1] == together[1][1] == together[2][1]


def test_the_seed_and_the_index_decide_what_is_sampled() -> None:
    model = init_weights(
        build_model(ModelConfig(**{**SIZES, "initializer_range": 0.02}, intermediate_size=40)), 1
    )
    first = decoded(model, [[5, 6]] * 3, 20, SamplingParams(1.0), seed=3)
    assert decoded(model, [[5, 6]] * 3, 20, SamplingParams(1.0), seed=3) == first
    assert decoded(model, [[5, 6]] * 3, 20, SamplingParams(1.0), seed=4) != first
    assert len({tuple(row) for row in first}) == 3


def test_a_finished_request_yields_no_more_tokens_while_others_continue(scripted: Scripted) -> None:
    model = scripted({10: 11, 11: 0, 20: 21, 21: 22, 22: 23, 23: 0})
    engine = Engine(model, vocab_size=261, max_batch_size=2, max_length=100)
    one, other = (
        engine.add_request(GenerationRequest([id], 99, GREEDY, 0, frozenset({0})))
        for id in (10, 20)
    )
    steps = [{token.request_id: token.token_id for token in engine.step()} for _ in range(4)]
    assert steps == [{one: 11, other: 21}, {one: 0, other: 22}, {other: 23}, {other: 0}]
    assert engine.num_unfinished == 0


def test_only_tokens_of_the_tokenizer_are_sampled(
    scripted: Scripted, byte_tokenizer: Tokenizer
) -> None:
    """Published models round their vocabulary up: the last rows of the head belong to no token."""
    start = byte_tokenizer.encode("a")[0]
    model = scripted({start: 262}, vocab_size=264)
    with torch.no_grad():
        model.lm_head.weight[start + 1, start] = 0.5
    assert (
        generate(model, byte_tokenizer, ["a"], max_tokens=3, sampling=GREEDY, seed=0)[0].token_ids
        == [start + 1] * 3
    )
    hot = generate(
        model,
        byte_tokenizer,
        ["a"] * 20,
        max_tokens=10,
        sampling=SamplingParams(50.0),
        seed=fresh_seed(),
    )
    assert all(token < 261 for completion in hot for token in completion.token_ids)


@pytest.mark.parametrize("sampling", [GREEDY, SamplingParams(1.0)])
def test_nan_logits_raise_run_failed(sampling: SamplingParams) -> None:
    model = init_weights(build_model(ModelConfig(**SIZES, intermediate_size=40)), 1)
    with torch.no_grad():
        model.lm_head.weight[7, 3] = torch.nan
    with pytest.raises(RunFailed, match="the model's logits are NaN or infinite after 4 tokens"):
        decoded(model, [[5, 6, 7, 8]], 3, sampling)


def test_more_tokens_than_learned_positions_are_a_user_error() -> None:
    model = init_weights(build_model(ModelConfig(**SIZES, **SHAPES["gpt2"])), 0)
    assert len(decoded(model, [[5] * 30, [7]], 10, GREEDY)[0]) <= 10
    with pytest.raises(UserError, match="reads at most 40 tokens, not 41"):
        decoded(model, [[5] * 30, [7]], 11, GREEDY)


def test_the_cache_has_the_dtype_of_autocast(spelling: Spelling, byte_tokenizer: Tokenizer) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        assert (
            generate(spelling("hey"), byte_tokenizer, ["h"], max_tokens=9, sampling=GREEDY, seed=0)[
                0
            ].text
            == "ey"
        )


class Streamed:
    """What `on_text` was told, by row."""

    def __init__(self, rows: int) -> None:
        self.pieces: list[list[str]] = [[] for _ in range(rows)]

    def __call__(self, row: int, piece: str) -> None:
        self.pieces[row].append(piece)


def test_the_end_of_text_token_ends_a_completion_and_has_no_text(
    spelling: Spelling, byte_tokenizer: Tokenizer
) -> None:
    [completion] = generate(
        spelling("hey"), byte_tokenizer, ["h"], max_tokens=9, sampling=GREEDY, seed=0
    )
    ids = [*byte_tokenizer.encode("ey"), byte_tokenizer.eos_token_id]
    assert completion == Completion(ids, "ey", "stop", completion.logprobs)
    assert len(completion.logprobs) == 3


def test_a_completion_ends_after_max_tokens(spelling: Spelling, byte_tokenizer: Tokenizer) -> None:
    completions = generate(
        spelling("abcdefgh"), byte_tokenizer, ["a", "f"], max_tokens=4, sampling=GREEDY, seed=0
    )
    assert [(row.text, row.finish_reason) for row in completions] == [
        ("bcde", "length"),
        ("gh", "stop"),
    ]


def test_without_prompts_there_are_no_completions(
    spelling: Spelling, byte_tokenizer: Tokenizer
) -> None:
    assert (
        generate(spelling("abc"), byte_tokenizer, [], max_tokens=4, sampling=GREEDY, seed=0) == []
    )


def test_on_text_is_called_token_by_token_with_the_index(
    spelling: Spelling, byte_tokenizer: Tokenizer
) -> None:
    streamed = Streamed(3)
    generate(
        spelling("abcdefgh"),
        byte_tokenizer,
        ["a", "g", "h"],
        max_tokens=3,
        sampling=GREEDY,
        seed=0,
        on_text=streamed,
    )
    assert streamed.pieces == [["b", "c", "d"], ["h"], []]


def test_characters_of_several_bytes_are_not_split_in_streams(
    spelling: Spelling, byte_tokenizer: Tokenizer
) -> None:
    streamed = Streamed(1)
    [completion] = generate(
        spelling("aé漢🙂z"),
        byte_tokenizer,
        ["a"],
        max_tokens=99,
        sampling=GREEDY,
        seed=0,
        on_text=streamed,
    )
    assert completion.text == "é漢🙂z"
    assert streamed.pieces == [["é", "漢", "🙂", "z"]]


@pytest.mark.parametrize("tokens", range(11))
def test_an_incomplete_character_is_replaced_at_the_end(
    spelling: Spelling, byte_tokenizer: Tokenizer, tokens: int
) -> None:
    streamed = Streamed(1)
    whole = "é漢🙂z"
    [completion] = generate(
        spelling("a" + whole),
        byte_tokenizer,
        ["a"],
        max_tokens=max(1, tokens),
        sampling=GREEDY,
        seed=0,
        on_text=streamed,
    )
    assert completion.text == whole.encode()[: max(1, tokens)].decode(errors="replace")
    assert "".join(streamed.pieces[0]) == completion.text


def test_a_character_cut_off_by_the_end_of_text_is_replaced_too(
    scripted: Scripted, byte_tokenizer: Tokenizer
) -> None:
    start, first, _ = byte_tokenizer.encode("aé")
    model = scripted({start: first, first: byte_tokenizer.eos_token_id})
    [completion] = generate(model, byte_tokenizer, ["a"], max_tokens=9, sampling=GREEDY, seed=0)
    assert (completion.text, completion.finish_reason) == ("\ufffd", "stop")


def until_a_stop(text: str, stops: list[str]) -> str | None:
    """`text` up to the first stop text that is complete, None where none ever is."""
    for end in range(1, len(text) + 1):
        results = [text.find(stop) for stop in stops if stop in text[:end]]
        if results:
            return text[: min(results)]
    return None


letters = st.permutations(string.ascii_lowercase[:14]).map("".join)


@settings(max_examples=40, deadline=None)
@given(text=letters, data=st.data())
def test_a_stop_string_ends_a_completion_and_no_part_of_it_is_streamed(
    text: str, data: st.DataObject, scripted: Scripted, byte_tokenizer: Tokenizer
) -> None:
    starts = st.tuples(st.integers(1, 13), st.integers(1, 5)).map(
        lambda cut: text[cut[0] : cut[0] + cut[1]]
    )
    # Some stop texts occur, some only begin to.
    stops = data.draw(st.lists(starts | starts.map(lambda stop: stop + "!"), max_size=3))
    ids = byte_tokenizer.encode(text)
    model = scripted(dict(zip(ids, [*ids[1:], byte_tokenizer.eos_token_id], strict=True)))
    streamed = Streamed(1)
    [completion] = generate(
        model,
        byte_tokenizer,
        [text[0]],
        max_tokens=50,
        sampling=GREEDY,
        seed=0,
        stop_strings=stops,
        on_text=streamed,
    )
    cut = until_a_stop(text[1:], stops)
    assert completion.text == (text[1:] if cut is None else cut)
    assert completion.finish_reason == "stop"
    assert "".join(streamed.pieces[0]) == completion.text


def test_a_completion_that_a_stop_string_ended_is_decoded_no_further(
    scripted: Scripted, byte_tokenizer: Tokenizer
) -> None:
    a, b, c = byte_tokenizer.encode("abc")
    model, rows = scripted({a: b, b: c, c: a}), list[int]()
    model.lm_head.register_forward_hook(lambda module, inputs, output: rows.append(len(output)))
    completions = generate(
        model,
        byte_tokenizer,
        ["a", "c"],
        max_tokens=6,
        sampling=GREEDY,
        seed=0,
        stop_strings=["ab"],
    )
    assert [each.text for each in completions] == ["bc", ""]
    assert rows == [2, 2, 1, 1]


def test_the_earliest_of_stop_strings_that_complete_together_cuts(
    spelling: Spelling, byte_tokenizer: Tokenizer
) -> None:
    for stops in (["cd", "d"], ["d", "cd"]):
        [completion] = generate(
            spelling("abcdef"),
            byte_tokenizer,
            ["a"],
            max_tokens=50,
            sampling=GREEDY,
            seed=0,
            stop_strings=stops,
        )
        assert completion.text == "b"


def test_text_is_held_back_only_while_it_may_begin_a_stop_text(
    spelling: Spelling, byte_tokenizer: Tokenizer
) -> None:
    streamed = Streamed(1)
    model = spelling("abcdefghij")
    generate(
        model,
        byte_tokenizer,
        ["a"],
        max_tokens=50,
        sampling=GREEDY,
        seed=0,
        stop_strings=["cdX", "ghij"],
        on_text=streamed,
    )
    assert streamed.pieces == [["b", "cde", "f"]]


def test_an_incomplete_stop_string_at_the_end_is_text(
    spelling: Spelling, byte_tokenizer: Tokenizer
) -> None:
    for max_tokens, expected in ((3, "bcd"), (50, "bcdef")):
        streamed = Streamed(1)
        [completion] = generate(
            spelling("abcdef"),
            byte_tokenizer,
            ["a"],
            max_tokens=max_tokens,
            sampling=GREEDY,
            seed=0,
            stop_strings=["cdefg"],
            on_text=streamed,
        )
        assert completion.text == expected
        assert streamed.pieces == [["b", expected[1:]]]


def test_an_empty_prompt_begins_with_the_token_that_begins_or_else_ends_a_text(
    scripted: Scripted, byte_tokenizer: Tokenizer, tmp_path: Path
) -> None:
    byte_tokenizer.save(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(
        '{"eos_token": "<|endoftext|>", "bos_token": "<|user|>"}'
    )
    with_bos = Tokenizer.open(tmp_path)
    bos = with_bos.bos_token_id
    assert bos is not None
    a, b = byte_tokenizer.encode("ab")
    model = scripted({bos: a, byte_tokenizer.eos_token_id: b})
    assert generate(model, with_bos, [""], max_tokens=2, sampling=GREEDY, seed=0)[0].text == "aa"
    assert (
        generate(model, byte_tokenizer, [""], max_tokens=2, sampling=GREEDY, seed=0)[0].text == "bb"
    )


def test_sampled_text_streams_to_exactly_what_is_returned(
    tiny_model_and_tokenizer: tuple[LanguageModel, Tokenizer],
) -> None:
    model, tokenizer = tiny_model_and_tokenizer
    prompts = ["The king", "", "é 漢", "First Citizen:\n"]
    streamed = Streamed(4)
    completions = generate(
        model,
        tokenizer,
        prompts,
        max_tokens=60,
        sampling=SamplingParams(1.2),
        seed=fresh_seed(),
        stop_strings=["\n\n", " a"],
        on_text=streamed,
    )
    for row, completion in enumerate(completions):
        assert "".join(streamed.pieces[row]) == completion.text
        assert "\n\n" not in completion.text
        assert " a" not in completion.text
        assert completion.finish_reason == "stop" or len(completion.token_ids) == 60


def own_logprobs(model: LanguageModel, prompt: list[int], written: list[int]) -> torch.Tensor:
    """Log-softmax [written, vocab] of reading everything at once, before each written token."""
    ids = torch.tensor([prompt + written[:-1]])
    with torch.no_grad():
        hidden = model(
            ids, torch.arange(ids.shape[1])[None], torch.zeros_like(ids, dtype=torch.int32)
        )
        return model.lm_head(hidden)[0, len(prompt) - 1 :].log_softmax(-1)


def requests_of(seed: int, count: int) -> list[GenerationRequest]:
    """Unlike in everything."""
    draw = random.Random(seed)
    ways = [SamplingParams(), GREEDY, SamplingParams(0.7, top_k=9), SamplingParams(1.3, top_p=0.9)]
    return [
        GenerationRequest(
            prompt,
            draw.randrange(1, 20),
            draw.choice(ways),
            draw.randrange(2**40),
            frozenset({0, 1}),
            draw.randrange(4),
        )
        for prompt in random_prompts(seed, [draw.randrange(1, 20) for _ in range(count)])
    ]


def served(
    model: LanguageModel, requests: list[GenerationRequest], rows: int, draw: random.Random
) -> list[list[GeneratedToken]]:
    """What is written for each request, where they come in any order and at any step, into as many
    slots.
    """
    engine = Engine(model, vocab_size=97, max_batch_size=rows, max_length=40)
    coming = draw.sample(range(len(requests)), len(requests))
    numbers: dict[int, int] = {}
    written: list[list[GeneratedToken]] = [[] for _ in requests]
    while coming or engine.num_unfinished:
        while coming and engine.num_free_slots and draw.random() < 0.5:
            next_one = coming.pop()
            numbers[engine.add_request(requests[next_one])] = next_one
        assert engine.num_free_slots + engine.num_unfinished == rows
        for token in engine.step():
            written[numbers[token.request_id]].append(token)
    return written


@pytest.mark.parametrize("shape", SHAPES)
def test_a_request_depends_on_no_other_nor_on_its_slot_or_arrival(shape: str) -> None:
    seed = fresh_seed()
    model, requests, draw = (
        init_weights(build_model(ModelConfig(**SIZES | SHAPES[shape])), seed),
        requests_of(seed, 10),
        random.Random(seed),
    )
    alone = served(model, requests, 1, draw)
    for rows in (3, 10):
        for one, among in zip(alone, served(model, requests, rows, draw), strict=True):
            assert [(token.token_id, token.finish_reason) for token in one] == [
                (token.token_id, token.finish_reason) for token in among
            ]
            # The same sums, in products of another size.
            assert [token.logprob for token in one] == pytest.approx(
                [token.logprob for token in among], abs=1e-4
            )
    for request, tokens in zip(requests, alone, strict=True):
        ended = tokens[-1].token_id in request.stop_token_ids
        assert [token.finish_reason for token in tokens] == [None] * (len(tokens) - 1) + [
            "stop" if ended else "length"
        ]
        assert ended or len(tokens) == request.max_tokens


@pytest.mark.parametrize("shape", SHAPES)
def test_logprobs_are_those_of_the_full_forward(shape: str) -> None:
    seed = fresh_seed()
    model = init_weights(build_model(ModelConfig(**SIZES | SHAPES[shape])), seed)
    for temperature in (1.0, 0.0, 0.5):
        requests = [
            GenerationRequest(prompt, 12, SamplingParams(temperature), seed, frozenset(), 3)
            for prompt in random_prompts(seed, [1, 9, 20])
        ]
        for request, tokens in zip(
            requests, served(model, requests, 3, random.Random(seed)), strict=True
        ):
            own = own_logprobs(
                model, list(request.prompt_ids), [token.token_id for token in tokens]
            )
            expected = (own / (temperature or 1.0)).log_softmax(-1)
            for row, token in zip(expected, tokens, strict=True):
                # fp32 sums in another order.
                assert token.logprob == pytest.approx(float(row[token.token_id]), abs=2e-4)
                assert [logprob for _, logprob in token.top_logprobs] == pytest.approx(
                    row.topk(3).values.tolist(), abs=2e-4
                )
                assert [float(row[id]) for id, _ in token.top_logprobs] == pytest.approx(
                    row.topk(3).values.tolist(), abs=2e-4
                )


def test_top_logprobs_hold_only_tokens_that_can_be_sampled() -> None:
    model = init_weights(build_model(ModelConfig(**SIZES, intermediate_size=40)), 1)
    [[token]] = served(
        model,
        [GenerationRequest([5], 1, SamplingParams(1.0, top_k=2), 1, frozenset(), 5)],
        1,
        random.Random(0),
    )
    assert len(token.top_logprobs) == 2
    assert sum(math.exp(logprob) for _, logprob in token.top_logprobs) == pytest.approx(1)


def test_a_cancelled_request_frees_its_slot_and_does_not_change_the_others() -> None:
    seed = fresh_seed()
    model, requests = (
        init_weights(build_model(ModelConfig(**SIZES, intermediate_size=40)), seed),
        requests_of(seed, 4),
    )
    requests = [replace(request, max_tokens=12, stop_token_ids=frozenset()) for request in requests]
    alone = served(model, requests, 1, random.Random(seed))
    engine = Engine(model, vocab_size=97, max_batch_size=4, max_length=40)
    numbers = [engine.add_request(request) for request in requests[:3]]
    first = engine.step()
    engine.cancel(numbers[1])
    engine.cancel(numbers[1])
    late = engine.add_request(requests[3])
    never = engine.add_request(requests[1])
    engine.cancel(never)
    assert (engine.num_unfinished, engine.num_free_slots) == (3, 1)
    emitted = [*first]
    while engine.num_unfinished:
        emitted += engine.step()
    written = {
        number: [token.token_id for token in emitted if token.request_id == number]
        for number in (*numbers, late, never)
    }
    ids = [[token.token_id for token in tokens] for tokens in alone]
    assert written == {
        numbers[0]: ids[0],
        numbers[1]: ids[1][:1],
        numbers[2]: ids[2],
        late: ids[3],
        never: [],
    }
    assert engine.step() == []


def test_a_request_that_does_not_fit_is_refused() -> None:
    engine = Engine(
        init_weights(build_model(ModelConfig(**SIZES, intermediate_size=40)), 1),
        vocab_size=97,
        max_batch_size=1,
        max_length=10,
    )
    with pytest.raises(ValueError, match="an empty prompt"):
        engine.add_request(GenerationRequest([], 5, GREEDY, 0, frozenset()))
    with pytest.raises(
        UserError, match="6 prompt tokens and 5 new ones are 11, more than the 10 allowed"
    ):
        engine.add_request(GenerationRequest([1] * 6, 5, GREEDY, 0, frozenset()))
    engine.add_request(GenerationRequest([1] * 5, 5, GREEDY, 0, frozenset()))
    with pytest.raises(UserError, match="all 1 slots are taken"):
        engine.add_request(GenerationRequest([1], 1, GREEDY, 0, frozenset()))
    for _ in range(5):
        assert engine.num_unfinished == 1
        engine.step()
    assert engine.num_free_slots == 1


def test_each_of_several_samples_has_a_seed_of_its_own() -> None:
    model = init_weights(
        build_model(ModelConfig(**{**SIZES, "initializer_range": 0.02}, intermediate_size=40)), 1
    )
    settings: dict[str, Any] = {"vocab_size": 97, "max_tokens": 15, "sampling": SamplingParams()}
    completions = decode(model, [[5, 6], [7], [5, 6]], num_completions=3, seed=4, **settings)
    assert len(set(map(tuple, completions))) == 9
    assert decode(model, [[5, 6]], num_completions=2, seed=4, **settings) == completions[:2]
    assert decode(model, [[5, 6]], num_completions=2, seed=5, **settings) != completions[:2]


def test_completions_follow_the_order_of_their_prompts(
    spelling: Spelling, byte_tokenizer: Tokenizer
) -> None:
    completions = generate(
        spelling("abcd"), byte_tokenizer, ["a", "c"], max_tokens=9, sampling=GREEDY, seed=0
    )
    assert [completion.text for completion in completions] == ["bcd", "d"]
    assert [len(completion.logprobs) for completion in completions] == [4, 2]


@pytest.mark.usefixtures("token_by_token")
@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_greedy_tokens_are_those_of_transformers(model_type: str, tmp_path: Path) -> None:
    draw = random.Random(fresh_seed())
    torch.manual_seed(draw.randrange(2**31))
    # Positions scaled for long texts are transformers' own affair with generate, and it does not
    # limit Mamba-2's steps there; tests/core/model compares their logits.
    plain = {"time_step_limit": (0.0, math.inf)} | (
        {} if model_type == "gpt2" else {"rope_scaling": None}
    )
    config = drawn_config(model_type, draw, **plain)
    model = built(config)
    assert isinstance(model, LanguageModel)
    export_folder(model, config, tmp_path / "out")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out", **ONE_BY_ONE).eval()
    prompts = [
        [draw.randrange(config.vocab_size) for _ in range(draw.randrange(1, 25))] for _ in range(4)
    ]
    completions = decode(
        model, prompts, vocab_size=config.vocab_size, max_tokens=20, sampling=GREEDY
    )
    options: dict[str, Any] = {
        "max_new_tokens": 20,
        "do_sample": False,
        "eos_token_id": None,
        "pad_token_id": 0,
    }
    for prompt, ours in zip(prompts, completions, strict=True):
        ids = torch.tensor([prompt])
        reference = theirs.generate(ids, attention_mask=torch.ones_like(ids), **options)[
            0, len(prompt) :
        ].tolist()
        different = next(
            (at for at, pair in enumerate(zip(ours, reference, strict=True)) if pair[0] != pair[1]),
            None,
        )
        # A tie: another order of summing may choose either, and the texts differ from there on.
        if different is not None:
            own = own_logprobs(model, prompt, reference[: different + 1])[-1]
            assert abs(float(own[ours[different]] - own[reference[different]])) < 1e-4
