"""`lmforge serve`: an OpenAI-compatible API over HTTP, and a chat page."""

import os
import re
import sys
from functools import partial

from lmforge.config.verbs import ServeOptions
from lmforge.errors import UserError

API_KEY_VARIABLE = "LMFORGE_API_KEY"


def run_serve(options: ServeOptions) -> int:
    """Serve until SIGTERM or Ctrl-C. Raises UserError."""
    try:
        import starlette  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as problem:
        raise UserError(f"serve: needs {problem.name}, which is not installed; pip install 'lmforge[serve]'") from None
    from lmforge.generate.model_loading import resolve_device_and_dtype
    from lmforge.serve.auth import is_loopback
    from lmforge.serve.model_registry import ModelRegistry, ServingLimits
    from lmforge.serve.server import bind_socket, serve

    key = os.environ.get(API_KEY_VARIABLE) if options.api_key is None else options.api_key
    if key is not None and not re.fullmatch(r"[!-~]+", key):
        raise UserError(f"--api_key (or {API_KEY_VARIABLE}): expected printable ASCII characters without spaces")
    if key is None and not is_loopback(options.host) and not options.without_key:
        raise UserError(
            f"--host {options.host}: others can reach this address; give an --api_key (or {API_KEY_VARIABLE}), or --without_key"
        )
    bound = bind_socket(options.host, options.port)
    limits = ServingLimits(options.max_batch_size, options.max_queue, options.max_length, options.max_models)
    device, dtype = resolve_device_and_dtype(options.device, options.dtype)
    registry = ModelRegistry(options.models, limits, device, dtype, warn=partial(print, file=sys.stderr))
    serve(registry, bound, options.host, key, options.max_body_bytes)
    return 0
