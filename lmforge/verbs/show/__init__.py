"""What `lmforge show` prints of a recipe, a model, a token folder, a run, a checkpoint, and of data.

Begin with `show.py`. `describe_data.py` and `describe_model.py` are used by `--dry-run` and plans too.
Not here: what a run looks like while it runs (verbs/running), and its report.
"""
