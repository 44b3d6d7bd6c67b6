"""The usage of hosts and their GPUs: CPUs, memory, network, processes, disks; of this host and of others.

Begin with `host.py`, then `devices.py` and `remote_hosts.py`.
"""
