"""Measurements of the cost of a step, and the comparison of every parallel strategy.

Begin with `step_timing.py` (`lmforge bench`; `trial.py` times one recipe). `parity.py` trains a
small model under each strategy and compares it with one process, `parity_table.py` prints that
(`lmforge doctor --parity`); `coordinates.py` measures what modules compute over widths and depths,
`coordinates_table.py` prints it (`lmforge doctor --coordinates`); `bounds.py` is the table of how
far two trainings may be apart. `calibrate.py` measures the constants that plans use instead of data
sheets (`lmforge bench --calibrate`).

For others: `bench`, `bounds.py`. The tests of the strategies use `parity` too.

Not here: estimates (lab/plan/), the checks of this machine (ops/doctor/), and the comparison with
other trainers (benchmarks/ beside the package).
"""
