"""What is reported about a run while it runs: heartbeats, stalls, stragglers, drift of the step
time, the disk.

Nothing here changes a run, apart from ending a process that cannot continue
(`watch.timeout_seconds`). The metrics themselves are in core/steps/metrics.py. Begin with
watchdog.py, which most other files serve; console.py is what a person sees of a run. The usage of
hosts and GPUs is in `usage/`.

For other packages: `watchdog.Watchdog`, `console.ConsoleLogger`, `usage.other_trainings`.
"""
