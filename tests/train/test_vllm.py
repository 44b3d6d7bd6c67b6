"""A run whose completions a real vLLM samples: only in `make test-all`."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from lmforge.cli import run as command
from lmforge.data.tokenizer import Tokenizer
from lmforge.generate.model_loading import load_model
from lmforge.generate.prompts import scored_logits
from lmforge.interop.export import export_folder
from lmforge.model import build_model
from lmforge.model.config import ModelConfig
from lmforge.model.init_weights import init_weights
from lmforge.stages.alignment.engines.rollout_server import RolloutServer
from lmforge.stages.alignment.sampling import SampleRequest, SamplingSettings
from tests.train.vllm_server import vllm_server

VOCAB_SIZE, LENGTH = 261, 64


@pytest.fixture
def wide(byte_tokenizer: Tokenizer, tmp_path: Path) -> Path:
    """A folder of a model with heads of 32 numbers: vLLM's attention on a CPU takes no smaller ones."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    config = ModelConfig(vocab_size=VOCAB_SIZE, num_attention_heads=2, num_key_value_heads=1, initializer_range=0.2, **sizes)
    byte_tokenizer.save(tmp_path / "tokenizer")
    model = init_weights(build_model(config), 1)
    export_folder(model, config, tmp_path / "wide", tokenizer_folder=tmp_path / "tokenizer")
    return tmp_path / "wide"


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_run_is_sampled_by_vllm_with_the_log_probabilities_of_the_trainer(
    wide: Path, grpo: Callable[..., list[str]], tmp_path: Path
) -> None:
    with vllm_server(wide, tmp_path / "vllm.log", max_length=LENGTH) as url:
        # The ratio of the first update is that of the trainer's probabilities and vLLM's, for the weights of each step.
        more = ["--model.source", wide, "--rollout.engine", "vllm", "--rollout.engine_urls", url]
        assert command(grpo("run", *more, steps=3)) == 0
        records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
        assert [record["ratio"] for record in records] == pytest.approx([1.0] * 3, abs=1e-4)

        settings = SamplingSettings(1.0, 1.0, VOCAB_SIZE, LENGTH, frozenset({0}), 8)
        server = RolloutServer(url, "vllm", settings, 120, None)
        server.load(wide, "first")
        model = load_model(wide, torch.device("cpu"), torch.float32).model
        for seed in range(4):
            prompt = [97 + seed, 98, 99]
            sampled = server.sample(SampleRequest(0, prompt, 24, seed), settings.params(greedy=False))
            assert {*sampled.versions} == {"first"}
            [(logits, ids)] = scored_logits(model, [([*prompt, *sampled.token_ids], len(sampled.token_ids))])
            ours = logits.log_softmax(-1).gather(1, ids[:, None])[:, 0]
            assert sampled.logprobs == pytest.approx(ours.tolist(), abs=1e-4)
