"""What a run opens, builds and attaches before the loop begins, and what observes it.

A stage is three functions (specs.py): they prepare the data, open and check the inputs, and make
the source of batches; that of pretraining is here, the others are in post/stages.py. enter_run.py
locks a run and opens its inputs, attempt.py begins an attempt, build_model.py builds the model, and
observers.py calls all that is attached to the loop (observer.py). Begin with core/run.py, which
goes from the recipe to the loop.
"""
