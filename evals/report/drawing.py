"""All figures of the main job."""

from pathlib import Path

from .figures import Results, accuracy_figures, deficit_figure, rank_figure, recall_figure, reorder_figure, slide_figure
from .hero import hero_figure, pareto_figures


def draw_all(results: Results, out: Path) -> list[Path]:
    """Draws every figure the results allow, in the order a report shows them. `out` is made if missing."""
    probes = (rank_figure, accuracy_figures, reorder_figure, slide_figure, recall_figure, deficit_figure)
    return [path for maker in (hero_figure, pareto_figures, *probes) for path in maker(results, out)]
