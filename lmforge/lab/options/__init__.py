"""Options of the verbs of the lab."""
