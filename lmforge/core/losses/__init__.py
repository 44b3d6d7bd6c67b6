"""Losses. Each objective returns a sum over tokens, pairs or completions, never a mean.

Begin with objective.py (the interface of every objective) and language.py (next-token prediction). Other packages use
`NextTokenObjective` (language.py), `PreferenceObjective`, `KTOObjective`, `RewardModelObjective` and the losses of
pairs (preference.py), `PolicyObjective`, `PolicyLossConfig` and the advantages (policy.py), and
`token_logprobs`, `score_text` and `document_sums` (logprobs.py). fused_passes.py and stored_passes.py have passes over the
logits that are compiled, for GPUs and for CPUs, and sharded_head.py heads that are sharded over ranks. Where rewards come from
is in post/rewards/; which objective a recipe selects is in core/stages/.
"""
