"""`lmforge serve`, used with OpenAI's client and with plain HTTP."""

import json
import math
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from pydantic import BaseModel, ValidationError
from starlette.routing import Route
from transformers import AutoModelForCausalLM, AutoTokenizer

from lmforge.cli import run as command
from lmforge.core.data.tokenizer import Tokenizer
from lmforge.core.records.runs import Run
from lmforge.serve.api import create_app
from lmforge.serve.decoding.engine import Engine, GenerationRequest
from lmforge.serve.decoding.model_loading import LoadedModel, load_model
from lmforge.serve.decoding.sampling import SamplingParams, draw_uniforms
from lmforge.serve.model_registry import ModelRegistry, ServingLimits
from lmforge.serve.protocol import (
    MAX_KEYS,
    UNSUPPORTED_UNLESS,
    ApiError,
    ChatCompletionRequest,
    CompletionRequest,
    parse_request,
)
from lmforge.serve.token_api import GenerateRequest
from lmforge.text.chat.templates import ChatTemplate
from tests.seeds import fresh_seed
from tests.serve.conftest import Server
from tests.support.preloaded import preloaded

HI: list[Any] = [{"role": "user", "content": "Hi"}]
Serving = Callable[..., Server]


def refusal(answer: tuple[int, Any]) -> tuple[int, str]:
    """Status and message of an answer that is OpenAI's error object, and nothing else."""
    status, body = answer
    assert body.keys() == {"error"}
    assert body["error"].keys() == {"message", "type", "param", "code"}
    return status, body["error"]["message"]


def test_a_chat_gets_one_response(server: Server) -> None:
    answer = server.client().chat.completions.create(model="hello", messages=HI, temperature=0)
    [choice] = answer.choices
    assert (choice.message.role, choice.message.content, choice.finish_reason) == (
        "assistant",
        "Hey <s>",
        "stop",
    )
    assert answer.usage
    assert answer.usage.completion_tokens == 8  # the token that ended it is one
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 8
    assert answer.model == "hello"
    assert abs(answer.created - time.time()) < 300


def test_the_parts_of_a_streamed_chat_make_the_same_text(server: Server) -> None:
    stream = server.client().chat.completions.create(
        model="hello",
        messages=HI,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    *chunks, last = stream
    assert chunks[0].choices[0].delta.role == "assistant"
    assert len(chunks) > 7
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "Hey <s>"
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + [
        "stop"
    ]
    assert len({chunk.id for chunk in chunks}) == 1
    assert last.choices == []
    assert last.usage
    assert last.usage.completion_tokens == 8


def test_a_stream_ends_with_done(server: Server) -> None:
    lines = raw_stream(
        server,
        "/v1/completions",
        {"model": "endless", "prompt": "a", "max_tokens": 2, "stream": True},
    )
    assert [line[:6] for line in lines] == ["data: "] * len(lines)
    assert lines[-1] == "data: [DONE]"
    assert "".join(json.loads(line[6:])["choices"][0]["text"] for line in lines[:-1]) == "ba"


def raw_stream(server: Server, path: str, body: dict[str, Any]) -> list[str]:
    with connected(server, path, body) as connection:
        content = b""
        while not content.endswith(b"\r\n0\r\n\r\n"):
            content += connection.recv(65536) or pytest.fail("the connection was closed")
    return [
        line
        for line in content.decode().split("\r\n")
        if line.startswith("data: ")
        for line in [line.strip()]
    ]


def connected(server: Server, path: str, body: dict[str, Any]) -> socket.socket:
    """A connection with a request on its way."""
    host, _, port = server.url.removeprefix("http://").rpartition(":")
    connection = socket.create_connection((host, int(port)), timeout=60)
    content = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\nContent-Length:"
        f" {len(content)}\r\n"
    )
    connection.sendall(f"{head}Authorization: Bearer sesame\r\n\r\n".encode() + content)
    return connection


def test_prompts_are_one_or_several_texts_or_lists_of_ids(
    server: Server, byte_tokenizer: Tokenizer
) -> None:
    create = server.client().completions.create
    requested: dict[str, Any] = {"model": "endless", "max_tokens": 3, "temperature": 0}
    whole = create(prompt="a", **requested)
    assert (whole.choices[0].text, whole.choices[0].finish_reason) == ("bab", "length")
    several = create(prompt=["a", "b", "a"], **requested)
    assert [choice.text for choice in several.choices] == ["bab", "aba", "bab"]
    assert several.usage
    assert (several.usage.prompt_tokens, several.usage.completion_tokens) == (3, 9)
    ids = byte_tokenizer.encode("ab")
    assert create(prompt=ids, **requested).choices[0].text == "aba"
    assert [choice.text for choice in create(prompt=[ids, ids[:1]], **requested).choices] == [
        "aba",
        "bab",
    ]


def distance_from_an_edge(
    opened: LoadedModel, messages: list[Any], seed: int, max_tokens: int
) -> float:
    """How near the random numbers of a request at temperature 1 come to those that would draw
    another token.
    """
    template = ChatTemplate.from_tokenizer(opened.tokenizer)
    prompt_ids, size = template.encode_prompt(messages), opened.tokenizer.vocab_size
    engine = Engine(
        opened.model, vocab_size=size, max_batch_size=1, max_length=len(prompt_ids) + max_tokens
    )
    # The likeliest tokens are all: with them go their probabilities.
    engine.add_request(
        GenerationRequest(
            prompt_ids, max_tokens, SamplingParams(1.0), seed, template.stop_ids, size
        )
    )
    distances = []
    for uniform in draw_uniforms(seed, max_tokens).tolist():
        [token] = engine.step()
        probabilities = torch.zeros(size, dtype=torch.float64)
        for id, logprob in token.top_logprobs:
            probabilities[id] = math.exp(logprob)
        after = probabilities.cumsum(0) / probabilities.sum()
        before = after - probabilities / probabilities.sum()
        # The draw is understood.
        assert before[token.token_id] - 1e-5 < uniform < after[token.token_id] + 1e-5
        distances += [
            abs(uniform - float(before[token.token_id])),
            abs(float(after[token.token_id]) - uniform),
        ]
        if token.finish_reason:
            break
    return min(distances)


def test_eight_concurrent_requests_give_the_same_text_as_alone(
    server: Server, models: Path
) -> None:
    seed, redrawn = fresh_seed(), 0
    texts = ["x" * (1 + 7 * number) + str(seed + number) for number in range(8)]
    seeds = [seed + number for number in range(8)]
    opened = load_model(models / "noise", torch.device("cpu"), torch.float32)
    for number, text in enumerate(texts):
        # Beside others the last bits of a log-probability differ, by up to 4e-6: a number this near
        # draws either token.
        while (
            distance_from_an_edge(
                opened, [{"role": "user", "content": text}], seeds[number], 10 + 5 * number
            )
            < 1e-5
        ):
            seeds[number] += 8
            redrawn += 1
    print(f"drawn again: {redrawn}")
    assert redrawn <= 16

    def ask(number: int, temperature: float) -> tuple[str, str]:
        [choice] = (
            server.client()
            .chat.completions.create(
                model="noise",
                messages=[{"role": "user", "content": texts[number]}],
                temperature=temperature,
                seed=seeds[number],
                max_tokens=10 + 5 * number,
            )
            .choices
        )
        return str(choice.message.content), choice.finish_reason

    with ThreadPoolExecutor(8) as pool:
        for temperature in (0.0, 1.0):
            together = list(pool.map(ask, range(8), [temperature] * 8))
            assert together == [ask(number, temperature) for number in range(8)]
    assert len(set(together)) == 8


def test_n_samples_differ_and_a_seed_repeats_them(server: Server) -> None:
    def ask(seed: int | None) -> list[str | None]:
        answer = server.client().chat.completions.create(
            model="noise", messages=HI, n=4, seed=seed, max_tokens=12
        )
        assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
        return [choice.message.content for choice in answer.choices]

    first = ask(7)
    assert len(set(first)) == 4
    assert ask(7) == first
    assert ask(8) != first
    assert ask(None) != ask(None)
    assert ask(-7) != first


def test_samples_are_streamed_side_by_side(server: Server) -> None:
    requested: dict[str, Any] = {
        "model": "noise",
        "messages": HI,
        "n": 3,
        "seed": 5,
        "max_tokens": 12,
    }
    whole = server.client().chat.completions.create(**requested)
    texts = {0: "", 1: "", 2: ""}
    for chunk in server.client().chat.completions.create(**requested, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert list(texts.values()) == [choice.message.content for choice in whole.choices]


def test_logprobs_of_a_chat_are_those_of_the_engine(server: Server, models: Path) -> None:
    opened = load_model(models / "noise", torch.device("cpu"), torch.float32)
    template = ChatTemplate.from_tokenizer(opened.tokenizer)
    engine = Engine(opened.model, vocab_size=261, max_batch_size=1, max_length=100)
    engine.add_request(
        GenerationRequest(
            template.encode_prompt(HI), 6, SamplingParams(0.0), 0, template.stop_ids, 2
        )
    )
    expected = [token for _ in range(6) for token in engine.step()]
    answer = server.client().chat.completions.create(
        model="noise", messages=HI, temperature=0, max_tokens=6, logprobs=True, top_logprobs=2
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs
    assert logprobs.content
    for entry, token in zip(logprobs.content, expected, strict=True):
        assert bytes(entry.bytes or []) == opened.tokenizer.id_to_bytes(token.token_id)
        # Other matrix shapes, so other last bits.
        assert math.isclose(entry.logprob, token.logprob, abs_tol=1e-5)
        assert [bytes(other.bytes or []) for other in entry.top_logprobs] == [
            opened.tokenizer.id_to_bytes(id) for id, _ in token.top_logprobs
        ]


def test_logprobs_of_a_completion_have_the_offset_of_each_token(server: Server) -> None:
    answer = server.client().completions.create(
        model="endless", prompt="a", max_tokens=4, temperature=0, logprobs=1
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs
    assert (logprobs.tokens, logprobs.text_offset) == (["b", "a", "b", "a"], [0, 1, 2, 3])
    assert logprobs.token_logprobs
    assert logprobs.top_logprobs
    assert [
        top[token] for top, token in zip(logprobs.top_logprobs, logprobs.tokens, strict=True)
    ] == logprobs.token_logprobs


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_ends_the_answer_and_is_not_in_it(server: Server, stream: bool) -> None:
    body = {
        "model": "hello",
        "messages": HI,
        "temperature": 0,
        "stop": ["zz", "y <"],
        "logprobs": True,
        "stream": stream,
    }
    if not stream:
        _, answer = server.ask("/v1/chat/completions", body)
        [choice] = answer["choices"]
        assert (choice["message"]["content"], choice["finish_reason"]) == ("He", "stop")
        assert [token["token"] for token in choice["logprobs"]["content"]] == ["H", "e"]
    else:
        lines = raw_stream(server, "/v1/chat/completions", body)
        choices = [json.loads(line[6:])["choices"][0] for line in lines[:-1]]
        assert "".join(choice["delta"].get("content", "") for choice in choices) == "He"
        assert choices[-1]["finish_reason"] == "stop"
    assert server.is_idle()


def test_the_models_are_listed_with_the_checkpoints_of_a_run(
    server: Server, tiny_run: Path
) -> None:
    names = [model.id for model in server.client().models.list()]
    steps = [f"tiny/{Run(tiny_run).checkpoint_path(step).name}" for step in (6, 4, 2)]
    assert names == ["hello", "endless", "noise", "plain", "tiny", *steps]
    assert server.client().models.retrieve(steps[0]).id == steps[0]
    assert refusal(server.ask("/v1/models/none"))[0] == 404


def test_a_checkpoint_is_loaded_when_requested_and_others_are_unloaded(
    server: Server, tiny_run: Path
) -> None:
    create = server.client().completions.create
    requested: dict[str, Any] = {"prompt": "The king", "temperature": 0, "max_tokens": 12}
    texts = {
        step: (
            create(model=f"tiny/{Run(tiny_run).checkpoint_path(step).name}", **requested)
            .choices[0]
            .text
        )
        for step in (2, 4, 6)
    }
    assert create(model="tiny", **requested).choices[0].text == texts[6]
    assert len(set(texts.values())) > 1
    # Given up meanwhile, and opened again.
    assert create(model="hello", **requested).choices[0].text


BAD = [
    ({"model": "nobody"}, 404, "nobody: no such model; GET /v1/models lists them"),
    ({"messages": []}, 400, "messages: list should have at least 1 item after validation, not 0"),
    (
        {"messages": [{"role": "king", "content": "Hi"}]},
        400,
        "message 1: role 'king': expected one of ",
    ),
    (
        {"messages": [{"role": "assistant", "content": "", "tool_calls": 5}]},
        400,
        "message 1: tool_calls are not a list but int",
    ),
    ({"temperature": 3}, 400, "temperature: input should be less than or equal to 2"),
    ({"temperature": "hot"}, 400, "temperature: input should be a valid number"),
    ({"max_tokens": 0}, 400, "max_tokens: input should be greater than or equal to 1"),
    (
        {"stop": [""]},
        400,
        "stop: expected a text, or a list of at most 16 texts, none of them empty",
    ),
    ({"top_q": 1}, 400, "top_q: no such parameter"),
    ({"q" * 5000: 1}, 400, "q" * 80 + "… (5,000 characters): no such parameter"),
    ({"frequency_penalty": 1}, 400, "frequency_penalty: not supported, got 1"),
    ({"typical_p": 0.1}, 400, "typical_p: not supported, got 0.1"),
    ({"min_p": 2}, 400, "min_p: input should be less than or equal to 1"),
    ({"echo": True}, 400, "echo: not supported, got true"),
    ({"continue_final_message": True}, 400, "the last message is not the assistant's"),
    (
        {"add_generation_prompt": False},
        400,
        "add_generation_prompt: false only with continue_final_message",
    ),
    (
        {"messages": [{"role": "assistant", "content": " "}], "continue_final_message": True},
        400,
        "the last message is empty",
    ),
    ({"n": 9}, 400, "n: 9 texts in one request, and this server generates at most 8"),
    ({"max_tokens": 20_000}, 400, "this model takes at most 20000 tokens, and got "),
    ({"model": "plain"}, 400, "plain: "),
    ({"top_logprobs": 2}, 400, "top_logprobs: only with logprobs: true"),
    ({"stream_options": {"include_usage": True}}, 400, "stream_options: only with stream: true"),
    (
        {"max_tokens": 3, "max_completion_tokens": 4},
        400,
        "max_completion_tokens: another value than max_tokens",
    ),
    (
        {"chat_template_kwargs": {"messages": []}},
        400,
        "chat_template_kwargs: messages is not a variable of a template",
    ),
    (
        {"chat_template_kwargs": {"{tools}": 1, "tools": []}},
        400,
        "chat_template_kwargs: tools is not a variable",
    ),
    (
        {"messages": [{"role": "user", "content": "Hi", "images": ["x"]}]},
        400,
        'message 1: images: not supported, got ["x"]',
    ),
    (
        {
            "messages": [
                {
                    "role": "user",
                    "content": [{"type": "text", "text": "Hi", "image_url": {"url": "x"}}],
                }
            ]
        },
        400,
        "message 1: image_url: not supported",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "text": "x"}]}]},
        400,
        "message 1: type: not supported",
    ),
    (
        {"messages": [{"role": "user", "content": "Hi", "name": ["x"]}]},
        400,
        'message 1: name: expected a text, got ["x"]',
    ),
    (
        {"messages": [*HI, {"role": "assistant", "content": "Hi", "thinking": 1}]},
        400,
        "message 2: thinking: expected a text",
    ),
    (
        {"enable_thinking": True, "chat_template_kwargs": {"enable_thinking": False}},
        400,
        "enable_thinking: another value",
    ),
    (
        {"chat_template_kwargs": {"enable_thinkin": True}},
        400,
        "enable_thinkin: the model's chat template reads no such variable",
    ),
    (
        {"repetition_penalty": 1e-40},
        400,
        "repetition_penalty: input should be greater than or equal to 0.01",
    ),
    (
        {"stream": True, "stream_options": {"continuous_usage_stats": True}},
        400,
        "stream_options.continuous_usage_stats: ",
    ),
    ({"add_special_tokens": True}, 400, "add_special_tokens: not supported, got true"),
]


# What a request says where llama.cpp, vLLM, SGLang, TGI and Ollama take the same as without it.
OTHER_SERVERS_DEFAULTS: dict[str, Any] = json.loads("""{
    "dry_multiplier": 0.0, "dry_base": 1.75, "dry_allowed_length": 2, "dry_penalty_last_n": -1, "grammar": "", "lora": [],
    "dry_sequence_breakers": ["\\n", ":", "*"], "xtc_probability": 0.0, "xtc_threshold": 0.1, "mirostat": 0,
    "mirostat_tau": 5.0, "mirostat_eta": 0.1, "dynatemp_range": 0.0, "dynatemp_exponent": 1.0, "typical_p": 1.0,
    "samplers": ["dry", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature"], "repeat_last_n": 64, "n_keep": 0,
    "repeat_penalty": 1.0, "top_n_sigma": -1.0, "min_keep": 0, "n_probs": 0, "t_max_predict_ms": -1, "id_slot": -1,
    "response_fields": [], "timings_per_token": false, "post_sampling_probs": false, "reasoning_format": "none",
    "priority": 0, "detokenize": true, "bad_words": [], "include_reasoning": true, "add_special_tokens": false,
    "guided_json": null, "structured_outputs": null, "return_tokens_as_token_ids": false, "documents": null,
    "separate_reasoning": true, "stream_reasoning": true, "no_stop_trim": false, "return_hidden_states": false,
    "regex": null, "ebnf": null, "watermark": false, "details": false, "truncate": null, "keep_alive": "5m", "options": {}
}""")


@pytest.mark.parametrize(
    ("change", "status", "message"), BAD, ids=[str(change) for change, *_ in BAD]
)
def test_unsupported_requests_are_refused_by_name(
    server: Server, change: dict[str, Any], status: int, message: str
) -> None:
    refused = refusal(
        server.ask("/v1/chat/completions", {"model": "hello", "messages": HI} | change)
    )
    assert refused[0] == status
    assert message in refused[1]


def test_parameters_without_effect_are_accepted(server: Server) -> None:
    neutral = {
        "frequency_penalty": 0,
        "presence_penalty": 0.0,
        "logit_bias": {},
        "tools": [],
        "user": "me",
        "stop": None,
    }
    neutral |= {
        "min_p": 0.0,
        "top_k": -1,
        "verbosity": "medium",
        "repetition_penalty": 1.0,
        "echo": False,
        "min_tokens": 0,
    }
    neutral |= {
        "xtc_probability": 0,
        "tfs_z": 1.0,
        "return_token_ids": False,
        "spaces_between_special_tokens": True,
    }
    neutral |= {
        "chat_template_kwargs": {},
        "enable_thinking": True,
        "add_generation_prompt": True,
        "temperature": 0,
    }
    neutral |= {
        "chat_template_kwargs": {"unread": False, "enable_thinking": True},
        "logprobs": False,
        "top_logprobs": 0,
        "stream": False,
        "stream_options": None,
        **OTHER_SERVERS_DEFAULTS,
    }
    said = {
        "role": "assistant",
        "content": "Hey",
        "refusal": None,
        "annotations": [],
        "audio": None,
        "tool_calls": None,
    }
    body = {"model": "hello", "messages": [*HI, said, *HI], **neutral}
    status, answer = server.ask("/v1/chat/completions", body)
    assert (status, answer["choices"][0]["message"]["content"]) == (200, "Hey <s>")


def test_other_values_of_parameters_of_other_servers_are_refused_by_name() -> None:
    always_off = {name for name, neutral in UNSUPPORTED_UNLESS.items() if neutral is not None}
    assert len(always_off) > 60
    for name in always_off:
        with pytest.raises(ApiError, match=f"^{name}: not supported, got 0.5$") as refused:
            parse_request(ChatCompletionRequest, {"model": "hello", "messages": HI, name: 0.5})
        assert refused.value.body["error"]["param"] == name


def test_min_p_of_one_leaves_the_likeliest_token(server: Server) -> None:
    body = {"model": "noise", "messages": HI, "max_tokens": 12}
    [least, greedy] = [
        server.ask("/v1/chat/completions", body | given)[1]["choices"]
        for given in ({"min_p": 1}, {"temperature": 0})
    ]
    assert least == greedy


def test_a_template_gets_its_variables_and_a_final_message_is_continued(
    server: Server, models: Path
) -> None:
    """The prompts are those of transformers: the text after them is the one after its ids."""
    theirs = AutoTokenizer.from_pretrained(models / "noise")
    create, requested = (
        server.client().completions.create,
        {"model": "noise", "max_tokens": 12, "temperature": 0},
    )
    begun = [*HI, {"role": "assistant", "content": "Well then, "}]
    cases: list[tuple[list[Any], dict[str, Any], dict[str, Any]]] = [
        (HI, {}, {"add_generation_prompt": True}),
        (HI, {"enable_thinking": False}, {"add_generation_prompt": True, "enable_thinking": False}),
        (
            HI,
            {"chat_template_kwargs": {"enable_thinking": False}},
            {"add_generation_prompt": True, "enable_thinking": False},
        ),
        (
            begun,
            {"continue_final_message": True, "add_generation_prompt": False},
            {"continue_final_message": True},
        ),
    ]
    texts = []
    for messages, given, how in cases:
        ids = theirs.apply_chat_template(messages, tokenize=True, return_dict=False, **how)
        status, answer = server.ask(
            "/v1/chat/completions", {"messages": messages, **requested, **given}
        )
        assert status == 200, answer
        assert answer["usage"]["prompt_tokens"] == len(ids)
        texts.append(answer["choices"][0]["message"]["content"])
        assert texts[-1] == create(prompt=ids, **requested).choices[0].text
    assert texts[1] == texts[2]
    assert len(set(texts)) == 3


def test_an_echoed_prompt_has_the_logprobs_of_transformers(server: Server, models: Path) -> None:
    theirs = AutoModelForCausalLM.from_pretrained(models / "noise", dtype=torch.float32)
    ids = AutoTokenizer.from_pretrained(models / "noise")("The é<|end|> king")["input_ids"]
    with torch.no_grad():
        expected = theirs(torch.tensor([ids])).logits[0].log_softmax(-1)
    requested: dict[str, Any] = {
        "model": "noise",
        "max_tokens": 1,
        "temperature": 0,
        "logprobs": 2,
        "echo": True,
    }
    for prompt in (ids, "The é<|end|> king"):
        [choice] = server.client().completions.create(prompt=prompt, **requested).choices
        assert choice.text.startswith("The é<|end|> king")
        assert choice.logprobs
        logprobs, tops = choice.logprobs.token_logprobs or [], choice.logprobs.top_logprobs or []
        assert len(logprobs) == len(tops) == len(ids) + 1
        assert (logprobs[0], tops[0]) == (None, None)
        for at, id in enumerate(ids[1:]):
            assert logprobs[at + 1] == pytest.approx(float(expected[at, id]), abs=1e-4)
            assert max(tops[at + 1].values()) == pytest.approx(float(expected[at].max()), abs=1e-4)
        offsets = choice.logprobs.text_offset or []
        assert [choice.text[a:b] for a, b in pairwise(offsets) if b > a][:4] == list("The ")
        assert offsets[-1] == len("The é<|end|> king")
    lines = raw_stream(server, "/v1/completions", {**requested, "prompt": ids, "stream": True})
    assert "".join(json.loads(line[6:])["choices"][0]["text"] for line in lines[:-1]) == choice.text
    scored = server.client().completions.create(prompt=ids, **requested | {"max_tokens": 0})
    assert (scored.choices[0].text, scored.choices[0].finish_reason) == (
        "The é<|end|> king",
        "length",
    )
    assert scored.choices[0].logprobs
    assert scored.choices[0].logprobs.token_logprobs == choice.logprobs.token_logprobs[:-1]
    assert scored.usage
    assert (scored.usage.prompt_tokens, scored.usage.completion_tokens) == (len(ids), 0)
    status, message = refusal(
        server.ask("/v1/completions", {"model": "noise", "prompt": "The", "max_tokens": 0})
    )
    assert (status, message[:29]) == (400, "max_tokens: 0 only with echo,")
    [plain] = (
        server.client()
        .completions.create(model="noise", prompt="The", max_tokens=1, temperature=0, echo=True)
        .choices
    )
    assert plain.text.startswith("The")
    assert plain.logprobs is None


def test_each_of_several_prompts_is_continued_as_alone(serving: Serving, blank_model: Path) -> None:
    """An empty one is answered without the blank of its first word, and echoed with the token
    before it.
    """
    server = serving(blank_model, "--max_length", 8)
    requested: dict[str, Any] = {"model": "blank", "temperature": 0, "logprobs": 1, "max_tokens": 4}
    create = server.client().completions.create
    alone = [create(prompt=prompt, **requested).choices[0].text for prompt in ("", "a")]
    assert alone == ["b", " b"]
    assert [choice.text for choice in create(prompt=["", "a"], **requested).choices] == alone
    assert [choice.text for choice in create(prompt=["a", ""], n=2, **requested).choices] == [
        " b",
        " b",
        "b",
        "b",
    ]
    theirs = AutoTokenizer.from_pretrained(blank_model)
    [empty] = create(prompt="", echo=True, **requested | {"max_tokens": 1}).choices
    assert empty.logprobs
    assert (empty.logprobs.tokens, empty.logprobs.text_offset) == ([theirs.eos_token, " "], [0, 0])
    assert empty.logprobs.token_logprobs
    assert empty.logprobs.token_logprobs[0] is None
    # At the limit there is room for the log-probabilities of a prompt, and for no answer.
    [scored] = create(prompt="a" * 8, echo=True, **requested | {"max_tokens": 0}).choices
    assert scored.logprobs
    assert (scored.text, len(scored.logprobs.tokens or [])) == ("a" * 8, 8)
    body = {**requested, "prompt": "a" * 8, "echo": True}
    for count, words in (
        (8, "8 in the prompt and max_tokens = 1"),
        (9, "9 in the prompt, which leaves no room"),
    ):
        refused = server.ask("/v1/completions", {**body, "prompt": "a" * count, "max_tokens": 1})
        assert refusal(refused)[1].startswith(f"this model takes at most 8 tokens, and got {words}")


def test_a_prompt_and_a_stop_may_spell_special_tokens(server: Server, models: Path) -> None:
    prompt = "<|user|>Hi<|end|><|assistant|>"
    answer = server.client().completions.create(
        model="hello", prompt=prompt, stop=["<|end|>"], temperature=0
    )
    assert answer.usage
    theirs = AutoTokenizer.from_pretrained(models / "hello")
    assert answer.usage.prompt_tokens == len(theirs(prompt, add_special_tokens=False)["input_ids"])
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("Hey <s>", "stop")


def test_malformed_bodies_are_refused(server: Server) -> None:
    assert refusal(server.ask("/v1/completions", b"{nonsense"))[0] == 400
    assert refusal(server.ask("/v1/completions", b'{"model": "\\ud800"}'))[0] == 400
    assert refusal(server.ask("/v1/completions", b"[" * 100_000))[0] == 400
    assert (
        refusal(server.ask("/v1/completions", b"[1]"))[1] == "the body: expected an object, got [1]"
    )
    assert refusal(server.ask("/v1/completions", b"\xff\xfe"))[0] == 400
    assert refusal(server.ask("/v1/completions", {}, **{"content-type": "text/plain"}))[0] == 415
    assert refusal(server.ask("/v1/completions"))[0] == 405
    assert refusal(server.ask("/elsewhere")) == (404, "GET /elsewhere: no such route")
    assert refusal(server.ask("/v1/completions", {"model": "endless", "prompt": [999]}))[0] == 400
    assert refusal(server.ask("/v1/completions", {"model": "endless", "prompt": [[]]}))[0] == 400
    assert refusal(server.ask("/v1/completions", {"model": "endless", "prompt": []}))[0] == 400
    many = refusal(server.ask("/v1/completions", {"model": "endless", "prompt": ["a"] * 2000}))
    assert many[0] == 400
    assert "prompt: 2000 texts in one request, and this server generates at most" in many[1]


def test_without_a_key_only_loopback_hosts_are_accepted(server: Server) -> None:
    port = server.url.rpartition(":")[2]
    assert server.ask("/v1/models", Host=f"localhost:{port}")[0] == 200
    status, message = refusal(server.ask("/v1/models", Host=f"evil.example:{port}"))
    assert status == 403
    assert "evil.example" in message


@pytest.mark.parametrize(
    ("host", "is_ours"),
    [
        ("[::1]", True),
        ("[::1]:8000", True),
        ("127.0.0.1", True),
        ("127.0.0.1:8000", True),
        ("localhost", True),
        ("[::2]:8000", False),
        ("[::2]", False),
        ("evil.example", False),
        ("localhost.evil.example:80", False),
        ("", False),
    ],
)
def test_loopback_hosts_are_recognized_with_and_without_a_port(
    server: Server, host: str, is_ours: bool
) -> None:
    assert server.ask("/v1/models", Host=host)[0] == (200 if is_ours else 403)


def test_requests_beyond_the_queue_get_429_and_disconnects_free_their_slots(server: Server) -> None:
    body = {"model": "endless", "messages": HI, "temperature": 0, "stream": True}
    path = "/v1/chat/completions"
    with (
        connected(server, path, body | {"n": 8}) as running,
        connected(server, path, body | {"n": 2}) as waiting,
    ):
        assert running.recv(20)
        assert waiting.recv(20)
        status, message = refusal(server.ask(path, {"model": "endless", "messages": HI}))
        assert status == 429
        assert "try again later" in message
        with pytest.raises(openai.RateLimitError):
            server.client().chat.completions.create(model="endless", messages=HI)
    assert server.is_idle()


@pytest.mark.parametrize("stream", [False, True])
def test_a_disconnect_frees_the_slot(narrow_server: Server, stream: bool) -> None:
    body = {"model": "endless", "messages": HI, "stream": stream}
    with connected(narrow_server, "/v1/chat/completions", body) as connection:
        if stream:
            assert connection.recv(20)
        while narrow_server.ask("/health")[1]["running"] == 0:
            time.sleep(0.01)
    assert narrow_server.is_idle()
    answer = narrow_server.client("sesame").completions.create(
        model="endless", prompt="a", max_tokens=2, temperature=0
    )
    assert answer.choices[0].text == "ba"


def test_requests_without_the_key_get_401(narrow_server: Server) -> None:
    for key in ("", "open", "s\xe9same"):
        status, body = narrow_server.ask("/v1/models", key=key)
        assert (status, body["error"]["code"]) == (401, "invalid_api_key")
    with pytest.raises(openai.AuthenticationError):
        narrow_server.client("wrong").chat.completions.create(model="hello", messages=HI)
    assert [model.id for model in narrow_server.client("sesame").models.list()] == [
        "endless",
        "hello",
    ]
    assert narrow_server.ask("/health")[0] == 200


def test_every_route_but_the_page_and_health_needs_the_key(weights_server: Server) -> None:
    limits = ServingLimits(max_batch_size=1, max_queue=0, max_length=None, max_models=1)
    registry = ModelRegistry([], limits, torch.device("cpu"), torch.float32, warn=print)
    routes = [
        route
        for route in create_app(registry, 1, weight_updates=True).routes
        if isinstance(route, Route)
    ]
    asked = {
        (method, route.path.replace("{name:path}", "a"))
        for route in routes
        for method in route.methods or ()
    }
    is_open = {(method, path) for method in ("GET", "HEAD") for path in ("/", "/health")}
    assert asked > is_open
    assert {"/tokenize", "/pause", "/inference/v1/generate", "/v1/models"} < {
        path for _, path in asked
    }
    for key in ("", "wrong"):
        for method, path in asked - is_open | {
            ("GET", "/nowhere"),
            ("GET", "//health"),
            ("GET", "/health/"),
        }:
            assert weights_server.status(path, method=method, key=key) == 401, path
        assert {
            weights_server.status(path, method=method, key=key) for method, path in is_open
        } == {200}


@pytest.mark.parametrize(
    ("headers", "is_refused"),
    [
        ({"Origin": "http://evil.example"}, True),
        ({"Origin": "null"}, True),
        ({"Origin": "http://localhost:3000"}, True),
        ({"Sec-Fetch-Site": "cross-site"}, True),
        ({"Sec-Fetch-Site": "same-site"}, True),
        ({"Origin": "http://HERE", "Sec-Fetch-Site": "cross-site"}, True),
        ({"Origin": "http://HERE"}, False),
        ({"Origin": "https://HERE"}, False),  # a TLS proxy stands before the server
        ({"Origin": "https://proxy.example", "Host": "Proxy.Example:443"}, False),
        ({"Origin": "http://proxy.example:80", "Host": "proxy.example"}, False),
        ({"Origin": "http://proxy.example", "Host": "proxy.example:443"}, True),
        ({"Origin": "http://proxy.example"}, True),  # a proxy that passes on no Host
        # A proxy with a name of its own.
        ({"Origin": "https://proxy.example", "Sec-Fetch-Site": "same-origin"}, False),
        ({}, False),
    ],
)
def test_a_web_page_elsewhere_changes_nothing(
    weights_server: Server, headers: dict[str, str], is_refused: bool
) -> None:
    headers = {
        name: value.replace("HERE", weights_server.url.removeprefix("http://"))
        for name, value in headers.items()
    }
    # As a form of a page sends it, with the key and without.
    for path in ("/pause?mode=keep", "/resume"):
        for content_type in ("text/plain", "application/json"):
            answer = weights_server.ask(path, b"", **headers, **{"content-type": content_type})
            assert answer[0] == (403 if is_refused else 200)
    status, _ = weights_server.ask(
        "/v1/completions", {"model": "endless", "prompt": "a", "max_tokens": 1}, **headers
    )
    assert status == (403 if is_refused else 200)


@pytest.mark.parametrize(
    ("schema", "body"),
    [
        *(
            (CompletionRequest, {"model": "a", "prompt": [wrong] * 50_000})
            for wrong in (1.5, {}, [{}], [1.5], [[1]], None)
        ),
        (CompletionRequest, {"model": "a"} | {str(number): 0 for number in range(50_000)}),
        (
            CompletionRequest,
            {"model": "a", "stream_options": {str(number): 0 for number in range(50_000)}},
        ),
        *(
            (ChatCompletionRequest, {"model": "a", "messages": [wrong] * 50_000})
            for wrong in (1, {})
        ),
        *(
            (ChatCompletionRequest, {"model": "a", "messages": HI, "tools": [wrong] * 50_000})
            for wrong in (1, {})
        ),
        (GenerateRequest, {"token_ids": ["a"] * 50_000, "sampling_params": {}}),
        (
            GenerateRequest,
            {"token_ids": [1], "sampling_params": {"stop_token_ids": ["a"] * 50_000}},
        ),
    ],
)
def test_only_the_first_mistakes_of_a_body_are_looked_for(
    schema: type[BaseModel], body: dict[str, Any]
) -> None:
    """Each is an object that is made while no other thread runs."""
    with pytest.raises(ValidationError) as refused:
        schema.model_validate(body)
    assert refused.value.error_count() <= MAX_KEYS


def test_a_body_or_a_prompt_that_is_too_large_is_refused(narrow_server: Server) -> None:
    def ask(size: int) -> tuple[int, str]:
        return refusal(
            narrow_server.ask(
                "/v1/completions", {"model": "endless", "prompt": "a" * size}, key="sesame"
            )
        )

    assert ask(9_000) == (
        400,
        "this model takes at most 9000 tokens, and got 9000 in the prompt and max_tokens = 16",
    )
    assert ask(20_000) == (413, "the body is larger than 20,000 bytes")
    assert ask(500_000)[0] == 413


def test_a_model_is_not_loaded_while_all_loaded_models_are_busy(narrow_server: Server) -> None:
    body = {"model": "endless", "messages": HI, "stream": True}
    create = narrow_server.client("sesame").chat.completions.create
    with connected(narrow_server, "/v1/chat/completions", body) as connection:
        assert connection.recv(20)
        with pytest.raises(openai.InternalServerError) as refused:
            create(model="hello", messages=HI)
        assert refused.value.status_code == 503
    assert narrow_server.is_idle()
    assert create(model="hello", messages=HI, temperature=0).choices[0].message.content == "Hey <s>"


def test_sigterm_ends_the_server_and_the_running_requests(serving: Serving, models: Path) -> None:
    server = serving(models / "endless", "--max_length", 20_000)
    body = {"model": "endless", "messages": HI}
    answers: list[tuple[int, str]] = []
    whole = threading.Thread(
        target=lambda: answers.append(refusal(server.ask("/v1/chat/completions", body)))
    )
    whole.start()
    with connected(server, "/v1/chat/completions", body | {"stream": True}) as connection:
        while server.ask("/health")[1]["running"] < 2:
            time.sleep(0.01)
        server.process.send_signal(signal.SIGTERM)
        content = b""
        while more := connection.recv(65536):
            content += more
    last = json.loads(content.decode().split("data: ")[-1].split("\r\n")[0])
    assert last["error"]["code"] == "stopping"
    assert server.process.wait(timeout=60) == 0
    whole.join()
    assert answers[0][0] == 503


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_a_model_loads_ends_the_server(
    models: Path, tmp_path: Path, number: signal.Signals
) -> None:
    folder = tmp_path / "slow"
    shutil.copytree(models / "hello", folder)
    text = (folder / "tokenizer.json").read_bytes()
    (folder / "tokenizer.json").unlink()
    os.mkfifo(folder / "tokenizer.json")
    words = ["serve", str(folder), "--port", "0", "--device", "cpu"]
    process = subprocess.Popen(
        [sys.executable, "-m", "lmforge", *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    with open(folder / "tokenizer.json", "wb") as pipe:  # returns as soon as the server reads
        process.send_signal(number)
        with suppress(BrokenPipeError):
            pipe.write(text)
    try:
        output = process.communicate()
    finally:
        process.kill()
    assert output == (b"", b"")
    assert process.returncode == (128 + number if number == signal.SIGINT else -number)


def test_a_checkpoint_that_is_gone_is_not_listed(
    tiny_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that trains deletes checkpoints: here one goes after its name was read."""
    limits = ServingLimits(max_batch_size=1, max_queue=0, max_length=None, max_models=1)
    registry = ModelRegistry([tiny_run], limits, torch.device("cpu"), torch.float32, warn=print)
    listed = registry.list_models()
    monkeypatch.setattr(Run, "checkpoint_steps", lambda self: [2, 4, 6, 99])
    assert registry.list_models() == listed


@pytest.mark.slow
def test_a_checkpoint_that_comes_and_goes_while_models_are_listed_is_left_out(
    models: Path, tiny_run: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(tiny_run, run)
    limits = ServingLimits(max_batch_size=1, max_queue=0, max_length=None, max_models=1)
    registry = ModelRegistry(
        [run, models / "hello"], limits, torch.device("cpu"), torch.float32, warn=print
    )
    first, *others = [info.name for info in registry.list_models()]
    assert (first, others[-1]) == ("run", "hello")
    place, enough = Run(run).checkpoint_path(99), threading.Event()

    def come_and_go() -> None:
        while not enough.is_set():
            place.mkdir()
            place.rmdir()

    thread = threading.Thread(target=come_and_go)
    thread.start()
    try:
        seen = [
            {info.name for info in registry.list_models()} - {f"run/{place.name}"}
            for _ in range(1500)
        ]
    finally:
        enough.set()
        thread.join()
    assert all(names == {first, *others} for names in seen)


def test_options_of_a_server_that_cannot_start_are_refused_in_one_line(
    capfd: pytest.CaptureFixture[str],
    models: Path,
    tmp_path: Path,
    server: Server,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("LMFORGE_API_KEY", raising=False)
    port = server.url.rpartition(":")[2]
    for words, complaint in (
        (
            (models / "hello", "--host", "0.0.0.0"),
            "--host 0.0.0.0: others can reach this address; give an --api_key",
        ),
        ((models / "hello", "--api_key", ""), "--api_key (or LMFORGE_API_KEY): expected "),
        (
            (models / "hello", "--weight_updates"),
            (
                "--weight_updates: without a key any program here could replace the weights; first"
                " type export LMFORGE_API_KEY="
            ),
        ),
        (
            (models / "hello", "--port", port),
            f"127.0.0.1:{port}: Address already in use; choose another --port or --host",
        ),
        (
            (tmp_path / "none", "--port", 0),
            f"{tmp_path}/none: no such file or folder; give a run, a check",
        ),
        (
            (tmp_path, "--port", 0),
            f"{tmp_path}: a folder of no known kind; give a run, a checkpoint",
        ),
        ((), "--models: missing"),
    ):
        assert command(["serve", *map(str, words)]) == 2
        printed = capfd.readouterr()
        assert printed.out == ""
        assert printed.err.startswith(f"lmforge: {complaint}")
        assert printed.err.count("\n") == 1


def test_weights_without_a_key_are_warned_of(models: Path, tmp_path: Path) -> None:
    words = (
        "serve",
        models / "hello",
        "--weight_updates",
        "--without_key",
        "--port",
        0,
        "--device",
        "cpu",
    )
    process = preloaded().start(words, tmp_path)
    while "\n" not in process.out.read_text():
        assert process.poll() is None
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=60) == 0
    warning = "warning: --without_key: whoever reaches this server can use it and change it\n"
    assert process.errors.read_text() == warning


def test_the_client_in_the_docs_works(server: Server) -> None:
    manual = (Path(__file__).parents[2] / "docs" / "serving.md").read_text("utf-8")
    [example] = re.findall(r"^```py\n(.*?)^```$", manual, re.M | re.S)
    example = example.replace("http://127.0.0.1:8000", server.url).replace("smollm", "hello")
    done = subprocess.run(
        [sys.executable, "-c", example], capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stdout) == (0, "Hey <s>"), done.stderr
