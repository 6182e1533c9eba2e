"""The small task: its meaning and pixels, the small backbones, their training, and held-out scenes.

The names of `task`, which is NumPy alone, are here too; the rest is imported from its own module.
"""

from .task import ABSENT as ABSENT
from .task import ACTIVE_FILLS as ACTIVE_FILLS
from .task import CELL_PIXELS as CELL_PIXELS
from .task import CELLS as CELLS
from .task import CLEAN_ROWS as CLEAN_ROWS
from .task import COLOUR_NAMES as COLOUR_NAMES
from .task import COLOURS as COLOURS
from .task import DIGITS as DIGITS
from .task import DOUBLE_ON_PAGE as DOUBLE_ON_PAGE
from .task import GLYPHS as GLYPHS
from .task import KINDS as KINDS
from .task import LEGEND_ROWS as LEGEND_ROWS
from .task import LEGENDS as LEGENDS
from .task import MERGE as MERGE
from .task import PALETTE as PALETTE
from .task import ROWS as ROWS
from .task import SINGLE_ON_PAGE as SINGLE_ON_PAGE
from .task import VOCABULARY as VOCABULARY
from .task import Contexts as Contexts
from .task import Questions as Questions
from .task import ask as ask
from .task import handwriting as handwriting
from .task import latest_colours as latest_colours
from .task import leading_colour as leading_colour
from .task import recolour as recolour
from .task import render as render
from .task import sample_contexts as sample_contexts
