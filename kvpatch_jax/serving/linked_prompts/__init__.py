"""Prompts with references, served from a store: MPIC's serving path, and VLCache's caches by digest.

References to stored chunks are linked into a prompt, mended by any repair in one forward, and decoded behind; a
retriever may link more while an answer is decoded.
"""

from .linked_answers import LinkedAnswer as LinkedAnswer
from .linked_answers import LinkedChunkRecord as LinkedChunkRecord
from .linked_answers import PromptServer as PromptServer
from .linked_answers import RetrievalOptions as RetrievalOptions
from .prompt_layout import PromptLayout as PromptLayout
from .request_cache import SUBSTITUTE as SUBSTITUTE
from .request_cache import CachedRequest as CachedRequest
from .request_cache import RequestCache as RequestCache
