"""A run whose completions a real vLLM samples: only in `make test-all`."""

import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from lmforge.cli import run as command
from lmforge.core.data.batch import Batch
from lmforge.core.data.tokenizer import Tokenizer
from lmforge.core.losses.logprobs import label_logprobs
from lmforge.core.model.build import build_model
from lmforge.core.model.config import ModelConfig
from lmforge.core.model.init_weights import init_weights
from lmforge.hf.export import export_folder
from lmforge.post.rl.engines.rollout_server import RolloutServer
from lmforge.post.rl.journal import SEQUENCE_TENSORS
from lmforge.post.rl.sampler import SampleRequest, SamplingSettings
from lmforge.serve.decoding.model_loading import load_model
from lmforge.serve.decoding.prompts import scored_logits
from tests.post.rl.test_staleness import (
    STEPS,
    assert_equals_its_journal,
    assert_not_older_than,
    versions_of,
)
from tests.post.rl.vllm_server import vllm_server

VOCAB_SIZE, LENGTH = 261, 64


@pytest.fixture(scope="module")
def wide(byte_tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of a model with heads of 32 numbers: vLLM's attention on a CPU takes no smaller
    ones.
    """
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("wide")
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    config = ModelConfig(
        vocab_size=VOCAB_SIZE,
        num_attention_heads=2,
        num_key_value_heads=1,
        initializer_range=0.2,
        **sizes,
    )
    byte_tokenizer.save(folder / "tokenizer")
    model = init_weights(build_model(config), 1)
    export_folder(model, config, folder / "wide", tokenizer_folder=folder / "tokenizer")
    return folder / "wide"


@pytest.fixture(scope="module")
def url(wide: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with vllm_server(wide, tmp_path_factory.mktemp("vllm") / "log", max_length=LENGTH) as url:
        yield url


@pytest.fixture
def by_vllm(wide: Path, grpo: Callable[..., list[str]], url: str) -> Callable[..., list[str]]:
    return partial(
        grpo,
        "run",
        "--model.source",
        wide,
        "--rollout.engine",
        "vllm",
        "--rollout.engine_urls",
        url,
    )


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_run_is_sampled_by_vllm_with_the_log_probabilities_of_the_trainer(
    wide: Path, by_vllm: Callable[..., list[str]], url: str, tmp_path: Path
) -> None:
    # The ratio of the first update is that of the trainer's probabilities and vLLM's, for the
    # weights of each step.
    assert command(by_vllm(steps=3)) == 0
    records = [
        json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    assert [record["ratio"] for record in records] == pytest.approx([1.0] * 3, abs=1e-4)

    settings = SamplingSettings(1.0, 1.0, VOCAB_SIZE, LENGTH, frozenset({0}), 8)
    server = RolloutServer(url, "vllm", settings, 120, None)
    server.load(wide, "first")
    model = load_model(wide, torch.device("cpu"), torch.float32).model
    for seed in range(4):
        prompt = [97 + seed, 98, 99]
        sampled = server.sample(SampleRequest(0, prompt, 24, seed), settings.params(greedy=False))
        assert {*sampled.versions} == {"first"}
        [(logits, ids)] = scored_logits(
            model, [([*prompt, *sampled.token_ids], len(sampled.token_ids))]
        )
        ours = logits.log_softmax(-1).gather(1, ids[:, None])[:, 0]
        assert sampled.logprobs == pytest.approx(ours.tolist(), abs=1e-4)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_vllm_samples_ahead_while_its_weights_are_replaced_and_a_run_resumes_as_its_journal_says(
    by_vllm: Callable[..., list[str]], tmp_path: Path
) -> None:
    options = [
        "--checkpoint.every_steps",
        2,
        "--checkpoint.keep_last",
        20,
        "--validation.every_steps",
        100,
    ]
    words = by_vllm("--rollout.max_staleness", 1, *options, steps=STEPS)
    assert command(words) == 0
    assert_not_older_than(1, tmp_path / "run", first=2)
    compared = [
        assert_sampled_with_their_versions(file, tmp_path / "run")
        for file in (tmp_path / "run" / "rollouts").iterdir()
    ]
    assert sum(compared) > 100
    assert_equals_its_journal(tmp_path / "run", words, command)


def assert_sampled_with_their_versions(file: Path, run: Path) -> int:
    """Tokens of weights that a checkpoint has: their log-probabilities are those of these weights.

    Returns how many.
    """
    compared, tensors = 0, load_file(file)
    batch = Batch(**{name: tensors[name].to(dtype) for name, dtype in SEQUENCE_TENSORS.items()})
    for version in {*versions_of(file)}:
        if not (folder := run / "checkpoints" / f"step-{version:08d}").exists():
            continue
        whole = (tensors["versions"] < 0) | (tensors["versions"] == version)
        with torch.no_grad():
            logprobs = label_logprobs(
                load_model(folder, torch.device("cpu"), torch.float32).model, batch
            )
        # Others have keys of earlier weights.
        sampled = (tensors["versions"] == version) & whole.all(1, keepdim=True)
        assert torch.allclose(
            logprobs[sampled], tensors["old_logprobs"][sampled], rtol=0, atol=1e-4
        )
        compared += int(sampled.sum())
    return compared
