"""Version 2 of the small task: its meaning and pixels, the small backbone, its training, what reuse does to it."""

from .task import KINDS as KINDS
from .task import SIZES as SIZES
from .task import VOCABULARY as VOCABULARY
from .task import SheetsContexts as SheetsContexts
from .task import SheetsQuestions as SheetsQuestions
from .task import ask as ask
from .task import render as render
from .task import sample_contexts as sample_contexts
