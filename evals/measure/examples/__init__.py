"""Data sets of our own making, with which the harness is tried: `python -m evals.measure.examples`."""
