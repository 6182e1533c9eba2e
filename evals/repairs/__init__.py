"""Every published repair on the same pages, at matched tokens and bytes: `python -m evals.run --suite=repairs`."""
