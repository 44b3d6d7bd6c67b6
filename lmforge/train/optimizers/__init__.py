"""AdamW, Muon and SGD, the schedules of the learning rate, and how parameters are put into groups.

Begin with `optimizer.py` (`build_optimizer`).
"""
