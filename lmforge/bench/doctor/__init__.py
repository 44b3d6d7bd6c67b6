"""The checks of `lmforge doctor`: this machine, then all ranks of a launcher.

Begin with `doctor.py`, then `machine_checks.py` (this machine alone) and `examine_ranks.py` (phase after phase, with
`host_checks.py`, `storage_checks.py`, `device_checks.py` and `network_checks.py`). A check returns lines, `finding.Finding`.

For others: `doctor.doctor`, which the verb calls. Not here: jobs that examine other hosts (verbs/doctor.py), and whether
strategies compute the same (bench/parity_table.py).
"""
