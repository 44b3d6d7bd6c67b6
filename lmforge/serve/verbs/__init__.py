"""Verbs that run a model."""
