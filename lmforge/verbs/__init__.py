"""What each verb prints: a module for a verb, or for two that are alike, each with the function that `table.py` names.

Begin with `table.py`. `running/` starts runs and looks at them, `show/` says what a thing is. A module here opens what the verb
is about with the packages below, and prints; computing is not done here. The training verbs are in `stages/`, `bench` and
`doctor` in `bench/`. No other package uses this one, `cli.py` apart.
"""
