"""Measurements of a model: losses of text, scores of tasks, and lm-evaluation-harness.

Begin with measure_loss.py (of a model, and the data by name) and tasks.py (`load_task`,
`run_task`). likelihood.py scores continuations, lm_eval_model.py is the model that the harness
calls (imported only where the harness is installed). For others: those functions, and
`run_lm_eval`.

Losses themselves are in core/losses/; what `lmforge evaluate` prints is in serve/verbs/.
"""
