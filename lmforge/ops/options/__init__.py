"""The options of the verbs that do not train; a file for those that are alike. What they share is in operation.py above.

Begin with the class that `core/options/verbs.py` names for a verb. For others: these classes. Not here: the options of training
stages (stage.py, tuning.py, align.py above). No torch here.
"""
