"""Reading and writing the formats of other programs: config.json and safetensors folders of Hugging Face, PEFT's adapters,
PyTorch's Distributed Checkpoint (DCP), checkpoints of other trainers (by plugins), and models of transformers, wrapped.

Our own checkpoints are in checkpoint/, which reads DCP files through torch_checkpoints.py. Nothing here unpickles code, and no
code that comes with a folder runs.

What a path or a name stands for is decided in kinds.py.

Begin with resolve.py (which model config a recipe asks for), then weights.py (`load_folder`, `merge_adapters`) and export.py
(`export_folder`). Other packages also use config_json.py, peft_folder.py and layouts.py (the import verb). The
transformers_*.py files make one `LanguageModel` of any causal model of that library.
"""
