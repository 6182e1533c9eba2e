"""The probes of the main job. Each walks over scenes and fills a `ResultsTable`; `evals.run` turns it into rows."""

from .deficit import deficit_shape as deficit_shape
from .repair import PageReuse as PageReuse
from .repair import arm_count as arm_count
from .repair import compare_repairs as compare_repairs
from .repair import leading as leading
from .results_table import ResultsTable as ResultsTable
from .window import orbit_against_exact as orbit_against_exact
from .window import probe_recall as probe_recall
from .window import probe_reorder as probe_reorder
from .window import probe_slide as probe_slide
