"""Runs that are killed, stopped, filled up and damaged at random, and continued by the same
command: what is lost?

    python -m tests.chaos --faults 200 [--seed N] [--minutes M] [--output FILE.json]

`plan.py` draws what goes wrong and when, `processes.py` starts real ranks and watches them,
`faults.py` does the harm, `life.py` leads one run through its faults to its last step and compares
it with a run that nobody disturbed. `rollouts.py` does that with runs that are sampled ahead by
servers (`servers.py`).
"""
