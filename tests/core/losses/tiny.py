"""A Llama of some 90,000 parameters and a few pairs, made of a seed: the same here and where TRL's
figures were recorded.

numpy only, of its frozen legacy generator, so that neither needs the other's libraries.
"""

from typing import Any

import numpy as np

SHAPE: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 128,
}
# So that losses are not flat.
DEVIATION = 0.2
# Of each tensor's gradient so many entries are recorded, evenly spaced, and its norm.
ENTRIES = 64
# By how much the first completion of each pair is better.
MARGINS = [0.5, 0.0, 1.0, 0.25]
# Generalised Jensen–Shannon divergences by name: (beta, temperature).
DIVERGENCES = {
    "jsd forward": (0.0, 1.0),
    "jsd 0.1": (0.1, 1.0),
    "jsd half": (0.5, 1.0),
    "jsd half hot": (0.5, 2.0),
    "jsd reverse cold": (1.0, 0.7),
}


def weights(moved: float = 0.0, seed: int = 0) -> dict[str, np.ndarray]:
    """fp32 tensors by Hugging Face name; with `moved`, another model near the first, as a reference
    or an older policy is.
    """
    width, inner = SHAPE["hidden_size"], SHAPE["intermediate_size"]
    kept = width * SHAPE["num_key_value_heads"] // SHAPE["num_attention_heads"]
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (SHAPE["vocab_size"], width)}
    for layer in range(SHAPE["num_hidden_layers"]):
        name = f"model.layers.{layer}."
        shapes |= {f"{name}self_attn.{kind}_proj.weight": (width, width) for kind in "qo"}
        shapes |= {f"{name}self_attn.{kind}_proj.weight": (kept, width) for kind in "kv"}
        shapes |= {f"{name}mlp.{kind}_proj.weight": (inner, width) for kind in ("gate", "up")}
        shapes |= {f"{name}mlp.down_proj.weight": (width, inner)}
        shapes |= {
            f"{name}{kind}_layernorm.weight": (width,) for kind in ("input", "post_attention")
        }
    shapes |= {"model.norm.weight": (width,), "lm_head.weight": (SHAPE["vocab_size"], width)}
    first, further = np.random.RandomState(1), np.random.RandomState(1000 + seed)
    made = {}
    for name, shape in shapes.items():
        made[name] = (DEVIATION * first.standard_normal(shape) + ("norm" in name)).astype(
            np.float32
        )
        made[name] += (moved * further.standard_normal(shape)).astype(np.float32)
    return made


def recorded(gradient: np.ndarray) -> np.ndarray:
    """What is kept of a tensor's gradient: its norm and some of its entries."""
    flat = gradient.reshape(-1)
    return np.concatenate(
        [[np.linalg.norm(flat.astype(np.float64))], flat[:: max(1, flat.size // ENTRIES)]]
    ).astype(np.float32)


def pairs(
    count: int = 4, *, prompt: tuple[int, int] = (2, 7), chosen: tuple[int, int] = (3, 12)
) -> list[dict[str, list[int]]]:
    """Prompts with two completions each: ids 3 … 127, lengths drawn from the ranges."""
    random = np.random.RandomState(7)

    def ids(shortest: int, longest: int) -> list[int]:
        return [
            int(token) for token in random.randint(3, 128, random.randint(shortest, longest + 1))
        ]

    return [
        {"prompt": ids(*prompt), "chosen": ids(*chosen), "rejected": ids(3, 12)}
        for _ in range(count)
    ]
