"""Text → tokenizer → shards, once.

Reading shards is `core/data/shards/folder.py`; reading text is `data/sources/`.

Begin with `prepare.py` and `steps.py`; `shard_jobs.py` is what its processes do, `worker_pool.py`
the processes.

For other packages: `prepare`, `WorkerPool`. Not here: the examples of conversations and preferences
(`text/chat/examples.py`).
"""
