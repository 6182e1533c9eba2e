"""Documents drawn with fonts: bills, charts and screens whose cells mean what lists, keys and menus in front say."""

from .drawing import render as render
from .task import KINDS as KINDS
from .task import SIZES as SIZES
from .task import VOCABULARY as VOCABULARY
from .task import Documents as Documents
from .task import DocumentsRecipe as DocumentsRecipe
from .task import ask as ask
from .task import sample_documents as sample_documents
from .task_spec import DOCUMENTS as DOCUMENTS
