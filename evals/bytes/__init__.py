"""Bytes against quality: what to keep of a chunk and its versions, `python -m evals.run --suite=bytes`."""
