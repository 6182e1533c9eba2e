"""What reuse costs on a user's own model and data: `python -m evals.measure --model=DIR --data=FILE`."""
