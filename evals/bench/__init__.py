"""Benchmarks: `python -m evals.bench --suite=patch`."""
