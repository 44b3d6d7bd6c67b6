"""Experiment trackers of a run (`log.trackers`): TensorBoard, wandb, trackio, mlflow, or those of plugins.

The training process writes only the files of the run. Each tracker is a process of its own that reads them and sends what is
new: a library that is slow, fails or has no network cannot delay a step, and what could not be sent is sent when the run is
resumed. Begin with `tracker.py` (what a tracker does), then `follower.py` (that process) and
`processes.py` (how the training starts and ends it). Each other file is one tracker.

For others: `check_trackers` (`tracker.py`), `TrackerProcesses` (`processes.py`).

Not here: metrics and events themselves (train/metrics.py, train/run_events.py).
"""
