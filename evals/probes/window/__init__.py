"""The window's operations: small probes of the default run (`basic`), and the suite that measures them all."""

from .basic import orbit_against_exact as orbit_against_exact
from .basic import probe_recall as probe_recall
from .basic import probe_reorder as probe_reorder
from .basic import probe_slide as probe_slide
from .parts import ProbeParts as ProbeParts
from .suite import FULL as FULL
from .suite import QUICK as QUICK
from .suite import WindowSizes as WindowSizes
from .suite import measure_window as measure_window
from .suite import work_of as work_of
