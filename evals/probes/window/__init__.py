"""The window's operations: small probes of the default run, and the suite that measures every one of them."""

from .operations import measure_small as measure_small
from .operations import orbit_against_exact as orbit_against_exact
from .parts import ProbeParts as ProbeParts
from .suite import FULL as FULL
from .suite import QUICK as QUICK
from .suite import WindowSizes as WindowSizes
from .suite import measure_window as measure_window
from .suite import work_of as work_of
