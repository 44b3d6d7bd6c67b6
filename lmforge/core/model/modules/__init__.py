"""The modules that compute the families (core/model/families), of the parts in core/model/layers.py
and core/model/attention.py.

Begin with `decoder.py`; `gpt2.py` has learned positions and stores its matrices transposed.

For others: they are named in families, and only loaded through `build_model`. Not here: what a
family is (core/model/family.py).
"""
