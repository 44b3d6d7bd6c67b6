"""The modules that compute the families (model/families), of the parts in model/layers.py and model/attention.py.

Begin with `decoder.py`; `gpt2.py` has learned positions and stores its matrices transposed.

For others: they are named in families, and only loaded through `build_model`. Not here: what a family is (model/family.py).
"""
