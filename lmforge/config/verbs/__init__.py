"""The options of the verbs that do not train; a file for those that are alike. What they share is in operation.py above."""
