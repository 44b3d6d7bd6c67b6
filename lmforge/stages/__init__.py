"""The stages of training: what pretrain, sft and align open and build before they call the one loop.

A stage is three functions (run_stage.StageSpec): they prepare the data, open and check the inputs, and make the source of
batches. Which objective it has is in objectives.py. What only alignment has is in alignment/. The loop is in train/, losses
are in objectives/. Begin with run.py, then run_stage.py and setup.py.

For other packages: `run.pretrain`, `run.sft`, `run.align`; `pretrained.find_pretrained`; `build_model`, which bench/ times.
"""
