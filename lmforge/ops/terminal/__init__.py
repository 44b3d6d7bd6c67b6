"""What is drawn on a terminal by more than one part of lmforge: cells, bars, sparklines, and an
area that is drawn again.

Begin with `cells.py`: it has text for tables and panels; `live_area.py` keeps some lines at the
bottom of a terminal while others are printed above them. What is shown is elsewhere: the panel of a
training in ops/monitor/console.py, the page of `lmforge top` in ops/verbs/running/top_screen.py.
"""
