"""Jobs of `lmforge launch`: the scripts that start a run on other hosts, and how they are
submitted, found and stopped.

Begin with `job.py`: `JobPlan` (what to start) and `Job` (what was started). `scripts.py` writes the
scripts; `slurm.py`, `pbs.py` and `sessions.py` (this machine, ssh, mpiexec) submit them;
`launchers.py` chooses one of these. `code_snapshot.py` records the code.

For others: `Job`, `JobPlan` and the functions of `launchers.py`, which the verbs in
ops/verbs/running and `doctor` call.

Not here: what happens on a node once its script runs (`node_group.py`, `launch.py`), and the verbs,
which know runs.
"""
