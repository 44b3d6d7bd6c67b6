"""Other trainers' checkpoints, by the plugins of examples/checkpoint_layouts/: the imported folder
computes as they do.

The checkpoints are written here as those trainers write them, and computed here as they do, in
their own conventions.
"""

import json
import math
import os
import pickle
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.nn.functional import (
    embedding,
    gelu,
    layer_norm,
    linear,
    scaled_dot_product_attention,
    silu,
)
from transformers import AutoModelForCausalLM

from lmforge.cli import run
from lmforge.core.data.tokenizer import train_tokenizer
from lmforge.core.model.build import build_model
from lmforge.hf.resolve import resolve_model_config
from lmforge.hf.weights import load_folder
from lmforge.serve.decoding.model_loading import load_model
from tests.core.model.conftest import logits, one_document
from tests.support.fuzzing import DAMAGED_PICKLES

VOCABULARY, WIDTH, HEADS, GROUPS, INNER, LAYERS, THETA, EPSILON = 61, 24, 4, 2, 40, 3, 5000.0, 1e-5
LM_HEAD_WEIGHT = WIDTH // HEADS
State = dict[str, Tensor]


def weight(*shape: int) -> Tensor:
    return torch.randn(*shape) * 0.3


def torchtitan_state() -> State:
    """Llama under Meta's names."""
    state = {
        "tok_embeddings.weight": weight(VOCABULARY, WIDTH),
        "output.weight": weight(VOCABULARY, WIDTH),
    }
    state["norm.weight"] = weight(WIDTH)
    for layer in range(LAYERS):
        shapes = {
            "attention.wq": (WIDTH, WIDTH),
            "attention.wk": (GROUPS * LM_HEAD_WEIGHT, WIDTH),
            "attention.wv": (GROUPS * LM_HEAD_WEIGHT, WIDTH),
            "attention.wo": (WIDTH, WIDTH),
            "feed_forward.w1": (INNER, WIDTH),
            "feed_forward.w2": (WIDTH, INNER),
            "feed_forward.w3": (INNER, WIDTH),
            "attention_norm": (WIDTH,),
            "ffn_norm": (WIDTH,),
        }
        state |= {f"layers.{layer}.{name}.weight": weight(*shape) for name, shape in shapes.items()}
    return state


def norm(x: Tensor, by: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPSILON) * by


def turned(x: Tensor) -> Tensor:
    """x [rows, heads, length, head]: two neighbouring channels are a complex number that turns with
    position.
    """
    rates = THETA ** (-torch.arange(0, LM_HEAD_WEIGHT, 2) / LM_HEAD_WEIGHT)
    angles = torch.outer(torch.arange(x.shape[2]), rates)
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles)).flatten(-2)


def llama_logits(state: State, tokens: Tensor) -> Tensor:
    x = embedding(tokens, state["tok_embeddings.weight"])
    for layer in range(LAYERS):

        def of(name: str, layer: int = layer) -> Tensor:
            return state[f"layers.{layer}.{name}.weight"]

        def through(name: str, x: Tensor, layer: int = layer) -> Tensor:
            return linear(
                x, state[f"layers.{layer}.{name}.weight"], state.get(f"layers.{layer}.{name}.bias")
            )

        y = norm(x, of("attention_norm"))
        q, k, v = (
            through(f"attention.{name}", y).unflatten(-1, (-1, LM_HEAD_WEIGHT)).transpose(1, 2)
            for name in ("wq", "wk", "wv")
        )
        y = scaled_dot_product_attention(turned(q), turned(k), v, is_causal=True, enable_gqa=True)
        x = x + through("attention.wo", y.transpose(1, 2).flatten(2))
        y = norm(x, of("ffn_norm"))
        x = x + through(
            "feed_forward.w2", silu(through("feed_forward.w1", y)) * through("feed_forward.w3", y)
        )
    return linear(norm(x, state["norm.weight"]), state["output.weight"])


def fms_state(state: State, names: str) -> State:
    """The same model under fms' names: `fused` as it is trained, or as `single` matrices of its
    older or newer kind.
    """
    older = names == "single, older"
    ends = {"tok_embeddings": "shared.emb", "norm": "dec_norm", "output": "shared.head"}
    if names == "single, newer":
        ends = {
            "tok_embeddings": "base_model.embedding",
            "norm": "base_model.dec_norm",
            "output": "head",
        }
    results = {f"{theirs}.weight": state[f"{name}.weight"] for name, theirs in ends.items()}
    for layer in range(LAYERS):
        of = {
            name.removeprefix(f"layers.{layer}."): value
            for name, value in state.items()
            if f"layers.{layer}." in name
        }
        block = {
            "attn.dense": of["attention.wo.weight"],
            "ff_sub_layer.w2": of["feed_forward.w2.weight"],
            "ln": of["attention_norm.weight"],
            "ff_ln": of["ffn_norm.weight"],
        }
        qkv = [of[f"attention.{name}.weight"] for name in ("wq", "wk", "wv")]
        gate, up = of["feed_forward.w1.weight"], of["feed_forward.w3.weight"]
        if names == "fused":
            block |= {
                "attn.in_proj.qkv_fused": torch.cat(qkv),
                "ff_sub_layer.wg1_fused": torch.cat([gate, up]),
            }
        else:
            before = "attn" if older else "attn.in_proj"
            block |= dict(
                zip((f"{before}.query", f"{before}.key", f"{before}.value"), qkv, strict=True)
            )
            block |= {"ff_sub_layer.wg": gate, "ff_sub_layer.w1": up}
        prefix = "base_model." if names == "single, newer" else ""
        results |= {f"{prefix}layers.{layer}.{name}.weight": value for name, value in block.items()}
    return results


def nanogpt_state(bias: bool) -> State:
    state = {
        "transformer.wte.weight": weight(VOCABULARY, WIDTH),
        "transformer.wpe.weight": weight(32, WIDTH),
    }
    state["lm_head.weight"] = state["transformer.wte.weight"]
    maps = {"attn.c_attn": (3, 1), "attn.c_proj": (1, 1), "mlp.c_fc": (4, 1), "mlp.c_proj": (1, 4)}
    norms = [
        "transformer.ln_f",
        *(f"transformer.h.{layer}.ln_{n}" for layer in range(LAYERS) for n in (1, 2)),
    ]
    state |= {f"{name}.weight": weight(WIDTH) for name in norms}
    state |= {f"{name}.bias": weight(WIDTH) for name in norms if bias}
    for layer in range(LAYERS):
        for name, (out, of) in maps.items():
            state[f"transformer.h.{layer}.{name}.weight"] = weight(out * WIDTH, of * WIDTH)
            if bias:
                state[f"transformer.h.{layer}.{name}.bias"] = weight(out * WIDTH)
    return state


def nanogpt_logits(state: State, tokens: Tensor, approximate: str) -> Tensor:
    def through(name: str, x: Tensor) -> Tensor:
        return linear(x, state[f"{name}.weight"], state.get(f"{name}.bias"))

    def normed(name: str, x: Tensor) -> Tensor:
        return layer_norm(x, (WIDTH,), state[f"{name}.weight"], state.get(f"{name}.bias"), 1e-5)

    x = (
        embedding(tokens, state["transformer.wte.weight"])
        + state["transformer.wpe.weight"][: tokens.shape[1]]
    )
    for layer in range(LAYERS):
        block = f"transformer.h.{layer}"
        y = through(f"{block}.attn.c_attn", normed(f"{block}.ln_1", x)).unflatten(
            -1, (3, HEADS, LM_HEAD_WEIGHT)
        )
        q, k, v = (y[:, :, each].transpose(1, 2) for each in range(3))
        scores = (q @ k.transpose(-1, -2) / math.sqrt(LM_HEAD_WEIGHT)).masked_fill(
            torch.ones(q.shape[2], q.shape[2]).triu(1) > 0, -1e30
        )
        x = x + through(f"{block}.attn.c_proj", (scores.softmax(-1) @ v).transpose(1, 2).flatten(2))
        y = gelu(through(f"{block}.mlp.c_fc", normed(f"{block}.ln_2", x)), approximate=approximate)
        x = x + through(f"{block}.mlp.c_proj", y)
    return linear(normed("transformer.ln_f", x), state["lm_head.weight"])


def assert_computes(folder: Path, tokens: Tensor, expected: Tensor) -> None:
    """Here and in transformers, to rounding."""
    rows = one_document(*tokens.shape, VOCABULARY)
    rows.tokens = tokens
    model = build_model(resolve_model_config(folder, {}))
    load_folder(folder, model)
    torch.testing.assert_close(logits(model, rows), expected, atol=2e-5, rtol=1e-5)
    with torch.no_grad():
        theirs = AutoModelForCausalLM.from_pretrained(folder)(tokens).logits
    torch.testing.assert_close(theirs, expected, atol=2e-5, rtol=1e-5)


PLUGINS = Path(__file__).parents[3] / "examples" / "checkpoint_layouts"
LLAMA = ["--plugins", str(PLUGINS / "torchtitan_and_fms.py")]
TOLD = ["--num_attention_heads", str(HEADS), "--rope_theta", str(THETA), *LLAMA]


def saved_by_torchtitan(state: dict[str, Any], folder: Path) -> None:
    """Beside the model: the optimizer's tensors, and what is no tensor, which DCP pickles."""
    optimizer = {
        "optimizer": {
            f"state.{name}.exp_avg": torch.ones_like(value) for name, value in state.items()
        }
    }
    dcp.save(
        {**state, **optimizer, "train_state": {"step": 9, "name": "x"}},
        checkpoint_id=folder,
        no_dist=True,
    )


def test_torchtitan_computes_as_before(draw: random.Random, tmp_path: Path) -> None:
    state, tokens = torchtitan_state(), torch.randint(0, VOCABULARY, (2, 19))
    saved_by_torchtitan(state, tmp_path / "top")
    dcp.save(
        {"model": {f"_orig_mod.{name}": value for name, value in state.items()}},
        checkpoint_id=tmp_path / "compiled",
    )
    for place in ("top", "compiled"):
        assert run(["import", str(tmp_path / place), str(tmp_path / f"{place}-out"), *TOLD]) == 0
        assert_computes(tmp_path / f"{place}-out", tokens, llama_logits(state, tokens))


@pytest.mark.parametrize("names", ["fused", "single, older", "single, newer"])
def test_fms_computes_as_before(names: str, draw: random.Random, tmp_path: Path) -> None:
    state, tokens = torchtitan_state(), torch.randint(0, VOCABULARY, (2, 19))
    if names == "fused":  # of one head for keys: matrices cannot be told apart by their sizes
        state |= {name: value for name, value in torchtitan_state().items() if ".wv." in name}
    theirs = fms_state(state, names)
    content = {"model_state": theirs, "step": 7, "tokens_seen": 9}
    torch.save(content, tmp_path / "step_7_ckp.pth")
    wrapped = {f"_orig_mod.{name}": value for name, value in theirs.items()}
    dcp.save(
        {"model_state": wrapped, "optimizer_state": {"param_groups": [1, 2]}},
        checkpoint_id=tmp_path / "dcp",
    )
    for place in ("step_7_ckp.pth", "dcp"):
        out = tmp_path / f"{place}-out"
        assert run(["import", str(tmp_path / place), str(out), *TOLD]) == 0
        assert_computes(out, tokens, llama_logits(state, tokens))


def test_fms_with_a_tied_head_and_biases_computes_as_before(
    draw: random.Random, tmp_path: Path
) -> None:
    state, tokens = torchtitan_state(), torch.randint(0, VOCABULARY, (1, 11))
    state["output.weight"] = state["tok_embeddings.weight"]
    theirs = fms_state(state, "fused")
    for layer in range(LAYERS):
        for name in ("attention.wq", "attention.wk", "attention.wv", "attention.wo"):
            state[f"layers.{layer}.{name}.bias"] = weight(
                len(state[f"layers.{layer}.{name}.weight"])
            )
        for name in ("feed_forward.w1", "feed_forward.w2", "feed_forward.w3"):
            state[f"layers.{layer}.{name}.bias"] = weight(
                len(state[f"layers.{layer}.{name}.weight"])
            )

        def of(*names: str, layer: int = layer) -> Tensor:
            return torch.cat([state[f"layers.{layer}.{name}.bias"] for name in names])

        block = f"layers.{layer}"
        theirs[f"{block}.attn.in_proj.qkv_fused.bias"] = of(
            "attention.wq", "attention.wk", "attention.wv"
        )
        theirs[f"{block}.attn.dense.bias"] = of("attention.wo")
        theirs[f"{block}.ff_sub_layer.wg1_fused.bias"] = of("feed_forward.w1", "feed_forward.w3")
        theirs[f"{block}.ff_sub_layer.w2.bias"] = of("feed_forward.w2")
    torch.save({"model_state": theirs}, tmp_path / "a.pth")
    assert run(["import", str(tmp_path / "a.pth"), str(tmp_path / "out"), *TOLD]) == 0
    config = resolve_model_config(tmp_path / "out", {})
    assert config.tie_word_embeddings
    assert config.attention_bias
    assert config.mlp_bias
    assert_computes(tmp_path / "out", tokens, llama_logits(state, tokens))


@pytest.mark.parametrize(
    ("bias", "activation"), [(True, "gelu"), (False, "gelu"), (True, "gelu_new")]
)
def test_nanogpt_computes_as_before(
    bias: bool, activation: str, draw: random.Random, tmp_path: Path
) -> None:
    state, tokens = nanogpt_state(bias), torch.randint(0, VOCABULARY, (2, 19))
    expected = nanogpt_logits(state, tokens, "none" if activation == "gelu" else "tanh")
    arguments = {
        "n_layer": LAYERS,
        "n_head": HEADS,
        "n_embd": WIDTH,
        "block_size": 32,
        "bias": bias,
        "vocab_size": VOCABULARY,
    }
    stored = {f"_orig_mod.{name}": value for name, value in state.items()}
    stored["_orig_mod.transformer.h.0.attn.bias"] = torch.ones(1, 1, 32, 32)
    optimizer = {
        "state": {0: {"exp_avg": torch.ones(3)}},
        "param_groups": [{"lr": 0.1, "params": [0]}],
    }
    content = {
        "model": stored,
        "optimizer": optimizer,
        "model_args": {**arguments, "dropout": 0.0},
        "iter_num": 5,
    }
    content |= {
        "best_val_loss": torch.tensor(1.5),
        "config": {"dataset": "shakespeare", "device": "cpu"},
    }
    torch.save(content, tmp_path / "ckpt.pt")
    more = [
        "--plugins",
        str(PLUGINS / "nanogpt.py"),
        *([] if activation == "gelu" else ["--config_from", "gpt2-124m"]),
    ]
    assert run(["import", str(tmp_path / "ckpt.pt"), str(tmp_path / "out"), *more]) == 0
    assert_computes(tmp_path / "out", tokens, expected)


def test_an_import_takes_shape_from_a_like_model_and_a_tokenizer_and_a_dtype(
    draw: random.Random, tmp_path: Path
) -> None:
    saved_by_torchtitan(torchtitan_state(), tmp_path / "a")
    assert run(["import", str(tmp_path / "a"), str(tmp_path / "first"), *TOLD]) == 0
    config = tmp_path / "first" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"max_position_embeddings": 77}))
    tokenizer = train_tokenizer(["a text"] * 9, 400)
    tokenizer.save(tmp_path / "tokenizer")
    words = [
        "import",
        str(tmp_path / "a"),
        str(tmp_path / "second"),
        "--config_from",
        str(tmp_path / "first"),
        *LLAMA,
    ]
    # Larger than the model's vocabulary.
    assert run([*words, "--tokenizer", str(tmp_path / "tokenizer")]) == 2
    state = torchtitan_state()
    for name in ("tok_embeddings.weight", "output.weight"):
        state[name] = weight(400, WIDTH)
    saved_by_torchtitan(state, tmp_path / "b")
    words = [
        "import",
        str(tmp_path / "b"),
        str(tmp_path / "third"),
        "--config_from",
        str(tmp_path / "first"),
        "--dtype",
        "bf16",
        *LLAMA,
    ]
    assert run([*words, "--tokenizer", str(tmp_path / "tokenizer" / "tokenizer.json")]) == 0
    opened = load_model(tmp_path / "third", torch.device("cpu"), torch.float32)
    assert opened.config.max_position_embeddings == 77
    assert opened.config.rope_theta == THETA
    assert opened.tokenizer.hash == tokenizer.hash
    assert opened.stop_token_ids == {tokenizer.eos_token_id}
    assert torch.equal(
        opened.model.state_dict()["model.norm.weight"], state["norm.weight"].bfloat16().float()
    )


class Hostile:
    def __reduce__(self) -> Any:
        return os.mkdir, ("hacked",)


def test_what_cannot_be_imported_is_refused_in_one_line_and_nothing_is_executed(
    draw: random.Random,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    state = torchtitan_state()
    saved_by_torchtitan(state, tmp_path / "good")

    def refused(name: str, *more: str) -> str:
        capfd.readouterr()
        assert run(["import", name, "out", *more]) == 2
        said = capfd.readouterr().err
        assert said.count("\n") == 1, said
        assert not Path("out").exists()
        assert not Path("hacked").exists()
        return said

    assert (
        "good: no layout of another trainer is known; name a plugin that registers it"
        in refused("good")
    )
    assert "--layout: expected torchtitan or fms, got" in refused(
        "good", "--layout", "megatron", *TOLD
    )
    assert (
        "does not say num_attention_heads; give --num_attention_heads, or --config_from"
        in refused("good", *LLAMA)
    )
    assert "does not say rope_theta" in refused("good", "--num_attention_heads", "4", *LLAMA)
    assert "are not 5 heads" in refused(
        "good", "--num_attention_heads", "5", "--rope_theta", "1", *LLAMA
    )
    kind = refused("good", "--config_from", "gpt2-124m", *LLAMA)
    assert "gpt2-124m: a gpt2 model; --config_from needs one of the same kind, llama" in kind
    assert "not of layout fms: has no " in refused("good", "--layout", "fms", *TOLD)
    assert "no such file or folder" in refused("nothing", *TOLD)
    Path("empty").mkdir()
    assert "holds no .metadata" in refused("empty", *TOLD)

    saved_by_torchtitan(
        {**state, "layers.0.moe.router.gate.weight": weight(3, 3)}, tmp_path / "moe"
    )
    assert "holds layers.0.moe.router.gate.weight, which is not part" in refused("moe", *TOLD)
    saved_by_torchtitan(
        {name: value for name, value in state.items() if "layers.1.attention.wo" not in name},
        tmp_path / "part",
    )
    assert "has nothing that could be model.layers.1.self_attn.o_proj.weight" in refused(
        "part", *TOLD
    )
    dcp.save({"a": weight(3)}, checkpoint_id=tmp_path / "other")
    assert "not of a known layout (torchtitan, fms); it has a" in refused("other", *TOLD)

    torch.save({"model": state, "config": Hostile()}, "hostile.pt")
    assert "holds more than tensors and numbers" in refused("hostile.pt", *TOLD)
    Path("text.pt").write_text("not a checkpoint")
    refused("text.pt", *TOLD)
    (tmp_path / "good" / ".metadata").write_bytes(pickle.dumps(Hostile()))
    assert "cannot be read as checkpoint metadata: it asks for posix.mkdir" in refused(
        "good", *TOLD
    )
    for content in DAMAGED_PICKLES:
        (tmp_path / "good" / ".metadata").write_bytes(content)
        said = refused("good", *TOLD)
        assert "good: .metadata cannot be read (" in said
        assert len(said) < 300
        Path("damaged.pt").write_bytes(content)
        assert "damaged.pt: cannot be read (" in refused("damaged.pt", *TOLD)
    saved_by_torchtitan(state, tmp_path / "short")
    [data] = (tmp_path / "short").glob("*.distcp")
    data.write_bytes(data.read_bytes()[:100])
    assert "copy it again" in refused("short", *TOLD)
