"""Decoding steps on a GPU as CUDA graphs: recorded once for a shape, then started by one call instead of hundreds.

A step computes one token of each sequence: so little that the host, which launches its kernels one by one, takes longer than
the GPU. A graph has fixed shapes and addresses, so sequences are padded to a power of two, and the slots of the cache that are
read to a power of two from MIN_SLOTS on. What pads reads token 0 at position 0 of sequences that are not in use.
"""

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

# (tokens int64 [sequences], positions int64 [sequences], slots) → hidden states [sequences, hidden_size].
DecodeStep = Callable[[Tensor, Tensor, int], Tensor]
Recorder = Callable[[Callable[[], Tensor]], Callable[[], Tensor]]

MIN_SLOTS = 256


class DecodeGraphs:
    """A step, recorded for each shape when it comes for the second time: the first prepares what a recording needs.

    What computes the step is not kept: it holds the KV cache and this object, and both would wait for the garbage collector.

    At most `batch_size` sequences of `max_length` tokens. Where recording fails, steps are computed as they would be without
    it, and one line says why.
    """

    def __init__(self, batch_size: int, max_length: int, device: torch.device, record: Recorder | None = None) -> None:
        self._batch_size, self._max_length = batch_size, max_length
        self._record = record or _CudaRecorder()
        self._tokens = torch.zeros(batch_size, dtype=torch.long, device=device)
        self._positions = torch.zeros(batch_size, dtype=torch.long, device=device)
        self._recorded: dict[tuple[int, int], Callable[[], Tensor] | None] = {}
        self._failed = False

    def shape(self, sequences: int, longest: int) -> tuple[int, int]:
        """(sequences, slots) to compute where the longest sequence has `longest` tokens before this step."""
        slots = max(MIN_SLOTS, _power_of_two(longest + 1))
        return min(self._batch_size, _power_of_two(sequences)), min(self._max_length, slots)

    def step(self, decode: DecodeStep, tokens: Tensor, positions: Tensor, longest: int) -> Tensor:
        """Hidden states [sequences, hidden_size] of the next token of each sequence; both tensors int64 [sequences].

        `decode` is the same function each time.
        """
        count, (rows, slots) = len(tokens), self.shape(len(tokens), longest)
        for kept, new in ((self._tokens, tokens), (self._positions, positions)):
            kept[:count] = new
            kept[count:rows] = 0

        def compute() -> Tensor:
            return decode(self._tokens[:rows], self._positions[:rows], slots)

        if (rows, slots) not in self._recorded:
            self._recorded[rows, slots] = None
            return compute()[:count]
        replay = self._recorded[rows, slots]
        if replay is None and not self._failed:
            try:
                replay = self._recorded[rows, slots] = self._record(compute)
            except RuntimeError as error:
                self._failed = True
                print(f"decoding without CUDA graphs: {str(error).splitlines()[0]}", file=sys.stderr, flush=True)
        # The graphs share their memory: the next one overwrites what this one returns.
        return (replay or compute)()[:count].clone()


class _CudaRecorder:
    """Records CUDA graphs that share one pool of memory."""

    def __init__(self) -> None:
        self._pool: Any = None

    def __call__(self, compute: Callable[[], Tensor]) -> Callable[[], Tensor]:
        graph = torch.cuda.CUDAGraph()
        # Other threads, such as those that copy batches, may use the GPU meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            output = compute()
        self._pool = graph.pool()

        def replay() -> Tensor:
            graph.replay()
            return output

        return replay


def is_sharded(model: Any) -> bool:
    """Whether this rank has only parts of the weights of `model`, or of the sequences."""
    return model.context_parallel is not None or any(isinstance(each, DTensor) for each in model.parameters())


def is_plain(model: Any) -> bool:
    """Whether its modules do no more than compute: no hooks, as FSDP's, no compiled and no checkpointed blocks."""
    blocks = (block._compiled_call_impl is None and "forward" not in vars(block) for block in model.blocks)
    return all(blocks) and not any(each._forward_pre_hooks for each in model.modules())


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()
