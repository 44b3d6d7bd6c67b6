"""Verbs that start runs and look at them: what each prints.

A verb is a function that takes its options; it works on with the packages of its wing and those
below, and prints the result.

Begin with the file that `core/options/builtin_names.py` names. For others: nothing; `cli.py` calls
these verbs.
"""
