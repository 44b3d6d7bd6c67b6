"""The families that lmforge computes, a file for each model_type, whose `FAMILY` describes it
(core/model/family.py). No torch.

A file that is added here is a family: its name is the model_type. Begin with llama.py; each of the
others says how it differs.
"""
