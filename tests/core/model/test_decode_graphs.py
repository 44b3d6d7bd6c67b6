"""Recorded decoding steps: recorded operations depend only on tensors, and padding changes nothing.

A CPU has no CUDA graphs, so the operations are recorded by torch's tracer: like a graph, it keeps
each number of the host as it was when it was recorded.
"""

import gc
import weakref
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from lmforge.core.model.build import build_model
from lmforge.core.model.config import ModelConfig
from lmforge.core.model.init_weights import init_weights
from lmforge.core.model.layers import LanguageModel
from lmforge.core.parallel.activation_checkpointing import apply_activation_checkpointing
from lmforge.serve.decoding.incremental import (
    DecodeGraphs,
    IncrementalDecoder,
    incremental_decoder,
    is_plain,
)
from tests.seeds import fresh_seed
from tests.serve.decoding.test_engine import SHAPES, SIZES
from tests.support.grids import parametrize

CPU = torch.device("cpu")
BATCH, MAX_LENGTH = 5, 600


def traced(compute: Callable[[], Tensor]) -> Callable[[], Tensor]:
    return make_fx(compute)()


def model_of(shape: str) -> LanguageModel:
    long = {"max_position_embeddings": MAX_LENGTH} if shape == "gpt2" else {}
    return init_weights(build_model(ModelConfig(**SIZES, **{**SHAPES[shape], **long})), 1)


def decoder_of(model: LanguageModel) -> IncrementalDecoder:
    return incremental_decoder(model, BATCH, MAX_LENGTH, device=CPU, dtype=torch.float32)


def recording(
    model: LanguageModel, record: Callable[..., Callable[[], Tensor]]
) -> IncrementalDecoder:
    decoder = decoder_of(model)
    decoder._graphs = DecodeGraphs(BATCH, MAX_LENGTH, CPU, record)
    return decoder


@parametrize("shape", SHAPES, fast=(2, 3))
def test_recorded_steps_compute_what_others_do_while_sequences_join_grow_and_leave(
    shape: str,
) -> None:
    seed = fresh_seed()
    model = model_of(shape)
    recorded: list[torch.fx.GraphModule] = []
    replays = 0

    def record(compute: Callable[[], Tensor]) -> Callable[[], Tensor]:
        # A GPU records a step without computing it; here what it has kept is put back.
        kept = [each for layer in decoders[1]._cache.layers for each in layer]
        before = [each.clone() for each in kept]
        recorded.append(graph := traced(compute))
        for each, earlier in zip(kept, before, strict=True):
            each.copy_(earlier)

        def replay() -> Tensor:
            nonlocal replays
            replays += 1
            return graph()

        return replay

    generator = torch.Generator().manual_seed(seed)
    decoders = [decoder_of(model), recording(model, record)]

    def both(call: Callable[[IncrementalDecoder], Tensor]) -> None:
        with torch.no_grad():
            expected, result = map(call, decoders)
        torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-5)

    def steps(sequences: int, count: int) -> None:
        for _ in range(count):
            tokens = torch.randint(97, (sequences,), generator=generator)
            both(partial(IncrementalDecoder.decode_step, tokens=tokens))

    def prefill(*lengths: int) -> None:
        prompts = [torch.randint(97, (length,), generator=generator).tolist() for length in lengths]
        both(lambda decoder: decoder.prefill(prompts))

    prefill(3, 250)
    steps(2, 10)  # the longest needs more slots on the way
    prefill(7)
    steps(3, 4)
    for decoder in decoders:
        decoder.select_sequences([0, 2])
    steps(2, 5)
    prefill(1, 9, 20)
    steps(5, 4)
    if shape == "mistral, window 5":
        assert not recorded  # its window is read alone, not all slots
    else:
        # (2, 256), (2, 512), (4, 512) and (5, 256): the shape of five is that of the whole batch.
        # Each is computed once before.
        assert (len(recorded), replays) == (4, 23 - 4)


def test_a_recording_that_fails_is_reported_once_and_steps_continue(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fails(compute: Callable[[], Tensor]) -> Callable[[], Tensor]:
        raise RuntimeError("operation not permitted when stream is capturing\nand more")

    model = model_of("llama, grouped")
    plain, decoder = decoder_of(model), recording(model, fails)
    with torch.no_grad():
        for each in (plain, decoder):
            each.prefill([[1, 2, 3]])
        for token in (5, 6, 7, 8):
            torch.testing.assert_close(
                decoder.decode_step(torch.tensor([token])), plain.decode_step(torch.tensor([token]))
            )
    message = "decoding without CUDA graphs: operation not permitted when stream is capturing\n"
    assert capsys.readouterr().err == message


@pytest.mark.parametrize("fails", [False, True])
def test_the_cache_goes_with_its_decoder_and_does_not_wait_for_the_garbage_collector(
    fails: bool,
) -> None:
    def record(compute: Callable[[], Tensor]) -> Callable[[], Tensor]:
        if fails:
            raise RuntimeError("operation not permitted")
        output = compute()  # a graph keeps its output, and nothing of Python that computed it
        return lambda: output

    decoder = recording(model_of("llama, grouped"), record)
    cache, memory = weakref.ref(decoder._cache), weakref.ref(decoder._cache.layers[0][0])
    gc.disable()
    try:
        with torch.no_grad():
            decoder.prefill([[1, 2, 3]])
            for token in (5, 6, 7):
                decoder.decode_step(torch.tensor([token]))
        del decoder
        assert cache() is None
        assert memory() is None
    finally:
        gc.enable()


def test_models_with_hooks_compiled_or_checkpointed_blocks_are_computed_by_plain_modules() -> None:
    for change in (
        lambda model: model.blocks[0].register_forward_pre_hook(lambda module, args: None),
        lambda model: model.blocks[0].compile(),
        lambda model: apply_activation_checkpointing(model, "full"),
    ):
        model = model_of("llama, grouped")
        assert is_plain(model)
        assert decoder_of(model)._model is model
        change(model)
        assert not is_plain(model)
        decoder = decoder_of(model)
        assert is_plain(decoder._model)
        weights = dict(decoder._model.named_parameters())
        for name, parameter in model.named_parameters():
            assert name == "lm_head.weight" or weights[name].data_ptr() == parameter.data_ptr(), (
                name
            )
