"""The probes of the main job. Each walks over scenes and fills a `ResultsTable`; `evals.run` turns it into rows."""

from .comparison import all_arms as all_arms
from .comparison import compare_repairs as compare_repairs
from .comparison import main_arms as main_arms
from .comparison import read_arms as read_arms
from .deficit import deficit_shape as deficit_shape
from .results_table import ResultsTable as ResultsTable
