"""Reuse of repeated segments in the prompts of template-heavy agents (segment reuse, a proposal without experiments).

    store = SegmentStore(backbone, reuse_layers=8)
    prompt = SegmentPrompt.of_text(text, backbone.tokenizer.encode)
    prefill = segment_prefill(backbone, prompt, store)
    store_segments(backbone, prompt, prefill, store)

Needs the extra `segments` (datasketch).
"""

from .plan import ReuseThresholds as ReuseThresholds
from .serve import SegmentDecision as SegmentDecision
from .serve import SegmentPrefill as SegmentPrefill
from .serve import segment_prefill as segment_prefill
from .serve import store_segments as store_segments
from .store import SegmentStore as SegmentStore
from .text import SegmentPrompt as SegmentPrompt
