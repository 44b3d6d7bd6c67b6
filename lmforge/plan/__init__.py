"""What a run needs, computed from its options and its model: memory, time and cost, what would fit; peak FLOP/s.

Begin with `memory.py` (bytes of weights, gradients and optimizer states) and `block_trace.py` (what a block computes and keeps,
traced on tensors without memory; `head_trace.py` for the head, `operators.py` counts what is traced, `activation_tracker.py`
what is kept); `out_of_memory.py` says what would have fitted after memory ran out. `lmforge plan` is
`planning.py`, from a recipe to a prediction, and prediction/, which simulates a step. `hardware.py` reads hardware.toml, the
one place with figures of GPUs and networks; `calibration.py` the file of what was measured in their place.

For others: `ParameterCounts`, `optimizer_state_bytes` and `checkpoint_bytes`; `MemoryEstimator` and `explain_out_of_memory`;
`rank_peak_flops`, which MFU is relative to (`peak_flops.py`); `make_step_config` and `predict_step`.

Not here: counts of FLOPs (model/flops.py), and measurements of steps (bench).
"""
