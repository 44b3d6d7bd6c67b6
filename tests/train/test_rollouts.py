"""Metrics of groups of completions, against enumerating all ways to draw some of them."""

import math
from itertools import combinations

import torch

from lmforge.objectives.policy import completion_metric_names, pass_at_k
from tests.seeds import fresh_random


def test_pass_at_k_is_the_share_of_draws_of_k_answers_that_hold_a_pass() -> None:
    draw = fresh_random()
    for _ in range(20):
        samples = draw.randint(2, 7)
        rows = [[draw.choice([True, False, None]) for _ in range(samples)] for _ in range(4)]
        passed = torch.tensor([[each is True for each in row] for row in rows])
        known = torch.tensor([[each is not None for each in row] for row in rows])
        for k in range(1, samples + 1):
            for result, row in zip(pass_at_k(k, passed, known).tolist(), rows, strict=True):
                draws = [any(some) for some in combinations([each for each in row if each is not None], k)]
                assert math.isnan(result) if not draws else math.isclose(result, sum(draws) / len(draws), abs_tol=1e-12)


def test_pass_at_k_is_a_metric_for_powers_of_two_below_the_size_of_a_group() -> None:
    assert [name for name in completion_metric_names(8) if name.startswith("pass")] == ["pass@1", "pass@2", "pass@4", "pass@n"]
    assert [name for name in completion_metric_names(6) if name.startswith("pass")] == ["pass@1", "pass@2", "pass@4", "pass@n"]
    assert [name for name in completion_metric_names(2) if name.startswith("pass")] == ["pass@1", "pass@n"]
