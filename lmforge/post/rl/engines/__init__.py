"""Servers that sample for a run: what one is asked by HTTP, and starting them.

Begin with `rollout_server.py`. Which server gets which request is in `post/rl/servers.py`.
"""
