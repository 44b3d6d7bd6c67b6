"""The usage of hosts and their GPUs: CPUs, memory, network, processes, disks; of this host and of
others.

Begin with `host.py`, then `devices.py` and `remote_hosts.py`.

For others: the classes of `host.py`, `other_trainings`, and `DiskMonitor` of `disk.py`. Not here:
how they are shown (ops/verbs/running/top_screen.py), and the memory that a process may still
allocate (core/distributed/memory.py).
"""
