"""Measure a run, and write it as a folder that transformers opens.

`python examples/evaluate_and_export.py RUN OUT`
"""

import sys

import lmforge

run, out = sys.argv[1:3] if len(sys.argv) > 2 else ("runs/example", "exported")

model = lmforge.load_model(run, dtype="fp32")
measured = lmforge.evaluate_model(model, sequences=64)  # on the validation part of what it was trained on
print(f"loss {measured['loss']:.4f}, {measured['bits_per_byte']:.4f} bits per byte, on {measured['tokens']:,} tokens")

lmforge.export_model(run, out, dtype="fp32", overwrite=True)

# The written folder has the same model.
again = lmforge.evaluate_model(
    lmforge.load_model(out, dtype="fp32"), measured["data"], sequences=64, sequence_length=measured["sequence_length"]
)
print(f"{out}: loss {again['loss']:.4f}")
