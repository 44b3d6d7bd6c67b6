"""What hosts and their GPUs do: CPUs, memory, network, processes, disks; of this host, and asked of others.

Begin with `host.py`, then `devices.py` and `remote_hosts.py`.
"""
