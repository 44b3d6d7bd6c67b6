"""The memory, time and cost of a run, computed from its options and its model, and what would fit.

Begin with `traces.py` (what a block and the head compute and keep, traced on tensors without
memory; `operators.py` counts what is traced). `planning.py` goes from a recipe to a prediction, for
`lmforge plan` and for a run (`observer.py`); prediction/ simulates a step; `out_of_memory.py` says
what would have fitted after memory ran out. `hardware.py` reads hardware.toml, the one place with
figures of GPUs and networks; `calibration.py` the file of what was measured in their place.

Not here: the bound on memory below which a run certainly fails (core/stages/run_memory.py), counts
of FLOPs (core/model/flops.py), and measurements of steps (lab/bench/).
"""
