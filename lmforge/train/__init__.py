"""The loop, and everything that it drives: optimizers, metrics, bad steps, resume and rollback, stop signals, validation.

What differs between stages is in stages/, which opens the data and builds the Trainer. Begin with loop.py, which reads from top
to bottom, then trainer.py, which says what the loop is given.

For other packages: `loop.train` and `train_step`; `trainer.Trainer` and `BatchSource`; `inputs.RunContext`, `RunInputs` and
`ResumePoint`; `optimizers.optimizer.build_optimizer`; `metrics`, `resume`, `validation`, `determinism`.
"""
