"""What reuse does to documents: `python -m evals.run --task=documents`. The sheets task's suite, and unseen faces."""

from ..sheets_task.suite import Suite
from ..trained import DOCUMENTS
from .reuse import DocumentReuse

DOCUMENTS_SUITE = Suite(
    task="documents",
    folder=DOCUMENTS,
    probes={
        **{size: (size, f"{size} chunks", {}) for size in ("4", "8", "16")},
        "unseen": ("4", "4 chunks in faces not seen in training", {"unseen": True}),
    },
    questions={"page": 4, "sheet": 4, "chain": 8, "override": 2, "aggregate": 5, "list": 2},
    visible=("letter", "digit", "item, first part", "item, second part"),
    reuse=DocumentReuse,
)
