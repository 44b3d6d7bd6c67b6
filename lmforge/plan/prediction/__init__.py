"""What a step of a run will need and how long it will take.

Begin with predict.py (`predict`). step_config.py has its inputs; block.py prices the trace of a block of the model, head.py
its head and the loss; units.py has the parts of a model on a rank; rates.py says
how fast a device and its network are; program.py is the step as a list of operations in the order in which the engines issue
them, and simulator.py runs that list on streams; predict.py puts them together, run_cost.py goes from a step to the whole
run, search.py tries configurations.
"""
