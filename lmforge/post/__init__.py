"""Fine-tuning after pretraining: examples, preferences, distillation, reinforcement learning,
rewards, environments.
"""
