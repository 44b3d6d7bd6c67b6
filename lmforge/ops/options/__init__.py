"""The options of the verbs that start runs, look at them and examine machines; a file for those
that are alike.

Begin with the class that `core/options/builtin_names.py` names for a verb. What they share with
training is in core/options/. No torch here.
"""
