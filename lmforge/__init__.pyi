"""The types of the names of `import lmforge`, for type checkers and editors; the names themselves
are in __init__.py.
"""

from lmforge.core.data.batch import Batch
from lmforge.core.data.labels import IGNORE_INDEX
from lmforge.core.distributed.distributed import init_distributed
from lmforge.core.errors import RunFailed, UserError
from lmforge.core.losses.logprobs import label_logprobs
from lmforge.core.losses.objective import Objective
from lmforge.core.options.builtin_names import register
from lmforge.core.options.options import Options, option
from lmforge.core.parallel.parallel_model import train_step
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
from lmforge.post.environments.environment import Environment, Reply
from lmforge.text.prepare.prepare import prepare as prepare_data

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
