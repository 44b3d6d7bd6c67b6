"""Weights in 4 or 8 bits, and linear layers that compute with them. Begin with blocks.py.

For others: `BlockFormat` (formats.py), the functions of blocks.py, `QuantizedMatrix` (matrices.py).
Not here: which layers are quantized (lora.py), how weights are read (hf/), and optimizers, whose states
have the same blocks.
"""
