"""Tests of lmforge.

Their processes wait for threads as the `lmforge` command does: set before torch is imported.
"""

from lmforge.cli import limit_spinning

limit_spinning()
