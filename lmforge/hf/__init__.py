"""Reads and writes the formats of other programs.

These are config.json and safetensors folders of Hugging Face, PEFT's adapters, PyTorch's
Distributed Checkpoint (DCP), checkpoints of other trainers (by plugins), and models of
transformers, wrapped.

Our own checkpoints are in core/checkpoint/. Nothing here unpickles code, and no
code that comes with a folder runs.

Begin with resolve.py (which model config a recipe asks for), then weights.py (`load_folder`) and
export.py (`export_folder`). pretrained.py has the models that a run can begin from. Others also use
peft_folder.py and layouts.py (the import verb); config.json itself is read in
core/model/config_json.py. The transformers_*.py files make one `LanguageModel` of any causal model
of that library.
"""
