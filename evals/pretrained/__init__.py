"""Reuse on real weights: SmolLM2-135M-Instruct over text that ships with Python and installed packages.

`python -m evals.run --suite=pretrained`. Loaded by that flag alone: it needs the extra `pretrained` and weights.
"""
