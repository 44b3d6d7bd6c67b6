"""Experiment trackers of a run (`log.trackers`): TensorBoard, wandb, trackio, mlflow, or those of
plugins.

A thread of rank 0 reads the files of the run and calls the clients: one that is slow, fails or has
no network delays no step.
Begin with `tracker.py` (what a tracker does), then `run_trackers.py` (how records reach it). Each
other file is one tracker.

Not here: metrics and events themselves (core/stages/run_files.py).
"""
