"""What `lmforge distill` has of its own: the teacher, what is stored of it, and batches with what
it says.

The loss is in post/objectives/distillation.py. Begin with batches.py.
"""
