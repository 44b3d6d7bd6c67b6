"""How well a model plays by its text alone: the share of its moves that are legal, and that are the engine's.

    python recipes/chess/measure.py runs/chess data/chess/validation.jsonl

Greedy, one move a position, on positions that games.py held out.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from reward import engine_move, legal_move

from lmforge.cluster.distributed import choose_device
from lmforge.errors import UserError
from lmforge.generate.engine import generate
from lmforge.generate.model_loading import load_model
from lmforge.generate.sampling import SamplingParams
from lmforge.parallel.precision import choose_dtype

ROWS = 32
MOST_TOKENS = 12  # the longest move, "Qa1xb2+", a byte a token, and the space before it


def rates(positions: Sequence[dict[str, Any]], completions: Sequence[str]) -> dict[str, float | int | None]:
    """{"positions", "legal", "agrees"}: shares from 0 to 1; "agrees" is None where no engine has answered."""
    prompts = [position["prompt"] for position in positions]
    legal = _mean(legal_move(prompts, completions))
    agrees = _mean(engine_move(prompts, completions, [position.get("engine_move") for position in positions]))
    return {"positions": len(positions), "legal": legal, "agrees": agrees}


def _mean(rewards: Sequence[float | None]) -> float | None:
    known = [reward for reward in rewards if reward is not None]
    return sum(known) / len(known) if known else None


def written(model: Path, prompts: Sequence[str], device: str = "auto") -> list[str]:
    """What a model writes after each prompt, greedily. Raises UserError."""
    chosen = choose_device(device)
    opened = load_model(model, chosen, choose_dtype("auto", chosen)[0], warn=lambda line: print(line, file=sys.stderr))
    completions: list[str] = []
    for start in range(0, len(prompts), ROWS):
        came = generate(
            opened.model,
            opened.tokenizer,
            prompts[start : start + ROWS],
            max_tokens=MOST_TOKENS,
            sampling=SamplingParams(temperature=0.0),
            seed=0,
            prefix_ids=opened.prefix_ids,
            stop_token_ids=opened.stop_token_ids,
        )
        completions += [completion.text for completion in came]
    return completions


def main() -> int:
    """The command line."""
    words = argparse.ArgumentParser(description="Legal moves and agreement with the engine.")
    words.add_argument("model", type=Path)
    words.add_argument("positions", type=Path)
    words.add_argument("--device", default="auto")
    given = words.parse_args()
    try:
        positions = [json.loads(line) for line in given.positions.read_text("utf-8").splitlines()]
        print(json.dumps(rates(positions, written(given.model, [position["prompt"] for position in positions], given.device))))
    except OSError as error:
        print(f"measure.py: {given.positions}: {error.strerror}", file=sys.stderr)
        return 2
    except UserError as mistake:
        print(f"measure.py: {mistake}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
