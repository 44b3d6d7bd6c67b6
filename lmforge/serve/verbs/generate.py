"""`lmforge generate`, which prints text after prompts, and `lmforge serve`, which does it over HTTP."""

import os
import re
import secrets
import sys
from functools import partial

from lmforge.core.errors import UserError, how_to_install
from lmforge.core.files.untrusted import read_stream
from lmforge.serve.decoding.engine import generate
from lmforge.serve.decoding.model_loading import load_model, resolve_device_and_dtype
from lmforge.serve.decoding.prompts import (
    MAX_PROMPT_BYTES,
    check_room,
    check_token_ids,
    encode_prompt,
    max_input_length,
)
from lmforge.serve.options.models import GenerateOptions, ServeOptions

API_KEY_VARIABLE = "LMFORGE_API_KEY"


def run_generate(options: GenerateOptions) -> int:
    """Continue each prompt: the first is printed as it is generated, the others at the end.

    Raises UserError.
    """
    prompts = list(options.prompts) or [_read_stdin()]
    device, dtype = resolve_device_and_dtype(options.device, options.dtype)
    loaded = load_model(options.model, device, dtype, warn=partial(print, file=sys.stderr))
    seed = options.seed if options.seed is not None else secrets.randbelow(2**31)
    titles = [""]
    if len(prompts) > 1:
        titles = [f"--- {number} ---\n" for number in range(1, len(prompts) + 1)]
    max_length = max_input_length(loaded.config)
    max_tokens = []
    for prompt in prompts:  # refused before one is printed
        prompt_ids = encode_prompt(loaded.tokenizer, prompt, loaded.prefix_ids, max_length)
        check_token_ids(prompt_ids, loaded.config.vocab_size)
        check_room(len(prompt_ids), max_length)
        max_tokens.append(options.max_tokens or loaded.answer_length(len(prompt_ids), 128))
    sampling = loaded.sampling(
        0.8, temperature=options.temperature, top_k=options.top_k, top_p=options.top_p
    )

    def print_first(index: int, piece: str) -> None:
        if index == 0:
            print(piece, end="", flush=True)

    print(f"{titles[0]}{prompts[0]}", end="", flush=True)
    completions = generate(
        loaded.model,
        loaded.tokenizer,
        prompts,
        max_tokens=max_tokens,
        sampling=sampling,
        seed=seed,
        stop_strings=[*options.stop, *loaded.stop_strings],
        prefix_ids=loaded.prefix_ids,
        stop_token_ids=loaded.stop_token_ids,
        max_length=max_length,
        on_text=print_first,
    )
    print()
    for title, prompt, completion in zip(titles[1:], prompts[1:], completions[1:], strict=True):
        print(f"{title}{prompt}{completion.text}")
    if any(
        each.finish_reason == "length" and 0 < len(each.token_ids) < most
        for each, most in zip(completions, max_tokens, strict=True)
    ):
        print(
            f"(ended where prompt and text have {max_length} tokens, the most that this model"
            " takes)",
            file=sys.stderr,
        )
    if not sampling.is_greedy and options.seed is None:
        print(f"(seed {seed})", file=sys.stderr)
    return 0


def _read_stdin() -> str:
    if sys.stdin.isatty():
        print("prompt, ended with Ctrl-D:", file=sys.stderr)
    try:
        return read_stream(sys.stdin.buffer, "standard input", MAX_PROMPT_BYTES).decode("utf-8-sig")
    except UnicodeDecodeError as problem:
        raise UserError(f"standard input: not UTF-8 text (byte {problem.start})") from None


def run_serve(options: ServeOptions) -> int:
    """Serve until SIGTERM or Ctrl-C. Raises UserError."""
    try:
        import starlette  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as problem:
        raise UserError(
            f"serve: needs {problem.name}, which is not installed; {how_to_install('serve')}"
        ) from None
    from lmforge.serve.model_registry import ModelRegistry, ServingLimits
    from lmforge.serve.server import bind_socket, is_loopback, serve

    key = os.environ.get(API_KEY_VARIABLE) if options.api_key is None else options.api_key
    if key is not None and not re.fullmatch(r"[!-~]+", key):
        raise UserError(
            f"--api_key (or {API_KEY_VARIABLE}): expected printable ASCII characters without spaces"
        )
    if key is None and options.without_key:
        print(
            "warning: --without_key: whoever reaches this server can use it and change it",
            file=sys.stderr,
        )
    elif key is None and not is_loopback(options.host):
        raise UserError(
            f"--host {options.host}: others can reach this address; give an --api_key (or"
            f" {API_KEY_VARIABLE}), or --without_key"
        )
    elif key is None and options.weight_updates:
        raise UserError(
            "--weight_updates: without a key any program here could replace the weights; first"
            f" type export {API_KEY_VARIABLE}=$(head -c 16 /dev/urandom | base64) here and for the"
            " trainer, or give --without_key"
        )
    bound = bind_socket(options.host, options.port)
    limits = ServingLimits(
        options.max_batch_size,
        options.max_queue,
        options.max_length,
        options.max_models,
        options.return_routed_experts,
    )
    device, dtype = resolve_device_and_dtype(options.device, options.dtype)
    registry = ModelRegistry(
        options.models, limits, device, dtype, warn=partial(print, file=sys.stderr)
    )
    serve(registry, bound, options.host, key, options.max_body_bytes, options.weight_updates)
    return 0
