"""The probes of the main job. Each walks over scenes and fills a `Ledger`; `evals.run` turns it into rows."""

from .deficit import deficit_shape as deficit_shape
from .ledger import Ledger as Ledger
from .repair import compare_repairs as compare_repairs
from .window import probe_recall as probe_recall
from .window import probe_reorder as probe_reorder
from .window import probe_slide as probe_slide
