"""One HTML file that shows a run, or several side by side: `report.html` in each run, and `lmforge
report`.

Begin with `run_data.py` (what is read from a run directory, as plain values for JSON), then
`page.py` (those values and the page's style and script, web/, as one file). The script draws;
nothing is loaded from elsewhere.

For others: `write_report`, and for the one in a run `write_run_report` and `ReportThread`
(`page.py`); `last_state` (`run_data.py`).

Not here: the metrics and events themselves (core/stages/run_files.py).
"""
