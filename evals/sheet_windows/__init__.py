"""A window over the sheets task's images, on hybrids and transformers alike: reorder, slide and recall.

`python -m evals.run --task=sheets --suite=window` measures both kinds of instances on the same contexts and questions.
"""
