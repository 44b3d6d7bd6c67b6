"""A model for lm-evaluation-harness: its tasks by name, on a checkpoint that need not be exported.

The scores are those that the harness's own Hugging Face model gives the exported checkpoint. On
several ranks the harness builds the same requests on each, as if it ran alone; the work on them is
divided among the ranks below the harness.
"""

import os
from collections.abc import Sequence
from contextlib import ExitStack, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import xxhash

from lmforge.core.distributed.distributed import DistributedContext
from lmforge.core.errors import UserError, how_to_install
from lmforge.serve.decoding.model_loading import LoadedModel
from lmforge.serve.decoding.prompts import default_prefix_id, max_input_length, with_prefix
from lmforge.serve.decoding.sampling import SamplingParams
from lmforge.serve.evaluate.likelihood import TokenPair, loglikelihoods
from lmforge.serve.evaluate.tasks import TaskSettings, generate_in_batches

try:
    import lm_eval
    from lm_eval.api.model import TemplateLM
    from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs
    from lm_eval.tasks import TaskManager
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
except ImportError as missing:
    raise UserError(
        f"lm-evaluation-harness cannot be imported ({missing}); {how_to_install('eval')}"
    ) from None

DEFAULT_MAX_GEN_TOKENS = 256  # of tasks that set none


class LMEvalModel(TemplateLM):
    """The harness's interface of a model.

    It gives likelihoods of continuations and of whole texts, and generated texts. Its `world_size`
    stays 1 on any number of ranks. Otherwise the harness would divide the questions itself, and
    each rank would have the scores of its own part.
    """

    def __init__(self, loaded: LoadedModel, dist_ctx: DistributedContext, batch_size: int) -> None:
        super().__init__()
        self._loaded = loaded
        self._dist_ctx = dist_ctx
        self._batch_size = batch_size

    @property
    def eot_token_id(self) -> int:
        return self._loaded.tokenizer.eos_token_id

    @property
    def prefix_token_id(self) -> int:
        return default_prefix_id(self._loaded.tokenizer)

    @property
    def max_length(self) -> int:
        return max_input_length(self._loaded.config)

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **kwargs: Any
    ) -> list[int]:
        ids = self._loaded.tokenizer.encode(string, parse_special_tokens=True)
        if add_special_tokens is False:
            return ids
        return with_prefix(ids, self._loaded.prefix_ids)

    @property
    def tokenizer_name(self) -> str:
        return str(self._loaded.path).replace("/", "__")

    def chat_template(self, chat_template: bool | str = False) -> str:
        return self._loaded.chat_template.jinja_source

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        return self._loaded.chat_template.render_prompt(
            chat_history, continue_final_message=not add_generation_prompt
        )

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], **kwargs: Any
    ) -> list[tuple[float, bool]]:
        pairs: list[TokenPair] = [(context, continuation) for _, context, continuation in requests]
        self._check_same_on_all_ranks(pairs)
        return list(
            loglikelihoods(self._loaded, pairs, self._dist_ctx, batch_size=self._batch_size)
        )

    def loglikelihood_rolling(
        self, requests: Sequence[Any], disable_tqdm: bool = False
    ) -> list[float]:
        pairs = []
        counts = []
        for request in requests:
            (text,) = request.args
            windows = get_rolling_token_windows(
                self.tok_encode(text),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            pairs_of_text = [(None, *make_disjoint_window(window)) for window in windows]
            pairs += pairs_of_text
            counts.append(len(pairs_of_text))
        scored = iter(self._loglikelihood_tokens(pairs))
        return [sum(next(scored)[0] for _ in range(count)) for count in counts]

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        self._check_same_on_all_ranks([request.args for request in requests])
        groups: dict[str, list[int]] = {}
        for number, request in enumerate(requests):
            groups.setdefault(repr(request.args[1]), []).append(number)
        generated: dict[int, str] = {}
        for numbers in groups.values():
            options: dict[str, Any] = dict(
                normalize_gen_kwargs(requests[numbers[0]].args[1], DEFAULT_MAX_GEN_TOKENS)
            )
            stop_strings = handle_stop_sequences(options.get("until"), eos=None)
            settings = TaskSettings(
                batch_size=self._batch_size,
                max_tokens=options["max_gen_toks"],
                stop_strings=[stop for stop in stop_strings if stop],
            )
            temperature = 0.0
            if options.get("do_sample"):
                temperature = options.get("temperature", 1.0)
            sampling = SamplingParams(
                temperature, options.get("top_k") or 0, options.get("top_p", 1.0)
            )
            prompts = [requests[number].args[0] for number in numbers]
            texts = generate_in_batches(prompts, self._loaded, self._dist_ctx, settings, sampling)
            generated |= zip(numbers, texts, strict=True)
        return [generated[number] for number in range(len(requests))]

    def _check_same_on_all_ranks(self, requests: Sequence[Any]) -> None:
        """Raise UserError on every rank where the requests differ.

        Results are matched to requests by number.
        """
        digest = xxhash.xxh3_128_hexdigest(repr(requests).encode())
        if len(set(self._dist_ctx.all_gather(digest))) > 1:
            raise UserError(
                "the ranks' tasks of lm-evaluation-harness differ; install the same version and"
                " data on every host"
            )


class _SyncedTaskManager(TaskManager):
    """A task manager that fails on every rank where it fails on one."""

    def __init__(self, dist_ctx: DistributedContext, **options: Any) -> None:
        super().__init__(**options)
        self._dist_ctx = dist_ctx

    def load(self, *arguments: Any, **options: Any) -> Any:
        with self._dist_ctx.raise_on_all():
            try:
                return super().load(*arguments, **options)
            except Exception as problem:  # of a YAML file, a dataset or the network
                reason = " ".join(str(problem).split()) or type(problem).__name__
                raise UserError(
                    f"lm-evaluation-harness cannot load its task ({reason})"
                ) from problem


def run_lm_eval(
    loaded: LoadedModel,
    tasks: Sequence[str],
    dist_ctx: DistributedContext,
    *,
    include_path: Path | None,
    num_fewshot: int | None,
    limit: int | None,
    batch_size: int,
    apply_chat_template: bool = False,
) -> dict[str, dict[str, Any]]:
    """The metrics of the harness's tasks by name.

    The tasks are those it comes with and those of the YAML files in `include_path`. Every rank
    calls it with the full model. Rank 0 gets the metrics, the same for any number of ranks; the
    others get an empty dict and print nothing. `num_fewshot` None leaves the number of examples to
    the task. With `apply_chat_template` a question is a user's message, and each example a turn
    before it. Raises UserError for an unknown task, and for a model without a chat template.
    """
    with dist_ctx.raise_on_all():
        if apply_chat_template:
            loaded.chat_template  # noqa: B018 - raises where it has none
        manager = _task_manager(tasks, dist_ctx, include_path)
    with ExitStack() as stack:
        if not dist_ctx.is_rank0:  # rank 0 shows progress bars and messages
            null = stack.enter_context(open(os.devnull, "w"))
            stack.enter_context(redirect_stdout(null))
            stack.enter_context(redirect_stderr(null))
        result = lm_eval.simple_evaluate(
            model=LMEvalModel(loaded, dist_ctx, batch_size),
            tasks=list(tasks),
            num_fewshot=num_fewshot,
            limit=limit,
            apply_chat_template=apply_chat_template,
            bootstrap_iters=0,
            task_manager=manager,
            log_samples=False,
        )
    if not dist_ctx.is_rank0:  # the harness returns scores on local rank 0 only
        return {}
    # It calls a metric `acc,none` where the task filters no answers, else `exact_match,FILTER`.
    return {
        name: {metric.removesuffix(",none"): value for metric, value in metrics.items()}
        for name, metrics in result["results"].items()
    }


def _task_manager(
    tasks: Sequence[str], dist_ctx: DistributedContext, include_path: Path | None
) -> _SyncedTaskManager:
    """A manager that has these tasks.

    Those that the harness comes with are thousands of files, and are only indexed where a name is
    not in `include_path`. Raises UserError for an unknown task.
    """
    included = str(include_path) if include_path else None
    for include_defaults in (False, True):
        manager = _SyncedTaskManager(
            dist_ctx, include_path=included, include_defaults=include_defaults
        )
        unknown = [name for name in tasks if not manager.match_tasks([name])]
        if not unknown:
            return manager
    raise UserError(
        f"{', '.join(unknown)}: no such task of lm-evaluation-harness; `lm-eval ls tasks` lists"
        " them"
    )
