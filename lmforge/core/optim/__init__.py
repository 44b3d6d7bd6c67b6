"""AdamW and Muon, the schedules of the learning rate, and how parameters are put into groups.

Begin with `optimizer.py` (`build_optimizer`).

For others: `build_optimizer`, `build_schedule`. Not here: which steps are bad
(core/steps/bad_steps.py), and the bytes of states (core/model/state_bytes.py).
"""
