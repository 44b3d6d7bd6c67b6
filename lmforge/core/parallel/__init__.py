"""How a model is distributed over ranks, and in which precision it computes.

Begin with `parallelize.py`: it applies everything here to a model, in one order;
docs/architecture.md says why. `dims.py` derives from the options which ranks hold what;
`validate.py` refuses combinations that cannot work, before torch is imported.

For others: `parallelize`, `ParallelModel` (what the training loop calls, the same for every
engine), `parallel_dims`, `plan_batches`, `choose_engine` and the choices of `precision.py`. The
engines (`ddp`, `fsdp1`, `fsdp2`, `pipeline_parallel`) and transforms (`tensor_parallel`,
`activation_checkpointing`) are used by `parallelize` only.

Not here: how attention gathers keys and values with context parallelism (core/model/attention.py),
the options themselves (core/options/), process groups (core/distributed/), the losses
(core/losses/), checkpoints (core/checkpoint/).
"""
