"""Reward functions and the sandbox for generated programs.

Begin with functions.py: `load_reward_functions` opens the functions that a recipe names, each file
in a process of its own (function_server.py), and calls them. builtin.py holds the functions that
come with lmforge; those that run programs use sandbox.py, whose processes (code_server.py) confine
each program and watch what it takes (confinement.py). For others: `load_reward_functions`,
`RewardFunctions`, `RewardWorker` and `FunctionResult` of functions.py, and `Sandbox` of sandbox.py.
How rewards become advantages is in post/objectives/policy.py; reward models are trained by
post/objectives/preference.py and opened by post/rl/. No torch here.
"""
