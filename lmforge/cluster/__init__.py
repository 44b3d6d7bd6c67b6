"""Hosts, ranks and how processes are started."""
