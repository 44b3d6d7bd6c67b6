"""Language-model training end to end in plain PyTorch."""

__version__ = "0.1.0"
