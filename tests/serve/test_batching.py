"""The thread that runs an engine for several requests, without a server."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from lmforge.core.data.tokenizer import Tokenizer
from lmforge.core.errors import RunFailed, UserError
from lmforge.core.model.build import build_model
from lmforge.core.model.config import ModelConfig
from lmforge.core.model.init_weights import init_weights
from lmforge.core.model.layers import LanguageModel
from lmforge.serve.batching import ContinuousBatcher, EngineStopped, QueuedRequest
from lmforge.serve.decoding.engine import Engine, GeneratedToken, GenerationRequest
from lmforge.serve.decoding.sampling import SamplingParams
from tests.serve.decoding.conftest import Scripted

LENGTH = 12


def request(prompt: Sequence[int], max_tokens: int = LENGTH) -> GenerationRequest:
    return GenerationRequest(
        prompt, max_tokens, SamplingParams(1.0, repetition_penalty=1.3), 5, frozenset()
    )


def generate(
    model: LanguageModel, requests: Sequence[GenerationRequest], with_experts: bool = False
) -> list[list[GeneratedToken] | Exception]:
    """Of each request its tokens, or the error that it ended with.

    They come together, and 4 are decoded at a time.
    """

    async def read(queued: QueuedRequest) -> list[GeneratedToken] | Exception:
        tokens: list[GeneratedToken] = []
        while not tokens or tokens[-1].finish_reason is None:
            _, event = await queued.token_queue.get()
            if isinstance(event, Exception):
                return event
            tokens.append(event)
        return tokens

    async def talk() -> list[list[GeneratedToken] | Exception]:
        sizes = {"vocab_size": model.config.vocab_size, "max_batch_size": 4, "max_length": 40}
        engine = Engine(model, return_routed_experts=with_experts, **sizes)
        batcher = ContinuousBatcher(engine, max_queue=9, loop=asyncio.get_running_loop())
        queued = [QueuedRequest(each, 0, asyncio.Queue()) for each in requests]
        batcher.submit(queued)
        try:
            return await asyncio.gather(*map(read, queued))
        finally:
            assert (batcher.request_counts, batcher.stopped) == ((0, 0), False)
            batcher.stop()
            batcher.join()
            with pytest.raises(EngineStopped):
                batcher.submit(queued)

    return asyncio.run(talk())


def ids(tokens: list[GeneratedToken] | Exception) -> list[int]:
    assert isinstance(tokens, list), tokens
    return [each.token_id for each in tokens]


ERRORS = [
    UserError("too long"),
    RunFailed("damaged"),
    ValueError("shape"),
    IndexError("out of range"),
    KeyError("layer"),
]
ERRORS += [
    AssertionError(),
    NotImplementedError("kernel"),
    RuntimeError("device"),
    MemoryError(),
    torch.OutOfMemoryError(),
]
CASES = [(each, type(each).__name__, at) for each in ERRORS for at in ("prompt", "decoding")]
CASES += [(RunFailed(), "non-finite logits", at) for at in ("prompt", "decoding")]


@pytest.mark.parametrize(
    ("error", "cause", "at"), CASES, ids=[f"{cause}-{at}" for _, cause, at in CASES]
)
def test_an_error_of_decoding_ends_only_the_request_that_causes_it(
    error: Exception,
    cause: str,
    at: str,
    scripted: Scripted,
    byte_tokenizer: Tokenizer,
    capfd: pytest.CaptureFixture[str],
) -> None:
    a, b, c, x = byte_tokenizer.encode("abcx")
    model = scripted({a: b, b: a, c: x})

    def fail(module: torch.nn.Module, given: tuple[Tensor]) -> None:
        if x in given[0].argmax(-1):  # the embedding is the identity
            raise error

    if cause == "non-finite logits":
        with torch.no_grad():
            model.embeddings[0].weight[x] = torch.nan
    else:
        model.lm_head.register_forward_pre_hook(fail)
    good = [request([a]), request([b, b, b], 7), request([a, b], 1)]
    alone = [ids(generate(model, [each])[0]) for each in good]
    assert [*map(len, alone)] == [LENGTH, 7, 1]
    # Three beside it, and one that waits.
    first, ended, *others = generate(
        model, [good[0], request([a, x if at == "prompt" else c]), *good[1:], good[0]]
    )
    assert [ids(each) for each in (first, *others)] == [*alone, alone[0]]
    assert type(ended) is type(error)
    assert capfd.readouterr().err.count("Traceback") == 1


def test_requests_that_are_too_many_together_are_decoded_in_smaller_batches() -> None:
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    experts = {
        "model_type": "qwen3_moe",
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
    }
    model = init_weights(
        build_model(ModelConfig(vocab_size=90, initializer_range=0.4, **sizes, **experts)), 1
    )
    prompts = [[number, 7, 8, 9][: 1 + number % 4] for number in range(1, 7)]
    requests = [replace(request(prompt), seed=seed) for seed, prompt in enumerate(prompts)]
    alone = [generate(model, [each], with_experts=True)[0] for each in requests]
    batches: list[int] = []

    def fail(module: torch.nn.Module, given: tuple[Tensor]) -> None:
        batches.append(len(given[0]))
        if len(given[0]) > 2:
            raise torch.OutOfMemoryError

    model.lm_head.register_forward_pre_hook(fail)
    together = generate(model, requests, with_experts=True)
    assert 2 in batches
    # A batch is too large once for each request that ends, and the first time.
    assert sum(size > 2 for size in batches) <= 1 + len(requests)
    for ours, theirs in zip(together, alone, strict=True):
        assert ids(ours) == ids(theirs)
        assert len(set(ids(ours))) > 6
        assert isinstance(ours, list)
        assert isinstance(theirs, list)
        for one, other in zip(ours, theirs, strict=True):
            assert one.routed_experts is not None
            assert torch.equal(one.routed_experts, other.routed_experts)
            assert one.logprob == pytest.approx(other.logprob, rel=1e-4)
