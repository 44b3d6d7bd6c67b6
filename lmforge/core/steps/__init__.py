"""The loop, and what it is given: optimizers, schedules, metrics, checkpoints and their resume, bad steps and rollback.

What differs between stages, and what observes a run, is in core/stages/. Begin with loop.py, which reads from top to bottom,
then callbacks.py, which says what a stage gives the loop.

For other packages: `loop.train`; `callbacks.BatchSource` and `LoopCallbacks`;
`optimizers.optimizer.build_optimizer`; `checkpoints`, `metrics`, `resume`, `determinism`.
"""
