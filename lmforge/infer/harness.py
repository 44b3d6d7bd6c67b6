"""A model as lm-evaluation-harness asks it: tasks by their names there, on a checkpoint as it is, without exporting it.

The scores are those that the harness's own reader of Hugging Face models gives the exported model. On several ranks each has
the harness build the same requests, as if it were alone; only the work on them is shared out, below the harness.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import xxhash

from lmforge.cluster.ranks import Ranks
from lmforge.errors import Mistake
from lmforge.infer.likelihood import Pair, Readable, beginning, likelihoods, longest_row
from lmforge.infer.sampling import Sampling
from lmforge.infer.tasks import write_after

try:
    import lm_eval
    from lm_eval.api.model import TemplateLM
    from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs
    from lm_eval.tasks import TaskManager
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
except ImportError as missing:
    raise Mistake(f"lm-evaluation-harness cannot be imported ({missing}); pip install 'lmforge[eval]'") from None

LONGEST_ANSWER_TOKENS = 256  # where a task does not say


class HarnessModel(TemplateLM):
    """What the harness calls a model: likelihoods of continuations and of whole texts, and texts that are written.

    Its `world_size` stays 1 on any number of ranks: with more the harness would share out the questions itself, and each
    rank would have scores of its own share.
    """

    def __init__(self, opened: Readable, ranks: Ranks, batch_rows: int) -> None:
        super().__init__()
        self._opened, self._ranks, self._batch_rows = opened, ranks, batch_rows

    @property
    def eot_token_id(self) -> int:
        return self._opened.tokenizer.separator_id

    @property
    def prefix_token_id(self) -> int:
        return beginning(self._opened.tokenizer)

    @property
    def max_length(self) -> int:
        return longest_row(self._opened.config)

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        opening = [] if add_special_tokens is False else self._opened.opening
        return [*opening, *self._opened.tokenizer.encode(string)]

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], **kwargs: Any
    ) -> list[tuple[float, bool]]:
        pairs: list[Pair] = [(context, continuation) for _, context, continuation in requests]
        self._check_same(pairs)
        found = likelihoods(self._opened, pairs, self._ranks, batch_rows=self._batch_rows)
        return [(each.log_probability, each.greedy) for each in found]

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        texts = [
            [
                make_disjoint_window(window)
                for window in get_rolling_token_windows(
                    self.tok_encode(text), prefix_token=self.prefix_token_id, max_seq_len=self.max_length, context_len=1
                )
            ]
            for (text,) in (request.args for request in requests)
        ]
        found = iter(self._loglikelihood_tokens([(None, *window) for windows in texts for window in windows]))
        return [sum(next(found)[0] for _ in windows) for windows in texts]

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        self._check_same([request.args for request in requests])
        groups: dict[str, list[int]] = {}
        for number, request in enumerate(requests):
            groups.setdefault(repr(request.args[1]), []).append(number)
        written: dict[int, str] = {}
        for numbers in groups.values():
            options: dict[str, Any] = dict(normalize_gen_kwargs(requests[numbers[0]].args[1], LONGEST_ANSWER_TOKENS))
            sampled = bool(options.get("do_sample"))
            texts = write_after(
                self._opened,
                [requests[number].args[0] for number in numbers],
                self._ranks,
                batch_rows=self._batch_rows,
                max_tokens=options["max_gen_toks"],
                stop=[stop for stop in handle_stop_sequences(options.get("until"), eos=None) if stop],
                sampling=Sampling(
                    options.get("temperature", 1.0) if sampled else 0.0, options.get("top_k") or 0, options.get("top_p", 1.0)
                ),
            )
            written |= zip(numbers, texts, strict=True)
        return [written[number] for number in range(len(requests))]

    def _check_same(self, asked: Sequence[Any]) -> None:
        """Raise Mistake, on every rank, where one is asked other things: answers go by the numbers of requests."""
        if len(set(self._ranks.gather(xxhash.xxh3_128_hexdigest(repr(asked).encode())))) > 1:
            raise Mistake("the ranks' tasks of lm-evaluation-harness differ; have the same version and data on every host")


class _AgreeingManager(TaskManager):
    """Loads tasks on every rank, or on none."""

    def __init__(self, ranks: Ranks, **options: Any) -> None:
        super().__init__(**options)
        self._ranks = ranks

    def load(self, *arguments: Any, **options: Any) -> Any:
        with self._ranks.agreeing():
            try:
                return super().load(*arguments, **options)
            except Exception as problem:  # a YAML file's, a dataset's or the network's
                reason = " ".join(str(problem).split()) or type(problem).__name__
                raise Mistake(f"lm-evaluation-harness cannot load its task ({reason})") from problem


def run_harness(
    opened: Readable,
    names: Sequence[str],
    ranks: Ranks,
    *,
    folder: Path | None = None,
    few_shot: int | None = None,
    limit: int | None = None,
    batch_rows: int = 16,
) -> dict[str, dict[str, Any]]:
    """The metrics of tasks of the harness, by task: those that it comes with, and those of the YAML files in `folder`.

    Every rank calls it, and has the model whole; the first gets the metrics, the same for any number of ranks, and the
    others none: they say nothing either.

    few_shot: examples before each question; None leaves it to the task. Raises Mistake for a name that is no task.
    """
    with ranks.agreeing():
        manager = _manager(names, ranks, folder)
    with _quiet(unless=ranks.first):
        result = lm_eval.simple_evaluate(
            model=HarnessModel(opened, ranks, batch_rows),
            tasks=list(names),
            num_fewshot=few_shot,
            limit=limit,
            bootstrap_iters=0,
            task_manager=manager,
            log_samples=False,
        )
    # It keeps its scores from all but local rank 0.
    return {name: dict(metrics) for name, metrics in result["results"].items()} if ranks.first else {}


def _manager(names: Sequence[str], ranks: Ranks, folder: Path | None) -> _AgreeingManager:
    """What knows the tasks of these names. Its own are thousands of files: gone through only where a name is none of the
    folder's. Raises Mistake."""
    included = str(folder) if folder else None
    manager = _AgreeingManager(ranks, include_path=included, include_defaults=False)
    if _unknown(manager, names):
        manager = _AgreeingManager(ranks, include_path=included)
    unknown = _unknown(manager, names)
    if unknown:
        raise Mistake(f"{', '.join(unknown)}: no such task of lm-evaluation-harness; `lm-eval ls tasks` lists them")
    return manager


@contextmanager
def _quiet(unless: bool) -> Iterator[None]:
    """Without the harness's bars and lines, which every rank would print."""
    if unless:
        yield
        return
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
        yield


def _unknown(manager: Any, names: Sequence[str]) -> list[str]:
    return [name for name in names if not manager.match_tasks([name])]
