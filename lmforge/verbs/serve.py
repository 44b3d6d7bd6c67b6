"""`lmforge serve`: the OpenAI-compatible server, for which the extra `serve` is needed."""

from lmforge.config.verbs import ServeOptions
from lmforge.errors import UserError


def run_serve(options: ServeOptions) -> int:
    """Serve until interrupted. Raises UserError."""
    try:
        import starlette  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as problem:
        raise UserError(f"serve: needs {problem.name}, which is not installed; pip install 'lmforge[serve]'") from None
    from lmforge.serve.server import run_serve as serve

    return serve(options)
