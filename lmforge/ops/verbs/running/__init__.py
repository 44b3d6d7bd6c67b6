"""The verbs that start runs and look at them: launch, jobs, stop, run, logs, top, runs, compare and report.

Begin with the file that `core/options/verbs.py` names. ops/jobs starts jobs, and monitor/ reads the state of runs.
The stages themselves are in stages/. For others: nothing; `cli.py` calls these verbs.
"""
