"""Prefill of long contexts over devices: each device prefills its own chunks, and few tokens are recomputed.

over = spread_backbone(backbone)
context = prefill_chunks_apart(over, tokens)
answer = read_question(over, context, question, ratio=0.15)
"""

from .prefill import ChunkCache as ChunkCache
from .prefill import MeshBackbone as MeshBackbone
from .prefill import ParallelPrefill as ParallelPrefill
from .prefill import prefill_chunks_apart as prefill_chunks_apart
from .prefill import read_question as read_question
from .prefill import spread_backbone as spread_backbone
