"""What a run needs, computed from its options and its model: memory, time and cost, what would fit; peak FLOP/s.

Begin with `memory.py` (bytes of weights, gradients and optimizer states) and `traces.py` (what a block and the head compute and
keep, traced on tensors without memory; `operators.py` counts what is traced). `planning.py` goes from a recipe to a prediction,
for `lmforge plan` and for a run; prediction/ simulates a step; `out_of_memory.py` says what would have fitted after memory ran
out. `hardware.py` reads hardware.toml, the one place with figures of GPUs and networks; `calibration.py` the file of what was
measured in their place.

For others: `ParameterCounts`, `optimizer_state_bytes` and `checkpoint_bytes`; `MemoryEstimator` and `explain_out_of_memory`;
`rank_peak_flops`, which MFU is relative to (`peak_flops.py`); `make_step_config` and `predict_step`; `ActivationTracker`.

Not here: counts of FLOPs (core/model/flops.py), and measurements of steps (bench).
"""
