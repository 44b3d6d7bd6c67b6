"""The verbs that start runs and look at them: launch, jobs, stop, run, logs, top, runs and report.

Begin with the file that `verbs/table.py` names. How jobs are started is in cluster/jobs, what is read of runs in monitor/.
"""
