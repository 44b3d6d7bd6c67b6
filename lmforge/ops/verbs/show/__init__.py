"""What `lmforge show` prints of a recipe, a model, a token folder, a run, a checkpoint, and of
data.

Begin with `show.py`. The lines of `describe.py` are those of `--dry-run` too; plans resolve models
with it. Not here: what a run looks like while it runs (ops/verbs/running), and its report.
"""
