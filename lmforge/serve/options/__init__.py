"""Options of the verbs that run a model."""
