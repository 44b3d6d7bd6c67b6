"""Experiment trackers of a run (`log.trackers`): TensorBoard, wandb, trackio, mlflow, or those of
plugins.

Each tracker has a thread of rank 0, which reads the files of the run: a client that is slow, fails
or has no network delays no step. Begin with `tracker.py` (what a tracker does), then
`tracker_threads.py` (how records reach it). Each other file is one tracker.

For others: `check_trackers` (`tracker.py`), `TrackerThreads` (`tracker_threads.py`).

Not here: metrics and events themselves (core/stages/attempt.py).
"""
