"""The thread that drives an engine for many, without a server around it."""

import asyncio
import threading
from collections.abc import Callable

import pytest
import torch

from lmforge.data.tokenizer import Tokenizer
from lmforge.infer.batching import Answer, Batcher, Ended
from lmforge.infer.engine import Engine, Request
from lmforge.infer.sampling import Sampling
from lmforge.model.layers import LanguageModel


def request(tokenizer: Tokenizer) -> Request:
    return Request(tokenizer.encode("H"), 20, Sampling(0.0), 0, frozenset({tokenizer.separator_id}))


def test_a_step_that_fails_is_told_to_those_it_was_for_and_those_who_wait_may_ask_again(
    byte_tokenizer: Tokenizer, spelling: Callable[[str], LanguageModel], capfd: pytest.CaptureFixture[str]
) -> None:
    model = spelling("Hi you")

    both_asked = threading.Event()

    def fail(module: torch.nn.Module, given: object) -> None:
        both_asked.wait(60)
        raise torch.OutOfMemoryError("no room")

    async def talk() -> None:
        engine = Engine(model, vocab_size=261, rows=1, max_length=50)
        batcher = Batcher(engine, waiting=2, loop=asyncio.get_running_loop())
        first = Answer(batcher, byte_tokenizer, [request(byte_tokenizer)], ())
        assert "".join([piece.text async for piece in first.pieces()]) == "i you"
        failing = model.lm_head.register_forward_pre_hook(fail)
        answers = [Answer(batcher, byte_tokenizer, [request(byte_tokenizer)], ()) for _ in range(2)]
        both_asked.set()
        with pytest.raises(torch.OutOfMemoryError):
            assert [piece async for piece in answers[0].pieces()] == []
        with pytest.raises(Ended):
            assert [piece async for piece in answers[1].pieces()] == []
        failing.remove()
        batcher.join()
        assert batcher.ended
        assert batcher.counts == (0, 0)
        with pytest.raises(Ended):
            Answer(batcher, byte_tokenizer, [request(byte_tokenizer)], ())

    asyncio.run(talk())
    assert "no room" in capfd.readouterr().err
