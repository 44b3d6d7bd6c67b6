"""The loss of language modelling.

An objective returns a sum over tokens, pairs or completions, never a mean.

Begin with objective.py (the interface of every objective) and language.py (next-token prediction).
logprobs.py has the log-probabilities of labels, top_logprobs.py the likeliest tokens;
fused_passes.py and stored_passes.py have passes over the logits that are compiled, for GPUs and for
CPUs, and sharded_head.py heads that are sharded over ranks. Losses of preferences, policies and
distillation are in post/objectives/; which objective a recipe selects is in core/stages/.
"""
