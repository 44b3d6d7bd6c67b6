"""The prediction of what a step of a run will need and how long it will take.

Begin with predict.py (`predict`, and `run_cost` for the whole run). step_config.py has its inputs;
costs.py prices the traces of a block, the head and its loss; rates.py says how fast a device and
its network are; program.py is the step as a list of operations in the order in which the engines
issue them, and simulator.py runs that list on streams; search.py tries configurations.
"""
