"""The verbs that start runs and look at them: launch, stop, run, logs, top, runs and report.

Begin with the file that `core/options/builtin_names.py` names. ops/jobs/ starts jobs, and
ops/monitor/ reads the state of runs. The stages themselves are in core/run.py and post/stages.py.
For others: nothing; `cli.py` calls these verbs.
"""
