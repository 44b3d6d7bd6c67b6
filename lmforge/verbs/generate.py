"""`lmforge generate`: text after one or more prompts, printed as it is generated."""

import secrets
import sys
from collections.abc import Callable
from functools import partial

from lmforge.config.verbs import GenerateOptions
from lmforge.errors import UserError
from lmforge.generate.engine import Completion, generate
from lmforge.generate.model_loading import load_model, resolve_device_and_dtype
from lmforge.generate.sampling import SamplingParams


def run_generate(options: GenerateOptions) -> int:
    """Continue each prompt and print the text as it is generated. Raises UserError."""
    prompts = list(options.prompts) or [_read_stdin()]
    loaded = load_model(
        options.model, *resolve_device_and_dtype(options.device, options.dtype), warn=partial(print, file=sys.stderr)
    )
    seed = options.seed if options.seed is not None else secrets.randbelow(2**31)
    generate_all = partial(
        generate,
        loaded.model,
        loaded.tokenizer,
        prompts,
        max_tokens=options.max_tokens,
        sampling=SamplingParams(options.temperature, options.top_k, options.top_p),
        seed=seed,
        stop_strings=options.stop,
        prefix_ids=loaded.prefix_ids,
        stop_token_ids=loaded.stop_token_ids,
    )
    if len(prompts) == 1:
        print(prompts[0], end="", flush=True)
        generate_all(on_text=lambda index, piece: print(piece, end="", flush=True))
        print()
    else:
        _print_several(prompts, generate_all)
    if options.temperature > 0 and options.seed is None:
        print(f"(seed {seed})", file=sys.stderr)
    return 0


def _read_stdin() -> str:
    if sys.stdin.isatty():
        print("prompt, ended with Ctrl-D:", file=sys.stderr)
    try:
        return sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError as problem:
        raise UserError(f"standard input: not UTF-8 text (byte {problem.start})") from None


def _print_several(prompts: list[str], generate_all: Callable[..., list[Completion]]) -> None:
    """Completions of several prompts are generated together: the first is printed as it comes, the others at the end."""
    print(f"--- 1 ---\n{prompts[0]}", end="", flush=True)
    completions = generate_all(on_text=lambda index, piece: None if index else print(piece, end="", flush=True))
    print()
    for index in range(1, len(prompts)):
        print(f"--- {index + 1} ---\n{prompts[index]}{completions[index].text}")
