"""Losses of preferences, policies and distillation."""
