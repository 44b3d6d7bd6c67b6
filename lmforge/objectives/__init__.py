"""Losses. Each objective returns a sum over tokens, pairs or completions, never a mean.

Begin with objective.py (the interface of every objective) and language.py (next-token prediction). Other packages use
`NextTokenObjective` and `score_text` (language.py), `PreferenceObjective`, `RewardModelObjective` and the losses of pairs
(preference.py), `KTOObjective` (kto.py), `PolicyObjective`, `PolicyLossConfig` and the advantages (policy.py), and
`token_logprobs` and `document_sums` (logprobs.py). cross_entropy.py, fused_passes.py and sharded_head.py compute the loss in
chunks, and with a head that is sharded over ranks. Where rewards come from is in rewards/; which objective a recipe selects
is in stages/.
"""
