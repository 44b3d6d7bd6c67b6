"""How a model is spread over ranks, and in which precision it computes."""
