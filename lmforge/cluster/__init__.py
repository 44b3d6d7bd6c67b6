"""Processes and hosts: which rank this process is, how ranks start, join, communicate decisions, and end.

Begin with `distributed.py`: `DistributedContext`, which nearly everything above takes, and `init_distributed`. `rank_info.py`
reads the launcher's variables without torch; `launch.py` starts ranks on this machine.

For others: `RankInfo`, `read_rank_info`, `DistributedContext`, `init_distributed`, `destroy_distributed`,
`claim_error_reporting`, `launch_local`.

Not here: how a model is distributed over ranks (parallel), and watching ranks while they train (monitor).
"""
