"""What reuse does to documents: `python -m evals.run --task=documents`. The sheets task's suite, and unseen faces."""

from ..sheets_task.suite import Suite
from ..trained import DOCUMENTS
from .reuse import DocumentReuse

DOCUMENTS_SUITE = Suite(
    task="documents",
    folder=DOCUMENTS,
    # Of the pages that the instance was trained on so far: sixteen cells, one face, black on white.
    probes={
        "4": ("small", "4 chunks", {"variety": 0.0}),
        "unseen": ("small", "4 chunks in faces not seen in training", {"variety": 0.0, "unseen": True}),
    },
    questions={"page": 4, "sheet": 4, "chain": 8, "override": 2, "aggregate": 5, "list": 2},
    visible=("letter", "digit", "item, first part", "item, second part"),
    reuse=DocumentReuse,
)
