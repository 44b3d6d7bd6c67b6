"""Mixtures of experts learn from completions with the experts that sampled them."""

import base64
import copy
import io
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from lmforge.cli import run as command
from lmforge.core.data.batch import Batch, Extras
from lmforge.core.data.tokenizer import Tokenizer
from lmforge.core.losses.logprobs import token_logprobs
from lmforge.core.losses.objective import apply_head
from lmforge.core.model.build import build_model
from lmforge.core.model.config import ModelConfig
from lmforge.core.model.init_weights import init_weights
from lmforge.core.model.layers import LanguageModel
from lmforge.core.parallel.activation_checkpointing import apply_activation_checkpointing
from lmforge.hf.export import export_folder
from lmforge.post.rl.engines.rollout_server import RolloutServer, ServerProblem
from lmforge.post.rl.rollout_batches import lay_out
from lmforge.post.rl.sampler import SampledCompletion, SampleRequest, SamplingSettings
from lmforge.serve.decoding.engine import Engine, GenerationRequest
from lmforge.serve.decoding.model_loading import load_model
from lmforge.serve.decoding.sampling import SamplingParams
from tests.conftest import Command, Refusal
from tests.post.rl.test_rollout_engines import assert_learned_the_same, by, faulty, train_inside
from tests.serve.conftest import KEY, Server

CONFIG = ModelConfig(
    model_type="olmoe",
    vocab_size=261,
    hidden_size=32,
    intermediate_size=16,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    num_experts=8,
    num_experts_per_tok=2,
    initializer_range=0.3,
)


@pytest.fixture(scope="module")
def mixture(byte_tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mixture")
    byte_tokenizer.save(folder / "tokenizer")
    model = init_weights(build_model(CONFIG), 3)
    export_folder(model, CONFIG, folder / "model", tokenizer_folder=folder / "tokenizer")
    return folder / "model"


def sampled_batch(model: LanguageModel) -> Batch:
    """Two completions by an engine that returns their experts, laid out to be learned from."""
    engine = Engine(
        model, vocab_size=261, max_batch_size=4, max_length=32, return_routed_experts=True
    )
    prompts = [[5, 6, 7, 8], [9, 10]]
    completions = [SampledCompletion() for _ in prompts]
    experts: list[list[torch.Tensor]] = [[] for _ in prompts]
    ids = [
        engine.add_request(GenerationRequest(each, 9, SamplingParams(1.0), 7, frozenset()))
        for each in prompts
    ]
    while engine.num_unfinished:
        for token in engine.step():
            index = ids.index(token.request_id)
            completions[index].add_sampled(token.token_id, token.logprob, 0)
            assert token.routed_experts is not None
            experts[index].append(token.routed_experts)
    for completion, parts in zip(completions, experts, strict=True):
        completion.routed_experts = torch.cat(parts).numpy()
    return lay_out(prompts, completions, 16, experts_shape=(2, 2))


def loss_and_gradients(
    model: LanguageModel, batch: Batch
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    logprobs = apply_head(model, batch, partial(token_logprobs, labels=batch.labels))
    model.zero_grad()
    logprobs.sum().backward()
    return logprobs.detach(), {
        name: each.grad for name, each in model.named_parameters() if each.grad is not None
    }


def without_experts(batch: Batch) -> Batch:
    return Batch(**batch.tensors, extras=Extras(old_logprobs=batch.extra("old_logprobs")))


def test_the_experts_that_an_engine_returns_are_those_that_the_trainer_chooses_with_equal_weights() -> (
    None
):
    model = init_weights(build_model(CONFIG), 3)
    batch = sampled_batch(model)
    assert batch.extra("routed_experts").shape == (2, 16, 2, 2)
    assert (batch.extra("routed_experts")[:, :, 0] >= 0).any(-1).equal(batch.document_ids >= 0)
    own, replayed = (loss_and_gradients(model, each) for each in (without_experts(batch), batch))
    assert torch.equal(own[0], replayed[0])
    assert all(torch.equal(gradient, replayed[1][name]) for name, gradient in own[1].items())
    scored = batch.labels >= 0
    torch.testing.assert_close(
        own[0][scored], batch.extra("old_logprobs")[scored], rtol=0, atol=1e-5
    )


@pytest.mark.parametrize("checkpointing", ["none", "full", "selective-ops"])
def test_with_another_router_the_given_experts_are_used_and_the_router_learns(
    checkpointing: str,
) -> None:
    model = init_weights(build_model(CONFIG), 3)
    batch = sampled_batch(model)
    other = copy.deepcopy(model)
    with torch.no_grad():
        for block in other.blocks:
            block.mlp.gate.weight.neg_()
    if checkpointing != "none":
        apply_activation_checkpointing(other, checkpointing)
    chosen: list[torch.Tensor] = []
    hooks = [
        block.mlp.gate.register_forward_hook(lambda _, inputs, out: chosen.append(out[1]))
        for block in other.blocks
    ]
    logprobs, gradients = loss_and_gradients(other, batch)
    is_token = (batch.document_ids >= 0).flatten()
    for layer in range(2):
        expected = batch.extra("routed_experts")[:, :, layer].flatten(0, 1)[is_token].long()
        assert torch.equal(chosen[layer][is_token], expected)
    for hook in hooks:
        hook.remove()
    own, _ = loss_and_gradients(other, without_experts(batch))
    assert not torch.allclose(own, logprobs)
    for layer in range(2):
        assert gradients[f"model.layers.{layer}.mlp.gate.weight"].norm() > 0


def test_spans_keep_the_experts_that_sampled_them() -> None:
    first, second = (torch.full((count, 1, 1), value).numpy() for count, value in ((4, 1), (8, 2)))
    completion = SampledCompletion()
    completion.extend(SampledCompletion([3, 4], [0.0, 0.0], [0, 0], routed_experts=first))
    completion.add_given([7, 7])
    completion.extend(SampledCompletion([5, 6], [0.0, 0.0], [0, 0], routed_experts=second))
    assert completion.routed_experts is not None
    assert completion.routed_experts.flatten().tolist() == [1] * 4 + [2] * 4


def test_a_completion_without_a_sampled_token_leaves_the_experts_of_the_others() -> None:
    model = init_weights(build_model(CONFIG), 3)
    alone = sampled_batch(model)
    experts = [each[each[:, 0, 0] >= 0].numpy() for each in alone.extra("routed_experts")]
    prompts = [
        row[: len(each) + 1 - 9].tolist() for row, each in zip(alone.tokens, experts, strict=True)
    ]
    completions = [
        SampledCompletion([*labels[labels >= 0].tolist()], [0.0] * 9, [0] * 9, routed_experts=each)
        for labels, each in zip(alone.labels, experts, strict=True)
    ]
    batch = lay_out(
        [*prompts, [5, 6]], [*completions, SampledCompletion()], 16, experts_shape=(2, 2)
    )
    assert torch.equal(batch.extra("routed_experts")[:2], alone.extra("routed_experts"))
    assert (batch.extra("routed_experts")[2] == -1).all()
    # All ranks have the tensor, also one whose completions all failed.
    failed = lay_out([[5, 6]], [SampledCompletion()], 16, experts_shape=(2, 2))
    assert failed.extra("routed_experts").shape == (1, 16, 2, 2)
    assert torch.allclose(
        loss_and_gradients(model, batch)[0][:2],
        loss_and_gradients(model, alone)[0],
        rtol=0,
        atol=1e-6,
    )


@pytest.fixture(scope="module")
def mixture_server(serving: Callable[..., Server], mixture: Path) -> Server:
    return serving(
        mixture,
        "--weight_updates",
        "--return_routed_experts",
        "--max_batch_size",
        8,
        "--max_length",
        32,
    )


def encoded(array: np.ndarray) -> str:
    with io.BytesIO() as file:
        np.save(file, array)
        return base64.b64encode(file.getvalue()).decode()


@pytest.mark.parametrize(
    "experts",
    [
        "",
        # 2 ids of the prompt and 2 sampled ones, of which the last is not read.
        encoded(np.zeros((4, 2, 2), np.int32)),
        encoded(np.zeros((3, 3, 2), np.int32)),
        encoded(np.zeros((3, 2, 2), np.float32)),
        encoded(np.full((3, 2, 2), 8)),
        encoded(np.full((3, 2, 2), -1)),
    ],
    ids=["no array", "tokens", "layers", "fractions", "beyond the last", "below 0"],
)
def test_experts_that_are_not_those_of_each_token_are_a_problem_of_the_server(
    experts: str, mixture_server: Server
) -> None:
    settings = SamplingSettings(1.0, 1.0, 261, 32, frozenset(), 1, CONFIG)
    with faulty(mixture_server.url, lambda choice: choice.update(routed_experts=experts)) as url:
        server = RolloutServer(url, "lmforge", settings, 20.0, *KEY.values())
        with pytest.raises(ServerProblem, match="its routed experts are not those of each token"):
            server.sample(SampleRequest(0, [5, 6], 2, 0), SamplingParams())


@pytest.mark.slow
def test_runs_replay_the_experts_of_the_trainer_itself_and_of_a_server_and_resume_amid_a_set(
    grpo: Callable[..., list[str]],
    mixture_server: Server,
    mixture: Path,
    lmforge: Command,
    tmp_path: Path,
) -> None:
    words = [
        "--model.source",
        mixture,
        "--rollout.replay_routed_experts",
        "--rollout.num_iterations",
        2,
    ]
    words += ["--schedule.name", "constant", "--optimizer.eps", 1e-3]
    train_inside(grpo, *words, steps=4)
    done = lmforge(*grpo("outside", *words, *by(mixture_server.url), steps=4))
    assert done.returncode == 0, done.stdout + done.stderr
    assert_learned_the_same(tmp_path)
    assert command(grpo("parts", *words, "--train.steps", 3, steps=3)) == 0
    assert command(grpo("parts", *words, steps=4)) == 0
    whole, parts = (
        load_model(tmp_path / name, torch.device("cpu"), torch.float32).model.state_dict()
        for name in ("inside", "parts")
    )
    assert all(torch.equal(tensor, parts[name]) for name, tensor in whole.items())


@pytest.mark.slow
def test_experts_are_replayed_under_expert_parallelism_and_checkpointing(
    grpo: Callable[..., list[str]], mixture: Path, lmforge: Command, tmp_path: Path
) -> None:
    words = [
        "--model.source",
        mixture,
        "--rollout.replay_routed_experts",
        "--rollout.num_iterations",
        2,
    ]
    words += [
        "--schedule.name",
        "constant",
        "--optimizer.eps",
        1e-3,
        "--rollout.importance_sampling_mode",
        "token_truncate",
    ]
    words += ["--parallel.activation_checkpointing", "full"]
    train_inside(grpo, *words, steps=4)
    split = [
        "--parallel.engine",
        "fsdp2",
        "--parallel.expert_parallel_degree",
        2,
        "--train.threads",
        1,
    ]
    done = lmforge(*grpo("outside", *words, *split, steps=4), cwd=tmp_path, ranks=2)
    assert done.returncode == 0, done.stderr
    assert_learned_the_same(tmp_path)


def test_dense_models_and_servers_that_return_no_experts_are_refused(
    grpo: Callable[..., list[str]], serving: Callable[..., Server], mixture: Path, refused: Refusal
) -> None:
    assert "this model is no mixture of experts" in refused(
        *grpo("dense", "--rollout.replay_routed_experts")
    )
    server = serving(mixture, "--weight_updates", "--max_batch_size", 8, "--max_length", 32)
    words = ["--model.source", mixture, "--rollout.replay_routed_experts"]
    line = refused(
        *grpo("run", *words, "--rollout.engine", "lmforge", "--rollout.engine_urls", server.url)
    )
    assert f"{server.url}: returns no routed experts; start it with" in line
