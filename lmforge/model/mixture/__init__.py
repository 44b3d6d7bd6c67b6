"""Mixtures of experts. Begin with experts.py, routing and experts; their matrix products are in grouped_mm.py.

Which layers have one, and its sizes, are in model/config.py; how experts are stored on disk in interop/stored_experts.py.
"""
