"""The checks of `lmforge doctor`: this machine, then all ranks of a launcher.

Begin with `machine_checks.py` (this machine alone), then `examine_ranks.py` (phase after phase, with `rank_checks.py`,
`storage_checks.py` and `network_checks.py`). A check returns lines, `finding.Finding`.

For others: `examine_machine` and `Examination`. Not here: what is printed, and jobs that examine other hosts (verbs/doctor.py);
whether strategies compute the same (bench/parity_table.py).
"""
