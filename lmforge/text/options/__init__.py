"""Options of `lmforge prepare`."""
