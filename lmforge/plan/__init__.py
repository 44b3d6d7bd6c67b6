"""What a run needs, computed from its options and its model: memory, time and cost, what would fit; peak FLOP/s.

Begin with `memory.py` (bytes of weights, gradients and optimizer states) and `activations.py` (bytes between forward and
backward); `out_of_memory.py` puts them together to say what would have fitted after memory ran out. `lmforge plan` is
`planning.py`, from a recipe to a prediction, and prediction/, which simulates a step. `hardware.py` reads hardware.toml, the
one place with figures of GPUs and networks; `calibration.py` the file of what was measured in their place.

For others: `ParameterCounts`, `optimizer_state_bytes` and `checkpoint_bytes`; `MemoryEstimator` and `explain_out_of_memory`;
`rank_peak_flops`, which MFU is relative to (`peak_flops.py`); `make_step_config` and `predict_step`.

Not here: counts of FLOPs (model/flops.py), and measurements of steps (bench).
"""
