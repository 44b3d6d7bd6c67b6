"""Before and beside a run: plan, ladder, bench, compare."""
