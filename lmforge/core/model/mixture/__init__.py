"""Mixtures of experts.

Begin with experts.py, routing and experts; their matrix products are in grouped_mm.py.

Which layers have one, and its sizes, are in core/model/config.py; how experts are stored on disk in
hf/stored_experts.py.
"""
