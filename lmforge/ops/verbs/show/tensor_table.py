"""The table of a recipe's tensors: what a parametrization makes of the optimizer's numbers for
each.
"""

import re

from lmforge.core.model.config import ModelConfig
from lmforge.core.model.lora import add_lora
from lmforge.core.optim.optimizer import tensor_options
from lmforge.core.options.stage import StageConfig
from lmforge.core.stages.build_model import empty_model
from lmforge.core.stages.parameter_counts import get_lora_config
from lmforge.ops.verbs.show.describe_data import align_right


def describe_tensors(config: StageConfig, model: ModelConfig) -> list[str]:
    """A row for each kind of trained tensor."""
    built = empty_model(config, model)
    optimizer = config.optimizer
    rows = dict[str, tuple[str, ...]]()
    if (adapters := get_lora_config(config)) is not None:
        add_lora(built, adapters)
    for name, own in tensor_options(built, optimizer).items():
        scale = built.tensor_scale(name, tuple(built.get_parameter(name).shape))
        numbers = (
            scale.init,
            optimizer.lr * own["lr_ratio"],
            own["weight_decay"],
            own.get("eps", optimizer.eps),
        )
        rows[re.sub(r"\.\d+\.", ".N.", name)] = (scale.kind, *(f"{each:.4g}" for each in numbers))
    title = (
        f"tensors    under {config.model.parametrization}: factor of the first value; learning"
        " rate, weight decay, epsilon"
    )
    return [
        title,
        *align_right(
            [
                ["tensor", "kind", "first", "lr", "decay", "eps"],
                *([name, *row] for name, row in rows.items()),
            ]
        ),
    ]
