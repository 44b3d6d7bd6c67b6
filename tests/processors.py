"""Tests that compare numbers, under settings with which this processor computes as others do.

    python -m tests.processors [SETTING …]     the tests below, under these settings (default: all)
    python -m tests.processors --judged both   only those whose bounds are measured by rounding
                                               (tests/support/rounding.py)

Each setting first prints how many bits of a fixed product, a softmax and an exponential it changes
here. One that changes none does not count. The settings reach every process that a test starts,
since it inherits the environment.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
SETTINGS = {
    "avx2": {"ATEN_CPU_CAPABILITY": "avx2"},
    "compatible": {"MKL_CBWR": "COMPATIBLE"},
    "both": {"ATEN_CPU_CAPABILITY": "avx2", "MKL_CBWR": "COMPATIBLE"},
    # torch's compiler fails under it: tests/support/tools.py finds none.
    "default": {"ATEN_CPU_CAPABILITY": "default", "MKL_CBWR": "COMPATIBLE"},
}
# Fewer would say little about other processors.
LEAST_SETTINGS = 3
# Where tests compare numbers, and the files there that compare none.
FOLDERS = (
    "core/model",
    "core/losses",
    "core/optim",
    "core/parallel",
    "core/steps",
    "hf",
    "serve/decoding",
    "serve/evaluate",
    "post/objectives",
    "post/rl",
    "distributed",
)
WITHOUT_NUMBERS = (
    "core/model/test_shapes.py",
    "core/steps/test_profiling.py",
    "distributed/test_chaos.py",
    "distributed/test_hub.py",
    "distributed/test_logs.py",
    "distributed/test_signals.py",
    "distributed/test_top.py",
    "distributed/test_watch.py",
    "hf/test_hub.py",
    "hf/test_kinds.py",
    "post/rl/test_tuning_input.py",
)
# Tests whose bound is a multiple of how far one process is from itself, and what of each is judged
# so.
NORM = ("gradient_norm",)
WEIGHTS = ("weights",)
JUDGED = {
    f"tests/{file}::{test}": judged
    for file, test, judged in (
        (
            "distributed/test_mixture.py",
            "test_a_run_whose_phases_are_added_while_it_is_stopped_on_other_ranks_is_the_run_that_had_them_from_the_start",
            NORM + WEIGHTS,
        ),
        (
            "post/rl/test_rollout_engines.py",
            "test_in_a_pipeline_servers_get_the_weights_and_adapters_of_all_stages",
            NORM,
        ),
        (
            "post/rl/test_rollout_engines.py",
            "test_a_policy_that_ranks_split_learns_from_servers_what_one_process_does[grpo-tensor]",
            NORM,
        ),
        (
            "post/rl/test_rollout_engines.py",
            "test_adapters_are_merged_into_the_weights_that_servers_get",
            NORM,
        ),
        (
            "post/rl/test_routed_experts.py",
            "test_runs_replay_the_experts_of_the_trainer_itself_and_of_a_server_and_resume_amid_a_set",
            NORM,
        ),
        (
            "serve/evaluate/test_tasks_in_training.py",
            "test_scores_while_training_are_those_of_the_checkpoints_and_the_best_can_be_kept",
            ("val/chosen/bits_per_byte",),
        ),
        (
            "distributed/test_foreign.py",
            "test_losses_and_weights_are_those_of_one_process[mixtral fsdp2]",
            NORM + WEIGHTS,
        ),
        (
            "distributed/test_same_result.py",
            "test_nor_do_those_of_other_models[gpt2 ddp-gpt2 single]",
            NORM + WEIGHTS,
        ),
        (
            "distributed/test_balance.py",
            "test_a_run_that_is_cut_and_continued_on_other_ranks_is_the_uncut_one[fsdp2]",
            NORM + WEIGHTS,
        ),
        (
            "distributed/test_elastic.py",
            (
                "test_three_ranks_share_a_batch_of_eight_sequences_as_one_rank_reads_it[--train.micro_batch_size 2]"
            ),
            NORM + WEIGHTS,
        ),
        (
            "distributed/test_expert_parallel.py",
            "test_a_run_in_legs_with_other_expert_parallel_degrees_is_the_run_of_one_process[0]",
            WEIGHTS,
        ),
        (
            "distributed/test_optimizers.py",
            "test_losses_and_weights_do_not_depend_on_the_strategy[muon fsdp2 on 2]",
            WEIGHTS,
        ),
        (
            "distributed/test_strategies.py",
            "test_losses_gradient_norms_and_weights_are_those_of_one_process[3-llama ddp]",
            NORM + WEIGHTS,
        ),
        (
            "distributed/test_dropout.py",
            "test_masks_do_not_depend_on_the_strategy[2-llama tensor 2]",
            NORM + WEIGHTS,
        ),
        (
            "distributed/test_lora.py",
            "test_losses_gradient_norms_and_adapters_are_those_of_one_process[2-llama ddp]",
            NORM + WEIGHTS,
        ),
    )
}
PROGRAM = """
import torch
draw = torch.Generator().manual_seed(0)
torch.set_num_threads(1)
one, other = torch.randn(96, 200, generator=draw), torch.randn(200, 112, generator=draw)
scores = torch.randn(64, 333, generator=draw)
for result in (one @ other, scores.softmax(-1), scores.exp()):
    print(bytes(result.flatten().view(torch.uint8).tolist()).hex())
"""
COMPUTED = ("product", "softmax", "exponential")


def changed_bits(setting: str) -> dict[str, int]:
    """How many bits of what PROGRAM computes differ from those without a setting."""
    plain = {name: word for name, word in os.environ.items() if name not in SETTINGS["both"]}
    ours, theirs = (
        subprocess.run(
            [sys.executable, "-c", PROGRAM],
            env=variables,
            capture_output=True,
            text=True,
            check=True,
        ).stdout.split()
        for variables in ({**plain, **SETTINGS[setting]}, plain)
    )
    bits = (
        (int(one, 16) ^ int(other, 16)).bit_count() for one, other in zip(ours, theirs, strict=True)
    )
    return dict(zip(COMPUTED, bits, strict=True))


def files() -> list[str]:
    """The test files that compare numbers."""
    chosen = (
        path for folder in FOLDERS for path in sorted((ROOT / "tests" / folder).glob("test_*.py"))
    )
    return [
        str(path.relative_to(ROOT))
        for path in chosen
        if str(path.relative_to(ROOT / "tests")) not in WITHOUT_NUMBERS
    ]


def carry_out(setting: str, tests: Sequence[str], jobs: int) -> int:
    """Run tests under a setting and return the exit status of pytest."""
    words = ["-m", "not gpu", "--numprocesses", str(jobs), "--dist", "loadfile", *tests]
    # torch's cache of compiled code does not know the setting: without it, code for narrower
    # vectors writes beyond its arrays.
    with tempfile.TemporaryDirectory() as compiled:
        variables = {**os.environ, **SETTINGS[setting], "TORCHINDUCTOR_CACHE_DIR": compiled}
        return subprocess.run(
            [sys.executable, "-m", "pytest", *words], cwd=ROOT, env=variables
        ).returncode


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.processors", description="Tests under settings of processors."
    )
    parser.add_argument("--jobs", type=int, default=2, help="processes that share the tests")
    parser.add_argument(
        "--judged", action="store_true", help="only tests whose bounds are measured by rounding"
    )
    parser.add_argument(
        "settings", nargs="*", metavar="SETTING", help=f"of {', '.join(SETTINGS)} (default: all)"
    )
    chosen = parser.parse_args(arguments)
    settings = chosen.settings or [*SETTINGS]
    results = {}
    for setting in settings:
        bits = changed_bits(setting)
        words = " ".join(f"{name}={word}" for name, word in SETTINGS[setting].items())
        print(
            f"{words}: {', '.join(f'{count} bits of the {name}' for name, count in bits.items())}"
            " differ",
            flush=True,
        )
        if any(bits.values()):
            results[setting] = carry_out(
                setting, [*JUDGED] if chosen.judged else files(), chosen.jobs
            )
        else:
            print("it changes nothing here, and does not count")
    # A setting that was asked for by name may change nothing on this processor, and then has
    # nothing to show.
    few = not chosen.settings and len(results) < LEAST_SETTINGS
    if few:
        print(f"{len(results)} settings count, and {LEAST_SETTINGS} should", file=sys.stderr)
    for setting, status in results.items():
        print(f"{setting:<12} {'passed' if status == 0 else f'FAILED (status {status})'}")
    return 1 if few or any(results.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
