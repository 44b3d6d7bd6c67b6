"""A ladder of small runs, and what its losses say about a big one.

To plan and train one: begin with `rungs.py` (the runs), then `costs.py` and `runs.py` (who trains
them, what they reached). To predict: begin with `law.py` (the law that fits best), then `draws.py`
(laws that the losses allow), `fit.py` (both), `frontier.py` (what follows about the big run),
`downstream.py` (its scores), `prediction.py`, `page.py`. lab/verbs/ladder.py puts them together.

For others: `Point` and `Law` (`law.py`), `fit_points` and `Fit` (`fit.py`), `Target`, `conclusions`
and `compare` (`frontier.py`).
"""
