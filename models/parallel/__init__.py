"""Prefill of long contexts over a mesh axis: chunks apart with selected tokens recomputed, and ring attention.

    over = spread_backbone(backbone, jax.make_mesh((4,), ("chunks",)))
    context = prefill_chunks_apart(over, tokens)  # each device its own chunk
    answer = read_question(over, context, question, ratio=0.15)
    logits, _ = ring_prefill(over, tokens, question)  # exact

Where the chunks' KV is stored, `place_chunk_cache` takes the place of `prefill_chunks_apart`.
"""

from .prefill import ChunkCache as ChunkCache
from .prefill import ChunkLayout as ChunkLayout
from .prefill import MeshBackbone as MeshBackbone
from .prefill import ParallelPrefill as ParallelPrefill
from .prefill import chunk_parallel_prefill as chunk_parallel_prefill
from .prefill import lay_out as lay_out
from .prefill import place_blocks as place_blocks
from .prefill import place_chunk_cache as place_chunk_cache
from .prefill import plan_exchange as plan_exchange
from .prefill import prefill_chunks_apart as prefill_chunks_apart
from .prefill import read_question as read_question
from .prefill import ring_prefill as ring_prefill
from .prefill import spread_backbone as spread_backbone
from .programs import QuestionRead as QuestionRead
from .programs import TokenBlocks as TokenBlocks
from .programs import prefill_chunks as prefill_chunks
from .programs import recompute_and_read as recompute_and_read
from .programs import ring_forward as ring_forward
from .programs import score_context as score_context
from .readouts import ExchangePlan as ExchangePlan
from .readouts import Move as Move
