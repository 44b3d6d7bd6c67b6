"""What the tests for a GPU share: models that are trained in this process, and runs of
`tiny_options` on a device.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from lmforge.core.distributed.distributed import DistributedContext, destroy_distributed
from lmforge.core.distributed.rank_info import RankInfo
from lmforge.core.losses.language import NextTokenObjective
from lmforge.core.model.build import build_model
from lmforge.core.model.config import ModelConfig
from lmforge.core.model.init_weights import init_weights
from lmforge.core.model.layers import LanguageModel
from lmforge.core.options.sections import ParallelOptions
from lmforge.core.parallel.parallel_model import ParallelModel
from lmforge.core.parallel.parallelize import parallelize
from lmforge.core.records.runs import Run
from lmforge.lab.bench.parity import SMALL_MODEL, ParityData
from tests.conftest import Command
from tests.distributed.conftest import losses

Trained = dict[int, float]


def trained(lmforge: Command, options: list[str], folder: Path, name: str, device: str, *words: object) -> Trained:
    """The losses of a run of `tiny_options`, by step."""
    where = ["--train.device", device, "--run.folder", folder, "--run.name", name]
    done = lmforge("pretrain", *options, *where, *words)
    assert done.returncode == 0, done.stdout + done.stderr
    return losses(Run(folder / name))


@contextmanager
def language_model(
    device: torch.device,
    config: ModelConfig = SMALL_MODEL,
    dtype: torch.dtype = torch.float32,
    compile_model: bool = False,
    model: LanguageModel | None = None,
    **options: Any,
) -> Iterator[ParallelModel]:
    """A model that is trained on next tokens, with new weights unless it is given.

    At the end the process group of fsdp2 is destroyed.
    """
    torch._dynamo.reset()
    init: Callable[[LanguageModel], Any] | None = None if model else lambda model: init_weights(model, 0)
    try:
        yield parallelize(
            build_model(config, "meta") if model is None else model.to(device),
            NextTokenObjective().loss,
            dist_ctx=DistributedContext(RankInfo(), device, None),
            dtype=dtype,
            options=ParallelOptions(**options),
            compile_model=compile_model,
            init_weights=init,
        )
    finally:
        destroy_distributed()


def loss_and_gradients(model: ParallelModel, device: torch.device) -> tuple[float, list[torch.Tensor]]:
    """Of two micro-batches: the sum of losses, and the gradients, on the CPU."""
    batches = [ParityData(sequences=2).batch(number, SMALL_MODEL.vocab_size).to(device) for number in range(2)]
    metrics = model.forward_backward(batches, torch.tensor(99.0, device=device), lambda phase: None)
    loss = sum(float(each["loss"][0]) for each in metrics)
    return loss, [gradient.detach().float().cpu().clone() for gradient in model._local_grads()]


def gradients(model: ParallelModel, device: torch.device) -> list[torch.Tensor]:
    return loss_and_gradients(model, device)[1]
