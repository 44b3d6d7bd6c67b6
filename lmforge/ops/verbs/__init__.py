"""What each verb prints: a module for a verb, or for two that are alike, each with the function that `table.py` names.

Begin with `table.py`. `running/` starts runs and looks at them, `show/` says what a thing is. A module here loads what the verb
works on with the packages below, and prints the result; it computes nothing itself. The training verbs are in `stages/`,
`bench` and `doctor` in `bench/`. Only `cli.py` imports this package.
"""
