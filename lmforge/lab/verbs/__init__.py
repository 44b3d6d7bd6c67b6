"""Verbs of the lab."""
