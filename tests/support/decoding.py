"""Token ids from an engine for tests whose models have no tokenizer."""

from collections.abc import Sequence

from lmforge.core.data.order import derive_key
from lmforge.core.model.layers import LanguageModel
from lmforge.serve.decoding.engine import Engine, GenerationRequest
from lmforge.serve.decoding.sampling import SamplingParams


def decode(
    model: LanguageModel,
    prompts: Sequence[Sequence[int]],
    *,
    vocab_size: int,
    max_tokens: int,
    sampling: SamplingParams,
    seed: int = 0,
    stop_ids: frozenset[int] = frozenset(),
    num_completions: int = 1,
) -> list[list[int]]:
    """The tokens of `num_completions` completions of each prompt, all in one batch, seeded as
    `generate` does.
    """
    longest = max(map(len, prompts))
    batch_size = num_completions * len(prompts)
    engine = Engine(
        model, vocab_size=vocab_size, max_batch_size=batch_size, max_length=longest + max_tokens
    )
    completions: dict[int, list[int]] = {}
    for number, prompt in enumerate(prompts):
        for sample in range(num_completions):
            own_seed = derive_key(seed, "completion", number, sample)
            completions[
                engine.add_request(
                    GenerationRequest(prompt, max_tokens, sampling, own_seed, stop_ids)
                )
            ] = []
    while engine.num_unfinished:
        for token in engine.step():
            completions[token.request_id].append(token.token_id)
    return list(completions.values())
