"""The routes of `lmforge serve --weight_updates` for a trainer: ids in and out, and weights
replaced under requests.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import torch

from lmforge.core.data.tokenizer import Tokenizer
from lmforge.serve.decoding.weights_folder import write_weights
from tests.serve.conftest import Server
from tests.serve.decoding.conftest import Scripted

LENGTH = 4_000


def body(prompt: list[int], max_tokens: int, stop: list[int]) -> dict[str, object]:
    params = {
        "temperature": 0,
        "max_tokens": max_tokens,
        "stop_token_ids": stop,
        "ignore_eos": True,
        "logprobs": 0,
    }
    return {"token_ids": prompt, "sampling_params": params}


def test_a_request_in_flight_goes_on_with_new_weights_and_says_which_token_is_of_which(
    serving: Callable[..., Server],
    models: Path,
    scripted: Scripted,
    byte_tokenizer: Tokenizer,
    tmp_path: Path,
) -> None:
    server = serving(models / "endless", "--weight_updates", "--max_length", LENGTH)
    a, b, c = byte_tokenizer.encode("abc")
    model = scripted({a: c, b: c})
    tensors = dict(model.named_parameters())
    with torch.no_grad():
        write_weights(
            tmp_path / "weights", tensors, model.config, lambda name: tensors[name].detach()
        )
    with ThreadPoolExecutor(1) as pool:
        # It ends with the first token of the new weights.
        long = pool.submit(server.ask, "/inference/v1/generate", body([a], LENGTH - 1, [c]))
        while server.ask("/health")[1]["running"] == 0:
            assert not long.done()
        assert server.ask("/inference/v1/generate", body([a], 1, []))[0] == 200  # a step of both
        assert server.ask("/pause?mode=keep", {}) == (200, {"status": "paused"})
        reload = {"method": "reload_weights", "kwargs": {"weights_path": str(tmp_path / "weights")}}
        assert server.ask("/collective_rpc", reload)[0] == 200
        assert server.ask("/update_weight_version", {"new_version": "second"})[0] == 200
        assert not long.done()
        assert server.ask("/resume", {})[0] == 200
        status, answer = long.result(timeout=60)
    assert status == 200
    [choice] = answer["choices"]
    *before, last = choice["token_ids"]
    assert (last, choice["finish_reason"]) == (c, "stop")
    assert all({left, right} == {a, b} for left, right in pairwise([a, *before]))
    spans = [(span["version"], span["start"], span["end"]) for span in choice["weight_versions"]]
    assert spans == [("default", 0, len(before)), ("second", len(before), len(before) + 1)]


def test_weights_that_do_not_fit_leave_a_server_as_it_is(
    weights_server: Server, models: Path, byte_tokenizer: Tokenizer, tmp_path: Path
) -> None:
    server = weights_server
    a, b = byte_tokenizer.encode("ab")
    for folder, words in (
        (models / "noise", "does not fit the weights"),
        (
            tmp_path / "nowhere",
            "no such folder on this host; name one that trainer and servers share",
        ),
    ):
        reload = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
        status, answer = server.ask("/collective_rpc", reload)
        assert status == 400
        assert words in answer["error"]["message"]
    status, answer = server.ask("/inference/v1/generate", body([a], 4, []))
    assert (status, answer["choices"][0]["token_ids"]) == (200, [b, a, b, a])
    assert (
        server.ask("/pause", {})[1]["error"]["message"]
        == "mode: abort is not supported; use ?mode=keep"
    )
