"""The part that trains.

It imports no wing: what a wing gives it is registered by name (options/builtin_names.py) and
imported when it is chosen; seams.py has the protocols.

Begin with run.py (a stage from beginning to end), then loop.py. A part uses those below it: run,
stages, loop, steps, optim and checkpoint, parallel and losses, model, data, distributed and
records, options, files.
"""
