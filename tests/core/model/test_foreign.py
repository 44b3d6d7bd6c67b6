"""Models that transformers computes: the same numbers, separate documents, and its names and
files.
"""

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import nn
from torch.nn.functional import cross_entropy
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.models.lfm2.modeling_lfm2 import Lfm2ShortConv

from lmforge.core.data.batch import Batch
from lmforge.core.errors import UserError
from lmforge.core.losses.language import NextTokenObjective
from lmforge.core.model.build import build_model
from lmforge.core.model.flops import parameter_count
from lmforge.core.model.init_weights import init_weights, named_tensors, stored_buffers
from lmforge.core.model.resolve import model_config_from_json
from lmforge.core.parallel.activation_checkpointing import apply_activation_checkpointing
from lmforge.hf.export import export_folder
from lmforge.hf.resolve import resolve_model_config
from lmforge.hf.transformers_causal_lm import build_causal_lm, find_block_list, find_logit_transform
from lmforge.hf.transformers_init import family_initial_values
from lmforge.hf.transformers_model import TransformersConfig, TransformersModel, unmeasured_model
from lmforge.hf.transformers_packing import packing_error
from lmforge.hf.weights import load_folder
from lmforge.serve.decoding.engine import Engine, GenerationRequest
from lmforge.serve.decoding.sampling import SamplingParams
from tests.core.model.conftest import built, drawn_config, logits, one_document, packed
from tests.core.model.foreign import (
    FAMILIES,
    SIZES,
    WITHOUT_FIRST_VALUES,
    described,
    saved,
    theirs_of,
    wrapped,
)
from tests.support.decoding import decode

# fp32 sums of a few dozen terms of size one, in another order.
TOLERANCE = 1e-5
REFUSED = {
    "mamba": "layers without attention",
    "bert": "no plain lm_head",
}


def assert_close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    torch.testing.assert_close(ours, theirs, atol=TOLERANCE, rtol=TOLERANCE)


def stored_names(folder: Path) -> set[str]:
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        return set(file.keys())


@pytest.mark.parametrize("kind", FAMILIES)
def test_a_folder_gives_the_logits_of_transformers_and_documents_in_a_row_do_not_see_each_other(
    kind: str, draw: random.Random, tmp_path: Path
) -> None:
    theirs, ours = saved(kind, tmp_path)
    lengths = [draw.randrange(1, 9), draw.randrange(9, 30), draw.randrange(1, 20)]
    rows = packed([lengths, lengths], SIZES["vocab_size"], padding=draw.choice([0, 3]))
    apart = []
    with torch.no_grad():
        for tokens in rows.tokens[:, : sum(lengths)].split(lengths, dim=1):
            apart.append(theirs(tokens).logits)
            alone = one_document(2, tokens.shape[1], SIZES["vocab_size"])
            alone.tokens = tokens
            assert_close(logits(ours, alone), apart[-1])
    together = logits(ours, rows)
    assert_close(together[:, : sum(lengths)], torch.cat(apart, dim=1))
    assert together.isfinite().all()


@pytest.mark.parametrize("kind", FAMILIES)
def test_what_is_exported_has_the_usual_names_and_opens_in_transformers(
    kind: str, draw: random.Random, tmp_path: Path
) -> None:
    _, ours = saved(kind, tmp_path / "theirs")
    export_folder(ours, ours.config, tmp_path / "ours")
    assert stored_names(tmp_path / "ours") == stored_names(tmp_path / "theirs")
    again, report = AutoModelForCausalLM.from_pretrained(
        tmp_path / "ours", output_loading_info=True
    )
    assert not any(report[what] for what in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    rows = one_document(2, draw.randrange(5, 40), SIZES["vocab_size"])
    with torch.no_grad():
        assert_close(logits(ours, rows), again(rows.tokens).logits)


@pytest.mark.parametrize("kind", ["gemma4_text", "minimax_m2", "apertus"])
def test_what_is_stored_and_not_trained_is_kept_bit_for_bit_in_any_dtype(
    kind: str, tmp_path: Path
) -> None:
    theirs, ours = saved(kind, tmp_path / "theirs")
    before = {name: value.float() for name, value in stored_buffers(theirs)}
    assert before
    assert not before.keys() & dict(ours.named_parameters()).keys()
    ours.to(torch.bfloat16)
    export_folder(ours, ours.config, tmp_path / "ours", dtype=torch.bfloat16)
    again = wrapped(tmp_path / "ours")
    for model in (ours, again):
        assert dict(stored_buffers(model)).keys() == before.keys()
        for name, value in stored_buffers(model):
            assert torch.equal(value, before[name]), name
    if kind in WITHOUT_FIRST_VALUES:
        with pytest.raises(UserError, match=r"does not initialize .*; start from a folder's"):
            init_weights(build_model(ours.config), 7)


@pytest.mark.parametrize("kind", ["gpt_neox", "gemma3_text"])
def test_constants_have_their_values_wherever_a_model_was_moved(kind: str) -> None:
    theirs = {
        name: value for name, value in theirs_of(kind).named_buffers() if value.is_floating_point()
    }
    meta = build_model(described(kind), "meta")
    meta.to_empty(device="cpu")
    for model in (meta, meta.to(torch.bfloat16), build_model(described(kind))):
        ours = dict(model.named_buffers())
        assert theirs.keys() <= ours.keys()
        for name, value in theirs.items():
            assert torch.equal(ours[name], value), name


@pytest.mark.parametrize("kind", ["gpt_neox", "gemma3_text", "mixtral"])
def test_first_values_follow_the_family_and_depend_on_seed_and_name_alone(kind: str) -> None:
    shape = described(kind)
    one, again, other = (init_weights(build_model(shape), seed) for seed in (7, 7, 8))
    theirs = dict(
        AutoModelForCausalLM.from_config(
            one.base_model.config, dtype=torch.float32
        ).named_parameters()
    )
    differing = 0
    for name, value in one.named_parameters():
        assert torch.equal(again.get_parameter(name), value)
        if value.std() > 0:
            differing += not torch.equal(other.get_parameter(name), value)
            # Of 192 numbers at least.
            assert value.std().item() == pytest.approx(theirs[name].std().item(), rel=0.35)
        else:
            assert torch.equal(theirs[name], value), name  # norms: of ones, or of zeros
    assert differing > 9


@pytest.mark.parametrize("kind", [each for each in FAMILIES if each not in WITHOUT_FIRST_VALUES])
@pytest.mark.parametrize("padding", [None, 5])
def test_only_a_tensor_that_its_family_fills_in_several_steps_is_drawn_in_full(
    kind: str, padding: int | None
) -> None:
    shape = described(kind, pad_token_id=padding)
    assert isinstance(shape, TransformersConfig)
    meta = build_model(shape, "meta")
    names = [name for name, _ in named_tensors(meta)]
    values = dict(family_initial_values(build_causal_lm(shape.config_dict), names, 3))
    assert values.keys() == set(names)
    full = [values[name] for name, _ in meta.named_parameters() if torch.is_tensor(values[name])]
    assert len(full) <= (padding is not None)  # the embedding, whose row of padding is zero
    assert all(not value[5].any() and value[6].any() for value in full)


@pytest.mark.parametrize("kind", ["gpt_neox", "gemma3_text", "mixtral", "bloom"])
def test_decoding_with_a_cache_gives_what_reading_all_again_gives(
    kind: str, draw: random.Random, tmp_path: Path
) -> None:
    theirs, ours = saved(kind, tmp_path)
    prompts = [
        [draw.randrange(SIZES["vocab_size"]) for _ in range(length)] for length in (3, 11, 1)
    ]
    completions = decode(ours, prompts, vocab_size=96, max_tokens=9, sampling=SamplingParams(0.0))
    for prompt, completion in zip(prompts, completions, strict=True):
        for token in completion:
            with torch.no_grad():
                assert int(theirs(torch.tensor([prompt])).logits[0, -1].argmax()) == token
            prompt = [*prompt, token]


@pytest.mark.parametrize("kind", ["gpt_neox", "mixtral"])
def test_texts_that_come_and_go_are_written_as_if_alone(
    kind: str, draw: random.Random, tmp_path: Path
) -> None:
    _, ours = saved(kind, tmp_path)
    requests = [
        GenerationRequest(
            [draw.randrange(96) for _ in range(draw.randrange(1, 12))],
            draw.randrange(1, 9),
            way,
            5,
            frozenset(),
        )
        for way in [SamplingParams(0.0), SamplingParams()] * 4
    ]

    def written(rows: int) -> list[list[int]]:
        engine, coming, numbers = (
            Engine(ours, vocab_size=96, max_batch_size=rows, max_length=24),
            [*range(8)],
            dict[int, int](),
        )
        result: list[list[int]] = [[] for _ in requests]
        while coming or engine.num_unfinished:
            while coming and engine.num_free_slots and draw.random() < 0.6:
                next_one = coming.pop(draw.randrange(len(coming)))
                numbers[engine.add_request(requests[next_one])] = next_one
            for token in engine.step():
                result[numbers[token.request_id]].append(token.token_id)
        return result

    assert written(3) == written(1)


def test_a_llama_folder_gives_the_same_either_way(draw: random.Random, tmp_path: Path) -> None:
    config = drawn_config("llama", draw)
    export_folder(built(config), config, tmp_path / "llama")
    ours = build_model(resolve_model_config(tmp_path / "llama", {}))
    load_folder(tmp_path / "llama", ours)
    theirs = wrapped(tmp_path / "llama")
    assert isinstance(theirs, TransformersModel)
    assert dict(theirs.named_parameters()).keys() == dict(ours.named_parameters()).keys()
    assert parameter_count(theirs.config) == parameter_count(config)
    rows = packed([[9, 1, 22], [11, 11, 10]], config.vocab_size)
    # As in test_parity.py.
    torch.testing.assert_close(logits(theirs, rows), logits(ours, rows), atol=1e-4, rtol=1e-4)


def test_there_is_no_dropout_in_training(tmp_path: Path) -> None:
    _, ours = saved("gpt_neox", tmp_path)
    rows = one_document(2, 20, SIZES["vocab_size"])
    assert torch.equal(logits(ours.train(), rows), logits(ours.eval(), rows))


def test_recomputation_runs_every_block_twice_and_leaves_gradients_as_they_are(
    tmp_path: Path,
) -> None:
    _, ours = saved("mixtral", tmp_path)
    rows = one_document(2, 20, SIZES["vocab_size"])

    def gradients() -> list[torch.Tensor]:
        ours.zero_grad()
        ours.lm_head(ours(rows.tokens, rows.positions, rows.documents)).square().mean().backward()
        return [parameter.grad.clone() for parameter in ours.parameters()]

    runs = 0

    def count(*_: object) -> None:
        nonlocal runs
        runs += 1

    for block in ours.blocks:
        next(block.children()).register_forward_hook(count)
    usual = gradients()
    assert runs == 3
    apply_activation_checkpointing(ours, "full")
    for again, before in zip(gradients(), usual, strict=True):
        assert torch.equal(again, before)
        assert before.any()
    assert runs == 3 + 6


def test_experts_count_as_far_as_a_token_goes_to_them(tmp_path: Path) -> None:
    theirs, ours = saved("mixtral", tmp_path)
    counted = parameter_count(ours.config)
    sizes = {name: parameter.numel() for name, parameter in theirs.named_parameters()}
    experts = sum(size for name, size in sizes.items() if ".experts." in name)
    assert counted.total == sum(sizes.values())
    assert counted.active_matmul == counted.total - counted.input_embedding - experts * 4 // 6


@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_wrapped_is_refused_in_words(kind: str, tmp_path: Path) -> None:
    theirs_of(kind, is_decoder=True, num_local_experts=2, state_size=4).config.save_pretrained(
        tmp_path
    )
    with pytest.raises(UserError, match=REFUSED[kind]) as refusal:
        resolve_model_config(tmp_path, {}, implementation="transformers")
    assert "\n" not in str(refusal.value)


def test_a_hybrid_is_wrapped_only_if_packed_documents_are_computed_as_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In a convolution that forgot what a document is, they are not; in one of no width they are."""
    fields: dict[str, Any] = {"layer_types": ["conv", "full_attention", "conv"]}
    content = {**SIZES, **fields, "num_key_value_heads": 2, "model_type": "lfm2"}
    packing_error.cache_clear()
    with pytest.raises(UserError, match=r"layers without attention \(conv, .*measured on a small"):
        model_config_from_json(content, "here", "transformers").counted_parameters()
    error = packing_error(json.dumps(content, sort_keys=True), unmeasured_model)
    assert error is not None
    assert error > 0.01
    monkeypatch.setattr(Lfm2ShortConv, "forward", lambda self, hidden_states, **_: hidden_states)
    packing_error.cache_clear()
    config = model_config_from_json(content, "here", "transformers")
    assert config.counted_parameters()
    packing_error.cache_clear()


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("bamba", {"mamba_n_heads": 8, "mamba_d_head": 8, "attn_layer_indices": [1]}),
        ("nemotron_h", {"layers_block_type": ["linear_attention", "full_attention", "mlp"]}),
    ],
)
def test_hybrids_of_transformers_are_measured_at_any_width(
    kind: str, fields: dict[str, Any], tmp_path: Path
) -> None:
    config = CONFIG_MAPPING[kind](**{**SIZES, "num_key_value_heads": 2, **fields})
    config.save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"see each other \([0-9.e]+ of the largest hidden state"):
        resolve_model_config(tmp_path, {}, implementation="transformers")


def test_a_missing_expert_is_named(tmp_path: Path) -> None:
    theirs = theirs_of("mixtral")
    theirs.save_pretrained(tmp_path)
    content = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**content, "num_local_experts": 7}))
    with pytest.raises(
        UserError,
        match=r"experts.* is \[6, .* and should be \[7, .*use the config.json that belongs",
    ):
        wrapped(tmp_path)


def test_code_in_a_folder_is_not_run(tmp_path: Path) -> None:
    (tmp_path / "theirs.py").write_text("raise SystemExit('it ran')\n")
    of_its_own = {
        "model_type": "odd",
        "auto_map": {"AutoConfig": "theirs.Config", "AutoModelForCausalLM": "theirs.Model"},
    }
    (tmp_path / "config.json").write_text(json.dumps(of_its_own))
    with pytest.raises(UserError, match="its code comes with the folder, and such code is not run"):
        resolve_model_config(tmp_path, {}, implementation="transformers")


@pytest.mark.slow
def test_lmforge_is_imported_without_transformers_and_says_so_where_it_is_needed(
    tmp_path: Path,
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**SIZES, "model_type": "gpt_neox"}))
    program = f"""
import sys
from importlib.abc import MetaPathFinder
class Absent(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == "transformers":
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Absent())
import lmforge.core.run, lmforge.serve.verbs.evaluate, lmforge.ops.verbs.show.show
from lmforge.cli import run
sys.exit(run(["show", {str(tmp_path)!r}]))
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 2
    assert (
        done.stderr
        == "lmforge: transformers is not installed, and this model needs it; .venv/bin/pip install"
        " -e '.[transformers]'\n"
    )


def test_a_block_is_found_in_the_longest_list_that_is_in_no_other() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.ModuleList(nn.Linear(2, 2) for _ in range(9))

    base = nn.Module()
    base.mixed = nn.ModuleList([*(nn.Linear(2, 2) for _ in range(5)), Block()])
    base.few = nn.ModuleList(nn.Linear(2, 2) for _ in range(2))
    base.inner = nn.Module()
    base.inner.layers = nn.ModuleList(Block() for _ in range(4))
    assert find_block_list(base) == "inner.layers"


@pytest.mark.parametrize("kind", ["gemma2", "phi", "granite"])
def test_loss_and_gradients_are_those_of_transformers_with_capped_and_scaled_logits_and_a_bias(
    kind: str, tmp_path: Path
) -> None:
    theirs, ours = saved(kind, tmp_path)
    rows = one_document(2, 30, SIZES["vocab_size"])
    batch = Batch(rows.tokens, rows.tokens.roll(-1, 1), rows.positions, rows.documents)
    total, _ = NextTokenObjective().loss(ours, batch)
    total.backward()
    reference = cross_entropy(
        theirs(batch.tokens).logits.flatten(0, 1), batch.labels.flatten(), reduction="sum"
    )
    reference.backward()
    assert_close(total, reference)
    gradients = {name: parameter.grad for name, parameter in theirs.named_parameters()}
    assert ("lm_head.bias" in gradients) == (kind == "phi")
    for name, parameter in ours.named_parameters():
        scale = gradients[name].abs().max()
        assert_close(parameter.grad / scale, gradients[name] / scale)


def test_a_model_that_changes_its_logits_in_another_way_is_refused() -> None:
    class Cubed(LlamaForCausalLM):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            output = super().forward(*args, **kwargs)
            output.logits = output.logits**3
            return output

    with torch.device("meta"):
        causal = Cubed(LlamaConfig(**SIZES))
    with pytest.raises(UserError, match="changes its logits in a way that lmforge's loss does not"):
        find_logit_transform(causal, SIZES["hidden_size"])
