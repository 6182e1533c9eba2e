"""What is measured of documents: `python -m evals.run --task=documents`. The sheets task's probes, and unseen faces."""

from ..datasets import PackedDataset, PackedProbe
from ..sheets_task.dataset import SHEETS_DATASET
from ..trained import DOCUMENTS as FOLDER
from .task_spec import DOCUMENTS

DOCUMENTS_DATASET = PackedDataset(
    task="documents",
    folder=FOLDER,
    spec=DOCUMENTS,
    probes={
        **SHEETS_DATASET.probes,
        "unseen": PackedProbe("4", "4 chunks in faces not seen in training", {"unseen": True}),
    },
    questions={"page": 4, "sheet": 4, "chain": 8, "override": 2, "aggregate": 5, "list": 2},
    visible=("letter", "digit", "item, first part", "item, second part"),
)
