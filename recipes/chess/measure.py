"""How well a model plays chess in text: the fractions of its moves that are legal, and that are the
engine's.

    python recipes/chess/measure.py runs/chess data/chess/validation.jsonl

The model writes one move for each validation position of games.py, by greedy decoding.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from reward import engine_move, legal_move

from lmforge.core.distributed.distributed import choose_device
from lmforge.core.errors import UserError
from lmforge.core.parallel.precision import choose_dtype
from lmforge.serve.decoding.engine import generate
from lmforge.serve.decoding.model_loading import load_model
from lmforge.serve.decoding.sampling import SamplingParams

BATCH_SIZE = 32
MAX_TOKENS = 12  # enough for the longest move, "Qa1xb2+", and the space before it, at a byte a token


def rates(positions: Sequence[dict[str, Any]], completions: Sequence[str]) -> dict[str, float | int | None]:
    """{"positions", "legal", "agrees"}: a count and two fractions; "agrees" is None without an
    engine's moves.
    """
    prompts = [position["prompt"] for position in positions]
    legal = _mean(legal_move(prompts, completions))
    agrees = _mean(engine_move(prompts, completions, [position.get("engine_move") for position in positions]))
    return {"positions": len(positions), "legal": legal, "agrees": agrees}


def _mean(rewards: Sequence[float | None]) -> float | None:
    known = [reward for reward in rewards if reward is not None]
    return sum(known) / len(known) if known else None


def complete(path: Path, prompts: Sequence[str], device_name: str) -> list[str]:
    """The completions of a model by greedy decoding. Raises UserError."""
    device = choose_device(device_name)
    loaded = load_model(path, device, choose_dtype("auto", device)[0], warn=lambda line: print(line, file=sys.stderr))
    completions: list[str] = []
    for start in range(0, len(prompts), BATCH_SIZE):
        results = generate(
            loaded.model,
            loaded.tokenizer,
            prompts[start : start + BATCH_SIZE],
            max_tokens=MAX_TOKENS,
            sampling=SamplingParams(temperature=0.0),
            seed=0,
            prefix_ids=loaded.prefix_ids,
            stop_token_ids=loaded.stop_token_ids,
        )
        completions += [completion.text for completion in results]
    return completions


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(description="Legal moves and agreement with the engine.")
    parser.add_argument("model", type=Path)
    parser.add_argument("positions", type=Path)
    parser.add_argument("--device", default="auto")
    options = parser.parse_args(arguments)
    try:
        positions = [json.loads(line) for line in options.positions.read_text("utf-8").splitlines()]
        completions = complete(options.model, [position["prompt"] for position in positions], options.device)
    except OSError as error:
        print(f"measure.py: {options.positions}: {error.strerror}", file=sys.stderr)
        return 2
    except UserError as error:
        print(f"measure.py: {error}", file=sys.stderr)
        return 2
    print(json.dumps(rates(positions, completions)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
