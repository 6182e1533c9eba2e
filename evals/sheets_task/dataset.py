"""What is measured of the sheets task: `python -m evals.run --task=sheets`."""

from ..datasets import PackedDataset, PackedProbe
from ..trained import SHEETS as FOLDER
from .task_spec import SHEETS

SHEETS_DATASET = PackedDataset(
    task="sheets",
    folder=FOLDER,
    spec=SHEETS,
    probes={size: PackedProbe(size, f"{size} chunks") for size in ("4", "8", "16")},
    questions={"page": 4, "sheet": 4, "chain": 8, "override": 2, "aggregate": 5, "whole": 3, "list": 2},
    visible=("shape", "ink", "row mark", "column mark"),
)
