"""The thread that runs an engine for several requests, without a server."""

import asyncio
import threading
from collections.abc import Callable

import pytest
import torch

from lmforge.data.tokenizer import Tokenizer
from lmforge.generate.engine import Engine, GenerationRequest
from lmforge.generate.sampling import SamplingParams
from lmforge.model.layers import LanguageModel
from lmforge.serve.batching import ContinuousBatcher, EngineStopped, GenerationStream


def request(tokenizer: Tokenizer) -> GenerationRequest:
    return GenerationRequest(tokenizer.encode("H"), 20, SamplingParams(0.0), 0, frozenset({tokenizer.eos_token_id}))


def test_a_failed_step_raises_in_running_requests_and_stops_waiting_ones(
    byte_tokenizer: Tokenizer, spelling: Callable[[str], LanguageModel], capfd: pytest.CaptureFixture[str]
) -> None:
    model = spelling("Hi you")

    both_asked = threading.Event()

    def fail(module: torch.nn.Module, given: object) -> None:
        both_asked.wait(60)
        raise torch.OutOfMemoryError("no room")

    async def talk() -> None:
        engine = Engine(model, vocab_size=261, max_batch_size=1, max_length=50)
        batcher = ContinuousBatcher(engine, max_queue=2, loop=asyncio.get_running_loop())
        first = GenerationStream(batcher, byte_tokenizer, [request(byte_tokenizer)], ())
        assert "".join([piece.text async for piece in first.deltas()]) == "i you"
        failing = model.lm_head.register_forward_pre_hook(fail)
        answers = [GenerationStream(batcher, byte_tokenizer, [request(byte_tokenizer)], ()) for _ in range(2)]
        both_asked.set()
        with pytest.raises(torch.OutOfMemoryError):
            assert [piece async for piece in answers[0].deltas()] == []
        with pytest.raises(EngineStopped):
            assert [piece async for piece in answers[1].deltas()] == []
        failing.remove()
        batcher.join()
        assert batcher.stopped
        assert batcher.request_counts == (0, 0)
        with pytest.raises(EngineStopped):
            GenerationStream(batcher, byte_tokenizer, [request(byte_tokenizer)], ())

    asyncio.run(talk())
    assert "no room" in capfd.readouterr().err
