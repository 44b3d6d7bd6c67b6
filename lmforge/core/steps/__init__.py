"""What the loop is given: metrics, saves and their resume, bad steps and rollback, and what it
calls (callbacks.py).

Begin with core/loop.py, which reads from top to bottom, then callbacks.py. What differs between
stages, and what observes a run, is in core/stages/. Optimizers and schedules are in core/optim/.
"""
