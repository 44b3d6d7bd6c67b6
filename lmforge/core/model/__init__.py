"""Our architectures: their families, configs and presets, attention, caches, adapters and FLOPs.

Begin with modules/decoder.py, the blocks of most families, then layers.py (`LanguageModel`: what
every model offers), attention.py and family.py (what a family is). Others use `build_model`
(build.py), `ModelConfig` (config.py), `LanguageModel`, `init_weights`, `add_lora` (lora.py) and
flops.py. config.py, config_json.py, resolve.py and flops.py do not import torch.

Folders of weights are read in hf/, and a model is distributed in core/parallel/.
"""
