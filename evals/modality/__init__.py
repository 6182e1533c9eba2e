"""Modality scope: the sheets task's meaning as images, as video, as rendered text, as words and as sound.

Each way of showing a context is a `TaskSpec` of its own over the same contexts, questions and vocabulary; an instance
is trained for each by one recipe. `python -m evals.run --suite=modality` says where reuse loses anything.
"""

from .task import SIZES as SIZES
from .task_spec import MODALITIES as MODALITIES
