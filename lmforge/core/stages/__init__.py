"""The stages of training: what pretrain, sft and align open and build before they call the one loop, and what observes a run.

A stage is three functions (specs.py): they prepare the data, open and check the inputs, and make the source of batches. Its
objective is built in objectives.py. What only alignment has is in alignment/. The loop is in train/, losses are in objectives/.
Begin with run.py, which goes from the recipe to the loop, then observers.py: all that is attached to the loop.

For other packages: `run.run_stage`; `pretrained.find_pretrained`; `build_model`, which bench/ times.
"""
