"""What layers of Mamba-2 (arXiv 2405.21060) are made of, said without torch, for the families that
have them (modules/mamba2.py computes them); and first values of layers that forget.
"""

import math
from typing import Any

from lmforge.core.model.blocks import Linear, Mixer, Norm, Vector
from lmforge.core.model.fields import ModelFields

# Of layers, as older versions of transformers call them.
OLD_TYPES = {"mamba": "linear_attention", "attention": "full_attention"}
_INFINITY = {"__float__": "Infinity"}


def first_rates(count: int) -> tuple[float, ...]:
    """Logarithms of rates of forgetting that are spread evenly over 1 to 16."""
    return tuple(math.log(1 + 15 * (number + 0.5) / count) for number in range(count))


def first_step_biases(count: int) -> tuple[float, ...]:
    """Numbers whose softplus are steps from 0.001 to 0.1, spread evenly by their logarithms, in an
    order unlike that of the rates: by multiples of the golden ratio.
    """
    places = ((0.618034 * (number + 0.5)) % 1 for number in range(count))
    return tuple(math.log(math.expm1(0.001 * 100**place)) for place in places)


def mamba2(config: ModelFields, name: str = "mixer") -> Mixer:
    """Mamba-2 (arXiv 2405.21060), as which the fields of linear attention are read: heads of values
    [value_dim], and key heads of [key_dim] numbers each, its groups and its state's width.
    """
    width = config.hidden_size
    heads = config.linear_num_value_heads
    value_dim = config.linear_value_head_dim
    state_dim = config.linear_key_head_dim
    values = heads * value_dim
    channels = values + 2 * config.linear_num_key_heads * state_dim
    kernel = config.linear_conv_kernel_dim
    vectors: tuple[Vector, ...] = (
        Vector(f"{name}.conv1d.weight", (channels, 1, kernel)),
        Vector(f"{name}.dt_bias", (heads,), first_step_biases(heads)),
        Vector(f"{name}.A_log", (heads,), first_rates(heads)),
        Vector(f"{name}.D", (heads,), 1.0),
    )
    if config.conv_bias:
        vectors = (*vectors, Vector(f"{name}.conv1d.bias", (channels,), 0.0))
    return Mixer(
        name,
        "mamba2",
        (
            Linear(f"{name}.in_proj", width, values + channels + heads),
            Linear(f"{name}.out_proj", values, width, residual=True),
        ),
        (Norm(f"{name}.norm", values, has_offset=False),),
        vectors,
        mixes_tokens=True,
        states=((kernel - 1, channels), (heads, value_dim, state_dim)),
        state_flops=4 * heads * value_dim * state_dim + 2 * kernel * channels,
    )


def read_time_step_limit(content: dict[str, Any]) -> dict[str, Any]:
    """Mamba-2's time_step_limit, in which transformers writes infinity as an object; an older name,
    if it is there, wins.
    """
    limits = content.get("mamba_dt_limit") or content.get("time_step_limit")
    if not isinstance(limits, list):
        return {}
    return {"time_step_limit": tuple(math.inf if each == _INFINITY else each for each in limits)}


def write_time_step_limit(config: ModelFields) -> dict[str, Any]:
    """The same, without infinity, which JSON lacks; left out where there is no limit."""
    limits = [_INFINITY if each == math.inf else each for each in config.time_step_limit]
    return {} if limits == [0.0, _INFINITY] else {"time_step_limit": limits}
