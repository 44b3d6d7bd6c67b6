"""Language-model training end to end in plain PyTorch.

The names of `__all__` are the library: what they promise is in docs/library.md. Each is imported
when it is first used, so that `import lmforge` is fast and does not import torch (PEP 562).
Everything else in the package may change without notice.
"""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

# The module of each public name. Names of subpackages (train, generate, evaluate, …) cannot be
# used, since importing one would replace it.
_PUBLIC = {
    # data
    "prepare_data": "lmforge.text.prepare.prepare:prepare",
    "open_data": "lmforge.library.custom_loop:open_data",
    "open_batches": "lmforge.library.custom_loop:open_batches",
    "open_tokenizer": "lmforge.library.models:open_tokenizer",
    "Batch": "lmforge.core.data.batch:Batch",
    "IGNORE_INDEX": "lmforge.core.data.labels:IGNORE_INDEX",
    # models
    "build_model": "lmforge.library.models:build_model",
    "load_model": "lmforge.library.models:load_model",
    "generate_text": "lmforge.library.models:generate_text",
    "evaluate_model": "lmforge.library.models:evaluate_model",
    "save_model": "lmforge.library.models:save_model",
    "export_model": "lmforge.library.models:export_model",
    # training
    "train_model": "lmforge.library.training:train_model",
    "Objective": "lmforge.core.losses.objective:Objective",
    "label_logprobs": "lmforge.core.losses.objective:label_logprobs",
    "init_distributed": "lmforge.core.distributed.distributed:init_distributed",
    "parallelize": "lmforge.library.custom_loop:parallelize",
    "build_optimizer": "lmforge.library.custom_loop:build_optimizer",
    "train_step": "lmforge.core.parallel.parallel_model:train_step",
    # extension
    "register": "lmforge.core.options.builtin_names:register",
    "Options": "lmforge.core.options.options:Options",
    "option": "lmforge.core.options.options:option",
    "Environment": "lmforge.post.environments.environment:Environment",
    "Reply": "lmforge.post.environments.environment:Reply",
    "UserError": "lmforge.core.errors:UserError",
    "RunFailed": "lmforge.core.errors:RunFailed",
}

__all__ = ["__version__", *_PUBLIC]


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used."""
    if name not in _PUBLIC:
        raise AttributeError(f"module 'lmforge' has no attribute {name!r}")
    module, _, attribute = _PUBLIC[name].partition(":")
    globals()[name] = value = getattr(import_module(module), attribute)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_PUBLIC})
