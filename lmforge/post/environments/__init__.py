"""Environments: what a model talks to over several turns, and the tools that it calls there.

Begin with environment.py: what an environment is, and TRL's classes as one. process.py opens the
one that a recipe names, in processes of its own (server.py); builtin.py holds the calculator and
the Python tool, openenv.py and verifiers.py have those of other packages. tool_schema.py makes the
schema of a tool from a function; appending.py makes token ids of turns, so that what is trained is
what was sampled. Rewards are in post/rewards/, which completions a run samples in post/rl/. No
torch here.
"""
