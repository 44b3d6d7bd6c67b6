"""Run in every rank: the same steps in fp32 and with float8 products, emulated.

    float8_ranks.py FILE

Writes the losses of each case, and the name, shape and dtype of every tensor that a checkpoint
would hold.
"""

import json
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

from lmforge.core.distributed import distributed as cluster
from lmforge.core.model.config import ModelConfig
from lmforge.core.options.sections import ParallelOptions
from lmforge.core.parallel.precision import convert_to_float8
from lmforge.lab.bench.parity import ParityCase, ParityData, run_case

SHAPE = ModelConfig(
    vocab_size=131,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
)

if __name__ == "__main__":
    ranks = cluster.init_distributed("cpu", threads=1)
    fsdp2 = ParityCase("fp32", ParallelOptions(engine="fsdp2"), model_config=SHAPE)
    float8 = partial(convert_to_float8, emulate=True)
    results = {}
    for case in (
        fsdp2,
        replace(fsdp2, name="float8", change_model=float8),
        replace(
            fsdp2,
            name="float8, selective-ops",
            change_model=float8,
            options=ParallelOptions(engine="fsdp2", activation_checkpointing="selective-ops"),
        ),
    ):
        result = run_case(case, ParityData(sequences=8, sequence_length=50, steps=12), ranks)
        tensors = {name: [list(tensor.shape), str(tensor.dtype)] for name, tensor in result.weights.items()}
        results[case.name] = {"losses": result.losses, "tensors": tensors, "bytes": result.memory_bytes}
    if ranks.is_rank0:
        Path(sys.argv[1]).write_text(json.dumps(results))
    cluster.destroy_distributed()
