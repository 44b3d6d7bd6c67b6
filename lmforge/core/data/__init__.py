"""Prepared tokens to batches: shards → order → packed sequences → batches. No models here.

Begin with `loader.py` (a step's batches), then `dataset.py` (sample number → sequence) and
`packing.py`. Token shards are read in `shards/`. Text becomes tokens in text/prepare/,
conversations and preferences in text/chat/.

For other packages: `Batch`, `BatchLoader`, `PackedDataset`, `TokenDataset`, `TokenFolder`,
`Tokenizer`, `IGNORE_INDEX`, `derive_key`, `token_rng_keys`. A module may use those before it in:
tokenizer, order, labels, packing, shards, dataset, batch, loader.
"""
