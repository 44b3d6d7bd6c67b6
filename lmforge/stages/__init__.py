"""The stages of training: what pretrain, sft and align open and build before they call the one loop.

A stage is four functions (run_stage.StageSpec): they prepare the data, open and check the inputs, build the objective, and make
the source of batches. The loop is in train/, losses are in objectives/. Begin with run.py, then run_stage.py and setup.py.

For other packages: `run.pretrain`, `run.sft`, `run.align`; `pretrained.find_pretrained`; `build_model`, which bench/ times.
"""
