"""What is reported about a run while it runs: heartbeats, stalls, stragglers, drift of the step time, the disk.

Nothing here changes a run, apart from ending a process that cannot continue (`watch.timeout_seconds`). Metrics and the log are
in train/metrics.py. Begin with watchdog.py, which the other files serve. The usage of hosts and GPUs is in `usage/`.

For other packages: `watchdog.Watchdog`, `usage.other_trainings`.
"""
