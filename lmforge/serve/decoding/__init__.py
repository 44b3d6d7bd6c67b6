"""Text generation: load a model, decode batches of requests with a KV cache, sample, stream text.

Begin with engine.py (`Engine`, `generate`); sampling.py turns logits into tokens, text_streamer.py
tokens into text, and model_loading.py opens runs, checkpoints, Hugging Face folders and adapters.
For others: `load_model`, `LoadedModel`, `Engine`, `GenerationRequest`, `generate`,
`SamplingParams`, `TextStreamer`.

KV caches and incremental decoding are in core/model/; rollouts of reinforcement learning in
post/rl/.
"""
