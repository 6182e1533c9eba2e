"""All figures of the main job."""

from pathlib import Path

from ..results.headline import headline_results
from .figures import Results, accuracy_figures, deficit_figure, rank_figure, recall_figure, reorder_figure, slide_figure
from .hero import hero_figure, pareto_figures


def draw_all(results: Results, out: Path) -> list[Path]:
    """Draws every figure the results allow, in the order a report shows them. `out` is made if missing."""
    makers = (
        pareto_figures,
        rank_figure,
        accuracy_figures,
        reorder_figure,
        slide_figure,
        recall_figure,
        deficit_figure,
    )
    first = hero_figure(headline_results(results) or results, out)
    return [*first, *(path for maker in makers for path in maker(results, out))]
