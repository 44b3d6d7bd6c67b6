"""Folders whose weights are quantized.

Begin with bitsandbytes_folder.py; DeepSeek's float8 is read in hf/weights.py.
"""
