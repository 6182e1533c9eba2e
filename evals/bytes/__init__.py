"""Bytes against quality: what to keep of a chunk and of its conditioned versions, `python -m evals.run --suite=bytes`."""
