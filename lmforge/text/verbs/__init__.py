"""`lmforge prepare`."""
