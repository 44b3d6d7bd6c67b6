"""A hybrid with linear attention on a CPU: its speed beside transformers' Trainer and a dense model.

Three of four layers have the gated delta rule, as in Qwen 3.5; the same model under Trainer has
transformers' torch code for it; the dense model has as many parameters. They take turns, as in
train_cpu.py. The corpus is a few long documents, so that nearly every row is of one: Trainer's model
does not begin anew at a document.
"""

import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import torch
from beside_dense import say, speed_lines, speeds_of
from contenders import TRAINER, WARM_UP_STEPS, Contest
from setting import (
    add_turns,
    benchmark_parser,
    machine,
    machine_lines,
    tokens_of_stdlib,
    write_result,
)

from lmforge.core.model.config import ModelConfig
from lmforge.core.model.config_json import to_config_json
from lmforge.core.model.flops import parameter_count
from lmforge.core.parallel.precision import missing_for_compile

HYBRID = "lmforge, hybrid"
GOALS = {TRAINER: 1.5}


def shapes(tiny: bool) -> tuple[ModelConfig, ModelConfig]:
    """The hybrid, and a dense model of about as many parameters.

    Written out, so that results stay comparable when presets change.
    """
    vocabulary, width, inner, layers = (512, 32, 64, 4) if tiny else (4096, 384, 1152, 8)
    hybrid = ModelConfig(
        vocabulary,
        width,
        layers,
        4 if tiny else 6,
        inner,
        model_type="qwen3_5_text",
        num_key_value_heads=2,
        head_dim=8 if tiny else 64,
        partial_rotary_factor=0.25,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=8 if tiny else 96,
        linear_value_head_dim=8 if tiny else 96,
        linear_conv_kernel_dim=4,
    )
    dense = ModelConfig(
        vocabulary, width, layers, hybrid.num_attention_heads, inner, model_type="qwen3"
    )
    more = parameter_count(hybrid).total - parameter_count(dense).total
    return hybrid, replace(dense, intermediate_size=inner + round(more / (3 * width * layers)))


def main() -> int:
    parser = benchmark_parser(__doc__, 7, "turns of each")
    add_turns(parser)
    parser.add_argument(
        "--tiny", action="store_true", help="small models, uncompiled: to see that this works"
    )
    chosen = parser.parse_args()
    if chosen.rounds < 1 or chosen.threads < 1:
        parser.error("--rounds, --threads: at least 1")
    environment = machine()
    left_out = ["bf16: the rule is computed in fp32 by all"]
    missing = missing_for_compile(torch.device("cpu"))
    compiled = not chosen.tiny and missing is None
    if not compiled:
        reason = f"{missing} on this machine" if missing else "--tiny leaves it out"
        left_out.append(f"nothing is compiled: {reason}")
    hybrid, dense = shapes(chosen.tiny)
    rows, length = (2, 96) if chosen.tiny else (8, 256)
    what = (
        f"{parameter_count(hybrid).total:,} parameters beside {parameter_count(dense).total:,};"
        f" {hybrid.num_hidden_layers} layers of {hybrid.hidden_size}; {rows} × {length} tokens per"
        f" step, {chosen.threads} threads; {chosen.rounds} interleaved rounds of"
        f" {chosen.seconds:g} s after {WARM_UP_STEPS} steps of warm-up; median (low–high), ratios"
        " in a round"
    )
    for line in (*machine_lines(environment), what, *left_out):
        say(line)
    with tempfile.TemporaryDirectory(prefix="hybrid-cpu-") as name:
        folder = Path(name)
        tokens_of_stdlib(
            folder,
            files=40 if chosen.tiny else None,
            vocab_size=hybrid.vocab_size,
            long_documents=10,
        )
        contest = Contest(hybrid, rows, length, chosen.threads, "fp32", compiled, 0, folder)
        results = {"fp32": speeds_of(contest, dense, chosen.rounds, chosen.seconds, HYBRID, GOALS)}
    record = {
        "benchmark": "hybrid_cpu",
        "machine": environment,
        "what": what,
        "shapes": {"hybrid": to_config_json(hybrid), "dense": to_config_json(dense)},
        "rows": rows,
        "length": length,
        "threads": chosen.threads,
        "rounds": chosen.rounds,
        "seconds": chosen.seconds,
        "left_out": left_out,
        "dtypes": results,
    }
    lines = ["# A hybrid with linear attention on a CPU", "", *machine_lines(environment)]
    lines += [f"- {what}", *(f"- {reason}" for reason in left_out)]
    readable = "\n".join([*lines, *speed_lines(results, "hybrid")])
    path = write_result("hybrid_cpu", record, readable, chosen.out)
    say(f"\n{readable}\n\nwritten to {path} and .json beside it")
    return 0


if __name__ == "__main__":
    sys.exit(main())
