"""The types of the names of `import lmforge`, for type checkers and editors; the names themselves are in __init__.py."""

from lmforge.cluster.distributed import init_distributed
from lmforge.config.builtin_names import register
from lmforge.config.options import Options, option
from lmforge.data.batch import Batch
from lmforge.data.labels import IGNORE_INDEX
from lmforge.data.prepare.prepare import prepare as prepare_data
from lmforge.environments.environment import Environment, Reply
from lmforge.errors import RunFailed, UserError
from lmforge.library.custom_loop import build_optimizer, open_batches, open_data, parallelize
from lmforge.library.models import (
    build_model,
    evaluate_model,
    export_model,
    generate_text,
    load_model,
    open_tokenizer,
    save_model,
)
from lmforge.library.training import train_model
from lmforge.objectives.objective import Objective, label_logprobs
from lmforge.parallel.parallel_model import train_step

__version__: str

__all__ = [
    "IGNORE_INDEX",
    "Batch",
    "Environment",
    "Objective",
    "Options",
    "Reply",
    "RunFailed",
    "UserError",
    "__version__",
    "build_model",
    "build_optimizer",
    "evaluate_model",
    "export_model",
    "generate_text",
    "init_distributed",
    "label_logprobs",
    "load_model",
    "open_batches",
    "open_data",
    "open_tokenizer",
    "option",
    "parallelize",
    "prepare_data",
    "register",
    "save_model",
    "train_model",
    "train_step",
]
