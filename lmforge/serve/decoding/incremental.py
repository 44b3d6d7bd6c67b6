"""Incremental decoding: several sequences that grow by a token at a time, with each token computed
once.

Sequences join and leave while others continue; they are numbered 0, 1, … in the order in which they
joined. Sampling the next token is in serve/decoding/.

On a GPU a decoding step is a CUDA graph: recorded once for a shape, then started by one call
instead of hundreds. It computes one token of each sequence: so little that the host, which launches
kernels one by one, takes longer than the GPU. A graph has fixed shapes and addresses, so sequences
are padded to a power of two, and the slots of the cache that are read to a power of two from
MIN_SLOTS on. What pads reads token 0 at position 0 of sequences that are not in use.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.utils.rnn import pad_sequence

from lmforge.core.model.attention import DecodeGroup, KVCache
from lmforge.core.model.init_weights import named_tensors
from lmforge.core.model.lora import add_lora

# Sequences are computed together where the shortest has at least this fraction of the longest one's
# tokens.
MIN_LENGTH_RATIO = 0.75
# With more tokens at once, activations take more memory than keys and values, and the speed does
# not increase.
MAX_GROUP_TOKENS = 1 << 14
# Attention in more groups than this is slower than attention over empty slots, on a CPU.
MAX_GROUPS = 8
# (tokens int64 [sequences], positions int64 [sequences], slots) → hidden states [sequences,
# hidden_size].
DecodeStep = Callable[[Tensor, Tensor, int], Tensor]
Recorder = Callable[[Callable[[], Tensor]], Callable[[], Tensor]]

MIN_SLOTS = 256


def incremental_decoder(
    model: Any,
    batch_size: int,
    max_length: int,
    *,
    device: torch.device,
    dtype: torch.dtype,
    **options: Any,
) -> Any:
    """A decoder of a model, wrapped ones too: their own; for arguments see `IncrementalDecoder`."""
    decoder: Callable[..., Any] = getattr(
        model, "incremental_decoder", partial(IncrementalDecoder, model)
    )
    return decoder(batch_size, max_length, device=device, dtype=dtype, **options)


class IncrementalDecoder:
    """At most `batch_size` sequences of at most `max_length` tokens, with a KV cache in `dtype`.

    Raises UserError where the model cannot compute that many tokens (learned positions).
    """

    def __init__(
        self,
        model: Any,
        batch_size: int,
        max_length: int,
        *,
        device: torch.device,
        dtype: torch.dtype,
        records_experts: bool = False,
    ) -> None:
        """`records_experts`: of what it computes, `take_experts` returns the experts; without CUDA
        graphs, slower.
        """
        self._is_sharded, autocast = is_sharded(model), torch.is_autocast_enabled(device.type)
        self._model = (
            model
            if self._is_sharded or (is_plain(model) and not autocast)
            else _plain_copy(model, dtype)
        )
        # What autocast still casts must not stay in its cache: a recorded step has its own memory.
        self._autocast = torch.autocast(
            device.type, dtype=dtype, enabled=autocast, cache_enabled=self._is_sharded
        )
        self._cache = KVCache(model.config, batch_size, max_length, device=device, dtype=dtype)
        self._device = device
        self._graphs = (
            DecodeGraphs(batch_size, max_length, device)
            if device.type == "cuda" and not self._is_sharded
            else None
        )
        # By layer; None where a block has no mixture.
        self._mixtures = [
            next((each for each in block.children() if hasattr(each, "recorded")), None)
            for block in self._model.blocks
            if records_experts
        ]
        self._experts: list[Tensor] = []
        if records_experts:
            self._graphs = None
        self._lengths: list[int] = []
        self._positions = torch.zeros(0, dtype=torch.long, device=device)

    def prefill(self, prompts: Sequence[Sequence[int]]) -> Tensor:
        """Compute prompts as new sequences after the others; hidden states of each last token
        [prompts, hidden_size].

        Prompts sorted by length are computed with little padding.
        """
        first, groups = len(self._lengths), group_by_length([*map(len, prompts)])
        hidden = [self._prefill_group(first + start, prompts[start:stop]) for start, stop in groups]
        self._lengths += map(len, prompts)
        self._positions = torch.tensor(self._lengths, device=self._device)
        return torch.cat(hidden)

    def _prefill_group(self, first: int, prompts: Sequence[Sequence[int]]) -> Tensor:
        tokens = pad_sequence([torch.tensor(prompt) for prompt in prompts], batch_first=True).to(
            self._device
        )
        last = torch.tensor([len(prompt) - 1 for prompt in prompts], device=self._device)
        sequences, length = tokens.shape
        positions = torch.arange(length, device=self._device).expand(sequences, -1)
        hidden = self._forward(first, tokens, positions, length, lengths=last + 1)
        if self._mixtures:
            padded = self._experts.pop()
            self._experts += [
                each[: len(prompt)] for each, prompt in zip(padded, prompts, strict=True)
            ]
        return hidden[torch.arange(sequences, device=self._device), last]

    def decode_step(self, tokens: Tensor) -> Tensor:
        """Compute the next token of every sequence, int64 [sequences]; returns hidden states
        [sequences, hidden_size].
        """
        longest = max(self._lengths)
        if self._graphs is not None and self._sees_all(self._graphs.shape(len(tokens), longest)[1]):
            hidden = self._graphs.step(self._padded_step, tokens, self._positions, longest)
        else:
            groups = [*group_by_length(self._lengths)] if self._device.type == "cpu" else []
            parts = [
                (group, self._lengths[slice(*group)])
                for group in groups
                if 1 < len(groups) <= MAX_GROUPS
            ]
            decode_groups = [
                DecodeGroup(*group, min(lengths), max(lengths)) for group, lengths in parts
            ]
            hidden = self._forward(
                0, tokens[:, None], self._positions[:, None], longest + 1, decode_groups
            )[:, 0]
            if self._mixtures:
                self._experts += self._experts.pop().unbind()
        self._lengths = [length + 1 for length in self._lengths]
        self._positions = self._positions + 1
        return hidden

    def _sees_all(self, slots: int) -> bool:
        """Whether a token may see this many slots in every layer.

        A recorded step reads all of them, while a window limits them.
        """
        return all(window is None or window >= slots for window in self._model.config.layer_windows)

    def _padded_step(self, tokens: Tensor, positions: Tensor, slots: int) -> Tensor:
        """One token of each of the first sequences, which see at most `slots`.

        The computation does not depend on their lengths.
        """
        return self._forward(0, tokens[:, None], positions[:, None], slots)[:, 0]

    def _forward(
        self,
        first: int,
        tokens: Tensor,
        positions: Tensor,
        end: int,
        groups: Sequence[DecodeGroup] = (),
        lengths: Tensor | None = None,
    ) -> Tensor:
        cache = self._cache.view(first, positions, end, groups, lengths)
        with torch.inference_mode(not self._is_sharded), self._autocast:
            for mixture in self._mixtures:
                if mixture is not None:
                    mixture.recorded = []
            hidden: Tensor = self._model(
                tokens, positions, torch.zeros_like(tokens, dtype=torch.int32), cache
            )
            if self._mixtures:
                self._record_experts(tokens)
        return hidden

    def _record_experts(self, tokens: Tensor) -> None:
        shape = *tokens.shape, len(self._mixtures), self._model.config.num_experts_per_tok
        experts = torch.zeros(shape, dtype=torch.int32, device=tokens.device)
        for layer, mixture in enumerate(self._mixtures):
            if mixture is not None:
                experts[:, :, layer] = mixture.recorded[0].int()
                mixture.recorded = None
        self._experts.append(experts.cpu())

    def take_experts(self) -> list[Tensor]:
        """int32 [tokens, layers, experts of a token] of each sequence, in the order of the hidden
        states since the last call.

        0 in layers without a mixture. Empty unless it `records_experts`.
        """
        taken, self._experts = self._experts, []
        return taken

    def select_sequences(self, indices: Sequence[int]) -> None:
        """Keep only these sequences; they become 0, 1, … in this order."""
        moved = [(source, target) for target, source in enumerate(indices) if source != target]
        if moved:
            self._cache.copy_sequences(*zip(*moved, strict=True))
        self._lengths = [self._lengths[index] for index in indices]
        self._positions = torch.tensor(self._lengths, device=self._device)


def group_by_length(lengths: Sequence[int]) -> Iterator[tuple[int, int]]:
    """(start, stop) of consecutive sequences to be computed together: with similar lengths, and not
    too many tokens.
    """
    start, shortest, longest = 0, lengths[0], lengths[0]
    for index, length in enumerate(lengths):
        shortest, longest = min(shortest, length), max(longest, length)
        if shortest < MIN_LENGTH_RATIO * longest or (
            index > start and (index + 1 - start) * longest > MAX_GROUP_TOKENS
        ):
            yield start, index
            start, shortest, longest = index, length, length
    yield start, len(lengths)


def _plain_copy(model: Any, dtype: torch.dtype) -> Any:
    """Modules without hooks, compilation or checkpointing that share the parameters of `model`,
    unsharded. The matrices of its blocks are in `dtype`, as autocast would cast them for each
    token. Later changes of the model's weights may not be seen.
    """
    with torch.device("meta"):
        copy = model.config.new_module()
    if model.lora_config is not None:
        add_lora(copy, model.lora_config)
    parameters = {name: each.detach() for name, each in named_tensors(model)}
    matrices = {
        name: each
        for name, each in parameters.items()
        if name.startswith(model.blocks_name) and each.ndim >= 2 and not model.config.vector(name)
    }
    cast = {name for name, each in matrices.items() if each.is_floating_point()}
    copy.load_state_dict(
        {name: each.to(dtype) if name in cast else each for name, each in parameters.items()},
        strict=False,
        assign=True,
    )
    return copy


class DecodeGraphs:
    """A step, recorded for each shape when it comes for the second time: the first prepares what a
    recording needs.

    What computes the step is not kept: it holds the KV cache and this object, and both would wait
    for the garbage collector.

    At most `batch_size` sequences of `max_length` tokens. Where recording fails, steps are computed
    as they would be without it, and one line says why.
    """

    def __init__(
        self, batch_size: int, max_length: int, device: torch.device, record: Recorder | None = None
    ) -> None:
        self._batch_size, self._max_length = batch_size, max_length
        self._record = record or _CudaRecorder()
        self._tokens = torch.zeros(batch_size, dtype=torch.long, device=device)
        self._positions = torch.zeros(batch_size, dtype=torch.long, device=device)
        self._recorded: dict[tuple[int, int], Callable[[], Tensor] | None] = {}
        self._failed = False

    def shape(self, sequences: int, longest: int) -> tuple[int, int]:
        """(sequences, slots) to compute where the longest sequence has `longest` tokens before this
        step.
        """
        slots = max(MIN_SLOTS, _power_of_two(longest + 1))
        return min(self._batch_size, _power_of_two(sequences)), min(self._max_length, slots)

    def step(self, decode: DecodeStep, tokens: Tensor, positions: Tensor, longest: int) -> Tensor:
        """Hidden states [sequences, hidden_size] of the next token of each sequence; both tensors
        int64 [sequences].

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
                print(
                    f"decoding without CUDA graphs: {str(error).splitlines()[0]}",
                    file=sys.stderr,
                    flush=True,
                )
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
    return model.context_parallel is not None or any(
        isinstance(each, DTensor) for each in model.parameters()
    )


def is_plain(model: Any) -> bool:
    """Whether its modules do no more than compute: no hooks, as FSDP's, no compiled and no
    checkpointed blocks.
    """
    blocks = (
        block._compiled_call_impl is None and "forward" not in vars(block) for block in model.blocks
    )
    return all(blocks) and not any(each._forward_pre_hooks for each in model.modules())


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()
