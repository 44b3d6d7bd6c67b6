"""Processes and hosts: which rank this process is, how ranks start, join, communicate decisions,
and end.

Begin with `distributed.py`: `DistributedContext`, which nearly everything above takes, and
`init_distributed`. Without torch, `environment.py` reads the variables of each launcher, and
`rendezvous.py` finds rank 0 where the launcher does not say where it is. `standby.py` keeps ranks
that are left over. `launch.py` starts ranks on this machine, `node_group.py` together with other
nodes, and ops/jobs/ starts that on other hosts.

For others: `RankInfo`, `read_rank_info`, `DistributedContext`, `init_distributed`,
`destroy_distributed`, `claim_error_reporting`, `launch_local`, `launch_on_node`.

Not here: how a model is distributed over ranks (core/parallel/), and watching ranks while they
train (ops/monitor/).
"""
