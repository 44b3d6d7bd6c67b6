"""A ladder of small runs, and what its losses say about a big one.

Begin with `law.py` (the law, and the one that fits best), then `draws.py` (laws that the losses allow) and `fit.py` (both, with
intervals).

For others: `Point` and `Law` (`law.py`), `fit_points` and `Fit` (`fit.py`).
"""
